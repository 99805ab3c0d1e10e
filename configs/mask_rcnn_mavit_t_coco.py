_base_ = [
    '_base_/models/mask_rcnn_mavit.py',
    'mmdet::_base_/datasets/coco_instance.py',
    '_base_/schedules/mask_rcnn_1x.py',
    '_base_/detection_runtime.py',
]
model = dict(backbone=dict(arch='t'), neck=dict(in_channels=[64, 128, 256, 512]))
