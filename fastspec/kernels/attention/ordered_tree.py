"""Ordered attention of trees: the runs of the committed text for tiles of rows, and then each node's own keys.

Names and the rule that fixes the order are those of ordered.py; ordered_hopper.py is `_runs` for long texts on Hopper.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.attention import ordered_hopper
from fastspec.kernels.attention.ordered_sums import MOST_SUMS, OrderedLaunch, OrderedPass, added, block, finished, step
from fastspec.kernels.attention.parts import EMPTY, GRID, first_seen, run_of, run_start, share_of, tanh, wrapped
from fastspec.kernels.launch import dependent, wait_for_previous

EACH = 8
"""Runs that are read at once to be added, by four warps."""
FOLDED = 15_000
"""Matrix rows of all pairs from which one program takes all runs of a tile's text: there are enough of them."""


@triton.jit(do_not_specialize=["nodes", "extent", "runs", "kv_heads"])
def _runs(
    p_q,
    p_k,
    p_v,
    p_part,
    p_state,
    p_prefix,
    p_counts,
    scale2,
    nodes,
    extent,
    runs,
    kv_heads,
    strides,
    s_p,
    S_K: tl.constexpr,
    S_V: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GRAIN: tl.constexpr,
    FOLD: tl.constexpr,
    FINE: tl.constexpr,
    SPAN: tl.constexpr,
    CHUNK: tl.constexpr,
    RING: tl.constexpr,
    CAP: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sums [pair, run, row, D], and maxima and sums of weights [pair, run, 2, row], of the runs that begin before the
    end of the committed text, cut to a multiple of GRAIN. With FOLD there are two of each: the sum of the runs that
    have ended, and of one that has not."""
    s_qb, s_qn, s_qh, s_kb, s_kh, s_vb, s_vh = strides
    wait_for_previous(PDL)
    i_tile, i_pair = tl.program_id(0), tl.program_id(1)
    run = runs - 1 - tl.program_id(2)  # the longest first
    i_row, i_head = i_pair // kv_heads, i_pair % kv_heads
    rows = nodes * GROUP
    prefix = tl.minimum(tl.load(p_prefix + i_row.to(tl.int64) * s_p), extent).to(tl.int32)
    end = prefix // GRAIN * GRAIN
    if FOLD:
        run = 0
    if run_start(run, FINE) >= end:
        return
    past = run_of(end - 1, FINE) + 1 if FOLD else run + 1
    o_m, o_n, o_d = i_tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    m_m = o_m < rows
    o_node = o_m // GROUP
    o_q = o_node.to(tl.int64) * s_qn + (i_head * GROUP + o_m % GROUP).to(tl.int64) * s_qh
    b_q = tl.load(
        p_q + i_row.to(tl.int64) * s_qb + o_q[:, None] + o_d[None, :], mask=m_m[:, None] & (o_d < D)[None, :], other=0.0
    )
    p_k += i_row.to(tl.int64) * s_kb + i_head.to(tl.int64) * s_kh
    p_v += i_row.to(tl.int64) * s_vb + i_head.to(tl.int64) * s_vh
    low = 0
    b_low = o_m
    if SPAN > 0:
        b_depth = tl.load(p_counts + i_row.to(tl.int64) * nodes + o_node, mask=m_m, other=1) - 1
        b_low = prefix + first_seen(b_depth, prefix, SPAN, CHUNK)
        low = tl.maximum(tl.min(tl.where(m_m, b_low, 1 << 30), 0), 0)
        if FOLD:
            run = run_of(tl.minimum(low, end - 1), FINE)
    b_ones = tl.full([BLOCK_N, 16], 1.0, b_q.dtype)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    b_max = tl.full([BLOCK_M], EMPTY, tl.float32)
    b_sum = tl.zeros([BLOCK_M, 16], tl.float32)
    if FOLD:
        b_total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        b_most = tl.full([BLOCK_M], EMPTY, tl.float32)
        b_weights = tl.zeros([BLOCK_M], tl.float32)
    for number in tl.range(run, past):
        stop = tl.minimum(end, run_start(number + 1, FINE))
        first = tl.maximum(run_start(number, FINE), tl.minimum(low, stop) // BLOCK_N * BLOCK_N)
        whole = first + (stop - first) // BLOCK_N * BLOCK_N if SPAN == 0 else first
        for at in tl.range(first, whole, BLOCK_N, num_stages=STAGES):
            b_k = block(p_k, at + o_n, m_m, o_d, S_K, D, False)
            b_v = block(p_v, at + o_n, m_m, o_d, S_V, D, False)
            b_acc, b_max, b_sum = step(b_q, b_k, b_v, m_m, b_acc, b_max, b_sum, scale2, b_ones, False, CAP)
        for at in tl.range(whole, stop, BLOCK_N, num_stages=STAGES if SPAN > 0 else 1):
            o_key = at + o_n
            m_key = o_key < stop
            m_seen = m_key[None, :]
            if SPAN > 0:
                m_key = m_key & (o_key >= low)
                m_seen = m_key[None, :] & (o_key[None, :] >= b_low[:, None])
            o_slot = wrapped(at % RING, o_n, RING) if RING > 0 else o_key
            b_k = block(p_k, o_slot, m_key, o_d, S_K, D, True)
            b_v = block(p_v, o_slot, m_key, o_d, S_V, D, True)
            b_acc, b_max, b_sum = step(b_q, b_k, b_v, m_seen, b_acc, b_max, b_sum, scale2, b_ones, True, CAP)
        if FOLD:  # noqa: SIM102 - known when it is compiled
            if stop == run_start(number + 1, FINE):
                b_total, b_most, b_weights = added(b_total, b_most, b_weights, b_acc, b_max, tl.max(b_sum, 1))
                b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
                b_max = tl.full([BLOCK_M], EMPTY, tl.float32)
                b_sum = tl.zeros([BLOCK_M, 16], tl.float32)
    m_part = m_m[:, None] & (o_d < D)[None, :]
    if FOLD:
        o_part = tl.cast(i_pair * 2, tl.int64) * rows
        tl.store(p_part + (o_part + o_m)[:, None] * D + o_d[None, :], b_total, mask=m_part)
        tl.store(p_state + 2 * o_part + o_m, b_most, mask=m_m)
        tl.store(p_state + 2 * o_part + rows + o_m, b_weights, mask=m_m)
        o_part += rows
    else:
        o_part = tl.cast(i_pair * runs + run, tl.int64) * rows
    tl.store(p_part + (o_part + o_m)[:, None] * D + o_d[None, :], b_acc, mask=m_part)
    tl.store(p_state + 2 * o_part + o_m, b_max, mask=m_m)
    tl.store(p_state + 2 * o_part + rows + o_m, tl.max(b_sum, 1), mask=m_m)


@triton.jit
def _gathered(
    p_k,
    p_v,
    p_slots,
    o_key,
    o_d,
    prefix,
    begin,
    position,
    low,
    S_K: tl.constexpr,
    S_V: tl.constexpr,
    D: tl.constexpr,
    SPAN: tl.constexpr,
    RING: tl.constexpr,
):
    """Keys and values of a node at a block of positions, from `begin` to its own, wherever they lie, and which there
    are."""
    m_key = (o_key >= begin) & (o_key <= position)
    if SPAN > 0:
        m_key = m_key & (o_key >= low)
    o_tail = tl.load(p_slots + o_key - prefix, mask=m_key & (o_key >= prefix), other=0)
    o_slot = tl.where(o_key < prefix, o_key, prefix + o_tail)
    if RING > 0:
        o_slot = o_slot % RING
    return block(p_k, o_slot, m_key, o_d, S_K, D, True), block(p_v, o_slot, m_key, o_d, S_V, D, True), m_key


@triton.jit
def _turned(b_s, b_v, m_key, b_acc, b_max, b_sum, scale2, b_ones, CAP: tl.constexpr):
    """`step` of one node by its scores [N, M], whose sums are [D, M] and [16, M]: few rows are the narrow side."""
    if CAP > 0:
        b_s = tanh(b_s * scale2)
        scale2 = CAP
    b_t = tl.fma(b_s, tl.full(b_s.shape, 1.0, tl.float32) * scale2, tl.full(b_s.shape, GRID, tl.float32))
    b_t = tl.where(m_key[:, None], b_t, float("-inf"))
    b_new = tl.maximum(b_max, tl.ceil(tl.max(b_t, 0) - GRID))
    b_p = tl.exp2(b_t - (b_new + GRID)[None, :]).to(b_v.dtype)
    b_keep = tl.exp2(b_max - b_new)
    b_sum = tl.dot(b_ones, b_p, b_sum * b_keep[None, :], input_precision="ieee")
    b_acc = tl.dot(tl.trans(b_v), b_p, b_acc * b_keep[None, :], input_precision="ieee")
    return b_acc, b_new, b_sum


@triton.jit(do_not_specialize=["nodes", "extent", "places", "shares", "kv_heads", "s_sb", "s_sn", "s_c"])
def _tail(
    p_q,
    p_k,
    p_v,
    p_out,
    p_part,
    p_state,
    p_prefix,
    p_slots,
    p_counts,
    p_sinks,
    scale2,
    nodes,
    extent,
    places,
    shares,
    kv_heads,
    strides,
    s_ob,
    s_p,
    s_sb,
    s_sn,
    s_c,
    S_K: tl.constexpr,
    S_V: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GRAIN: tl.constexpr,
    EACH: tl.constexpr,
    WHOLE: tl.constexpr,
    FOLD: tl.constexpr,
    FINE: tl.constexpr,
    SPAN: tl.constexpr,
    CHUNK: tl.constexpr,
    RING: tl.constexpr,
    CAP: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One node of one pair: what `_runs` has not read (with WHOLE: everything), and the sum of all runs. With FOLD the
    first share of the text's runs is one sum, and what has not ended stands last."""
    s_qb, s_qn, s_qh, s_kb, s_kh, s_vb, s_vh = strides
    if WHOLE:
        wait_for_previous(PDL)
    node, i_pair = tl.program_id(0), tl.program_id(1)
    i_row, i_head = i_pair // kv_heads, i_pair % kv_heads
    prefix = tl.minimum(tl.load(p_prefix + i_row.to(tl.int64) * s_p), extent).to(tl.int32)
    o_m, o_n, o_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    m_m, m_d = o_m < GROUP, o_d < D
    m_out = m_m[None, :] & m_d[:, None]
    o_head = i_head * GROUP + o_m
    depth = tl.load(p_counts + i_row.to(tl.int64) * s_c + node) - 1
    p_slots += i_row.to(tl.int64) * s_sb + node.to(tl.int64) * s_sn
    position = tl.minimum(prefix + depth, extent - 1)
    b_q = tl.load(
        p_q + i_row.to(tl.int64) * s_qb + node.to(tl.int64) * s_qn + o_head[None, :] * s_qh + o_d[:, None],
        mask=m_out,
        other=0.0,
    )
    p_k += i_row.to(tl.int64) * s_kb + i_head.to(tl.int64) * s_kh
    p_v += i_row.to(tl.int64) * s_vb + i_head.to(tl.int64) * s_vh
    low = 0
    if SPAN > 0:
        low = tl.maximum(prefix + first_seen(depth, prefix, SPAN, CHUNK), 0)
    b_ones = tl.full([16, BLOCK_N], 1.0, b_q.dtype)
    b_total = tl.zeros([BLOCK_D, BLOCK_M], tl.float32)
    b_most = tl.full([BLOCK_M], EMPTY, tl.float32)
    b_weights = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_D, BLOCK_M], tl.float32)
    b_max = tl.full([BLOCK_M], EMPTY, tl.float32)
    b_sum = tl.zeros([16, BLOCK_M], tl.float32)
    begin = 0
    if WHOLE:
        if SPAN > 0:
            begin = low // BLOCK_N * BLOCK_N
        at = begin
    else:
        begin = prefix // GRAIN * GRAIN
        at = begin // BLOCK_N * BLOCK_N
        # what no kernel in front of `_runs` has still to write is read before `_runs` has ended
        b_k, b_v, m_key = _gathered(
            p_k, p_v, p_slots, at + o_n, o_d, prefix, begin, position, low, S_K, S_V, D, SPAN, RING
        )
        b_s = tl.dot(b_k, b_q, input_precision="ieee")
        wait_for_previous(PDL)
        left = run_of(tl.maximum(begin, 1) - 1, FINE) + (begin > 0)  # runs that were left, the last open or not
        past = tl.where(begin < run_start(left, FINE), left - 1, left)
        rows = nodes * GROUP
        part, left_open = past, past
        if FOLD:
            part = tl.minimum(past, 1 + tl.maximum(past - share_of(begin, 1, shares, FINE), 0))
            left_open = places - 1
        p_part += (tl.cast(i_pair * places, tl.int64) * rows + node * GROUP + o_m)[None, :] * D + o_d[:, None]
        p_state += tl.cast(i_pair * places, tl.int64) * 2 * rows + node * GROUP + o_m
        if past < left:  # the run that has been left open
            o_run = tl.cast(left_open, tl.int64) * rows
            b_acc = tl.load(p_part + o_run * D, mask=m_out, other=0.0)
            b_max = tl.load(p_state + 2 * o_run, mask=m_m, other=EMPTY)
            b_sum += tl.load(p_state + 2 * o_run + rows, mask=m_m, other=0.0)[None, :]
        skip = run_of(low, FINE) // EACH * EACH if SPAN > 0 and not FOLD else 0  # before it nothing is seen
        for start in tl.range(skip, part, EACH):
            read = ()
            for each in tl.static_range(EACH):  # all of them are asked for before the first is there
                o_run = tl.cast(start + each, tl.int64) * rows
                m_run = m_m & (o_m * 0 + (start + each) < part)
                b_acc2 = tl.load(p_part + o_run * D, mask=m_run[None, :] & m_d[:, None], other=0.0)
                b_max2 = tl.load(p_state + 2 * o_run, mask=m_run, other=EMPTY)
                b_sum2 = tl.load(p_state + 2 * o_run + rows, mask=m_run, other=0.0)
                read += ((b_acc2, b_max2, b_sum2),)  # type: ignore[assignment]
            for each in tl.static_range(EACH):
                b_acc2, b_max2, b_sum2 = read[each]
                b_total, b_most, b_weights = added(b_total, b_most, b_weights, b_acc2, b_max2, b_sum2, 0)
        b_acc, b_max, b_sum = _turned(b_s, b_v, m_key, b_acc, b_max, b_sum, scale2, b_ones, CAP)
        at += BLOCK_N
    limit = run_start(run_of(begin, FINE) + 1, FINE)
    for start in tl.range(at, position + 1, BLOCK_N, num_stages=STAGES if WHOLE else 1):
        if start >= limit:
            b_total, b_most, b_weights = added(b_total, b_most, b_weights, b_acc, b_max, tl.max(b_sum, 0), 0)
            b_acc = tl.zeros([BLOCK_D, BLOCK_M], tl.float32)
            b_max = tl.full([BLOCK_M], EMPTY, tl.float32)
            b_sum = tl.zeros([16, BLOCK_M], tl.float32)
            limit = run_start(run_of(start, FINE) + 1, FINE)
        b_k, b_v, m_key = _gathered(
            p_k, p_v, p_slots, start + o_n, o_d, prefix, begin, position, low, S_K, S_V, D, SPAN, RING
        )
        b_s = tl.dot(b_k, b_q, input_precision="ieee")
        b_acc, b_max, b_sum = _turned(b_s, b_v, m_key, b_acc, b_max, b_sum, scale2, b_ones, CAP)
    b_total, b_most, b_weights = added(b_total, b_most, b_weights, b_acc, b_max, tl.max(b_sum, 0), 0)
    b_out = finished(b_total, b_most, b_weights, p_sinks, o_head, m_m, 0)
    o_out = i_row.to(tl.int64) * s_ob + (node.to(tl.int64) * (kv_heads * GROUP) + o_head) * D
    tl.store(p_out + o_out[None, :] + o_d[:, None], b_out.to(p_out.dtype.element_ty), mask=m_out)


@triton.jit
def _paths(p_words, p_slots, p_counts, tail, s_wb, s_wn, s_sb, s_sn, s_c, WORDS: tl.constexpr, PDL: tl.constexpr):
    """Slots [B, N, tail] of what each node sees of the tail, in their order, and how many these are [B, N]."""
    wait_for_previous(PDL)
    node, i_row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    o_bit = tl.arange(0, 64)
    count = 0
    for word in tl.static_range(WORDS):
        b_word = tl.load(p_words + i_row * s_wb + node * s_wn + word)
        b_seen = (((b_word >> o_bit.to(tl.int64)) & 1) == 1) & (word * 64 + o_bit < tail)
        o_rank = count + tl.cumsum(b_seen.to(tl.int32), 0) - 1
        tl.store(p_slots + i_row * s_sb + node * s_sn + o_rank, word * 64 + o_bit, mask=b_seen)
        count += tl.sum(b_seen.to(tl.int32), 0)
    tl.store(p_counts + i_row * s_c + node, count)


def paths_of(words: Tensor, nodes: int, tail: int) -> tuple[Tensor, Tensor]:
    """`OrderedLayout`'s slots and counts of trees whose nodes see `words` [B, N, W] of the tail."""
    slots = words.new_empty((len(words), nodes, tail), dtype=torch.int32)
    counts = words.new_empty((len(words), nodes), dtype=torch.int32)
    if counts.numel():
        _paths[(nodes, len(words))](
            *(words, slots, counts),
            *(tail, *words.stride()[:2], *slots.stride()[:2], counts.stride(0)),
            WORDS=words.shape[2],
            num_warps=1,
            **dependent(words.device),
        )
    return slots, counts


def nodes_attention(
    given: OrderedPass,
    slots: Tensor,
    counts: Tensor,
    read: OrderedLaunch,
    end: OrderedLaunch,
    whole: bool,
    shares: int | None,
) -> None:
    """Fill the pass's output, of nodes that see their ancestors: by the launches of `_runs` and of `_tail`, or where
    that does all, of `_tail` alone. `shares` is 1 where one program takes all runs of a tile, 0 where each takes one,
    and on Hopper how many take them."""
    q, k, v, out, prefix, sinks = given.q, given.k, given.v, given.out, given.tree.prefix, given.sinks
    nodes, kv_heads, rows, pairs, runs = q.shape[1], k.shape[1], given.rows, given.pairs, given.runs
    hopper = not whole and ordered_hopper.fits(given)
    if hopper:
        shares = shares or ordered_hopper.shares_of(
            ordered_hopper.programs_of(given), rows * pairs, given.extent, given.fine
        )
    elif shares is None:
        shares = int(pairs * rows >= FOLDED or pairs * rows * runs >= MOST_SUMS)
    else:
        shares = min(shares, 1)
    fold = shares > 0
    sizes, places = (given.scale2, nodes, given.extent), runs
    if fold:
        places = ordered_hopper.places_of(shares, given.extent, given.fine)
    part, state = (out, out) if whole else given.parts(places)
    if hopper:
        ordered_hopper.launch(given, part, state, shares)
    elif not whole:
        _runs[(triton.cdiv(rows, read.block_m), pairs, 1 if fold else runs)](
            *(q, k, v, part, state, prefix, counts),
            *(*sizes, runs, kv_heads, given.strides, prefix.stride(0)),
            BLOCK_M=read.block_m,
            GRAIN=given.grain,
            FOLD=fold,
            **given.options(read),
        )
    _tail[(nodes, pairs)](
        *(q, k, v, out, part, state, prefix, slots, counts, sinks),
        *(*sizes, places, shares, kv_heads, given.strides, out.stride(0), prefix.stride(0), *slots.stride()[:2]),
        counts.stride(0),
        BLOCK_M=max(8, triton.next_power_of_2(given.tree.group)),
        GRAIN=given.grain,
        EACH=1 if shares == 1 else EACH * end.warps // 4,
        WHOLE=whole,
        FOLD=fold,
        **given.options(end),
    )
