"""Common parts of the attention kernels: a block of the online softmax, what a span leaves of the slots, and the sum of
the parts that programs left of one query's attention.

A pair is one key head of one row of the batch; R matrix rows (nodes times G query heads of the key head), S parts, D
head size, Hkv key heads. Parts are normed sums [pair, R, S, D] in fp32 with their log-sum-exp [pair, R, S] (base 2):
-inf where nothing was seen, and then the part may hold anything.

Split attention with a merge by log-sum-exp: Dao et al., Flash-Decoding (2023); the online softmax: Milakov and
Gimelshein (2018).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.attention.layout import TreeLayout
from fastspec.kernels.launch import dependent, wait_for_previous

LOG2E = 1.4426950408889634
MAX_SPLITS = 64  # parts that a merge holds at once

GRID = tl.constexpr(768.0)  # 1.5 * 2**9: what is added to it is rounded to a multiple of 2**-14
EMPTY = tl.constexpr(-4194304.0)  # below every maximum; with GRID it is exact in fp32
_LOG2E = tl.constexpr(LOG2E)
_FAR = tl.constexpr(2**30)  # beyond every position


@triton.jit
def run_of(position, FINE: tl.constexpr):
    """The run that a position is in; FINE runs are half as long."""
    EACH: tl.constexpr = 8 if FINE else 4  # runs from 2,048 to 4,096, and from there to 8,192
    SIZE: tl.constexpr = 8 if FINE else 9  # log2 of theirs; half of it before, twice as long after
    later = tl.where(position < 4096, EACH + (position >> SIZE), 2 * EACH + (position >> SIZE + 1))
    return tl.where(position < 2048, position >> SIZE - 1, later)


@triton.jit
def run_start(run, FINE: tl.constexpr):
    """The first position of a run."""
    EACH: tl.constexpr = 8 if FINE else 4
    SIZE: tl.constexpr = 8 if FINE else 9
    later = tl.where(run < 3 * EACH, run - EACH << SIZE, run - 2 * EACH << SIZE + 1)
    return tl.where(run < 2 * EACH, run << SIZE - 1, later)


@triton.jit
def share_of(end, share, shares, FINE: tl.constexpr):
    """The first run of a share of a text up to `end`, cut where runs begin into shares of about one length; the first
    has a run at least, and share `shares` none."""
    runs = run_of(tl.maximum(end, 1) - 1, FINE) + (end > 0)
    cut = tl.cast(tl.cast(end, tl.int64) * share // shares, tl.int32)
    run = run_of(cut, FINE)
    run += 2 * cut >= run_start(run, FINE) + run_start(run + 1, FINE)  # the nearest
    run = tl.where(share >= shares, runs, tl.maximum(run, 1))
    return tl.where(share == 0, 0, tl.minimum(run, runs))


@triton.jit
def wrapped(start, o_n, RING: tl.constexpr):
    """The slots of a ring that a block of slots stands in, from `start` on, itself in the ring; a block is no longer
    than the ring."""
    o_slot = start + o_n
    return tl.where(o_slot >= RING, o_slot - RING, o_slot)


@triton.jit
def update(b_q, b_k, b_v, m_seen, b_acc, b_max, b_sum, scale2, MASKED: tl.constexpr, CAP: tl.constexpr):
    """One block of the online softmax; maxima are in units of log2, and so are products times scale2. With a CAP in
    these units products times scale2 are what the tanh is taken of."""
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    if CAP > 0:
        b_s = tanh(b_s * scale2)
        scale2 = CAP
    if MASKED:
        b_s = tl.where(m_seen, b_s, float("-inf"))
    b_new = tl.maximum(b_max, tl.max(b_s, 1) * scale2)
    b_off = b_new
    if MASKED:  # a row that has seen nothing yet: -inf - -inf is not a number
        b_off = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_p = tl.exp2(b_s * scale2 - b_off[:, None])
    b_keep = tl.exp2(b_max - b_off)
    b_sum = b_sum * b_keep + tl.sum(b_p, 1)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_keep[:, None], input_precision="ieee")
    return b_acc, b_new, b_sum


@triton.jit
def tanh(b_x):
    """By exponentials, and near zero, where these cancel, by the first terms of the series, which leave out 1e-8 of
    it."""
    b_abs = tl.abs(b_x)
    b_e = tl.exp2(b_abs * (-2 * _LOG2E))
    b_square = b_abs * b_abs
    b_series = 1.0 + b_square * (-1 / 3 + b_square * (2 / 15 + b_square * (-17 / 315 + b_square * (62 / 2835))))
    b_y = tl.where(b_abs < 0.25, b_abs * b_series, (1.0 - b_e) / (1.0 + b_e))
    return tl.where(b_x < 0, -b_y, b_y)


@triton.jit
def empty_sums(p_sinks, o_head, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """The sums, maxima and sums of weights that a softmax begins with: a sink is a key that is always seen, and whose
    value is zero."""
    b_acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    if p_sinks is None:
        b_max = tl.full([ROWS], float("-inf"), tl.float32)
        b_sum = tl.zeros([ROWS], tl.float32)
    else:
        b_max = tl.load(p_sinks + o_head).to(tl.float32) * _LOG2E
        b_sum = tl.full([ROWS], 1.0, tl.float32)
    return b_acc, b_max, b_sum


@triton.jit
def depths_of(p_depths, o_node, m_node):
    """Depths of nodes; a chain that brings none is numbered by them."""
    return o_node if p_depths is None else tl.load(p_depths + o_node, mask=m_node, other=0).to(tl.int32)


@triton.jit
def first_seen(b_depth, prefix, SPAN: tl.constexpr, CHUNK: tl.constexpr):
    """The first position that queries at these depths see, counted like these from the end of the prefix. The text's
    order cuts what lies behind a query, in its chunk too."""
    return (prefix + b_depth) // SPAN * SPAN - prefix if CHUNK else b_depth - SPAN + 1


@triton.jit
def seen_prefix(b_low, m_m, prefix):
    """The first slot of the prefix that a query sees, and the first that all see; `prefix` where there is none."""
    low = prefix + tl.min(tl.where(m_m, b_low, _FAR), 0)
    high = prefix + tl.max(tl.where(m_m, b_low, -_FAR), 0)
    return tl.maximum(tl.minimum(low, prefix), 0), tl.maximum(tl.minimum(high, prefix), 0)


@triton.jit(do_not_specialize=["splits", "kv_heads"])
def _merge_kernel(
    p_part,
    p_lse,
    p_out,
    p_sinks,
    splits,
    kv_heads,
    s_ob,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    row, i_pair = tl.program_id(0), tl.program_id(1)
    o_s, o_d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    m_s, m_d = o_s < splits, o_d < D
    o_part = (i_pair.to(tl.int64) * tl.num_programs(0) + row) * splits
    b_lse = tl.load(p_lse + o_part + o_s, mask=m_s, other=float("-inf"))
    # All parts are asked for at once, before it is known which of them hold something.
    b_part = tl.load(
        p_part + o_part * D + (o_s[:, None] * D + o_d[None, :]), mask=m_s[:, None] & m_d[None, :], other=0.0
    )
    b_max = tl.max(b_lse, 0)
    if p_sinks is not None:
        b_sink = tl.load(p_sinks + (i_pair % kv_heads) * GROUP + row % GROUP).to(tl.float32) * _LOG2E
        b_max = tl.maximum(b_max, b_sink)
    b_off = tl.where(b_max == float("-inf"), 0.0, b_max)
    b_weight = tl.exp2(b_lse - b_off)
    b_total = tl.sum(b_weight, 0)
    if p_sinks is not None:
        b_total += tl.exp2(b_sink - b_off)
    b_sum = tl.sum(tl.where((b_weight > 0.0)[:, None], b_part * b_weight[:, None], 0.0), 0)
    b_out = b_sum / tl.where(b_total > 0.0, b_total, 1.0)
    o_head = (i_pair % kv_heads) * GROUP + row % GROUP
    o_out = (i_pair // kv_heads).to(tl.int64) * s_ob + ((row // GROUP).to(tl.int64) * (kv_heads * GROUP) + o_head) * D
    tl.store(p_out + o_out + o_d, b_out.to(p_out.dtype.element_ty), mask=m_d)


def scales(scale: float, cap: float | None) -> tuple[float, float]:
    """`update`'s scale2 and CAP; a CAP of zero is none."""
    return (scale * LOG2E, 0.0) if cap is None else (scale / cap, cap * LOG2E)


def part_buffers(out: Tensor, kv_heads: int, splits: int) -> tuple[Tensor, Tensor]:
    """Parts [B * Hkv, R, S, D] and log-sum-exps [B * Hkv, R, S] fp32 of out [B, N, Hq, D]; of one split, which writes
    none, `out` itself."""
    if splits == 1:
        return out, out
    batch, nodes, heads, size = out.shape
    part = out.new_empty((batch * kv_heads, nodes * heads // kv_heads, splits, size), dtype=torch.float32)
    return part, part.new_empty(part.shape[:3])


def launch_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    part: Tensor,
    lse: Tensor,
    layout: TreeLayout,
    extent: int,
    splits: int,
    scale: float,
    sinks: Tensor | None,
    cap: float | None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that tree.py's kernel and few_queries.py's have in common: those by place, and compile-time ones by
    name. `out` is contiguous, and sinks are left to `merge` where there are several splits."""
    nodes, heads, size, kv_heads = *q.shape[1:], k.shape[1]
    words, depths, span = None if layout.chain else layout.words, layout.depths, layout.span
    scale2, cap2 = scales(scale, cap)
    tensors = q, k, v, out, part, lse, layout.prefix, layout.prefix if words is None else words, depths
    counts = scale2, nodes, layout.tail, extent, splits, kv_heads
    strides = (*q.stride()[:3], *k.stride()[:2], *v.stride()[:2]), out.stride(0), layout.prefix.stride(0)
    word_strides = (0, 0) if words is None else words.stride()[:2]
    depth_stride = None if depths is None else depths.stride(0)
    return (*tensors, None if splits > 1 else sinks, *counts, *strides, *word_strides, depth_stride), {
        "S_K": k.stride(2),
        "S_V": v.stride(2),
        "GROUP": heads // kv_heads,
        "D": size,
        "CHAIN": words is None,
        "SPLIT": splits > 1,
        "SPAN": span.size if span else 0,
        "CHUNK": span is not None and span.chunk,
        "RING": layout.ring,
        "CAP": cap2,
    }


def merge(part: Tensor, lse: Tensor, out: Tensor, kv_heads: int, sinks: Tensor | None = None) -> None:
    """Fill out [B, N, Hq, D], contiguous, with the sums of part [B * Hkv, R, S, D] by lse [B * Hkv, R, S]; S is at most
    MAX_SPLITS. sinks [Hq] join the sums of weights."""
    pairs, rows, splits, size = part.shape
    block_s, block_d = triton.next_power_of_2(splits), triton.next_power_of_2(size)
    _merge_kernel[(rows, pairs)](
        *(part, lse, out, sinks, splits, kv_heads, out.stride(0)),
        GROUP=out.shape[2] // kv_heads,
        D=size,
        BLOCK_D=block_d,
        BLOCK_S=block_s,
        num_warps=max(1, min(8, block_s * block_d // 2048)),
        **dependent(out.device),
    )
