_base_ = 'mmseg::_base_/schedules/schedule_80k.py'

optim_wrapper = dict(
    _delete_=True,  # the base's `clip_grad=None` would not let a child set a dict
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=1e-4, weight_decay=1e-4),
)
param_scheduler = [
    dict(type='PolyLR', power=0.9, eta_min=1e-6, by_epoch=False, begin=0, end=80000),
]
auto_scale_lr = dict(enable=False, base_batch_size=16)
default_hooks = dict(checkpoint=dict(type='mala_mm.ResumableCheckpointHook'))
