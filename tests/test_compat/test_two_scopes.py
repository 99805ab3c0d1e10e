"""A detector and a segmentor in one process, in any order, through the inferencers' interfaces."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from mmengine.config import Config
from mmengine.registry import DefaultScope
from PIL import Image
from synthetic import TINY

import mala_mm

# The user's own pipelines, in which no transform names its scope
DETECTOR = """
_base_ = {base!r}
arch = dict(_delete_=True, **{tiny!r})
model = dict(
    backbone=dict(arch=arch),
    neck=dict(in_channels=[16, 16, 32]),
    bbox_head=dict(num_classes=80, stacked_convs=1),
)
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(64, 64), keep_ratio=True),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='PackDetInputs', meta_keys=('img_id', 'ori_shape', 'img_shape', 'scale_factor')),
]
test_dataloader = dict(dataset=dict(pipeline=test_pipeline))
"""
SEGMENTOR = """
_base_ = {base!r}
arch = dict(_delete_=True, **{tiny!r})
model = dict(
    data_preprocessor=dict(size=(64, 64)),
    backbone=dict(arch=arch),
    neck=dict(in_channels=[8, 16, 16, 32]),
)
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(64, 64), keep_ratio=True),
    dict(type='LoadAnnotations', reduce_zero_label=True),
    dict(type='PackSegInputs'),
]
test_dataloader = dict(dataset=dict(pipeline=test_pipeline))
"""


@pytest.fixture(autouse=True)
def _in_files(tmp_path, monkeypatch):
    """Work in a folder with both configs and an image; leave the default scope as it was."""
    monkeypatch.chdir(tmp_path)
    for name, text, base in (
        ('detector.py', DETECTOR, 'retinanet_mavit_t_coco.py'),
        ('segmentor.py', SEGMENTOR, 'semfpn_mavit_t_ade20k.py'),
    ):
        Path(name).write_text(text.format(base=mala_mm.config_path(base), tiny=TINY))
    Image.fromarray(np.full((48, 64, 3), 80, np.uint8)).save('image.png')
    with DefaultScope.overwrite_default_scope('mmengine'):
        yield


def detector() -> Callable[[], bool]:
    from mmdet.apis import inference_detector, init_detector

    model = init_detector('detector.py', device='cpu')
    return lambda: inference_detector(model, 'image.png').pred_instances.scores.ndim == 1


def segmentor() -> Callable[[], bool]:
    from mmseg.apis import inference_model, init_model

    model = init_model('segmentor.py', device='cpu')
    return lambda: inference_model(model, 'image.png').pred_sem_seg.data.shape == (1, 48, 64)


def detection_inferencer() -> Callable[[], bool]:
    from mmdet.apis import DetInferencer

    infer = DetInferencer('detector.py', device='cpu', show_progress=False)
    return lambda: 'bboxes' in infer('image.png', no_save_vis=True)['predictions'][0]


def segmentation_inferencer() -> Callable[[], bool]:
    from mmseg.apis import MMSegInferencer

    infer = MMSegInferencer('segmentor.py', device='cpu')
    infer.show_progress = False
    return lambda: infer('image.png')['predictions'].shape == (48, 64)


@pytest.mark.parametrize(
    'order',
    [
        (detector, segmentor, detection_inferencer),
        (segmentor, detector, segmentation_inferencer),
    ],
)
def test_any_order(order):
    """The model that was made last sets the scope for all of them."""
    made = []
    for make in order:
        made.append(make())
        assert all(use() for use in made)


def test_pipelines_name_their_scope(tmp_path):
    cfg = Config.fromfile('detector.py')
    assert {transform['_scope_'] for transform in cfg.test_pipeline} == {'mmdet'}
    assert cfg.test_dataloader.dataset.pipeline == cfg.test_pipeline
    Path('wrapped.py').write_text(
        "default_scope = 'mmseg'\n"
        "inner = dict(pipeline=[dict(type='A'), dict(type='B', _scope_='mmdet')])\n"
        'test_dataloader = dict(dataset=dict(dataset=inner))'
    )
    pipeline = Config.fromfile('wrapped.py').test_dataloader.dataset.dataset.pipeline
    assert [transform['_scope_'] for transform in pipeline] == ['mmseg', 'mmdet']


def test_config_without_a_scope_stays_as_it_is():
    Path('plain.py').write_text("test_pipeline = [dict(type='A')]\ntest_dataloader = None")
    assert Config.fromfile('plain.py').test_pipeline == [dict(type='A')]


@pytest.mark.parametrize(
    'loader',
    ["[dict(dataset=dict(type='A'))]", "dict(dataset=[dict(type='A')])", "dict(dataset='A')"],
)
def test_other_projects_configs_can_be_read(loader):
    Path('other.py').write_text(f"default_scope = 'mmagic'\ntest_dataloader = {loader}")
    Path('same.py').write_text(f'test_dataloader = {loader}')
    assert Config.fromfile('other.py').test_dataloader == (
        Config.fromfile('same.py').test_dataloader
    )
