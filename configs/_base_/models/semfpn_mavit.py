_base_ = 'mmseg::_base_/models/fpn_r50.py'

# Configs add what depends on the size: `backbone.arch` and `neck.in_channels`.
data_preprocessor = dict(size=(512, 512))
model = dict(
    data_preprocessor=data_preprocessor,
    pretrained=None,
    backbone=dict(_delete_=True, type='mala_mm.MAViT', norm_cfg=dict(type='SyncBN')),
    decode_head=dict(num_classes=150),
)
