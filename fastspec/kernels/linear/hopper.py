"""Linear layers of few rows, or of few weights, on Hopper, whose weights are on their way before the kernel in front of
them has ended.

R rows, K input channels, M output channels, S parts; weights [M, K], or [2 * M, K] with a gate and an up-projection. A
program takes BM output channels and one part of the depth, in steps of BK. Nobody writes weights, so a program asks for
its first AHEAD steps of them, through tensor descriptors and into shared memory, while it still waits for its rows;
Triton cannot part the two, so this is in Gluon. The sums are those of linear.py in their order, to the bit. Gluon has
no interpreter: tested on the GPU alone.

A depth may also be cut in 2 or 4 parts that one program sums, SIDE by SIDE or in SERIES, and adds up as (0 + 1) + (2 +
3): to the same bits. Side by side they are as many lines and rows: a contiguous weight [M, K] is read as [M * parts, K
/ parts], rows [R, K] as [R * parts, K / parts], and of the product of all of these the program keeps what a line and a
row of one part give. Few rows leave the tensor cores idle, and so the chain of sums is a half or a quarter as long, and
there are twice or four times the programs. In series the accumulator is emptied where a part ends.

Many rows are bound by what reads their tiles and by the ends of programs: of a RING one warp loads, groups of four
multiply 64 channels each, and a program takes tiles one after another.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared as fence
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma as mma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fastspec.kernels.launch import dependent, is_hopper, padded
from fastspec.kernels.linear.launches import MULTIPROCESSORS, HopperLaunch
from fastspec.kernels.linear.reference import SILU, Activation

GROUP = 8
"""Tiles of rows that take a tile of weights one behind the other, twice as many of a ring: both stay in the L2."""
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # renamed since Triton 3.6
_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # renamed since Triton 3.6


@gluon.jit
def _weights(d_w, bars, w_smem, stage, line, o_k, M, wanted, BYTES: gl.constexpr, GATES: gl.constexpr):
    """Ask for a step of weights, if it is wanted; the barrier waits for the rows' bytes too."""
    mbarrier.expect(bars.index(stage), BYTES, wanted)
    _load(d_w, [line, o_k], bars.index(stage), w_smem.index(stage * GATES), wanted)
    if GATES == 2:
        _load(d_w, [M + line, o_k], bars.index(stage), w_smem.index(stage * GATES + 1), wanted)


@gluon.jit
def _joined(b_sum, SIDE: gl.constexpr, BM: gl.constexpr, BR: gl.constexpr, SUMS: gl.constexpr, OUT: gl.constexpr):
    """Sums [BM / SIDE, BR / SIDE] of the parts of [BM, BR] that lie side by side; each of the sums has two addends, so
    that no layout changes their order."""
    o_line, o_row = gl.arange(0, BM, gl.SliceLayout(1, SUMS)), gl.arange(0, BR, gl.SliceLayout(0, SUMS))
    b_sum = gl.where((o_line % SIDE)[:, None] == (o_row % SIDE)[None, :], b_sum, 0.0)
    b_sum = gl.sum(gl.reshape(b_sum, [BM, BR // SIDE, SIDE]), 2)  # one of them and zeros
    b_sum = gl.sum(gl.reshape(b_sum, [BM // 2, 2, BR // SIDE]), 1)
    if SIDE == 4:
        b_sum = gl.sum(gl.reshape(b_sum, [BM // 4, 2, BR // SIDE]), 1)
    return gl.convert_layout(b_sum, OUT)


@gluon.jit
def _write(
    b_sum,
    b_up,
    p_bias,
    p_out,
    channel,
    row,
    part,
    R,
    M,
    dtype: gl.constexpr,
    TOLD: gl.constexpr,
    OUT: gl.constexpr,
    GATES: gl.constexpr,
    BIAS: gl.constexpr,
    PARTS: gl.constexpr,
    ALPHA: gl.constexpr,
    CUBIC: gl.constexpr,
):
    """Write sums [channels, rows] from a channel and a row on, and a bias, or with PARTS those of a part in fp32."""
    o_line = channel + gl.arange(0, b_sum.shape[0], gl.SliceLayout(1, TOLD))
    if BIAS:
        b_bias = gl.load(p_bias + o_line, mask=o_line < M, other=0.0).to(gl.float32)
        b_sum += gl.where(part == 0, b_bias, 0.0)[:, None]
    o_m = channel + gl.arange(0, b_sum.shape[0], gl.SliceLayout(1, OUT))
    o_r = row + gl.arange(0, b_sum.shape[1], gl.SliceLayout(0, OUT))
    m_out = (o_m < M)[:, None] & (o_r < R)[None, :]
    if PARTS:
        b_sum = gl.convert_layout(b_sum, OUT)
        gl.store(p_out + (part * R + o_r)[None, :].to(gl.int64) * M + o_m[:, None], b_sum, mask=m_out)
    else:
        b_out = b_sum.to(dtype)
        if GATES == 2:
            if BIAS:
                b_up += gl.load(p_bias + M + o_line, mask=o_line < M, other=0.0).to(gl.float32)[:, None]
            b_gate = b_out.to(gl.float32)
            b_in = b_gate + CUBIC * b_gate * b_gate * b_gate if CUBIC != 0.0 else b_gate
            b_gate = (b_gate / (1.0 + gl.exp(-ALPHA * b_in))).to(dtype)
            b_out = (b_gate.to(gl.float32) * b_up.to(dtype).to(gl.float32)).to(dtype)
        b_out = gl.convert_layout(b_out, OUT)
        gl.store(p_out + o_r[None, :].to(gl.int64) * M + o_m[:, None], b_out, mask=m_out)


@gluon.jit
def _tile(t, R, tiles, grouped, BR: gl.constexpr):
    """Row and tile of channels of the t-th tile of a ring: `grouped` tiles of rows take a tile of weights one behind
    the other, which both stay in the L2."""
    place = t // grouped
    row = (place // tiles * grouped + t % grouped) * BR
    return gl.minimum(row, gl.maximum(R - BR, 0)), place % tiles


@gluon.jit
def _ring_loads(memory, place, FORM: gl.constexpr, PDL: gl.constexpr):
    """Loads of all tiles of a program, by a warp of its own, which goes on to the next tile while one is written."""
    d_w, d_x, full, free, w_smem, x_smem = memory
    R, M, steps, tiles, grouped, all_tiles = place
    BK: gl.constexpr = FORM.launch.depth
    STAGES: gl.constexpr = FORM.launch.stages
    row, tile = _tile(gl.program_id(0), R, tiles, grouped, FORM.launch.rows)
    asked = gl.minimum(steps, STAGES)
    for i in gl.static_range(STAGES):
        _ring_weights(d_w, full, w_smem, i, tile, i * BK, M, i < asked, FORM)
    if PDL:
        tl.extra.cuda.gdc_wait()
    stage, phase = 0, 1
    for t in range(gl.program_id(0), all_tiles, gl.num_programs(0)):
        row, tile = _tile(t, R, tiles, grouped, FORM.launch.rows)
        for step in range(steps):
            mbarrier.wait(free.index(stage), phase)
            _ring_weights(d_w, full, w_smem, stage, tile, step * BK, M, asked <= 0, FORM)
            _load(d_x, [row, step * BK], full.index(stage), x_smem.index(stage))
            asked -= 1
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _ring_weights(d_w, full, w_smem, stage, tile, o_k, M, wanted, FORM: gl.constexpr):
    """Ask for a step of a tile's weights, if it is wanted; the barrier waits for the rows' bytes too."""
    GROUPS: gl.constexpr = FORM.launch.channels // 64
    GATES: gl.constexpr = FORM.gates
    EACH: gl.constexpr = GROUPS * GATES
    mbarrier.expect(full.index(stage), (EACH * 64 + FORM.launch.rows) * FORM.launch.depth * 2, wanted)
    for i in gl.static_range(EACH):
        line = i % GATES * M + (tile * GROUPS + i // GATES) * 64
        _load(d_w, [line, o_k], full.index(stage), w_smem.index(stage * EACH + i), wanted)


@gluon.jit
def _ring_sums(OF: gl.constexpr, memory, place, p_bias, p_out, FORM: gl.constexpr):
    """Sums of the OF-th 64 channels of each tile of a program."""
    d_w, _, full, free, w_smem, x_smem = memory
    R, M, steps, tiles, grouped, all_tiles = place
    dtype: gl.constexpr = d_w.dtype
    BR: gl.constexpr = FORM.launch.rows
    GATES: gl.constexpr = FORM.gates
    GROUPS: gl.constexpr = FORM.launch.channels // 64
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BR, 16])
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    b_none = gl.zeros([64, BR], gl.float32, SUMS)
    stage, phase, before = 0, 0, 0
    for t in range(gl.program_id(0), all_tiles, gl.num_programs(0)):
        row, tile = _tile(t, R, tiles, grouped, BR)
        b_sum, b_up = b_none, b_none
        for step in range(steps):
            mbarrier.wait(full.index(stage), phase)
            b_x = x_smem.index(stage).permute((1, 0))
            o_tile = (stage * GROUPS + OF) * GATES
            b_sum = mma(w_smem.index(o_tile), b_x, b_sum, is_async=True)
            if GATES == 2:
                b_up = mma(w_smem.index(o_tile + 1), b_x, b_up, is_async=True)
                b_sum, b_up = mma_wait(2, deps=(b_sum, b_up))
            else:
                b_sum = mma_wait(1, deps=(b_sum,))
            mbarrier.arrive(free.index(before), pred=step > 0)
            before = stage
            stage += 1
            if stage == FORM.launch.stages:
                stage = 0
                phase ^= 1
        if GATES == 2:
            b_sum, b_up = mma_wait(0, deps=(b_sum, b_up))
        else:
            b_sum = mma_wait(0, deps=(b_sum,))
        barrier()
        mbarrier.arrive(free.index(before))
        channel = (tile * GROUPS + OF) * 64
        _write(
            b_sum,
            b_up,
            p_bias,
            p_out,
            channel,
            row,
            0,
            R,
            M,
            dtype,
            SUMS,
            OUT,
            GATES,
            FORM.bias,
            False,
            FORM.alpha,
            FORM.cubic,
        )


@gluon.jit(do_not_specialize=["R", "tiles", "grouped", "all_tiles"])
def _hopper_ring(
    d_w, d_x, p_bias, p_out, R, M, steps, tiles, grouped, all_tiles, FORM: gl.constexpr, PDL: gl.constexpr
):
    """`_hopper_linear` of many rows: one warp loads, groups of four warps multiply 64 channels each without waiting for
    one another, and a program takes tiles until there are none."""
    STAGES: gl.constexpr = FORM.launch.stages
    BK: gl.constexpr = FORM.launch.depth
    GROUPS: gl.constexpr = FORM.launch.channels // 64
    w_smem = gl.allocate_shared_memory(d_w.dtype, [STAGES * GROUPS * FORM.gates, 64, BK], d_w.layout)
    x_smem = gl.allocate_shared_memory(d_w.dtype, [STAGES, FORM.launch.rows, BK], d_x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=GROUPS)
    fence()
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    memory = (d_w, d_x, full, free, w_smem, x_smem)
    place = (R, M, steps, tiles, grouped, all_tiles)
    if GROUPS == 1:
        gl.warp_specialize(
            [(_ring_sums, (0, memory, place, p_bias, p_out, FORM)), (_ring_loads, (memory, place, FORM, PDL))],
            [1],
            [24],
        )
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (_ring_sums, (0, memory, place, p_bias, p_out, FORM)),
                (_ring_sums, (1, memory, place, p_bias, p_out, FORM)),
                (_ring_loads, (memory, place, FORM, PDL)),
            ],
            [4, 1],
            [232, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_ring_sums, (0, memory, place, p_bias, p_out, FORM)),
                (_ring_sums, (1, memory, place, p_bias, p_out, FORM)),
                (_ring_sums, (2, memory, place, p_bias, p_out, FORM)),
                (_ring_loads, (memory, place, FORM, PDL)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )


@dataclass(frozen=True, slots=True)
class RingForm:
    """Form of a program of `_hopper_ring`, which it is compiled for."""

    launch: HopperLaunch
    gates: int
    bias: bool
    alpha: float
    cubic: float


@gluon.jit(do_not_specialize=["R"])
def _hopper_linear(
    d_w,
    d_x,
    p_bias,
    p_out,
    R,
    M,
    steps,
    BM: gl.constexpr,
    BK: gl.constexpr,
    BR: gl.constexpr,
    S: gl.constexpr,
    GATES: gl.constexpr,
    SIDE: gl.constexpr,
    SERIES: gl.constexpr,
    BIAS: gl.constexpr,
    PARTS: gl.constexpr,
    ALPHA: gl.constexpr,
    CUBIC: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Out [R, M] in d_x's dtype, or with PARTS [S, R, M] fp32: part s is over the s-th share of the steps. The grid's
    sides count tiles of BR rows, tiles of lines with their parts, and groups of tiles of rows. With SIDE d_w and d_x
    are those of the parts; SERIES divides the steps."""
    dtype: gl.constexpr = d_w.dtype
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BR, 16])
    BC: gl.constexpr = BM // SIDE
    VECTOR: gl.constexpr = 4 if PARTS else 8  # 16 bytes a thread
    OUT: gl.constexpr = gl.BlockedLayout(
        [VECTOR, 1], [min(32, BC // VECTOR), 32 // min(32, BC // VECTOR)], [1, WARPS], [0, 1]
    )
    TOLD: gl.constexpr = SUMS if SIDE == 1 else OUT
    BYTES: gl.constexpr = (GATES * BM + BR) * BK * 2
    row = (gl.program_id(2) * gl.num_programs(0) + gl.program_id(0)) * BR
    if row >= R * SIDE:
        return
    row = gl.minimum(row, gl.maximum(R * SIDE - BR, 0))  # the last tile, over rows of the one before: absent ones cost
    tile, part = gl.program_id(1) // S, gl.program_id(1) % S
    first, last = steps * part // S, steps * (part + 1) // S
    count, line = last - first, tile * BM
    w_smem = gl.allocate_shared_memory(dtype, [STAGES * GATES, BM, BK], d_w.layout)
    x_smem = gl.allocate_shared_memory(dtype, [STAGES, BR, BK], d_x.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
    fence()
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    for i in gl.static_range(AHEAD):
        _weights(d_w, bars, w_smem, i, line, (first + i) * BK, M, i < count, BYTES, GATES)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for i in gl.static_range(STAGES):
        if i >= AHEAD:
            _weights(d_w, bars, w_smem, i, line, (first + i) * BK, M, i < count, BYTES, GATES)
        _load(d_x, [row, (first + i) * BK], bars.index(i), x_smem.index(i), i < count)

    b_sum = gl.zeros([BM, BR], gl.float32, SUMS)
    b_up = gl.zeros([BM, BR], gl.float32, SUMS)
    b_half, b_first = b_sum, b_sum
    stage, phase, before = 0, 0, STAGES - 1
    for i in gl.static_range(SERIES):
        for step in range(count // SERIES * i, count // SERIES * (i + 1)):
            mbarrier.wait(bars.index(stage), phase)
            b_x = x_smem.index(stage).permute((1, 0))
            b_sum = mma(w_smem.index(stage * GATES), b_x, b_sum, is_async=True)
            if GATES == 2:
                b_up = mma(w_smem.index(stage * GATES + 1), b_x, b_up, is_async=True)
                b_sum, b_up = mma_wait(2, deps=(b_sum, b_up))
            else:
                b_sum = mma_wait(1, deps=(b_sum,))
            if WARPS > 4:  # one group may be a step behind the other
                barrier()
            # The products of the step before are done: its place is free. Without a branch, which would cost more than
            # what it saves.
            o_k, wanted = (first + step - 1 + STAGES) * BK, (step > 0) & (step - 1 + STAGES < count)
            _weights(d_w, bars, w_smem, before, line, o_k, M, wanted, BYTES, GATES)
            _load(d_x, [row, o_k], bars.index(before), x_smem.index(before), wanted)
            before = stage
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        if GATES == 2:
            b_sum, b_up = mma_wait(0, deps=(b_sum, b_up))
        else:
            b_sum = mma_wait(0, deps=(b_sum,))
        if SERIES > 1:
            b_half = b_half + b_sum if i % 2 else b_sum
            if i == 1:
                b_first = b_half
            b_sum = gl.zeros([BM, BR], gl.float32, SUMS)
    barrier()  # what follows is written where other warps' last products may still be read
    if SERIES > 1:
        b_sum = b_half if SERIES == 2 else b_first + b_half
    if SIDE > 1:
        b_sum = _joined(b_sum, SIDE, BM, BR, SUMS, OUT)

    _write(
        b_sum,
        b_up,
        p_bias,
        p_out,
        tile * BC,
        row // SIDE,
        part,
        R,
        M,
        dtype,
        TOLD,
        OUT,
        GATES,
        BIAS,
        PARTS,
        ALPHA,
        CUBIC,
    )


def takes(x: Tensor, weight: Tensor) -> bool:
    """True where x [R, K] and weight [M, K], of one dtype, are what this kernel reads: on Hopper, of 16 bits, lines
    aligned to 16 bytes."""
    if x.element_size() != 2 or not x.is_floating_point() or not is_hopper(x.device):
        return False
    return all((operand.data_ptr() | operand.stride(0) * 2) % 16 == 0 for operand in (x, weight))


def hopper_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    launch: HopperLaunch,
    swiglu: bool = False,
    kind: Activation = SILU,
) -> None:
    """Fill out [..., M], or out [S, ..., M] fp32 with the parts, contiguous, of the product of x [R, K]; operands as
    `takes` says, and contiguous where parts lie side by side."""
    rows, depth = x.shape
    width, split, side = out.shape[-1], out.dtype == torch.float32, launch.side
    if side > 1:
        x, weight, depth = x.view(rows * side, -1), weight.view(-1, depth // side), depth // side
    steps, wide = -(-depth // launch.depth), launch.rows or padded(rows)
    if side == launch.series == 1:
        wide = min(wide, padded(rows))
    tiles = -(-rows * side // wide)
    groups = -(-tiles // (GROUP * (1 + launch.ring)))
    if launch.ring:
        lines, grouped = -(-width // launch.channels), -(-tiles // groups)
        every = lines * grouped * groups
        _hopper_ring[(min(every, MULTIPROCESSORS),)](
            descriptor(weight, 64, launch.depth),
            descriptor(x, wide, launch.depth),
            bias,
            out,
            rows,
            width,
            steps,
            lines,
            grouped,
            every,
            FORM=RingForm(replace(launch, rows=wide), 1 + swiglu, bias is not None, kind.alpha, kind.cubic),
            num_warps=4,
            **dependent(x.device),
        )
        return
    _hopper_linear[(-(-tiles // groups), -(-width * side // launch.channels) * launch.parts, groups)](
        descriptor(weight, launch.channels, launch.depth),
        descriptor(x, wide, launch.depth),
        bias,
        out,
        rows,
        width,
        steps,
        BM=launch.channels,
        BK=launch.depth,
        BR=wide,
        S=launch.parts,
        GATES=1 + swiglu,
        SIDE=side,
        SERIES=launch.series,
        BIAS=bias is not None,
        PARTS=split,
        ALPHA=kind.alpha,
        CUBIC=kind.cubic,
        STAGES=launch.stages,
        AHEAD=launch.ahead,
        WARPS=launch.warps,
        num_warps=launch.warps,
        **dependent(x.device),
    )


_NUMBERS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.int32: gl.int32}


def descriptor(x: Tensor, lines: int, depth: int) -> Any:
    """x [., .] as tiles of lines x depth, swizzled as tensor cores read them."""
    layout = gl.NVMMASharedLayout.get_default_for([lines, depth], _NUMBERS[x.dtype])
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [lines, depth], layout)
