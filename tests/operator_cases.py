"""Inputs of the operator as the model makes them, float64 truth, and the published values."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from synthetic import assert_matches, output_gradient, uniform
from torch import Tensor

from mala_mm.ops import mala_attention, rotary_angles
from mala_mm.ops.naive import naive_mala_attention

CASES = json.loads((Path(__file__).parent / 'golden' / 'attention.json').read_text())
GRADIENTS = ('dq', 'dk', 'dv', 'dlepe', 'dgate')


def draw(
    batch: int, heads: int, size: tuple[int, int], head_dim: int, dtype: torch.dtype, seed: int = 0
) -> tuple[list[Tensor], Tensor]:
    """q, k, v, lepe and gate ``[B, H, N, D]``, and the output's gradient.

    q, k, v and gate are views of one projection ``[B, N, 4C]``.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, size[0] * size[1], heads, head_dim)
    projection = torch.randn(shape[0], shape[1], 4, *shape[2:], generator=generator) * 1.5
    q, k, v, gate = projection.to(dtype).permute(2, 0, 3, 1, 4)
    lepe, dout = (
        torch.randn(shape, generator=generator).to(dtype).transpose(1, 2) for _ in range(2)
    )
    return [q, k, v, lepe, gate], dout


def run(
    attention: Callable,
    inputs: list[Tensor | None],
    dout: Tensor,
    size: tuple[int, int],
    angle: Tensor | None,
    **kwargs,
) -> list[Tensor]:
    """Output, then the gradients of the inputs that are there."""
    leaves = [x if x is None else x.detach().requires_grad_() for x in inputs]
    q, k, v, lepe, gate = leaves
    out = attention(q, k, v, size, angle, lepe, gate, **kwargs)
    return [out, *torch.autograd.grad(out, [x for x in leaves if x is not None], dout)]


def truth(
    inputs: list[Tensor | None], dout: Tensor, size: tuple[int, int], angle: Tensor | None
) -> list[Tensor]:
    """As :func:`run`, in float64."""
    inputs = [x if x is None else x.double() for x in inputs]
    return run(naive_mala_attention, inputs, dout.double(), size, angle)


def error(actual: Tensor, expected: Tensor, scale: float | None = None) -> float:
    """Root mean square error in units of ``scale``, by default the expected values' own."""
    assert actual.shape == expected.shape
    difference = (actual.double() - expected).pow(2).mean().sqrt()
    return (difference / (scale or expected.pow(2).mean().sqrt())).item()


def check_golden(case: dict, dtype: torch.dtype, tolerance: float, backend: str) -> None:
    heads, head_dim = case['heads'], case['head_dim']
    height, width = case['height'], case['width']
    batch = case['output']['shape'][0]
    channels = heads * head_dim
    qkvo = uniform(case['name'], (batch, 4 * channels, height, width)) * 1.7
    maps = torch.from_numpy(qkvo).to(dtype).split(channels, dim=1)[:3]
    maps = [m.clone().requires_grad_() for m in maps]
    q, k, v = (m.reshape(batch, heads, head_dim, -1).transpose(-2, -1) for m in maps)
    angle = rotary_angles(head_dim)
    out = mala_attention(q, k, v, (height, width), angle, backend=backend)
    out = out.transpose(-2, -1).reshape(batch, channels, height, width)
    out.backward(torch.from_numpy(output_gradient(case['name'], out.shape)).to(dtype))
    assert_matches(out, case['output'], tolerance)
    # with a single token dq and dk vanish but for the 1e-6: only an absolute error means anything
    scale = case['dv']['rms'] if height * width == 1 else None
    for array, golden in zip(maps, ('dq', 'dk', 'dv'), strict=True):
        assert_matches(array.grad, case[golden], tolerance, scale)
