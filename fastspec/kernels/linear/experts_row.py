"""A mixture of experts for one token, in two launches: no tensor cores, no order of pairs, no sums in memory.

K experts of E answer the token, H hidden size, I expert size. The first launch makes what is between an expert's two
products, a program for CHANNELS of one expert; the second makes CHANNELS of the result, and goes through the experts.
Weights that lie transposed are left to `experts.py`: a row of such a weight is no line of memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.launch import dependent, runs_ptx, wait_for_previous
from fastspec.kernels.linear.launches import RowLaunch
from fastspec.kernels.linear.reference import Expert
from fastspec.kernels.linear.swiglu import gated
from fastspec.kernels.quantised.conversions import group_assembly
from fastspec.kernels.quantised.mxfp4 import GROUP, wide_numbers

EACH = tl.constexpr(8)  # neighbours whose products a thread adds up first: 16 bytes of half precision


@triton.jit
def _stored_sums(
    p_weight,
    p_scales,
    o_row,
    m_row,
    p_x,
    DEPTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """`_sums` of MXFP4 weights: each of BLOCK channels has a sum of its own until the end."""
    o_line = o_row.to(tl.int64)[:, None]
    b_sums = tl.zeros([CHANNELS, BLOCK], tl.float32)
    for start in tl.static_range(0, DEPTH, BLOCK):
        o_k, o_word = start + tl.arange(0, BLOCK), start // 8 + tl.arange(0, BLOCK // 8)
        o_group = tl.arange(0, BLOCK // GROUP) + start // GROUP
        m_word, m_group = o_word < DEPTH // 8, o_group < DEPTH // GROUP
        p_words, p_factors = p_weight + o_line * (DEPTH // 8) + o_word, p_scales + o_line * (DEPTH // GROUP) + o_group
        b_words = tl.load(p_words, mask=m_word[None, :] & m_row[:, None], other=0)
        b_scales = tl.load(p_factors, mask=m_group[None, :] & m_row[:, None], other=0)
        b_x = tl.load(p_x + o_k, mask=o_k < DEPTH, other=0.0)
        b_sums += wide_numbers(b_words, b_scales, p_x.dtype.element_ty, ASSEMBLY) * b_x.to(tl.float32)[None, :]
    return tl.sum(b_sums, 1)


@triton.jit
def _dense_sums(p_weight, o_row, m_row, p_x, DEPTH: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    """`_sums` of dense weights."""
    b_sums = tl.zeros([CHANNELS, BLOCK // EACH], tl.float32)
    for start in tl.static_range(0, DEPTH, BLOCK):
        o_k = start + tl.arange(0, BLOCK)
        m_k = o_k < DEPTH
        b_x = tl.load(p_x + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_w = tl.load(
            p_weight + o_row.to(tl.int64)[:, None] * DEPTH + o_k[None, :], mask=m_k[None, :] & m_row[:, None], other=0.0
        )
        b_sums += tl.sum(tl.reshape(b_w.to(tl.float32) * b_x[None, :], [CHANNELS, BLOCK // EACH, EACH]), 2)
    return tl.sum(b_sums, 1)


@triton.jit
def _sums(
    p_weight,
    p_scales,
    o_row,
    m_row,
    p_x,
    DEPTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Rows o_row of a weight [., DEPTH] times x [DEPTH] -> [CHANNELS] fp32."""
    if p_scales is None:
        b_sums = _dense_sums(p_weight, o_row, m_row, p_x, DEPTH, CHANNELS, BLOCK)
    else:
        b_sums = _stored_sums(p_weight, p_scales, o_row, m_row, p_x, DEPTH, CHANNELS, BLOCK, ASSEMBLY)
    return b_sums


@triton.jit
def _with_bias(b_sum, p_bias, o_row, m_row):
    if p_bias is not None:
        b_sum += tl.load(p_bias + o_row, mask=m_row, other=0.0).to(tl.float32)
    return b_sum


@triton.jit
def _inner_row(
    p_x,
    p_weight,
    p_scales,
    p_bias,
    p_shares,
    p_chosen,
    p_out,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    KIND: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Out [K, I] of x [H]."""
    wait_for_previous(PDL)
    choice = tl.program_id(1)
    expert = tl.load(p_chosen + choice)
    p_weight += expert * (2 * INNER * (HIDDEN if p_scales is None else HIDDEN // 8))
    if p_scales is not None:
        p_scales += expert * (2 * INNER * (HIDDEN // GROUP))
    if p_bias is not None:
        p_bias += expert * (2 * INNER)
    share = 1.0
    if KIND.scales_input:
        share = tl.load(p_shares + choice).to(tl.float32)
    o_i = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    m_i = o_i < INNER
    dtype = p_out.dtype.element_ty
    o_gate = 2 * o_i if KIND.interleaved else o_i
    o_up = 2 * o_i + 1 if KIND.interleaved else INNER + o_i
    if p_scales is None:
        b_gate = _dense_sums(p_weight, o_gate, m_i, p_x, HIDDEN, CHANNELS, BLOCK)
        b_up = _dense_sums(p_weight, o_up, m_i, p_x, HIDDEN, CHANNELS, BLOCK)
    else:  # both at once: what is read of x and made of it serves two lines
        o_both, m_both = tl.ravel(tl.join(o_gate, o_up)), tl.ravel(tl.join(m_i, m_i))
        b_both = _stored_sums(p_weight, p_scales, o_both, m_both, p_x, HIDDEN, 2 * CHANNELS, BLOCK, ASSEMBLY)
        b_gate, b_up = tl.split(tl.reshape(b_both, [CHANNELS, 2]))
    b_gate, b_up = b_gate * share, b_up * share
    b_gate = _with_bias(b_gate, p_bias, o_gate, m_i).to(dtype)
    b_up = _with_bias(b_up, p_bias, o_up, m_i).to(dtype)
    GATE: tl.constexpr = KIND.gate
    tl.store(p_out + choice * INNER + o_i, gated(b_gate, b_up, GATE, KIND.offset, KIND.limit), mask=m_i)


@triton.jit
def _down_row(
    p_inner,
    p_weight,
    p_scales,
    p_bias,
    p_shares,
    p_chosen,
    p_shared,
    p_gate,
    p_out,
    CHOICES: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    SCALES: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Out [H] of inner [K, I]."""
    wait_for_previous(PDL)
    o_h = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    m_h = o_h < HIDDEN
    b_sum = tl.zeros([CHANNELS], tl.float32)
    if p_shared is not None:
        b_sum = tl.load(p_shared + o_h, mask=m_h, other=0.0).to(tl.float32)
        if p_gate is not None:
            b_sum *= 1.0 / (1.0 + tl.exp(-tl.load(p_gate).to(tl.float32)))
    for k in tl.static_range(CHOICES):
        expert = tl.load(p_chosen + k)
        p_mine = p_weight + expert * (HIDDEN * (INNER if p_scales is None else INNER // 8))
        p_factors = None if p_scales is None else p_scales + expert * (HIDDEN * (INNER // GROUP))
        b_part = _sums(p_mine, p_factors, o_h, m_h, p_inner + k * INNER, INNER, CHANNELS, BLOCK, ASSEMBLY)
        b_part = _with_bias(b_part, None if p_bias is None else p_bias + expert * HIDDEN, o_h, m_h)
        b_part = b_part.to(p_out.dtype.element_ty).to(tl.float32)
        b_sum += b_part if SCALES else tl.load(p_shares + k).to(tl.float32) * b_part
    tl.store(p_out + o_h, b_sum.to(p_out.dtype.element_ty), mask=m_h)


INNER, DOWN = RowLaunch(1, 2048, 4), RowLaunch(1, 1024, 2)
"""Of the two launches. On an H200 the fastest for Qwen3-30B-A3B's layers, and within 2 % of that for Mixtral's."""
STORED = RowLaunch(2, 1024, 2)
"""Of both where weights are MXFP4: a thread takes a whole group of a line, by the fewest instructions a weight that
leave as many programs as there are places for (counted, not timed)."""


def _block(launch: RowLaunch, depth: int) -> int:
    return min(launch.depth, max(16, int(triton.next_power_of_2(depth))))


def experts_row(
    x: Tensor,
    gate_up: tuple[Tensor, Tensor | None],
    down: tuple[Tensor, Tensor | None],
    chosen: Tensor,
    weights: Tensor,
    kind: Expert,
    *,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    shared: Tensor | None,
    shared_gate: Tensor | None,
) -> Tensor:
    """`experts` of checked arguments with T = 1, all contiguous: x [1, H] -> [1, H]. A weight is itself and None, or
    the words and the scales of MXFP4."""
    size, choices = x.shape[1], chosen.shape[1]
    stored = down[1] is not None
    inner = down[0].shape[-1] * (8 if stored else 1)
    first, second = (STORED, STORED) if stored else (INNER, DOWN)
    assembly = group_assembly(x.dtype) if stored and runs_ptx(x.device) else None
    activated, out, pdl = x.new_empty((choices, inner)), x.new_empty((1, size)), dependent(x.device)
    _inner_row[(triton.cdiv(inner, first.channels), choices)](
        x,
        *gate_up,
        gate_up_bias,
        weights,
        chosen,
        activated,
        HIDDEN=size,
        INNER=inner,
        KIND=kind,
        CHANNELS=first.channels,
        BLOCK=_block(first, size),
        ASSEMBLY=assembly,
        num_warps=first.warps,
        **pdl,
    )
    _down_row[(triton.cdiv(size, second.channels),)](
        activated,
        *down,
        down_bias,
        weights,
        chosen,
        shared,
        shared_gate,
        out,
        CHOICES=choices,
        HIDDEN=size,
        INNER=inner,
        SCALES=kind.scales_input,
        CHANNELS=second.channels,
        BLOCK=_block(second, inner),
        ASSEMBLY=assembly,
        num_warps=second.warps,
        **pdl,
    )
    return out
