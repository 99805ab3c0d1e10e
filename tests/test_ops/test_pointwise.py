"""1x1 convolution of tokens against its definition as a sum over channels, in float64."""

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mala_mm.ops import pointwise_conv2d


def by_sum(x: Tensor, weight: Tensor, bias: Tensor, num_outputs: int) -> list[Tensor]:
    pieces = zip(weight[:, :, 0, 0].chunk(num_outputs), bias.chunk(num_outputs), strict=True)
    return [(x[..., None, :] * w).sum(-1) + b for w, b in pieces]


def draw(size: tuple[int, ...], in_channels: int, out_channels: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(*size, in_channels), (out_channels, in_channels, 1, 1), (out_channels,)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize('num_outputs', [1, 4])
@pytest.mark.parametrize('size', [(0, 3, 2), (1, 1, 1), (2, 5, 3), (3, 1, 17)])
@pytest.mark.parametrize(('dtype', 'tolerance'), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_outputs_and_gradients(size, num_outputs, dtype, tolerance):
    exact = [x.requires_grad_() for x in draw(size, 5, 12)]
    ours = [x.detach().to(dtype).requires_grad_() for x in exact]
    expected, outs = by_sum(*exact, num_outputs), pointwise_conv2d(*ours, num_outputs)
    douts = [torch.randn(y.shape, dtype=torch.float64) for y in expected]
    close = dict(rtol=tolerance, atol=10 * tolerance)
    for got, want in zip(outs, expected, strict=True):
        torch.testing.assert_close(got.double(), want, **close)
    gradients = torch.autograd.grad(outs, ours, [dout.to(dtype) for dout in douts])
    for got, want in zip(gradients, torch.autograd.grad(expected, exact, douts), strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, **close)


@pytest.mark.parametrize('wanted', [0, 1, 2])
def test_one_gradient_alone_from_one_output_alone(wanted):
    exact = draw((2, 3, 4), 5, 12)
    ours = [x.float() for x in exact]
    expected, got = (
        torch.autograd.grad(
            function(*(x.requires_grad_(i == wanted) for i, x in enumerate(inputs)), 4)[2].sum(),
            inputs[wanted],
        )[0]
        for function, inputs in ((by_sum, exact), (pointwise_conv2d, ours))
    )
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_strided_tokens_and_gradients():
    x, weight, bias = (t.float() for t in draw((2, 3, 8), 5, 6))
    view = x.transpose(1, 2)[:, ::2].requires_grad_()
    (out,) = pointwise_conv2d(view, weight, bias)
    (expected,) = by_sum(view, weight, bias, 1)
    torch.testing.assert_close(out, expected)
    dout = torch.randn(out.shape[::-1]).permute(3, 2, 1, 0)
    got, want = (torch.autograd.grad(y, view, dout)[0] for y in (out, expected))
    torch.testing.assert_close(got, want)


def test_second_derivative_and_transforms():
    x, weight, bias = (t.float() for t in draw((1, 2, 3), 5, 8))
    weight.requires_grad_()
    x.requires_grad_()
    seconds = []
    for function in (by_sum, pointwise_conv2d):
        loss = sum(y.pow(3).sum() for y in function(x, weight, bias, 2))
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), weight)[0])
    torch.testing.assert_close(seconds[1], seconds[0], rtol=1e-4, atol=1e-3)
    jacobian = torch.func.jacrev(lambda b: pointwise_conv2d(x, weight, b)[0].sum((0, 1, 2)))(bias)
    torch.testing.assert_close(jacobian, 6 * torch.eye(8))


@pytest.mark.parametrize('num_outputs', [1, 2])
def test_outputs_can_be_changed_in_place(num_outputs):
    x, weight, bias = (t.float().requires_grad_() for t in draw((1, 2, 3), 5, 8))
    outs = pointwise_conv2d(x, weight, bias, num_outputs)
    (gradient,) = torch.autograd.grad([out.mul_(2).sum() for out in outs], bias)
    torch.testing.assert_close(gradient, torch.full((8,), 12.0))


def test_nothing_is_kept_for_frozen_weights():
    x, weight, bias = (t.float() for t in draw((2, 9, 7), 50, 4))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda _: None):
        pointwise_conv2d(x.requires_grad_(), weight, bias)
    assert sum(tensor.numel() for tensor in kept) <= weight.numel()


def test_multiply_adds_are_counted():
    x, weight, bias = (t.float().requires_grad_() for t in draw((1, 3, 2), 5, 8))
    with FlopCounterMode(display=False) as counter:
        torch.autograd.backward([out.sum() for out in pointwise_conv2d(x, weight, bias, 2)])
    assert counter.get_total_flops() == 3 * 2 * 6 * 5 * 8
