"""What training asks of the operator besides its numbers."""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from operator_cases import draw, error, run, truth
from synthetic import load_parameters
from torch import library
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from mala_mm.models import MAViT
from mala_mm.ops import mala, mala_attention, mala_kernels, rotary_angles

SIZE = (5, 7)


def fused(q, k, v, lepe, gate, size=SIZE):
    return mala_attention(q, k, v, size, rotary_angles(q.shape[-1]), lepe, gate, backend='triton')


@pytest.mark.parametrize(
    ('head_dim', 'dtype', 'bound'),
    [
        (64, torch.float32, 1e-5),
        pytest.param(96, torch.float32, 1e-5, marks=pytest.mark.slow),
        pytest.param(96, torch.float16, 1e-3, marks=pytest.mark.slow),
    ],
)
def test_interpret_launches_as_shipped(head_dim, dtype, bound, short_runs):
    # other tests use larger tiles; 140 tokens are three runs, which end in the middle of a tile
    size, angle = (7, 20), rotary_angles(head_dim)
    inputs, dout = draw(1, 1, size, head_dim, dtype)
    actual = run(mala_attention, inputs, dout, size, angle, backend='triton')
    for ours, exact in zip(actual, truth(inputs, dout, size, angle), strict=True):
        assert error(ours, exact) <= bound


@pytest.mark.parametrize('head_dim', [64, pytest.param(96, marks=pytest.mark.slow)])
def test_interpret_two_runs_are_equal_bit_for_bit(head_dim, large_tiles, short_runs):
    size, angle = (7, 20), rotary_angles(head_dim)
    inputs, dout = draw(1, 1, size, head_dim, torch.float32)
    first, second = (
        run(mala_attention, inputs, dout, size, angle, backend='triton') for _ in range(2)
    )
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize('value', [-20.0, 30.0, 0.0])
@pytest.mark.parametrize('head_dim', [64, pytest.param(96, marks=pytest.mark.slow)])
def test_interpret_extreme_queries_stay_finite(value, head_dim, large_tiles):
    inputs, dout = draw(1, 1, SIZE, head_dim, torch.float16)
    for extreme in ([0], [1], [0, 1]):  # q, k, both
        case = [torch.full_like(x, value) if i in extreme else x for i, x in enumerate(inputs)]
        angle = rotary_angles(head_dim)
        for result in run(mala_attention, case, dout, SIZE, angle, backend='triton'):
            assert result.isfinite().all()


@pytest.mark.parametrize('part', range(6))
def test_interpret_passes_nan_on(part, large_tiles):
    inputs, dout = draw(1, 1, SIZE, 16, torch.float32)
    [*inputs, dout][part][0, 0, 2, 3] = torch.nan
    angle = rotary_angles(16)
    actual = run(mala_attention, inputs, dout, SIZE, angle, backend='triton')
    for ours, exact in zip(actual, truth(inputs, dout, SIZE, angle), strict=True):
        assert torch.equal(ours.isnan(), exact.isnan())


@pytest.mark.parametrize(
    'stride',
    [(2**31 + 64, 0, 16, 1), (0, 0, 2**31 // 16, 1), (0, 0, 1, 2**31 // 8)],
    ids=['batch', 'token', 'channel'],
)
def test_interpret_offsets_beyond_32_bits(stride, large_tiles):
    size = (1, 17)
    batch = 2 if stride[0] else 1
    inputs, dout = draw(batch, 1, size, 16, torch.float16)
    storage = torch.UntypedStorage(2 * (2**32 + 2**29))  # pages that nobody writes take no memory

    def far(x):
        return torch.empty(0, dtype=x.dtype).set_(storage).as_strided(x.shape, stride).copy_(x)

    exact = truth(inputs, dout, size, rotary_angles(16))
    for i in range(len(inputs)):
        case = [far(x) if i == j else x for j, x in enumerate(inputs)]
        actual = run(mala_attention, case, dout, size, rotary_angles(16), backend='triton')
        for ours, expected in zip(actual, exact, strict=True):
            assert error(ours, expected) < 1e-3
    with mock.patch.object(torch, 'empty_like', lambda x: far(torch.zeros_like(x))):
        out, _ = mala_kernels.mala_fwd(*inputs[:3], *size, rotary_angles(16), *inputs[3:])
    assert error(out, exact[0]) < 1e-3


def test_interpret_compiles_in_one_graph(large_tiles):
    inputs, dout = draw(2, 2, SIZE, 16, torch.float32)
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = torch.compile(fused, fullgraph=True, backend='aot_eager')(*leaves)
    gradients = torch.autograd.grad(out, leaves, dout)
    exact = truth(inputs, dout, SIZE, rotary_angles(16))
    for ours, expected in zip((out, *gradients), exact, strict=True):
        assert error(ours, expected) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(('lepe', 'gate'), [(True, True), (True, False), (False, True)])
def test_interpret_custom_operator_contract(lepe, gate, large_tiles):
    inputs, dout = draw(2, 1, SIZE, 16, torch.float32)
    q, k, v, *optional = (x.detach().requires_grad_() for x in inputs)
    optional = [x if there else None for x, there in zip(optional, (lepe, gate), strict=True)]
    arguments = (q, k, v, *SIZE, rotary_angles(16), *optional)
    _, state = torch.ops.mala_mm.mala_attention(*arguments)
    library.opcheck(torch.ops.mala_mm.mala_attention.default, arguments)
    library.opcheck(
        torch.ops.mala_mm.mala_attention_backward.default,
        (dout, *arguments[:3], state, *arguments[3:]),
        test_utils=('test_schema', 'test_faketensor'),  # it has no derivative
    )


def test_interpret_gradient_checkpointing(large_tiles):
    inputs, dout = draw(1, 2, SIZE, 16, torch.float32)
    exact = truth(inputs, dout, SIZE, rotary_angles(16))
    for use_reentrant in (True, False):
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = checkpoint(fused, *leaves, use_reentrant=use_reentrant)
        out.backward(dout)
        for ours, expected in zip((out, *(x.grad for x in leaves)), exact, strict=True):
            assert error(ours, expected) <= 1e-5


def test_interpret_second_derivative_is_refused(large_tiles):
    inputs, dout = draw(1, 1, SIZE, 16, torch.float32)
    leaves = [x.detach().requires_grad_() for x in inputs]
    (dq,) = torch.autograd.grad(fused(*leaves), leaves[0], dout, create_graph=True)
    with pytest.raises(RuntimeError, match="has a second derivative with backend='torch'"):
        dq.sum().backward()


def test_interpret_autocast_changes_nothing(large_tiles):
    for dtype in (torch.float32, torch.float16):
        inputs, dout = draw(1, 1, SIZE, 16, dtype)
        with torch.autocast('cpu', dtype=torch.bfloat16):
            results = run(mala_attention, inputs, dout, SIZE, None, backend='triton')
        for ours, exact in zip(results, truth(inputs, dout, SIZE, None), strict=True):
            assert ours.dtype == dtype
            assert error(ours, exact) <= (1e-5 if dtype == torch.float32 else 1e-3)


def test_interpret_gradients_that_nobody_asked_for(large_tiles):
    (q, k, v, lepe, gate), dout = draw(1, 1, SIZE, 16, torch.float32)
    exact = truth([q, k, v, lepe, gate], dout, SIZE, rotary_angles(16))
    v = v.detach().requires_grad_()
    fused(q, k, v, lepe, gate).backward(dout)
    assert error(v.grad, exact[3]) <= 1e-5


def test_interpret_flops_as_of_the_torch_path(large_tiles):
    inputs, _ = draw(2, 3, SIZE, 16, torch.float32)
    counts = []
    for backend in ('torch', 'triton'):
        leaves = [x.detach().requires_grad_() for x in inputs]
        with FlopCounterMode(display=False) as counter:
            q, k, v, lepe, gate = leaves
            mala_attention(q, k, v, SIZE, None, lepe, gate, backend=backend).sum().backward()
        counts.append(counter.get_total_flops())
    tokens, heads, head_dim = 35, 6, 16
    assert counts == [3 * 2 * heads * tokens * (2 * head_dim**2 + head_dim)] * 2


@pytest.mark.parametrize(
    'circumstances',
    [
        FakeTensorMode,
        lambda: FlopCounterMode(display=False),
        lambda: torch.autocast('cpu', dtype=torch.bfloat16),
        lambda: default_dtype(torch.float64),
        torch.inference_mode,
    ],
)
def test_interpret_first_call_under_other_circumstances(circumstances, large_tiles):
    mala.find_triton_obstacle.cache_clear()
    with circumstances():
        assert mala.find_triton_obstacle('cpu', torch.float16, 16) is None
    assert mala.find_triton_obstacle('cpu', torch.float16, 16) is None


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


def test_interpret_tracing_takes_the_torch_path(large_tiles):
    (q, k, v, _, _), _ = draw(1, 1, SIZE, 16, torch.float32)

    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return mala_attention(q, k, v, SIZE, backend='triton')

    traced = torch.jit.trace(Model(), (q, k, v))
    assert 'aten::exp' in str(traced.inlined_graph)
    assert 'mala_mm::' not in str(traced.inlined_graph)
    exported = str(torch.export.export(Model(), (q, k, v)))
    assert 'aten.exp' in exported
    assert 'mala_mm.mala_attention' not in exported


@pytest.mark.slow
@pytest.mark.parametrize(('embed_dims', 'num_heads'), [((64, 128), (1, 2)), ((96, 192), (1, 2))])
def test_interpret_backbone(embed_dims, num_heads, large_tiles):
    arch = dict(
        embed_dims=(*embed_dims, 32, 32),
        depths=(1, 1, 1, 1),
        num_heads=(*num_heads, 1, 1),
        mlp_ratios=(1, 1, 1, 1),
        layer_scale_init=(1, 1, 1, 1),
        drop_path_rate=0.0,
    )
    image = torch.randn(2, 3, 20, 28, generator=torch.Generator().manual_seed(0)).double()
    results = []
    for backend, dtype in (('torch', torch.float64), ('triton', torch.float32)):
        model = MAViT(arch, out_indices=(1,), attn_backend=backend).to(dtype).eval()
        load_parameters(model)
        (out,) = model(image.to(dtype))
        out.square().sum().backward()
        results.append([out, *(p.grad for p in model.parameters())])
    for ours, exact in zip(results[1], results[0], strict=True):
        assert error(ours, exact) < 1e-4


BLOCKS = {4: (16, 0), 16: (16, 0), 20: (32, 0), 48: (64, 0), 64: (64, 0), 68: (64, 32)}
BLOCKS |= {80: (64, 32), 96: (64, 32), 100: (128, 0), 128: (128, 0)}


@pytest.mark.parametrize('head_dim', BLOCKS)
def test_interpret_blocks_cover_the_channels(head_dim):
    assert mala_kernels.channel_blocks(head_dim) == BLOCKS[head_dim]
