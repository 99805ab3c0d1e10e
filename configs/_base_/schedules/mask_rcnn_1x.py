_base_ = 'mmdet::_base_/schedules/schedule_1x.py'

# `norm` names the LayerNorms and the BatchNorms of the downsamplings. As published, weight decay
# still acts on the stem's BatchNorms (`patch_embed.proj.{1,4,7,10}`) and on `gamma_*`.
optim_wrapper = dict(
    optimizer=dict(_delete_=True, type='AdamW', lr=4e-4, betas=(0.9, 0.999), weight_decay=0.05),
    paramwise_cfg=dict(custom_keys={'norm': dict(decay_mult=0.0)}),
)
