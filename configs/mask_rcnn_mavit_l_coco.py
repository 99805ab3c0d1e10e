_base_ = [
    '_base_/models/mask_rcnn_mavit.py',
    'mmdet::_base_/datasets/coco_instance.py',
    '_base_/schedules/mask_rcnn_1x.py',
    '_base_/detection_runtime.py',
]
model = dict(backbone=dict(arch='l'), neck=dict(in_channels=[96, 192, 448, 640]))
