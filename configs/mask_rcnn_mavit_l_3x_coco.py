_base_ = [
    '_base_/models/mask_rcnn_mavit.py',
    '_base_/datasets/coco_instance_multiscale_crop.py',
    '_base_/schedules/mask_rcnn_3x.py',
    '_base_/detection_runtime.py',
]
model = dict(backbone=dict(arch='l'), neck=dict(in_channels=[96, 192, 448, 640]))
train_dataloader = dict(batch_size=1)
optim_wrapper = dict(optimizer=dict(lr=2e-4))
auto_scale_lr = dict(base_batch_size=8)
