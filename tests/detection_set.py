"""A small data set in COCO's format that a test makes and damages."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

WIDTH, HEIGHT = 64, 48


class DetectionSet:
    """Two images of 64x48 pixels with one object each, of the classes kite and clock.

    A test changes `coco`, `cfg` or the files in `images`; `write` then writes `train.json` and a
    config that uses it to train and to evaluate.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.images = folder / 'images'
        self.images.mkdir()
        self.coco: Any = dict(
            images=[
                dict(id=1, file_name='a.png', width=WIDTH, height=HEIGHT),
                dict(id=2, file_name='b.png', width=WIDTH, height=HEIGHT),
            ],
            annotations=[self.object(1, 1, 1), self.object(2, 2, 2)],
            categories=[dict(id=1, name='kite'), dict(id=2, name='clock')],
        )
        for name in ('a.png', 'b.png'):
            self.image(name)
        loading = [
            dict(type='LoadImageFromFile'),
            dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
            dict(type='Resize', scale=(128, 96), keep_ratio=True),
            dict(type='PackDetInputs'),
        ]
        self.dataset = dict(
            type='CocoDataset',
            data_root=str(folder),
            ann_file='train.json',
            data_prefix=dict(img='images/'),
            metainfo=dict(classes=('kite', 'clock')),
            filter_cfg=dict(filter_empty_gt=True, min_size=0),
            pipeline=loading,
        )
        self.val: dict = {}  # in what the dataset of val_dataloader differs
        self.evaluator = dict(
            type='CocoMetric', ann_file=str(folder / 'train.json'), metric=['bbox', 'segm']
        )
        self.heads = dict(
            bbox_head=dict(type='Shared2FCBBoxHead', num_classes=2),
            mask_head=dict(type='FCNMaskHead', num_classes=2),
        )

    @staticmethod
    def object(object_id: int, image_id: int, category_id: int, **fields: Any) -> dict:
        """An annotation of 20x24 pixels at (8, 10)."""
        polygon = [8, 10, 28, 10, 28, 34, 8, 34]
        box = dict(bbox=[8, 10, 20, 24], area=480, iscrowd=0, segmentation=[polygon])
        return dict(id=object_id, image_id=image_id, category_id=category_id, **{**box, **fields})

    def image(self, name: str, pixels: np.ndarray | None = None, **options: Any) -> None:
        """Write an image file, by default grey with a bright rectangle where the object is."""
        if pixels is None:
            pixels = np.full((HEIGHT, WIDTH, 3), 80, np.uint8)
            pixels[10:34, 8:28] = 250
        Image.fromarray(pixels).save(self.images / name, **options)

    def cut(self, name: str, size: int) -> None:
        """Keep the first bytes of a file."""
        path = self.images / name
        path.write_bytes(path.read_bytes()[:size])

    def resize(self, width: int, height: int) -> None:
        """Give the first image another size, with one object of one pixel."""
        self.image('a.png', np.full((height, width, 3), 80, np.uint8))
        self.coco['images'][0].update(width=width, height=height)
        self.coco['annotations'][0].update(
            bbox=[0, 0, 1, 1], area=1, segmentation=[[0, 0, 1, 0, 1, 1, 0, 1]]
        )

    def first(self, **fields: Any) -> None:
        """Change the first annotation."""
        self.coco['annotations'][0].update(fields)

    def config(self) -> dict:
        return dict(
            default_scope='mmdet',
            model=dict(type='MaskRCNN', rpn_head=dict(num_classes=1), roi_head=self.heads),
            train_dataloader=dict(dataset=self.dataset),
            val_dataloader=dict(dataset={**self.dataset, 'test_mode': True, **self.val}),
            val_evaluator=self.evaluator,
        )

    def write(self) -> Path:
        """Write the annotation file, unless a test has, and return the config's path."""
        ann_file = self.folder / 'train.json'
        if self.coco is not None:
            ann_file.write_text(json.dumps(self.coco))
        path = self.folder / 'config.py'
        path.write_text('\n'.join(f'{key} = {value!r}' for key, value in self.config().items()))
        return path
