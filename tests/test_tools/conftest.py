import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import mala_mm

TINY_ARCH = dict(
    _delete_=True,  # the base has a name here
    embed_dims=(16, 16, 32, 32),
    depths=(1, 1, 1, 1),
    num_heads=(1, 1, 1, 1),
    mlp_ratios=(2.0, 2.0, 2.0, 2.0),
    layer_scale_init=(1.0, 1.0, 1.0, 1.0),
    drop_path_rate=0.0,
)

TINY_DETECTOR = """
_base_ = {base!r}
classes = ('kite', 'clock')
pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(64, 64), keep_ratio=True),
    dict(type='LoadAnnotations', with_bbox=True, with_mask={with_mask}),
    dict(
        type='PackDetInputs',
        meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor'),
    ),
]
dataset = dict(
    data_root={data_root!r},
    metainfo=dict(classes=classes),
    ann_file='instances.json',
    data_prefix=dict(img='images/'),
    pipeline=pipeline,
)
loader = dict(batch_size=2, num_workers=0, persistent_workers=False, dataset=dataset)
train_dataloader = val_dataloader = test_dataloader = loader
val_evaluator = test_evaluator = dict(ann_file={ann_file!r})
train_cfg = dict(max_epochs=1)
default_hooks = dict(logger=dict(interval=1))
"""

TINY_SEGMENTOR = """
_base_ = {base!r}
pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(64, 64), keep_ratio=False),
    dict(type='LoadAnnotations', reduce_zero_label=True),
    dict(type='PackSegInputs'),
]
loader = dict(batch_size=2, num_workers=0, persistent_workers=False)
train_dataloader = val_dataloader = test_dataloader = dict(
    loader, dataset=dict(data_root={data_root!r}, pipeline=pipeline)
)
model = dict(
    backbone=dict(arch={arch!r}),
    data_preprocessor=dict(size=(64, 64)),
    neck=dict(in_channels=[16, 16, 32, 32]),
)
randomness = dict(seed=0)
optim_wrapper = dict(optimizer=dict(lr=0.01))
train_cfg = dict(max_iters=8, val_interval=8)
default_hooks = dict(logger=dict(interval=1), checkpoint=dict(interval=8))
"""


@pytest.fixture(scope='session')
def run_tool(root: Path) -> Callable[..., subprocess.CompletedProcess]:
    """Run tools/NAME.py in the working directory `cwd`; stdout holds both streams."""

    def run(name: str, *args: object, cwd: Path) -> subprocess.CompletedProcess:
        # One thread: two that wait for each other on a busy machine take several times as long.
        return subprocess.run(
            [sys.executable, str(root / 'tools' / f'{name}.py'), *map(str, args)],
            cwd=cwd,
            env={**os.environ, 'OMP_NUM_THREADS': '1'},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return run


@pytest.fixture(scope='session')
def tiny_coco(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four grey images of 64x48 pixels, each with one bright rectangle of two classes."""
    folder = tmp_path_factory.mktemp('coco')
    (folder / 'images').mkdir()
    images, annotations = [], []
    for i in range(4):
        x, y, w, h = 8 + 8 * i, 10, 20, 24
        pixels = np.full((48, 64, 3), 80, np.uint8)
        pixels[y : y + h, x : x + w] = (250, 200, 40) if i % 2 else (20, 60, 240)
        Image.fromarray(pixels).save(folder / 'images' / f'{i}.png')
        images.append(dict(id=i, file_name=f'{i}.png', width=64, height=48))
        polygon = [x, y, x + w, y, x + w, y + h, x, y + h]
        annotations.append(
            dict(
                id=i + 1,
                image_id=i,
                category_id=i % 2 + 1,
                bbox=[x, y, w, h],
                area=w * h,
                iscrowd=0,
                segmentation=[polygon],
            )
        )
    categories = [dict(id=1, name='kite'), dict(id=2, name='clock')]
    coco = dict(images=images, annotations=annotations, categories=categories)
    (folder / 'instances.json').write_text(json.dumps(coco))
    return folder


def _write_detector(path: Path, data: Path, base: str, with_mask: bool, model: str) -> Path:
    text = TINY_DETECTOR.format(
        base=mala_mm.config_path(base),
        with_mask=with_mask,
        data_root=f'{data}/',
        ann_file=str(data / 'instances.json'),
    )
    path.write_text(text + model)
    return path


@pytest.fixture(scope='session')
def tiny_mask_rcnn(tiny_coco: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config of one epoch of two iterations, SyncBN as in its base."""
    model = f"""
model = dict(
    backbone=dict(arch={TINY_ARCH!r}),
    neck=dict(in_channels=[16, 16, 32, 32]),
    roi_head=dict(
        bbox_head=dict(num_classes=2, fc_out_channels=32),
        mask_head=dict(num_classes=2, num_convs=1),
    ),
)
"""
    path = tmp_path_factory.mktemp('configs') / 'tiny_mask_rcnn.py'
    return _write_detector(path, tiny_coco, 'mask_rcnn_mavit_t_coco.py', True, model)


@pytest.fixture(scope='session')
def tiny_retinanet(tiny_coco: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config of a detector without masks."""
    model = f"""
model = dict(
    backbone=dict(arch={TINY_ARCH!r}),
    neck=dict(in_channels=[16, 32, 32]),
    bbox_head=dict(num_classes=2, stacked_convs=1),
    test_cfg=dict(score_thr=0.0),
)
"""
    path = tmp_path_factory.mktemp('configs') / 'tiny_retinanet.py'
    return _write_detector(path, tiny_coco, 'retinanet_mavit_t_coco.py', False, model)


@pytest.fixture(scope='session')
def tiny_ade20k(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two images of 64x64 pixels for each split: other (0) above, wall (1) and sky (3) below."""
    folder = tmp_path_factory.mktemp('ade20k')
    label = np.zeros((64, 64), np.uint8)
    label[8:, :32], label[8:, 32:] = 1, 3
    pixels = np.array([(80, 80, 80), (200, 30, 30), (0, 0, 0), (30, 30, 200)], np.uint8)[label]
    for split in ('training', 'validation'):
        for name, array, suffix in (('images', pixels, 'jpg'), ('annotations', label, 'png')):
            (folder / name / split).mkdir(parents=True)
            for i in range(2):
                Image.fromarray(array).save(folder / name / split / f'{i}.{suffix}')
    return folder


@pytest.fixture(scope='session')
def tiny_semfpn(tiny_ade20k: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config of eight iterations, SyncBN as in its base."""
    path = tmp_path_factory.mktemp('configs') / 'tiny_semfpn.py'
    base = mala_mm.config_path('semfpn_mavit_t_ade20k.py')
    path.write_text(TINY_SEGMENTOR.format(base=base, data_root=str(tiny_ade20k), arch=TINY_ARCH))
    return path
