"""Linear layers of stored weights in Triton: codes are read as bytes, and become numbers in registers.

R rows, K input channels, M output channels. A program takes BM output channels (as many of a gate and of an up part)
and the whole depth, in steps of BK that lie within a scale's group. The numbers of the codes less their zero point are
exact in 16 bits (a table's are rounded to them); a group's products are summed in order, in steps of 16, the sum is
multiplied by the group's scale, and what comes of the groups is added in their order. Where input channels that lie
beside each other have scales of their own (act-order, groups that no step fits), scales multiply the numbers instead,
which are then rounded. Of 4 bits the even channels of a step come before the odd ones. So the bits of a row follow from
the weight alone, whatever stands beside it (docs/maintainers/same_bits.md). More than MAX_ROWS rows take torch's
product of the dequantised weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from fastspec.kernels.arguments import FLOATS, PACKED, dtypes_of, expect
from fastspec.kernels.launch import dependent, padded, prefetch, runs_ptx, stages_within
from fastspec.kernels.linear import reference as linear_reference
from fastspec.kernels.linear.launches import MAX_ROWS, Launch
from fastspec.kernels.linear.reference import SILU, Activation, Parts
from fastspec.kernels.linear.swiglu import gated
from fastspec.kernels.quantised import reference
from fastspec.kernels.quantised.conversions import assembly
from fastspec.kernels.quantised.hopper import SIDEWAYS, STAGES, hopper_stored, operands_of, parts_of, takes
from fastspec.kernels.quantised.hopper import launch_of as hopper_launch_of
from fastspec.kernels.quantised.launches import StoredLaunch, TunedLaunch, tuned
from fastspec.kernels.quantised.reference import Codes, Numbers, StoredWeight
from fastspec.kernels.quantised.row import launched, stored_row

TALLEST = 64
"""Rows of a tile."""
FEW_ROWS, MOST_ROWS, SHORT = 8, 256, 4096
"""Rows times parts above which parts are left to the norm behind a product, rows up to which, and the depth up to which
it is only up to the rows of a low tile."""
OPS = "stored", "stored_gate_up"
"""Names of products, without and with a gate, in what was tuned."""
DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

UNSIGNED = tl.constexpr(int(Numbers.UNSIGNED))
SIGNED = tl.constexpr(int(Numbers.SIGNED))
FLOAT8 = tl.constexpr(int(Numbers.E4M3))


@triton.jit
def _numbers(b_codes, p_table, CODES: tl.constexpr, DTYPE: tl.constexpr):
    """Numbers that codes of any shape stand for, one by one."""
    if CODES.numbers == UNSIGNED:
        b_out = b_codes.to(tl.float32) - CODES.less
    elif CODES.numbers == SIGNED:
        b_out = b_codes.to(tl.int8, bitcast=True).to(tl.float32)
    elif (
        CODES.numbers == FLOAT8
    ):  # by bits: devices before 8.9 have no conversion; fp16 holds them all, 2 ** -8 as large
        b_wide = b_codes.to(tl.uint16)
        b_half = (((b_wide & 0x80) << 8) | ((b_wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
        b_out = b_half.to(tl.float32) * 256.0
    else:
        b_out = tl.load(p_table + b_codes.to(tl.int32)).to(tl.float32)
    return b_out.to(DTYPE)


@triton.jit
def _halves(b_codes, p_table, CODES: tl.constexpr, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Numbers of bytes: of the even input channels and of the odd ones; of 8 bits the same twice."""
    if CODES.bits == 8:
        if ASSEMBLY is not None:
            b_even = tl.inline_asm_elementwise(ASSEMBLY, "=r,=r,r", [b_codes], dtype=tl.bfloat16, is_pure=True, pack=4)
            b_even = b_even.to(DTYPE, bitcast=True)
        else:
            b_even = _numbers(b_codes, p_table, CODES, DTYPE)
        b_odd = b_even
    elif ASSEMBLY is not None:
        b_even, b_odd = tl.inline_asm_elementwise(
            ASSEMBLY, "=r,=r,=r,=r,r", [b_codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
        b_even, b_odd = b_even.to(DTYPE, bitcast=True), b_odd.to(DTYPE, bitcast=True)
    else:
        b_low = _numbers(b_codes & 15, p_table, CODES, DTYPE)
        b_high = _numbers(b_codes >> 4, p_table, CODES, DTYPE)
        b_even, b_odd = (b_high, b_low) if CODES.high_first else (b_low, b_high)
    return b_even, b_odd


@triton.jit
def _scales(weight, o_at, NESTED: tl.constexpr):
    """Scales at places o_at, fp32; with NESTED they are codes, NESTED of which share a factor."""
    if NESTED:
        b_code = tl.load(weight.nested + tl.load(weight.scales + o_at).to(tl.int32)).to(tl.float32)
        b_out = b_code * tl.load(weight.factors + o_at // NESTED).to(tl.float32) + tl.load(weight.offset).to(tl.float32)
    else:
        b_out = tl.load(weight.scales + o_at).to(tl.float32)
    return b_out


@triton.jit
def _zeros(p_zeros, o_line, o_group, G, CODES: tl.constexpr):
    """Zero points of lines o_line in groups o_group, fp32; in words of int32 those of 32 / bits lines share one."""
    if p_zeros.dtype.element_ty == tl.int32:
        BITS: tl.constexpr = CODES.bits
        PER: tl.constexpr = 32 // BITS
        b_word = tl.load(p_zeros + (o_line // PER) * G + o_group)
        b_out = ((b_word >> ((o_line % PER) * BITS).to(tl.int32)) & ((1 << BITS) - 1)).to(tl.float32) - CODES.less
    else:
        b_out = tl.load(p_zeros + o_line * G + o_group).to(tl.float32)
    return b_out


@triton.jit
def _weighted(b_w, weight, o_line, o_cols, K, CODES: tl.constexpr, NESTED: tl.constexpr):
    """Numbers [BM, C] of input channels o_cols less their zero points, times their scales, rounded to their dtype."""
    o_near = tl.minimum(o_cols, K - 1)
    o_group = (o_near // weight.block_k if weight.groups is None else tl.load(weight.groups + o_near))[None, :]
    b_wide = b_w.to(tl.float32)
    if weight.zeros is not None:
        b_wide -= _zeros(weight.zeros, o_line[:, None], o_group, weight.columns, CODES)
    b_wide *= _scales(weight, (o_line // weight.block_m * weight.columns)[:, None] + o_group, NESTED)
    return b_wide.to(b_w.dtype)


@triton.jit
def _add_step(
    b_sum,
    b_even_x,
    b_odd_x,
    weight,
    o_line,
    o_k,
    K,
    p_table,
    BK: tl.constexpr,
    CODES: tl.constexpr,
    SPREAD: tl.constexpr,
    GROUPED: tl.constexpr,
    NESTED: tl.constexpr,
    EVEN_K: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Sums [BM, BR] and the products of a step's codes with rows [BR, BK / 2] of even and of odd channels, or twice
    [BR, BK]."""
    DTYPE: tl.constexpr = b_even_x.dtype
    PER: tl.constexpr = 8 // CODES.bits
    o_bytes = tl.arange(0, BK // PER)
    p_codes = weight.codes + o_line[:, None] * weight.stride + (o_k // PER + o_bytes)[None, :]
    if EVEN_K:
        b_codes = tl.load(p_codes)
    else:
        b_codes = tl.load(p_codes, mask=(o_k // PER + o_bytes < (K + PER - 1) // PER)[None, :], other=0)
    b_even, b_odd = _halves(b_codes, p_table, CODES, DTYPE, ASSEMBLY)
    o_group = o_k // weight.block_k
    if SPREAD:
        b_even = _weighted(b_even, weight, o_line, o_k + o_bytes * PER, K, CODES, NESTED)
        if PER == 2:
            b_odd = _weighted(b_odd, weight, o_line, o_k + o_bytes * 2 + 1, K, CODES, NESTED)
    elif weight.zeros is not None:
        b_zero = _zeros(weight.zeros, o_line, o_group, weight.columns, CODES).to(DTYPE)[:, None]
        b_even -= b_zero
        b_odd -= b_zero
    b_part = tl.zeros_like(b_sum) if GROUPED else b_sum
    b_part = tl.dot(b_even, tl.trans(b_even_x), b_part, input_precision="ieee")
    if PER == 2:
        b_part = tl.dot(b_odd, tl.trans(b_odd_x), b_part, input_precision="ieee")
    if GROUPED:
        b_scale = _scales(weight, o_line // weight.block_m * weight.columns + o_group, NESTED)
        b_part = b_sum + b_part * b_scale[:, None]
    return b_part


@triton.jit
def _finished(
    b_sum, weight, o_line, SPREAD: tl.constexpr, GROUPED: tl.constexpr, NESTED: tl.constexpr, OUT: tl.constexpr
):
    """Sums [BM, BR] times what scales are left, plus the bias, rounded once."""
    if not (SPREAD or GROUPED):
        b_sum *= _scales(weight, o_line // weight.block_m * weight.columns, NESTED)[:, None]
    if weight.bias is not None:
        b_sum += tl.load(weight.bias + o_line).to(tl.float32)[:, None]
    return b_sum.to(OUT)


@triton.jit
def _product(
    weight,
    tile,
    above,
    p_x,
    p_out,
    R,
    M,
    K,
    stride_x,
    p_table,
    BM: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
    CODES: tl.constexpr,
    SPREAD: tl.constexpr,
    GROUPED: tl.constexpr,
    NESTED: tl.constexpr,
    EVEN_K: tl.constexpr,
    KIND: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    PDL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A tile of a weight's output channels; with a KIND opened(weight) * above."""
    lines = weight.lines
    o_m = tile * BM + tl.arange(0, BM)
    o_r = tl.program_id(1) * BR + tl.arange(0, BR)
    m_m, m_r = o_m < lines, o_r < R
    o_line = tl.minimum(o_m, lines - 1).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        prefetch(weight.codes + o_line * weight.stride, weight.ahead)  # nobody writes weights
        if KIND is not None:
            prefetch(above.codes + o_line * above.stride, above.ahead)
        tl.extra.cuda.gdc_wait()
    o_bk = tl.arange(0, BK)
    p_rows = p_x + o_r[:, None].to(tl.int64) * stride_x
    b_sum = tl.zeros([BM, BR], tl.float32)
    b_up = b_sum
    for o_k in tl.range(0, K, BK, num_stages=STAGES):
        o_cols = o_k + o_bk
        m_x = m_r[:, None] if EVEN_K else m_r[:, None] & (o_cols < K)[None, :]
        b_x = tl.load(p_rows + o_cols[None, :], mask=m_x, other=0.0)
        b_even_x, b_odd_x = b_x, b_x
        if CODES.bits == 4:
            b_even_x, b_odd_x = tl.split(tl.reshape(b_x, [BR, BK // 2, 2]))
        step = o_line, o_k, K, p_table
        b_sum = _add_step(b_sum, b_even_x, b_odd_x, weight, *step, BK, CODES, SPREAD, GROUPED, NESTED, EVEN_K, ASSEMBLY)
        if KIND is not None:
            b_up = _add_step(
                b_up, b_even_x, b_odd_x, above, *step, BK, CODES, SPREAD, GROUPED, NESTED, EVEN_K, ASSEMBLY
            )
    OUT: tl.constexpr = p_out.dtype.element_ty
    b_out = _finished(b_sum, weight, o_line, SPREAD, GROUPED, NESTED, OUT)
    if KIND is not None:
        b_out = gated(b_out, _finished(b_up, above, o_line, SPREAD, GROUPED, NESTED, OUT), KIND)
    o_out = o_r[None, :].to(tl.int64) * M + (weight.first + o_m)[:, None]
    tl.store(p_out + o_out, b_out, mask=m_m[:, None] & m_r[None, :])


@triton.jit(do_not_specialize=["R"])
def _stored_kernel(
    p_x,
    weights,
    p_out,
    R,
    M,
    K,
    stride_x,
    p_table,
    BM: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
    COUNT: tl.constexpr,
    CODES: tl.constexpr,
    SPREAD: tl.constexpr,
    GROUPED: tl.constexpr,
    NESTED: tl.constexpr,
    EVEN_K: tl.constexpr,
    KIND: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    PDL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Out [R, M] of x [R, K] and COUNT weights of one form, side by side; with a KIND of a gate and an up part. A
    weight is a `StoredOperands`. With SPREAD channels of a step have scales of their own, with GROUPED steps do, else
    lines."""
    tile = tl.program_id(0)
    given = weights[COUNT - 1 if KIND is None else COUNT], p_x, p_out, R, M, K, stride_x, p_table
    for i in tl.static_range(COUNT):
        tiles = (weights[i].lines + BM - 1) // BM
        if (tile >= 0) & (tile < tiles):
            _product(
                weights[i],
                tile,
                *given,
                BM,
                BK,
                BR,
                CODES,
                SPREAD,
                GROUPED,
                NESTED,
                EVEN_K,
                KIND,
                ASSEMBLY,
                PDL,
                STAGES,
            )
        tile -= tiles


@triton.jit
def _dequantise_kernel(
    p_out,
    weight,
    K,
    p_table,
    BM: tl.constexpr,
    BK: tl.constexpr,
    CODES: tl.constexpr,
    NESTED: tl.constexpr,
    OWN: tl.constexpr,
):
    """Out [M, K] of a weight's numbers less their zero points, times their scales, rounded to OWN and to out's
    dtype."""
    PER: tl.constexpr = 8 // CODES.bits
    o_m, o_byte = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * (BK // PER) + tl.arange(0, BK // PER)
    o_line = tl.minimum(o_m, weight.lines - 1).to(tl.int64)
    m_byte = (o_byte < (K + PER - 1) // PER)[None, :]
    b_codes = tl.load(weight.codes + o_line[:, None] * weight.stride + o_byte[None, :], mask=m_byte, other=0)
    b_even, b_odd = _halves(b_codes, p_table, CODES, tl.float32, None)
    b_out = _weighted(b_even, weight, o_line, o_byte * PER, K, CODES, NESTED)
    if PER == 2:
        b_odd = _weighted(b_odd, weight, o_line, o_byte * 2 + 1, K, CODES, NESTED)
        b_out = tl.reshape(tl.join(b_out, b_odd), [BM, BK])
    o_k = tl.program_id(1) * BK + tl.arange(0, BK)
    m_out = (o_m < weight.lines)[:, None] & (o_k < K)[None, :]
    tl.store(p_out + o_line[:, None] * K + o_k[None, :], b_out.to(OWN).to(p_out.dtype.element_ty), mask=m_out)


class StoredForm(NamedTuple):
    """Form that the weights of one launch have in common."""

    kind: Codes
    depth: int
    scales: torch.dtype
    zeros: torch.dtype | None
    group: int
    spread: bool
    nested: int
    biased: bool

    @classmethod
    def of(cls, weight: StoredWeight, bias: Tensor | None) -> StoredForm:
        """Of a weight and its bias."""
        depth, group = weight.depth, weight.block[1]
        return cls(
            weight.kind,
            depth,
            weight.scales.dtype,
            None if weight.zeros is None else weight.zeros.dtype,
            min(group, depth),
            weight.groups is not None or (group < depth and group % step_of(weight) != 0),
            0 if weight.nested is None else weight.nested.block,
            bias is not None,
        )


def step_of(weight: StoredWeight) -> int:
    """Input channels of a step, which the order of a row's sums hangs on: by the weight alone."""
    group = min(weight.block[1], weight.depth)
    return next((step for step in (128, 64, 32) if group % step == 0), 64 if group < weight.depth else 128)


def launch_of(weight: StoredWeight, rows: int) -> Launch:
    """The launch of a weight by rows, found on an H100 for 4 bits and the shapes of a model of 8 billion weights. How
    tall a tile is follows from the weight alone: tensor cores of different instructions group channels differently."""
    channels, step, few = weight.shape[0], step_of(weight), rows <= 16
    if channels >= 8192:
        return Launch(64, step, 4, 8 if few else 4)
    if step >= 128:
        return Launch(16, step, 2, 8) if few else Launch(16, step, 4, 6)
    return Launch(32, step, 4, 4)


def served(x: Tensor, weight: StoredWeight, bias: Tensor | None) -> int:
    """Rows of x [..., K] that the kernel multiplies, 0 where torch does; ValueError where x does not fit."""
    channels, depth = weight.shape
    expect("stored product", (*x.shape[:-1], depth), FLOATS, PACKED, x=x)
    rows = x.numel() // depth if depth else 0
    return rows if dtypes_of(x, bias) and 0 < rows <= MAX_ROWS and channels else 0


def dequantised(weight: StoredWeight, dtype: torch.dtype) -> Tensor:
    """`reference.dequantised`, bit for bit."""
    (channels, depth), kind = weight.shape, weight.kind
    out = torch.empty((channels, depth), dtype=dtype, device=weight.device)
    lines, deep = (16, 256) if kind.bits == 8 else (8, 512)
    _dequantise_kernel[(-(-channels // lines), -(-depth // deep))](
        out,
        operands_of(weight, None),
        depth,
        reference.table(kind, weight.device) if kind.table else None,
        BM=lines,
        BK=deep,
        CODES=kind,
        NESTED=0 if weight.nested is None else weight.nested.block,
        OWN=DTYPES[weight.dtype or dtype],
        enable_fp_fusion=False,
        num_warps=4,
    )
    return out


def linear(x: Tensor, weight: StoredWeight, bias: Tensor | None) -> Tensor:
    """`reference.linear` of x [..., K], weight [M, K] and bias [M] -> [..., M] in x's dtype, summed in fp32 and rounded
    once. The last dimension of x must be contiguous (ValueError otherwise)."""
    rows = served(x, weight, bias)
    if not rows and x.numel() and weight.shape[0] and x.dtype != torch.float32 and not torch.is_grad_enabled():
        return F.linear(x, dequantised(weight, x.dtype), None if bias is None else bias.to(x.dtype))
    if not rows:
        return reference.linear(x, weight, bias)
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    _multiply(x.reshape(rows, -1), (weight,), (bias,), out)
    return out


def linear_parts(x: Tensor, weights: Sequence[StoredWeight], biases: Sequence[Tensor | None]) -> Tensor | Parts:
    """`linears`, or the parts of products that Hopper's kernel cuts in several, for what adds them up: a norm behind
    one, or `rope_cache` behind several, of so few rows that their parts would lie side by side, which reads each row as
    often as there are parts."""
    rows = min(served(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))
    flat = x.reshape(rows, -1) if rows else x
    parts = min(map(parts_of, weights)) if rows and all(takes(flat, weight) for weight in weights) else 1
    most = SIDEWAYS if weights[0].depth <= SHORT else MOST_ROWS
    most = most if len(weights) == 1 else SIDEWAYS // parts
    forms = {StoredForm.of(weight, None) for weight in weights}
    if parts == 1 or len(forms) > 1 or any(bias is not None for bias in biases) or not FEW_ROWS / parts < rows <= most:
        return linear(x, weights[0], biases[0]) if len(weights) == 1 else linears(x, weights, biases)
    channels = sum(weight.shape[0] for weight in weights)
    out = torch.empty((parts, *x.shape[:-1], channels), dtype=torch.float32, device=x.device)
    most = stages_of(tuned("stored_parts", flat, weights, biases))
    hopper_stored(flat, weights, biases, out, hopper_launch_of(weights, rows, False, apart=True, most_stages=most))
    return Parts(out, x.dtype)


def linears(
    x: Tensor, weights: Sequence[StoredWeight], biases: Sequence[Tensor | None], kind: Activation | None = None
) -> Tensor:
    """`reference.linears`: one launch of weights of one form. Hopper's kernels read scales of a gate and an up part at
    the same places: parts with other numbers of lines a scale are multiplied one by one."""
    rows = min(served(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))
    forms = {StoredForm.of(weight, bias) for weight, bias in zip(weights, biases, strict=True)}
    channels = [weight.shape[0] for weight in weights]
    gates = {(weight.shape[0], weight.block[0]) for weight in weights if kind is not None}
    if not rows or len(forms) > 1 or len(gates) > 1:
        return partial(linear_reference.linears, product=linear)(x, weights, biases, kind)  # type: ignore[arg-type]
    out = x.new_empty(*x.shape[:-1], sum(channels) if kind is None else channels[0])
    _multiply(x.reshape(rows, -1), weights, biases, out, kind)
    return out


def in_turns(multiply: Callable[..., Any]) -> Callable[..., Any]:
    """A product that sums in the kernel's order for any number of rows: MAX_ROWS at a time, and joined where they are
    several such, whose last may be in parts."""

    def run(x: Tensor, *others: Any) -> Any:
        if x.shape[:-1].numel() <= MAX_ROWS:
            return multiply(x, *others)
        turns = x.flatten(0, -2).split(MAX_ROWS)
        return torch.cat([linear_reference.joined(multiply(part, *others)) for part in turns]).unflatten(
            0, x.shape[:-1]
        )

    return run


def _multiply(
    x: Tensor,
    weights: Sequence[StoredWeight],
    biases: Sequence[Tensor | None],
    out: Tensor,
    kind: Activation | None = None,
) -> None:
    """`_launch` by the launch for x [R, K], or Hopper's own kernels."""
    hopper, found = all(takes(x, weight) for weight in weights), tuned(OPS[kind is not None], x, weights, biases)
    form = (
        launched(weights, kind is not None, kind or SILU, biases[0] is not None, found)
        if hopper and len(x) == 1 and x.dtype == torch.bfloat16 and not isinstance(found, StoredLaunch)
        else None
    )
    if form is not None:
        stored_row(x, weights, biases, out, form)
    elif hopper:
        usual = hopper_launch_of(weights, len(x), kind is not None, most_stages=stages_of(found))
        hopper_stored(x, weights, biases, out, usual, kind)
    else:
        launch = launch_of(weights[0], len(x))
        if isinstance(found, StoredLaunch):
            launch = replace(launch, stages=found.stages, warps=found.warps or launch.warps)
        _launch(x, weights, biases, out, launch, kind)


def stages_of(found: TunedLaunch | None) -> int:
    """Stages of a launch on Hopper at the most."""
    return found.stages if isinstance(found, StoredLaunch) else STAGES


def _launch(
    x: Tensor,
    weights: Sequence[StoredWeight],
    biases: Sequence[Tensor | None],
    out: Tensor,
    launch: Launch,
    kind: Activation | None = None,
) -> None:
    """Fill out [..., M], contiguous, with the products of x [R, K] and weights of one form, side by side, or with a
    kind opened(gate) * up."""
    (rows, depth), one, form = x.shape, weights[0], StoredForm.of(weights[0], biases[0])
    operands, first = [], 0
    for weight, bias in zip(weights, biases, strict=True):
        operands.append(operands_of(weight, bias, first))
        first += weight.shape[0]
    tall, gates = min(TALLEST, padded(rows)), 1 if kind is None else 2
    stage = gates * launch.channels * launch.depth * one.kind.bits // 8 + tall * launch.depth * x.element_size()
    stages = stages_within(launch.stages, stage, x.device)
    tiles = sum(-(-weight.shape[0] // launch.channels) for weight in weights) // gates
    aligned = all(weight.codes.data_ptr() % 16 == 0 and weight.codes.stride(0) % 16 == 0 for weight in weights)
    _stored_kernel[(tiles, -(-rows // tall))](
        x,
        tuple(operands),
        out,
        rows,
        out.shape[-1],
        depth,
        x.stride(0),
        reference.table(form.kind, x.device) if form.kind.table else None,
        BM=launch.channels,
        BK=launch.depth,
        BR=tall,
        COUNT=len(weights) // gates,
        CODES=form.kind,
        SPREAD=form.spread,
        GROUPED=form.group < depth and not form.spread,
        NESTED=form.nested,
        EVEN_K=depth % launch.depth == 0,
        KIND=kind,
        ASSEMBLY=assembly(form.kind, x.dtype) if runs_ptx(x.device) else None,
        STAGES=stages,
        enable_fp_fusion=False,  # a nested scale is a product and a sum, each rounded
        num_warps=launch.warps,
        num_stages=stages,
        **(dependent(x.device) if aligned else {"PDL": False}),
    )
