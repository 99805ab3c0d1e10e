"""Depthwise convolution that keeps the size."""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from .modes import is_eager


def depthwise_conv2d(x: Tensor, weight: Tensor, bias: Tensor, residual: bool = False) -> Tensor:
    """Convolution of each channel with its own kernel, padded with zeros to the same size.

    Args:
        x (Tensor): ``[B, C, H, W]``.
        weight (Tensor): ``[C, 1, K, K]``, ``K`` odd.
        bias (Tensor): ``[C]``.
        residual (bool): Add ``x`` to the result. Defaults to False.

    Returns:
        Tensor: ``[B, C, H, W]``.
    """
    kernel_size = weight.shape[-1]
    # TensorFloat-32 and half precision would round a weight that has a one added to it
    is_exact = x.is_cpu and x.dtype == weight.dtype and x.dtype in (torch.float32, torch.float64)
    is_exact = is_exact and not torch.is_autocast_enabled('cpu')
    if residual and is_exact:
        weight = weight + F.pad(weight.new_ones(1, 1, 1, 1), [kernel_size // 2] * 4)
    is_float32 = is_exact and x.dtype == torch.float32
    if kernel_size == 5 and is_float32 and weight.requires_grad and is_eager():
        return _Conv5x5.apply(x, weight, bias)
    y = F.conv2d(x, weight, bias, padding=kernel_size // 2, groups=len(weight))
    return y + x if residual and not is_exact else y


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
