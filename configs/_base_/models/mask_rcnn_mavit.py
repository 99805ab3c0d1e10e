_base_ = 'mmdet::_base_/models/mask-rcnn_r50_fpn.py'

# Configs add what depends on the size: `backbone.arch` and `neck.in_channels`.
model = dict(
    backbone=dict(_delete_=True, type='mala_mm.MAViT', norm_cfg=dict(type='SyncBN')),
)
