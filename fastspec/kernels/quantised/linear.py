"""Linear layers of stored weights in Triton: codes are read as bytes and dequantised in registers.

R rows, K input channels, M output channels. A program takes BM output channels, at most TALLEST rows and the whole
depth, in steps of BK that lie within a scale's block, and sums it in order, in steps of 16. So the bits of a row follow
from the weight alone, whatever stands beside it (docs/exact.md), and are those of the ordered product of the
dequantised weight where that does not cut the depth. More than MAX_ROWS rows take torch's product of the dequantised
weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.launch import padded, stages_within
from fastspec.kernels.linear import reference as linear_reference
from fastspec.kernels.linear.launches import MAX_ROWS, Launch
from fastspec.kernels.linear.reference import Activation
from fastspec.kernels.quantised import reference
from fastspec.kernels.quantised.reference import Numbers, StoredWeight

TALLEST = 64
"""Rows of a tile."""
DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

UNSIGNED = tl.constexpr(int(Numbers.UNSIGNED))
SIGNED = tl.constexpr(int(Numbers.SIGNED))
FLOAT8 = tl.constexpr(int(Numbers.E4M3))


@triton.jit
def _numbers(b_codes, p_table, NUMBERS: tl.constexpr, LESS: tl.constexpr):
    """What codes [BM, BK] stand for, fp32."""
    if NUMBERS == UNSIGNED:
        b_out = b_codes.to(tl.float32) - LESS
    elif NUMBERS == SIGNED:
        b_out = b_codes.to(tl.int8, bitcast=True).to(tl.float32)
    elif NUMBERS == FLOAT8:  # by bits: devices before 8.9 have no conversion; fp16 holds them all, 2 ** -8 as large
        b_wide = b_codes.to(tl.uint16)
        b_half = (((b_wide & 0x80) << 8) | ((b_wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
        b_out = tl.where((b_codes & 0x7F) == 0x7F, float("nan"), b_half.to(tl.float32) * 256.0)
    else:
        b_out = tl.load(p_table + b_codes.to(tl.int32)).to(tl.float32)
    return b_out


@triton.jit
def _scales(p_scales, o_at, p_nested, p_factors, p_offset, NESTED: tl.constexpr):
    """Scales at places o_at, fp32; with NESTED they are codes, NESTED of which share a factor."""
    if NESTED:
        b_code = tl.load(p_nested + tl.load(p_scales + o_at).to(tl.int32)).to(tl.float32)
        b_out = b_code * tl.load(p_factors + o_at // NESTED).to(tl.float32) + tl.load(p_offset).to(tl.float32)
    else:
        b_out = tl.load(p_scales + o_at).to(tl.float32)
    return b_out


@triton.jit
def _zeros(p_zeros, o_line, o_group, G, WORDS: tl.constexpr, BITS: tl.constexpr, LESS: tl.constexpr):
    """Zero points of lines o_line in groups o_group, fp32; with WORDS those of 32 / BITS lines share a word."""
    if WORDS:
        PER: tl.constexpr = 32 // BITS
        b_word = tl.load(p_zeros + (o_line // PER) * G + o_group)
        b_out = ((b_word >> ((o_line % PER) * BITS).to(tl.int32)) & ((1 << BITS) - 1)).to(tl.float32) - LESS
    else:
        b_out = tl.load(p_zeros + o_line * G + o_group).to(tl.float32)
    return b_out


@triton.jit(do_not_specialize=["R"])
def _stored_kernel(
    p_x,
    p_codes,
    p_scales,
    p_zeros,
    p_groups,
    p_table,
    p_nested,
    p_factors,
    p_offset,
    p_bias,
    p_out,
    R,
    M,
    K,
    G,
    block_m,
    block_k,
    stride_x,
    stride_codes,
    BM: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
    BITS: tl.constexpr,
    NUMBERS: tl.constexpr,
    LESS: tl.constexpr,
    HIGH_FIRST: tl.constexpr,
    SPREAD: tl.constexpr,
    ZEROS: tl.constexpr,
    WORDS: tl.constexpr,
    NESTED: tl.constexpr,
    ON_SUMS: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    DTYPE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Out [R, M] of x [R, K] and codes [M, K * BITS / 8]; with SPREAD the channels of a step have scales of their
    own, else one for each line."""
    o_m = tl.program_id(0) * BM + tl.arange(0, BM)
    o_r = tl.program_id(1) * BR + tl.arange(0, BR)
    o_bk = tl.arange(0, BK)
    PER: tl.constexpr = 8 // BITS
    o_bytes = tl.arange(0, BK // PER)
    m_m, m_r = o_m < M, o_r < R
    o_line = tl.minimum(o_m, M - 1).to(tl.int64)
    p_lines = p_codes + o_line[:, None] * stride_codes
    p_rows = p_x + o_r[:, None].to(tl.int64) * stride_x
    o_scale = (o_line // block_m) * G
    bytes = (K + PER - 1) // PER

    b_sum = tl.zeros([BM, BR], tl.float32)
    for o_k in tl.range(0, K, BK, num_stages=STAGES):
        o_cols, o_at = o_k + o_bk, o_k // PER + o_bytes
        if EVEN_K:
            b_x = tl.load(p_rows + o_cols[None, :], mask=m_r[:, None], other=0.0)
            b_codes = tl.load(p_lines + o_at[None, :])
        else:
            b_x = tl.load(p_rows + o_cols[None, :], mask=m_r[:, None] & (o_cols < K)[None, :], other=0.0)
            b_codes = tl.load(p_lines + o_at[None, :], mask=(o_at < bytes)[None, :], other=0)
        if BITS == 4:
            b_low, b_high = b_codes & 15, b_codes >> 4
            b_codes = tl.reshape(tl.join(b_high, b_low) if HIGH_FIRST else tl.join(b_low, b_high), [BM, BK])
        b_w = _numbers(b_codes, p_table, NUMBERS, LESS)
        if not ON_SUMS:
            if SPREAD:
                o_near = tl.minimum(o_cols, K - 1)
                o_group = (o_near // block_k if p_groups is None else tl.load(p_groups + o_near))[None, :]
                o_lines, o_scales = o_line[:, None], o_scale[:, None] + o_group
            else:
                o_group = o_k // block_k
                o_lines, o_scales = o_line[:, None], o_scale[:, None] + o_group
            if ZEROS:
                b_w -= _zeros(p_zeros, o_lines, o_group, G, WORDS, BITS, LESS)
            b_w *= _scales(p_scales, o_scales, p_nested, p_factors, p_offset, NESTED)
        b_w = b_w.to(DTYPE).to(p_x.dtype.element_ty)
        b_sum = tl.dot(b_w, tl.trans(b_x), b_sum, input_precision="ieee")

    if ON_SUMS:
        b_sum *= tl.load(p_scales + o_scale).to(tl.float32)[:, None]
    if BIAS:
        b_sum += tl.load(p_bias + o_m, mask=m_m, other=0.0).to(tl.float32)[:, None]
    o_out = o_r[None, :].to(tl.int64) * M + o_m[:, None]
    tl.store(p_out + o_out, b_sum.to(p_out.dtype.element_ty), mask=m_m[:, None] & m_r[None, :])


def launch_of(weight: StoredWeight) -> Launch:
    """The launch of a weight, by its shape and its scales alone; not yet measured."""
    channels, depth = weight.shape
    step = 128 if depth >= 128 else 64
    while step > 32 and weight.block[1] < depth and weight.block[1] % step:
        step //= 2
    return Launch(16 if channels < 4096 else 64, step, 4, 4)


def linear(x: Tensor, weight: StoredWeight, bias: Tensor | None) -> Tensor:
    """`reference.linear` of x [..., K], weight [M, K] and bias [M] -> [..., M] in x's dtype, summed in fp32 and rounded
    once. The last dimension of x must be contiguous (ValueError otherwise)."""
    channels, depth = weight.shape
    if x.shape[-1] != depth or x.stride(-1) != 1 < depth or x.dtype not in DTYPES:
        raise ValueError(
            f"x {tuple(x.shape)} of strides {x.stride()} and {x.dtype} does not fit a stored weight "
            f"{tuple(weight.shape)}: wants [..., K], contiguous in its last dimension, in float32, float16 or bfloat16"
        )
    rows = x.numel() // depth if depth else 0
    operands = [operand for operand in (x, bias) if operand is not None]
    graded = torch.is_grad_enabled() and any(operand.requires_grad for operand in operands)
    if graded or not 0 < rows <= MAX_ROWS or not channels:
        return reference.linear(x, weight, bias)
    out = x.new_empty(*x.shape[:-1], channels)
    _launch(x.reshape(rows, depth), weight, bias, out, launch_of(weight))
    return out


def _launch(x: Tensor, weight: StoredWeight, bias: Tensor | None, out: Tensor, launch: Launch) -> None:
    """Fill out [..., M], contiguous, with the product of x [R, K]."""
    (rows, depth), channels, kind, nested = x.shape, weight.shape[0], weight.kind, weight.nested
    tall = min(TALLEST, padded(rows))
    stage = launch.channels * launch.depth * kind.bits // 8 + tall * launch.depth * x.element_size()
    stages = stages_within(launch.stages, stage, x.device)
    options: dict[str, Any] = {"num_warps": launch.warps, "num_stages": stages}
    _stored_kernel[(-(-channels // launch.channels), -(-rows // tall))](
        x,
        weight.codes,
        weight.scales,
        weight.zeros,
        weight.groups,
        weight.table,
        None if nested is None else nested.table,
        None if nested is None else nested.factors,
        None if nested is None else nested.offset,
        bias,
        out,
        rows,
        channels,
        depth,
        weight.scales.shape[1],
        *weight.block,
        x.stride(0),
        weight.codes.stride(0),
        BM=launch.channels,
        BK=launch.depth,
        BR=tall,
        BITS=kind.bits,
        NUMBERS=int(kind.numbers),
        LESS=kind.less,
        HIGH_FIRST=kind.high_first,
        SPREAD=weight.groups is not None or (weight.block[1] < depth and weight.block[1] % launch.depth != 0),
        ZEROS=weight.zeros is not None,
        WORDS=weight.zeros is not None and weight.zeros.dtype == torch.int32,
        NESTED=0 if nested is None else nested.block,
        ON_SUMS=weight.on_sums,
        BIAS=bias is not None,
        EVEN_K=depth % launch.depth == 0,
        DTYPE=DTYPES[weight.dtype or x.dtype],
        STAGES=stages,
        enable_fp_fusion=False,  # a nested scale is a product and a sum, each rounded
        **options,
    )


def linears(
    x: Tensor, weights: Sequence[StoredWeight], biases: Sequence[Tensor | None], kind: Activation | None = None
) -> Tensor:
    """`reference.linears`, a launch for each weight."""
    return partial(linear_reference.linears, product=linear)(x, weights, biases, kind)  # type: ignore[arg-type]
