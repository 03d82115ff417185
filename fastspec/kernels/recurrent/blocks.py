"""What the kernels of Gated DeltaNet share: tiles of keys and queries, their products, rates, and which nodes are ancestors.

`mixed` [B, N, C] holds a row's queries, keys and values of all heads side by side; a tile is some of its rows (nodes) and channels.
"""

from __future__ import annotations

import triton
import triton.language as tl

TINY = tl.constexpr(1e-6)


@triton.jit
def keys_of(p_mixed, stride, rows, m_rows, first, SIZE: tl.constexpr, STEP: tl.constexpr):
    """STEP channels of rows of one head, from `first` on, of which SIZE are the head's: [len(rows), STEP] as they lie."""
    o_d = tl.arange(0, STEP)
    return tl.load(p_mixed + rows[:, None] * stride + (first + o_d)[None, :], mask=m_rows[:, None] & (o_d < SIZE)[None, :], other=0.0)


@triton.jit
def scale_of(p_mixed, stride, rows, m_rows, first, SIZE: tl.constexpr, STEP: tl.constexpr):
    """What makes rows of one head vectors of length 1."""
    b_square = tl.zeros(rows.shape, tl.float32)
    for at in range(0, SIZE, STEP):
        b = keys_of(p_mixed, stride, rows, m_rows, first + at, SIZE - at, STEP).to(tl.float32)
        b_square += tl.sum(b * b, 1)
    return tl.rsqrt(b_square + TINY)


@triton.jit
def pairs_of(p_mixed, stride, rows, m_rows, first, others, m_others, second, SIZE: tl.constexpr, STEP: tl.constexpr, DOT: tl.constexpr):
    """Products of rows from `first` on with others from `second` on, in the precision that they lie in: [len(rows), len(others)]."""
    b_pairs = tl.zeros((rows.shape[0], others.shape[0]), tl.float32)
    for at in range(0, SIZE, STEP):
        b_one = keys_of(p_mixed, stride, rows, m_rows, first + at, SIZE - at, STEP)
        b_two = keys_of(p_mixed, stride, others, m_others, second + at, SIZE - at, STEP)
        b_pairs += tl.dot(b_one, tl.trans(b_two), input_precision=DOT)
    return b_pairs


@triton.jit
def times_state(b_keys, b_state, DOT: tl.constexpr):
    """Keys or queries times a tile of the state, fp32. For keys in bf16 it is cut into three parts in bf16, which hold all its digits."""
    if b_keys.dtype == tl.bfloat16:
        b_high = b_state.to(tl.bfloat16)
        b_rest = b_state - b_high.to(tl.float32)
        b_middle = b_rest.to(tl.bfloat16)
        b_low = (b_rest - b_middle.to(tl.float32)).to(tl.bfloat16)
        b_read = tl.dot(b_keys, b_low)
        b_read = tl.dot(b_keys, b_middle, b_read)
        b_read = tl.dot(b_keys, b_high, b_read)
    else:
        b_read = tl.dot(b_keys.to(tl.float32), b_state, input_precision=DOT)
    return b_read


@triton.jit
def through(
    p_mixed, stride, rows, m_rows, first, p_state, o_v, m_v, DV: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr, DOT: tl.constexpr
):
    """Rows from `first` on times the state [Dk, Dv] at p_state: [len(rows), len(o_v)]."""
    b_read = tl.zeros((rows.shape[0], o_v.shape[0]), tl.float32)
    for at in range(0, SIZE, STEP):
        o_k = at + tl.arange(0, STEP)
        b_state = tl.load(p_state + o_k[:, None] * DV + o_v[None, :], mask=(o_k < SIZE)[:, None] & m_v[None, :], other=0.0)
        b_read += times_state(keys_of(p_mixed, stride, rows, m_rows, first + at, SIZE - at, STEP), b_state, DOT)
    return b_read


@triton.jit
def through_both(
    p_mixed, stride, rows, m_rows, first_k, first_q, p_state, o_v, m_v, DV: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Keys and queries of rows, as vectors of length 1, times the state [Dk, Dv] at p_state: twice [len(rows), len(o_v)]."""
    b_read = tl.zeros((rows.shape[0], o_v.shape[0]), tl.float32)
    b_asked = tl.zeros((rows.shape[0], o_v.shape[0]), tl.float32)
    b_square_k = tl.zeros(rows.shape, tl.float32)
    b_square_q = tl.zeros(rows.shape, tl.float32)
    for at in range(0, SIZE, STEP):
        o_k = at + tl.arange(0, STEP)
        b_state = tl.load(p_state + o_k[:, None] * DV + o_v[None, :], mask=(o_k < SIZE)[:, None] & m_v[None, :], other=0.0)
        b_k = keys_of(p_mixed, stride, rows, m_rows, first_k + at, SIZE - at, STEP)
        b_q = keys_of(p_mixed, stride, rows, m_rows, first_q + at, SIZE - at, STEP)
        b_square_k += tl.sum(b_k.to(tl.float32) * b_k.to(tl.float32), 1)
        b_square_q += tl.sum(b_q.to(tl.float32) * b_q.to(tl.float32), 1)
        b_read += times_state(b_k, b_state, DOT)
        b_asked += times_state(b_q, b_state, DOT)
    return b_read * tl.rsqrt(b_square_k + TINY)[:, None], b_asked * tl.rsqrt(b_square_q + TINY)[:, None]


@triton.jit
def add_updates(
    p_mixed, stride, rows, m_rows, first, b_weight, b_u, decay, p_state, o_v, m_v, DV: tl.constexpr, SIZE: tl.constexpr,
    STEP: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The state at p_state becomes decay times itself and the sum of the rows' weighted keys times their updates, in place."""
    for at in range(0, SIZE, STEP):
        o_k = at + tl.arange(0, STEP)
        p_s = p_state + o_k[:, None] * DV + o_v[None, :]
        m_s = (o_k < SIZE)[:, None] & m_v[None, :]
        b_k = keys_of(p_mixed, stride, rows, m_rows, first + at, SIZE - at, STEP).to(tl.float32) * b_weight[:, None]
        b_state = tl.load(p_s, mask=m_s, other=0.0) * decay + tl.dot(tl.trans(b_k), b_u, input_precision=DOT)
        tl.store(p_s, b_state, mask=m_s)


@triton.jit
def rates_of(p_a, p_b, s_a, s_b, rows, m_rows, log_decay, bias, scale):
    """g and beta of rows of one head; 0 where m_rows is false. beta is rounded to b's dtype on its way."""
    b_a = tl.load(p_a + rows * s_a, mask=m_rows, other=0.0).to(tl.float32) + bias
    b_b = tl.load(p_b + rows * s_b, mask=m_rows, other=0.0)
    softplus = tl.where(b_a > 20.0, b_a, tl.log(1.0 + tl.exp(tl.minimum(b_a, 20.0))))
    beta = (tl.sigmoid(b_b.to(tl.float32)).to(b_b.dtype).to(tl.float32) * scale).to(b_b.dtype).to(tl.float32)
    return tl.where(m_rows, -tl.exp(log_decay) * softplus, 0.0), tl.where(m_rows, beta, 0.0)


@triton.jit
def seen_by(p_words, stride, rows, m_rows, block, BLOCK: tl.constexpr):
    """Which nodes of a block are ancestors of rows, or they themselves: [len(rows), BLOCK] bool."""
    b_word = tl.load(p_words + rows * stride + ((block * BLOCK) >> 6), mask=m_rows, other=0) >> ((block * BLOCK) & 63)
    return ((b_word[:, None] >> tl.arange(0, BLOCK)[None, :]) & 1) != 0


@triton.jit
def decay_of(b_seen, b_sum, b_other):
    """e^(G_i - G_j) where j is seen, else 0."""
    return tl.exp(tl.where(b_seen, b_sum[:, None] - b_other[None, :], float("-inf")))
