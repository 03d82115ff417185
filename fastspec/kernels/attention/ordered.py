"""Attention that sums in an order given by positions alone: a query has the same bits in a tree, in a chain and by
itself, wherever a round began, and whatever stands beside it.

What is fixed, for a query at position p that sees the keys at positions 0 to p (or those of its span):

- Scores are taken in units of log2 on a grid (`GRID`), so that taking off a whole number is exact. Maxima are rounded
  up to whole numbers: what weights and sums are scaled by is a power of two, and changes no bit of them. So nothing
  hangs on where the maximum was raised, or on how many keys a block has.
- The weights, rounded to the values' dtype, meet the values in groups of 16 aligned positions, which tensor cores add
  up at once, group after group. A key that is not seen has weight zero, and adds nothing. Weights are added up by a
  product with ones, in the same order.
- A text is cut into runs (`run_start`): 256 positions each up to 2,048, then four to an octave; where there are few key
  heads, half as long. Sums over a run are a chain; runs are added in their order.

float16 has no room for small weights, so that there the maximum is raised at multiples of 64 positions alone.

B rows (sequences), N query nodes per row, Hq query heads, Hkv key heads, G = Hq / Hkv, D head size, C cache slots. A
pair is one key head of one row; its N * G queries are the rows of a matrix, row n * G + g. `_chain` takes tiles of a
prompt's rows, each from the first key to the last. Of few rows `_few` takes the runs apart, and `_join` adds them up.
Trees take two as well: `_runs` leaves the sums of the runs of the committed text, up to the last multiple of 16 (of 64
in float16), for tiles of rows; `_tail` goes on from these for each node: the keys that are left, the node's ancestors
among them, wherever they lie, and then the sum of all runs; over a short text it does all. `ordered_hopper.py` is
`_runs` for long texts on Hopper.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.attention import ordered_hopper
from fastspec.kernels.attention.layout import TreeLayout
from fastspec.kernels.attention.layout import attention_layout as tree_layout
from fastspec.kernels.attention.parts import EMPTY, GRID, LOG2E, first_seen, run_of, run_start, tanh, wrapped
from fastspec.kernels.attention.reference import Span
from fastspec.kernels.launch import dependent, is_hopper, stages_within, wait_for_previous

SHORT, CROWDED = 512, 100_000
"""Slots up to which one launch does all, and how many the nodes of all pairs then read together."""
FEW_HEADS = 4
"""Key heads up to which a text has runs of half the length: else most of the GPU would wait for a few programs."""
NARROW = 1024
"""Channels of one row's output up to which the product that follows may start while keys are still read: its weights
take no bandwidth to speak of from them."""
LONG = 8192
"""Slots from which blocks are wider."""
LONG_CHAIN = 64
"""Matrix rows of a chain from which tiles of it go through the text."""
MANY = 4096
"""Matrix rows of all pairs from which a node's tail is a single warp's."""
EACH, JOINED = 8, 24
"""Runs that are read at once to be added, by four warps for a node of a tree, and for a row of a chain."""
MULTIPROCESSORS = 132
"""Of the GPU that the launches were measured on."""
FOLDED = 15_000
"""Matrix rows of all pairs from which one program takes all runs of a tile's text: there are enough of them."""

_LOG2E = tl.constexpr(LOG2E)


@triton.jit
def _step(b_q, b_k, b_v, m_seen, b_acc, b_max, b_sum, scale2, b_ones, MASKED: tl.constexpr, CAP: tl.constexpr):
    """A block of keys: sums [M, D], maxima [M], sums of weights [M, 16] with it."""
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    if CAP > 0:
        b_s = tanh(b_s * scale2)
        scale2 = CAP
    b_t = tl.fma(b_s, tl.full(b_s.shape, 1.0, tl.float32) * scale2, tl.full(b_s.shape, GRID, tl.float32))
    if MASKED:
        b_t = tl.where(m_seen, b_t, float("-inf"))
    b_new = tl.maximum(b_max, tl.ceil(tl.max(b_t, 1) - GRID))
    b_p = tl.exp2(b_t - (b_new + GRID)[:, None]).to(b_v.dtype)
    b_keep = tl.exp2(b_max - b_new)
    b_sum = tl.dot(b_p, b_ones, b_sum * b_keep[:, None], input_precision="ieee")
    b_acc = tl.dot(b_p, b_v, b_acc * b_keep[:, None], input_precision="ieee")
    return b_acc, b_new, b_sum


@triton.jit
def _along_axis(b_row, AXIS: tl.constexpr):
    """What rows have each, beside sums that lie along AXIS, or are those of one row alone."""
    return b_row if AXIS is None else tl.expand_dims(b_row, AXIS)


@triton.jit
def _added(b_acc, b_max, b_sum, b_acc2, b_max2, b_sum2, AXIS: tl.constexpr = 1):
    """The sums of two runs, the earlier one first: all factors are powers of two. A row's sums lie along AXIS."""
    b_new = tl.maximum(b_max, b_max2)
    b_1, b_2 = tl.exp2(b_max - b_new), tl.exp2(b_max2 - b_new)
    b_acc = b_acc * _along_axis(b_1, AXIS) + b_acc2 * _along_axis(b_2, AXIS)
    return b_acc, b_new, b_sum * b_1 + b_sum2 * b_2


@triton.jit
def _finished(b_acc, b_max, b_sum, p_sinks, o_head, m_row, AXIS: tl.constexpr = 1):
    """The mean of the values by their weights, a sink's weight among them; zero where nothing is seen."""
    if p_sinks is not None:
        b_sink = tl.load(p_sinks + o_head, mask=m_row, other=0.0).to(tl.float32)
        b_sink = tl.fma(b_sink, tl.full(b_sink.shape, _LOG2E, tl.float32), tl.full(b_sink.shape, GRID, tl.float32))
        b_new = tl.maximum(b_max, tl.ceil(b_sink - GRID))
        b_keep = tl.exp2(b_max - b_new)
        b_acc = b_acc * _along_axis(b_keep, AXIS)
        b_sum = b_sum * b_keep + tl.exp2(b_sink - (b_new + GRID))
    return b_acc * _along_axis(1.0 / tl.where(b_sum > 0.0, b_sum, 1.0), AXIS)


@triton.jit
def _block(p, o_slot, m_slot, o_d, STRIDE: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr):
    """Keys or values [BLOCK, D'] of slots; zero where they are not to be read."""
    p_block = p + o_slot.to(tl.int64)[:, None] * STRIDE + o_d[None, :]
    if MASKED:
        return tl.load(p_block, mask=m_slot[:, None] & (o_d < D)[None, :], other=0.0)
    elif o_d.shape[0] != D:
        return tl.load(p_block, mask=(o_d < D)[None, :], other=0.0)
    else:
        return tl.load(p_block)


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
    s_qb,
    s_qn,
    s_qh,
    s_kb,
    s_kh,
    s_vb,
    s_vh,
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
            b_k = _block(p_k, at + o_n, m_m, o_d, S_K, D, False)
            b_v = _block(p_v, at + o_n, m_m, o_d, S_V, D, False)
            b_acc, b_max, b_sum = _step(b_q, b_k, b_v, m_m, b_acc, b_max, b_sum, scale2, b_ones, False, CAP)
        for at in tl.range(whole, stop, BLOCK_N, num_stages=STAGES if SPAN > 0 else 1):
            o_key = at + o_n
            m_key = o_key < stop
            m_seen = m_key[None, :]
            if SPAN > 0:
                m_key = m_key & (o_key >= low)
                m_seen = m_key[None, :] & (o_key[None, :] >= b_low[:, None])
            o_slot = wrapped(at % RING, o_n, RING) if RING > 0 else o_key
            b_k = _block(p_k, o_slot, m_key, o_d, S_K, D, True)
            b_v = _block(p_v, o_slot, m_key, o_d, S_V, D, True)
            b_acc, b_max, b_sum = _step(b_q, b_k, b_v, m_seen, b_acc, b_max, b_sum, scale2, b_ones, True, CAP)
        if FOLD:  # noqa: SIM102 - known when it is compiled
            if stop == run_start(number + 1, FINE):
                b_total, b_most, b_weights = _added(b_total, b_most, b_weights, b_acc, b_max, tl.max(b_sum, 1))
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
    return _block(p_k, o_slot, m_key, o_d, S_K, D, True), _block(p_v, o_slot, m_key, o_d, S_V, D, True), m_key


@triton.jit
def _turned(b_s, b_v, m_key, b_acc, b_max, b_sum, scale2, b_ones, CAP: tl.constexpr):
    """`_step` of one node by its scores [N, M], whose sums are [D, M] and [16, M]: few rows are the narrow side."""
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


@triton.jit(do_not_specialize=["nodes", "extent", "runs", "kv_heads", "s_sb", "s_sn", "s_c"])
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
    runs,
    kv_heads,
    s_qb,
    s_qn,
    s_qh,
    s_kb,
    s_kh,
    s_vb,
    s_vh,
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
    """One node of one pair: what `_runs` has not read (with WHOLE: everything), and the sum of all runs."""
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
        part, parts = (tl.minimum(past, 1), 2) if FOLD else (past, runs)
        p_part += (tl.cast(i_pair * parts, tl.int64) * rows + node * GROUP + o_m)[None, :] * D + o_d[:, None]
        p_state += tl.cast(i_pair * parts, tl.int64) * 2 * rows + node * GROUP + o_m
        if past < left:  # the run that has been left open
            o_run = tl.cast(parts - 1 if FOLD else past, tl.int64) * rows
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
                b_total, b_most, b_weights = _added(b_total, b_most, b_weights, b_acc2, b_max2, b_sum2, 0)
        b_acc, b_max, b_sum = _turned(b_s, b_v, m_key, b_acc, b_max, b_sum, scale2, b_ones, CAP)
        at += BLOCK_N
    limit = run_start(run_of(begin, FINE) + 1, FINE)
    for start in tl.range(at, position + 1, BLOCK_N, num_stages=STAGES if WHOLE else 1):
        if start >= limit:
            b_total, b_most, b_weights = _added(b_total, b_most, b_weights, b_acc, b_max, tl.max(b_sum, 0), 0)
            b_acc = tl.zeros([BLOCK_D, BLOCK_M], tl.float32)
            b_max = tl.full([BLOCK_M], EMPTY, tl.float32)
            b_sum = tl.zeros([16, BLOCK_M], tl.float32)
            limit = run_start(run_of(start, FINE) + 1, FINE)
        b_k, b_v, m_key = _gathered(
            p_k, p_v, p_slots, start + o_n, o_d, prefix, begin, position, low, S_K, S_V, D, SPAN, RING
        )
        b_s = tl.dot(b_k, b_q, input_precision="ieee")
        b_acc, b_max, b_sum = _turned(b_s, b_v, m_key, b_acc, b_max, b_sum, scale2, b_ones, CAP)
    b_total, b_most, b_weights = _added(b_total, b_most, b_weights, b_acc, b_max, tl.max(b_sum, 0), 0)
    b_out = _finished(b_total, b_most, b_weights, p_sinks, o_head, m_m, 0)
    o_out = i_row.to(tl.int64) * s_ob + (node.to(tl.int64) * (kv_heads * GROUP) + o_head) * D
    tl.store(p_out + o_out[None, :] + o_d[:, None], b_out.to(p_out.dtype.element_ty), mask=m_out)


@triton.jit
def _along(
    b_q,
    p_k,
    p_v,
    start,
    stop,
    least,
    b_last,
    b_low,
    o_n,
    o_d,
    b_acc,
    b_max,
    b_sum,
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
        b_k = _block(p_k, at + o_n, o_n >= 0, o_d, S_K, D, False)
        b_v = _block(p_v, at + o_n, o_n >= 0, o_d, S_V, D, False)
        b_acc, b_max, b_sum = _step(b_q, b_k, b_v, b_last >= 0, b_acc, b_max, b_sum, scale2, b_ones, False, CAP)
    for at in tl.range(whole, stop, BLOCK_N, num_stages=STAGES if SPAN > 0 else 1):
        o_key = at + o_n
        m_key = o_key < stop
        m_seen = m_key[None, :] & (o_key[None, :] <= b_last[:, None])
        if SPAN > 0:
            m_seen = m_seen & (o_key[None, :] >= b_low[:, None])
        o_slot = wrapped(at % RING, o_n, RING) if RING > 0 else o_key
        b_k = _block(p_k, o_slot, m_key, o_d, S_K, D, True)
        b_v = _block(p_v, o_slot, m_key, o_d, S_V, D, True)
        b_acc, b_max, b_sum = _step(b_q, b_k, b_v, m_seen, b_acc, b_max, b_sum, scale2, b_ones, True, CAP)
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
    s_qb,
    s_qn,
    s_qh,
    s_kb,
    s_kh,
    s_vb,
    s_vh,
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
            b_q,
            p_k,
            p_v,
            start,
            stop,
            least,
            b_last,
            b_low,
            o_n,
            o_d,
            b_acc,
            b_max,
            b_sum,
            scale2,
            b_ones,
            S_K,
            S_V,
            D,
            SPAN,
            RING,
            CAP,
            STAGES,
        )
        b_total, b_most, b_weights = _added(b_total, b_most, b_weights, b_acc, b_max, tl.max(b_sum, 1))
    o_head = i_head * GROUP + o_m % GROUP
    b_out = _finished(b_total, b_most, b_weights, p_sinks, o_head, m_m)
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
    s_qb,
    s_qn,
    s_qh,
    s_kb,
    s_kh,
    s_vb,
    s_vh,
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
    b_k = _block(p_k, o_slot, m_old, o_d, S_K, D, True)
    b_v = _block(p_v, o_slot, m_old, o_d, S_V, D, True)
    wait_for_previous(PDL)
    o_q = o_node.to(tl.int64) * s_qn + (i_head * GROUP + o_m % GROUP).to(tl.int64) * s_qh
    b_q = tl.load(
        p_q + i_row.to(tl.int64) * s_qb + o_q[:, None] + o_d[None, :], mask=m_m[:, None] & m_d[None, :], other=0.0
    )
    b_ones = tl.full([BLOCK_N, 16], 1.0, b_q.dtype)
    if stop > prefix:
        b_k = _block(p_k, o_slot, (o_key >= low) & (o_key < stop), o_d, S_K, D, True)
        b_v = _block(p_v, o_slot, (o_key >= low) & (o_key < stop), o_d, S_V, D, True)
    m_seen = (o_key < stop)[None, :] & (o_key[None, :] <= b_last[:, None])
    if SPAN > 0:
        m_seen = m_seen & (o_key[None, :] >= b_low[:, None])
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    b_max = tl.full([BLOCK_M], EMPTY, tl.float32)
    b_sum = tl.zeros([BLOCK_M, 16], tl.float32)
    b_acc, b_max, b_sum = _step(b_q, b_k, b_v, m_seen, b_acc, b_max, b_sum, scale2, b_ones, True, CAP)
    b_acc, b_max, b_sum = _along(
        b_q,
        p_k,
        p_v,
        start + BLOCK_N,
        stop,
        least,
        b_last,
        b_low,
        o_n,
        o_d,
        b_acc,
        b_max,
        b_sum,
        scale2,
        b_ones,
        S_K,
        S_V,
        D,
        SPAN,
        RING,
        CAP,
        STAGES,
    )
    rows = nodes * GROUP
    o_part = tl.cast(i_pair * runs + run, tl.int64) * rows
    tl.store(p_part + (o_part + o_m)[:, None] * D + o_d[None, :], b_acc, mask=m_m[:, None] & m_d[None, :])
    tl.store(p_state + 2 * o_part + o_m, b_max, mask=m_m)
    tl.store(p_state + 2 * o_part + rows + o_m, tl.max(b_sum, 1), mask=m_m)


@triton.jit(do_not_specialize=["nodes", "extent", "runs", "kv_heads"])
def _join(
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
            b_acc, b_max, b_sum = _added(b_acc, b_max, b_sum, b_acc2, b_max2, b_sum2, None)
    o_head = i_head * GROUP + row % GROUP + o_one
    b_out = _finished(b_acc, b_max, b_sum, p_sinks, o_head, o_head >= 0, None)
    p_out += i_row.to(tl.int64) * s_ob + (node * (kv_heads * GROUP) + i_head * GROUP + row % GROUP).to(tl.int64) * D
    tl.store(p_out + o_d, b_out.to(p_out.dtype.element_ty), mask=o_d < D)


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


@dataclass(frozen=True, slots=True)
class OrderedLayout:
    """A `TreeLayout`, and for the nodes of a tree the slots of the tail that each sees [B, N, tail] and how many these
    are [B, N], int32; None of a chain, where node n sees the first n + 1."""

    tree: TreeLayout
    slots: Tensor | None
    counts: Tensor | None


def attention_layout(
    prefix: Tensor,
    words: Tensor | None,
    nodes: int,
    tail: int,
    extent: int,
    group: int = 1,
    *,
    span: Span | None = None,
    depths: Tensor | None = None,
    ring: int | None = None,
) -> OrderedLayout:
    """`layout.attention_layout` of trees in which parents come before their children: what a node sees of the tail
    stands at the positions after the prefix, in the order of the slots."""
    tree = tree_layout(prefix, words, nodes, tail, extent, group, span=span, depths=depths, ring=ring)
    if tree.chain or words is None or nodes == tail == 1:  # a tree of its root is a chain
        return OrderedLayout(tree, None, None)
    slots = torch.empty((len(prefix), nodes, tail), dtype=torch.int32, device=prefix.device)
    counts = torch.empty((len(prefix), nodes), dtype=torch.int32, device=prefix.device)
    if counts.numel():
        _paths[(nodes, len(prefix))](
            words,
            slots,
            counts,
            tail,
            *words.stride()[:2],
            *slots.stride()[:2],
            counts.stride(0),
            WORDS=words.shape[2],
            num_warps=1,
            **dependent(prefix.device),
        )
    return OrderedLayout(tree, slots, counts)


@lru_cache
def runs_of(extent: int, fine: bool) -> int:
    """Number of runs that begin in so many positions."""
    each, size, last = (8, 8, extent - 1) if fine else (4, 9, extent - 1)
    if last < 2048:
        return (last >> (size - 1)) + 1
    octave = last.bit_length() - 12
    return each * (1 + octave) + (last >> (octave + size)) + 1


@dataclass(frozen=True, slots=True)
class OrderedLaunch:
    """Launch of `_runs`, `_tail` or `_chain`: rows and slots of a block, warps, pipeline stages."""

    block_m: int
    block_n: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class OrderedLaunches:
    """The launches of a tree's `_runs` and `_tail`, and of `_chain`."""

    runs: OrderedLaunch
    tail: OrderedLaunch
    chain: OrderedLaunch


def launches_for(
    element: int, block_d: int, rows: int, reach: int, whole: bool, pairs: int, fine: bool, hopper: bool
) -> OrderedLaunches:
    """The launches of so many rows of each of the pairs: found on an H100 over keys that were not in the L2."""
    few = rows <= 16
    if block_d > 128 or element == 4:
        block = 32 if block_d <= 256 else 16
        small, tall = OrderedLaunch(16, block, 4, 2), OrderedLaunch(32, block, 4, 2)
        return OrderedLaunches(small if few else tall, OrderedLaunch(16, 16, 2, 2), small if few else tall)
    long = reach >= LONG
    if few:
        crowded = not long and pairs * runs_of(reach, fine) > MULTIPROCESSORS
        runs = OrderedLaunch(16, 128, 4, 2 if crowded else 3)
        chain = OrderedLaunch(16, 64 if crowded else 128, 4, 2)
    else:
        runs = OrderedLaunch(128, 64, 8, 3) if long else OrderedLaunch(64, 32, 4, 3)
        chain = OrderedLaunch(64, 32, 8, 3)
        if rows > LONG_CHAIN:
            chain = OrderedLaunch(128, 64 if hopper else 32, 8, 3)  # wider blocks take more registers than there are
    tail = OrderedLaunch(16, 64 if whole else 16, 1 if pairs * rows > MANY and not whole else 4, 2)
    return OrderedLaunches(runs, tail, chain)


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: OrderedLayout,
    scale: float,
    *,
    sinks: Tensor | None = None,
    cap: float | None = None,
    launches: OrderedLaunches | None = None,
    short: int | None = None,
    fold: bool | None = None,
) -> Tensor:
    """`tree.tree_attention`, in the order that this module's docstring gives. `launches`, `short` and `fold` override
    how the work is cut, which changes no bit."""
    tree = layout.tree
    batch, nodes, heads, size = q.shape
    kv_heads, capacity = k.shape[1], k.shape[2]
    group, rows, pairs = tree.group, nodes * tree.group, batch * kv_heads
    block_d = max(16, triton.next_power_of_2(size))
    extent = tree.extent if tree.ring else min(tree.extent, capacity)
    fine = kv_heads <= FEW_HEADS
    out = q.new_empty(q.shape)
    if out.numel() == 0:
        return out
    span = tree.span
    scale2, cap2 = (scale * LOG2E, 0.0) if cap is None else (scale / cap, cap * LOG2E)
    grain = 64 if q.dtype == torch.float16 else 16
    reach = tree.reach(extent)
    whole = reach <= SHORT and reach * nodes * pairs <= CROWDED if short is None else reach <= short
    made = launches or launches_for(q.element_size(), block_d, rows, reach, whole, pairs, fine, is_hopper(q.device))
    about = {
        "S_K": k.stride(2),
        "S_V": v.stride(2),
        "GROUP": group,
        "D": size,
        "BLOCK_D": block_d,
        "FINE": fine,
        "SPAN": span.size if span else 0,
        "CHUNK": span is not None and span.chunk,
        "RING": tree.ring,
        "CAP": cap2,
        **dependent(q.device),
    }
    strides = (*q.stride()[:3], *k.stride()[:2], *v.stride()[:2])

    def of(launch: OrderedLaunch) -> dict[str, int]:
        block_n = 64 if q.dtype == torch.float16 else launch.block_n
        stages = stages_within(
            launch.stages,
            2 * block_n * block_d * k.element_size(),
            q.device,
            2 * launch.block_m * block_d * q.element_size(),
        )
        return {"BLOCK_N": block_n, "STAGES": stages, "num_stages": stages, "num_warps": launch.warps}

    runs = runs_of(extent, fine)
    part, state = out, out
    counts, slots = layout.counts, layout.slots
    if slots is None:
        launch = made.chain
        tiles = triton.cdiv(rows, launch.block_m)
        cut = {"BLOCK_M": launch.block_m, **of(launch), **about}
        ends = out.stride(0), tree.prefix.stride(0)
        if rows > LONG_CHAIN:
            _chain[(tiles, pairs)](
                q, k, v, out, tree.prefix, sinks, scale2, nodes, extent, kv_heads, *strides, *ends, **cut
            )
            return out
        part = q.new_empty((pairs, runs, rows, size), dtype=torch.float32)
        state = q.new_empty((pairs, runs, 2, rows), dtype=torch.float32)
        _few[(tiles, pairs, runs)](
            q, k, v, part, state, tree.prefix, scale2, nodes, extent, runs, kv_heads, *strides, ends[1], **cut
        )
        shared = {name: about[name] for name in ("GROUP", "D", "BLOCK_D", "FINE", "SPAN", "CHUNK")}
        _join[(rows, pairs)](
            part,
            state,
            out,
            tree.prefix,
            sinks,
            nodes,
            extent,
            runs,
            kv_heads,
            *ends,
            EACH=8 if runs <= 8 else 16 if runs <= 16 else JOINED,
            EARLY=batch * nodes == 1 and heads * size <= NARROW,
            num_warps=max(1, block_d // 32),
            **shared,
            **dependent(q.device),
        )
        return out
    assert counts is not None  # as slots are there
    hopper = tree.span is None and sinks is None and cap is None and ordered_hopper.fits(q, k, v, rows, extent)
    tiles = triton.cdiv(rows, made.runs.block_m)
    fold = pairs * rows >= FOLDED if fold is None else fold
    if not whole:
        parts = 2 if fold else runs
        part = q.new_empty((pairs, parts, rows, size), dtype=torch.float32)
        state = q.new_empty((pairs, parts, 2, rows), dtype=torch.float32)
    if not whole and hopper:
        ordered_hopper.launch(q, k, v, part, state, tree.prefix, extent, runs, scale2, grain, fine, fold)
    elif not whole:
        launch = made.runs
        _runs[(tiles, pairs, 1 if fold else runs)](
            q,
            k,
            v,
            part,
            state,
            tree.prefix,
            counts,
            scale2,
            nodes,
            extent,
            runs,
            kv_heads,
            *strides,
            tree.prefix.stride(0),
            BLOCK_M=launch.block_m,
            GRAIN=grain,
            FOLD=fold,
            **of(launch),
            **about,
        )
    launch = made.tail
    _tail[(nodes, pairs)](
        q,
        k,
        v,
        out,
        part,
        state,
        tree.prefix,
        slots,
        counts,
        sinks,
        scale2,
        nodes,
        extent,
        runs,
        kv_heads,
        *strides,
        out.stride(0),
        tree.prefix.stride(0),
        *slots.stride()[:2],
        counts.stride(0),
        BLOCK_M=max(8, triton.next_power_of_2(group)),
        GRAIN=grain,
        EACH=1 if fold else EACH * launch.warps // 4,
        WHOLE=whole,
        FOLD=fold,
        **of(launch),
        **about,
    )
    return out
