"""Tree attention over a KV cache: a prefix that every node sees, and a tail seen by ancestor bits. Flash decoding in
Triton.

B rows (sequences), N query nodes per row, Hq query heads, Hkv key heads, G = Hq / Hkv, D head size, C cache slots, M
tail slots, W 64-bit words. A pair is one key head of one row; its N * G queries are the rows of a matrix, row n * G +
g, cut into tiles of BLOCK_M. A tile's slots are cut into blocks of BLOCK_N that are aligned to the end of the prefix,
so that a tail block starts at a multiple of 16 or 32 bits: first the full blocks of the prefix (no mask), then the rest
at its start and the tail (masked). To a tile of a chain the tail's slots before its first node are prefix too, since
all of its rows see them. Up to S programs share the blocks of one tile and leave parts for parts.py to merge. All
lengths are read on the device: the shares follow them. With a span (a window or chunks) the prefix begins for a tile
where one of its queries begins to see, and its blocks are masked until all do; positions are counted from the prefix's
end, where a node stands at its depth. Few queries, plain decoding above all, have a kernel of their own,
few_queries.py, and so have trees behind a long prefix on Hopper, hopper.py, which knows no spans, sinks and caps: these
are computed here.
"""

from __future__ import annotations

import math
from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.arguments import CONTIGUOUS, FLOATS, PACKED, expect
from fastspec.kernels.attention import hopper
from fastspec.kernels.attention.few_queries import MAX_ROWS, few_attention, processors
from fastspec.kernels.attention.launches import TreeLaunch, tree_launch_for
from fastspec.kernels.attention.layout import TreeLayout
from fastspec.kernels.attention.parts import (
    LOG2E,
    MAX_SPLITS,
    depths_of,
    empty_sums,
    first_seen,
    launch_arguments,
    merge,
    part_buffers,
    seen_prefix,
    update,
    wrapped,
)
from fastspec.kernels.launch import dependent, stages_within, wait_for_previous
from fastspec.kernels.tuned_launches import find

MERGE_COST = 4  # what a merge takes, in the time of a block
PARTIAL_COST = 2  # what it takes to leave a part, likewise
MAX_SHARE = 16384  # slots: rows of a batch differ in length, and the longest should not finish alone
# slots: the rows of a batch fill half of a shorter buffer, on average; longer ones are made where half is not enough
HALF_FULL = 2048

_VARYING = [
    "nodes",
    "tail",
    "extent",
    "splits",
    "kv_heads",
]  # from launch to launch: one compiled kernel takes them all


@triton.jit
def _bounds(
    p_prefix,
    s_p,
    i_row,
    i_tile,
    nodes,
    tail,
    extent,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHAIN: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The slots that all rows of the tile see, the slots behind them that some may see, the number of blocks of both,
    and how many of the tail's slots are among the former: of a chain, unless a WHOLE prefix is asked for, those before
    the tile's first node."""
    prefix = tl.minimum(tl.load(p_prefix + i_row.to(tl.int64) * s_p), extent).to(tl.int32)
    width, passed = tl.minimum(tail, extent - prefix), 0
    if CHAIN:  # nothing behind the tile's last node is seen
        width = tl.minimum(width, (tl.minimum((i_tile + 1) * BLOCK_M, nodes * GROUP) - 1) // GROUP + 1)
        if not WHOLE:
            passed = tl.minimum(i_tile * BLOCK_M // GROUP, width)
    prefix, width = prefix + passed, width - passed
    return prefix, width, (prefix + BLOCK_N - 1) // BLOCK_N + (width + BLOCK_N - 1) // BLOCK_N, passed


@triton.jit
def _active(blocks, splits, MIN_BLOCKS: tl.constexpr):
    """Number of splits that have a share."""
    return tl.maximum(tl.minimum((blocks + MIN_BLOCKS - 1) // MIN_BLOCKS, splits), 1)


@triton.jit(do_not_specialize=[*_VARYING, "s_wb", "s_wn", "s_d"])
def _attention_kernel(
    p_q,
    p_k,
    p_v,
    p_out,
    p_part,
    p_lse,
    p_prefix,
    p_words,
    p_depths,
    p_sinks,
    scale2,
    nodes,
    tail,
    extent,
    splits,
    kv_heads,
    strides,
    s_ob,
    s_p,
    s_wb,
    s_wn,
    s_d,
    S_K: tl.constexpr,
    S_V: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    CHAIN: tl.constexpr,
    SPLIT: tl.constexpr,
    SPAN: tl.constexpr,
    CHUNK: tl.constexpr,
    RING: tl.constexpr,
    CAP: tl.constexpr,
    TAIL_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    s_qb, s_qn, s_qh, s_kb, s_kh, s_vb, s_vh = strides
    wait_for_previous(PDL)
    # Tiles of one share are neighbours: they read the same keys at the same time, once from memory and then from L2.
    i_tile, i_split, i_pair = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if CHAIN:  # the tiles that have the most to do first, so that no processor begins with one of them at the end
        i_tile = tl.num_programs(0) - 1 - i_tile
    i_row, i_head = i_pair // kv_heads, i_pair % kv_heads
    rows = nodes * GROUP
    prefix, width, blocks, seen = _bounds(
        p_prefix, s_p, i_row, i_tile, nodes, tail, extent, GROUP, BLOCK_M, BLOCK_N, CHAIN, SPAN > 0
    )
    o_m = i_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    m_m = o_m < rows
    if SPAN > 0:
        if p_depths is not None:
            p_depths += i_row.to(tl.int64) * s_d
        b_low = first_seen(depths_of(p_depths, o_m // GROUP, m_m), prefix, SPAN, CHUNK)
        low, high = seen_prefix(b_low, m_m, prefix)
        full = (prefix - high) // BLOCK_N
        rest = prefix - full * BLOCK_N
        ragged = (rest - low + BLOCK_N - 1) // BLOCK_N  # blocks that not all see whole
        passed = 0  # tail blocks before what is seen
        if CHAIN and p_depths is None:
            passed = tl.maximum(tl.min(tl.where(m_m, b_low, nodes), 0), 0) // BLOCK_N
        blocks = full + ragged + (width + BLOCK_N - 1) // BLOCK_N - passed
    active = _active(blocks, splits, MIN_BLOCKS)
    if SPLIT:
        o_part = (i_pair.to(tl.int64) * rows + o_m) * splits + i_split
        if i_split >= active:
            tl.store(p_lse + o_part, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=m_m)
            return
    first, last = blocks * i_split // active, blocks * (i_split + 1) // active
    if SPAN == 0:
        low = 0
        full, rest = prefix // BLOCK_N, prefix % BLOCK_N
        ragged = (rest + BLOCK_N - 1) // BLOCK_N  # 1 if the prefix starts with less than a block
    end = prefix + width

    o_n, o_d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    m_d = o_d < D
    o_node = o_m // GROUP
    o_q = o_node.to(tl.int64) * s_qn + (i_head * GROUP + o_m % GROUP).to(tl.int64) * s_qh
    b_q = tl.load(
        p_q + i_row.to(tl.int64) * s_qb + o_q[:, None] + o_d[None, :], mask=m_m[:, None] & m_d[None, :], other=0.0
    )
    p_k += i_row.to(tl.int64) * s_kb + i_head.to(tl.int64) * s_kh
    p_v += i_row.to(tl.int64) * s_vb + i_head.to(tl.int64) * s_vh
    # Within a block 32 bits do, and strides known to the compiler become immediates: pointers in 64 bits would spill.
    o_k = o_n[:, None] * S_K + o_d[None, :]
    o_v = o_n[:, None] * S_V + o_d[None, :]
    b_acc, b_max, b_sum = empty_sums(p_sinks, i_head * GROUP + o_m % GROUP, BLOCK_M, BLOCK_D)

    for block in range(first, tl.minimum(last, full)):
        start = (rest + block * BLOCK_N).to(tl.int64)
        if RING > 0:
            o_ring = wrapped((start % RING).to(tl.int32), o_n, RING)[:, None]
            b_k = tl.load(p_k + o_ring * S_K + o_d[None, :], mask=m_d[None, :], other=0.0)
            b_v = tl.load(p_v + o_ring * S_V + o_d[None, :], mask=m_d[None, :], other=0.0)
        elif D == BLOCK_D:
            b_k = tl.load(p_k + start * S_K + o_k)
            b_v = tl.load(p_v + start * S_V + o_v)
        else:
            b_k = tl.load(p_k + start * S_K + o_k, mask=m_d[None, :], other=0.0)
            b_v = tl.load(p_v + start * S_V + o_v, mask=m_d[None, :], other=0.0)
        b_acc, b_max, b_sum = update(b_q, b_k, b_v, m_m, b_acc, b_max, b_sum, scale2, False, CAP)

    # A stage less: the ancestor bits take shared memory too, and two programs should fit a processor.
    for block in tl.range(tl.maximum(first, full), last, num_stages=TAIL_STAGES):
        turn = block - full - ragged  # -1: the start of the prefix; then the tail
        if SPAN > 0:
            start = tl.where(turn < 0, rest + turn * BLOCK_N, prefix + (turn + passed) * BLOCK_N)
        else:
            start = tl.where(turn < 0, rest - BLOCK_N, prefix + turn * BLOCK_N)
        o_slot = start + o_n
        # Slots that nobody sees may hold anything: 0 * nan is nan, so they are not loaded.
        m_kv = ((o_slot >= low) & (o_slot < end))[:, None] & m_d[None, :]
        if RING > 0:
            o_ring = wrapped((start + RING) % RING, o_n, RING)[:, None]  # a masked block may begin in front of the text
            b_k = tl.load(p_k + o_ring * S_K + o_d[None, :], mask=m_kv, other=0.0)
            b_v = tl.load(p_v + o_ring * S_V + o_d[None, :], mask=m_kv, other=0.0)
        else:
            b_k = tl.load(p_k + start.to(tl.int64) * S_K + o_k, mask=m_kv, other=0.0)
            b_v = tl.load(p_v + start.to(tl.int64) * S_V + o_v, mask=m_kv, other=0.0)
        o_rel = o_slot - prefix
        if CHAIN:
            m_tail = o_rel[None, :] + seen <= o_node[:, None]
        else:
            b_bits = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
            for half in tl.static_range((BLOCK_N + 31) // 32):
                o_bit = start - prefix + half * 32
                word = (
                    tl.maximum(tl.minimum(o_bit, width - 1), 0) >> 6
                )  # outside the tail any word will do: other masks decide
                b_word = tl.load(
                    p_words + i_row.to(tl.int64) * s_wb + o_node.to(tl.int64) * s_wn + word, mask=m_m, other=0
                )
                b_half = (b_word >> (o_bit & 63).to(tl.int64)).to(tl.int32)
                b_bits = tl.where((o_n // 32 == half)[None, :], b_half[:, None], b_bits)
            m_tail = ((b_bits >> (o_n % 32)[None, :]) & 1) == 1
        m_seen = ((o_slot >= low) & (o_slot < end))[None, :] & ((o_rel < 0)[None, :] | m_tail)
        if SPAN > 0:
            b_key = tl.where(o_rel < 0, o_rel, depths_of(p_depths, o_rel, (o_rel >= 0) & (o_slot < end)))
            m_seen = m_seen & (b_key[None, :] >= b_low[:, None])
        b_acc, b_max, b_sum = update(b_q, b_k, b_v, m_seen, b_acc, b_max, b_sum, scale2, True, CAP)

    b_total = tl.where(
        b_sum > 0.0, b_sum, 1.0
    )  # nothing seen: the sum is zero and stays so, its logarithm -inf through the maximum
    b_acc = b_acc / b_total[:, None]
    m_md = m_m[:, None] & m_d[None, :]
    if SPLIT:
        tl.store(p_part + o_part[:, None] * D + o_d[None, :], b_acc, mask=m_md)
        tl.store(p_lse + o_part, b_max + tl.log2(b_total), mask=m_m)
    else:
        o_head = i_head * GROUP + o_m % GROUP
        o_out = i_row.to(tl.int64) * s_ob + (o_node.to(tl.int64) * (kv_heads * GROUP) + o_head) * D
        tl.store(p_out + o_out[:, None] + o_d[None, :], b_acc.to(p_out.dtype.element_ty), mask=m_md)


_HOPPER = TreeLaunch(hopper.TILE, hopper.BLOCK_N, warps=9, stages=hopper.STAGES, resident=1, least=hopper.MIN_BLOCKS)


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: TreeLayout,
    scale: float,
    *,
    sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """The reference's attention, contiguous: products accumulate in fp32, and the weights are rounded to the dtype
    before they meet the values.

    q, k, v are of one dtype (fp32, fp16, bf16) and contiguous in their last dimension, strided otherwise; sinks are of
    these dtypes and contiguous. D is 1 to 512, the scale and the cap are positive. A row that sees nothing is zero.
    Raises ValueError for what it does not accept.
    """
    _check(q, k, v, layout, scale, sinks, cap)
    batch, nodes, _, size = q.shape
    kv_heads, capacity = k.shape[1], k.shape[2]
    group, rows, pairs = layout.group, nodes * layout.group, batch * kv_heads
    block_d = max(16, triton.next_power_of_2(size))
    extent = layout.extent if layout.ring else min(layout.extent, capacity)
    out = q.new_empty(q.shape)
    if out.numel() == 0:
        return out
    chain, span = layout.chain, layout.span
    if rows <= MAX_ROWS and (chain or layout.tail <= 64):
        few_attention(q, k, v, out, layout, extent, scale, sinks, cap)
        return out
    on_hopper = span is None and sinks is None and cap is None and hopper.fits(q, k, v, rows, extent)
    reach, slots = layout.reach(extent), processors(q.device)
    launch = _HOPPER if on_hopper else tree_launch_for(q.element_size(), block_d, rows, pairs, slots, reach)
    if not on_hopper and span is None and sinks is None and cap is None:
        place = q.dtype, size, group, triton.next_power_of_2(rows), triton.next_power_of_2(extent)
        about = batch, nodes, q.shape[2], kv_heads, size, extent, chain, q.dtype
        launch = find("tree_attention", q.device, place, about, launch)
    tiles = triton.cdiv(rows, launch.block_m)
    # the prefix and the tail begin a block each
    held = triton.cdiv(extent, launch.block_n) + 1
    blocks = triton.cdiv(reach, launch.block_n) + 1
    least = triton.cdiv(reach, MAX_SHARE) if batch > 1 else 1
    expected = min(blocks, held // 2 if batch > 1 and extent < HALF_FULL else held)
    splits = _splits(pairs * tiles, blocks, expected, slots * launch.resident, least, launch.least)
    part, lse = part_buffers(out, kv_heads, splits)
    if on_hopper:
        tree = None if chain else layout.words
        hopper.launch(q, k, v, out, part, lse, layout.prefix, tree, layout.tail, extent, splits, scale * LOG2E)
    else:
        # the queries, and the weights of a block on their way to the second product
        tile = launch.block_m * block_d * q.element_size()
        stages = stages_within(launch.stages, 2 * launch.block_n * block_d * k.element_size(), q.device, fixed=2 * tile)
        arguments, constants = launch_arguments(q, k, v, out, part, lse, layout, extent, splits, scale, sinks, cap)
        _attention_kernel[(tiles, splits, pairs)](
            *arguments,
            **constants,
            BLOCK_M=launch.block_m,
            BLOCK_N=launch.block_n,
            BLOCK_D=block_d,
            MIN_BLOCKS=launch.least,
            TAIL_STAGES=max(min(2, stages), stages - 1),
            num_warps=launch.warps,
            num_stages=stages,
            **dependent(q.device),
        )
    if splits > 1:
        merge(part, lse, out, kv_heads, sinks)
    return out


def _check(
    q: Tensor, k: Tensor, v: Tensor, layout: TreeLayout, scale: float, sinks: Tensor | None, cap: float | None
) -> None:
    batch = len(layout.prefix)
    expect("tree_attention", (batch, "Hkv", "C", "D"), FLOATS, PACKED, k=k)
    heads, size = k.shape[1] * layout.group, k.shape[3]
    expect("tree_attention", k.shape, k.dtype, PACKED, v=v)
    expect("tree_attention", (batch, layout.nodes, heads, size), k.dtype, PACKED, q=q)
    expect("tree_attention", (heads,), FLOATS, CONTIGUOUS, sinks=sinks)
    if size > 512 or not scale > 0 or not 0 < (1 if cap is None else cap) < math.inf:
        raise ValueError(
            f"the head size is {size}, the scale is {scale}, the cap is {cap}; accepted are a size of at most 512, a "
            "positive scale, and a cap that is positive and finite, or None"
        )


@lru_cache(maxsize=4096)
def _splits(tiles: int, blocks: int, expected: int, slots: int, least: int, share_least: int) -> int:
    """Number of programs that share a tile's blocks, of which so many are expected to be there: the cheapest by waves
    of programs over the chip's slots, with the merge counted."""
    most = min(MAX_SPLITS, max(1, blocks // share_least))

    def cost(splits: int) -> float:
        waves = triton.cdiv(tiles * splits, slots)
        share = max(triton.cdiv(expected, splits), min(share_least, expected))
        return float(waves * (share + PARTIAL_COST) + MERGE_COST + splits / 16 if splits > 1 else waves * share)

    return min(range(min(least, most), most + 1), key=cost)
