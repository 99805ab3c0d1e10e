"""MALA's path for CPUs against float64, and what it keeps for the backward."""

import pytest
import torch
from operator_cases import draw, error, run, truth
from torch import library

from mala_mm.ops import mala_attention, mala_chunked, rotary_angles
from mala_mm.ops.naive import naive_mala_attention

SHAPES = [(1, 1, (1, 1), 4), (2, 3, (7, 9), 12), (1, 2, (1, 40), 96), (2, 1, (31, 33), 64)]


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(mala_chunked, 'CHUNK_ELEMENTS', 2**9)


@pytest.mark.parametrize('rotates', [True, False])
@pytest.mark.parametrize('shape', SHAPES, ids=str)
@pytest.mark.parametrize(
    ('dtype', 'tolerance'),
    [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)],
)
def test_output_and_gradients(dtype, tolerance, shape, rotates, small_chunks):
    batch, heads, size, head_dim = shape
    inputs, dout = draw(batch, heads, size, head_dim, dtype)
    angle = rotary_angles(head_dim) if rotates else None
    for absent in ((), (3,), (4,), (3, 4)):  # lepe, gate
        given = [None if i in absent else x for i, x in enumerate(inputs)]
        exact = truth(given, dout, size, angle)
        # a single token's dq and dk vanish but for the 1e-6
        scale = 1.0 if size == (1, 1) else None
        for ours, expected in zip(
            run(mala_attention, given, dout, size, angle), exact, strict=True
        ):
            assert ours.dtype == dtype
            assert error(ours, expected, scale) < tolerance


def test_channels_first_and_expanded_inputs(small_chunks):
    size, angle = (5, 7), rotary_angles(8)
    inputs, _ = draw(2, 3, size, 8, torch.float64)
    inputs = [x.transpose(-2, -1).contiguous().transpose(-2, -1) for x in inputs]
    inputs[0] = inputs[0][:, :1].expand(-1, 3, -1, -1)
    dout = torch.ones(1, dtype=torch.float64).expand(2, 3, 35, 8)
    exact = truth(inputs, dout, size, angle)
    for ours, expected in zip(run(mala_attention, inputs, dout, size, angle), exact, strict=True):
        torch.testing.assert_close(ours, expected)


def test_keeps_the_inputs_and_a_small_state():
    inputs, _ = draw(2, 3, (31, 33), 64, torch.float32)
    inputs = [x.requires_grad_() for x in inputs]
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        mala_attention(*inputs[:3], (31, 33), rotary_angles(64), *inputs[3:])
    for tensor in inputs:
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    assert sum(kept.values()) == 2 * 3 * (64 + 2) * 64 + 32  # state and angles
    # far below the 2 N C that the backward may keep
    assert sum(kept.values()) < 2 * inputs[0].numel() / 5


@pytest.mark.parametrize(('lepe', 'gate'), [(True, True), (True, False), (False, True)])
def test_custom_operator_contract(lepe, gate):
    inputs, dout = draw(2, 1, (3, 5), 16, torch.float32)
    q, k, v, *optional = (x.detach().requires_grad_() for x in inputs)
    optional = [x if there else None for x, there in zip(optional, (lepe, gate), strict=True)]
    arguments = (q, k, v, 3, 5, rotary_angles(16), *optional)
    _, state = torch.ops.mala_mm.chunked_mala_attention(*arguments)
    library.opcheck(torch.ops.mala_mm.chunked_mala_attention.default, arguments)
    library.opcheck(
        torch.ops.mala_mm.chunked_mala_attention_backward.default,
        (dout, *arguments[:3], state, *arguments[3:]),
        test_utils=('test_schema', 'test_faketensor'),  # it has no derivative
    )


def test_derivatives_that_only_the_definition_has():
    inputs, dout = draw(1, 1, (2, 3), 8, torch.float64)
    leaves = [x.detach().requires_grad_() for x in inputs]

    def attend(q, backend='auto'):
        return mala_attention(
            q, *leaves[1:3], (2, 3), rotary_angles(8), *leaves[3:], backend=backend
        )

    (dq,) = torch.autograd.grad(attend(leaves[0]), leaves[0], dout, create_graph=True)
    with pytest.raises(RuntimeError, match="has a second derivative with backend='torch'"):
        dq.sum().backward()
    assert torch.autograd.gradgradcheck(lambda q: attend(q, 'torch'), leaves[0])
    expected = truth(inputs, dout, (2, 3), rotary_angles(8))
    q = inputs[0].detach()
    _, tangent = torch.func.jvp(attend, (q,), (torch.ones_like(q),))
    gradient = torch.func.grad(lambda q: (attend(q) * dout).sum())(q)
    torch.testing.assert_close(gradient, expected[1])
    torch.testing.assert_close((tangent * dout).sum(), expected[1].sum())


@pytest.mark.parametrize('shape', [(0, 2, 6, 8), (2, 0, 6, 8)])
def test_no_heads_in_the_batch(shape):
    x = torch.zeros(shape, requires_grad=True)
    out = mala_attention(x, x, x, (2, 3), rotary_angles(8))
    out.sum().backward()
    assert out.shape == x.grad.shape == shape


def test_autocast_changes_nothing():
    inputs, dout = draw(1, 2, (9, 11), 16, torch.float32)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        results = run(mala_attention, inputs, dout, (9, 11), None)
    for ours, expected in zip(results, truth(inputs, dout, (9, 11), None), strict=True):
        assert error(ours, expected) < 1e-5


def test_definition_is_taken_by_name():
    inputs, _ = draw(1, 1, (2, 3), 8, torch.float32)
    arguments = (*inputs[:3], (2, 3), rotary_angles(8), *inputs[3:])
    assert torch.equal(
        mala_attention(*arguments, backend='torch'), naive_mala_attention(*arguments)
    )
