"""Depthwise convolution that keeps the size."""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from .modes import is_eager


def depthwise_conv2d(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Convolution of each channel with its own kernel, padded with zeros to the same size.

    Args:
        x (Tensor): ``[B, C, H, W]``.
        weight (Tensor): ``[C, 1, K, K]``, ``K`` odd.
        bias (Tensor): ``[C]``.

    Returns:
        Tensor: ``[B, C, H, W]``.
    """
    if (
        weight.shape[-1] == 5
        and x.is_cpu
        and weight.requires_grad
        and torch.is_grad_enabled()
        and not torch.is_autocast_enabled('cpu')
        and is_eager()
    ):
        return _Conv5x5.apply(x, weight, bias)
    return F.conv2d(x, weight, bias, padding=weight.shape[-1] // 2, groups=len(weight))


class _Conv5x5(torch.autograd.Function):
    """5x5 convolution for CPUs, where oneDNN has a fast weight gradient of 3x3 kernels only."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.conv2d(x, weight, bias, padding=2, groups=len(weight))

    @staticmethod
    def backward(ctx: FunctionCtx, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[0]:
            dx = _gradients(dout, x, weight, padding=2, mask=(True, False, False))[0]
        return dx, _weight_gradient(dout, x, weight), dout.sum((0, 2, 3))


def _weight_gradient(dout: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The corners of the kernel, 3x3 each; they overlap in the middle row and column."""
    height, width = x.shape[-2:]
    padded = F.pad(x, (2, 2, 2, 2))
    rows = []
    for i in (0, 2):
        corners = []
        for j in (0, 2):
            window = padded[:, :, i : i + height + 2, j : j + width + 2]
            corner = weight[:, :, i : i + 3, j : j + 3]
            corners.append(_gradients(dout, window, corner, 0, (False, True, False))[1])
        rows.append(torch.cat([corners[0], corners[1][..., 1:]], dim=-1))
    return torch.cat([rows[0], rows[1][..., 1:, :]], dim=-2)


def _gradients(dout: Tensor, x: Tensor, weight: Tensor, padding: int, mask: tuple) -> tuple:
    return torch.ops.aten.convolution_backward(
        dout, x, weight, None, (1, 1), (padding, padding), (1, 1), False, (0, 0), len(weight), mask
    )
