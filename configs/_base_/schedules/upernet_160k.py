_base_ = 'mmseg::_base_/schedules/schedule_160k.py'

# `norm` names the LayerNorms and the BatchNorms of the downsamplings. As published, weight decay
# still acts on the stem's BatchNorms (`patch_embed.proj.{1,4,7,10}`) and on `gamma_*`.
optim_wrapper = dict(
    _delete_=True,  # the base's `clip_grad=None` would not let a child set a dict
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=6e-5, betas=(0.9, 0.999), weight_decay=0.01),
    paramwise_cfg=dict(custom_keys={'norm': dict(decay_mult=0.0)}),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, by_epoch=False, begin=0, end=1500),
    dict(type='PolyLR', power=1.0, eta_min=0.0, by_epoch=False, begin=1500, end=160000),
]
auto_scale_lr = dict(enable=False, base_batch_size=16)
default_hooks = dict(checkpoint=dict(type='mala_mm.ResumableCheckpointHook'))
