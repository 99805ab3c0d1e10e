"""The public operator: argument checks and the choice of implementation."""

from torch import Tensor

from .naive import naive_mala_attention


def mala_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    size: tuple[int, int],
    angle: Tensor | None = None,
    lepe: Tensor | None = None,
    gate: Tensor | None = None,
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

    Returns:
        Tensor: ``[B, H, N, D]`` in the inputs' dtype. Computed in float32 (float64 for float64
        inputs), also under autocast.

    Raises:
        ValueError: If shapes, dtypes or devices do not fit together.
    """
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
    height, width = size
    if height * width != num_tokens or height < 1:
        raise ValueError(
            f'size must hold the {num_tokens} tokens of q and at least one, got {height} x {width}'
        )
    if angle is not None:
        if head_dim % 4:
            raise ValueError(
                f'rotation needs a head dim that is a multiple of 4, got {head_dim}; '
                'pass angle=None for no rotation'
            )
        if angle.shape != (head_dim // 2,):
            raise ValueError(
                f'angle must have the shape [D/2] = ({head_dim // 2},), got {tuple(angle.shape)}'
            )
    return naive_mala_attention(q, k, v, (height, width), angle, lepe, gate)
