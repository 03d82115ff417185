"""Expand a frontier without writing the logits: two launches.

B rows (sequences), M nodes of each row's frontier, R = B * M, H hidden size, V draft vocabulary, K = count children of
a node, T tiles of the vocabulary. The first launch reads the weight once: a program takes one tile of the vocabulary
for a block of nodes and leaves the K best of it, with the partial log-sum-exp. In the second launch one program merges
a node's tiles, and the last of a row's programs to arrive ranks the row's M * K children.

A value and its index travel as one int64 key, so that one maximum finds both and the lower index wins among equals.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fastspec.kernels.arguments import CONTIGUOUS, PACKED, expect
from fastspec.kernels.drafting.reference import Candidates
from fastspec.kernels.launch import (
    dependent,
    has_descriptors,
    prefetch,
    prefetched,
    spread,
    stages_within,
    wait_for_previous,
)

EMPTY, EMPTY_HIGH = tl.constexpr(-(2**63)), tl.constexpr(-(2**31))  # below every key, and its higher half
MAX_COUNT = 64
MAX_CHILDREN = 4096

# tile of the vocabulary, step over H, stages, warps; the weight's tile is the left operand, so few nodes waste nothing
HALF, HALF_DEEP, HALF_SMALL, FULL = (128, 64, 4, 4), (128, 128, 3, 4), (64, 64, 5, 4), (64, 32, 3, 4)
# from here on blocks of 32 nodes: larger ones wait longer for their best than they save in reading, which the L2 does
MANY_NODES = 64
ENOUGH_TILES = 200  # below this, tiles of 128 leave multiprocessors idle where there is one block of nodes
PREFETCH = 512  # bytes of each line of the first weight tile that are asked for while the kernel before still runs
LOGITS = (1, 512, 0, 1, 1)  # the same for logits that are there: one node at a time, by warps that wait for no others


@triton.jit
def order_bits(b_x):
    """int32 of fp32 that orders as the values do; both zeros are one, and so are all NaN, above the numbers."""
    b_bits = tl.where(b_x == 0.0, 0.0, b_x).to(tl.int32, bitcast=True)
    return tl.where(b_x == b_x, b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def sort_key(b_x, o_index):
    """int64 of fp32 values and int32 indices: higher for higher values, then for lower indices."""
    return (order_bits(b_x).to(tl.int64) << 32) | (0x7FFFFFFF - o_index).to(tl.int64)


@triton.jit
def key_value(b_key):
    """The fp32 values of sort keys."""
    b_bits = (b_key >> 32).to(tl.int32)
    return (b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def key_index(b_key):
    """The indices of sort keys."""
    return 0x7FFFFFFF - (b_key & 0x7FFFFFFF)


@triton.jit
def tile_mass(b_x, axis: tl.constexpr):
    """The maximum along an axis of 0, and the sum of exponentials relative to it; -inf and 0 where there is nothing."""
    b_peak = tl.max(b_x, axis)
    b_base = tl.where(b_peak == float("-inf"), 0.0, b_peak)
    return b_peak, tl.sum(tl.exp(b_x - tl.expand_dims(b_base, axis)), axis)


@triton.jit
def log_total(b_peak, b_mass):
    """Logarithm of the sum of tiles' masses [T], each relative to its peak [T]; a mass of 0 counts for nothing."""
    top = tl.max(b_peak, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    # The mass goes into the exponent: a sum of products is fused in another order by each thread, and equal logits
    # would part.
    m_mass = b_mass > 0.0
    b_log = tl.where(m_mass, b_peak - base + tl.log(tl.where(m_mass, b_mass, 1.0)), float("-inf"))
    return base + tl.log(tl.sum(tl.exp(b_log), 0))


@triton.jit
def _leave_mass(b_x, o_v, o_r, vocab, rows, tile, tiles, nodes, p_peak, p_mass, p_arrived):
    """Store maximum and mass of logits b_x [BV, BR], for nodes o_r and ids o_v of a tile -> their keys."""
    m_r = o_r < rows
    m_v = (o_v < vocab)[:, None]
    b_x = tl.where(m_v, b_x, float("-inf"))
    b_peak, b_mass = tile_mass(b_x, 0)
    o_row = o_r.to(tl.int64)
    tl.store(p_peak + o_row * tiles + tile, b_peak, mask=m_r)
    tl.store(p_mass + o_row * tiles + tile, b_mass, mask=m_r)
    tl.store(p_arrived + o_r // nodes, tl.zeros_like(o_r), mask=m_r & (o_r % nodes + tile == 0))
    return tl.where(m_v, sort_key(b_x, o_v[:, None]), EMPTY)


@triton.jit
def _halves(b_key):
    """The halves int32 of keys: of a warp's keys one instruction finds the highest half."""
    return (b_key >> 32).to(tl.int32), b_key.to(tl.int32)


@triton.jit
def _taken(b_high, b_low):
    """The highest of keys [N] of distinct indices, EMPTY where there is none, and the higher halves without it."""
    high = tl.max(b_high, 0)
    low = tl.max(tl.where(b_high == high, b_low, -1), 0)
    best = tl.where(high == EMPTY_HIGH, EMPTY, (high.to(tl.int64) << 32) | low.to(tl.int64))
    return best, tl.where(b_low == low, EMPTY_HIGH, b_high)


@triton.jit(do_not_specialize=["rows", "nodes"])
def _product_kernel(
    p_x,
    p_w,
    d_w,
    p_keys,
    p_peak,
    p_mass,
    p_arrived,
    rows,
    nodes,
    vocab,
    hidden,
    tiles,
    s_xb,
    s_xm,
    s_w,
    count: tl.constexpr,
    BR: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    EVEN: tl.constexpr,
    TMA: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Logits of one tile for a block of nodes, transposed [BV, BR], then what is left of them."""
    tile = tl.program_id(1)
    o_r = tl.program_id(0) * BR + tl.arange(0, BR)
    o_v = tile * BV + tl.arange(0, BV)
    o_x = tl.minimum(o_r, rows - 1)  # clamped, so that the loop over H needs no mask for nodes and ids
    p_rows = p_x + (o_x // nodes).to(tl.int64) * s_xb + (o_x % nodes).to(tl.int64) * s_xm
    p_ids = p_w + tl.minimum(o_v, vocab - 1).to(tl.int64) * s_w
    if PDL:
        if PREFETCH > 0:
            prefetch(p_ids, PREFETCH)  # no kernel writes weights
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    o_k = tl.arange(0, BK)
    b_acc = tl.zeros([BV, BR], dtype=tl.float32)
    for start in range(0, hidden, BK):
        if TMA:
            b_w = d_w.load([tile * BV, start])
            b_x = tl.load(p_rows[:, None] + (start + o_k)[None, :])
        elif EVEN:
            b_w = tl.load(p_ids[:, None] + (start + o_k)[None, :])
            b_x = tl.load(p_rows[:, None] + (start + o_k)[None, :])
        else:
            m_k = (start + o_k < hidden)[None, :]
            b_w = tl.load(p_ids[:, None] + (start + o_k)[None, :], mask=m_k, other=0.0)
            b_x = tl.load(p_rows[:, None] + (start + o_k)[None, :], mask=m_k, other=0.0)
        b_acc = tl.dot(b_w, tl.trans(b_x), b_acc, input_precision="ieee")
    b_key = _leave_mass(b_acc, o_v, o_r, vocab, rows, tile, tiles, nodes, p_peak, p_mass, p_arrived)
    for i in range(count):
        b_best = tl.max(b_key, 0)
        tl.store(p_keys + (o_r.to(tl.int64) * count + i) * tiles + tile, b_best, mask=o_r < rows)
        b_key = tl.where(b_key == b_best[None, :], EMPTY, b_key)


@triton.jit(do_not_specialize=["rows", "nodes"])
def _logits_kernel(
    p_x,
    p_keys,
    p_peak,
    p_mass,
    p_arrived,
    rows,
    nodes,
    vocab,
    tiles,
    s_xb,
    s_xm,
    count: tl.constexpr,
    BV: tl.constexpr,
    PDL: tl.constexpr,
):
    """The same for logits that are there already: one tile of one node."""
    wait_for_previous(PDL)
    tile = tl.program_id(1)
    o_r = tl.program_id(0) + tl.arange(0, 1)
    o_v = tile * BV + tl.arange(0, BV)
    p_rows = p_x + (o_r // nodes).to(tl.int64) * s_xb + (o_r % nodes).to(tl.int64) * s_xm
    b_x = tl.load(p_rows[None, :] + o_v[:, None], mask=(o_v < vocab)[:, None], other=float("-inf")).to(tl.float32)
    b_key = _leave_mass(b_x, o_v, o_r, vocab, rows, tile, tiles, nodes, p_peak, p_mass, p_arrived)
    b_high, b_low = _halves(tl.reshape(b_key, [BV]))
    p_keys += tl.program_id(0).to(tl.int64) * count * tiles + tile
    for i in range(count):
        best, b_high = _taken(b_high, b_low)
        tl.store(p_keys + i * tiles, best)


@triton.jit
def _best_keys(b_key, o_c, count: tl.constexpr):
    """The `count` highest of distinct keys b_key [N] in falling order, at places o_c [C]; EMPTY behind them."""
    b_best = tl.zeros_like(o_c).to(tl.int64) + EMPTY
    b_high, b_low = _halves(b_key)
    for i in range(count):
        best, b_high = _taken(b_high, b_low)
        b_best = tl.where(o_c == i, best, b_best)
    return b_best


@triton.jit(do_not_specialize=["nodes", "first"])
def _merge_kernel(
    p_keys,
    p_peak,
    p_mass,
    p_arrived,
    p_scores,
    p_d2t,
    p_children,
    p_tokens,
    p_parents,
    p_best,
    p_index,
    nodes,
    tiles,
    first,
    s_sb,
    s_sm,
    s_children,
    s_tokens,
    s_parents,
    count: tl.constexpr,
    BV: tl.constexpr,
    TP: tl.constexpr,
    CP: tl.constexpr,
    NP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One node's children from its tiles; the last program of a row ranks the children of all its nodes."""
    wait_for_previous(PDL)
    node = tl.program_id(0).to(tl.int64)
    row = node // nodes
    o_t, o_c = tl.arange(0, TP), tl.arange(0, CP)
    m_t, m_c = o_t < tiles, o_c < count
    b_peak = tl.load(p_peak + node * tiles + o_t, mask=m_t, other=float("-inf"))
    b_mass = tl.load(p_mass + node * tiles + o_t, mask=m_t, other=0.0)
    b_head = tl.load(p_keys + node * count * tiles + o_t, mask=m_t, other=EMPTY)
    score = tl.load(p_scores + row * s_sb + (node % nodes) * s_sm)
    lse = log_total(b_peak, b_mass)

    # The best `count` ids are in the `count` tiles that have the best heads; a tile follows from its head's id.
    b_tile = key_index(_best_keys(b_head, o_c, count)) // BV
    m_key = (b_tile < tiles)[:, None] & m_c[None, :]
    b_key = tl.load(p_keys + (node * count + o_c)[None, :] * tiles + b_tile[:, None], mask=m_key, other=EMPTY)
    b_key = _best_keys(tl.reshape(b_key, [CP * CP]), o_c, count)
    b_id = key_index(b_key)
    b_child = score + tl.minimum(key_value(b_key) - lse, 0.0)
    b_shift = tl.load(p_d2t + b_id, mask=m_c, other=0)
    o_child = (node % nodes) * count + o_c
    tl.store(p_children + row * s_children + o_child, b_child, mask=m_c)

    tl.debug_barrier()  # all of this program's children are stored before it says so
    if tl.atomic_add(p_arrived + row, 1, sem="acq_rel") == nodes - 1:
        o_n = tl.arange(0, NP)
        m_n = o_n < nodes * count
        b_all = tl.load(p_children + row * s_children + o_n, mask=m_n, other=0.0, cache_modifier=".cg")
        b_rank = _best_keys(tl.where(m_n, sort_key(b_all, o_n), EMPTY), o_c, count)
        tl.store(p_best + row * count + o_c, key_value(b_rank), mask=m_c)
        tl.store(p_index + row * count + o_c, key_index(b_rank), mask=m_c)
        if p_parents is not None:
            o_below = o_c[:, None] * count + o_c[None, :]
            b_above = tl.broadcast_to((first + key_index(b_rank))[:, None], [CP, CP])
            tl.store(p_parents + row * s_parents + o_below, b_above, mask=m_c[:, None] & m_c[None, :])
    tl.store(p_tokens + row * s_tokens + o_child, b_id + b_shift, mask=m_c)  # last: nothing here waits for the shifts


def launch_of(rows: int, vocab: int, hidden: int, half: bool) -> tuple[int, int, int, int, int]:
    """(nodes, tile of the vocabulary, step over H, stages, warps) of the product."""
    block = 16 if rows <= MANY_NODES else 32
    tile, step, _, _ = HALF
    few = rows <= block and triton.cdiv(vocab, tile) < ENOUGH_TILES
    small = few or hidden % step != 0  # masked loads take more registers
    wide = HALF_DEEP if block == 16 and hidden % HALF_DEEP[1] == 0 else HALF
    return (block, *((HALF_SMALL if small else wide) if half else FULL))


def merge_warps(tiles: int, nodes: int, count: int) -> int:
    """Warps of the merge: it holds a node's tiles, count * count keys, and the keys of all children of a row."""
    if nodes * count > 1024:
        return 8
    return 1 if max(tiles, nodes * count) <= 512 else 4


def topk_expand(
    hidden: Tensor, weight: Tensor | None, scores: Tensor, count: int, d2t: Tensor, out: Candidates | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`reference.topk_expand`: hidden [B, M, H] with weight [V, H] of its dtype, or logits [B, M, V] with weight=None.

    hidden and weight: fp32, fp16 or bf16, any strides but a contiguous last dimension; scores [B, M] fp32, any strides;
    d2t [V] int64, contiguous; 1 <= count <= 64. The logits are kept in fp32. Returns children [B, M * count] fp32,
    their target ids int64, and the best [B, count] fp32 with their indices int64. Among equal logits the lower id comes
    first. `out`'s rows may lie any distance apart.
    """
    batch, nodes, size = hidden.shape
    vocab, rows = size if weight is None else weight.shape[0], batch * nodes
    _check(hidden, weight, scores, count, d2t, vocab, out)
    device, half = hidden.device, hidden.dtype != torch.float32
    block, tile, step, stages, warps = LOGITS if weight is None else launch_of(rows, vocab, size, half)
    tiles = triton.cdiv(vocab, tile)
    keys = torch.empty(rows, count, tiles, dtype=torch.int64, device=device)
    peak, mass = torch.empty(2, rows, tiles, dtype=torch.float32, device=device)
    arrived = torch.empty(batch, dtype=torch.int32, device=device)
    best, index = (torch.empty(batch, count, dtype=dtype, device=device) for dtype in (torch.float32, torch.int64))
    if out is None:
        grown = batch, nodes * count
        out = Candidates(
            torch.empty(grown, dtype=torch.float32, device=device), torch.empty(grown, dtype=torch.int64, device=device)
        )
    children, tokens, parents = out.scores, out.tokens, out.parents
    grid, pdl, tops = (triton.cdiv(rows, block), tiles), dependent(device), (keys, peak, mass, arrived)
    strides = (hidden.stride(0), hidden.stride(1))
    if weight is None:
        counts = rows, nodes, vocab, tiles
        _logits_kernel[grid](hidden, *tops, *counts, *strides, count, tile, num_warps=warps, **spread(device))
    else:
        # what a tensor descriptor asks for
        lined_up = (weight.data_ptr() | weight.stride(0) * weight.element_size()) % 16 == 0
        tma = half and size % step == 0 and lined_up and has_descriptors(device)
        read = hidden, weight, TensorDescriptor.from_tensor(weight, [tile, step]) if tma else None
        sizes, tile_sizes = (rows, nodes, vocab, size, tiles), (count, block, tile, step)
        switches = size % step == 0, tma, prefetched(weight, PREFETCH)
        _product_kernel[grid](
            *read,
            *(*tops, *sizes, *strides, weight.stride(0), *tile_sizes, *switches),
            num_warps=warps,
            num_stages=stages_within(stages, (tile + block) * step * weight.element_size(), device),
            **pdl,
        )
    found = children, tokens, parents, best, index
    apart = children.stride(0), tokens.stride(0), 0 if parents is None else parents.stride(0)
    _merge_kernel[(rows,)](
        *(*tops, scores, d2t, *found, nodes, tiles, out.first, *scores.stride(), *apart, count, tile),
        *(triton.next_power_of_2(tiles), max(4, triton.next_power_of_2(count))),
        triton.next_power_of_2(nodes * count),
        num_warps=merge_warps(tiles, nodes, count),
        **pdl,
    )
    return children, tokens, best, index


def _check(
    hidden: Tensor, weight: Tensor | None, scores: Tensor, count: int, d2t: Tensor, vocab: int, out: Candidates | None
) -> None:
    batch, nodes, size = hidden.shape
    if hidden.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"topk_expand: hidden is {hidden.dtype}; accepted are float32, float16 and bfloat16")
    expect("topk_expand", hidden.shape, None, PACKED, hidden=hidden)
    if weight is not None:
        expect("topk_expand", ("V", size), hidden.dtype, PACKED, weight=weight)
    expect("topk_expand", (batch, nodes), torch.float32, scores=scores)
    if not 1 <= count <= min(MAX_COUNT, vocab) or nodes * count > MAX_CHILDREN:
        raise ValueError(
            f"topk_expand: count={count} of {vocab} ids for {nodes} nodes; accepted are 1 to {MAX_COUNT}, no more than "
            f"there are ids, and {MAX_CHILDREN} children in all"
        )
    expect("topk_expand", (vocab,), torch.int64, CONTIGUOUS, d2t=d2t)
    if out is None:
        return
    grown = batch, nodes * count
    expect("topk_expand", grown, torch.float32, PACKED, **{"out.scores": out.scores})
    expect("topk_expand", grown, torch.int64, PACKED, **{"out.tokens": out.tokens})
    if out.parents is not None:
        expect("topk_expand", (batch, count * count), torch.int64, PACKED, **{"out.parents": out.parents})
