"""Linear layers of few rows in Triton, as fast as their weights can be read; whole, or as parts that the next kernel
adds up.

R rows, K input channels, M output channels, S parts. A program takes BM output channels and their whole depth, in steps
of BK. A tile [BM, BK] of the weights is the left operand of the product, so that the tensor cores' 64 (or 16) lines are
output channels and their narrow side is BR, the rows padded to a power of 2. One row has a kernel of its own, row.py,
and so have few rows or few weights on Hopper, hopper.py.

Of a product in parts a program takes one part of the depth: tiles wide enough that the rows are seldom read again, and
one program for each multiprocessor. Nobody waits for the others: what waits for the sums is the next launch, which
reads them where it would have read the product (`rms_norm`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from fastspec.kernels.arguments import dtypes_of
from fastspec.kernels.launch import dependent, has_descriptors, padded, prefetch, stages_within
from fastspec.kernels.linear import swiglu as swiglu_kernel
from fastspec.kernels.linear.hopper import hopper_linear, takes
from fastspec.kernels.linear.launches import (
    MAX_ROWS,
    MOST_TUNED,
    HopperLaunch,
    Launch,
    RowLaunch,
    hopper_launch_for,
    hopper_parts,
    launch_for,
    parts_launch_for,
)
from fastspec.kernels.linear.reference import SILU, Activation, Parts, opened
from fastspec.kernels.linear.row import linear_row
from fastspec.kernels.linear.swiglu import gated
from fastspec.kernels.tuned_launches import MISSING, find

PREFETCH = tl.constexpr(512)
"""Bytes at most, a multiple of 16, of each line of a program's first tile that are fetched into L2 ahead."""


@triton.jit
def _weights(p_w, d_w, first, o_m, o_k, lines, K, stride_w, BK: tl.constexpr, EVEN_K: tl.constexpr, TMA: tl.constexpr):
    """Weights [BM, BK] from lines first + o_m, columns o_k on; past the last line they are any of them or zero, past K
    zero."""
    if TMA:
        b_w = d_w.load([first, o_k])
    else:
        o_rows = tl.minimum(first + o_m, lines - 1).to(tl.int64)
        o_cols = o_k + tl.arange(0, BK)
        p_tile = p_w + o_rows[:, None] * stride_w + o_cols[None, :]
        if EVEN_K:  # noqa: SIM108
            b_w = tl.load(p_tile)
        else:
            b_w = tl.load(p_tile, mask=o_cols[None, :] < K, other=0.0)
    return b_w


@triton.jit(do_not_specialize=["R"])
def _linear_kernel(
    p_x,
    p_w,
    d_w,
    p_bias,
    p_out,
    R,
    M,
    K,
    stride_x,
    stride_w,
    BM: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
    SWIGLU: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    KIND: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Out [R, M] of x [R, K] and w [M, K], or [2 * M, K] under SWIGLU; d_w is w's descriptor under TMA and None
    otherwise."""
    first = tl.program_id(0) * BM
    lines = M
    if SWIGLU:
        lines = 2 * M
    o_m = tl.arange(0, BM)
    o_r = tl.arange(0, BR)
    o_bk = tl.arange(0, BK)
    m_r = o_r < R

    if PDL:
        gdc_launch_dependents()
        # no earlier kernel writes weights, so the first of them may be on their way while the one before is still
        # running
        o_first = tl.minimum(first + o_m, M - 1).to(tl.int64)
        size = tl.minimum(K * (p_w.dtype.element_ty.primitive_bitwidth // 8), PREFETCH)
        prefetch(p_w + o_first * stride_w, size)
        if SWIGLU:
            prefetch(p_w + (o_first + M) * stride_w, size)
        gdc_wait()

    p_rows = p_x + o_r[:, None].to(tl.int64) * stride_x
    b_sum = tl.zeros([BM, BR], tl.float32)
    b_up = tl.zeros([BM, BR], tl.float32)
    for o_k in tl.range(0, K, BK, num_stages=STAGES):
        m_x = m_r[:, None]
        if not EVEN_K:
            m_x = m_x & ((o_k + o_bk) < K)[None, :]
        b_x = tl.load(p_rows + (o_k + o_bk)[None, :], mask=m_x, other=0.0)
        b_w = _weights(p_w, d_w, first, o_m, o_k, lines, K, stride_w, BK, EVEN_K, TMA)
        b_sum = tl.dot(b_w, tl.trans(b_x), b_sum, input_precision="ieee")
        if SWIGLU:
            b_w = _weights(p_w, d_w, first + M, o_m, o_k, lines, K, stride_w, BK, EVEN_K, TMA)
            b_up = tl.dot(b_w, tl.trans(b_x), b_up, input_precision="ieee")

    o_i = first + o_m
    m_i = o_i < M
    if BIAS:
        b_sum += tl.load(p_bias + o_i, mask=m_i, other=0.0).to(tl.float32)[:, None]
    b_out = b_sum.to(p_out.dtype.element_ty)
    if SWIGLU:
        if BIAS:
            b_up += tl.load(p_bias + M + o_i, mask=m_i, other=0.0).to(tl.float32)[:, None]
        b_out = gated(b_out, b_up.to(p_out.dtype.element_ty), KIND)
    tl.store(p_out + o_r[None, :].to(tl.int64) * M + o_i[:, None], b_out, mask=m_i[:, None] & m_r[None, :])


_SERVED = ({torch.bfloat16}, {torch.float16}, {torch.float32})


def _lie(*operands: Tensor | None) -> bool:
    """True where the last dimension of each is contiguous."""
    return all(operand is None or operand.stride(-1) == 1 for operand in operands)


def _chosen(op: str, x: Tensor, weight: Tensor, rows: int, channels: int) -> Launch | RowLaunch | HopperLaunch | None:
    """The launch of an op, "linear", "gate_up" or "linear_parts", of x [..., K] in so many rows, by its device too."""
    depth, swiglu, hopper = weight.shape[1], op == "gate_up", False
    if rows and x.shape[-1] == depth:
        hopper = takes(x.reshape(rows, depth), weight)
        if rows <= MOST_TUNED and x.dtype != torch.float32:
            place = 1 if rows == 1 else padded(rows), channels, depth, x.dtype
            found = find(op, x.device, place, (rows, channels, depth, x.dtype))
            if found is not MISSING and (hopper or not isinstance(found, HopperLaunch)):
                return found  # type: ignore[no-any-return]
    if op == "linear_parts":
        parts = hopper_parts(rows, channels, depth) if hopper else 1
        return (
            hopper_launch_for(rows, channels, depth, parts=parts)
            if parts > 1
            else parts_launch_for(rows, channels, depth, x.dtype)
        )
    launch = hopper_launch_for(rows, channels, depth, swiglu) if hopper else None
    return launch_for(rows, channels, depth, x.dtype, swiglu) if launch is None else launch


def row_launch_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> RowLaunch | None:
    """The launch of x [..., K] times weight [M, K] where that is one row's, else None; the table's, where torch or
    another kernel was found to be faster by itself."""
    channels, depth = weight.shape
    if dtypes_of(x, weight, bias) not in _SERVED or not _lie(x, weight, bias) or not depth or x.numel() != depth:
        return None
    for launch in (_chosen("linear", x, weight, 1, channels), launch_for(1, channels, depth, x.dtype)):
        if isinstance(launch, RowLaunch):
            return launch
    return None


def gate_up(x: Tensor, weight: Tensor, bias: Tensor | None, kind: Activation = SILU) -> Tensor:
    """`reference.gate_up`: gate and up of x [..., K] times a packed weight [2 * M, K], plus bias [2 * M], joined ->
    [..., M]."""
    rows = x.numel() // max(1, x.shape[-1])
    launch = _chosen("gate_up", x, weight, rows, weight.shape[0] // 2)
    if launch is None:
        return swiglu_kernel.swiglu(linear(x, weight, bias), kind)
    return linear(x, weight, bias, swiglu=True, launch=launch, kind=kind)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    swiglu: bool = False,
    launch: Launch | RowLaunch | HopperLaunch | None = None,
    kind: Activation = SILU,
    out: Tensor | None = None,
) -> Tensor:
    """x [..., K] times weight [M, K] transposed, plus bias [M] -> [..., M] in x's dtype, summed in fp32 and rounded
    once.

    With swiglu the weight [2 * M, K] and the bias [2 * M] hold a gate, then an up-projection, and the result [..., M]
    is what `reference.gate_up` makes of them, rounded where it rounds. dtype is bfloat16, float16 or float32, the same
    for all. The last dimension of x, weight and bias must be contiguous (ValueError otherwise); the lines of x and
    weight may lie apart.

    More than MAX_ROWS rows, empty products, other dtypes, gradients and what no table has a launch for (most products
    of more than 64 rows, bound by the tensor cores, where cuBLAS is at home) go to F.linear. `launch` overrides the
    tables; a Launch holds all rows at once, of which 64 fit. `out` [..., M], contiguous, takes the result of a launch.
    """
    channels, depth = weight.shape
    if x.shape[-1] != depth or (swiglu and channels % 2):
        raise ValueError(
            f"x {tuple(x.shape)} does not fit weight {tuple(weight.shape)}: wants [..., K] and [M, K], M even for "
            "swiglu"
        )
    if any(operand is not None and operand.stride(-1) != 1 < operand.shape[-1] for operand in (x, weight, bias)):
        raise ValueError(
            f"strides of x {x.stride()} and weight {weight.stride()}: the last, and bias's, must be 1; call "
            ".contiguous()"
        )
    rows = x.numel() // depth if depth else 0
    width = channels // 2 if swiglu else channels
    if dtypes_of(x, weight, bias) not in _SERVED or not 0 < rows <= MAX_ROWS or not width:
        launch = None
    elif launch is None:
        launch = _chosen("gate_up" if swiglu else "linear", x, weight, rows, width)
    if launch is None:
        out = F.linear(x, weight, bias)
        return opened(out[..., :width], kind) * out[..., width:] if swiglu else out
    flat = x.reshape(rows, depth)
    out = x.new_empty(*x.shape[:-1], width) if out is None else out
    if isinstance(launch, RowLaunch):
        if rows > 1:
            raise ValueError(f"{launch} multiplies one row, not {rows}: give a Launch")
        linear_row(flat, weight, bias, out, launch, swiglu, kind)
    elif isinstance(launch, HopperLaunch):
        hopper_linear(flat, weight, bias, out, launch, swiglu, kind)
    else:
        _launch(flat, weight, bias, out, launch, swiglu, kind)
    return out


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, launch: Launch, swiglu: bool, kind: Activation
) -> None:
    """Fill out [..., M], contiguous, with the product of x [R, K]."""
    rows, depth = x.shape
    width = out.shape[-1]
    lined_up = (weight.data_ptr() | weight.stride(0) * weight.element_size() | depth * weight.element_size()) % 16 == 0
    tma = launch.tma and lined_up and has_descriptors(x.device)
    tiles = launch.channels * launch.depth * (1 + swiglu) + padded(rows) * launch.depth
    stages = stages_within(launch.stages, tiles * x.element_size(), x.device)
    _linear_kernel[(-(-width // launch.channels),)](
        x,
        weight,
        TensorDescriptor.from_tensor(weight, [launch.channels, launch.depth]) if tma else None,
        bias,
        out,
        rows,
        width,
        depth,
        x.stride(0),
        weight.stride(0),
        BM=launch.channels,
        BK=launch.depth,
        BR=padded(rows),
        SWIGLU=swiglu,
        BIAS=bias is not None,
        EVEN_K=depth % launch.depth == 0,
        KIND=kind,
        TMA=tma,
        STAGES=stages,
        num_warps=launch.warps,
        num_stages=stages,
        **(dependent(x.device) if lined_up else {"PDL": False}),
    )


@triton.jit(do_not_specialize=["R"])
def _parts_kernel(
    p_x,
    p_w,
    p_bias,
    p_out,
    R,
    M,
    steps,
    stride_x,
    stride_w,
    BM: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
    S: tl.constexpr,
    BIAS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Out [S, R, M] fp32 of x [R, K] and w [M, K]: part s is over the s-th share of the steps of BK channels."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tile, part = tl.program_id(0) // S, tl.program_id(0) % S
    first, last = steps * part // S, steps * (part + 1) // S
    o_m, o_r, o_k = tile * BM + tl.arange(0, BM), tl.arange(0, BR), tl.arange(0, BK)
    m_m, m_r = o_m < M, o_r < R
    p_lines = p_w + tl.minimum(o_m, M - 1).to(tl.int64) * stride_w + first * BK
    p_rows = p_x + o_r.to(tl.int64) * stride_x + first * BK
    b_sum = tl.zeros([BM, BR], tl.float32)
    for step in tl.range(0, last - first, num_stages=STAGES):
        b_x = tl.load(p_rows[:, None] + (step * BK + o_k)[None, :], mask=m_r[:, None], other=0.0)
        b_w = tl.load(p_lines[:, None] + (step * BK + o_k)[None, :])
        b_sum = tl.dot(b_w, tl.trans(b_x), b_sum, input_precision="ieee")
    if BIAS:
        b_bias = tl.load(p_bias + o_m, mask=m_m, other=0.0).to(tl.float32)
        b_sum += tl.where(part == 0, b_bias, 0.0)[:, None]
    o_out = (part * R + o_r)[None, :].to(tl.int64) * M + o_m[:, None]
    tl.store(p_out + o_out, b_sum, mask=m_m[:, None] & m_r[None, :])


def linear_parts(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, launch: Launch | RowLaunch | HopperLaunch | None = None
) -> Tensor | Parts:
    """`linear` of x [..., K] and weight [M, K], bias [M]: the product [..., M], or the parts that it is the sum of, a
    bias in the first.

    Shapes, strides and dtypes as `linear` has them. `launch` overrides the table; its depth must divide K (ValueError
    otherwise). Without a launch for the size, and where gradients are wanted, it is `linear`.
    """
    channels, depth = weight.shape
    rows = x.numel() // depth if depth else 0
    if launch is None and len(dtypes_of(x, weight, bias)) == 1 and _lie(x, weight, bias) and x.shape[-1] == depth:
        launch = _chosen("linear_parts", x, weight, rows, channels)
    if launch is None or isinstance(launch, RowLaunch):
        return linear(x, weight, bias)
    if x.shape[-1] != depth or depth % launch.depth or not rows:
        raise ValueError(
            f"x {tuple(x.shape)} and weight {tuple(weight.shape)}: {launch} wants [..., K], [M, K], K a multiple of "
            "its depth"
        )
    flat, steps = x.reshape(rows, depth), depth // launch.depth
    parts = min(launch.parts, steps)
    out = torch.empty((parts, rows, channels), dtype=torch.float32, device=x.device)
    if isinstance(launch, HopperLaunch):
        hopper_linear(flat, weight, bias, out, replace(launch, parts=parts))
        return Parts(out.view(parts, *x.shape[:-1], channels), x.dtype)
    stages = stages_within(launch.stages, (launch.channels + padded(rows)) * launch.depth * x.element_size(), x.device)
    _parts_kernel[(triton.cdiv(channels, launch.channels) * parts,)](
        flat,
        weight,
        bias,
        out,
        rows,
        channels,
        steps,
        flat.stride(0),
        weight.stride(0),
        BM=launch.channels,
        BK=launch.depth,
        BR=padded(rows),
        S=parts,
        BIAS=bias is not None,
        STAGES=stages,
        num_warps=launch.warps,
        num_stages=stages,
        **dependent(x.device),
    )
    return Parts(out.view(parts, *x.shape[:-1], channels), x.dtype)
