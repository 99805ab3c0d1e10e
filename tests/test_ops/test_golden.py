"""The operator in plain PyTorch against values of the published model, computed in float64."""

import json

import pytest
import torch
from operator_cases import CASES, check_golden


@pytest.mark.parametrize('case', CASES, ids=lambda case: case['name'])
@pytest.mark.parametrize(('dtype', 'tolerance'), [(torch.float64, 1e-8), (torch.float32, 1e-4)])
def test_golden(case, dtype, tolerance):
    check_golden(case, dtype, tolerance, 'torch')


def test_all_golden(shared):
    for case in json.loads((shared / 'reference' / 'attention_golden.json').read_text()):
        check_golden(case, torch.float64, 1e-8, 'torch')
        check_golden(case, torch.float32, 1e-4, 'torch')
