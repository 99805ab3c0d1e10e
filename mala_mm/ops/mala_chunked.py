"""The MALA operator for CPUs: plain PyTorch on chunks of tokens.

The formulas, the order of the passes and the state are those of :mod:`mala_mm.ops.mala_kernels`.
Chunks bound the memory of the intermediate values, of which nothing is kept for the backward.
"""

import torch
from torch import Tensor

from .naive import EPS
from .rotary import rotary_turns

# Elements of a chunk for each thread. On 2 cores, chunks of 2^14 to 2^16 were slower, all of 2^17
# and more alike.
CHUNK_ELEMENTS = 2**17


def compute_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def chunks(q: Tensor) -> list[slice]:
    """Runs of tokens of q ``[B, H, N, D]`` that are handled together."""
    _, heads, num_tokens, head_dim = q.shape
    length = max(1, CHUNK_ELEMENTS * torch.get_num_threads() // (heads * head_dim))
    return [slice(start, start + length) for start in range(0, num_tokens, length)]


def split_state(state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the rows of a state ``[H, D + 2, D]``: the matrix and the two vectors."""
    head_dim = state.shape[-1]
    return state.split((head_dim, 1, 1), dim=1)


def scale_state(state: Tensor, num_tokens: int, sign: int) -> None:
    """Turn the sums of a state ``[H, D + 2, D]`` into the scaled ones; the last row has a sign."""
    head_dim = state.shape[-1]
    state[:, :-1] *= head_dim**-0.5 / num_tokens
    state[:, -1] *= sign / num_tokens


def features(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``phi(x) = elu(x) + 1`` and its derivative ``exp(min(x, 0))``, fit for :func:`as_pairs`."""
    x = x.to(dtype)
    if x.stride(-1) != 1:
        x = x.contiguous()
    derivative = x.clamp(max=0).exp_()
    return x.relu().add_(derivative), derivative


def as_pairs(x: Tensor) -> Tensor:
    """``[..., D]`` as ``D/2`` complex numbers."""
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def rotate_(x: Tensor, table: Tensor | None, chunk: slice) -> Tensor:
    """Turn the channel pairs of ``x [H, n, D]`` in place, as ``apply_rotary`` does."""
    if table is not None:
        as_pairs(x).mul_(table[chunk])
    return x


def rotate(x: Tensor, table: Tensor | None, chunk: slice) -> Tensor:
    """As :func:`rotate_`, into a new tensor."""
    if table is None:
        return x
    return torch.view_as_real(as_pairs(x) * table[chunk]).flatten(-2)


@torch.autocast('cpu', enabled=False)
def mala_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    height: int,
    width: int,
    angle: Tensor | None,
    lepe: Tensor | None,
    gate: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Output, as q, and state ``[B * H, D + 2, D]``; arguments as of ``mala_attention``."""
    batch, heads, num_tokens, head_dim = q.shape
    dtype = compute_dtype(q)
    table = None if angle is None else rotary_turns(angle, height, width, dtype)
    out = torch.empty_like(q)
    state = q.new_zeros(batch, heads, head_dim + 2, head_dim, dtype=dtype)
    for b in range(batch):
        kv, mk, mv = split_state(state[b])
        for chunk in chunks(q):
            phi, _ = features(k[b, :, chunk], dtype)
            value = v[b, :, chunk].to(dtype)
            mk += phi.sum(1, keepdim=True)
            mv += value.sum(1, keepdim=True)
            kv.baddbmm_(rotate_(phi, table, chunk).mT, value)
        scale_state(state[b], num_tokens, 1)
        for chunk in chunks(q):
            phi, _ = features(q[b, :, chunk], dtype)
            z = phi @ mk.mT
            y = (rotate_(phi, table, chunk) @ kv).mul_(1 + 1 / (z + EPS)).addcmul_(z, mv, value=-1)
            if lepe is not None:
                y += lepe[b, :, chunk]
            if gate is None:
                out[b, :, chunk] = y
            else:
                torch.mul(y, gate[b, :, chunk], out=out[b, :, chunk])
    return out, state.flatten(0, 1)


@torch.autocast('cpu', enabled=False)
def mala_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    height: int,
    width: int,
    angle: Tensor | None,
    lepe: Tensor | None,
    gate: Tensor | None,
) -> list[Tensor]:
    """dq, dk, dv, then dgate with a gate, then dlepe with both (without a gate it is dout)."""
    batch, heads, num_tokens, _ = q.shape
    dtype = compute_dtype(q)
    table = None if angle is None else rotary_turns(angle, height, width, dtype)
    back = None if angle is None else rotary_turns(-angle, height, width, dtype)
    state = state.unflatten(0, (batch, heads))
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    dgate = None if gate is None else torch.empty_like(gate)
    dlepe = None if gate is None or lepe is None else torch.empty_like(lepe)
    for b in range(batch):
        kv, mk, mv = split_state(state[b])
        dstate = torch.zeros_like(state[b])
        a, ak, av = split_state(dstate)
        for chunk in chunks(q):
            phi, derivative = features(q[b, :, chunk], dtype)
            dy = dout[b, :, chunk].to(dtype)
            z = phi @ mk.mT
            beta = 1 + 1 / (z + EPS)
            turned = rotate(phi, table, chunk)
            product = turned @ kv
            if gate is not None:
                y = (product * beta).addcmul_(z, mv, value=-1)
                if lepe is not None:
                    y += lepe[b, :, chunk]
                torch.mul(y, dy, out=dgate[b, :, chunk])
                dy = dy * gate[b, :, chunk]
                if lepe is not None:
                    dlepe[b, :, chunk] = dy
            dz = -(product.mul_(dy).sum(-1, keepdim=True) / (z + EPS).square_()) - dy @ mv.mT
            ak.baddbmm_(dz.mT, phi)
            av.baddbmm_(z.mT, dy)
            dy = dy * beta
            a.baddbmm_(turned.mT, dy)
            dphi = rotate_(dy @ kv.mT, back, chunk).addcmul_(dz, mk)
            torch.mul(dphi, derivative, out=dq[b, :, chunk])
        scale_state(dstate, num_tokens, -1)
        for chunk in chunks(k):
            phi, derivative = features(k[b, :, chunk], dtype)
            value = v[b, :, chunk].to(dtype)
            torch.add(rotate(phi, table, chunk) @ a, av, out=dv[b, :, chunk])
            dphi = rotate_(value @ a.mT, back, chunk).add_(ak)
            torch.mul(dphi, derivative, out=dk[b, :, chunk])
    return [x for x in (dq, dk, dv, dgate, dlepe) if x is not None]
