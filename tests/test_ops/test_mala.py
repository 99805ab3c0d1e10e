"""Properties of the operator, against its definition written out score by score."""

import pytest
import torch

from mala_mm.ops import apply_rotary, mala_attention, rotary_angles, rotary_tables

EPS = 1e-6


def scores(q, k):
    """Unrotated scores ``[N, N]`` of one head: beta_i phi(q_i) . phi(k_j) s/N - gamma_i."""
    elu = torch.nn.functional.elu
    num_tokens, head_dim = q.shape
    phi_q, phi_k = elu(q) + 1, elu(k) + 1
    product = phi_q @ phi_k.T * head_dim**-0.5 / num_tokens
    total = product.sum(-1, keepdim=True)
    return (1 + 1 / (total + EPS)) * product - total / num_tokens


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize(
    ('size', 'head_dim'), [((1, 1), 8), ((7, 5), 12), ((1, 9), 4), ((16, 3), 96), ((31, 33), 64)]
)
def test_without_rotation_it_is_the_score_matrix_times_v(size, head_dim):
    tokens = size[0] * size[1]
    q, k, v = (randn(2, 3, tokens, head_dim, seed=seed) for seed in range(3))
    out = mala_attention(q, k, v, size)
    for b, h in ((0, 0), (1, 2)):
        torch.testing.assert_close(out[b, h], scores(q[b, h], k[b, h]) @ v[b, h])


def test_scores_sum_to_one():
    # with the identity as v, the output is the score matrix
    tokens = 12
    q, k = randn(1, 1, tokens, tokens), randn(1, 1, tokens, tokens, seed=1)
    out = mala_attention(q, k, torch.eye(tokens, dtype=q.dtype)[None, None], (3, 4))
    elu = torch.nn.functional.elu
    total = (elu(q) + 1) @ (elu(k) + 1).mean(-2, keepdim=True).mT * tokens**-0.5
    assert (out.sum(-1) - 1).abs().max() < 2 * EPS / total.min()  # what the 1e-6 takes away


def test_larger_queries_sharpen_the_scores_slower_than_softmax():
    tokens = 8
    k = 0.3 * randn(1, 1, tokens, tokens, seed=2)
    eye = torch.eye(tokens, dtype=k.dtype)[None, None]
    ratios, softmax_ratios = [], []
    for magnitude in (0.25, 0.5, 1.0):
        q = torch.full_like(k, magnitude).log()  # phi(q) = magnitude
        row = mala_attention(q, k, eye, (2, 4))[0, 0, 0]
        assert row.min() > 0
        ratios.append((row.max() / row.min()).item())
        phi_k = torch.nn.functional.elu(k[0, 0]) + 1
        logits = magnitude * phi_k.sum(-1) * tokens**-0.5
        softmax_ratios.append((logits.max() - logits.min()).exp().item())
    assert 1 < ratios[0] < ratios[1] < ratios[2]
    assert ratios[2] / ratios[0] < softmax_ratios[2] / softmax_ratios[0]


def test_rotation_turns_each_pair_by_row_or_column():
    angle = rotary_angles(8)
    torch.testing.assert_close(angle, torch.tensor([1.0, 1.0, 1e-4, 1e-4]))
    cos, sin = rotary_tables(angle, 2, 3, torch.float64)
    x = randn(6, 8)
    turned = apply_rotary(x, cos, sin)
    for token in range(6):
        row, column = divmod(token, 3)
        for pair, turn in enumerate((row, row * 1e-4, column, column * 1e-4)):
            turn = torch.tensor(turn, dtype=torch.float64)
            matrix = torch.stack(
                [torch.stack([turn.cos(), -turn.sin()]), torch.stack([turn.sin(), turn.cos()])]
            )
            torch.testing.assert_close(
                turned[token, 2 * pair : 2 * pair + 2],
                matrix @ x[token, 2 * pair : 2 * pair + 2],
                rtol=0,
                atol=1e-7,  # the angles are float32
            )


def test_head_dim_4_has_the_one_angle_1():
    assert rotary_angles(4).tolist() == [1.0, 1.0]


def test_epilogue():
    q, k, v, lepe, gate = (randn(1, 2, 6, 8, seed=seed) for seed in range(5))
    plain = mala_attention(q, k, v, (2, 3), rotary_angles(8))
    fused = mala_attention(q, k, v, (2, 3), rotary_angles(8), lepe, gate)
    torch.testing.assert_close(fused, (plain + lepe) * gate)


def test_gradients():
    tensors = [randn(1, 2, 6, 8, seed=seed).requires_grad_() for seed in range(5)]

    def function(q, k, v, lepe, gate):
        return mala_attention(q, k, v, (2, 3), rotary_angles(8), lepe, gate)

    assert torch.autograd.gradcheck(function, tensors)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
@pytest.mark.parametrize('value', [-20.0, 0.0, 30.0])
def test_half_precision_stays_finite(dtype, value):
    q, k = (torch.full((1, 1, 64, 32), value, dtype=dtype, requires_grad=True) for _ in range(2))
    v = randn(1, 1, 64, 32, seed=2).to(dtype).requires_grad_()
    with torch.autocast('cpu', dtype=torch.bfloat16):
        out = mala_attention(q, k, v, (8, 8), rotary_angles(32))
    assert out.dtype == dtype
    out.float().sum().backward()
    for tensor in (out, q.grad, k.grad, v.grad):
        assert tensor.isfinite().all()


@pytest.mark.parametrize('dtype', [torch.float32, torch.float16, torch.bfloat16])
def test_error_is_rounding_only(dtype):
    q, k, v = (randn(2, 2, 15 * 13, 48, seed=seed).to(dtype) for seed in range(3))
    truth = mala_attention(q.double(), k.double(), v.double(), (15, 13), rotary_angles(48))
    out = mala_attention(q, k, v, (15, 13), rotary_angles(48))
    assert out.dtype == dtype
    error = (out.double() - truth).square().mean().sqrt() / truth.square().mean().sqrt()
    assert error < {torch.float32: 1e-6, torch.float16: 3e-4, torch.bfloat16: 2.5e-3}[dtype]


def test_strided_views_of_one_projection():
    qkvo = randn(2, 35, 4, 3, 16)
    q, k, v, gate = qkvo.permute(2, 0, 3, 1, 4)
    args = ((5, 7), rotary_angles(16), None)
    strided = mala_attention(q, k, v, *args, gate)
    packed = mala_attention(*(x.contiguous() for x in (q, k, v)), *args, gate.contiguous())
    torch.testing.assert_close(strided, packed)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (dict(q=torch.ones(2, 6, 8)), r'q must have the shape \[B, H, N, D\], got \(2, 6, 8\)'),
        (
            dict(q=torch.ones(1, 2, 6, 8, dtype=torch.int32)),
            'floating-point dtype, got torch.int32',
        ),
        (dict(k=torch.ones(1, 2, 5, 8)), r'k must have the shape of q, \(1, 2, 6, 8\), got'),
        (dict(v=torch.ones(1, 2, 6, 8).half()), 'v must be torch.float32 on cpu as q is, got'),
        (dict(gate=torch.ones(1, 1, 6, 8)), 'gate must have the shape of q'),
        (dict(lepe=torch.ones(1, 2, 6, 8, device='meta')), 'lepe must be .* got .* on meta'),
        (dict(size=(2, 4)), 'size must hold the 6 tokens of q and at least one, got 2 x 4'),
        (dict(size=(-2, -3)), 'size must hold .* got -2 x -3'),
        (
            dict(angle=torch.ones(8)),
            r'angle must be .* of the shape \[D/2\] = \(4,\), got .* \(8,\)',
        ),
    ],
)
def test_bad_input(change, message):
    arguments = dict(
        {name: torch.ones(1, 2, 6, 8) for name in 'qkv'}, size=(2, 3), angle=rotary_angles(8)
    )
    with pytest.raises(ValueError, match=message):
        mala_attention(**dict(arguments, **change))


def test_rotation_needs_a_multiple_of_four():
    q = torch.ones(1, 1, 6, 6)
    with pytest.raises(ValueError, match='multiple of 4, got 6; pass angle=None'):
        mala_attention(q, q, q, (2, 3), torch.ones(3))
