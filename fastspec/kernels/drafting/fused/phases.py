"""The phases of the fused drafter (draft.py): device functions, each run by all programs of one cooperative launch.

A phase is a list of independent items; program `pid` of `programs` takes items pid, pid + programs, ... A grid barrier
ends the phase.

B batch rows, R rows of activations (batch rows times nodes), H hidden size, K the inner size of a product, N its
outputs, S the parts that K is split in, Hq / Hkv query / key heads, D head size, C cache slots, V draft vocabulary, T
tiles of it, TOP children per node, M candidates per batch row, W 64-bit words.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastspec.kernels.drafting.topk_expand import key_index, key_value, log_total, sort_key
from fastspec.kernels.layer.norms import summed

LEAST = tl.constexpr(-(2**63))


@triton.jit
def grid_barrier(p_count, goal):
    """Wait until `goal` arrivals have been counted; what any program wrote before is then visible to all."""
    tl.debug_barrier()
    seen = tl.atomic_add(p_count, 1, sem="acq_rel") + 1
    while seen < goal:
        seen = tl.atomic_add(p_count, 0, sem="acquire")
    tl.debug_barrier()
    return goal + tl.num_programs(0)


@triton.jit
def leave(p_count, p_left):
    """The last program to leave sets both counters back, so that the next launch starts from zero."""
    tl.debug_barrier()
    if tl.atomic_add(p_left, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.atomic_xchg(p_count, 0)
        tl.atomic_xchg(p_left, 0)


@triton.jit
def normed(x, p_weight, o_h, m_h, H: tl.constexpr, EPS: tl.constexpr):
    """The RMS norm of one row x [BH], rounded before the weight is applied."""
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / H + EPS)
    weight = tl.load(p_weight + o_h, mask=m_h, other=0.0)
    return ((wide * scale).to(x.dtype).to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def weight_rows(tile, N: tl.constexpr, BN: tl.constexpr, GATED: tl.constexpr):
    """Rows of a weight that a tile multiplies, of gate and up side by side. Past the end the last row repeats."""
    o_n = tl.arange(0, BN)
    if GATED:
        return tl.minimum(tile * (BN // 2) + o_n // 2, N // 2 - 1) + (o_n % 2) * (N // 2)
    else:
        return tl.minimum(tile * BN + o_n, N - 1)


@triton.jit
def product_tile(
    p_x,
    p_w,
    o_r,
    o_n,
    first,
    last,
    K: tl.constexpr,
    BR: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """x [R, K] at rows o_r times w [N, K] at rows o_n, over steps first .. last - 1 of BK channels -> [BR, BN] fp32."""
    acc = tl.zeros((BR, BN), tl.float32)
    o_k = tl.arange(0, BK)
    p_xs = p_x + o_r.to(tl.int64)[:, None] * K + o_k[None, :]
    p_ws = p_w + o_n.to(tl.int64)[None, :] * K + o_k[:, None]
    for step in tl.range(first, last, num_stages=STAGES):
        if K % BK == 0:
            b_x = tl.load(p_xs + step * BK)
            b_w = tl.load(p_ws + step * BK)
        else:
            m_k = step * BK + o_k < K
            b_x = tl.load(p_xs + step * BK, mask=m_k[None, :], other=0.0)
            b_w = tl.load(p_ws + step * BK, mask=m_k[:, None], other=0.0)
        acc = tl.dot(b_x, b_w, acc, input_precision="ieee")
    return acc


@triton.jit
def product(
    p_x,
    p_w,
    p_parts,
    rows,
    pid,
    programs,
    N: tl.constexpr,
    K: tl.constexpr,
    S: tl.constexpr,
    BR: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """x [R, K] times w [N, K] -> parts [S, R, N] fp32, whose sum over S is the product."""
    row_tiles = tl.cdiv(rows, BR)
    STEPS: tl.constexpr = (K + BK - 1) // BK
    EACH: tl.constexpr = (STEPS + S - 1) // S
    TILES: tl.constexpr = (N + BN - 1) // BN
    # row tiles of one weight tile follow each other: it stays in the L2
    for item in range(pid, TILES * S * row_tiles, programs):
        o_r = (item % row_tiles) * BR + tl.arange(0, BR)
        tile, part = (item // row_tiles) // S, (item // row_tiles) % S
        o_w = weight_rows(tile, N, BN, False)
        first, last = part * EACH, tl.minimum(part * EACH + EACH, STEPS)
        acc = product_tile(p_x, p_w, tl.minimum(o_r, rows - 1), o_w, first, last, K, BR, BN, BK, STAGES)
        o_n = tile * BN + tl.arange(0, BN)
        o_out = (part * rows + o_r).to(tl.int64)[:, None] * N + o_n[None, :]
        tl.store(p_parts + o_out, acc, mask=(o_r < rows)[:, None] & (o_n < N)[None, :])


@triton.jit
def gated_product(
    p_x,
    p_w,
    p_out,
    rows,
    pid,
    programs,
    INNER: tl.constexpr,
    K: tl.constexpr,
    BR: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """silu(x gate) * x up, w [2 * INNER, K] holding gate, then up -> out [R, INNER]; rounded where `swiglu` rounds."""
    row_tiles = tl.cdiv(rows, BR)
    STEPS: tl.constexpr = (K + BK - 1) // BK
    TILES: tl.constexpr = (2 * INNER + BN - 1) // BN
    dtype = p_out.dtype.element_ty
    for item in range(pid, TILES * row_tiles, programs):
        o_r = (item % row_tiles) * BR + tl.arange(0, BR)
        tile = item // row_tiles
        o_w = weight_rows(tile, 2 * INNER, BN, True)
        acc = product_tile(p_x, p_w, tl.minimum(o_r, rows - 1), o_w, 0, STEPS, K, BR, BN, BK, STAGES)
        gate, up = tl.split(tl.reshape(acc.to(dtype).to(tl.float32), (BR, BN // 2, 2)))
        act = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up
        o_n = tile * (BN // 2) + tl.arange(0, BN // 2)
        tl.store(
            p_out + o_r.to(tl.int64)[:, None] * INNER + o_n[None, :],
            act.to(dtype),
            mask=(o_r < rows)[:, None] & (o_n < INNER)[None, :],
        )


@triton.jit
def prefetch(
    p_w,
    rows,
    pid,
    N: tl.constexpr,
    K: tl.constexpr,
    S: tl.constexpr,
    GATED: tl.constexpr,
    BR: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Ask for BYTES (a multiple of 16) of each row of this program's first tile of a later product: memory works while
    the grid waits."""
    if BYTES > 0:
        row_tiles = tl.cdiv(rows, BR)
        TILES: tl.constexpr = (N + BN - 1) // BN
        EACH: tl.constexpr = ((K + BK - 1) // BK + S - 1) // S
        WIDTH: tl.constexpr = p_w.dtype.element_ty.primitive_bitwidth // 8
        SIZE: tl.constexpr = BYTES if BYTES < K * WIDTH else K * WIDTH
        if pid < TILES * S * row_tiles:
            tile, part = (pid // row_tiles) // S, (pid // row_tiles) % S
            o_w = weight_rows(tile, N, BN, GATED)
            address = (p_w + o_w.to(tl.int64) * K + tl.minimum(part * EACH * BK, K - SIZE // WIDTH)).to(tl.int64)
            tl.inline_asm_elementwise(
                "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
                "=r,l,r",
                [address, SIZE],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )


@triton.jit
def norm_features(
    p_in, p_weight, p_out, rows, pid, programs, TAPS: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, EPS: tl.constexpr
):
    """Norm every tap of features [R, TAPS * H] by weight [TAPS, H]."""
    o_h = tl.arange(0, BH)
    m_h = o_h < H
    for item in range(pid, rows * TAPS, programs):
        x = tl.load(p_in + tl.cast(item, tl.int64) * H + o_h, mask=m_h, other=0.0)
        tl.store(
            p_out + tl.cast(item, tl.int64) * H + o_h,
            normed(x, p_weight + (item % TAPS) * H, o_h, m_h, H, EPS),
            mask=m_h,
        )


@triton.jit
def add_and_norm(
    p_parts,
    p_residual,
    p_weight,
    p_sum,
    p_norm,
    rows,
    pid,
    programs,
    H: tl.constexpr,
    S: tl.constexpr,
    BH: tl.constexpr,
    EPS: tl.constexpr,
    FEED_NORM: tl.constexpr,
):
    """residual [R, H] plus a product in parts -> sum [R, H] and its norm [R, H]; FEED_NORM stores the norm as both."""
    o_h = tl.arange(0, BH)
    m_h = o_h < H
    for row in range(pid, rows, programs):
        o_row = tl.cast(row, tl.int64) * H + o_h
        residual = tl.load(p_residual + o_row, mask=m_h, other=0.0, cache_modifier=".cg")
        value = summed(p_parts, row, rows, o_h, m_h, H, S).to(residual.dtype).to(tl.float32) + residual.to(tl.float32)
        value = value.to(residual.dtype)
        norm = normed(value, p_weight, o_h, m_h, H, EPS)
        tl.store(p_norm + o_row, norm, mask=m_h)
        tl.store(p_sum + o_row, norm if FEED_NORM else value, mask=m_h)


@triton.jit
def keep_last(
    p_hidden,
    p_counts,
    p_last,
    p_readout,
    p_lengths,
    p_weight,
    p_x,
    limit,
    pid,
    programs,
    B: tl.constexpr,
    PAIRS: tl.constexpr,
    H: tl.constexpr,
    BH: tl.constexpr,
    EPS: tl.constexpr,
    FED_NORM: tl.constexpr,
):
    """last, readout [B, H] become the state of the last real pair of hidden [B, PAIRS, H] and its norm, where there is
    one; x [B, H] is what the LM head reads."""
    o_h = tl.arange(0, BH)
    m_h = o_h < H
    for row in range(pid, B, programs):
        o_row = tl.cast(row, tl.int64) * H + o_h
        readout = tl.load(p_readout + o_row, mask=m_h, other=0.0)
        if PAIRS > 0:
            count = tl.load(p_counts + row)
            if count > 0:
                last = tl.load(
                    p_hidden + (row * PAIRS + count - 1).to(tl.int64) * H + o_h,
                    mask=m_h,
                    other=0.0,
                    cache_modifier=".cg",
                )
                tl.store(p_last + o_row, last, mask=m_h)
                readout = last if FED_NORM else normed(last, p_weight, o_h, m_h, H, EPS)
                tl.store(p_readout + o_row, readout, mask=m_h)
            tl.store(p_lengths + row, tl.minimum(tl.load(p_lengths + row) + count, limit))
        tl.store(p_x + o_row, readout, mask=m_h)


@triton.jit
def head_topk(
    p_x,
    p_w,
    p_keys,
    p_high,
    p_mass,
    rows,
    pid,
    programs,
    V: tl.constexpr,
    K: tl.constexpr,
    TOP: tl.constexpr,
    BR: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """x [R, K] times the LM head w [V, K]: of each tile of logits its TOP best as sort keys [R, T, TOP], its highest
    and, relative to that, its sum of exponentials [R, T] fp32."""
    row_tiles = tl.cdiv(rows, BR)
    T: tl.constexpr = (V + BN - 1) // BN
    for item in range(pid, T * row_tiles, programs):
        o_r = (item % row_tiles) * BR + tl.arange(0, BR)
        m_r = o_r < rows
        tile = item // row_tiles
        o_w = weight_rows(tile, V, BN, False)
        acc = product_tile(p_x, p_w, tl.minimum(o_r, rows - 1), o_w, 0, (K + BK - 1) // BK, K, BR, BN, BK, STAGES)
        o_n = tile * BN + tl.arange(0, BN)
        acc = tl.where((o_n < V)[None, :], acc, float("-inf"))
        high = tl.max(acc, 1)
        o_t = o_r.to(tl.int64) * T + tile
        tl.store(p_high + o_t, high, mask=m_r)
        tl.store(p_mass + o_t, tl.sum(tl.exp(acc - high[:, None]), 1), mask=m_r)
        key = sort_key(acc, o_n[None, :])
        for rank in range(TOP):
            best = tl.max(key, 1)
            tl.store(p_keys + o_t * TOP + rank, best, mask=m_r)
            key = tl.where(key == best[:, None], LEAST, key)


@triton.jit
def write_children(
    p_keys,
    p_high,
    p_mass,
    p_score,
    p_front,
    p_d2t,
    p_scores,
    p_tokens,
    p_parents,
    rows,
    nodes,
    base,
    pid,
    programs,
    V: tl.constexpr,
    T: tl.constexpr,
    TOP: tl.constexpr,
    M: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    BTOP: tl.constexpr,
):
    """The TOP best children of every row from the tiles' bests -> scores, tokens, parents [B, M] at base + node * TOP.
    One node per batch row is the root: it has score 0 and its children have parent -1."""
    o_t, o_j = tl.arange(0, BT), tl.arange(0, BTOP)
    for row in range(pid, rows, programs):
        o_row = tl.cast(row, tl.int64) * T
        high = tl.load(p_high + o_row + o_t, mask=o_t < T, other=float("-inf"), cache_modifier=".cg")
        mass = tl.load(p_mass + o_row + o_t, mask=o_t < T, other=0.0, cache_modifier=".cg")
        lse = log_total(high, mass)
        best = tl.full((BTOP,), LEAST, tl.int64)
        for start in range(0, T * TOP, BC):
            o_c = start + tl.arange(0, BC)
            key = tl.load(p_keys + o_row * TOP + o_c, mask=o_c < T * TOP, other=LEAST, cache_modifier=".cg")
            merged = tl.full((BTOP,), LEAST, tl.int64)
            for rank in range(TOP):
                top = tl.maximum(tl.max(key, 0), tl.max(best, 0))
                merged = tl.where(o_j == rank, top, merged)
                key = tl.where(key == top, LEAST, key)
                best = tl.where(best == top, LEAST, best)
            best = merged
        m_j = o_j < TOP
        logp = tl.minimum(key_value(best) - lse, 0.0)
        ids = tl.minimum(key_index(best), V - 1)
        score, parent = tl.cast(0.0, tl.float32), tl.cast(-1, tl.int64)
        if base > 0:
            score = tl.load(p_score + row)
            parent = tl.load(p_front + row)
        o_out = tl.cast(row // nodes, tl.int64) * M + base + (row % nodes) * TOP + o_j
        tl.store(p_scores + o_out, score + logp, mask=m_j)
        tl.store(p_tokens + o_out, ids + tl.load(p_d2t + ids, mask=m_j, other=0), mask=m_j)
        tl.store(p_parents + o_out, tl.zeros((BTOP,), tl.int64) + parent, mask=m_j)


@triton.jit
def choose_node(
    p_scores,
    p_tokens,
    p_words,
    p_score,
    p_front,
    row,
    level,
    batch,
    TOP: tl.constexpr,
    M: tl.constexpr,
    W: tl.constexpr,
    BCH: tl.constexpr,
    BW: tl.constexpr,
):
    """Node row % TOP of the frontier of a level (the root's children: 0): the child of that rank among the last
    children.

    Writes its score, candidate index and ancestor words [2, R, W], of which levels take turns. Returns its token and
    its parent's row.
    """
    b, rank = row // TOP, row % TOP
    nodes = tl.where(level == 0, 1, TOP)
    base = tl.where(level == 0, 0, TOP + (level - 1) * TOP * TOP)
    o_c = tl.arange(0, BCH)
    p_row = p_scores + tl.cast(b, tl.int64) * M + base
    score = tl.load(p_row + o_c, mask=o_c < nodes * TOP, other=float("-inf"), cache_modifier=".cg")
    key = tl.where(o_c < nodes * TOP, sort_key(score, o_c), LEAST)
    best = tl.max(key, 0)
    for _ in range(rank):
        key = tl.where(key == best, LEAST, key)
        best = tl.max(key, 0)
    index = tl.minimum(key_index(best), TOP * TOP - 1)
    above = b * nodes + (index // TOP).to(tl.int32)
    o_w = tl.arange(0, BW)
    bit = level * TOP + rank
    m_old = o_w < tl.where(level > 0, W, 0)
    old = tl.load(
        p_words + ((1 - level % 2) * batch * TOP + above) * W + o_w, mask=m_old, other=0, cache_modifier=".cg"
    )
    own = tl.where(o_w == bit // 64, tl.full((BW,), 1, tl.int64) << tl.cast(bit % 64, tl.int64), 0)
    tl.store(p_words + ((level % 2) * batch * TOP + row) * W + o_w, old | own, mask=o_w < W)
    tl.store(p_score + row, key_value(best))
    tl.store(p_front + row, base + index)
    return tl.load(p_tokens + tl.cast(b, tl.int64) * M + base + index), above
