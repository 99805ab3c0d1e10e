"""Projects that inherit a shipped config, on real photographs, in a few iterations."""

import json

import numpy as np
import pytest
from PIL import Image
from runs import logged_metrics, logged_steps

FRUITS = """
_base_ = 'mala_mm::mask_rcnn_mavit_t_coco.py'
data_root = {data_root!r}
metainfo = dict(classes=('date', 'fig', 'hazelnut'))
pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='Resize', scale=(128, 96), keep_ratio=True),
    dict(
        type='PackDetInputs',
        meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor'),
    ),
]
proposals = dict(nms_pre=100, max_per_img=30)
model = dict(
    roi_head=dict(bbox_head=dict(num_classes=3), mask_head=dict(num_classes=3)),
    train_cfg=dict(
        rpn=dict(sampler=dict(num=64)), rpn_proposal=proposals, rcnn=dict(sampler=dict(num=16))
    ),
    test_cfg=dict(rpn=proposals, rcnn=dict(score_thr=0.0)),
)
loader = dict(num_workers=0, persistent_workers=False)
dataset = dict(
    data_root=data_root, metainfo=metainfo, data_prefix=dict(img='images/'), pipeline=pipeline
)
train_dataloader = dict(loader, batch_size=2, dataset=dict(dataset, ann_file='train.json'))
val_dataloader = dict(loader, dataset=dict(dataset, ann_file='val.json'))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + 'val.json')
test_evaluator = val_evaluator
train_cfg = dict(max_epochs=1)
default_hooks = dict(logger=dict(interval=1))
"""

STREET = """
_base_ = 'mala_mm::upernet_mavit_t_ade20k.py'
bn = dict(type='BN')
crop = (64, 64)
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', reduce_zero_label=True),
    dict(type='RandomResize', scale=(480, 360), ratio_range=(0.5, 1.0), keep_ratio=True),
    dict(type='RandomCrop', crop_size=crop, cat_max_ratio=0.75),
    dict(type='PackSegInputs'),
]
pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(160, 120), keep_ratio=True),
    dict(type='LoadAnnotations', reduce_zero_label=True),
    dict(type='PackSegInputs'),
]
model = dict(
    data_preprocessor=dict(size=crop),
    backbone=dict(norm_cfg=bn),
    decode_head=dict(channels=64, norm_cfg=bn),
    auxiliary_head=dict(channels=32, norm_cfg=bn),
)
loader = dict(num_workers=0, persistent_workers=False)
train_dataloader = dict(
    loader, batch_size=4, dataset=dict(data_root={data_root!r}, pipeline=train_pipeline)
)
val_dataloader = dict(loader, dataset=dict(data_root={data_root!r}, pipeline=pipeline))
test_dataloader = val_dataloader
optim_wrapper = dict(optimizer=dict(lr=2e-4), clip_grad=dict(max_norm=1.0))
param_scheduler = [dict(type='PolyLR', power=1.0, eta_min=0.0, begin=0, end=8, by_epoch=False)]
train_cfg = dict(max_iters=8, val_interval=8)
default_hooks = dict(logger=dict(interval=1), checkpoint=dict(interval=8))
"""


@pytest.fixture
def child(tmp_path):
    def write(name: str, text: str, data_root: str):
        path = tmp_path / f'{name}.py'
        path.write_text(text.format(data_root=data_root))
        return path

    return write


def test_fruits(shared, child, run_tool, tmp_path):
    config = child('fruits', FRUITS, f'{shared}/data/fruits_coco/')
    log = run_tool('train', config, cwd=tmp_path)
    assert log.returncode == 0, log.stdout
    work_dir = tmp_path / 'work_dirs' / 'fruits'
    assert logged_steps(work_dir) == [1, 2, 3, 4, 5, 6]
    log = run_tool('test', config, work_dir / 'epoch_1.pth', cwd=tmp_path)
    assert log.returncode == 0, log.stdout
    metrics = logged_metrics(work_dir)
    for kind in ('bbox', 'segm'):
        assert 0 <= metrics[f'coco/{kind}_mAP'] <= 1


def test_street(shared, child, run_tool, tmp_path):
    """The figures of tools/test.py are those of the training's validation, and of the pictures."""
    folder = shared / 'data' / 'street_ade20k'
    config = child('street', STREET, str(folder))
    log = run_tool('train', config, cwd=tmp_path)
    assert log.returncode == 0, log.stdout
    work_dir = tmp_path / 'work_dirs' / 'street'
    scalars = next(work_dir.glob('*/vis_data/scalars.json')).read_text()
    validated = json.loads(scalars.splitlines()[-1])
    log = run_tool('test', config, work_dir / 'iter_8.pth', '--out', 'predicted', cwd=tmp_path)
    assert log.returncode == 0, log.stdout
    metrics = logged_metrics(work_dir)

    right = total = 0
    for path in sorted((folder / 'annotations' / 'validation').glob('*.png')):
        truth = np.asarray(Image.open(path)).astype(int)
        # mmseg writes labels without background as ADE20K has them, 1..150
        predicted = np.asarray(Image.open(tmp_path / 'predicted' / path.name)).astype(int)
        right += (predicted == truth)[truth > 0].sum()
        total += (truth > 0).sum()
    assert metrics['aAcc'] == pytest.approx(100 * right / total, abs=0.01)
    for name in ('aAcc', 'mIoU', 'mAcc'):
        assert metrics[name] == pytest.approx(validated[name], abs=1e-3)
