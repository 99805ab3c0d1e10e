_base_ = 'mmdet::_base_/datasets/coco_instance.py'

scales = [(480 + 32 * step, 1333) for step in range(11)]  # short side 480, 512, ..., 800
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='RandomFlip', prob=0.5),
    dict(
        type='RandomChoice',
        transforms=[
            [dict(type='RandomChoiceResize', scales=scales, keep_ratio=True)],
            [
                # The long side is no limit here: 4200 is far above what these short sides reach.
                dict(
                    type='RandomChoiceResize',
                    scales=[(400, 4200), (500, 4200), (600, 4200)],
                    keep_ratio=True,
                ),
                dict(
                    type='RandomCrop',
                    crop_type='absolute_range',
                    crop_size=(384, 600),
                    allow_negative_crop=True,
                ),
                dict(type='RandomChoiceResize', scales=scales, keep_ratio=True),
            ],
        ],
    ),
    dict(type='PackDetInputs'),
]
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
