"""Gated DeltaNet over a tree of more than a few nodes, in two launches, and the tiles that its kernels share.

`mixed` [B, N, C] holds a row's queries, keys and values of all heads side by side; a tile is some of its rows (nodes)
and channels.

B rows (sequences), N nodes per row, P = N rounded up to whole blocks, Hk key heads, Hv value heads, Dk and Dv their
sizes.

The first launch, a program for a row's value head, makes what does not depend on the values: which share of a node's
update every ancestor takes (`pulls` [B, Hv, P, P]), and with which weight a node reads the ancestors' updates (`reads`,
the same shape). On the diagonal blocks the triangular system is solved there for all values at once: `pulls` holds its
inverse, each column times the column's beta. A node's level is the number of its ancestors within its block, and the
inverse is made level by level, from finished rows only: by squaring it would take fewer products, and lose all digits
where keys of a long chain are alike.

The second, a program for DV of a value head's channels, reads the state once and multiplies.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.arguments import strides
from fastspec.kernels.launch import dependent, wait_for_previous
from fastspec.kernels.recurrent.reference import DecayRates

TINY = tl.constexpr(1e-6)


@triton.jit
def tile_of(HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DV_BLOCK: tl.constexpr):
    """The value head and the row of a program, the first channels of the head's queries and keys, and the values of the
    head that the program takes, with which of them there are."""
    PARTS: tl.constexpr = (DV + DV_BLOCK - 1) // DV_BLOCK
    head = tl.program_id(0) // PARTS
    row = tl.program_id(1).to(tl.int64)
    first_q = (head // (HV // HK)) * DK
    first_k = first_q + HK * DK
    o_v = (tl.program_id(0) % PARTS) * DV_BLOCK + tl.arange(0, DV_BLOCK)
    return head, row, first_q, first_k, o_v, o_v < DV


@triton.jit
def keys_of(p_mixed, stride, rows, m_rows, first, SIZE: tl.constexpr, STEP: tl.constexpr):
    """STEP channels of rows of one head, from `first` on, of which SIZE are the head's: [len(rows), STEP]."""
    o_d = tl.arange(0, STEP)
    return tl.load(
        p_mixed + rows[:, None] * stride + (first + o_d)[None, :],
        mask=m_rows[:, None] & (o_d < SIZE)[None, :],
        other=0.0,
    )


@triton.jit
def scale_of(p_mixed, stride, rows, m_rows, first, SIZE: tl.constexpr, STEP: tl.constexpr):
    """Factors that make rows of one head vectors of length 1."""
    b_square = tl.zeros(rows.shape, tl.float32)
    for at in range(0, SIZE, STEP):
        b = keys_of(p_mixed, stride, rows, m_rows, first + at, SIZE - at, STEP).to(tl.float32)
        b_square += tl.sum(b * b, 1)
    return tl.rsqrt(b_square + TINY)


@triton.jit
def pairs_of(
    p_mixed,
    stride,
    rows,
    m_rows,
    first,
    others,
    m_others,
    second,
    SIZE: tl.constexpr,
    STEP: tl.constexpr,
    DOT: tl.constexpr,
):
    """Products of rows from `first` on with others from `second` on, in the precision that they lie in: [len(rows),
    len(others)]."""
    b_pairs = tl.zeros((rows.shape[0], others.shape[0]), tl.float32)
    for at in range(0, SIZE, STEP):
        b_one = keys_of(p_mixed, stride, rows, m_rows, first + at, SIZE - at, STEP)
        b_two = keys_of(p_mixed, stride, others, m_others, second + at, SIZE - at, STEP)
        b_pairs += tl.dot(b_one, tl.trans(b_two), input_precision=DOT)
    return b_pairs


@triton.jit
def times_state(b_keys, b_state, DOT: tl.constexpr):
    """Keys or queries times a tile of the state, fp32. For keys in bf16 it is cut into three parts in bf16, which hold
    all its digits."""
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
    p_mixed,
    stride,
    rows,
    m_rows,
    first,
    p_state,
    o_v,
    m_v,
    DV: tl.constexpr,
    SIZE: tl.constexpr,
    STEP: tl.constexpr,
    DOT: tl.constexpr,
):
    """Rows from `first` on times the state [Dk, Dv] at p_state: [len(rows), len(o_v)]."""
    b_read = tl.zeros((rows.shape[0], o_v.shape[0]), tl.float32)
    for at in range(0, SIZE, STEP):
        o_k = at + tl.arange(0, STEP)
        b_state = tl.load(
            p_state + o_k[:, None] * DV + o_v[None, :], mask=(o_k < SIZE)[:, None] & m_v[None, :], other=0.0
        )
        b_read += times_state(keys_of(p_mixed, stride, rows, m_rows, first + at, SIZE - at, STEP), b_state, DOT)
    return b_read


@triton.jit
def through_both(
    p_mixed,
    stride,
    rows,
    m_rows,
    first_k,
    first_q,
    p_state,
    o_v,
    m_v,
    DV: tl.constexpr,
    SIZE: tl.constexpr,
    STEP: tl.constexpr,
    DOT: tl.constexpr,
):
    """Keys and queries of rows, as vectors of length 1, times the state [Dk, Dv] at p_state: twice [len(rows),
    len(o_v)]."""
    b_read = tl.zeros((rows.shape[0], o_v.shape[0]), tl.float32)
    b_asked = tl.zeros((rows.shape[0], o_v.shape[0]), tl.float32)
    b_square_k = tl.zeros(rows.shape, tl.float32)
    b_square_q = tl.zeros(rows.shape, tl.float32)
    for at in range(0, SIZE, STEP):
        o_k = at + tl.arange(0, STEP)
        b_state = tl.load(
            p_state + o_k[:, None] * DV + o_v[None, :], mask=(o_k < SIZE)[:, None] & m_v[None, :], other=0.0
        )
        b_k = keys_of(p_mixed, stride, rows, m_rows, first_k + at, SIZE - at, STEP)
        b_q = keys_of(p_mixed, stride, rows, m_rows, first_q + at, SIZE - at, STEP)
        b_square_k += tl.sum(b_k.to(tl.float32) * b_k.to(tl.float32), 1)
        b_square_q += tl.sum(b_q.to(tl.float32) * b_q.to(tl.float32), 1)
        b_read += times_state(b_k, b_state, DOT)
        b_asked += times_state(b_q, b_state, DOT)
    return b_read * tl.rsqrt(b_square_k + TINY)[:, None], b_asked * tl.rsqrt(b_square_q + TINY)[:, None]


@triton.jit
def add_updates(
    p_mixed,
    stride,
    rows,
    m_rows,
    first,
    b_weight,
    b_u,
    decay,
    p_state,
    o_v,
    m_v,
    DV: tl.constexpr,
    SIZE: tl.constexpr,
    STEP: tl.constexpr,
    DOT: tl.constexpr,
):
    """The state at p_state becomes decay times itself and the sum of the rows' weighted keys times their updates."""
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
    """Nodes of a block that are ancestors of rows, or they themselves: [len(rows), BLOCK] bool."""
    b_word = tl.load(p_words + rows * stride + ((block * BLOCK) >> 6), mask=m_rows, other=0) >> ((block * BLOCK) & 63)
    return ((b_word[:, None] >> tl.arange(0, BLOCK)[None, :]) & 1) != 0


@triton.jit
def decay_of(b_seen, b_sum, b_other):
    """e^(G_i - G_j) where j is seen, else 0."""
    return tl.exp(tl.where(b_seen, b_sum[:, None] - b_other[None, :], float("-inf")))


SYSTEM = {32: (4, 32), 64: (8, 64)}
"""Nodes of a block -> warps of a program of the first launch, and channels of keys that it takes at a time (the fastest
on an H200)."""
UPDATE_WARPS, UPDATE_STEP = 4, 32
"""Those of the second. With 8 warps Triton 3.6 makes a kernel of it that reads beyond its buffers on Hopper."""


@triton.jit
def _inverse(b_system, b_level, o_n, DOT: tl.constexpr):
    """(1 + system)^-1, where system [N, N] has entries from nodes of a lower level only."""
    b_one = tl.where(o_n[:, None] == o_n[None, :], 1.0, 0.0)
    b_inverse = tl.where((b_level == 0)[:, None], b_one, 0.0)
    for level in range(1, tl.max(b_level, 0) + 1):
        b_next = b_one - tl.dot(b_system, b_inverse, input_precision=DOT)
        b_inverse = tl.where((b_level == level)[:, None], b_next, b_inverse)
    return b_inverse


@triton.jit(do_not_specialize=["nodes", "s_mixed_b", "s_a_b", "s_b_b", "s_words_b", "s_words_n", "s_g_b"])
def _tree_system(
    p_mixed,
    p_a,
    p_b,
    p_decay,
    p_bias,
    p_words,
    p_g,
    p_pulls,
    p_reads,
    nodes,
    scale,
    root,
    s_mixed_b,
    s_mixed_n,
    s_a_b,
    s_a_n,
    s_b_b,
    s_b_n,
    s_words_b,
    s_words_n,
    s_g_b,
    s_g_n,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    first_q = (head // (HV // HK)) * DK
    first_k = first_q + HK * DK
    blocks = tl.cdiv(nodes, BLOCK)
    whole = blocks * BLOCK
    log_decay = tl.load(p_decay + head).to(tl.float32)
    bias = tl.load(p_bias + head).to(tl.float32)
    p_mixed += row * s_mixed_b
    p_a += row * s_a_b + head
    p_b += row * s_b_b + head
    p_words += row * s_words_b
    p_g += row * s_g_b + head
    p_pulls += (row * HV + head) * whole * whole
    p_reads += (row * HV + head) * whole * whole
    o_n = tl.arange(0, BLOCK)
    for block in range(0, blocks):
        rows = (block * BLOCK + o_n).to(tl.int64)
        m_rows = rows < nodes
        b_g, b_beta = rates_of(p_a, p_b, s_a_n, s_b_n, rows, m_rows, log_decay, bias, scale)
        b_seen = seen_by(p_words, s_words_n, rows, m_rows, block, BLOCK)
        b_sum = tl.sum(tl.where(b_seen, b_g[None, :], 0.0), 1)
        for before in range(0, block):
            others = (before * BLOCK + o_n).to(tl.int64)
            g_other, _ = rates_of(p_a, p_b, s_a_n, s_b_n, others, others < nodes, log_decay, bias, scale)
            b_sum += tl.sum(
                tl.where(seen_by(p_words, s_words_n, rows, m_rows, before, BLOCK), g_other[None, :], 0.0), 1
            )
        tl.store(p_g + rows * s_g_n, b_sum, mask=m_rows)
        b_unit = scale_of(p_mixed, s_mixed_n, rows, m_rows, first_k, DK, STEP)
        b_asked = scale_of(p_mixed, s_mixed_n, rows, m_rows, first_q, DK, STEP) / root
        for before in range(0, block):
            others = (before * BLOCK + o_n).to(tl.int64)
            m_others = others < nodes
            b_seen_there = seen_by(p_words, s_words_n, rows, m_rows, before, BLOCK)
            b_decay = decay_of(b_seen_there, b_sum, tl.load(p_g + others * s_g_n))
            b_decay *= scale_of(p_mixed, s_mixed_n, others, m_others, first_k, DK, STEP)[None, :]
            p_tile = rows[:, None] * whole + others[None, :]
            b_pairs = pairs_of(p_mixed, s_mixed_n, rows, m_rows, first_k, others, m_others, first_k, DK, STEP, DOT)
            tl.store(p_pulls + p_tile, b_pairs * b_decay * b_unit[:, None])
            b_pairs = pairs_of(p_mixed, s_mixed_n, rows, m_rows, first_q, others, m_others, first_k, DK, STEP, DOT)
            tl.store(p_reads + p_tile, b_pairs * b_decay * b_asked[:, None])
        p_tile = rows[:, None] * whole + rows[None, :]
        b_decay = decay_of(b_seen, b_sum, b_sum) * b_unit[None, :]
        b_pairs = pairs_of(p_mixed, s_mixed_n, rows, m_rows, first_q, rows, m_rows, first_k, DK, STEP, DOT)
        tl.store(p_reads + p_tile, b_pairs * b_decay * b_asked[:, None])
        b_above = b_seen & (o_n[:, None] != o_n[None, :])
        b_pairs = pairs_of(p_mixed, s_mixed_n, rows, m_rows, first_k, rows, m_rows, first_k, DK, STEP, DOT)
        b_system = tl.where(b_above, b_pairs * b_decay * (b_unit * b_beta)[:, None], 0.0)
        b_inverse = _inverse(b_system, tl.sum(b_above.to(tl.int32), 1), o_n, DOT)
        tl.store(p_pulls + p_tile, b_inverse * b_beta[None, :])
        tl.debug_barrier()  # the next block reads the gates that this one wrote


@triton.jit(do_not_specialize=["nodes", "s_mixed_b", "s_u_b", "s_g_b"])
def _tree_updates(
    p_mixed,
    p_state,
    p_g,
    p_pulls,
    p_reads,
    p_u,
    p_out,
    nodes,
    root,
    s_mixed_b,
    s_mixed_n,
    s_u_b,
    s_u_n,
    s_g_b,
    s_g_n,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    STEP: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    head, row, first_q, first_k, o_v, m_v = tile_of(HK, HV, DK, DV, DV_BLOCK)
    blocks = tl.cdiv(nodes, BLOCK)
    whole = blocks * BLOCK
    p_mixed += row * s_mixed_b
    p_u += row * s_u_b + head * DV
    p_g += row * s_g_b + head
    p_pulls += (row * HV + head) * whole * whole
    p_reads += (row * HV + head) * whole * whole
    p_state += (row * HV + head) * (DK * DV)
    o_n = tl.arange(0, BLOCK)
    for block in range(0, blocks):
        rows = (block * BLOCK + o_n).to(tl.int64)
        m_rows = rows < nodes
        m_out = m_rows[:, None] & m_v[None, :]
        b_grown = tl.exp(tl.load(p_g + rows * s_g_n, mask=m_rows, other=0.0))
        b_read, b_asked = through_both(
            p_mixed, s_mixed_n, rows, m_rows, first_k, first_q, p_state, o_v, m_v, DV, DK, STEP, DOT
        )
        b_wanted = tl.load(
            p_mixed + rows[:, None] * s_mixed_n + (2 * HK * DK + head * DV + o_v)[None, :], mask=m_out, other=0.0
        )
        b_wanted = b_wanted.to(tl.float32) - b_grown[:, None] * b_read
        b_out = (b_grown / root)[:, None] * b_asked
        for before in range(0, block):
            others = (before * BLOCK + o_n).to(tl.int64)
            p_tile = rows[:, None] * whole + others[None, :]
            u_other = tl.load(p_u + others[:, None] * s_u_n + o_v[None, :], mask=m_v[None, :], other=0.0)
            b_wanted -= tl.dot(tl.load(p_pulls + p_tile), u_other, input_precision=DOT)
            b_out += tl.dot(tl.load(p_reads + p_tile), u_other, input_precision=DOT)
        p_tile = rows[:, None] * whole + rows[None, :]
        b_u = tl.dot(tl.load(p_pulls + p_tile), b_wanted, input_precision=DOT)
        tl.store(p_u + rows[:, None] * s_u_n + o_v[None, :], b_u, mask=m_out)
        b_out += tl.dot(tl.load(p_reads + p_tile), b_u, input_precision=DOT)
        p_o = p_out + ((row * nodes + rows)[:, None] * HV + head) * DV + o_v[None, :]
        tl.store(p_o, b_out.to(p_out.dtype.element_ty), mask=m_out)
        tl.debug_barrier()  # the next block reads the updates that this one wrote


def wide_tree(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    rates: DecayRates,
    state: Tensor,
    words: Tensor,
    updates: Tensor,
    gates: Tensor,
    sizes: dict[str, Any],
) -> Tensor:
    """`delta.delta_tree` of checked arguments, and of sizes HK, HV, DK, DV, DV_BLOCK and DOT."""
    batch, nodes = mixed.shape[:2]
    block = 32 if nodes <= 32 else 64
    whole = triton.cdiv(nodes, block) * block
    pulls, reads = torch.empty((2, batch, sizes["HV"], whole, whole), dtype=torch.float32, device=mixed.device)
    out = mixed.new_empty(batch, nodes, sizes["HV"], sizes["DV"])
    root, parts = sizes["DK"] ** 0.5, triton.cdiv(sizes["DV"], sizes["DV_BLOCK"])
    (warps, step), wide = SYSTEM[block], max(16, triton.next_power_of_2(sizes["DK"]))
    shared = {"BLOCK": block, "DOT": sizes["DOT"], "HK": sizes["HK"], "HV": sizes["HV"], "DK": sizes["DK"]}
    _tree_system[(sizes["HV"], batch)](
        *(mixed, a, b, rates.log_decay, rates.bias, words, gates, pulls, reads),
        *(nodes, rates.scale, root, *strides(2, mixed, a, b, words, gates)),
        **shared,
        STEP=min(step, wide),
        num_warps=warps,
        num_stages=1,
        **dependent(mixed.device),
    )
    _tree_updates[(sizes["HV"] * parts, batch)](
        *(mixed, state, gates, pulls, reads, updates, out),
        *(nodes, root, *strides(2, mixed, updates, gates)),
        **shared,
        DV=sizes["DV"],
        DV_BLOCK=sizes["DV_BLOCK"],
        STEP=min(UPDATE_STEP, wide),
        num_warps=UPDATE_WARPS,
        num_stages=1,
        **dependent(mixed.device),
    )
    return out
