_base_ = 'mmdet::_base_/models/cascade-mask-rcnn_r50_fpn.py'

# Configs add what depends on the size: `backbone.arch` and `neck.in_channels`.
model = dict(
    backbone=dict(_delete_=True, type='mala_mm.MAViT', norm_cfg=dict(type='SyncBN')),
    roi_head=dict(
        bbox_head=[
            dict(
                head,
                type='ConvFCBBoxHead',
                num_shared_convs=4,
                num_shared_fcs=1,
                conv_out_channels=256,
                norm_cfg=dict(type='SyncBN'),
                reg_class_agnostic=False,
                reg_decoded_bbox=True,
                loss_bbox=dict(type='GIoULoss', loss_weight=10.0),
            )
            for head in _base_.model.roi_head.bbox_head
        ]
    ),
)
