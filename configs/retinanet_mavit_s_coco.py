_base_ = [
    '_base_/models/retinanet_mavit.py',
    'mmdet::_base_/datasets/coco_detection.py',
    '_base_/schedules/retinanet_1x.py',
    '_base_/detection_runtime.py',
]
model = dict(backbone=dict(arch='s'), neck=dict(in_channels=[128, 320, 512]))
