"""Output and gradients against float64, in every shape and layout."""

import itertools
import json

import numpy as np
import pytest
import torch
import triton.language as tl
from operator_cases import CASES, GRADIENTS, check_golden, draw, error, run, truth
from triton.runtime.interpreter import TensorHandle, interpreter_builder

from mala_mm.ops import mala_attention, rotary_angles
from mala_mm.ops.naive import naive_mala_attention

SIZES = {1: (1, 1), 49: (7, 7), 63: (7, 9), 196: (14, 14), 950: (25, 38), 4096: (32, 128)}
pytestmark = pytest.mark.usefixtures('large_tiles')


def check_float32(inputs, dout, size, angle) -> None:
    actual = run(mala_attention, inputs, dout, size, angle, backend='triton')
    for i, (ours, expected) in enumerate(
        zip(actual, truth(inputs, dout, size, angle), strict=True)
    ):
        # with one token dq and dk are about 1e-8, what the 1e-6 leaves: an absolute error then
        scale = 1.0 if size == (1, 1) and i in (1, 2) else None
        assert ours.dtype == torch.float32
        assert error(ours, expected, scale) <= 1e-5, ('out', *GRADIENTS)[i]


def grid(head_dims, token_numbers, quick):
    """All pairs; those that are not quick are marked slow."""
    return [
        pytest.param(*pair, marks=[] if pair in quick else pytest.mark.slow)
        for pair in itertools.product(head_dims, token_numbers)
    ]


@pytest.mark.parametrize(
    ('head_dim', 'num_tokens'),
    grid(
        (16, 32, 48, 64, 80, 96, 128),
        (1, 49, 63, 196, 950),
        quick=[(64, 1), (96, 49), (128, 63), (64, 196)],
    ),
)
def test_interpret_float32(head_dim, num_tokens, large_tiles):
    size = SIZES[num_tokens]
    if num_tokens > 500:
        large_tiles(256)
    inputs, dout = draw(2, 2, size, head_dim, torch.float32)
    check_float32(inputs, dout, size, rotary_angles(head_dim))


@pytest.mark.slow
@pytest.mark.parametrize('head_dim', [64, 96])
def test_interpret_float32_of_many_tokens(head_dim, large_tiles):
    large_tiles(512)
    inputs, dout = draw(1, 1, SIZES[4096], head_dim, torch.float32)
    check_float32(inputs, dout, SIZES[4096], rotary_angles(head_dim))


@pytest.mark.slow
@pytest.mark.parametrize('head_dim', [4, 8, 12, 20, 36, 40, 72, 100, 112, 124])
def test_interpret_every_multiple_of_four(head_dim):
    inputs, dout = draw(1, 1, (5, 7), head_dim, torch.float32)
    check_float32(inputs, dout, (5, 7), rotary_angles(head_dim))


@pytest.mark.parametrize('head_dim', [16, pytest.param(96, marks=pytest.mark.slow)])
@pytest.mark.parametrize('rotation', [True, False])
@pytest.mark.parametrize('lepe', [True, False])
@pytest.mark.parametrize('gate', [True, False])
def test_interpret_without_the_optional_parts(head_dim, rotation, lepe, gate):
    inputs, dout = draw(1, 1, (6, 9), head_dim, torch.float32)
    if not lepe:
        inputs[3] = None
    if not gate:
        inputs[4] = None
    check_float32(inputs, dout, (6, 9), rotary_angles(head_dim) if rotation else None)


def contiguous(x):
    return x.contiguous()


def channels_first(x):
    return x.transpose(2, 3).contiguous().transpose(2, 3)


def expanded(x):
    return x[:1].expand(x.shape)


def every_second(x):
    return torch.stack([x, -x], dim=-1)[..., 0]


@pytest.mark.parametrize('layout', [contiguous, channels_first, expanded, every_second])
@pytest.mark.parametrize('head_dim', [64, pytest.param(96, marks=pytest.mark.slow)])
def test_interpret_layouts(head_dim, layout):
    inputs, dout = draw(2, 1, (5, 8), head_dim, torch.float32)
    check_float32([layout(x) for x in inputs], layout(dout), (5, 8), rotary_angles(head_dim))


def test_interpret_gradient_of_a_sum():
    inputs, dout = draw(1, 2, (5, 8), 96, torch.float32)
    check_float32(inputs, torch.ones(()).expand(dout.shape), (5, 8), rotary_angles(96))


@pytest.mark.parametrize('case', CASES, ids=lambda case: case['name'])
def test_interpret_golden(case, large_tiles):
    large_tiles(64 if case['height'] < 20 else 256)
    check_golden(case, torch.float32, 1e-4, 'triton')


@pytest.mark.slow
def test_interpret_all_golden(shared, large_tiles):
    large_tiles(256)
    for case in json.loads((shared / 'reference' / 'attention_golden.json').read_text()):
        check_golden(case, torch.float32, 1e-4, 'triton')


@pytest.mark.parametrize(
    ('head_dim', 'num_tokens'),
    grid((16, 64, 96, 128), (49, 196, 950), quick=[(64, 49), (96, 196)]),
)
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_interpret_half_precision(head_dim, num_tokens, dtype, gpu_rounding, large_tiles):
    if num_tokens > 500:
        large_tiles(256)
    size, angle = SIZES[num_tokens], rotary_angles(head_dim)
    inputs, dout = draw(1, 1, size, head_dim, dtype)
    expected = truth(inputs, dout, size, angle)
    actual = run(mala_attention, inputs, dout, size, angle, backend='triton')
    plain = run(naive_mala_attention, inputs, dout, size, angle)
    factor = 2 if dtype == torch.float16 and num_tokens >= 512 else 4
    for name, ours, theirs, exact in zip(('out', *GRADIENTS), actual, plain, expected, strict=True):
        assert ours.dtype == dtype
        assert error(ours, exact) <= factor * error(theirs, exact), name


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Rounded to nearest, as the bits that the interpreter keeps."""
    return torch.from_numpy(x).bfloat16().view(torch.uint16).numpy()


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(bits).view(torch.bfloat16).float().numpy()


def products(a: np.ndarray, b: np.ndarray, precision: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """The products whose sum a GPU computes for ``a @ b``."""
    if precision == 'IEEE':
        return [(a, b)]
    assert precision == 'BF16x3'
    high_a, high_b = (from_bfloat16(to_bfloat16(x)) for x in (a, b))
    low_a, low_b = (from_bfloat16(to_bfloat16(x)) for x in (a - high_a, b - high_b))
    return [(low_a, high_b), (high_a, low_b), (high_a, high_b)]


@pytest.fixture
def gpu_rounding(monkeypatch):
    """Round as a GPU does: the interpreter multiplies exactly, bfloat16 not at all, and cuts off
    what a bfloat16 cannot hold."""
    cast = interpreter_builder.cast_impl

    def cast_impl(src, dst_type):
        if (src.dtype.scalar, dst_type.scalar) == (tl.float32, tl.bfloat16):
            return TensorHandle(to_bfloat16(src.data), tl.bfloat16)
        return cast(src, dst_type)

    def create_dot(a, b, d, input_precision, max_num_imprecise_acc):
        operands = [
            from_bfloat16(x.data) if x.dtype.scalar == tl.bfloat16 else x.data for x in (a, b)
        ]
        total = d.data.copy()
        for left, right in products(*operands, input_precision.name):
            total += np.matmul(left, right, dtype=np.float32)
        return TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter_builder, 'cast_impl', cast_impl)
    monkeypatch.setattr(interpreter_builder, 'create_dot', create_dot)
