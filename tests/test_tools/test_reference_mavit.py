"""The yardstick of tools/benchmark.py computes what the published model does."""

import json

import pytest
import torch
from synthetic import assert_golden

from mala_mm.models import MAViT

PRECISIONS = pytest.mark.parametrize(
    ('dtype', 'tolerance'), [(torch.float64, 1e-8), (torch.float32, 1e-4)]
)


@pytest.fixture(scope='module')
def reference(tool):
    return tool('reference_mavit').ReferenceMAViT


@PRECISIONS
def test_golden(reference, root, dtype, tolerance):
    for case in json.loads((root / 'tests' / 'golden' / 'backbone.json').read_text()):
        assert_golden(reference(case['arch']).eval(), case, dtype, tolerance)


def test_golden_of_another_head_dim(reference, shared):
    cases = json.loads((shared / 'reference' / 'backbone_golden.json').read_text())
    (case,) = (case for case in cases if case['arch'] == 'b')
    assert_golden(reference('b').eval(), case, torch.float64, 1e-8)


@pytest.mark.parametrize('arch', MAViT.arch_settings)
def test_same_state_dict_and_drop_path(reference, arch):
    ours, plain = MAViT(arch), reference(arch)
    plain.load_state_dict(ours.state_dict())
    ours.load_state_dict(plain.state_dict())
    for stage, plain_stage in zip(ours.layers, plain.layers, strict=True):
        for block, plain_block in zip(stage.blocks, plain_stage.blocks, strict=True):
            assert plain_block.drop_path.drop_prob == block.drop_path.drop_prob
