"""What training asks of the operator besides its numbers."""

import pytest
import torch
from operator_cases import draw, error, run, truth
from synthetic import load_parameters
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from mala_mm.models import MAViT
from mala_mm.ops import mala_attention, mala_kernels, rotary_angles
from mala_mm.ops.naive import naive_mala_attention

SIZE = (5, 7)


def fused(q, k, v, lepe, gate, size=SIZE):
    return mala_attention(q, k, v, size, rotary_angles(q.shape[-1]), lepe, gate, backend='triton')


@pytest.mark.parametrize(
    ('head_dim', 'dtype', 'bound'),
    [(64, torch.float32, 1e-5), (96, torch.float32, 1e-5), (96, torch.float16, 1e-3)],
)
def test_interpret_launches_as_shipped(head_dim, dtype, bound, short_runs):
    # other tests use larger tiles; 140 tokens are three runs, which end in the middle of a tile
    size, angle = (7, 20), rotary_angles(head_dim)
    inputs, dout = draw(1, 1, size, head_dim, dtype)
    actual = run(mala_attention, inputs, dout, size, angle, backend='triton')
    for ours, exact in zip(actual, truth(inputs, dout, size, angle), strict=True):
        assert error(ours, exact) <= bound


@pytest.mark.parametrize('head_dim', [64, 96])
def test_interpret_two_runs_are_equal_bit_for_bit(head_dim, large_tiles, short_runs):
    size, angle = (7, 20), rotary_angles(head_dim)
    inputs, dout = draw(1, 1, size, head_dim, torch.float32)
    first, second = (
        run(mala_attention, inputs, dout, size, angle, backend='triton') for _ in range(2)
    )
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize('value', [-20.0, 30.0, 0.0])
@pytest.mark.parametrize('head_dim', [64, 96])
def test_interpret_extreme_queries_stay_finite(value, head_dim, large_tiles):
    inputs, dout = draw(1, 1, SIZE, head_dim, torch.float16)
    for extreme in ([0], [1], [0, 1]):  # q, k, both
        case = [torch.full_like(x, value) if i in extreme else x for i, x in enumerate(inputs)]
        angle = rotary_angles(head_dim)
        for result in run(mala_attention, case, dout, SIZE, angle, backend='triton'):
            assert result.isfinite().all()


@pytest.mark.parametrize('axis', ['batch', 'token', 'channel'])
def test_interpret_offsets_beyond_32_bits(axis, large_tiles):
    stride = {'batch': (2**31 + 64, 1, 17, 1), 'token': (0, 0, 2**31 // 16, 1)}
    stride['channel'] = (0, 0, 1, 2**31 // 8)
    (q, k, v, _, _), _ = draw(1 + (axis == 'batch'), 1, (1, 17), 16, torch.float16)
    # only the pages that are written to take memory
    storage = torch.UntypedStorage(2 * (2**32 + 2**29))
    far = torch.empty(0, dtype=torch.float16).set_(storage)
    far = far.as_strided(q.shape, stride[axis])
    far.copy_(q)
    actual = mala_attention(far, k, v, (1, 17), backend='triton')
    exact = naive_mala_attention(q.double(), k.double(), v.double(), (1, 17))
    assert error(actual, exact) < 1e-3


def test_interpret_compiles_in_one_graph(large_tiles):
    inputs, dout = draw(2, 2, SIZE, 16, torch.float32)
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = torch.compile(fused, fullgraph=True, backend='aot_eager')(*leaves)
    gradients = torch.autograd.grad(out, leaves, dout)
    exact = truth(inputs, dout, SIZE, rotary_angles(16))
    for ours, expected in zip((out, *gradients), exact, strict=True):
        assert error(ours, expected) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize('parts', ['all', 'q, k and v'])
def test_interpret_custom_operator_contract(parts, large_tiles):
    inputs, _ = draw(2, 2, SIZE, 16, torch.float32)
    q, k, v, lepe, gate = (x.detach().requires_grad_() for x in inputs)
    optional = (rotary_angles(16), lepe, gate) if parts == 'all' else (None, None, None)
    operator = torch.ops.mala_mm.mala_attention.default
    torch.library.opcheck(operator, (q, k, v, *SIZE, *optional))


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
    with pytest.raises(RuntimeError, match="no second derivative: use backend='torch'"):
        dq.sum().backward()


def test_interpret_autocast_keeps_the_gradients_dtype(large_tiles):
    for dtype in (torch.float32, torch.float16):
        inputs, dout = draw(1, 1, SIZE, 16, dtype)
        with torch.autocast('cpu', dtype=torch.bfloat16):
            results = run(mala_attention, inputs, dout, SIZE, None, backend='triton')
        assert {x.dtype for x in results} == {dtype}


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
