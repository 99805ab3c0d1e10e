"""The backbone against values of the published model, computed in float64."""

import json
from pathlib import Path

import pytest
import torch
from synthetic import assert_golden, assert_matches, image, load_parameters

from mala_mm.models import MAViT

OWN = Path(__file__).parents[1] / 'golden' / 'backbone.json'


def check(case: dict, dtype: torch.dtype, tolerance: float, **kwargs) -> None:
    assert_golden(MAViT(case['arch'], **kwargs).eval(), case, dtype, tolerance)


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


PATHS = {
    'channels-last': lambda arch: MAViT(arch).eval().to(memory_format=torch.channels_last),
    'checkpointing': lambda arch: MAViT(
        arch, with_cp=True, norm_eval=True, drop_path_rate=0.0
    ).train(),
    'definition of MALA': lambda arch: MAViT(arch, attn_backend='torch').eval(),
}


@pytest.mark.parametrize(('dtype', 'tolerance'), [(torch.float64, 1e-8), (torch.float32, 1e-4)])
@pytest.mark.parametrize('build', PATHS.values(), ids=PATHS.keys())
def test_golden_on_every_path(build, dtype, tolerance):
    for case in json.loads(OWN.read_text()):
        assert_golden(build(case['arch']), case, dtype, tolerance)


def test_golden_compiled():
    case = next(case for case in json.loads(OWN.read_text()) if 'loss' in case)
    model = MAViT(case['arch']).eval()
    model.forward = torch.compile(model.forward, backend='aot_eager', fullgraph=True)
    assert_golden(model, case, torch.float64, 1e-8)


def test_golden_traced():
    case = next(case for case in json.loads(OWN.read_text()) if 'loss' in case)
    model = MAViT(case['arch']).double().eval()
    load_parameters(model)
    batch, _, height, width = case['input']
    x = torch.from_numpy(image(batch, height, width))
    with torch.no_grad():
        traced = torch.jit.trace(model, x, check_trace=False)
        outs = traced(x)
    for out, golden in zip(outs, case['outputs'], strict=True):
        assert_matches(out, golden, 1e-6)  # a traced number of tokens divides as float32
    graph = str(traced.inlined_graph)
    for unknown in ('mala_mm::', 'gelu_(', 'view_as_complex'):  # to exporters
        assert unknown not in graph
