"""MALA in plain PyTorch: the definition, and the path for tracing, export and `torch.func`."""

import torch
from torch import Tensor
from torch.nn import functional as F

from .rotary import apply_rotary, rotary_tables

EPS = 1e-6


def feature_map(x: Tensor) -> Tensor:
    """``elu(x) + 1``, written so that it keeps its relative precision for very negative ``x``."""
    return x.clamp(max=0).exp() + F.relu(x)


def naive_mala_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    size: tuple[int, int],
    angle: Tensor | None = None,
    lepe: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """See :func:`mala_mm.ops.mala_attention`, which checks the arguments.

    All arithmetic is float32 (float64 for float64 inputs) whatever the input dtype: in half
    precision ``phi`` underflows and ``1 / z`` overflows.
    """
    device = 'cpu' if q.is_meta else q.device.type  # the meta device has no autocast
    with torch.autocast(device, enabled=False):
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        value = v.to(dtype)
        phi_q, phi_k = feature_map(q.to(dtype)), feature_map(k.to(dtype))
        num_tokens, head_dim = q.shape[-2:]
        scale = head_dim**-0.5

        z = phi_q @ (scale * phi_k.mean(-2)).unsqueeze(-1)  # [B, H, N, 1], features not rotated
        if angle is not None:
            cos, sin = rotary_tables(angle, *size, dtype)
            phi_q, phi_k = apply_rotary(phi_q, cos, sin), apply_rotary(phi_k, cos, sin)
        kv = phi_k.transpose(-2, -1) @ value * (scale / num_tokens)  # [B, H, D, D]
        y = (1 + 1 / (z + EPS)) * (phi_q @ kv) - z * value.mean(-2, keepdim=True)

        if lepe is not None:
            y = y + lepe.to(dtype)
        if gate is not None:
            y = y * gate.to(dtype)
        return y.to(v.dtype)
