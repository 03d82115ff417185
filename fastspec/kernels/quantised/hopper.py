"""Products of weights stored in 8 bits on Hopper: codes come through tensor descriptors, become numbers in registers,
and are multiplied from there.

R rows, K input channels, M output channels; up to three weights beside each other, or a gate and an up part. As in
kernels/linear/hopper.py a program takes BM output channels, in steps of BK, and asks for its first AHEAD steps of codes
while it still waits for its rows; depths of few output channels are cut in 2 or 4 parts, SIDE by SIDE or in SERIES,
added up as (0 + 1) + (2 + 3). A step's products are summed in order, in steps of 16; with GROUPED each step's sum is
multiplied by its scale and added, else the sums are multiplied by the scales of their lines in the end. So a row's bits
follow from the weight alone (docs/maintainers/same_bits.md). Gluon has no interpreter: tested on the GPU alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared as fence
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma as mma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fastspec.kernels.launch import dependent, is_hopper
from fastspec.kernels.linear.hopper import _joined, _load
from fastspec.kernels.linear.launches import HopperLaunch
from fastspec.kernels.linear.reference import SILU, Activation
from fastspec.kernels.quantised.conversions import assembly
from fastspec.kernels.quantised.reference import StoredWeight

STEP = 128
"""Input channels of a step."""
FEW = 8192
"""Output channels up to which a depth is cut in parts."""
SIDE_ROWS = {1: 8, 2: 64, 4: 64}
"""Number of parts -> rows times parts up to which all of them lie side by side."""
TILES = 132
"""Programs that a Hopper GPU runs at once, one for each multiprocessor."""


@gluon.jit
def _ask(
    codes,
    bars,
    w_smem,
    stage,
    which,
    line,
    o_k,
    wanted,
    BYTES: gl.constexpr,
    GATES: gl.constexpr,
    COUNT: gl.constexpr,
):
    """Ask for a step of codes, if it is wanted; the barrier waits for the rows' bytes too."""
    mbarrier.expect(bars.index(stage), BYTES, wanted)
    for i in gl.static_range(COUNT):
        if GATES == 2:
            _load(codes[i], [line, o_k], bars.index(stage), w_smem.index(stage * 2 + i), wanted)
        else:
            _load(codes[i], [line, o_k], bars.index(stage), w_smem.index(stage), wanted & (which == i))


@gluon.jit
def _numbers(smem, LAYOUT: gl.constexpr, ASSEMBLY: gl.constexpr, DTYPE: gl.constexpr):
    """Numbers [BM, BK] of a step's codes."""
    b_codes = smem.load(LAYOUT)
    b_out = gl.inline_asm_elementwise(ASSEMBLY, "=r,=r,r", [b_codes], dtype=gl.bfloat16, is_pure=True, pack=4)
    return b_out.to(DTYPE, bitcast=True)


@gluon.jit(do_not_specialize=["R"])
def _hopper_stored(
    d_first,
    d_second,
    d_third,
    weights,
    d_x,
    p_out,
    R,
    M,
    steps,
    BM: gl.constexpr,
    BK: gl.constexpr,
    BR: gl.constexpr,
    COUNT: gl.constexpr,
    GATES: gl.constexpr,
    SIDE: gl.constexpr,
    SERIES: gl.constexpr,
    GROUPED: gl.constexpr,
    GROUP: gl.constexpr,
    BIAS: gl.constexpr,
    ALPHA: gl.constexpr,
    CUBIC: gl.constexpr,
    ASSEMBLY: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Out [R, M] in d_x's dtype. The grid's second side counts tiles of BR rows. With SIDE codes and rows are those of
    the parts; SERIES divides the steps."""
    dtype: gl.constexpr = d_x.dtype
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BR, 16])
    CODES: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    BC: gl.constexpr = BM // SIDE
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [min(32, BC // 8), 32 // min(32, BC // 8)], [1, WARPS], [0, 1])
    TOLD: gl.constexpr = SUMS if SIDE == 1 else OUT
    BYTES: gl.constexpr = GATES * BM * BK + BR * BK * 2

    codes = (d_first, d_second, d_third)
    tile, which, first, lines = gl.program_id(0), 0, 0, weights[0].lines
    p_scales, p_bias, columns, block = weights[0].scales, weights[0].bias, weights[0].columns, weights[0].block
    if GATES == 1:
        for i in gl.static_range(1, COUNT):
            tiles = (lines + BC - 1) // BC
            if (which == i - 1) & (tile >= tiles):
                tile -= tiles
                which = i
                first += lines
                lines, columns, block = weights[i].lines, weights[i].columns, weights[i].block
                p_scales = weights[i].scales
                if BIAS:
                    p_bias = weights[i].bias
    line, row = tile * BM, gl.program_id(1) * BR
    w_smem = gl.allocate_shared_memory(gl.uint8, [STAGES * GATES, BM, BK], d_first.layout)
    x_smem = gl.allocate_shared_memory(dtype, [STAGES, BR, BK], d_x.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
    fence()
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    for i in gl.static_range(AHEAD):
        _ask(codes, bars, w_smem, i, which, line, i * BK, i < steps, BYTES, GATES, COUNT)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for i in gl.static_range(STAGES):
        if i >= AHEAD:
            _ask(codes, bars, w_smem, i, which, line, i * BK, i < steps, BYTES, GATES, COUNT)
        _load(d_x, [row, i * BK], bars.index(i), x_smem.index(i), i < steps)

    o_part = line + gl.arange(0, BM, gl.SliceLayout(1, SUMS))
    o_scale = gl.minimum(o_part // SIDE, lines - 1) // block * columns + o_part % SIDE * (columns // SIDE)
    b_sum = gl.zeros([BM, BR], gl.float32, SUMS)
    b_up = gl.zeros([BM, BR], gl.float32, SUMS)
    b_half, b_first = b_sum, b_sum
    stage, phase, before = 0, 0, STAGES - 1
    for i in gl.static_range(SERIES):
        for step in range(steps // SERIES * i, steps // SERIES * (i + 1)):
            if GROUPED:
                b_scale = gl.load(p_scales + o_scale + step * BK // GROUP).to(gl.float32)
                if GATES == 2:
                    b_above = gl.load(weights[1].scales + o_scale + step * BK // GROUP).to(gl.float32)
            mbarrier.wait(bars.index(stage), phase)
            # The products of the step before are done: its place is free.
            o_k, wanted = (step - 1 + STAGES) * BK, (step > 0) & (step - 1 + STAGES < steps)
            _ask(codes, bars, w_smem, before, which, line, o_k, wanted, BYTES, GATES, COUNT)
            _load(d_x, [row, o_k], bars.index(before), x_smem.index(before), wanted)
            b_x = x_smem.index(stage).permute((1, 0))
            b_w = _numbers(w_smem.index(stage * GATES), CODES, ASSEMBLY, dtype)
            b_part = mma(b_w, b_x, b_sum, use_acc=not GROUPED, is_async=True)
            if GATES == 2:
                b_v = _numbers(w_smem.index(stage * 2 + 1), CODES, ASSEMBLY, dtype)
                b_part_up = mma(b_v, b_x, b_up, use_acc=not GROUPED, is_async=True)
                b_part, b_part_up = mma_wait(0, deps=(b_part, b_part_up))
                b_up = b_up + b_part_up * b_above[:, None] if GROUPED else b_part_up
            else:
                b_part = mma_wait(0, deps=(b_part,))
            b_sum = b_sum + b_part * b_scale[:, None] if GROUPED else b_part
            before = stage
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        if SERIES > 1:
            b_half = b_half + b_sum if i % 2 else b_sum
            if i == 1:
                b_first = b_half
            b_sum = gl.zeros([BM, BR], gl.float32, SUMS)
    if SERIES > 1:
        b_sum = b_half if SERIES == 2 else b_first + b_half
    if SIDE > 1:
        b_sum = _joined(b_sum, SIDE, BM, BR, SUMS, OUT)

    o_line = gl.minimum(tile * BC + gl.arange(0, BC, gl.SliceLayout(1, TOLD)), lines - 1)
    if not GROUPED:
        b_sum *= gl.load(p_scales + o_line // block).to(gl.float32)[:, None]
    if BIAS:
        b_sum += gl.load(p_bias + o_line).to(gl.float32)[:, None]
    b_out = b_sum.to(dtype)
    if GATES == 2:
        if not GROUPED:
            b_up *= gl.load(weights[1].scales + o_line // block).to(gl.float32)[:, None]
        if BIAS:
            b_up += gl.load(weights[1].bias + o_line).to(gl.float32)[:, None]
        b_gate = b_out.to(gl.float32)
        b_in = b_gate + CUBIC * b_gate * b_gate * b_gate if CUBIC != 0.0 else b_gate
        b_gate = (b_gate / (1.0 + gl.exp(-ALPHA * b_in))).to(dtype)
        b_out = (b_gate.to(gl.float32) * b_up.to(dtype).to(gl.float32)).to(dtype)
    b_out = gl.convert_layout(b_out, OUT)
    o_m = tile * BC + gl.arange(0, BC, gl.SliceLayout(1, OUT))
    o_r = row // SIDE + gl.arange(0, BR // SIDE, gl.SliceLayout(0, OUT))
    m_out = (o_m < lines)[:, None] & (o_r < R)[None, :]
    gl.store(p_out + o_r[None, :].to(gl.int64) * M + (first + o_m)[:, None], b_out, mask=m_out)


def parts_of(weight: StoredWeight) -> int:
    """Parts that a weight's depth is cut in, by its shape and its groups alone."""
    (channels, depth), group = weight.shape, min(weight.block[1], weight.depth)
    if channels > FEW or not weight.codes.is_contiguous():
        return 1
    whole = (parts for parts in (4, 2) if depth % (parts * STEP) == 0)
    return next((parts for parts in whole if group == depth or depth // parts % group == 0), 1)


def takes(x: Tensor, weight: StoredWeight) -> bool:
    """True where this kernel multiplies x [R, K] by a weight, which follows from the weight, the dtype and the device
    alone: on Hopper, in 16 bits, codes of 8 bits whose groups are steps or lines, without zero points, aligned to 16
    bytes."""
    depth, group, codes = weight.depth, min(weight.block[1], weight.depth), weight.codes
    plain = weight.kind.bits == 8 and weight.zeros is None and weight.groups is None and weight.nested is None
    if not plain or x.element_size() != 2 or not x.is_floating_point() or not is_hopper(x.device):
        return False
    aligned = (codes.data_ptr() | codes.stride(0)) % 16 == 0 and depth % 8 == 0
    return aligned and (group == depth or group % STEP == 0) and depth >= STEP


def launch_of(weights: Sequence[StoredWeight], rows: int, gated: bool) -> HopperLaunch:
    """The launch of weights beside each other, or of a gate and an up part. Found on an H100 for the shapes of a model
    of 8 billion weights; how parts are summed changes no bit."""
    parts, several = 1 if gated else min(map(parts_of, weights)), len(weights) > 1
    if parts * rows <= SIDE_ROWS[parts]:
        wide = max(8, _power_of_two(parts * rows))
        deep = 64 if gated else 32
        stages, ahead = (6, 6 if gated else 3) if wide <= (8 if several else deep) else (4, 2)
        if wide == 8 and parts > 1 and not several:
            stages, ahead = 8, 4
        return HopperLaunch(64, STEP, stages, ahead, rows=wide, side=parts)
    if parts == 4 and (rows <= 32 or sum(weight.shape[0] for weight in weights) <= TILES * 32):
        stages, ahead = (4, 4 if several else 2) if several or rows > 32 else (5, 3)
        return HopperLaunch(64, STEP, stages, ahead, rows=min(128, _power_of_two(2 * rows)), side=2, series=2)
    stages, ahead = (3, 3) if gated and rows > 32 else (6, 3) if parts > 1 else (4, 2)
    return HopperLaunch(64, STEP, stages, ahead, rows=min(64, _power_of_two(rows)), series=parts)


def _power_of_two(rows: int) -> int:
    return 1 << (rows - 1).bit_length()


def hopper_stored(
    x: Tensor,
    weights: Sequence[StoredWeight],
    biases: Sequence[Tensor | None],
    out: Tensor,
    launch: HopperLaunch,
    kind: Activation | None = None,
) -> None:
    """Fill out [..., M], contiguous, with the products of x [R, K] and up to three weights of one form, side by side,
    or with a kind opened(gate) * up; operands as `takes` says."""
    (rows, depth), one, side, gates = x.shape, weights[0], launch.side, 1 if kind is None else 2
    if not x.is_contiguous() or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    group, lines = min(one.block[1], depth), launch.channels // side
    operands, described, tiles = [], [], 0
    for weight, bias in zip(weights, biases, strict=True):
        codes = weight.codes[:, :depth] if side == 1 else weight.codes.view(-1, depth // side)
        described.append(_descriptor(codes, launch.channels, gl.uint8))
        operands.append(HopperOperands(weight.scales, bias, weight.shape[0], weight.scales.shape[1], weight.block[0]))
        tiles += -(-weight.shape[0] // lines)
    rows_of_parts = x if side == 1 else x.view(rows * side, -1)
    _hopper_stored[(tiles // gates, -(-rows * side // launch.rows))](
        *(described + described[:1] * 2)[:3],
        tuple(operands),
        _descriptor(rows_of_parts, launch.rows, gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16),
        out,
        rows,
        out.shape[-1],
        -(-depth // side // STEP),
        BM=launch.channels,
        BK=STEP,
        BR=launch.rows,
        COUNT=len(weights),
        GATES=gates,
        SIDE=side,
        SERIES=launch.series,
        GROUPED=group < depth,
        GROUP=group,
        BIAS=biases[0] is not None,
        ALPHA=(kind or SILU).alpha,
        CUBIC=(kind or SILU).cubic,
        ASSEMBLY=assembly(one.kind, x.dtype),
        STAGES=launch.stages,
        AHEAD=launch.ahead,
        WARPS=launch.channels // 16,
        num_warps=launch.channels // 16,
        **dependent(x.device),
    )


class HopperOperands(NamedTuple):
    """A weight as the kernel takes it, beside its codes: the descriptors of a launch are arguments of their own."""

    scales: Tensor
    bias: Tensor | None
    lines: int
    columns: int
    """Scales of a line."""
    block: int
    """Lines that share scales."""


def _descriptor(x: Tensor, lines: int, dtype: Any) -> Any:
    layout = gl.NVMMASharedLayout.get_default_for([lines, STEP], dtype)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [lines, STEP], layout)
