"""The MALA operator in Triton: kernels and launchers, forward and backward.

With ``C = H D`` channels, the forward reads k and v once (key-value pass), then q, lepe and gate
once, and writes the output once (output pass): ``6 N C`` elements. The backward reads dout, q,
lepe and gate and writes dq, dlepe and dgate (query pass, ``7 N C``), then reads k and v and writes
dk and dv (key-value pass, ``4 N C``): ``11 N C``. Nothing of size ``[N, D]`` is kept in between.

Both directions sum over all tokens first. Every program sums a run of tokens of one head into its
own slot of a partial buffer ``[B H, runs, D + 2, D]`` and a second kernel adds the slots in their
order, so that results are the same bit for bit in every run. The ``D + 2`` rows hold

    forward                                backward, with dy the gradient of y and beta = 1 + 1 / z
    ``s / N sum R phi(k)^T v``  (KV)       ``s / N sum (beta R phi(q))^T dy``  (A)
    ``s / N sum phi(k)``        (mk)       ``s / N sum dz phi(q)``             (ak)
    ``1 / N sum v``             (mv)       ``-1 / N sum z dy``                 (av)

from which, with ``phi'(x) = exp(min(x, 0))``,

    z   = phi(q) . mk                      dz = -(dy . R phi(q) KV) / z^2 - dy . mv
    y   = beta R phi(q) KV - z mv          dq = (R^T (beta dy KV^T) + dz mk) phi'(q)
    dv  = R phi(k) A + av                  dk = (R^T (v A^T) + ak) phi'(k)

``z`` stands for ``z + 1e-6`` wherever it divides. All of this is float32; only the operands of
matrix products are rounded, see :func:`dot_precision`.

Triton's blocks are powers of two: the channels of a head with D = 96 are a block ``lo`` of 64 and
a block ``hi`` of 32 (names end in ``_l`` and ``_h``, of matrices in ``_ll`` to ``_hh``).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .naive import EPS as NAIVE_EPS

EPS = tl.constexpr(NAIVE_EPS)
# Tokens a program sums at least: its slot of the partial sums costs (D + 2) / run of a read of k.
MIN_RUN = 512
ELEMENTS_PER_PROGRAM = 256  # of the two small kernels
INTERPRETER_PROCESSORS = 4


def dot_precision(dtype: torch.dtype) -> tuple[tl.dtype, str]:
    """Operand dtype and ``input_precision`` of the matrix products for inputs of ``dtype``.

    Sums are float32 always. bfloat16 inputs use bfloat16 operands: the rounded ``R phi`` and
    ``KV`` leave results within 4 times the error of the PyTorch path, which rounds only its
    output. float16 would overflow (``KV`` of large values, ``1 / z``), so float16 inputs use
    float32 operands, split into three bfloat16 products: the error of the PyTorch path. float32
    inputs use IEEE float32 products: relative error about 1e-6.
    """
    if dtype == torch.bfloat16:
        return tl.bfloat16, 'ieee'
    return tl.float32, 'bf16x3' if dtype == torch.float16 else 'ieee'


def channel_blocks(head_dim: int) -> tuple[int, int]:
    """Sizes of the ``lo`` and ``hi`` blocks of channels; ``hi`` is 0 where one block does."""
    if 64 < head_dim <= 96:
        return 64, 32
    return max(16, triton.next_power_of_2(head_dim)), 0  # a matrix product takes 16 at least


@triton.jit
def program_run(N, run, heads):
    """Head counted over the batch, batch, head, first and last token + 1 of this program.

    The grid is flat because only its first axis takes more than 65,535 programs.
    """
    runs = tl.cdiv(N, run)
    i_bh = (tl.program_id(0) // runs).to(tl.int64)
    start = (tl.program_id(0) % runs) * run
    return i_bh, i_bh // heads, i_bh % heads, start, tl.minimum(start + run, N)


@triton.jit
def tile_pointers(p, o_n, s_n, s_d, FIRST: tl.constexpr, BD: tl.constexpr):
    o_d = (FIRST + tl.arange(0, BD)).to(tl.int64)
    return p + o_n.to(tl.int64)[:, None] * s_n + o_d[None, :] * s_d


@triton.jit
def tile_mask(m_n, D: tl.constexpr, FIRST: tl.constexpr, BD: tl.constexpr):
    return m_n[:, None] & (FIRST + tl.arange(0, BD) < D)[None, :]


@triton.jit
def load_tile(p, o_n, m_n, s_n, s_d, D: tl.constexpr, FIRST: tl.constexpr, BD: tl.constexpr):
    """Channels ``FIRST`` to ``FIRST + BD - 1`` of tokens ``o_n``, 0 outside."""
    return tl.load(tile_pointers(p, o_n, s_n, s_d, FIRST, BD), tile_mask(m_n, D, FIRST, BD), 0)


@triton.jit
def store_tile(p, o_n, m_n, s_n, s_d, b, D: tl.constexpr, FIRST: tl.constexpr, BD: tl.constexpr):
    tl.store(tile_pointers(p, o_n, s_n, s_d, FIRST, BD), b, tile_mask(m_n, D, FIRST, BD))


@triton.jit
def load_matrix(
    p_state,
    D: tl.constexpr,
    ROW: tl.constexpr,
    BR: tl.constexpr,
    COL: tl.constexpr,
    BC: tl.constexpr,
):
    """Block of the ``[D, D]`` part of a state, 0 outside."""
    o_r = ROW + tl.arange(0, BR)[:, None]
    o_c = COL + tl.arange(0, BC)[None, :]
    return tl.load(p_state + o_r * D + o_c, (o_r < D) & (o_c < D), 0)


@triton.jit
def store_matrix(p_state, b, D: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr):
    o_r = ROW + tl.arange(0, b.shape[0])[:, None]
    o_c = COL + tl.arange(0, b.shape[1])[None, :]
    tl.store(p_state + o_r * D + o_c, b, (o_r < D) & (o_c < D))


@triton.jit
def load_row(p_state, row, D: tl.constexpr, FIRST: tl.constexpr, BD: tl.constexpr):
    o_c = FIRST + tl.arange(0, BD)
    return tl.load(p_state + row * D + o_c, o_c < D, 0)


@triton.jit
def store_row(p_state, row, b, D: tl.constexpr, FIRST: tl.constexpr):
    o_c = FIRST + tl.arange(0, b.shape[0])
    tl.store(p_state + row * D + o_c, b, o_c < D)


@triton.jit(do_not_specialize=['height', 'length'])
def mala_rotary_kernel(angle, table, height, length, D: tl.constexpr, BLOCK: tl.constexpr):
    """Cosines, then sines, of the ``D / 4`` angles at each row, then at each column."""
    QUARTER: tl.constexpr = D // 4
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = o < length * QUARTER
    position = o // QUARTER
    position = tl.where(position < height, position, position - height)
    # angle holds each value twice
    turn = position * tl.load(angle + o % QUARTER * 2, m, 0).to(tl.float32)
    tl.store(table + o, tl.cos(turn), m)
    tl.store(table + length * QUARTER + o, tl.sin(turn), m)


@triton.jit
def load_rotary(
    table, o_n, m_n, height, width, D: tl.constexpr, FIRST: tl.constexpr, BD: tl.constexpr
):
    """Cosines and sines ``[BN, BD / 2]`` of the channel pairs, from ``[2, rows + columns, D / 4]``.

    The first half of a head's pairs turns with the token's row, the second with its column.
    """
    QUARTER: tl.constexpr = D // 4
    o_p = FIRST // 2 + tl.arange(0, BD // 2)
    row = o_n // width
    column = o_n - row * width
    position = tl.where((o_p < QUARTER)[None, :], row[:, None], height + column[:, None])
    o = position * QUARTER + (o_p % QUARTER)[None, :]
    m = m_n[:, None] & (o_p < 2 * QUARTER)[None, :]
    return tl.load(table + o, m, 0), tl.load(table + (height + width) * QUARTER + o, m, 0)


@triton.jit
def rotate(b, cos, sin):
    even, odd = tl.split(tl.reshape(b, (b.shape[0], b.shape[1] // 2, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), b.shape)


@triton.jit
def load_features(
    p, table, o_n, m_n, s_n, s_d, height, width,
    D: tl.constexpr, FIRST: tl.constexpr, BD: tl.constexpr, HAS_ROTARY: tl.constexpr,
):  # fmt: skip
    """``phi(x)`` and ``R phi(x)`` of a tile, float32."""
    b_x = load_tile(p, o_n, m_n, s_n, s_d, D, FIRST, BD).to(tl.float32)
    b_phi = tl.where(b_x > 0, b_x + 1, tl.exp(b_x))  # a minimum would drop NaN
    # phi(0) is 1: cleared again outside the tile
    b_phi = tl.where(tile_mask(m_n, D, FIRST, BD), b_phi, 0)
    b_r = b_phi
    if HAS_ROTARY:
        cos, sin = load_rotary(table, o_n, m_n, height, width, D, FIRST, BD)
        b_r = rotate(b_phi, cos, sin)
    return b_phi, b_r


@triton.jit
def feature_gradient(
    b_phi, b_dphi, b_dr, table, o_n, m_n, height, width,
    D: tl.constexpr, FIRST: tl.constexpr, BD: tl.constexpr, HAS_ROTARY: tl.constexpr,
):  # fmt: skip
    """Gradient of x from those of ``phi(x)`` and ``R phi(x)``; ``phi'`` is phi, 1 at most."""
    if HAS_ROTARY:  # loaded anew: registers are scarcer than the first-level cache
        cos, sin = load_rotary(table, o_n, m_n, height, width, D, FIRST, BD)
        b_dr = rotate(b_dr, cos, -sin)
    return (b_dr + b_dphi) * tl.where(b_phi > 1, 1, b_phi)


@triton.jit(do_not_specialize=['N', 'height', 'width', 'run', 'heads'])
def mala_fwd_kv_kernel(
    k, v, table, partial,
    s_kb, s_kh, s_kn, s_kd, s_vb, s_vh, s_vn, s_vd,
    N, height, width, run, heads,
    D: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr, BN: tl.constexpr,
    HAS_ROTARY: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Partial KV, mk and mv of a run of tokens."""
    _i_bh, i_b, i_h, start, end = program_run(N, run, heads)
    p_k = k + i_b * s_kb + i_h * s_kh
    p_v = v + i_b * s_vb + i_h * s_vh
    b_kv_ll = tl.zeros((LO, LO), tl.float32)
    b_mk_l = tl.zeros((BN, LO), tl.float32)
    b_mv_l = tl.zeros((BN, LO), tl.float32)
    if HI:
        b_kv_lh = tl.zeros((LO, HI), tl.float32)
        b_kv_hl = tl.zeros((HI, LO), tl.float32)
        b_kv_hh = tl.zeros((HI, HI), tl.float32)
        b_mk_h = tl.zeros((BN, HI), tl.float32)
        b_mv_h = tl.zeros((BN, HI), tl.float32)
    for i_n in tl.range(start, end, BN):
        o_n = i_n + tl.arange(0, BN)
        m_n = o_n < end
        b_phi, b_r = load_features(
            p_k, table, o_n, m_n, s_kn, s_kd, height, width, D, 0, LO, HAS_ROTARY
        )
        b_v_l = load_tile(p_v, o_n, m_n, s_vn, s_vd, D, 0, LO)
        b_mk_l += b_phi
        b_mv_l += b_v_l.to(tl.float32)
        b_rt_l = tl.trans(b_r.to(OPERAND))
        b_v_l = b_v_l.to(OPERAND)
        b_kv_ll = tl.dot(b_rt_l, b_v_l, b_kv_ll, input_precision=PRECISION)
        if HI:
            b_phi, b_r = load_features(
                p_k, table, o_n, m_n, s_kn, s_kd, height, width, D, LO, HI, HAS_ROTARY
            )
            b_v_h = load_tile(p_v, o_n, m_n, s_vn, s_vd, D, LO, HI)
            b_mk_h += b_phi
            b_mv_h += b_v_h.to(tl.float32)
            b_rt_h = tl.trans(b_r.to(OPERAND))
            b_v_h = b_v_h.to(OPERAND)
            b_kv_lh = tl.dot(b_rt_l, b_v_h, b_kv_lh, input_precision=PRECISION)
            b_kv_hl = tl.dot(b_rt_h, b_v_l, b_kv_hl, input_precision=PRECISION)
            b_kv_hh = tl.dot(b_rt_h, b_v_h, b_kv_hh, input_precision=PRECISION)
    p_state = partial + tl.program_id(0).to(tl.int64) * ((D + 2) * D)
    store_matrix(p_state, b_kv_ll, D, 0, 0)
    store_row(p_state, D, tl.sum(b_mk_l, 0), D, 0)
    store_row(p_state, D + 1, tl.sum(b_mv_l, 0), D, 0)
    if HI:
        store_matrix(p_state, b_kv_lh, D, 0, LO)
        store_matrix(p_state, b_kv_hl, D, LO, 0)
        store_matrix(p_state, b_kv_hh, D, LO, LO)
        store_row(p_state, D, tl.sum(b_mk_h, 0), D, LO)
        store_row(p_state, D + 1, tl.sum(b_mv_h, 0), D, LO)


@triton.jit(do_not_specialize=['N', 'runs'])
def mala_reduce_kernel(partial, state, N, runs, D: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of the partial buffer over the runs, in their order, scaled."""
    SIZE: tl.constexpr = (D + 2) * D
    blocks = tl.cdiv(SIZE, BLOCK)
    i_bh = (tl.program_id(0) // blocks).to(tl.int64)
    o = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    BR: tl.constexpr = 16
    b_sum = tl.zeros((BLOCK,), tl.float32)
    for i_r in tl.range(0, runs, BR):
        o_r = i_r + tl.arange(0, BR)
        m = (o_r < runs)[:, None] & (o < SIZE)[None, :]
        p = partial + (i_bh * runs + o_r)[:, None] * SIZE + o[None, :]
        b_sum += tl.sum(tl.load(p, m, 0), 0)
    scale = tl.where(o < (D + 1) * D, D**-0.5, 1.0) / N
    tl.store(state + i_bh * SIZE + o, b_sum * scale, o < SIZE)


@triton.jit(do_not_specialize=['N', 'height', 'width', 'run', 'heads'])
def mala_fwd_out_kernel(
    q, lepe, gate, out, table, state,
    s_qb, s_qh, s_qn, s_qd, s_lb, s_lh, s_ln, s_ld,
    s_gb, s_gh, s_gn, s_gd, s_ob, s_oh, s_on, s_od,
    N, height, width, run, heads,
    D: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr, BN: tl.constexpr,
    HAS_ROTARY: tl.constexpr, HAS_LEPE: tl.constexpr, HAS_GATE: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Output of a run of tokens from q, lepe, gate and the state."""
    i_bh, i_b, i_h, start, end = program_run(N, run, heads)
    p_q = q + i_b * s_qb + i_h * s_qh
    p_l = lepe + i_b * s_lb + i_h * s_lh
    p_g = gate + i_b * s_gb + i_h * s_gh
    p_o = out + i_b * s_ob + i_h * s_oh
    p_state = state + i_bh * ((D + 2) * D)
    b_kv_ll = load_matrix(p_state, D, 0, LO, 0, LO).to(OPERAND)
    b_mk_l = load_row(p_state, D, D, 0, LO)
    b_mv_l = load_row(p_state, D + 1, D, 0, LO)
    if HI:
        b_kv_lh = load_matrix(p_state, D, 0, LO, LO, HI).to(OPERAND)
        b_kv_hl = load_matrix(p_state, D, LO, HI, 0, LO).to(OPERAND)
        b_kv_hh = load_matrix(p_state, D, LO, HI, LO, HI).to(OPERAND)
        b_mk_h = load_row(p_state, D, D, LO, HI)
        b_mv_h = load_row(p_state, D + 1, D, LO, HI)
    for i_n in tl.range(start, end, BN, disable_licm=True):
        o_n = i_n + tl.arange(0, BN)
        m_n = o_n < end
        b_phi, b_r = load_features(
            p_q, table, o_n, m_n, s_qn, s_qd, height, width, D, 0, LO, HAS_ROTARY
        )
        b_z = tl.sum(b_phi * b_mk_l[None, :], 1)
        b_r_l = b_r.to(OPERAND)
        b_o_l = tl.dot(b_r_l, b_kv_ll, input_precision=PRECISION)
        if HI:
            b_phi, b_r = load_features(
                p_q, table, o_n, m_n, s_qn, s_qd, height, width, D, LO, HI, HAS_ROTARY
            )
            b_z += tl.sum(b_phi * b_mk_h[None, :], 1)
            b_r_h = b_r.to(OPERAND)
            b_o_l = tl.dot(b_r_h, b_kv_hl, b_o_l, input_precision=PRECISION)
            b_o_h = tl.dot(b_r_l, b_kv_lh, input_precision=PRECISION)
            b_o_h = tl.dot(b_r_h, b_kv_hh, b_o_h, input_precision=PRECISION)
        b_beta = 1 + 1 / (b_z + EPS)
        b_y = b_beta[:, None] * b_o_l - b_z[:, None] * b_mv_l[None, :]
        if HAS_LEPE:
            b_y += load_tile(p_l, o_n, m_n, s_ln, s_ld, D, 0, LO).to(tl.float32)
        if HAS_GATE:
            b_y *= load_tile(p_g, o_n, m_n, s_gn, s_gd, D, 0, LO).to(tl.float32)
        store_tile(p_o, o_n, m_n, s_on, s_od, b_y, D, 0, LO)
        if HI:
            b_y = b_beta[:, None] * b_o_h - b_z[:, None] * b_mv_h[None, :]
            if HAS_LEPE:
                b_y += load_tile(p_l, o_n, m_n, s_ln, s_ld, D, LO, HI).to(tl.float32)
            if HAS_GATE:
                b_y *= load_tile(p_g, o_n, m_n, s_gn, s_gd, D, LO, HI).to(tl.float32)
            store_tile(p_o, o_n, m_n, s_on, s_od, b_y, D, LO, HI)


@triton.jit(do_not_specialize=['N', 'height', 'width', 'run', 'heads'])
def mala_bwd_q_kernel(
    q, lepe, gate, dout, dq, dlepe, dgate, table, state, partial,
    s_qb, s_qh, s_qn, s_qd, s_lb, s_lh, s_ln, s_ld,
    s_gb, s_gh, s_gn, s_gd, s_dob, s_doh, s_don, s_dod,
    s_dqb, s_dqh, s_dqn, s_dqd, s_dlb, s_dlh, s_dln, s_dld, s_dgb, s_dgh, s_dgn, s_dgd,
    N, height, width, run, heads,
    D: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr, BN: tl.constexpr,
    HAS_ROTARY: tl.constexpr, HAS_LEPE: tl.constexpr, HAS_GATE: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dlepe and dgate of a run of tokens, and its partial A, ak and av."""
    i_bh, i_b, i_h, start, end = program_run(N, run, heads)
    p_q = q + i_b * s_qb + i_h * s_qh
    p_l = lepe + i_b * s_lb + i_h * s_lh
    p_g = gate + i_b * s_gb + i_h * s_gh
    p_do = dout + i_b * s_dob + i_h * s_doh
    p_dq = dq + i_b * s_dqb + i_h * s_dqh
    p_dl = dlepe + i_b * s_dlb + i_h * s_dlh
    p_dg = dgate + i_b * s_dgb + i_h * s_dgh
    p_state = state + i_bh * ((D + 2) * D)
    b_kv_ll = load_matrix(p_state, D, 0, LO, 0, LO).to(OPERAND)
    b_mk_l = load_row(p_state, D, D, 0, LO)
    b_mv_l = load_row(p_state, D + 1, D, 0, LO)
    b_a_ll = tl.zeros((LO, LO), tl.float32)
    b_ak_l = tl.zeros((BN, LO), tl.float32)
    b_av_l = tl.zeros((BN, LO), tl.float32)
    if HI:
        b_kv_lh = load_matrix(p_state, D, 0, LO, LO, HI).to(OPERAND)
        b_kv_hl = load_matrix(p_state, D, LO, HI, 0, LO).to(OPERAND)
        b_kv_hh = load_matrix(p_state, D, LO, HI, LO, HI).to(OPERAND)
        b_mk_h = load_row(p_state, D, D, LO, HI)
        b_mv_h = load_row(p_state, D + 1, D, LO, HI)
        b_a_lh = tl.zeros((LO, HI), tl.float32)
        b_a_hl = tl.zeros((HI, LO), tl.float32)
        b_a_hh = tl.zeros((HI, HI), tl.float32)
        b_ak_h = tl.zeros((BN, HI), tl.float32)
        b_av_h = tl.zeros((BN, HI), tl.float32)
    for i_n in tl.range(start, end, BN, disable_licm=True):
        o_n = i_n + tl.arange(0, BN)
        m_n = o_n < end
        b_phi_l, b_r_l = load_features(
            p_q, table, o_n, m_n, s_qn, s_qd, height, width, D, 0, LO, HAS_ROTARY
        )
        b_z = tl.sum(b_phi_l * b_mk_l[None, :], 1)
        b_o_l = tl.dot(b_r_l.to(OPERAND), b_kv_ll, input_precision=PRECISION)
        if HI:
            b_phi_h, b_r_h = load_features(
                p_q, table, o_n, m_n, s_qn, s_qd, height, width, D, LO, HI, HAS_ROTARY
            )
            b_z += tl.sum(b_phi_h * b_mk_h[None, :], 1)
            b_o_l = tl.dot(b_r_h.to(OPERAND), b_kv_hl, b_o_l, input_precision=PRECISION)
            b_o_h = tl.dot(b_r_l.to(OPERAND), b_kv_lh, input_precision=PRECISION)
            b_o_h = tl.dot(b_r_h.to(OPERAND), b_kv_hh, b_o_h, input_precision=PRECISION)
        b_w = 1 / (b_z + EPS)
        b_beta = 1 + b_w

        # dy is rounded once, for all its uses: A and av nearly cancel in dv, and dv is then off
        # by the rounding of dy itself, not by several times that of A
        b_dy = load_tile(p_do, o_n, m_n, s_don, s_dod, D, 0, LO).to(tl.float32)
        if HAS_GATE:
            b_y = b_beta[:, None] * b_o_l - b_z[:, None] * b_mv_l[None, :]
            if HAS_LEPE:
                b_y += load_tile(p_l, o_n, m_n, s_ln, s_ld, D, 0, LO).to(tl.float32)
            store_tile(p_dg, o_n, m_n, s_dgn, s_dgd, b_dy * b_y, D, 0, LO)
            b_dy *= load_tile(p_g, o_n, m_n, s_gn, s_gd, D, 0, LO).to(tl.float32)
            if HAS_LEPE:
                store_tile(p_dl, o_n, m_n, s_dln, s_dld, b_dy, D, 0, LO)
        b_dy_l = b_dy.to(OPERAND)
        b_dy = b_dy_l.to(tl.float32)
        b_av_l -= b_z[:, None] * b_dy
        b_dz = -tl.sum(b_dy * (b_o_l * (b_w * b_w)[:, None] + b_mv_l[None, :]), 1)
        if HI:
            b_dy = load_tile(p_do, o_n, m_n, s_don, s_dod, D, LO, HI).to(tl.float32)
            if HAS_GATE:
                b_y = b_beta[:, None] * b_o_h - b_z[:, None] * b_mv_h[None, :]
                if HAS_LEPE:
                    b_y += load_tile(p_l, o_n, m_n, s_ln, s_ld, D, LO, HI).to(tl.float32)
                store_tile(p_dg, o_n, m_n, s_dgn, s_dgd, b_dy * b_y, D, LO, HI)
                b_dy *= load_tile(p_g, o_n, m_n, s_gn, s_gd, D, LO, HI).to(tl.float32)
                if HAS_LEPE:
                    store_tile(p_dl, o_n, m_n, s_dln, s_dld, b_dy, D, LO, HI)
            b_dy_h = b_dy.to(OPERAND)
            b_dy = b_dy_h.to(tl.float32)
            b_av_h -= b_z[:, None] * b_dy
            b_dz -= tl.sum(b_dy * (b_o_h * (b_w * b_w)[:, None] + b_mv_h[None, :]), 1)

        b_ak_l += b_dz[:, None] * b_phi_l
        b_rt_l = tl.trans((b_beta[:, None] * b_r_l).to(OPERAND))
        b_a_ll = tl.dot(b_rt_l, b_dy_l, b_a_ll, input_precision=PRECISION)
        b_dr_l = tl.dot(b_dy_l, tl.trans(b_kv_ll), input_precision=PRECISION)
        if HI:
            b_ak_h += b_dz[:, None] * b_phi_h
            b_rt_h = tl.trans((b_beta[:, None] * b_r_h).to(OPERAND))
            b_a_lh = tl.dot(b_rt_l, b_dy_h, b_a_lh, input_precision=PRECISION)
            b_a_hl = tl.dot(b_rt_h, b_dy_l, b_a_hl, input_precision=PRECISION)
            b_a_hh = tl.dot(b_rt_h, b_dy_h, b_a_hh, input_precision=PRECISION)
            b_dr_l = tl.dot(b_dy_h, tl.trans(b_kv_lh), b_dr_l, input_precision=PRECISION)
            b_dr_h = tl.dot(b_dy_l, tl.trans(b_kv_hl), input_precision=PRECISION)
            b_dr_h = tl.dot(b_dy_h, tl.trans(b_kv_hh), b_dr_h, input_precision=PRECISION)
            b_dphi = b_dz[:, None] * b_mk_h[None, :]
            b_dr_h = b_beta[:, None] * b_dr_h
            b_dq = feature_gradient(
                b_phi_h, b_dphi, b_dr_h, table, o_n, m_n, height, width, D, LO, HI, HAS_ROTARY
            )
            store_tile(p_dq, o_n, m_n, s_dqn, s_dqd, b_dq, D, LO, HI)
        b_dphi = b_dz[:, None] * b_mk_l[None, :]
        b_dr_l = b_beta[:, None] * b_dr_l
        b_dq = feature_gradient(
            b_phi_l, b_dphi, b_dr_l, table, o_n, m_n, height, width, D, 0, LO, HAS_ROTARY
        )
        store_tile(p_dq, o_n, m_n, s_dqn, s_dqd, b_dq, D, 0, LO)
    p_state = partial + tl.program_id(0).to(tl.int64) * ((D + 2) * D)
    store_matrix(p_state, b_a_ll, D, 0, 0)
    store_row(p_state, D, tl.sum(b_ak_l, 0), D, 0)
    store_row(p_state, D + 1, tl.sum(b_av_l, 0), D, 0)
    if HI:
        store_matrix(p_state, b_a_lh, D, 0, LO)
        store_matrix(p_state, b_a_hl, D, LO, 0)
        store_matrix(p_state, b_a_hh, D, LO, LO)
        store_row(p_state, D, tl.sum(b_ak_h, 0), D, LO)
        store_row(p_state, D + 1, tl.sum(b_av_h, 0), D, LO)


@triton.jit(do_not_specialize=['N', 'height', 'width', 'run', 'heads'])
def mala_bwd_kv_kernel(
    k, v, dk, dv, table, state,
    s_kb, s_kh, s_kn, s_kd, s_vb, s_vh, s_vn, s_vd,
    s_dkb, s_dkh, s_dkn, s_dkd, s_dvb, s_dvh, s_dvn, s_dvd,
    N, height, width, run, heads,
    D: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr, BN: tl.constexpr,
    HAS_ROTARY: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of a run of tokens from the backward's state."""
    i_bh, i_b, i_h, start, end = program_run(N, run, heads)
    p_k = k + i_b * s_kb + i_h * s_kh
    p_v = v + i_b * s_vb + i_h * s_vh
    p_dk = dk + i_b * s_dkb + i_h * s_dkh
    p_dv = dv + i_b * s_dvb + i_h * s_dvh
    p_state = state + i_bh * ((D + 2) * D)
    b_a_ll = load_matrix(p_state, D, 0, LO, 0, LO).to(OPERAND)
    b_ak_l = load_row(p_state, D, D, 0, LO)
    b_av_l = load_row(p_state, D + 1, D, 0, LO)
    if HI:
        b_a_lh = load_matrix(p_state, D, 0, LO, LO, HI).to(OPERAND)
        b_a_hl = load_matrix(p_state, D, LO, HI, 0, LO).to(OPERAND)
        b_a_hh = load_matrix(p_state, D, LO, HI, LO, HI).to(OPERAND)
        b_ak_h = load_row(p_state, D, D, LO, HI)
        b_av_h = load_row(p_state, D + 1, D, LO, HI)
    for i_n in tl.range(start, end, BN, disable_licm=True):
        o_n = i_n + tl.arange(0, BN)
        m_n = o_n < end
        b_phi_l, b_r = load_features(
            p_k, table, o_n, m_n, s_kn, s_kd, height, width, D, 0, LO, HAS_ROTARY
        )
        b_r_l = b_r.to(OPERAND)
        b_v_l = load_tile(p_v, o_n, m_n, s_vn, s_vd, D, 0, LO).to(OPERAND)
        b_dv_l = tl.dot(b_r_l, b_a_ll, input_precision=PRECISION)
        b_dr_l = tl.dot(b_v_l, tl.trans(b_a_ll), input_precision=PRECISION)
        if HI:
            b_phi_h, b_r = load_features(
                p_k, table, o_n, m_n, s_kn, s_kd, height, width, D, LO, HI, HAS_ROTARY
            )
            b_r_h = b_r.to(OPERAND)
            b_v_h = load_tile(p_v, o_n, m_n, s_vn, s_vd, D, LO, HI).to(OPERAND)
            b_dv_l = tl.dot(b_r_h, b_a_hl, b_dv_l, input_precision=PRECISION)
            b_dv_h = tl.dot(b_r_l, b_a_lh, input_precision=PRECISION)
            b_dv_h = tl.dot(b_r_h, b_a_hh, b_dv_h, input_precision=PRECISION)
            b_dv_h += b_av_h[None, :]
            store_tile(p_dv, o_n, m_n, s_dvn, s_dvd, b_dv_h, D, LO, HI)
            b_dr_l = tl.dot(b_v_h, tl.trans(b_a_lh), b_dr_l, input_precision=PRECISION)
            b_dr_h = tl.dot(b_v_l, tl.trans(b_a_hl), input_precision=PRECISION)
            b_dr_h = tl.dot(b_v_h, tl.trans(b_a_hh), b_dr_h, input_precision=PRECISION)
            b_dk = feature_gradient(
                b_phi_h,
                b_ak_h[None, :],
                b_dr_h,
                table,
                o_n,
                m_n,
                height,
                width,
                D,
                LO,
                HI,
                HAS_ROTARY,
            )
            store_tile(p_dk, o_n, m_n, s_dkn, s_dkd, b_dk, D, LO, HI)
        store_tile(p_dv, o_n, m_n, s_dvn, s_dvd, b_dv_l + b_av_l[None, :], D, 0, LO)
        b_dk = feature_gradient(
            b_phi_l, b_ak_l[None, :], b_dr_l, table, o_n, m_n, height, width, D, 0, LO, HAS_ROTARY
        )
        store_tile(p_dk, o_n, m_n, s_dkn, s_dkd, b_dk, D, 0, LO)


class Launch(NamedTuple):
    """Tokens of a tile, warps of a program and software pipeline stages of one kernel."""

    BN: int
    num_warps: int
    num_stages: int


# By dtype, for head dims up to 64 and above. Found by compiling for sm_80 and sm_90: the largest
# tiles and deepest pipelines without spilled registers at D = 64 and 96 (float16: 96 bytes at 96).
LAUNCHES = {
    torch.bfloat16: (Launch(32, 8, 3), Launch(16, 8, 2)),
    torch.float16: (Launch(32, 8, 2), Launch(16, 8, 1)),
    torch.float32: (Launch(32, 8, 2), Launch(16, 8, 1)),
}


def tokens_per_program(q: Tensor) -> int:
    """Tokens of a run: about four programs for each processor, unless that makes runs short."""
    batch, heads, num_tokens, _ = q.shape
    processors = INTERPRETER_PROCESSORS
    if q.is_cuda:
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    runs = max(1, 4 * processors // (batch * heads))
    return max(MIN_RUN, triton.cdiv(num_tokens, runs))


def rotary_table(angle: Tensor | None, height: int, width: int) -> Tensor | None:
    """``[2, height + width, D / 4]``, float32."""
    if angle is None:
        return None
    quarter = len(angle) // 2
    table = angle.new_empty(2, height + width, quarter, dtype=torch.float32)
    grid = (triton.cdiv(table.numel() // 2, ELEMENTS_PER_PROGRAM),)
    mala_rotary_kernel[grid](
        angle.contiguous(), table, height, height + width, D=4 * quarter, BLOCK=ELEMENTS_PER_PROGRAM
    )
    return table


def launch(
    kernel: triton.JITFunction,
    strided: tuple[Tensor | None, ...],
    dense: tuple[Tensor | None, ...],
    q: Tensor,
    size: tuple[int, int],
    **flags: bool,
) -> None:
    """Run ``kernel`` over all runs of all heads; ``strided`` tensors have the shape of q.

    What is None is not read: q stands in for it.
    """
    strided = [q if x is None else x for x in strided]
    dense = [q if x is None else x for x in dense]
    batch, heads, num_tokens, head_dim = q.shape
    run = tokens_per_program(q)
    strides = [stride for x in strided for stride in x.stride()]
    lo, hi = channel_blocks(head_dim)
    operand, precision = dot_precision(q.dtype)
    kernel[(batch * heads * triton.cdiv(num_tokens, run),)](
        *strided,
        *dense,
        *strides,
        num_tokens,
        *size,
        run,
        heads,
        D=head_dim,
        LO=lo,
        HI=hi,
        OPERAND=operand,
        PRECISION=precision,
        **flags,
        **LAUNCHES[q.dtype][head_dim > 64]._asdict(),
    )


def reduce_partial(partial: Tensor, num_tokens: int) -> Tensor:
    """State ``[B * H, D + 2, D]`` from partial sums ``[B * H, runs, D + 2, D]``."""
    batch_heads, runs, _, head_dim = partial.shape
    state = partial.new_empty(batch_heads, head_dim + 2, head_dim)
    grid = (batch_heads * triton.cdiv((head_dim + 2) * head_dim, ELEMENTS_PER_PROGRAM),)
    mala_reduce_kernel[grid](
        partial, state, num_tokens, runs, D=head_dim, BLOCK=ELEMENTS_PER_PROGRAM
    )
    return state


def new_partial(q: Tensor) -> Tensor:
    batch, heads, num_tokens, head_dim = q.shape
    runs = triton.cdiv(num_tokens, tokens_per_program(q))
    return q.new_empty(batch * heads, runs, head_dim + 2, head_dim, dtype=torch.float32)


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
    size = (height, width)
    flags = dict(HAS_ROTARY=angle is not None)
    with torch.cuda.device_of(q):
        table = rotary_table(angle, height, width)
        partial = new_partial(q)
        launch(mala_fwd_kv_kernel, (k, v), (table, partial), q, size, **flags)
        state = reduce_partial(partial, q.shape[2])
        out = torch.empty_like(q)
        flags.update(HAS_LEPE=lepe is not None, HAS_GATE=gate is not None)
        launch(mala_fwd_out_kernel, (q, lepe, gate, out), (table, state), q, size, **flags)
    return out, state


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
    size = (height, width)
    flags = dict(HAS_ROTARY=angle is not None)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dgate = None if gate is None else torch.empty_like(gate)
    dlepe = None if gate is None or lepe is None else torch.empty_like(lepe)
    with torch.cuda.device_of(q):
        table = rotary_table(angle, height, width)
        partial = new_partial(q)
        launch(
            mala_bwd_q_kernel,
            (q, lepe, gate, dout, dq, dlepe, dgate),
            (table, state, partial),
            q,
            size,
            HAS_LEPE=lepe is not None,
            HAS_GATE=gate is not None,
            **flags,
        )
        dstate = reduce_partial(partial, q.shape[2])
        launch(mala_bwd_kv_kernel, (k, v, dk, dv), (table, dstate), q, size, **flags)
    return [x for x in (dq, dk, dv, dgate, dlepe) if x is not None]
