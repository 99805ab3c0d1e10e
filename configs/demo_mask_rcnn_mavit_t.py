_base_ = 'mask_rcnn_mavit_t_coco.py'

# Mask R-CNN small enough to learn the drawn scenes of tools/make_demo_data.py from random weights
# in minutes on two CPU cores.
data_root = 'data/coco/'  # tools/demo.py runs in the folder that holds the data
metainfo = dict(
    classes=('stop sign', 'sports ball', 'kite', 'banana', 'donut', 'clock'),
    palette=[
        (220, 20, 60),
        (255, 140, 0),
        (0, 160, 80),
        (240, 220, 0),
        (255, 80, 200),
        (0, 80, 255),
    ],
)
num_classes = len(metainfo['classes'])
scale = (192, 144)
channels = 128

model = dict(
    backbone=dict(drop_path_rate=0.0),
    neck=dict(out_channels=channels),
    rpn_head=dict(
        in_channels=channels,
        feat_channels=channels,
        anchor_generator=dict(scales=[4]),  # from 16 pixels on; the smallest objects have 28
    ),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=channels),
        bbox_head=dict(in_channels=channels, fc_out_channels=256, num_classes=num_classes),
        mask_roi_extractor=dict(out_channels=channels),
        mask_head=dict(
            num_convs=2,
            in_channels=channels,
            conv_out_channels=channels,
            num_classes=num_classes,
        ),
    ),
    train_cfg=dict(
        rpn=dict(sampler=dict(num=64)),
        rpn_proposal=dict(nms_pre=400, max_per_img=150),
        rcnn=dict(sampler=dict(num=48)),
    ),
    test_cfg=dict(rpn=dict(nms_pre=400, max_per_img=150)),
)

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='Resize', scale=scale, keep_ratio=True),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackDetInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=scale, keep_ratio=True),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(
        type='PackDetInputs',
        meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor'),
    ),
]
train_dataloader = dict(
    batch_size=4,
    num_workers=0,
    persistent_workers=False,
    dataset=dict(
        data_root=data_root,
        metainfo=metainfo,
        ann_file='annotations/train.json',
        data_prefix=dict(img='train/'),
        filter_cfg=dict(filter_empty_gt=False),
        pipeline=train_pipeline,
    ),
)
test_dataloader = dict(
    num_workers=0,
    persistent_workers=False,
    dataset=dict(
        data_root=data_root,
        metainfo=metainfo,
        ann_file='annotations/val.json',
        data_prefix=dict(img='val/'),
        pipeline=test_pipeline,
    ),
)
test_evaluator = dict(ann_file=data_root + 'annotations/val.json')
# Evaluated once, on the checkpoint, by tools/test.py.
val_dataloader = val_evaluator = val_cfg = None

iterations = 200
train_cfg = dict(_delete_=True, type='IterBasedTrainLoop', max_iters=iterations)
optim_wrapper = dict(optimizer=dict(lr=1e-3, fused=True), clip_grad=dict(max_norm=1.0))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=50),
    dict(type='CosineAnnealingLR', eta_min=0.0, by_epoch=False, begin=50, end=iterations),
]
default_hooks = dict(
    logger=dict(interval=2),
    checkpoint=dict(by_epoch=False, interval=iterations),
    visualization=dict(score_thr=0.5),
)
visualizer = dict(line_width=2, alpha=0.5)
log_processor = dict(by_epoch=False, window_size=20)
