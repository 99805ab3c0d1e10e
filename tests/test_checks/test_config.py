"""Mistakes in a config, one row each: what the check says of it.

To add a case, write a row of the settings that break a whole config and of the message.
"""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from mmengine.config import Config
from synthetic import TINY

import mala_mm
from mala_mm.checks.config import _misfit, check_config
from mala_mm.checks.findings import MAX_MESSAGE, Finding

CHANNELS = list(TINY['embed_dims'])
CONFIGS = {
    'mask_rcnn': 'mask_rcnn_mavit_t_coco.py',
    'retinanet': 'retinanet_mavit_t_coco.py',
    'semfpn': 'semfpn_mavit_t_ade20k.py',
    'upernet': 'upernet_mavit_t_ade20k.py',
}
FITTING = {
    'mask_rcnn': {'neck__in_channels': CHANNELS},
    'retinanet': {'neck__in_channels': CHANNELS[1:]},
    'semfpn': {'neck__in_channels': CHANNELS},
    'upernet': {'decode_head__in_channels': CHANNELS, 'auxiliary_head__in_channels': CHANNELS[2]},
}


def model(**settings: Any) -> dict[str, Any]:
    return {f'model.{name.replace("__", ".")}': value for name, value in settings.items()}


def loaders(**settings: Any) -> dict[str, Any]:
    return {f'train_dataloader.{n.replace("__", ".")}': value for n, value in settings.items()}


def arch(**settings: Any) -> dict[str, Any]:
    return model(backbone__arch=dict(TINY, **settings))


ERRORS = [
    # (config, settings, message and places)
    # the backbone
    (
        'mask_rcnn',
        model(backbone__arch='x'),
        'model.backbone: arch must be .* t, s, b, l .* got .x',
    ),
    (
        'mask_rcnn',
        arch(depths=(1, 1)),
        r"model\.backbone: arch\['depths'\] must be 4 whole numbers",
    ),
    ('mask_rcnn', arch(num_heads=(0, 1, 1, 1)), r"arch\['num_heads'\] .* got \(0, 1, 1, 1\)"),
    ('mask_rcnn', model(backbone__out_indices=(0, 4)), r'backbone: out_indices .* got \(0, 4\)'),
    ('semfpn', model(backbone__frozen_stages=7), 'backbone: frozen_stages must be .* got 7'),
    ('semfpn', model(backbone__type='MAVit'), "backbone: type 'MAVit' is not registered"),
    ('semfpn', model(backbone__type='ResNett'), 'did you mean ResNet'),
    ('semfpn', model(backbone__ach='t'), "backbone: MAViT.* unexpected keyword argument 'ach'"),
    ('semfpn', model(backbone__norm_cfg=dict(type='BNN')), r'backbone: KeyError: .*norm\.py'),
    # channels
    (
        'mask_rcnn',
        model(neck__in_channels=[64, 128, 256, 512]),
        r'model\.neck\.in_channels=\[64, 128, 256, 512\] does not fit its input: write '
        r'in_channels=\[8, 16, 16, 32\], as they come from model\.backbone',
    ),
    ('mask_rcnn', model(backbone__out_indices=(1, 2, 3)), r'write in_channels=\[16, 16, 32\]'),
    ('retinanet', model(neck__out_channels=128), r'bbox_head\.in_channels=256 .*=128.*\.neck'),
    ('mask_rcnn', model(rpn_head__in_channels=64), r'rpn_head\.in_channels=64 .* in_channels=256'),
    (
        'mask_rcnn',
        model(roi_head__bbox_roi_extractor__out_channels=64),
        r'roi_head\.bbox_roi_extractor\.out_channels=64 does not fit .*: write 256',
    ),
    ('mask_rcnn', model(roi_head__bbox_head__in_channels=64), r'bbox_head\.in_channels=64 .*=256'),
    ('mask_rcnn', model(roi_head__mask_head__in_channels=64), r'mask_head\.in_channels=64 .*=256'),
    (
        'upernet',
        model(decode_head__in_channels=[8, 16, 16, 16]),
        r'write in_channels=\[8, 16, 16, 3',
    ),
    ('upernet', model(auxiliary_head__in_channels=64), r'auxiliary_head\.in_channels=64 .*=16'),
    ('upernet', model(auxiliary_head__in_index=5), r'in_index=5 names maps .* expected 0\.\.3'),
    ('semfpn', model(decode_head__in_channels=[64] * 4), r'=\[256, 256, 256, 256\], .*model\.neck'),
    # other parts of the model
    ('semfpn', {'model': None}, 'model is missing'),
    ('semfpn', model(decode_head__type='FPNHed'), "decode_head: type 'FPNHed' .* mean FPNHead"),
    ('semfpn', model(decode_head__loss_decode__type='CELoss'), "loss_decode: type 'CELoss'"),
    (
        'mask_rcnn',
        model(rpn_head__anchor_generator__type='AnchorGen'),
        "rpn_head: type 'AnchorGen' is not registered, did you mean .*AnchorGenerator",
    ),
    (
        'upernet',
        loaders(batch_size=1),
        r'decode_head: batch norm .* set train_dataloader.batch_siz',
    ),
    # weights
    (
        'semfpn',
        model(backbone__init_cfg=dict(type='Pretrained', checkpoint='gone.pth')),
        'checkpoint gone.pth does not exist',
    ),
    ('semfpn', model(backbone__init_cfg='gone.pth'), 'checkpoint gone.pth does not exist'),
    ('semfpn', model(backbone__init_cfg=dict(type='Pretrained')), 'needs a checkpoint=PATH_OR_URL'),
    ('semfpn', model(backbone__init_cfg=dict(type='TruncNorm')), 'did you mean TruncNormal'),
    (
        'semfpn',
        model(neck__init_cfg=[dict(type='Xavir', layer='Conv2d')]),
        r'init_cfg\.0: .*Xavier',
    ),
    ('semfpn', model(neck__init_cfg=3), 'init_cfg=3, expected a dict with a type'),
    (
        'semfpn',
        model(neck__init_cfg=dict(type='Pretrained', checkpoint='gone.pth')),
        r'model\.neck\.init_cfg\.checkpoint=gone\.pth does not exist',
    ),
    # data loaders
    (
        'semfpn',
        loaders(num_workers=0),
        r'train_dataloader\.persistent_workers=True with num_worker',
    ),
    (
        'semfpn',
        loaders(num_workers=0, persistent_workers=False, prefetch_factor=2),
        'prefetch_factor=2 with num_workers=0',
    ),
    ('semfpn', loaders(batch_size=0), 'batch_size=0, expected a whole number from 1'),
    ('semfpn', loaders(sampler__type='InfiniteSample'), 'did you mean InfiniteSampler'),
    ('semfpn', loaders(dataset=None), r'train_dataloader\.dataset is missing'),
    ('semfpn', loaders(dataset__data_root='none'), r'data_root=none is no folder'),
    ('semfpn', loaders(dataset__type='ADE20K'), "'ADE20K' is not registered, did you mean ADE20KD"),
    ('semfpn', loaders(dataset__img_sufix='.png'), "unexpected keyword argument 'img_sufix'"),
    ('semfpn', loaders(dataset__metainfo=dict(classes='wall')), r"'wall' is a text.*\('wall',\)"),
    ('semfpn', loaders(dataset__metainfo=dict(CLASSES=('wall',))), 'CLASSES is not read'),
    ('semfpn', loaders(dataset__metainfo=dict(classes=('Wall',))), 'did you mean wall'),
    ('semfpn', {'val_dataloader.dataset.type': 'BaseSegDataset'}, 'without metainfo.classes'),
    (
        'semfpn',
        loaders(dataset__pipeline=[dict(type='LoadImage')]),
        "'LoadImage' is not registered",
    ),
    (
        'mask_rcnn',
        loaders(dataset__pipeline=[dict(type='Resize', sale=(8, 8))]),
        r"unexpected keyword argument 'sale' train_dataloader\.dataset\.pipeline\.0",
    ),
    (
        'mask_rcnn',
        loaders(dataset=dict(type='RepeatDataset', dataset=dict(type='Coco'))),
        r"type 'Coco' is not registered",
    ),
    # evaluation
    ('mask_rcnn', {'val_evaluator.ann_file': 'none.json'}, r'val_evaluator\.ann_file=none\.json'),
    ('mask_rcnn', {'val_evaluator.type': None}, r"val_evaluator: type 'None' is not registered"),
    ('semfpn', loaders(dataset__pipeline=['Resize']), r"pipeline\.0='Resize', expected a dict"),
    ('semfpn', {'train_cfg.type': 'json'}, "train_cfg: type 'json' is not registered"),  # a module
    ('semfpn', {'val_evaluator.type': 'IoU'}, "val_evaluator: type 'IoU'"),
    ('semfpn', {'val_cfg': None}, 'val_cfg, val_evaluator belong together, but val_cfg is missing'),
    ('semfpn', {'val_evaluator.iou_metrics': ['mIou']}, r"names 'mIou', .* expected mIoU, mDice"),
    (
        'mask_rcnn',
        {'default_hooks.checkpoint.save_best': 'bbox_mAP'},
        r"save_best='bbox_mAP' is no result .* expected 'coco/bbox_mAP'",
    ),
    ('semfpn', model(test_cfg=None), r'model\.test_cfg\.mode=None, .*: expected .whole. or .slide'),
    (
        'upernet',
        model(test_cfg=dict(mode='slide', crop_size=(512, 512))),
        r"model\.test_cfg\.mode='slide' without stride, .* set crop_size",
    ),
    # optimization
    ('semfpn', {'optim_wrapper': None}, 'but optim_wrapper is missing'),
    ('semfpn', {'optim_wrapper.optimizer.type': 'AdmW'}, 'did you mean AdamW'),
    (
        'semfpn',
        {'optim_wrapper.optimizer.lrr': 1.0},
        "AdamW has no argument 'lrr', did you mean lr",
    ),
    ('semfpn', {'optim_wrapper.type': 'AmpWrapper'}, "optim_wrapper: type 'AmpWrapper'"),
    ('semfpn', {'param_scheduler': [dict(type='PolyLRR')]}, r'param_scheduler\.0: .*mean PolyLR'),
    ('semfpn', {'train_cfg.type': 'IterLoop'}, "train_cfg: type 'IterLoop'"),
    ('semfpn', {'train_cfg.max_epoch': 2}, "no argument 'max_epoch'"),
    (
        'mask_rcnn',
        {'optim_wrapper.constructor': 'LearningRateDecayOptimizerConstructor'},
        'knows the layers of ConvNeXt, BEiT, MAE only, but the backbone is MAViT: remove',
    ),
    (
        'semfpn',
        {'optim_wrapper.constructor': 'LayerDecayOptimizerConstructor'},
        'LayerDecayOptimizerConstructor knows the layers',
    ),
    ('semfpn', {'optim_wrapper.constructor': 'Decay'}, "constructor: type 'Decay'"),
    # hooks
    ('semfpn', {'custom_hooks': [dict(type='EMA')]}, r'custom_hooks\.0: .*did you mean EMAHook'),
    ('semfpn', {'custom_hooks': ['dict(type=EMAHook)']}, r'custom_hooks\.0 is the text .*config'),
    ('semfpn', {'custom_hooks': [dict(momentum=0.1)]}, r'custom_hooks\.0=.* has no type'),
    ('semfpn', {'default_hooks.logger.intervall': 3}, "has no argument 'intervall', .* interval"),
    ('semfpn', {'default_hooks.checkpoint.type': 'CheckpointHok'}, 'did you mean CheckpointHook'),
    ('semfpn', {'visualizer.vis_backends': [dict(type='Tensorbord')]}, r'vis_backends\.0'),
]

ACCEPTED = [
    ('mask_rcnn', {}),
    ('retinanet', {}),
    ('semfpn', {}),
    ('upernet', {}),
    ('semfpn', loaders(batch_size=1)),
    ('mask_rcnn', loaders(batch_size=1)),
    (
        'retinanet',  # P7 has few values for its batch norm
        {**loaders(batch_size=1), **model(neck__norm_cfg=dict(type='BN', requires_grad=True))},
    ),
    (
        'upernet',
        {
            **loaders(batch_size=1),
            **model(decode_head__norm_cfg=dict(type='GN', num_groups=4)),
        },
    ),
    ('semfpn', loaders(num_workers=0, persistent_workers=False)),
    ('semfpn', {'val_dataloader': None, 'val_cfg': None, 'val_evaluator': None}),
    ('semfpn', {'custom_hooks': [dict(type='EMAHook', momentum=0.1, priority='NORMAL')]}),
    ('semfpn', {'default_hooks.checkpoint': None}),
    (
        'semfpn',  # nothing is joined with it
        loaders(
            dataset__data_root='none', dataset__data_prefix=dict(img_path='/a', seg_map_path='/b')
        ),
    ),
    ('semfpn', {'optim_wrapper.optimizer.type': 'torch.optim.AdamW'}),
    ('semfpn', {'optim_wrapper.optimizer.fused': True}),
    ('mask_rcnn', {'default_hooks.checkpoint.save_best': ['coco/bbox_mAP', 'coco/segm_mAP']}),
    ('mask_rcnn', {'default_hooks.checkpoint.save_best': 'auto'}),
    ('upernet', model(test_cfg=dict(mode='slide', crop_size=(512, 512), stride=(341, 341)))),
    ('semfpn', {'val_evaluator.iou_metrics': ['mIoU', 'mFscore']}),
    ('semfpn', {'train_cfg.type': 'mmengine.IterBasedTrainLoop'}),
    ('semfpn', model(backbone__init_cfg='https://example.org/mavit_t.pth')),
    (
        'semfpn',
        model(
            backbone__out_indices=(0, 1),
            neck__in_channels=CHANNELS[:2],
            decode_head__in_index=[0, 1],
            decode_head__in_channels=[256, 256],
            decode_head__feature_strides=[4, 8],
            neck__num_outs=2,
        ),
    ),
]


@pytest.fixture(scope='module')
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Config]:
    """Whole configs of tiny models on folders that exist."""
    root = tmp_path_factory.mktemp('data')
    (root / 'val.json').touch()
    bases = {}
    for name, base in CONFIGS.items():
        cfg = Config.fromfile(mala_mm.config_path(base))
        put(cfg, model(backbone__arch=dict(TINY), **FITTING[name]))
        for part in ('train', 'val', 'test'):
            cfg[f'{part}_dataloader'].dataset.data_root = str(root)
            if 'ann_file' in (cfg.get(f'{part}_evaluator') or {}):
                cfg[f'{part}_evaluator'].ann_file = str(root / 'val.json')
        bases[name] = cfg
    return bases


def put(cfg: Config, settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        *steps, last = name.split('.')
        owner = cfg
        for step in steps:
            owner = owner[step]
        owner[last] = value


def check(bases: dict[str, Config], name: str, settings: dict, **options: Any) -> list[Finding]:
    cfg = copy.deepcopy(bases[name])
    put(cfg, settings)
    before = cfg.to_dict()
    findings = check_config(cfg, **options)
    assert cfg.to_dict() == before
    assert not findings.warnings
    return findings.errors


@pytest.mark.parametrize(('name', 'settings', 'message'), ERRORS)
def test_error(bases, name, settings, message):
    errors = check(bases, name, settings)
    assert [e for e in errors if re.search(message, ' '.join([e.message, *e.places]))], errors
    assert all(len(error.message) < MAX_MESSAGE - 1 for error in errors)  # none was cut
    assert len(errors) == 1, errors


@pytest.mark.parametrize(('name', 'settings'), ACCEPTED)
def test_accepted(bases, name, settings):
    assert check(bases, name, settings) == []


def test_all_at_once(bases):
    settings = {
        **loaders(num_workers=0, dataset__data_root='none'),
        'val_dataloader.dataset.data_root': 'none',
        'custom_hooks': ['x'],
        'model.backbone.arch': 'x',
    }
    errors = check(bases, 'semfpn', settings)
    assert len(errors) == 4
    assert errors[1].places == ['train_dataloader.dataset', 'val_dataloader.dataset']


def test_test_looks_at_the_test_alone(bases):
    broken = {
        **loaders(num_workers=0),
        'val_evaluator': None,
        'optim_wrapper.optimizer.type': 'X',
        'model.backbone.init_cfg': 'gone.pth',
    }
    assert check(bases, 'semfpn', broken, command='test') == []
    broken['test_dataloader.num_workers'] = 0
    (error,) = check(bases, 'semfpn', broken, command='test')
    assert error.message.startswith('test_dataloader.persistent_workers=True')


def test_test_time_augmentation(bases):
    inner = bases['semfpn'].model
    wrapped = dict(type='SegTTAModel', module=dict(inner, neck=None))
    (error,) = check(bases, 'semfpn', {'model': wrapped}, command='test')
    assert error.message.startswith('model.module.decode_head.in_channels=[256, 256, 256, 256]')


def test_synchronised_norms_of_two_processes_train_with_batch_1(bases):
    settings = loaders(batch_size=1)
    assert check(bases, 'upernet', settings, world_size=2) == []
    settings['model.decode_head.norm_cfg'] = dict(type='BN')
    (error,) = check(bases, 'upernet', settings, world_size=2)
    assert 'model.decode_head: batch norm' in error.message


def test_a_part_that_takes_one_map_of_several():
    neck = torch.nn.Module()
    maps = [torch.zeros(1, channels, 2, 2) for channels in (8, 16, 32)]
    neck.in_channels = 32
    assert _misfit(neck, maps) == ''
    neck.in_channels = 64
    assert _misfit(neck, maps).startswith('in_channels=64 does not fit')


def test_a_checkpoint_is_read(bases, tmp_path: Path):
    torch.save([1], tmp_path / 'list.pth')
    (error,) = check(bases, 'semfpn', {'model.backbone.init_cfg': str(tmp_path / 'list.pth')})
    assert error.message.endswith('list.pth holds a list, expected a dict of weights')


def test_no_random_number_is_drawn(bases):
    state = torch.get_rng_state()
    check(bases, 'upernet', {})
    assert torch.equal(torch.get_rng_state(), state)
