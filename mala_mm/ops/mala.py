"""The public operator: argument checks and the choice of implementation."""

import os
from functools import cache
from typing import Literal
from warnings import warn

import torch
from torch import Tensor
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import _disable_current_modes

from .mala_operators import define_operator
from .modes import has_forward_mode, is_traced, is_transformed
from .naive import naive_mala_attention

BACKENDS = ('auto', 'torch', 'triton')
MAX_KERNEL_HEAD_DIM = 128
MIN_TRITON = '3.6'  # the first with bf16x3 products

triton_mala_attention = define_operator('mala_attention', module='mala_kernels')
chunked_mala_attention = define_operator('chunked_mala_attention', module='mala_chunked')


def mala_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    size: tuple[int, int],
    angle: Tensor | None = None,
    lepe: Tensor | None = None,
    gate: Tensor | None = None,
    backend: Literal['auto', 'torch', 'triton'] = 'auto',
) -> Tensor:
    r"""Magnitude-Aware Linear Attention over the tokens of a 2-D grid (arXiv 2507.00698).

    With ``phi(x) = elu(x) + 1``, ``s = D^-1/2`` and the rotary embedding ``R``::

        z_i = s * phi(q_i) . mean_j phi(k_j)
        KV  = s / N * sum_j R_j phi(k_j)^T v_j
        y_i = (1 + 1 / (z_i + 1e-6)) * R_i phi(q_i) KV - z_i * mean_j v_j
        out = (y + lepe) * gate

    Args:
        q (Tensor): Queries ``[B, H, N, D]``, float32, float64, float16 or bfloat16. Strided views,
            such as slices of one projection, need no copy.
        k (Tensor): Keys, as ``q``.
        v (Tensor): Values, as ``q``.
        size (tuple[int, int]): Rows and columns of the token grid, row-major, ``N`` in all.
        angle (Tensor, optional): Rotary angles ``[D/2]`` (:func:`mala_mm.ops.rotary_angles`).
            Defaults to None, no rotation.
        lepe (Tensor, optional): Local positional encoding added to the result, as ``q``.
            Defaults to None.
        gate (Tensor, optional): Factor of the result, as ``q``. Defaults to None.
        backend (str): ``'triton'``, the fused kernel: CUDA tensors, float32, float16 or bfloat16,
            ``D`` a multiple of 4 up to 128, first derivatives in reverse mode, none for ``angle``.
            ``'torch'``, the definition in plain PyTorch, with all derivatives. ``'auto'``, the
            kernel where it can serve, and the same passes in PyTorch on the CPU, with the same
            derivatives. Tracing, export (ONNX, ``torch.export``) and ``torch.func`` always take
            the definition. Defaults to ``'auto'``.

    Returns:
        Tensor: ``[B, H, N, D]`` in the inputs' dtype. Computed in float32 (float64 for float64
        inputs), also under autocast; the kernel's matrix products are described in
        :func:`mala_mm.ops.mala_kernels.dot_precision`.

    Raises:
        ValueError: If shapes, dtypes or devices do not fit together, or ``backend`` is unknown.
        RuntimeError: If ``backend='triton'`` and the kernel cannot serve.
    """
    _check_arguments(q, k, v, size, angle, lepe, gate)
    if backend not in BACKENDS:
        raise ValueError(f'backend must be one of {", ".join(BACKENDS)}, got {backend!r}')
    height, width = size
    if _takes_kernel(backend, q, angle):
        return triton_mala_attention(q, k, v, height, width, angle, lepe, gate)[0]
    if _takes_chunks(backend, q, angle):
        return chunked_mala_attention(q, k, v, height, width, angle, lepe, gate)[0]
    return naive_mala_attention(q, k, v, (height, width), angle, lepe, gate)


def _check_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    size: tuple[int, int],
    angle: Tensor | None,
    lepe: Tensor | None,
    gate: Tensor | None,
) -> None:
    if q.dim() != 4:
        raise ValueError(f'q must have the shape [B, H, N, D], got {tuple(q.shape)}')
    if not q.dtype.is_floating_point:
        raise ValueError(f'q must be of a floating-point dtype, got {q.dtype}')
    for name, tensor in dict(k=k, v=v, lepe=lepe, gate=gate).items():
        if tensor is None:
            continue
        if tensor.shape != q.shape:
            raise ValueError(
                f'{name} must have the shape of q, {tuple(q.shape)}, got {tuple(tensor.shape)}'
            )
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(
                f'{name} must be {q.dtype} on {q.device} as q is, '
                f'got {tensor.dtype} on {tensor.device}'
            )
    num_tokens, head_dim = q.shape[-2:]
    if head_dim < 1:
        raise ValueError(f'q must have a channel at least, got the shape {tuple(q.shape)}')
    height, width = size
    if height * width != num_tokens or height < 1 or width < 1:
        raise ValueError(
            f'size must hold the {num_tokens} tokens of q and at least one, got {height} x {width}'
        )
    if angle is None:
        return
    if head_dim % 4:
        raise ValueError(
            f'rotation needs a head dim that is a multiple of 4, got {head_dim}; '
            'pass angle=None for no rotation'
        )
    if angle.shape != (head_dim // 2,) or not angle.dtype.is_floating_point:
        raise ValueError(
            f'angle must be floating-point of the shape [D/2] = ({head_dim // 2},), '
            f'got {angle.dtype} {tuple(angle.shape)}'
        )
    if angle.device != q.device:
        raise ValueError(f'angle must be on {q.device} as q is, got {angle.device}')


def _takes_kernel(backend: str, q: Tensor, angle: Tensor | None) -> bool:
    if backend == 'torch' or (backend == 'auto' and not q.is_cuda):
        return False
    if is_traced():
        return False
    obstacle = _input_obstacle(q) or _derivative_obstacle(angle)
    if obstacle is None:
        obstacle = _triton_obstacle(str(q.device), q.dtype, q.shape[-1], backend == 'auto')
    if obstacle is not None and backend == 'triton':
        raise RuntimeError(f"backend='triton' cannot serve: {obstacle}; use 'auto' or 'torch'")
    return obstacle is None


def _takes_chunks(backend: str, q: Tensor, angle: Tensor | None) -> bool:
    if backend != 'auto' or not q.is_cpu or q.numel() == 0 or is_traced():
        return False
    return _derivative_obstacle(angle) is None


def _input_obstacle(q: Tensor) -> str | None:
    """Why the kernel cannot take these inputs, None if it can."""
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f'the kernel takes float32, float16 and bfloat16, got {q.dtype}'
    if q.shape[-1] % 4 or not 0 < q.shape[-1] <= MAX_KERNEL_HEAD_DIM:
        return (
            f'the kernel takes head dims that are multiples of 4 up to {MAX_KERNEL_HEAD_DIM}, '
            f'got {q.shape[-1]}'
        )
    if q.shape[0] * q.shape[1] == 0:
        return f'the kernel takes at least one head, got the shape {tuple(q.shape)}'
    if q.shape[2] * q.shape[3] >= 2**33:
        return 'the kernel takes heads of fewer than 2^33 elements: it counts in 32 bits within one'
    return None


def _derivative_obstacle(angle: Tensor | None) -> str | None:
    """Which derivative the operators do not have, None if they have those that are asked for."""
    if angle is not None and angle.requires_grad and torch.is_grad_enabled():
        return 'the kernel gives no gradient for angle'
    if has_forward_mode():
        return 'the kernel has no forward-mode derivative'
    if is_transformed():
        return 'the kernel is closed to torch.func'
    return None


@torch.compiler.assume_constant_result
def _triton_obstacle(device: str, dtype: torch.dtype, head_dim: int, warns: bool) -> str | None:
    obstacle = find_triton_obstacle(device, dtype, head_dim)
    if obstacle is not None and warns:
        _warn_of_torch_path(obstacle)
    return obstacle


@cache
def find_triton_obstacle(device: str, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the kernel cannot run, None if it can: found by running it on one token, once."""
    if not device.startswith('cuda') and os.environ.get('TRITON_INTERPRET') != '1':
        return f'the kernel takes CUDA tensors, got {device}'
    try:
        import triton

        if TorchVersion(triton.__version__) < MIN_TRITON:
            return f'the kernel needs Triton {MIN_TRITON} or newer, found {triton.__version__}'
        from .mala_kernels import mala_bwd, mala_fwd

        with _disable_current_modes():  # fake tensors have no memory to run on
            x = torch.zeros(1, 1, 1, head_dim, dtype=dtype, device=device)
            options = (1, 1, torch.zeros(head_dim // 2, device=device, dtype=torch.float32), x, x)
            _, state = mala_fwd(x, x, x, *options)
            mala_bwd(x, x, x, x, state, *options)
    except torch.OutOfMemoryError:  # says nothing about the kernel
        raise
    except Exception as error:  # Triton raises whatever its compiler, driver or loader met
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f'Triton does not work here: {reason}'
    return None


@cache
def _warn_of_torch_path(obstacle: str) -> None:
    warn(f'mala_attention takes the slower PyTorch path. {obstacle}', stacklevel=5)
