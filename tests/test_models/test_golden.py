"""The backbone against values of the published model, computed in float64."""

import json
from pathlib import Path

import pytest
import torch
from synthetic import assert_matches, image, load_parameters, output_gradient

from mala_mm.models import MAViT

OWN = Path(__file__).parents[1] / 'golden' / 'backbone.json'


def check(case: dict, dtype: torch.dtype, tolerance: float, **kwargs) -> None:
    model = MAViT(case['arch'], **kwargs).to(dtype).eval()
    load_parameters(model)
    batch, _, height, width = case['input']
    x = torch.from_numpy(image(batch, height, width)).to(dtype)
    with_gradients = 'loss' in case
    x.requires_grad_(with_gradients)
    with torch.set_grad_enabled(with_gradients):
        outs = model(x)
    for out, golden in zip(outs, case['outputs'], strict=True):
        assert_matches(out, golden, tolerance)
    if not with_gradients:
        return
    loss = sum(
        (out * torch.from_numpy(output_gradient(i, out.shape)).to(dtype)).sum()
        for i, out in enumerate(outs)
    )
    assert loss.item() == pytest.approx(case['loss'], abs=10 * tolerance)
    loss.backward()
    assert_matches(x.grad, case['input_grad'], tolerance)
    parameters = dict(model.named_parameters())
    for name, golden in case['param_grads'].items():
        assert_matches(parameters[name].grad, golden, tolerance)


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
