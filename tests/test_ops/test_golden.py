"""The operator against values of the published model, computed in float64."""

import json
from pathlib import Path

import pytest
import torch
from synthetic import assert_matches, output_gradient, uniform

from mala_mm.ops import mala_attention, rotary_angles

OWN = Path(__file__).parents[1] / 'golden' / 'attention.json'


def check(case: dict, dtype: torch.dtype, tolerance: float) -> None:
    heads, head_dim = case['heads'], case['head_dim']
    height, width = case['height'], case['width']
    batch = case['output']['shape'][0]
    channels = heads * head_dim
    qkvo = uniform(case['name'], (batch, 4 * channels, height, width)) * 1.7
    maps = torch.from_numpy(qkvo).to(dtype).split(channels, dim=1)[:3]
    maps = [m.clone().requires_grad_() for m in maps]
    q, k, v = (m.reshape(batch, heads, head_dim, -1).transpose(-2, -1) for m in maps)
    out = mala_attention(q, k, v, (height, width), rotary_angles(head_dim))
    out = out.transpose(-2, -1).reshape(batch, channels, height, width)
    out.backward(torch.from_numpy(output_gradient(case['name'], out.shape)).to(dtype))
    assert_matches(out, case['output'], tolerance)
    # with a single token dq and dk vanish but for the 1e-6: only an absolute error means anything
    scale = case['dv']['rms'] if height * width == 1 else None
    for array, golden in zip(maps, ('dq', 'dk', 'dv'), strict=True):
        assert_matches(array.grad, case[golden], tolerance, scale)


@pytest.mark.parametrize('case', json.loads(OWN.read_text()), ids=lambda case: case['name'])
@pytest.mark.parametrize(('dtype', 'tolerance'), [(torch.float64, 1e-8), (torch.float32, 1e-4)])
def test_golden(case, dtype, tolerance):
    check(case, dtype, tolerance)


def test_all_golden(shared):
    for case in json.loads((shared / 'reference' / 'attention_golden.json').read_text()):
        check(case, torch.float64, 1e-8)
        check(case, torch.float32, 1e-4)
