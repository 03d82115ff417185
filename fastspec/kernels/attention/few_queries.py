"""Tree attention of a few queries over a KV cache, plain decoding above all: flash decoding in which each program reads
little.

B rows (sequences), N query nodes per row, Hq query heads, Hkv key heads, G = Hq / Hkv, D head size, C cache slots. A
pair is one key head of one row; its N * G queries, 16 at most, are the rows of a matrix. Up to S programs share the
slots of a pair, in blocks of BLOCK_N; how many blocks a program takes follows the lengths, which are read on the
device, and the span (a window or chunks), before which it reads nothing. What matters is how long one program takes
from its first load to its last store, so all go through one loop, a program without a share too, and the parts are
summed by a launch of its own.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.attention.launches import FEW
from fastspec.kernels.attention.layout import TreeLayout
from fastspec.kernels.attention.parts import (
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

MAX_ROWS = 16
LONG = 8192  # slots from which programs take wider blocks
INTERPRETED_PROCESSORS = 16  # what the interpreter on the CPU pretends to have


@triton.jit(do_not_specialize=["nodes", "tail", "extent", "splits", "kv_heads", "s_wb", "s_wn", "s_d"])
def _few_kernel(
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
    CHAIN: tl.constexpr,
    SPLIT: tl.constexpr,
    SPAN: tl.constexpr,
    CHUNK: tl.constexpr,
    RING: tl.constexpr,
    CAP: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    s_qb, s_qn, s_qh, s_kb, s_kh, s_vb, s_vh = strides
    wait_for_previous(PDL)
    i_split, i_pair = tl.program_id(0), tl.program_id(1)
    i_row, i_head = i_pair // kv_heads, i_pair % kv_heads
    rows = nodes * GROUP
    prefix = tl.minimum(tl.load(p_prefix + i_row.to(tl.int64) * s_p), extent).to(tl.int32)
    o_m, o_n, o_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    m_m, m_d = o_m < rows, o_d < D
    o_node = o_m // GROUP
    o_q = o_node.to(tl.int64) * s_qn + (i_head * GROUP + o_m % GROUP).to(tl.int64) * s_qh
    b_q = tl.load(
        p_q + i_row.to(tl.int64) * s_qb + o_q[:, None] + o_d[None, :], mask=m_m[:, None] & m_d[None, :], other=0.0
    )
    p_k += i_row.to(tl.int64) * s_kb + i_head.to(tl.int64) * s_kh
    p_v += i_row.to(tl.int64) * s_vb + i_head.to(tl.int64) * s_vh

    b_word = tl.zeros([BLOCK_M], tl.int64)
    if CHAIN:
        tail = tl.minimum(tail, nodes)  # nothing behind the last node is seen
    else:
        b_word = tl.load(p_words + i_row.to(tl.int64) * s_wb + o_node.to(tl.int64) * s_wn, mask=m_m, other=0)
    end = tl.minimum(prefix + tail, extent)
    blocks = (end + BLOCK_N - 1) // BLOCK_N
    if SPAN > 0:
        if p_depths is not None:
            p_depths += i_row.to(tl.int64) * s_d
        b_low = first_seen(depths_of(p_depths, o_node, m_m), prefix, SPAN, CHUNK)
        low, _ = seen_prefix(b_low, m_m, prefix)
        share = (blocks - low // BLOCK_N + splits - 1) // splits
        first = low // BLOCK_N + i_split * share
    else:
        share = (blocks + splits - 1) // splits
        first = i_split * share
    # Within a block 32 bits do, and strides known to the compiler become immediates.
    o_k = o_n[:, None] * S_K + o_d[None, :]
    o_v = o_n[:, None] * S_V + o_d[None, :]
    b_acc, b_max, b_sum = empty_sums(p_sinks, i_head * GROUP + o_m % GROUP, BLOCK_M, BLOCK_D)
    for block in tl.range(first, tl.minimum(first + share, blocks), num_stages=STAGES):
        start = block * BLOCK_N
        o_slot = start + o_n
        # Slots that nobody sees may hold anything: 0 * nan is nan, so they are not loaded.
        m_slot = o_slot < end
        if SPAN > 0:
            m_slot = m_slot & (o_slot >= low)
        m_kv = m_slot[:, None] & m_d[None, :]
        if RING > 0:
            start = start % RING
        if RING % BLOCK_N == 0:  # without a ring too
            b_k = tl.load(p_k + start.to(tl.int64) * S_K + o_k, mask=m_kv, other=0.0)
            b_v = tl.load(p_v + start.to(tl.int64) * S_V + o_v, mask=m_kv, other=0.0)
        else:
            o_ring = wrapped(start, o_n, RING)[:, None]
            b_k = tl.load(p_k + o_ring * S_K + o_d[None, :], mask=m_kv, other=0.0)
            b_v = tl.load(p_v + o_ring * S_V + o_d[None, :], mask=m_kv, other=0.0)
        o_rel = o_slot - prefix
        if CHAIN:
            m_tail = o_rel[None, :] <= o_node[:, None]
        else:
            m_tail = (o_rel < 0)[None, :] | (((b_word[:, None] >> (o_rel & 63)[None, :]) & 1) == 1)
        m_seen = m_slot[None, :] & m_tail
        if SPAN > 0:
            b_key = tl.where(o_rel < 0, o_rel, depths_of(p_depths, o_rel, m_slot & (o_rel >= 0)))
            m_seen = m_seen & (b_key[None, :] >= b_low[:, None])
        b_acc, b_max, b_sum = update(b_q, b_k, b_v, m_seen, b_acc, b_max, b_sum, scale2, True, CAP)

    b_total = tl.where(
        b_sum > 0.0, b_sum, 1.0
    )  # nothing seen: the sum is zero and stays so, its logarithm -inf through the maximum
    b_acc = b_acc / b_total[:, None]
    m_md = m_m[:, None] & m_d[None, :]
    if SPLIT:
        o_part = (i_pair.to(tl.int64) * rows + o_m) * splits + i_split
        tl.store(p_part + o_part[:, None] * D + o_d[None, :], b_acc, mask=m_md)
        tl.store(p_lse + o_part, b_max + tl.log2(b_total), mask=m_m)
    else:
        o_head = i_head * GROUP + o_m % GROUP
        o_out = i_row.to(tl.int64) * s_ob + (o_node.to(tl.int64) * (kv_heads * GROUP) + o_head) * D
        tl.store(p_out + o_out[:, None] + o_d[None, :], b_acc.to(p_out.dtype.element_ty), mask=m_md)


def few_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    layout: TreeLayout,
    extent: int,
    scale: float,
    sinks: Tensor | None,
    cap: float | None,
) -> None:
    """Fill out [B, N, Hq, D], contiguous, with what `tree_attention` says of the other arguments, and has checked.

    N * Hq / Hkv is at most MAX_ROWS, and the layout a chain or of at most 64 tail slots. Slots from `extent` on are not
    read.
    """
    batch, nodes, heads, size = q.shape
    kv_heads = k.shape[1]
    pairs, block_d = batch * kv_heads, max(16, triton.next_power_of_2(size))
    reach = layout.reach(extent)
    launch = FEW[q.element_size(), max(64, block_d)][reach >= LONG]
    if layout.span is None and sinks is None and cap is None:
        place = q.dtype, size, heads // kv_heads, nodes, triton.next_power_of_2(extent)
        about = batch, nodes, heads, kv_heads, size, extent, layout.chain, q.dtype
        launch = find("few_attention", q.device, place, about, launch)
    blocks = triton.cdiv(reach, launch.block_n) + (reach < extent)  # a span begins within a block
    splits = _splits(pairs, blocks, processors(q.device) * launch.resident)
    part, lse = part_buffers(out, kv_heads, splits)
    stages = stages_within(launch.stages, 2 * launch.block_n * block_d * k.element_size(), q.device)
    arguments, constants = launch_arguments(q, k, v, out, part, lse, layout, extent, splits, scale, sinks, cap)
    _few_kernel[(splits, pairs)](
        *arguments,
        **constants,
        BLOCK_M=MAX_ROWS,
        BLOCK_N=launch.block_n,
        BLOCK_D=block_d,
        STAGES=stages,
        num_warps=launch.warps,
        num_stages=stages,
        **dependent(q.device),
    )
    if splits > 1:
        merge(part, lse, out, kv_heads, sinks)


def _splits(pairs: int, blocks: int, slots: int) -> int:
    """Number of programs that share a pair's blocks: as many as the chip holds at once, one where there are but two
    blocks."""
    return max(1, min(MAX_SPLITS, slots // pairs, blocks)) if blocks > 2 else 1


@lru_cache
def processors(device: torch.device) -> int:
    """Number of a device's multiprocessors."""
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else INTERPRETED_PROCESSORS
    )
