_base_ = 'mmdet::_base_/models/retinanet_r50_fpn.py'

# Configs add what depends on the size: `backbone.arch` and `neck.in_channels`.
# The published configs ask the backbone for all four outputs and skip the first one with
# `start_level=1`, which leaves its norm without a gradient. The FPN sees the same maps here.
model = dict(
    backbone=dict(
        _delete_=True,
        type='mala_mm.MAViT',
        out_indices=(1, 2, 3),
        norm_cfg=dict(type='SyncBN'),
    ),
    neck=dict(start_level=0),
)
