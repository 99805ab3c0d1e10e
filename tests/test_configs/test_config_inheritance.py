"""Configs of other projects that inherit the shipped ones and change classes, heads and data."""

from pathlib import Path

import pytest
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope

CONFIGS = Path(__file__).parents[2] / 'configs'
BASES = [f'{CONFIGS}/', 'mala_mm::']

FRUITS = """
_base_ = '{base}cascade_mavit_b_coco.py'

data_root = 'fruits/'
metainfo = dict(classes=('date', 'fig', 'hazelnut'))
model = dict(
    roi_head=dict(
        bbox_head=[dict(head, num_classes=3) for head in _base_.model.roi_head.bbox_head],
        mask_head=dict(num_classes=3),
    ),
)
train_dataloader = dict(
    dataset=dict(data_root=data_root, metainfo=metainfo, ann_file='train.json')
)
val_dataloader = dict(dataset=dict(data_root=data_root, metainfo=metainfo, ann_file='val.json'))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + 'val.json')
test_evaluator = val_evaluator
"""

STREET = """
_base_ = '{base}upernet_mavit_t_ade20k.py'

norm_cfg = dict(type='BN')
model = dict(
    data_preprocessor=dict(size=(192, 192)),
    backbone=dict(norm_cfg=norm_cfg),
    decode_head=dict(channels=128, num_classes=11, norm_cfg=norm_cfg),
    auxiliary_head=dict(channels=64, num_classes=11, norm_cfg=norm_cfg),
)
train_dataloader = dict(batch_size=4, dataset=dict(data_root='street'))
optim_wrapper = dict(optimizer=dict(lr=2e-4), clip_grad=dict(max_norm=1.0))
"""


def _load(path: Path, text: str, base: str) -> Config:
    path.write_text(text.format(base=base))
    return Config.fromfile(path)


@pytest.mark.parametrize('base', BASES)
def test_detection_with_other_classes(tmp_path, base):
    cfg = _load(tmp_path / 'fruits.py', FRUITS, base)
    assert cfg.train_dataloader.dataset.data_root == 'fruits/'
    assert cfg.train_dataloader.dataset.data_prefix.img == 'train2017/'
    assert cfg.test_evaluator.ann_file == 'fruits/val.json'
    assert cfg.test_evaluator.metric == ['bbox', 'segm']
    assert cfg.optim_wrapper.optimizer.lr == 4e-4
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        model = MODELS.build(cfg.model)
    assert model.backbone.embed_dims == (96, 192, 384, 512)
    assert [head.fc_cls.out_features for head in model.roi_head.bbox_head] == [4, 4, 4]
    assert [head.fc_reg.out_features for head in model.roi_head.bbox_head] == [12, 12, 12]
    assert [head.bbox_coder.stds[0] for head in model.roi_head.bbox_head] == [0.1, 0.05, 0.033]
    assert [head.conv_logits.out_channels for head in model.roi_head.mask_head] == [3, 3, 3]


@pytest.mark.parametrize('base', BASES)
def test_segmentation_with_other_heads(tmp_path, base):
    cfg = _load(tmp_path / 'street.py', STREET, base)
    assert cfg.train_dataloader.dataset.data_root == 'street'
    assert cfg.optim_wrapper.optimizer.type == 'AdamW'
    assert cfg.optim_wrapper.optimizer.lr == 2e-4
    assert cfg.optim_wrapper.paramwise_cfg.custom_keys.norm.decay_mult == 0
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        model = MODELS.build(cfg.model)
    assert tuple(model.data_preprocessor.size) == (192, 192)
    assert model.decode_head.conv_seg.weight.shape == (11, 128, 1, 1)
    assert model.auxiliary_head.conv_seg.weight.shape == (11, 64, 1, 1)
    assert not [module for module in model.modules() if type(module).__name__ == 'SyncBatchNorm']


def test_written_out_config_reads_back(tmp_path):
    cfg = _load(tmp_path / 'fruits.py', FRUITS, BASES[0])
    cfg.dump(tmp_path / 'dumped.py')
    assert Config.fromfile(tmp_path / 'dumped.py').to_dict() == cfg.to_dict()
