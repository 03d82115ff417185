"""A mixture of experts: the router's choice, tokens grouped by expert on the device, two grouped products, and a
weighted sum.

T tokens, K experts per token, E experts, H hidden size, I expert size. Of experts that are chosen by groups the
router's program lays a token's logits out with a row for each group, both sides padded to powers of two, so that a
group's best are a row's.

M = T * K pairs (pair t * K + k is token t's k-th choice) are ordered by expert, equal experts in the order of the
tokens; G = min(M, E) groups, a group being one expert's run of pairs in that order or nothing. A program takes a group
and TILE rows of its expert's weight: with up to `large` pairs the weight is read once, and only the chosen experts'
weights are read. Of many pairs, those of a prompt, several programs take `large` at a time in turns: a router may send
most of them to few experts, and one program that took all would leave other multiprocessors idle. Programs of one group
are neighbours in the grid: its weight is read again for every `large` pairs, out of the L2 while they run side by side.
Tensor cores work as long for a tile of pairs that is half empty as for a full one, so there are three sizes of it. The
products are computed as weight @ x^T: the weight's rows fill the tensor cores however few the pairs are. An expert's
weights lie with their inputs side by side, or, TRANSPOSED, with their outputs side by side; both are read as they lie.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec.constants import constant
from fastspec.kernels.arguments import CONTIGUOUS, FLOATS, PACKED, expect
from fastspec.kernels.launch import dependent, is_hopper, runs_ptx, stages_within, wait_for_previous
from fastspec.kernels.layer.norms import rows_of
from fastspec.kernels.linear.experts_row import experts_row
from fastspec.kernels.linear.launches import ExpertsLaunch, experts_launch_for
from fastspec.kernels.linear.reference import SWIGLU, Expert, Routing
from fastspec.kernels.linear.swiglu import gated
from fastspec.kernels.quantised.conversions import group_assembly
from fastspec.kernels.quantised.mxfp4 import BLOCK, GROUP, channel_of, numbers, place_of
from fastspec.kernels.quantised.reference import MXFP4, StoredExperts

WARP_BLOCK = 512
"""Logits that one warp takes."""


@triton.jit
def _kept(b_order, GROUP_BLOCK: tl.constexpr, SIZE_BLOCK: tl.constexpr, SIZE: tl.constexpr, KEPT: tl.constexpr):
    """Scores that experts are ordered by, with those outside the best groups at minus infinity."""
    b_rows = tl.reshape(b_order, (GROUP_BLOCK, SIZE_BLOCK))
    b_best = tl.max(b_rows, 1)
    if SIZE > 1:
        m_first = tl.arange(0, SIZE_BLOCK)[None, :] == tl.argmax(b_rows, 1)[:, None]
        b_best += tl.max(tl.where(m_first, -float("inf"), b_rows), 1)
    o_group = tl.arange(0, GROUP_BLOCK)
    m_kept = o_group < 0
    for _ in range(KEPT):
        m_at = o_group == tl.argmax(b_best, 0)
        m_kept = m_kept | m_at
        b_best = tl.where(m_at, -float("inf"), b_best)
    return tl.reshape(tl.where(m_kept[:, None], b_rows, -float("inf")), (GROUP_BLOCK * SIZE_BLOCK,))


@triton.jit
def _route(
    p_logits,
    p_correction,
    p_chosen,
    p_shares,
    stride,
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    CHOICE_BLOCK: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISED: tl.constexpr,
    CORRECTED: tl.constexpr,
    SCALE: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    SIZE: tl.constexpr = EXPERTS // GROUPS
    token = tl.program_id(0).to(tl.int64)
    o_all = tl.arange(0, GROUP_BLOCK * SIZE_BLOCK)
    o_expert = (o_all // SIZE_BLOCK) * SIZE + o_all % SIZE_BLOCK
    m_real = (o_all // SIZE_BLOCK < GROUPS) & (o_all % SIZE_BLOCK < SIZE)
    b_logits = tl.load(p_logits + token * stride + o_expert, mask=m_real, other=-float("inf")).to(tl.float32)
    top = tl.max(b_logits, 0)
    whole = tl.sum(tl.exp(b_logits - top), 0)
    b_order = b_logits
    if CORRECTED:
        b_score = 1.0 / (1.0 + tl.exp(-b_logits)) if SIGMOID else tl.exp(b_logits - top) / whole
        b_order = tl.where(
            m_real, b_score + tl.load(p_correction + o_expert, mask=m_real, other=0.0).to(tl.float32), -float("inf")
        )
    if GROUPS > 1:
        b_order = _kept(b_order, GROUP_BLOCK, SIZE_BLOCK, SIZE, KEPT)
    o_choice = tl.arange(0, CHOICE_BLOCK)
    b_chosen = tl.zeros((CHOICE_BLOCK,), tl.int32)
    b_picked = tl.full((CHOICE_BLOCK,), -float("inf"), tl.float32)
    for k in range(CHOICES):
        # Not tl.argmax: of a tensor that was reshaped and that nothing but reductions read, Triton 3.6 mixes up the
        # order.
        m_at = o_all == tl.min(tl.where(b_order == tl.max(b_order, 0), o_all, GROUP_BLOCK * SIZE_BLOCK), 0)
        expert = tl.minimum(tl.sum(tl.where(m_at, o_expert, 0), 0), EXPERTS - 1)  # in bounds, whatever NaNs compare as
        b_chosen = tl.where(o_choice == k, expert, b_chosen)
        b_picked = tl.where(o_choice == k, tl.sum(tl.where(m_at, b_logits, 0.0), 0), b_picked)
        b_order = tl.where(m_at, -float("inf"), b_order)
    if SIGMOID:
        b_share = tl.where(o_choice < CHOICES, 1.0 / (1.0 + tl.exp(-b_picked)), 0.0)
        if NORMALISED:
            b_share = b_share / (tl.sum(b_share, 0) + 1e-20)
    elif NORMALISED:
        b_share = tl.exp(b_picked - tl.max(b_picked, 0))
        b_share = b_share / tl.sum(b_share, 0)
    else:
        b_share = tl.exp(b_picked - top) / whole
    o_out = token * CHOICES + o_choice
    tl.store(p_chosen + o_out, b_chosen.to(tl.int64), mask=o_choice < CHOICES)
    tl.store(p_shares + o_out, (b_share * SCALE).to(p_shares.dtype.element_ty), mask=o_choice < CHOICES)


def route(logits: Tensor, routing: Routing, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`reference.route`: logits [T, E], correction [E] or None -> chosen [T, K] int64 and their shares [T, K],
    contiguous.

    Logits and correction are fp32, fp16 or bf16, an expert's next to the other's. Of equal experts the first is chosen.
    """
    tokens, count = logits.shape
    expect("route", logits.shape, None, PACKED, logits=logits)
    expect("route", (count,), FLOATS, CONTIGUOUS, correction=correction)
    if count % routing.groups or not 1 <= routing.kept <= routing.groups:
        raise ValueError(
            f"{count} experts in {routing.groups} groups of which {routing.kept} are kept: groups of equal size are "
            "accepted"
        )
    most = count // routing.groups * (routing.kept if routing.groups > 1 else 1)
    if not 1 <= routing.choices <= most:
        raise ValueError(f"{routing.choices} choices of {most} experts: 1 to {most} are accepted")
    chosen = torch.empty((tokens, routing.choices), dtype=torch.int64, device=logits.device)
    shares = torch.empty_like(chosen, dtype=logits.dtype if routing.rounded else torch.float32)
    if tokens == 0:
        return chosen, shares
    group_block, size_block = triton.next_power_of_2(routing.groups), triton.next_power_of_2(count // routing.groups)
    _route[(tokens,)](
        logits,
        correction,
        chosen,
        shares,
        logits.stride(0),
        EXPERTS=count,
        CHOICES=routing.choices,
        GROUPS=routing.groups,
        KEPT=routing.kept,
        GROUP_BLOCK=group_block,
        SIZE_BLOCK=size_block,
        CHOICE_BLOCK=triton.next_power_of_2(routing.choices),
        SIGMOID=routing.sigmoid,
        NORMALISED=routing.normalised,
        CORRECTED=correction is not None,
        SCALE=float(routing.scale),
        num_warps=max(1, min(8, group_block * size_block // WARP_BLOCK)),
        **dependent(logits.device),
    )
    return chosen, shares


GROUP_BLOCK = 1024
SUM_BLOCK = 1024
MOST_PARTS = 32
"""Programs at most that share an expert's pairs and a tile of its weight."""


@triton.jit(do_not_specialize=["pairs"])
def _group(
    p_chosen, p_order, p_expert, p_begin, p_end, pairs, BY_EXPERT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """One program per expert: place its pairs in the order. Groups are experts, or (with fewer pairs than experts)
    places in the order: the first place of an expert's run holds the group, the others are empty.
    """
    wait_for_previous(PDL)
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
    p_weight,
    m_weight,
    p_x,
    m_x,
    STEP: tl.constexpr,
    MASKED: tl.constexpr,
    DEPTH: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH_BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """weight @ x^T of the rows that start at p_weight [TILE], its columns STEP apart, and p_x [ROWS], DEPTH long ->
    [TILE, ROWS] fp32.

    MASKED: only the rows m_weight of the weight are there; without, all can be read.
    """
    o_k = tl.arange(0, DEPTH_BLOCK)
    b_sum = tl.zeros((TILE, ROWS), tl.float32)
    for k in tl.range(0, DEPTH, DEPTH_BLOCK, num_stages=STAGES):
        p_block = p_weight[:, None] + (k + o_k).to(tl.int64)[None, :] * STEP
        p_rows = p_x[:, None] + (k + o_k)[None, :]
        if DEPTH % DEPTH_BLOCK == 0:
            b_weight = tl.load(p_block, mask=m_weight[:, None], other=0.0) if MASKED else tl.load(p_block)
            b_x = tl.load(p_rows, mask=m_x[:, None], other=0.0)
        else:
            m_k = (k + o_k < DEPTH)[None, :]
            b_weight = tl.load(p_block, mask=m_weight[:, None] & m_k if MASKED else m_k, other=0.0)
            b_x = tl.load(p_rows, mask=m_x[:, None] & m_k, other=0.0)
        b_sum = tl.dot(b_weight, tl.trans(b_x), b_sum, input_precision="ieee")
    return b_sum


@triton.jit
def _stored_product(
    p_weight,
    p_scales,
    p_x,
    m_x,
    DEPTH: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH_BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """`_product` of MXFP4 weights: of rows whose words start at p_weight [TILE], and whose scales at p_scales. Channels
    of x stand in the places of `mxfp4`, with zeros up to a whole block. Scales are read a step ahead: single bytes
    cannot be copied asynchronously."""
    DTYPE: tl.constexpr = p_x.dtype.element_ty
    o_word, o_k = tl.arange(0, DEPTH_BLOCK // 8), tl.arange(0, DEPTH_BLOCK)
    o_group = tl.arange(0, DEPTH_BLOCK // GROUP)
    b_sum = tl.zeros((TILE, ROWS), tl.float32)
    p_next = p_scales[:, None] + o_group[None, :]
    b_next = tl.load(p_next, mask=(o_group < DEPTH // GROUP)[None, :], other=0)
    for k in tl.range(0, DEPTH, DEPTH_BLOCK, num_stages=STAGES):
        b_scales = b_next
        o_next = o_group + (k + DEPTH_BLOCK) // GROUP
        b_next = tl.load(p_scales[:, None] + o_next[None, :], mask=(o_next < DEPTH // GROUP)[None, :], other=0)
        p_words = p_weight[:, None] + (k // 8 + o_word)[None, :]
        if DEPTH % DEPTH_BLOCK == 0:
            b_words = tl.load(p_words)
        else:
            b_words = tl.load(p_words, mask=(k // 8 + o_word < DEPTH // 8)[None, :], other=0)
        b_x = tl.load(p_x[:, None] + (k + o_k)[None, :], mask=m_x[:, None], other=0.0)
        b_weight = numbers(b_words, b_scales, DTYPE, ASSEMBLY)
        b_sum = tl.dot(b_weight, tl.trans(b_x), b_sum, input_precision="ieee")
    return b_sum


@triton.jit
def _either_product(
    p_weight,
    p_scales,
    o_row,
    m_row,
    p_x,
    m_x,
    LINES: tl.constexpr,
    DEPTH: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    MASKED: tl.constexpr,
    LAUNCH: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`_product` of rows o_row [TILE] of a weight [LINES, DEPTH], or `_stored_product` where it has scales."""
    if p_scales is None:
        p_rows = p_weight + o_row * (1 if TRANSPOSED else DEPTH)
        STEP: tl.constexpr = LINES if TRANSPOSED else 1
        b_sum = _product(p_rows, m_row, p_x, m_x, STEP, MASKED, DEPTH, LAUNCH.tile, ROWS, LAUNCH.depth, STAGES)
    else:
        p_rows, p_factors = p_weight + o_row * (DEPTH // 8), p_scales + o_row * (DEPTH // GROUP)
        b_sum = _stored_product(p_rows, p_factors, p_x, m_x, DEPTH, LAUNCH.tile, ROWS, LAUNCH.depth, STAGES, ASSEMBLY)
    return b_sum


@triton.jit
def _in_places(p_x, p_out, stride, HIDDEN: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr):
    """A program copies a BLOCK of a row, its channels in the places of `mxfp4`, zeros behind the last."""
    wait_for_previous(PDL)
    row, o_place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    o_channel = channel_of(o_place)
    tl.store(p_out + row * WIDTH + o_place, tl.load(p_x + row * stride + o_channel, mask=o_channel < HIDDEN, other=0.0))


@triton.jit
def _gate_up_rows(
    p_x,
    p_weight,
    p_scales,
    p_bias,
    p_shares,
    p_order,
    p_out,
    stride_x,
    end,
    first,
    CHOICES: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    KIND: tl.constexpr,
    LAUNCH: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    ROWS: tl.constexpr,
    LARGE: tl.constexpr,
):
    """The joined gate and up of the pairs at places first to first + ROWS: half the tile's rows are the gate's, half
    the up part's."""
    STAGES: tl.constexpr = LAUNCH.large_stages if LARGE else LAUNCH.small_stages
    TILE: tl.constexpr = LAUNCH.tile
    COLS: tl.constexpr = TILE // 2
    o_place = first + tl.arange(0, ROWS)
    m_place = o_place < end
    o_pair = tl.load(p_order + o_place, mask=m_place, other=0).to(tl.int64)
    o_tile = tl.arange(0, TILE)
    o_col = tl.program_id(0) * COLS + (o_tile // 2 if KIND.interleaved else o_tile % COLS)
    m_col = o_col < INNER
    o_row = tl.program_id(0) * TILE + o_tile if KIND.interleaved else o_col + (o_tile // COLS) * INNER
    o_row = tl.where(m_col, o_row, 0) if INNER % COLS != 0 and not TRANSPOSED else o_row
    p_rows = p_x + (o_pair // CHOICES) * stride_x
    MASKED: tl.constexpr = TRANSPOSED and INNER % COLS != 0
    weight = p_weight, p_scales, o_row.to(tl.int64), m_col
    b_both = _either_product(
        *weight, p_rows, m_place, 2 * INNER, HIDDEN, TRANSPOSED, MASKED, LAUNCH, ASSEMBLY, ROWS, STAGES
    )
    if KIND.scales_input:
        b_both *= tl.load(p_shares + o_pair, mask=m_place, other=0.0).to(tl.float32)[None, :]
    if p_bias is not None:
        b_both += tl.load(p_bias + o_row, mask=m_col, other=0.0).to(tl.float32)[:, None]
    b_both = b_both.to(p_out.dtype.element_ty)
    if KIND.interleaved:
        b_gate, b_up = tl.split(tl.permute(tl.reshape(b_both, (COLS, 2, ROWS)), (0, 2, 1)))
    else:
        b_gate, b_up = tl.split(tl.permute(tl.reshape(b_both, (2, COLS, ROWS)), (1, 2, 0)))
    o_out = tl.program_id(0) * COLS + tl.arange(0, COLS)
    m_out = (o_out < INNER)[:, None] & m_place[None, :]
    GATE: tl.constexpr = KIND.gate
    b_out = gated(b_gate, b_up, GATE, KIND.offset, KIND.limit)
    if p_scales is None:
        tl.store(p_out + o_place.to(tl.int64)[None, :] * INNER + o_out[:, None], b_out, mask=m_out)
    else:
        WIDTH: tl.constexpr = (INNER + BLOCK - 1) // BLOCK * BLOCK
        p_rows = p_out + o_place.to(tl.int64)[None, :] * WIDTH
        tl.store(p_rows + place_of(o_out)[:, None], b_out, mask=m_out)
        if WIDTH > INNER and tl.program_id(0) == tl.num_programs(0) - 1:
            o_rest = INNER + tl.arange(0, BLOCK)
            m_rest = (o_rest < WIDTH)[:, None] & m_place[None, :]
            tl.store(p_rows + place_of(o_rest)[:, None], tl.zeros((BLOCK, ROWS), b_out.dtype), mask=m_rest)


@triton.jit
def _gate_up(
    p_x,
    p_weight,
    p_scales,
    p_bias,
    p_shares,
    p_order,
    p_expert,
    p_begin,
    p_end,
    p_out,
    stride_x,
    CHOICES: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    KIND: tl.constexpr,
    LAUNCH: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    part, group = tl.program_id(1), tl.program_id(2)
    begin = tl.load(p_begin + group)
    end = tl.load(p_end + group)
    if end > begin:
        expert = tl.load(p_expert + group).to(tl.int64)
        p_mine = p_weight + expert * (2 * INNER * (HIDDEN if p_scales is None else HIDDEN // 8))
        if p_scales is not None:
            p_scales += expert * (2 * INNER * (HIDDEN // GROUP))
        if p_bias is not None:
            p_bias += expert * (2 * INNER)
        given = p_x, p_mine, p_scales, p_bias, p_shares, p_order, p_out, stride_x, end
        if end - begin > LAUNCH.medium:
            for first in range(begin + part * LAUNCH.large, end, LAUNCH.large * tl.num_programs(1)):
                _gate_up_rows(
                    *given, first, CHOICES, HIDDEN, INNER, TRANSPOSED, KIND, LAUNCH, ASSEMBLY, LAUNCH.large, True
                )
        elif part == 0:
            if LAUNCH.medium > LAUNCH.small and end - begin > LAUNCH.small:
                _gate_up_rows(
                    *given, begin, CHOICES, HIDDEN, INNER, TRANSPOSED, KIND, LAUNCH, ASSEMBLY, LAUNCH.medium, True
                )
            else:
                _gate_up_rows(
                    *given, begin, CHOICES, HIDDEN, INNER, TRANSPOSED, KIND, LAUNCH, ASSEMBLY, LAUNCH.small, False
                )


@triton.jit
def _down_rows(
    p_inner,
    p_weight,
    p_scales,
    p_bias,
    p_order,
    p_out,
    end,
    first,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    LAUNCH: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    ROWS: tl.constexpr,
    LARGE: tl.constexpr,
):
    STAGES: tl.constexpr = LAUNCH.large_stages if LARGE else LAUNCH.small_stages
    TILE: tl.constexpr = LAUNCH.tile
    o_place = first + tl.arange(0, ROWS)
    m_place = o_place < end
    o_pair = tl.load(p_order + o_place, mask=m_place, other=0).to(tl.int64)
    o_out = tl.program_id(0) * TILE + tl.arange(0, TILE)
    m_row = o_out < HIDDEN
    o_row = tl.minimum(o_out, HIDDEN - 1) if HIDDEN % TILE != 0 and not TRANSPOSED else o_out
    p_rows = p_inner + o_place.to(tl.int64) * (INNER if p_scales is None else (INNER + BLOCK - 1) // BLOCK * BLOCK)
    MASKED: tl.constexpr = TRANSPOSED and HIDDEN % TILE != 0
    weight = p_weight, p_scales, o_row.to(tl.int64), m_row
    b_part = _either_product(
        *weight, p_rows, m_place, HIDDEN, INNER, TRANSPOSED, MASKED, LAUNCH, ASSEMBLY, ROWS, STAGES
    )
    if p_bias is not None:
        b_part += tl.load(p_bias + o_row, mask=m_row, other=0.0).to(tl.float32)[:, None]
    m_out = m_row[:, None] & m_place[None, :]
    tl.store(p_out + o_pair[None, :] * HIDDEN + o_out[:, None], b_part.to(p_out.dtype.element_ty), mask=m_out)


@triton.jit
def _down(
    p_inner,
    p_weight,
    p_scales,
    p_bias,
    p_order,
    p_expert,
    p_begin,
    p_end,
    p_out,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    LAUNCH: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    part, group = tl.program_id(1), tl.program_id(2)
    begin = tl.load(p_begin + group)
    end = tl.load(p_end + group)
    if end > begin:
        expert = tl.load(p_expert + group).to(tl.int64)
        p_mine = p_weight + expert * (HIDDEN * (INNER if p_scales is None else INNER // 8))
        if p_scales is not None:
            p_scales += expert * (HIDDEN * (INNER // GROUP))
        if p_bias is not None:
            p_bias += expert * HIDDEN
        given = p_inner, p_mine, p_scales, p_bias, p_order, p_out, end
        if end - begin > LAUNCH.medium:
            for first in range(begin + part * LAUNCH.large, end, LAUNCH.large * tl.num_programs(1)):
                _down_rows(*given, first, HIDDEN, INNER, TRANSPOSED, LAUNCH, ASSEMBLY, LAUNCH.large, True)
        elif part == 0:
            if LAUNCH.medium > LAUNCH.small and end - begin > LAUNCH.small:
                _down_rows(*given, begin, HIDDEN, INNER, TRANSPOSED, LAUNCH, ASSEMBLY, LAUNCH.medium, True)
            else:
                _down_rows(*given, begin, HIDDEN, INNER, TRANSPOSED, LAUNCH, ASSEMBLY, LAUNCH.small, False)


@triton.jit
def _weighted_sum(
    p_parts,
    p_weights,
    p_shared,
    p_gate,
    p_out,
    CHOICES: tl.constexpr,
    HIDDEN: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_h = o_h < HIDDEN
    b_sum = tl.zeros((BLOCK,), tl.float32)
    if p_shared is not None:
        b_sum = tl.load(p_shared + token * HIDDEN + o_h, mask=m_h, other=0.0).to(tl.float32)
        if p_gate is not None:
            b_sum *= 1.0 / (1.0 + tl.exp(-tl.load(p_gate + token).to(tl.float32)))
    for k in tl.static_range(CHOICES):
        b_part = tl.load(p_parts + (token * CHOICES + k) * HIDDEN + o_h, mask=m_h, other=0.0).to(tl.float32)
        b_sum += b_part if SCALES else tl.load(p_weights + token * CHOICES + k).to(tl.float32) * b_part
    tl.store(p_out + token * HIDDEN + o_h, b_sum.to(p_out.dtype.element_ty), mask=m_h)


def experts(
    x: Tensor,
    gate_up: Tensor | StoredExperts,
    down: Tensor | StoredExperts,
    chosen: Tensor,
    weights: Tensor,
    kind: Expert = SWIGLU,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
    ordered: bool = False,
) -> Tensor:
    """`reference.experts`: x [T, H], gate_up [E, 2 * I, H], down [E, H, I], chosen [T, K] int64, weights [T, K] -> [T,
    H], contiguous.

    x (its rows a fixed distance apart), gate_up and down (each contiguous, or the transposed view of a contiguous one,
    or both MXFP4, which is dequantised in registers and rounded to x's dtype), the biases and `shared` (contiguous) are
    all fp32, fp16 or bf16; chosen (contiguous, 0 to E - 1: the kernels do not look), weights and shared_gate
    (contiguous, any float) come from the router. Nothing depends on the order in which programs run: equal inputs give
    equal bits. For up to 64 tokens that choose different experts each, a chosen expert's weights are read once.

    `ordered` gives a token the same bits whatever others there are: every product sums its depth in order by tensor
    cores, whole, and a token's experts are added up in the order of its choices. Else one token alone takes units of
    its own (`experts_row`).
    """
    (tokens, size), (count, inner) = x.shape, (down.shape[0], down.shape[2])
    if gate_up.shape != (count, 2 * inner, size) or down.shape[1] != size:
        shapes = f"gate_up is {list(gate_up.shape)} and down {list(down.shape)}"
        raise ValueError(f"{shapes}; [E, 2 * I, {size}] and [E, {size}, I] are accepted")
    if (
        chosen.dim() != 2
        or chosen.shape != weights.shape
        or len(chosen) != tokens
        or not chosen.shape[1]
        or chosen.dtype != torch.int64
    ):
        shapes = f"chosen is {chosen.dtype} {list(chosen.shape)} and weights {list(weights.shape)}"
        raise ValueError(f"{shapes}; int64 [{tokens}, K] and [{tokens}, K] are accepted")
    given = (
        ("gate_up_bias", gate_up_bias, (count, 2 * inner)),
        ("down_bias", down_bias, (count, size)),
        ("shared", shared, (tokens, size)),
        ("shared_gate", shared_gate, (tokens, 1)),
        ("chosen", chosen, chosen.shape),
        ("weights", weights, chosen.shape),
    )
    for name, tensor, shape in given:
        if tensor is not None and (tensor.shape != shape or not tensor.is_contiguous()):
            raise ValueError(
                f"{name} is {list(tensor.shape)} with strides {tensor.stride()}; contiguous {list(shape)} is accepted"
            )
    if shared_gate is not None and shared is None:
        raise ValueError("shared_gate gates what the shared expert gave: pass shared as well")
    (taken_in, turned_in), (taken_out, turned_out) = _taken(gate_up, "gate_up"), _taken(down, "down")
    dense = [weight for weight, scales in (taken_in, taken_out) if scales is None]
    dtypes = {tensor.dtype for tensor in (x, *dense, gate_up_bias, down_bias, shared) if tensor is not None}
    if len(dtypes) > 1 or len(dense) == 1:
        told = ", ".join(f"{name} {each[0].dtype}" for name, each in (("gate_up", taken_in), ("down", taken_out)))
        raise ValueError(f"x is {x.dtype}, {told}; these, biases and shared must have one dtype, or both be MXFP4")
    choices, pairs = chosen.shape[1], chosen.numel()
    out = x.new_empty((tokens, size))
    if out.numel() == 0:
        return out
    if tokens == 1 and not ordered and not turned_in and not turned_out:
        return experts_row(
            x,
            taken_in,
            taken_out,
            chosen,
            weights,
            kind,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            shared=shared,
            shared_gate=shared_gate,
        )
    rows, pdl = rows_of(x, "x"), dependent(x.device)
    groups = pairs if tokens == 1 else min(pairs, count)
    if tokens == 1:  # a choice is a group, as it stands
        places, expert = _places(pairs, x.device), chosen
        order, begin, end = places[:-1], places[:-1], places[1:]
    else:
        order, expert, begin, end = torch.empty(pairs + 3 * groups, dtype=torch.int32, device=x.device).split(
            [pairs, groups, groups, groups]
        )
        block = min(GROUP_BLOCK, max(32, triton.next_power_of_2(pairs)))
        _group[(count,)](
            chosen,
            order,
            expert,
            begin,
            end,
            pairs,
            BY_EXPERT=pairs >= count,
            BLOCK=block,
            num_warps=max(1, block // 256),
            **pdl,
        )

    stored = taken_in[1] is not None
    launch = experts_launch_for(tokens, x.dtype, turned_in and turned_out, is_hopper(x.device), stored)
    width, inner_width = size, inner
    if stored:
        width, inner_width = (triton.cdiv(each, BLOCK.value) * BLOCK.value for each in (size, inner))
        placed = x.new_empty((tokens, width))
        _in_places[(tokens, width // BLOCK.value)](
            rows, placed, rows.stride(0), HIDDEN=size, WIDTH=width, num_warps=1, **pdl
        )
        rows = placed
    activated, parts = x.new_empty((pairs, inner_width)), x.new_empty((pairs, size))
    assembly = group_assembly(x.dtype) if stored and runs_ptx(x.device) else None
    same = pdl | {"ASSEMBLY": assembly, "num_warps": launch.warps}
    row = launch.depth * x.element_size()
    line = launch.depth // 2 if stored else row
    small_stages = stages_within(launch.small_stages, launch.tile * line + launch.small * row, x.device)
    large_stages = stages_within(launch.large_stages, launch.tile * line + launch.large * row, x.device)
    launch = replace(launch, small_stages=small_stages, large_stages=large_stages)
    parts_of_group = max(1, min(MOST_PARTS, pairs // (groups * launch.large)))
    _gate_up[(triton.cdiv(2 * inner, launch.tile), parts_of_group, groups)](
        rows,
        *taken_in,
        gate_up_bias,
        weights,
        order,
        expert,
        begin,
        end,
        activated,
        rows.stride(0),
        CHOICES=choices,
        HIDDEN=size,
        INNER=inner,
        TRANSPOSED=turned_in,
        KIND=kind,
        LAUNCH=launch if stored else _fitting(launch, size),
        **same,
    )
    _down[(triton.cdiv(size, launch.tile), parts_of_group, groups)](
        activated,
        *taken_out,
        down_bias,
        order,
        expert,
        begin,
        end,
        parts,
        HIDDEN=size,
        INNER=inner,
        TRANSPOSED=turned_out,
        LAUNCH=launch if stored else _fitting(launch, inner),
        **same,
    )
    block = min(SUM_BLOCK, max(16, triton.next_power_of_2(size)))
    _weighted_sum[(tokens, triton.cdiv(size, block))](
        parts,
        weights,
        shared,
        shared_gate,
        out,
        CHOICES=choices,
        HIDDEN=size,
        SCALES=kind.scales_input,
        BLOCK=block,
        num_warps=max(1, block // 256),
        **pdl,
    )
    return out


@constant
def _places(count: int, device: torch.device) -> Tensor:
    """0 to count [count + 1] int32."""
    return torch.arange(count + 1, dtype=torch.int32, device=device)


def _taken(weight: Tensor | StoredExperts, name: str) -> tuple[tuple[Tensor, Tensor | None], bool]:
    """A weight as the kernels take it: itself and None, or words and scales; and whether it is transposed."""
    if isinstance(weight, Tensor):
        turned = not weight.is_contiguous()
        if turned and not weight.transpose(1, 2).is_contiguous():
            told = f"{name} has strides {weight.stride()}: it, or it transposed, must be contiguous"
            raise ValueError(f"{told}; pass {name}.contiguous()")
        return (weight, None), turned
    lines = weight.lines
    whole = lines.codes.is_contiguous() and lines.codes.data_ptr() % 4 == 0
    if lines.kind != MXFP4 or lines.block != (1, GROUP.value) or not whole:
        told = f"{name} is {lines.kind} in blocks of {lines.block}, strides {lines.codes.stride()}"
        raise ValueError(f"{told}; contiguous MXFP4 in groups of {GROUP.value} at whole words is accepted: clone it")
    return (lines.codes.view(torch.int32), lines.scales.view(torch.uint8)), False


def _fitting(launch: ExpertsLaunch, depth: int) -> ExpertsLaunch:
    """The launch with blocks that are less deep than a product. Triton begins the sum of a depth that is one block with
    the bias, and adds it to that of several at the end: so those of other launches would round otherwise."""
    return replace(launch, depth=min(launch.depth, max(16, int(triton.next_power_of_2(depth)) // 2)))
