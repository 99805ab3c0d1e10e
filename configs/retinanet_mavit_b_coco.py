_base_ = [
    '_base_/models/retinanet_mavit.py',
    'mmdet::_base_/datasets/coco_detection.py',
    '_base_/schedules/retinanet_1x.py',
    '_base_/detection_runtime.py',
]
model = dict(backbone=dict(arch='b'), neck=dict(in_channels=[192, 384, 512]))
