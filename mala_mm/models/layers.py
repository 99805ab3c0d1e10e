"""The parts of MAViT. Tokens are channels-last, ``[B, H, W, C]``, from the stem to the outputs.

Weights keep the shapes and names of the published checkpoints: a 1x1 convolution is stored as one
and applied to the last dimension.
"""

from collections.abc import Callable
from functools import partial

import torch
from mmcv.cnn import build_norm_layer
from mmcv.cnn.bricks import DropPath
from torch import Tensor, nn
from torch.nn import functional as F

from mala_mm.ops import (
    apply_rotary,
    depthwise_conv2d,
    mala_attention,
    pointwise_conv2d,
    rotary_angles,
    rotary_tables,
)
from mala_mm.ops.modes import is_eager


class PointwiseConv(nn.Conv2d):
    """1x1 convolution on ``[B, H, W, C]``; its result times ``scale [C_out]``, if there is one."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, kernel_size=1)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        weight, bias = self.weight, self.bias
        if scale is None:
            return pointwise_conv2d(x, weight, bias)[0]
        if x.dtype == torch.float16:  # which has no room for a weight times 1e-6
            return pointwise_conv2d(x, weight, bias)[0] * scale
        return pointwise_conv2d(x, weight * scale.view(-1, 1, 1, 1), bias * scale)[0]


class Projections(nn.Conv2d):
    """1x1 convolution from ``[B, H, W, C]`` to ``num_outputs`` tensors of the same shape."""

    def __init__(self, channels: int, num_outputs: int) -> None:
        super().__init__(channels, num_outputs * channels, kernel_size=1)
        self.num_outputs = num_outputs

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return pointwise_conv2d(x, self.weight, self.bias, self.num_outputs)


class DepthwiseConv(nn.Conv2d):
    """Depthwise convolution on ``[B, H, W, C]`` that keeps the size.

    Args:
        channels (int): ``C``.
        kernel_size (int): Odd.
        residual (bool): Add the input to the result. Defaults to False.
    """

    def __init__(self, channels: int, kernel_size: int, residual: bool = False) -> None:
        super().__init__(channels, channels, kernel_size, padding=kernel_size // 2, groups=channels)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        y = depthwise_conv2d(x.permute(0, 3, 1, 2), self.weight, self.bias, self.residual)
        return y.permute(0, 2, 3, 1)


class TokenNorm(nn.Module):
    """LayerNorm over the channels of ``[B, H, W, C]``, under the published key ``norm``."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class RotaryEmbedding(nn.Module):
    """The rotary angles of a stage, which stay float32 in a half-precision model.

    Args:
        head_dim (int): Channels of a head, a multiple of 4.
    """

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.register_buffer('angle', rotary_angles(head_dim))

    def _apply(self, fn: Callable, recurse: bool = True) -> 'RotaryEmbedding':
        angle = self.angle
        super()._apply(fn, recurse)
        # a position of several hundred times a rounded angle would be wrong by whole turns
        if self.angle.dtype != angle.dtype:
            self.angle = angle.to(self.angle.device)
        return self

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args) -> None:
        # the angles follow from the head dim; a file may hold them in half precision
        loaded = state_dict.get(prefix + 'angle')
        if loaded is not None and loaded.shape == self.angle.shape:
            state_dict[prefix + 'angle'] = rotary_angles(self.head_dim).to(loaded.device)
        super()._load_from_state_dict(state_dict, prefix, *args)


class GatedAttention(nn.Module):
    """What both kinds of attention share: projections, LePE and gate.

    ``proj((attend(q, k, v) + lepe(v)) * o)`` with ``q, k, v, o`` from one projection.

    Args:
        channels (int): ``C``.
        num_heads (int): Heads of ``C / num_heads`` channels each.
    """

    def __init__(self, channels: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkvo = Projections(channels, num_outputs=4)
        self.lepe = DepthwiseConv(channels, kernel_size=5)
        self.proj = PointwiseConv(channels, channels)

    def forward(self, x: Tensor, angle: Tensor, scale: Tensor) -> Tensor:
        """``[B, H, W, C]`` to the same shape.

        Args:
            x (Tensor): Normalised tokens.
            angle (Tensor): Rotary angles ``[D/2]``.
            scale (Tensor): Factor of the result's channels ``[C]``.
        """
        q, k, v, o = self.qkvo(x)
        q, k, v, o, lepe = map(self._split_heads, (q, k, v, o, self.lepe(v)))
        y = self.attend(q, k, v, x.shape[1:3], angle, lepe, o)
        return self.proj(y.transpose(1, 2).reshape(x.shape), scale)

    def _split_heads(self, x: Tensor) -> Tensor:
        """``[B, H, W, C]`` to ``[B, num_heads, N, D]``."""
        return x.flatten(1, 2).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class MagnitudeAwareLinearAttention(GatedAttention):
    """MALA (arXiv 2507.00698): linear in the number of tokens.

    Args:
        channels (int): ``C``.
        num_heads (int): Heads of ``C / num_heads`` channels each.
        backend (str): Implementation, as of :func:`mala_mm.ops.mala_attention`. Defaults to
            'auto'.
    """

    def __init__(self, channels: int, num_heads: int, backend: str = 'auto') -> None:
        super().__init__(channels, num_heads)
        self.attend = partial(mala_attention, backend=backend)


class SoftmaxAttention(GatedAttention):
    """Softmax attention with the same rotary embedding, LePE and gate."""

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        size: tuple[int, int],
        angle: Tensor,
        lepe: Tensor,
        gate: Tensor,
    ) -> Tensor:
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        cos, sin = rotary_tables(angle, *size, dtype)
        q, k = (apply_rotary(x.to(dtype), cos, sin).to(v.dtype) for x in (q, k))
        # every row is read many times: on the CPU that is worth a copy of the strided view
        return (F.scaled_dot_product_attention(q, k, v.contiguous()) + lepe) * gate


class FeedForward(nn.Module):
    """Two pointwise convolutions with GELU and a residual depthwise convolution between them."""

    def __init__(self, channels: int, hidden_channels: int) -> None:
        super().__init__()
        self.fc1 = PointwiseConv(channels, hidden_channels)
        self.dwconv = DepthwiseConv(hidden_channels, kernel_size=3, residual=True)
        self.fc2 = PointwiseConv(hidden_channels, channels)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        """``[B, H, W, C]`` to the same shape, its channels times ``scale [C]``."""
        x = self.fc1(x)
        # in place only where no gradient needs x and no exporter would have to know gelu_
        is_free = is_eager() and not torch.is_grad_enabled()
        x = torch.ops.aten.gelu_(x) if is_free else F.gelu(x)
        return self.fc2(self.dwconv(x), scale)


class MAViTBlock(nn.Module):
    """Positional convolution, attention and feed-forward, each with its residual.

    Args:
        attention (Callable): Builds the attention from ``channels`` and ``num_heads``.
        channels (int): ``C``.
        num_heads (int): Heads of the attention.
        mlp_ratio (float): The feed-forward has ``int(mlp_ratio * C)`` hidden channels.
        drop_path (float): Probability of dropping a residual branch of a sample.
        layer_scale_init (float): Initial value of the branches' factors ``gamma_1, gamma_2``.
    """

    def __init__(
        self,
        attention: Callable[[int, int], GatedAttention],
        channels: int,
        num_heads: int,
        mlp_ratio: float,
        drop_path: float,
        layer_scale_init: float,
    ) -> None:
        super().__init__()
        self.pos = DepthwiseConv(channels, kernel_size=3, residual=True)
        self.norm1 = TokenNorm(channels)
        self.attn = attention(channels, num_heads)
        self.norm2 = TokenNorm(channels)
        self.ffn = FeedForward(channels, int(mlp_ratio * channels))
        self.drop_path = DropPath(drop_path)
        # published as [1, C, 1, 1], for channels-first maps
        self.gamma_1 = nn.Parameter(torch.full((1, channels, 1, 1), float(layer_scale_init)))
        self.gamma_2 = nn.Parameter(torch.full((1, channels, 1, 1), float(layer_scale_init)))

    def forward(self, x: Tensor, angle: Tensor) -> Tensor:
        scale_1, scale_2 = self.gamma_1.flatten(), self.gamma_2.flatten()
        if not torch.is_grad_enabled():
            # a module's argument that asks for a gradient where there is none ends FlopCounterMode
            scale_1, scale_2 = scale_1.detach(), scale_2.detach()
        x = self.pos(x)
        x = self._add_branch(x, lambda x: self.attn(self.norm1(x), angle, scale_1))
        return self._add_branch(x, lambda x: self.ffn(self.norm2(x), scale_2))

    def _add_branch(self, x: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        if not (self.training and self.drop_path.drop_prob):
            return x + branch(x)
        factor = self.drop_path(x.new_ones(len(x), 1, 1, 1))
        # to know the dropped samples would make a GPU wait
        if x.is_cpu and is_eager() and not factor.all():
            kept = factor.flatten().nonzero().flatten()
            # with no sample left the branch still gives its weights a gradient, zero
            y = factor[kept] * branch(x[kept])
            return x.to(y.dtype).index_add(0, kept, y)
        return torch.addcmul(x, factor, branch(x))


class Stem(nn.Module):
    """Four convolutions from an image ``[B, 3, H, W]`` to tokens at a quarter of its size."""

    def __init__(self, channels: int, norm_cfg: dict) -> None:
        super().__init__()
        half = channels // 2
        layers = []
        for in_channels, out_channels, stride in (
            (3, half, 2),
            (half, half, 1),
            (half, half, 1),
            (half, channels, 2),
        ):
            layers += [
                nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=stride, padding=1),
                build_norm_layer(norm_cfg, out_channels)[1],
                nn.GELU(),
            ]
        self.proj = nn.Sequential(*layers[:-1])

    def forward(self, image: Tensor) -> Tensor:
        image = image.contiguous(memory_format=torch.channels_last)
        return self.proj(image).permute(0, 2, 3, 1).contiguous()


class Downsample(nn.Module):
    """Strided convolution between stages, ``[B, H, W, C]`` to half the size, rounded up."""

    def __init__(self, in_channels: int, out_channels: int, norm_cfg: dict) -> None:
        super().__init__()
        self.reduction = nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=2, padding=1)
        self.norm = build_norm_layer(norm_cfg, out_channels)[1]

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.reduction(x.permute(0, 3, 1, 2)))
        return x.permute(0, 2, 3, 1).contiguous()
