"""The attention of the fused drafter (draft.py), as phases: parts of the slots by different programs, then one sum.

B batch rows, R rows of activations (batch rows times nodes), S parts of the QKV product, E its outputs, Hq / Hkv query
/ key heads, D head size, C cache slots, W 64-bit words. Items of a phase are dealt to the programs as in phases.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastspec.kernels.layer.norms import summed


@triton.jit
def rotated(
    p_parts,
    p_cos,
    p_sin,
    row,
    rows,
    column,
    position,
    o_d,
    m_m,
    E: tl.constexpr,
    S: tl.constexpr,
    HALF: tl.constexpr,
    dtype: tl.constexpr,
):
    """One head of the QKV product per row, rounded as a linear layer rounds, turned by position in fp32 and rounded
    once -> [BM, D].

    row, column, position [BM]; the first 2 * HALF channels turn. HALF = 0 turns nothing.
    """
    m_d = m_m[:, None] & (o_d >= 0)[None, :]
    value = summed(p_parts, row[:, None], rows, column[:, None] + o_d[None, :], m_d, E, S).to(dtype)
    if HALF > 0:
        partner = tl.where(o_d < HALF, o_d + HALF, tl.where(o_d < 2 * HALF, o_d - HALF, o_d))
        other = (
            summed(p_parts, row[:, None], rows, column[:, None] + partner[None, :], m_d, E, S).to(dtype).to(tl.float32)
        )
        m_t = m_d & (o_d < 2 * HALF)[None, :]
        o_t = position[:, None] * HALF + (o_d % HALF)[None, :]
        cos = tl.load(p_cos + o_t, mask=m_t, other=1.0)
        sin = tl.load(p_sin + o_t, mask=m_t, other=0.0)
        sign = tl.where(o_d < HALF, -1.0, 1.0)
        value = (value.to(tl.float32) * cos + other * (sin * sign[None, :])).to(dtype)
    return value


@triton.jit
def attention(
    p_parts,
    p_cos,
    p_sin,
    p_k,
    p_v,
    p_lengths,
    p_words,
    p_mix,
    p_peak,
    p_mass,
    stride_b,
    stride_h,
    nodes,
    level,
    batch,
    pid,
    programs,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    HALF: tl.constexpr,
    TOP: tl.constexpr,
    W: tl.constexpr,
    SPLITS: tl.constexpr,
    BM: tl.constexpr,
    BN_NODES: tl.constexpr,
    BJ: tl.constexpr,
    SCALE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attention of every node in SPLITS parts, of which the last takes the tail, whose newest keys and values it writes
    first.

    level = -1: a chain of `nodes` pairs behind the prefix; otherwise the nodes of that level of the tree, by ancestor
    bits. Query row m of key head h is query head h * group + m // nodes of node m % nodes. Parts: mix [R * Hq, SPLITS,
    D], peak, mass [R * Hq, SPLITS].
    """
    GROUP: tl.constexpr = HQ // HKV
    E: tl.constexpr = (HQ + 2 * HKV) * D
    dtype: tl.constexpr = p_k.dtype.element_ty
    rows = batch * nodes
    o_d, o_m = tl.arange(0, D), tl.arange(0, BM)
    for item in range(pid, batch * HKV * SPLITS, programs):
        b, h, split = item // (HKV * SPLITS), (item // SPLITS) % HKV, tl.cast(item % SPLITS, tl.int32)
        prefix = tl.load(p_lengths + b)
        in_tail = split == SPLITS - 1
        p_keys = p_k + tl.cast(b, tl.int64) * stride_b + tl.cast(h, tl.int64) * stride_h
        p_values = p_v + tl.cast(b, tl.int64) * stride_b + tl.cast(h, tl.int64) * stride_h
        done = tl.maximum(level, 0) * TOP  # tail slots of the levels before this one
        if in_tail:
            o_i = tl.arange(0, BN_NODES)
            m_i = o_i < nodes
            row = b * nodes + tl.minimum(o_i, nodes - 1)
            position = prefix + tl.where(level < 0, o_i, level)
            column = tl.zeros((BN_NODES,), tl.int32) + (HQ + h) * D
            new_k = rotated(p_parts, p_cos, p_sin, row, rows, column, position, o_d, m_i, E, S, HALF, dtype)
            new_v = rotated(p_parts, p_cos, p_sin, row, rows, column + HKV * D, position, o_d, m_i, E, S, 0, dtype)
            o_new = (prefix + done + o_i)[:, None] * D + o_d[None, :]
            tl.store(p_keys + o_new, new_k, mask=m_i[:, None])
            tl.store(p_values + o_new, new_v, mask=m_i[:, None])
        tl.debug_barrier()  # the tail is read by other threads than wrote it
        m_m = o_m < GROUP * nodes
        i = o_m % nodes
        row = b * nodes + i
        position = prefix + tl.where(level < 0, i, level)
        q = rotated(
            p_parts, p_cos, p_sin, row, rows, (h * GROUP + o_m // nodes) * D, position, o_d, m_m, E, S, HALF, dtype
        )
        each = tl.cdiv(tl.cdiv(prefix, SPLITS - 1), BJ) * BJ
        start = tl.where(in_tail, prefix, split * each)
        end = tl.where(in_tail, prefix + done + nodes, tl.minimum(split * each + each, prefix))
        worded = tl.where(in_tail, tl.where(level < 0, 0, GROUP * nodes), 0)
        last_seen = tl.where(level < 0, i, -1)  # by order: the prefix, and in a chain what came before
        peak = tl.full((BM,), float("-inf"), tl.float32)
        mass = tl.zeros((BM,), tl.float32)
        mix = tl.zeros((BM, D), tl.float32)
        p_word = p_words + ((tl.maximum(level, 0) % 2) * rows + row) * W
        for j in tl.range(start, end, BJ, num_stages=STAGES):
            o_j = j + tl.arange(0, BJ)
            o_at = tl.minimum(o_j, end - 1) * D
            b_k = tl.load(p_keys + o_at[None, :] + o_d[:, None])
            b_v = tl.load(p_values + o_at[:, None] + o_d[None, :])
            rel = o_j - prefix
            word = tl.load(p_word + tl.maximum(j - prefix, 0) // 64, mask=o_m < worded, other=0)
            by_bit = ((word[:, None] >> (rel & 63)[None, :]) & 1) == 1
            seen = (o_j < end)[None, :] & ((rel[None, :] <= last_seen[:, None]) | by_bit)
            scores = tl.where(seen, tl.dot(q, b_k, input_precision="ieee") * SCALE, float("-inf"))
            higher = tl.maximum(peak, tl.max(scores, 1))
            level_off = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp(scores - level_off[:, None])
            fade = tl.exp(peak - level_off)
            mass = mass * fade + tl.sum(weights, 1)
            mix = tl.dot(weights.to(dtype), b_v, mix * fade[:, None], input_precision="ieee")
            peak = higher
        o_part = (row * HQ + h * GROUP + o_m // nodes).to(tl.int64) * SPLITS + split
        tl.store(p_peak + o_part, peak, mask=m_m)
        tl.store(p_mass + o_part, mass, mask=m_m)
        tl.store(p_mix + o_part[:, None] * D + o_d[None, :], mix, mask=m_m[:, None])


@triton.jit
def join_splits(p_mix, p_peak, p_mass, p_out, items, pid, programs, D: tl.constexpr, SPLITS: tl.constexpr):
    """The parts of each query's attention [R * Hq, SPLITS, D] -> [R * Hq, D]."""
    o_s, o_d = tl.arange(0, SPLITS), tl.arange(0, D)
    for item in range(pid, items, programs):
        o_part = tl.cast(item, tl.int64) * SPLITS + o_s
        peak = tl.load(p_peak + o_part, cache_modifier=".cg")
        share = tl.exp(peak - tl.max(peak, 0))
        mass = tl.sum(share * tl.load(p_mass + o_part, cache_modifier=".cg"), 0)
        mix = tl.load(p_mix + o_part[:, None] * D + o_d[None, :], cache_modifier=".cg")
        tl.store(
            p_out + tl.cast(item, tl.int64) * D + o_d,
            (tl.sum(mix * share[:, None], 0) / mass).to(p_out.dtype.element_ty),
        )
