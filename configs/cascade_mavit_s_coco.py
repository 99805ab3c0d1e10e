_base_ = [
    '_base_/models/cascade_mavit.py',
    '_base_/datasets/coco_instance_multiscale_crop.py',
    '_base_/schedules/cascade_3x.py',
    '_base_/detection_runtime.py',
]
model = dict(backbone=dict(arch='s'), neck=dict(in_channels=[64, 128, 320, 512]))
