"""The backbone against values of the published model, computed in float64."""

import json
from pathlib import Path

import pytest
import torch
from synthetic import assert_golden

from mala_mm.models import MAViT

OWN = Path(__file__).parents[1] / 'golden' / 'backbone.json'


def check(case: dict, dtype: torch.dtype, tolerance: float, **kwargs) -> None:
    assert_golden(MAViT(case['arch'], **kwargs), case, dtype, tolerance)


@pytest.mark.parametrize(
    'case', json.loads(OWN.read_text()), ids=lambda case: 'x'.join(map(str, case['input']))
)
@pytest.mark.parametrize(('dtype', 'tolerance'), [(torch.float64, 1e-8), (torch.float32, 1e-4)])
def test_golden(case, dtype, tolerance):
    check(case, dtype, tolerance)


@pytest.mark.parametrize(('dtype', 'tolerance'), [(torch.float64, 1e-8), (torch.float32, 1e-4)])
def test_all_golden(shared, dtype, tolerance):
    for case in json.loads((shared / 'reference' / 'backbone_golden.json').read_text()):
        check(case, dtype, tolerance)
