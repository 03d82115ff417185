"""Ordered attention of chains: tiles of a prompt's rows, and few rows by runs that a second launch adds up.

Names and the rule that fixes the order are those of ordered.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastspec.kernels.attention import ordered_hopper
from fastspec.kernels.attention.ordered_sums import OrderedLaunch, OrderedPass, added, block, finished, step
from fastspec.kernels.attention.parts import EMPTY, first_seen, run_of, run_start, wrapped
from fastspec.kernels.launch import wait_for_previous

LONG_CHAIN = 64
"""Matrix rows of a chain from which tiles of it go through the text."""
JOINED = 24
"""Runs that are read at once to be added."""
NARROW = 1024
"""Channels of one row's output up to which the product that follows may start while keys are still read: its weights
take no bandwidth to speak of from them."""


@triton.jit
def _along(
    b_q,
    p_k,
    p_v,
    start,
    stop,
    b_acc,
    b_max,
    b_sum,
    least,
    b_last,
    b_low,
    o_n,
    o_d,
    scale2,
    b_ones,
    S_K: tl.constexpr,
    S_V: tl.constexpr,
    D: tl.constexpr,
    SPAN: tl.constexpr,
    RING: tl.constexpr,
    CAP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A tile's sums with the keys from `start` to `stop`, of which row m sees those from b_low to b_last, and all rows
    without a span those up to `least`."""
    BLOCK_N: tl.constexpr = o_n.shape[0]
    whole = start
    if SPAN == 0:
        whole = start + tl.maximum(tl.minimum(stop, least + 1) - start, 0) // BLOCK_N * BLOCK_N
    for at in tl.range(start, whole, BLOCK_N, num_stages=STAGES):
        b_k = block(p_k, at + o_n, o_n >= 0, o_d, S_K, D, False)
        b_v = block(p_v, at + o_n, o_n >= 0, o_d, S_V, D, False)
        b_acc, b_max, b_sum = step(b_q, b_k, b_v, b_last >= 0, b_acc, b_max, b_sum, scale2, b_ones, False, CAP)
    for at in tl.range(whole, stop, BLOCK_N, num_stages=STAGES if SPAN > 0 else 1):
        o_key = at + o_n
        m_key = o_key < stop
        m_seen = m_key[None, :] & (o_key[None, :] <= b_last[:, None])
        if SPAN > 0:
            m_seen = m_seen & (o_key[None, :] >= b_low[:, None])
        o_slot = wrapped(at % RING, o_n, RING) if RING > 0 else o_key
        b_k = block(p_k, o_slot, m_key, o_d, S_K, D, True)
        b_v = block(p_v, o_slot, m_key, o_d, S_V, D, True)
        b_acc, b_max, b_sum = step(b_q, b_k, b_v, m_seen, b_acc, b_max, b_sum, scale2, b_ones, True, CAP)
    return b_acc, b_max, b_sum


@triton.jit
def _tile_of(
    nodes, extent, prefix, i_tile, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, SPAN: tl.constexpr, CHUNK: tl.constexpr
):
    """A tile of a chain's rows: rows, which there are, their nodes, the last and first keys that each sees, the first
    that one of them sees, and the end of what they see."""
    o_m = i_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    m_m = o_m < nodes * GROUP
    o_node = o_m // GROUP
    low = 0
    b_low = o_m
    if SPAN > 0:
        b_low = prefix + first_seen(o_node, prefix, SPAN, CHUNK)
        low = tl.maximum(tl.min(tl.where(m_m, b_low, 1 << 30), 0), 0)
    last = (tl.minimum((i_tile + 1) * BLOCK_M, nodes * GROUP) - 1) // GROUP
    return o_m, m_m, o_node, prefix + o_node, b_low, low, tl.minimum(prefix + last + 1, extent)


@triton.jit(do_not_specialize=["nodes", "extent", "kv_heads"])
def _chain(
    p_q,
    p_k,
    p_v,
    p_out,
    p_prefix,
    p_sinks,
    scale2,
    nodes,
    extent,
    kv_heads,
    strides,
    s_ob,
    s_p,
    S_K: tl.constexpr,
    S_V: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FINE: tl.constexpr,
    SPAN: tl.constexpr,
    CHUNK: tl.constexpr,
    RING: tl.constexpr,
    CAP: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile of a chain's rows, from the first key that one of them sees to the last."""
    s_qb, s_qn, s_qh, s_kb, s_kh, s_vb, s_vh = strides
    i_tile, i_pair = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    i_row, i_head = i_pair // kv_heads, i_pair % kv_heads
    p_k += i_row.to(tl.int64) * s_kb + i_head.to(tl.int64) * s_kh
    p_v += i_row.to(tl.int64) * s_vb + i_head.to(tl.int64) * s_vh
    wait_for_previous(PDL)
    prefix = tl.minimum(tl.load(p_prefix + i_row.to(tl.int64) * s_p), extent).to(tl.int32)
    o_m, m_m, o_node, b_last, b_low, low, end = _tile_of(nodes, extent, prefix, i_tile, GROUP, BLOCK_M, SPAN, CHUNK)
    least = prefix + i_tile * BLOCK_M // GROUP
    o_n, o_d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    m_d = o_d < D
    begin = low // BLOCK_N * BLOCK_N
    o_q = o_node.to(tl.int64) * s_qn + (i_head * GROUP + o_m % GROUP).to(tl.int64) * s_qh
    b_q = tl.load(
        p_q + i_row.to(tl.int64) * s_qb + o_q[:, None] + o_d[None, :], mask=m_m[:, None] & m_d[None, :], other=0.0
    )
    b_ones = tl.full([BLOCK_N, 16], 1.0, b_q.dtype)
    seen = least, b_last, b_low, o_n, o_d, scale2, b_ones
    b_total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    b_most = tl.full([BLOCK_M], EMPTY, tl.float32)
    b_weights = tl.zeros([BLOCK_M], tl.float32)
    for run in tl.range(run_of(begin, FINE), run_of(end - 1, FINE) + 1):
        start = tl.maximum(run_start(run, FINE), begin)
        stop = tl.minimum(run_start(run + 1, FINE), end)
        b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        b_max = tl.full([BLOCK_M], EMPTY, tl.float32)
        b_sum = tl.zeros([BLOCK_M, 16], tl.float32)
        b_acc, b_max, b_sum = _along(
            b_q, p_k, p_v, start, stop, b_acc, b_max, b_sum, *seen, S_K, S_V, D, SPAN, RING, CAP, STAGES
        )
        b_total, b_most, b_weights = added(b_total, b_most, b_weights, b_acc, b_max, tl.max(b_sum, 1))
    o_head = i_head * GROUP + o_m % GROUP
    b_out = finished(b_total, b_most, b_weights, p_sinks, o_head, m_m)
    o_out = i_row.to(tl.int64) * s_ob + (o_node.to(tl.int64) * (kv_heads * GROUP) + o_head) * D
    tl.store(p_out + o_out[:, None] + o_d[None, :], b_out.to(p_out.dtype.element_ty), mask=m_m[:, None] & m_d[None, :])


@triton.jit(do_not_specialize=["nodes", "extent", "runs", "kv_heads"])
def _few(
    p_q,
    p_k,
    p_v,
    p_part,
    p_state,
    p_prefix,
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
    FINE: tl.constexpr,
    SPAN: tl.constexpr,
    CHUNK: tl.constexpr,
    RING: tl.constexpr,
    CAP: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One run of a tile of a short chain's rows: sums [pair, run, row, D], maxima and sums of weights [pair, run, 2,
    row]."""
    s_qb, s_qn, s_qh, s_kb, s_kh, s_vb, s_vh = strides
    i_tile, i_pair = tl.program_id(0), tl.program_id(1)
    i_row, i_head = i_pair // kv_heads, i_pair % kv_heads
    p_k += i_row.to(tl.int64) * s_kb + i_head.to(tl.int64) * s_kh
    p_v += i_row.to(tl.int64) * s_vb + i_head.to(tl.int64) * s_vh
    prefix = tl.minimum(tl.load(p_prefix + i_row.to(tl.int64) * s_p), extent).to(tl.int32)
    o_m, m_m, o_node, b_last, b_low, low, end = _tile_of(nodes, extent, prefix, i_tile, GROUP, BLOCK_M, SPAN, CHUNK)
    least = prefix + i_tile * BLOCK_M // GROUP
    o_n, o_d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    m_d = o_d < D
    begin = low // BLOCK_N * BLOCK_N
    first, past = run_of(begin, FINE), run_of(end - 1, FINE) + 1
    run = past - 1 - tl.program_id(2)  # the longest first
    if run < first:
        wait_for_previous(PDL)
        return
    # What no kernel in front has still to write, which is all but the nodes' own keys, is read before it has ended.
    start = tl.maximum(run_start(run, FINE), begin)
    stop = tl.minimum(run_start(run + 1, FINE), end)
    o_key = start + o_n
    o_slot = wrapped(start % RING, o_n, RING) if RING > 0 else o_key
    m_old = (o_key >= low) & (o_key < tl.minimum(stop, prefix))
    b_k = block(p_k, o_slot, m_old, o_d, S_K, D, True)
    b_v = block(p_v, o_slot, m_old, o_d, S_V, D, True)
    wait_for_previous(PDL)
    o_q = o_node.to(tl.int64) * s_qn + (i_head * GROUP + o_m % GROUP).to(tl.int64) * s_qh
    b_q = tl.load(
        p_q + i_row.to(tl.int64) * s_qb + o_q[:, None] + o_d[None, :], mask=m_m[:, None] & m_d[None, :], other=0.0
    )
    b_ones = tl.full([BLOCK_N, 16], 1.0, b_q.dtype)
    seen = least, b_last, b_low, o_n, o_d, scale2, b_ones
    if stop > prefix:
        b_k = block(p_k, o_slot, (o_key >= low) & (o_key < stop), o_d, S_K, D, True)
        b_v = block(p_v, o_slot, (o_key >= low) & (o_key < stop), o_d, S_V, D, True)
    m_seen = (o_key < stop)[None, :] & (o_key[None, :] <= b_last[:, None])
    if SPAN > 0:
        m_seen = m_seen & (o_key[None, :] >= b_low[:, None])
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    b_max = tl.full([BLOCK_M], EMPTY, tl.float32)
    b_sum = tl.zeros([BLOCK_M, 16], tl.float32)
    b_acc, b_max, b_sum = step(b_q, b_k, b_v, m_seen, b_acc, b_max, b_sum, scale2, b_ones, True, CAP)
    b_acc, b_max, b_sum = _along(
        b_q, p_k, p_v, start + BLOCK_N, stop, b_acc, b_max, b_sum, *seen, S_K, S_V, D, SPAN, RING, CAP, STAGES
    )
    rows = nodes * GROUP
    o_part = tl.cast(i_pair * runs + run, tl.int64) * rows
    tl.store(p_part + (o_part + o_m)[:, None] * D + o_d[None, :], b_acc, mask=m_m[:, None] & m_d[None, :])
    tl.store(p_state + 2 * o_part + o_m, b_max, mask=m_m)
    tl.store(p_state + 2 * o_part + rows + o_m, tl.max(b_sum, 1), mask=m_m)


@triton.jit(do_not_specialize=["nodes", "extent", "runs", "kv_heads"])
def _add_runs(
    p_part,
    p_state,
    p_out,
    p_prefix,
    p_sinks,
    nodes,
    extent,
    runs,
    kv_heads,
    s_ob,
    s_p,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EACH: tl.constexpr,
    FINE: tl.constexpr,
    SPAN: tl.constexpr,
    CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row of a short chain: the mean by the sums that `_few` left of its runs, EACH of them read at once."""
    if PDL:
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if not EARLY:
            tl.extra.cuda.gdc_launch_dependents()
    row, i_pair = tl.program_id(0), tl.program_id(1)
    i_row, i_head = i_pair // kv_heads, i_pair % kv_heads
    node = row // GROUP
    prefix = tl.minimum(tl.load(p_prefix + i_row.to(tl.int64) * s_p), extent).to(tl.int32)
    past = run_of(tl.minimum(prefix + node, extent - 1), FINE) + 1
    first = 0
    if SPAN > 0:
        first = run_of(tl.maximum(prefix + first_seen(node, prefix, SPAN, CHUNK), 0), FINE)
    rows = nodes * GROUP
    o_d = tl.arange(0, BLOCK_D)
    p_part += tl.cast(i_pair * runs, tl.int64) * rows * D + row * D + o_d
    p_state += tl.cast(i_pair * runs, tl.int64) * 2 * rows + row
    b_acc = tl.zeros([BLOCK_D], tl.float32)
    b_max = tl.full([1], EMPTY, tl.float32)
    b_sum = tl.zeros([1], tl.float32)
    o_one = tl.arange(0, 1)
    for some in tl.range(first, past, EACH):
        read = ()
        for each in tl.static_range(EACH):  # all of them are asked for before the first is there
            there = o_one * 0 + (some + each) < past
            p_run = p_state + (some + each) * 2 * rows + o_one
            b_acc2 = tl.load(p_part + (some + each) * rows * D, mask=there & (o_d < D), other=0.0)
            b_max2, b_sum2 = tl.load(p_run, mask=there, other=EMPTY), tl.load(p_run + rows, mask=there, other=0.0)
            read += ((b_acc2, b_max2, b_sum2),)  # type: ignore[assignment]
        for each in tl.static_range(EACH):
            b_acc2, b_max2, b_sum2 = read[each]
            b_acc, b_max, b_sum = added(b_acc, b_max, b_sum, b_acc2, b_max2, b_sum2, None)
    o_head = i_head * GROUP + row % GROUP + o_one
    b_out = finished(b_acc, b_max, b_sum, p_sinks, o_head, o_head >= 0, None)
    p_out += i_row.to(tl.int64) * s_ob + (node * (kv_heads * GROUP) + i_head * GROUP + row % GROUP).to(tl.int64) * D
    tl.store(p_out + o_d, b_out.to(p_out.dtype.element_ty), mask=o_d < D)


def chain_attention(given: OrderedPass, launch: OrderedLaunch) -> None:
    """Fill the pass's output, of nodes that each see the ones before."""
    q, k, v, out, prefix, sinks = given.q, given.k, given.v, given.out, given.tree.prefix, given.sinks
    batch, nodes, heads, size = q.shape
    kv_heads, rows, pairs, runs = k.shape[1], given.rows, given.pairs, given.runs
    tiles, ends = triton.cdiv(rows, launch.block_m), (out.stride(0), prefix.stride(0))
    counts, cut = (given.scale2, nodes, given.extent), {"BLOCK_M": launch.block_m, **given.options(launch)}
    if ordered_hopper.fits(given):
        ordered_hopper.chain(given)
        return
    if rows > LONG_CHAIN:
        _chain[(tiles, pairs)](q, k, v, out, prefix, sinks, *counts, kv_heads, given.strides, *ends, **cut)
        return
    part, state = given.parts(runs)
    _few[(tiles, pairs, runs)](
        q, k, v, part, state, prefix, *counts, runs, kv_heads, given.strides, prefix.stride(0), **cut
    )
    _add_runs[(rows, pairs)](
        *(part, state, out, prefix, sinks),
        *(nodes, given.extent, runs, kv_heads, *ends),
        EACH=8 if runs <= 8 else 16 if runs <= 16 else JOINED,
        EARLY=batch * nodes == 1 and heads * size <= NARROW,
        num_warps=max(1, given.block_d // 32),
        **given.shape(),
    )
