"""The MAViT backbone."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Integral, Real
from typing import Any, Literal

import torch
from mmengine.model import BaseModule, ModuleList
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from mala_mm.checkpoint import CheckpointError, is_pretrained
from mala_mm.ops import BACKENDS
from mala_mm.registry import MODELS

from .layers import (
    Downsample,
    MagnitudeAwareLinearAttention,
    MAViTBlock,
    RotaryEmbedding,
    SoftmaxAttention,
    Stem,
    TokenNorm,
)

NUM_STAGES = 4
NUM_LINEAR_STAGES = 2  # the first, with most tokens


class Stage(nn.Module):
    """Blocks of one width, and the downsampling to the next stage where there is one."""

    def __init__(self, blocks: list[MAViTBlock], head_dim: int, downsample: nn.Module | None):
        super().__init__()
        self.RoPE = RotaryEmbedding(head_dim)  # the published key
        self.blocks = nn.ModuleList(blocks)
        self.downsample = downsample

    def forward(self, x: Tensor, with_cp: bool) -> Tensor:
        """``[B, H, W, C]`` to the same shape, before the downsampling."""
        for block in self.blocks:
            if with_cp and torch.is_grad_enabled():
                x = checkpoint(block, x, self.RoPE.angle, use_reentrant=False)
            else:
                x = block(x, self.RoPE.angle)
        return x


@MODELS.register_module()
class MAViT(BaseModule):
    """MAViT: a hierarchical backbone with linear attention in its two large stages.

    "Rectifying Magnitude Neglect in Linear Attention", ICCV 2025, arXiv 2507.00698. State dicts
    have the keys and shapes of the published checkpoints.

    Args:
        arch (str | dict): 't', 's', 'b' or 'l' (either case), or a dict with the keys of
            :attr:`arch_settings`: four values each of ``embed_dims``, ``depths``, ``num_heads``,
            ``mlp_ratios`` and ``layer_scale_init``, and one ``drop_path_rate``. Defaults to 't'.
        out_indices (Sequence[int]): Stages to return, increasing, out of 0..3. Later stages and
            the norms of other stages are not built. Defaults to (0, 1, 2, 3).
        frozen_stages (int): -1 freezes nothing, 0 the stem, ``i`` the stem and the first ``i``
            stages with their downsampling and output norm. Defaults to -1.
        drop_path_rate (float, optional): Stochastic depth of the last block; it rises linearly
            from 0 over all blocks of the arch. Defaults to None, the arch's own rate.
        norm_cfg (dict): Norm of the stem and the downsampling; the published models were trained
            with SyncBN. Defaults to ``dict(type='BN')``.
        norm_eval (bool): Keep the statistics of these norms fixed in training. Defaults to False.
        with_cp (bool): Recompute each block in the backward pass to save memory. Defaults to
            False.
        attn_backend (str): Implementation of the linear attention: 'triton', the fused kernel, or
            an error where it cannot run; 'torch', the definition in plain PyTorch; 'auto', the
            kernel on CUDA devices where Triton works, its passes in PyTorch on the CPU. Defaults
            to 'auto'.
        init_cfg (dict | list[dict] | str, optional): ``dict(type='Pretrained', checkpoint=...)``,
            or the path or URL alone, loads a published file as it is. Defaults to None, the
            published initialisation.

    Raises:
        ValueError: If an argument is out of its range; the message names the expected one.
    """

    arch_settings = {
        't': dict(
            embed_dims=(64, 128, 256, 512),
            depths=(2, 2, 6, 2),
            num_heads=(1, 2, 4, 8),
            mlp_ratios=(3.5, 3.5, 3.5, 3.5),
            layer_scale_init=(1.0, 1.0, 1.0, 1.0),
            drop_path_rate=0.1,
        ),
        's': dict(
            embed_dims=(64, 128, 320, 512),
            depths=(3, 5, 9, 3),
            num_heads=(1, 2, 5, 8),
            mlp_ratios=(3.5, 3.5, 3.5, 3.5),
            layer_scale_init=(1.0, 1.0, 1.0, 1.0),
            drop_path_rate=0.15,
        ),
        'b': dict(
            embed_dims=(96, 192, 384, 512),
            depths=(4, 6, 12, 6),
            num_heads=(1, 2, 6, 8),
            mlp_ratios=(3.5, 3.5, 3.5, 3.5),
            layer_scale_init=(1.0, 1.0, 1e-6, 1e-6),
            drop_path_rate=0.4,
        ),
        'l': dict(
            embed_dims=(96, 192, 448, 640),
            depths=(4, 7, 19, 8),
            num_heads=(1, 2, 7, 10),
            mlp_ratios=(3.5, 3.5, 3.5, 3.5),
            layer_scale_init=(1e-6, 1e-6, 1e-6, 1e-6),
            drop_path_rate=0.55,
        ),
    }

    def __init__(
        self,
        arch: str | dict = 't',
        out_indices: Sequence[int] = (0, 1, 2, 3),
        frozen_stages: int = -1,
        drop_path_rate: float | None = None,
        norm_cfg: dict | None = None,
        norm_eval: bool = False,
        with_cp: bool = False,
        attn_backend: Literal['auto', 'torch', 'triton'] = 'auto',
        init_cfg: dict | list[dict] | str | None = None,
    ) -> None:
        if isinstance(init_cfg, str):
            init_cfg = dict(type='Pretrained', checkpoint=init_cfg)
        if init_cfg is None:
            init_cfg = [
                dict(type='TruncNormal', layer='Conv2d', std=0.02, bias=0.0),
                dict(type='Constant', layer=['LayerNorm', '_BatchNorm'], val=1.0, bias=0.0),
            ]
        super().__init__(init_cfg)
        arch = self._parse_arch(arch)
        if not _is_sequence(out_indices, lambda i: _is_whole(i) and i < NUM_STAGES) or (
            not out_indices or list(out_indices) != sorted(set(out_indices))
        ):
            raise ValueError(
                f'out_indices must be increasing stage numbers out of 0..{NUM_STAGES - 1}, '
                f'got {out_indices!r}'
            )
        out_indices = tuple(out_indices)
        num_built = out_indices[-1] + 1
        if frozen_stages not in range(-1, num_built + 1):
            raise ValueError(
                f'frozen_stages must be -1 (none), 0 (stem) or a number of stages up to the '
                f'{num_built} that out_indices={out_indices} builds, got {frozen_stages}'
            )
        if drop_path_rate is None:
            drop_path_rate = arch['drop_path_rate']
        if not _is_number(drop_path_rate) or not 0 <= drop_path_rate < 1:
            raise ValueError(f'drop_path_rate must lie in [0, 1), got {drop_path_rate!r}')
        if attn_backend not in BACKENDS:
            raise ValueError(
                f'attn_backend must be one of {", ".join(BACKENDS)}, got {attn_backend!r}'
            )
        norm_cfg = norm_cfg or dict(type='BN')

        self.embed_dims = arch['embed_dims']
        self.out_indices = out_indices
        self.frozen_stages = frozen_stages
        self.norm_eval = norm_eval
        self.with_cp = with_cp

        depths = arch['depths']
        drop_path = torch.linspace(0, drop_path_rate, sum(depths), device='cpu').split(list(depths))
        linear_attention = partial(MagnitudeAwareLinearAttention, backend=attn_backend)
        self.patch_embed = Stem(self.embed_dims[0], norm_cfg)
        self.layers = ModuleList()
        for i in range(num_built):
            channels, num_heads = self.embed_dims[i], arch['num_heads'][i]
            blocks = [
                MAViTBlock(
                    linear_attention if i < NUM_LINEAR_STAGES else SoftmaxAttention,
                    channels,
                    num_heads,
                    arch['mlp_ratios'][i],
                    rate,
                    arch['layer_scale_init'][i],
                )
                for rate in drop_path[i].tolist()
            ]
            is_last = i + 1 == num_built
            downsample = None if is_last else Downsample(channels, self.embed_dims[i + 1], norm_cfg)
            self.layers.append(Stage(blocks, channels // num_heads, downsample))
        self.extra_norms = nn.ModuleDict(
            {str(i): TokenNorm(self.embed_dims[i]) for i in out_indices}
        )
        self._freeze_stages()

    @classmethod
    def _parse_arch(cls, arch: str | dict) -> dict:
        if isinstance(arch, str):
            if arch.lower() not in cls.arch_settings:
                raise ValueError(
                    f'arch must be one of {", ".join(cls.arch_settings)} or a dict, got {arch!r}'
                )
            return cls.arch_settings[arch.lower()]
        if not isinstance(arch, dict):
            raise ValueError(f'arch must be a name or a dict, got {arch!r}')
        keys = set(cls.arch_settings['t'])
        if set(arch) != keys:
            raise ValueError(
                f'an arch dict has the keys {", ".join(sorted(keys))}; '
                f'missing: {sorted(keys - set(arch))}, unknown: {sorted(set(arch) - keys)}'
            )
        expected = dict.fromkeys(
            ('embed_dims', 'depths', 'num_heads'),
            ('whole numbers from 1', lambda value: _is_whole(value) and value >= 1),
        )
        expected['mlp_ratios'] = ('positive numbers', lambda value: _is_number(value) and value > 0)
        expected['layer_scale_init'] = ('numbers', _is_number)
        for key, (kind, is_valid) in expected.items():
            if not _is_sequence(arch[key], is_valid) or len(arch[key]) != NUM_STAGES:
                raise ValueError(f'arch[{key!r}] must be {NUM_STAGES} {kind}, got {arch[key]!r}')
        for channels, num_heads in zip(arch['embed_dims'], arch['num_heads'], strict=True):
            if channels % (4 * num_heads):
                raise ValueError(
                    'each of embed_dims must be a multiple of 4 times its num_heads, '
                    f'got {channels} for {num_heads} heads'
                )
        return arch

    def _frozen_modules(self) -> list[nn.Module]:
        if self.frozen_stages < 0:
            return []
        norms = [
            self.extra_norms[str(i)] for i in range(self.frozen_stages) if i in self.out_indices
        ]
        return [self.patch_embed, *self.layers[: self.frozen_stages], *norms]

    def _freeze_stages(self) -> None:
        for module in self._frozen_modules():
            module.eval()
            module.requires_grad_(False)

    def train(self, mode: bool = True) -> 'MAViT':
        """Set the mode; frozen stages, and norms under ``norm_eval``, stay in eval mode."""
        super().train(mode)
        self._freeze_stages()
        if mode and self.norm_eval:
            for module in self.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
        return self

    def init_weights(self) -> None:
        """Initialise as ``init_cfg`` says; pretrained weights must fit (see `load_backbone`)."""
        from mala_mm.weights import load_backbone  # which knows this class

        init_cfg = self.init_cfg
        pretrained, others = [], []
        for cfg in init_cfg if isinstance(init_cfg, list) else [init_cfg]:
            (pretrained if is_pretrained(cfg) else others).append(cfg)
        if others:
            self.init_cfg = others
            super().init_weights()
            self.init_cfg = init_cfg
        for cfg in pretrained:
            if not cfg.get('checkpoint'):
                raise CheckpointError('init_cfg of type Pretrained needs a checkpoint=PATH_OR_URL')
            load_backbone(self, cfg['checkpoint'], cfg.get('prefix'))
        self._is_init = True

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Feature maps of an image batch.

        Args:
            x (Tensor): ``[B, 3, H, W]``, any ``H, W >= 1``.

        Returns:
            tuple[Tensor]: For each of ``out_indices`` a map ``[B, embed_dims[i], H_i, W_i]``,
            where the sizes are the image's divided by 4, 8, 16 and 32, each halving rounded up.
        """
        x = self.patch_embed(x)
        outs = []
        for i, stage in enumerate(self.layers):
            x = stage(x, self.with_cp and self.training)
            if i in self.out_indices:
                outs.append(self.extra_norms[str(i)](x).permute(0, 3, 1, 2))
            if stage.downsample is not None:
                x = stage.downsample(x)
        return tuple(outs)


def _is_sequence(value: Any, is_valid: Callable[[Any], bool]) -> bool:
    is_plain = isinstance(value, Sequence) and not isinstance(value, str)
    return is_plain and all(map(is_valid, value))


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
