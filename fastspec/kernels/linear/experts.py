"""A mixture of SwiGLU experts: tokens grouped by expert on the device, two grouped products, a weighted sum.

T tokens, K experts per token, M = T * K pairs (pair t * K + k is token t's k-th choice), E experts, H hidden size, I expert size.
Pairs are ordered by expert, equal experts in the order of the tokens; G = min(M, E) groups, a group being one expert's run of pairs in
that order or nothing. A program takes a group and TILE rows of its expert's weight: with up to `large` pairs the weight is read once,
and only the chosen experts' weights are read. The products are computed as weight @ x^T: the weight's rows fill the tensor cores
however few the pairs are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.launch import dependent, stages_within
from fastspec.kernels.layer.rms_norm import rows_of
from fastspec.kernels.linear.swiglu import silu_times

GROUP_BLOCK = 1024
SUM_BLOCK = 1024


@triton.jit(do_not_specialize=["pairs"])
def _group(p_chosen, p_order, p_expert, p_begin, p_end, pairs, BY_EXPERT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program per expert: place its pairs in the order. Groups are experts, or (with fewer pairs than experts) places in the order:
    the first place of an expert's run holds the group, the others are empty.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.program_id(0)
    o_block = tl.arange(0, BLOCK)
    b_below = tl.zeros((BLOCK,), tl.int32)
    b_equal = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, pairs, BLOCK):
        o_pair = first + o_block
        b_chosen = tl.load(p_chosen + o_pair, mask=o_pair < pairs, other=2147483647).to(tl.int32)
        b_below += (b_chosen < expert).to(tl.int32)
        b_equal += (b_chosen == expert).to(tl.int32)
    begin = tl.sum(b_below, 0)
    end = begin + tl.sum(b_equal, 0)
    if BY_EXPERT:
        tl.store(p_expert + expert, expert)
        tl.store(p_begin + expert, begin)
        tl.store(p_end + expert, end)
    place = begin
    for first in range(0, pairs, BLOCK):
        o_pair = first + o_block
        b_chosen = tl.load(p_chosen + o_pair, mask=o_pair < pairs, other=2147483647).to(tl.int32)
        m_mine = b_chosen == expert
        b_mine = m_mine.to(tl.int32)
        o_place = place + tl.cumsum(b_mine, 0) - b_mine
        tl.store(p_order + o_place, o_pair, mask=m_mine)
        if not BY_EXPERT:
            tl.store(p_expert + o_place, expert + tl.zeros_like(o_place), mask=m_mine)
            tl.store(p_begin + o_place, o_place, mask=m_mine)
            tl.store(p_end + o_place, tl.where(o_place == begin, end, o_place), mask=m_mine)
        place += tl.sum(b_mine, 0)


@triton.jit
def _product(
    p_weight, p_x, m_x, DEPTH: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, DEPTH_BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    """weight @ x^T of the rows that start at p_weight [TILE] and p_x [ROWS], DEPTH long -> [TILE, ROWS] fp32."""
    o_k = tl.arange(0, DEPTH_BLOCK)
    b_sum = tl.zeros((TILE, ROWS), tl.float32)
    for k in tl.range(0, DEPTH, DEPTH_BLOCK, num_stages=STAGES):
        if DEPTH % DEPTH_BLOCK == 0:
            b_weight = tl.load(p_weight[:, None] + (k + o_k)[None, :])
            b_x = tl.load(p_x[:, None] + (k + o_k)[None, :], mask=m_x[:, None], other=0.0)
        else:
            m_k = (k + o_k < DEPTH)[None, :]
            b_weight = tl.load(p_weight[:, None] + (k + o_k)[None, :], mask=m_k, other=0.0)
            b_x = tl.load(p_x[:, None] + (k + o_k)[None, :], mask=m_x[:, None] & m_k, other=0.0)
        b_sum = tl.dot(b_weight, tl.trans(b_x), b_sum, input_precision="ieee")
    return b_sum


@triton.jit
def _gate_up_rows(
    p_x, p_weight, p_order, p_out, stride_x, first, end, CHOICES: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr, DEPTH_BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gate, up and SwiGLU of the pairs at places first to first + ROWS: half the tile's rows are the gate's, half the up part's."""
    COLS: tl.constexpr = TILE // 2
    o_place = first + tl.arange(0, ROWS)
    m_place = o_place < end
    o_token = tl.load(p_order + o_place, mask=m_place, other=0).to(tl.int64) // CHOICES
    o_tile = tl.arange(0, TILE)
    o_col = tl.minimum(tl.program_id(0) * COLS + o_tile % COLS, INNER - 1)  # past the end: the last again, not stored
    o_weight = (o_col + (o_tile // COLS) * INNER).to(tl.int64)
    b_both = _product(p_weight + o_weight * HIDDEN, p_x + o_token * stride_x, m_place, HIDDEN, TILE, ROWS, DEPTH_BLOCK, STAGES)
    b_both = b_both.to(p_out.dtype.element_ty)
    b_gate, b_up = tl.split(tl.permute(tl.reshape(b_both, (2, COLS, ROWS)), (1, 2, 0)))
    o_out = tl.program_id(0) * COLS + tl.arange(0, COLS)
    m_out = (o_out < INNER)[:, None] & m_place[None, :]
    tl.store(p_out + o_place.to(tl.int64)[None, :] * INNER + o_out[:, None], silu_times(b_gate, b_up), mask=m_out)


@triton.jit
def _gate_up(
    p_x, p_weight, p_order, p_expert, p_begin, p_end, p_out, stride_x, CHOICES: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr,
    TILE: tl.constexpr, SMALL: tl.constexpr, LARGE: tl.constexpr, DEPTH_BLOCK: tl.constexpr,
    SMALL_STAGES: tl.constexpr, LARGE_STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    group = tl.program_id(1)
    begin = tl.load(p_begin + group)
    end = tl.load(p_end + group)
    p_mine = p_weight + tl.load(p_expert + group).to(tl.int64) * (2 * INNER * HIDDEN)
    if end - begin > SMALL:
        for first in range(begin, end, LARGE):
            _gate_up_rows(p_x, p_mine, p_order, p_out, stride_x, first, end, CHOICES, HIDDEN, INNER, TILE, LARGE, DEPTH_BLOCK, LARGE_STAGES)
    elif end > begin:
        _gate_up_rows(p_x, p_mine, p_order, p_out, stride_x, begin, end, CHOICES, HIDDEN, INNER, TILE, SMALL, DEPTH_BLOCK, SMALL_STAGES)


@triton.jit
def _down_rows(
    p_inner, p_weight, p_order, p_out, first, end, HIDDEN: tl.constexpr, INNER: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr, DEPTH_BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    o_place = first + tl.arange(0, ROWS)
    m_place = o_place < end
    o_pair = tl.load(p_order + o_place, mask=m_place, other=0).to(tl.int64)
    o_out = tl.program_id(0) * TILE + tl.arange(0, TILE)
    o_weight = tl.minimum(o_out, HIDDEN - 1).to(tl.int64)
    p_rows = p_inner + o_place.to(tl.int64) * INNER
    b_part = _product(p_weight + o_weight * INNER, p_rows, m_place, INNER, TILE, ROWS, DEPTH_BLOCK, STAGES)
    m_out = (o_out < HIDDEN)[:, None] & m_place[None, :]
    tl.store(p_out + o_pair[None, :] * HIDDEN + o_out[:, None], b_part.to(p_out.dtype.element_ty), mask=m_out)


@triton.jit
def _down(
    p_inner, p_weight, p_order, p_expert, p_begin, p_end, p_out, HIDDEN: tl.constexpr, INNER: tl.constexpr,
    TILE: tl.constexpr, SMALL: tl.constexpr, LARGE: tl.constexpr, DEPTH_BLOCK: tl.constexpr,
    SMALL_STAGES: tl.constexpr, LARGE_STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    group = tl.program_id(1)
    begin = tl.load(p_begin + group)
    end = tl.load(p_end + group)
    p_mine = p_weight + tl.load(p_expert + group).to(tl.int64) * (HIDDEN * INNER)
    if end - begin > SMALL:
        for first in range(begin, end, LARGE):
            _down_rows(p_inner, p_mine, p_order, p_out, first, end, HIDDEN, INNER, TILE, LARGE, DEPTH_BLOCK, LARGE_STAGES)
    elif end > begin:
        _down_rows(p_inner, p_mine, p_order, p_out, begin, end, HIDDEN, INNER, TILE, SMALL, DEPTH_BLOCK, SMALL_STAGES)


@triton.jit
def _weighted_sum(p_parts, p_weights, p_out, CHOICES: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_h = o_h < HIDDEN
    b_sum = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(CHOICES):
        share = tl.load(p_weights + token * CHOICES + k).to(tl.float32)
        b_sum += share * tl.load(p_parts + (token * CHOICES + k) * HIDDEN + o_h, mask=m_h, other=0.0).to(tl.float32)
    tl.store(p_out + token * HIDDEN + o_h, b_sum.to(p_out.dtype.element_ty), mask=m_h)


@dataclass(frozen=True, slots=True)
class Launch:
    """How the two products run: `tile` rows of the weight by blocks of `depth`, against up to `small` pairs of an expert, or, where it has
    more, `large` at a time, with a pass over its weight for each. The stages are for the two cases.
    """

    tile: int
    depth: int
    small: int
    large: int
    warps: int
    small_stages: int
    large_stages: int


# By whether elements are fp32, which has no tensor cores (small tiles for the registers' sake): for at most so many tokens; the last takes
# the rest. For up to 64 tokens an expert's pairs fit in one pass, and two programs' stages (100 KB each) on a multiprocessor.
_LAUNCHES: dict[bool, tuple[tuple[int, Launch], ...]] = {
    True: ((16, Launch(32, 32, 16, 16, 4, 3, 3)), (0, Launch(32, 32, 16, 32, 4, 3, 3))),
    False: (
        (16, Launch(64, 128, 16, 16, 4, 5, 5)), (32, Launch(64, 128, 16, 32, 4, 5, 4)), (64, Launch(64, 128, 16, 64, 4, 5, 3)),
        (0, Launch(128, 64, 16, 128, 8, 4, 3)),
    ),
}  # fmt: skip


def launch_for(tokens: int, dtype: torch.dtype) -> Launch:
    """The launch for so many tokens of a dtype."""
    return next(launch for most, launch in _LAUNCHES[dtype == torch.float32] if tokens <= most or not most)


def experts(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """`reference.experts`: x [T, H], gate_up [E, 2 * I, H], down [E, H, I], chosen [T, K] int64, weights [T, K] -> [T, H], contiguous.

    x (its rows a fixed distance apart), gate_up and down (contiguous) are all fp32, fp16 or bf16; chosen (contiguous, 0 to E - 1: the
    kernels do not look) and weights (contiguous, any float) come from the router. Nothing depends on the order in which programs run:
    equal inputs give equal bits. For up to 64 tokens that choose different experts each, a chosen expert's weights are read once.
    """
    (tokens, size), (count, inner) = x.shape, (down.shape[0], down.shape[2])
    if gate_up.shape != (count, 2 * inner, size) or down.shape[1] != size:
        shapes = f"gate_up is {list(gate_up.shape)} and down {list(down.shape)}"
        raise ValueError(f"{shapes}; [E, 2 * I, {size}] and [E, {size}, I] are accepted")
    if chosen.dim() != 2 or chosen.shape != weights.shape or len(chosen) != tokens or chosen.dtype != torch.int64:
        shapes = f"chosen is {chosen.dtype} {list(chosen.shape)} and weights {list(weights.shape)}"
        raise ValueError(f"{shapes}; int64 [{tokens}, K] and [{tokens}, K] are accepted")
    for name, tensor in (("gate_up", gate_up), ("down", down), ("chosen", chosen), ("weights", weights)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}: it must be contiguous; pass {name}.contiguous()")
    if not x.dtype == gate_up.dtype == down.dtype:
        raise ValueError(f"x is {x.dtype}, gate_up {gate_up.dtype}, down {down.dtype}; all must have one dtype")
    choices, pairs = chosen.shape[1], chosen.numel()
    out = x.new_empty((tokens, size))
    if pairs == 0 or size == 0:
        return out.zero_()
    rows, groups = rows_of(x, "x"), min(pairs, count)
    order, expert, begin, end = torch.empty(pairs + 3 * groups, dtype=torch.int32, device=x.device).split([pairs, groups, groups, groups])
    block = min(GROUP_BLOCK, max(32, triton.next_power_of_2(pairs)))
    pdl = dependent(x.device)
    _group[(count,)](chosen, order, expert, begin, end, pairs, BY_EXPERT=pairs >= count, BLOCK=block, num_warps=max(1, block // 256), **pdl)

    launch = launch_for(tokens, x.dtype)
    activated, parts = x.new_empty((pairs, inner)), x.new_empty((pairs, size))
    shared = pdl | {"TILE": launch.tile, "SMALL": launch.small, "LARGE": launch.large, "num_warps": launch.warps}
    stage = launch.depth * x.element_size()
    shared["SMALL_STAGES"] = stages_within(launch.small_stages, (launch.tile + launch.small) * stage, x.device)
    shared["LARGE_STAGES"] = stages_within(launch.large_stages, (launch.tile + launch.large) * stage, x.device)
    _gate_up[(triton.cdiv(2 * inner, launch.tile), groups)](
        rows, gate_up, order, expert, begin, end, activated, rows.stride(0), CHOICES=choices, HIDDEN=size, INNER=inner,
        DEPTH_BLOCK=_depth(launch, size), **shared,
    )  # fmt: skip
    _down[(triton.cdiv(size, launch.tile), groups)](
        activated, down, order, expert, begin, end, parts, HIDDEN=size, INNER=inner, DEPTH_BLOCK=_depth(launch, inner), **shared
    )
    block = min(SUM_BLOCK, max(16, triton.next_power_of_2(size)))
    _weighted_sum[(tokens, triton.cdiv(size, block))](
        parts, weights, out, CHOICES=choices, HIDDEN=size, BLOCK=block, num_warps=max(1, block // 256), **pdl
    )
    return out


def _depth(launch: Launch, depth: int) -> int:
    return min(launch.depth, max(16, int(triton.next_power_of_2(depth))))
