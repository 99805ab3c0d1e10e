"""1x1 convolution of channels-last tokens."""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from .modes import is_eager

NARROW = 256  # with fewer channels a CPU spends as long on moving tokens as on the product


def pointwise_conv2d(
    x: Tensor, weight: Tensor, bias: Tensor, num_outputs: int = 1
) -> tuple[Tensor, ...]:
    """Linear layer over the channels, its result in pieces.

    Args:
        x (Tensor): ``[B, H, W, C_in]``.
        weight (Tensor): ``[C_out, C_in, 1, 1]``.
        bias (Tensor): ``[C_out]``.
        num_outputs (int): Pieces of the result, ``C_out`` a multiple of them. Defaults to 1.

    Returns:
        tuple[Tensor, ...]: ``num_outputs`` tensors ``[B, H, W, C_out / num_outputs]``.
    """
    if _is_plain_float32(x, weight) and min(x.shape[-1], len(weight) // num_outputs) < NARROW:
        outs = _NarrowConv.apply(x.permute(0, 3, 1, 2), weight, bias, num_outputs)
        return tuple(out.permute(0, 2, 3, 1) for out in outs)
    out = F.linear(x, weight.flatten(1), bias)
    return (out,) if num_outputs == 1 else out.chunk(num_outputs, dim=-1)


def _is_plain_float32(x: Tensor, weight: Tensor) -> bool:
    is_float32 = x.is_cpu and x.dtype == weight.dtype == torch.float32
    return (
        is_float32
        and is_eager()
        and not torch.is_autocast_enabled('cpu')
        and torch.backends.mkldnn.is_available()
    )


class _NarrowConv(torch.autograd.Function):
    """For CPUs: oneDNN adds the bias within the product, and no piece is copied into a whole."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor, num_outputs: int
    ) -> tuple[Tensor, ...]:
        needs_dx, needs_dweight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_dweight else None, weight if needs_dx else None)
        pieces = zip(weight.chunk(num_outputs), bias.chunk(num_outputs), strict=True)
        return tuple(F.conv2d(x, *piece) for piece in pieces)

    @staticmethod
    def backward(ctx: FunctionCtx, *douts: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grid = douts[0][:, 0].shape
        douts = [_tokens(dout) for dout in douts]
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            weights = weight.flatten(1).chunk(len(douts))
            dx = douts[0] @ weights[0]
            for dout, piece in zip(douts[1:], weights[1:], strict=True):
                dx.addmm_(dout, piece)
            dx = dx.unflatten(0, grid).permute(0, 3, 1, 2)
        if ctx.needs_input_grad[1]:
            dweight = _joined([dout.mT @ _tokens(x) for dout in douts])[..., None, None]
        if ctx.needs_input_grad[2]:
            dbias = _joined([dout.sum(0) for dout in douts])
        return dx, dweight, dbias, None


def _tokens(x: Tensor) -> Tensor:
    """``[B, C, H, W]`` to ``[N, C]``."""
    return x.permute(0, 2, 3, 1).flatten(0, 2)


def _joined(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
