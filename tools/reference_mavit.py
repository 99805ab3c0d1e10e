"""MAViT as it is usually written: the yardstick of tools/benchmark.py, with no speed-up of ours.

Maps stay ``[B, C, H, W]``; LayerNorm permutes them and back; attention rearranges heads and forms
the ``N x N`` scores; every step is a PyTorch operation of its own, in the dtype of its input. The
state dict is that of :class:`mala_mm.models.MAViT`. Not registered and not meant for models: in
half precision the linear attention may overflow and rotary positions are rounded.
"""

from collections.abc import Callable

import torch
from mmcv.cnn.bricks import DropPath
from torch import Tensor, nn
from torch.nn import functional as F

from mala_mm.models import MAViT
from mala_mm.ops import rotary_angles


class LayerNorm2d(nn.Module):
    """LayerNorm over the channels of ``[B, C, H, W]``."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x.permute(0, 2, 3, 1).contiguous())
        return x.permute(0, 3, 1, 2).contiguous()


def depthwise_conv(channels: int, kernel_size: int) -> nn.Conv2d:
    return nn.Conv2d(channels, channels, kernel_size, padding=kernel_size // 2, groups=channels)


class RotaryEmbedding(nn.Module):
    """Sines and cosines of a stage, ``[H W, D]`` each: rows in the first half, then columns."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.register_buffer('angle', rotary_angles(head_dim))

    def forward(self, height: int, width: int) -> tuple[Tensor, Tensor]:
        rows, columns = (
            torch.arange(length, device=self.angle.device)[:, None] * self.angle
            for length in (height, width)
        )
        rows = rows[:, None].expand(-1, width, -1)
        columns = columns[None].expand(height, -1, -1)
        turn = torch.cat([rows, columns], dim=-1).flatten(0, 1)
        return turn.sin(), turn.cos()


def rotate(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    """Turn neighbouring channel pairs of ``x [B, heads, H W, D]``."""
    turned = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
    return x * cos + turned * sin


class Attention(nn.Module):
    def __init__(self, channels: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scale = (channels // num_heads) ** -0.5
        self.qkvo = nn.Conv2d(channels, 4 * channels, 1)
        self.lepe = depthwise_conv(channels, 5)
        self.proj = nn.Conv2d(channels, channels, 1)

    def heads(self, x: Tensor) -> Tensor:
        """``[B, C, H, W]`` to ``[B, heads, H W, D]``."""
        return x.flatten(2).unflatten(1, (self.num_heads, -1)).transpose(2, 3).contiguous()

    def forward(self, x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
        q, k, v, o = self.qkvo(x).chunk(4, dim=1)
        lepe = self.lepe(v)
        y = self.attend(self.heads(q), self.heads(k), self.heads(v), sin, cos)
        y = y.transpose(2, 3).reshape(x.shape)
        return self.proj((y + lepe) * o)


class LinearAttention(Attention):
    """Magnitude-aware linear attention."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
        q, k = F.elu(q) + 1, F.elu(k) + 1
        z = q @ k.mean(dim=-2, keepdim=True).transpose(-2, -1) * self.scale
        q, k = rotate(q, sin, cos), rotate(k, sin, cos)
        kv = k.transpose(-2, -1) @ v * (self.scale / k.shape[-2])
        return q @ kv * (1 + 1 / (z + 1e-6)) - z * v.mean(dim=-2, keepdim=True)


class SoftmaxAttention(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
        q, k = rotate(q, sin, cos), rotate(k, sin, cos)
        scores = (q * self.scale) @ k.transpose(-2, -1)
        return scores.softmax(dim=-1) @ v


class FeedForward(nn.Module):
    def __init__(self, channels: int, hidden_channels: int) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(channels, hidden_channels, 1)
        self.act = nn.GELU()
        self.dwconv = depthwise_conv(hidden_channels, 3)
        self.fc2 = nn.Conv2d(hidden_channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.fc1(x))
        return self.fc2(x + self.dwconv(x))


class Block(nn.Module):
    def __init__(
        self,
        attention: Callable[[int, int], Attention],
        channels: int,
        num_heads: int,
        mlp_ratio: float,
        drop_path: float,
    ) -> None:
        super().__init__()
        self.pos = depthwise_conv(channels, 3)
        self.norm1 = LayerNorm2d(channels)
        self.attn = attention(channels, num_heads)
        self.norm2 = LayerNorm2d(channels)
        self.ffn = FeedForward(channels, int(mlp_ratio * channels))
        self.drop_path = DropPath(drop_path)
        self.gamma_1 = nn.Parameter(torch.ones(1, channels, 1, 1))
        self.gamma_2 = nn.Parameter(torch.ones(1, channels, 1, 1))

    def forward(self, x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
        x = x + self.pos(x)
        x = x + self.drop_path(self.gamma_1 * self.attn(self.norm1(x), sin, cos))
        return x + self.drop_path(self.gamma_2 * self.ffn(self.norm2(x)))


class Stem(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        layers = []
        for inputs, outputs, stride in ((3, half, 2), (half, half, 1), (half, half, 1)):
            layers += [
                nn.Conv2d(inputs, outputs, 3, stride, padding=1),
                nn.BatchNorm2d(outputs),
                nn.GELU(),
            ]
        layers += [nn.Conv2d(half, channels, 3, 2, padding=1), nn.BatchNorm2d(channels)]
        self.proj = nn.Sequential(*layers)

    def forward(self, image: Tensor) -> Tensor:
        return self.proj(image)


class Downsample(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.reduction = nn.Conv2d(inputs, outputs, 3, 2, padding=1)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.reduction(x))


class Stage(nn.Module):
    def __init__(self, blocks: list[Block], head_dim: int, downsample: Downsample | None) -> None:
        super().__init__()
        self.RoPE = RotaryEmbedding(head_dim)
        self.blocks = nn.ModuleList(blocks)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        sin, cos = self.RoPE(*x.shape[-2:])
        for block in self.blocks:
            x = block(x, sin, cos)
        return x


class ReferenceMAViT(nn.Module):
    """The plain version of an arch, ``[B, 3, H, W]`` to its four maps.

    Weights are PyTorch's defaults: load the state dict of the model to compare with.

    Args:
        arch (str | dict): As of :class:`mala_mm.models.MAViT`. Defaults to 't'.
    """

    def __init__(self, arch: str | dict = 't') -> None:
        super().__init__()
        if isinstance(arch, str):
            arch = MAViT.arch_settings[arch.lower()]
        dims, depths = arch['embed_dims'], arch['depths']
        rates = iter(torch.linspace(0, arch['drop_path_rate'], sum(depths)).tolist())
        self.patch_embed = Stem(dims[0])
        self.layers = nn.ModuleList()
        for i, (channels, heads) in enumerate(zip(dims, arch['num_heads'], strict=True)):
            attention = LinearAttention if i < 2 else SoftmaxAttention
            blocks = [
                Block(attention, channels, heads, arch['mlp_ratios'][i], next(rates))
                for _ in range(depths[i])
            ]
            downsample = Downsample(channels, dims[i + 1]) if i < 3 else None
            self.layers.append(Stage(blocks, channels // heads, downsample))
        self.extra_norms = nn.ModuleDict({str(i): LayerNorm2d(dims[i]) for i in range(4)})

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.patch_embed(x)
        outs = []
        for i, stage in enumerate(self.layers):
            x = stage(x)
            outs.append(self.extra_norms[str(i)](x))
            if stage.downsample is not None:
                x = stage.downsample(x)
        return tuple(outs)
