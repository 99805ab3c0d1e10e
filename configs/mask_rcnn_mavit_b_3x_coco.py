_base_ = [
    '_base_/models/mask_rcnn_mavit.py',
    '_base_/datasets/coco_instance_multiscale_crop.py',
    '_base_/schedules/mask_rcnn_3x.py',
    '_base_/detection_runtime.py',
]
model = dict(backbone=dict(arch='b'), neck=dict(in_channels=[96, 192, 384, 512]))
