"""Depthwise convolution against a sum over the kernel's taps, in float64."""

import pytest
import torch
from torch import Tensor

from mala_mm.ops import depthwise_conv2d


def by_taps(x: Tensor, weight: Tensor, bias: Tensor, residual: bool) -> Tensor:
    height, width = x.shape[-2:]
    reach = weight.shape[-1] // 2
    padded = torch.zeros(*x.shape[:2], height + 2 * reach, width + 2 * reach, dtype=x.dtype)
    padded[..., reach : reach + height, reach : reach + width] = x
    y = bias[:, None, None].expand(x.shape).clone()
    for i in range(2 * reach + 1):
        for j in range(2 * reach + 1):
            y += weight[:, 0, i, j][:, None, None] * padded[..., i : i + height, j : j + width]
    return y + x if residual else y


def draw(size: tuple[int, int], kernel_size: int, channels: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, *size, channels), (channels, 1, kernel_size, kernel_size), (channels,)]
    x, *rest = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [x.permute(0, 3, 1, 2), *rest]


@pytest.mark.parametrize('residual', [True, False])
@pytest.mark.parametrize('kernel_size', [3, 5])
@pytest.mark.parametrize('size', [(1, 1), (1, 9), (4, 3), (13, 17)])
@pytest.mark.parametrize(('dtype', 'tolerance'), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_output_and_gradients(size, kernel_size, residual, dtype, tolerance):
    exact = [x.requires_grad_() for x in draw(size, kernel_size)]
    ours = [x.detach().to(dtype).requires_grad_() for x in exact]
    expected = by_taps(*exact, residual)
    dout = torch.randn(expected.shape, dtype=torch.float64)
    out = depthwise_conv2d(*ours, residual)
    close = dict(rtol=tolerance, atol=10 * tolerance)
    torch.testing.assert_close(out.double(), expected, **close)
    gradients = torch.autograd.grad(out, ours, dout.to(dtype))
    for got, want in zip(gradients, torch.autograd.grad(expected, exact, dout), strict=True):
        torch.testing.assert_close(got.double(), want, **close)


def test_strided_channels():
    x, weight, bias = draw((7, 5), 5)
    wide = torch.cat([x, x + 1], dim=1).permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    view = wide[:, 6:].requires_grad_()
    weight.requires_grad_()
    out = depthwise_conv2d(view, weight, bias)
    torch.testing.assert_close(out, by_taps(x + 1, weight, bias, residual=False))
    (dweight,) = torch.autograd.grad(out.square().sum(), weight)
    (expected,) = torch.autograd.grad(
        by_taps(x + 1, weight, bias, residual=False).square().sum(), weight
    )
    torch.testing.assert_close(dweight, expected)


def test_second_derivatives_and_transforms():
    x, weight, bias = draw((3, 3), 5, channels=2)
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
    assert torch.autograd.gradgradcheck(depthwise_conv2d, leaves)
    gradient = torch.func.grad(lambda w: depthwise_conv2d(x, w, bias).square().sum())(weight)
    weight = weight.requires_grad_()
    (expected,) = torch.autograd.grad(
        by_taps(x, weight, bias, residual=False).square().sum(), weight
    )
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize('amp', [True, False])
def test_half_precision_keeps_small_weights_beside_the_residual(amp):
    # next to a one, bfloat16 has no digit for 1/1024
    x = torch.ones(1, 1, 3, 3)
    weight, bias = torch.full((1, 1, 3, 3), 2.0**-10), torch.zeros(1)
    if not amp:
        x, weight, bias = (t.bfloat16() for t in (x, weight, bias))
    with torch.autocast('cpu', dtype=torch.bfloat16, enabled=amp):
        out = depthwise_conv2d(x * 2.0**-10, weight, bias, residual=True)
    expected = 2.0**-10 * (1 + 9 * 2.0**-10)
    assert out[0, 0, 1, 1].item() == pytest.approx(expected, rel=2**-8)
    assert out[0, 0, 1, 1].item() > 2.0**-10
