"""Products of stored weights on Hopper: codes come through tensor descriptors, become numbers in registers, and are
multiplied from there.

R rows, K input channels, M output channels; up to three weights beside each other, or a gate and an up part. As in
kernels/linear/hopper.py a program takes BM output channels (half of them of a gate, half of its up part), in stages of
STEPS steps of STEP channels, and asks for its first STAGES stages of codes while it still waits for its rows; while a
step is multiplied the next one's numbers are made. Two codes of neighbouring channels are a unit, of 8 or 16 bits; the
thread that multiplies it makes a word of two numbers of it (conversions.py). Four threads load the same words, four at
once, and take a unit each of one, or of two. Numbers of a table are read from shared
memory by the byte of two codes: each lane has a copy there, in a bank of its own.

Tall tiles, those of a table from 17 rows on, and parts in series are a ring: one warp more loads all stages, and groups
of four warps multiply 64 channels each, without waiting for one another. A stage has two barriers: `full` counts its
bytes, `free` the groups whose products of it are done. Other tiles ask for a stage once the products of the one before
are done.

Depths of few output channels are cut in 2 or 4 parts, added up as (0 + 1) + (2 + 3): SIDE by SIDE in one tile, in
SERIES, or S programs of their own, which leave the sum to a norm. Of a series one group of warps takes parts 0 and 2 of
64 channels, another 1 and 3, whose sums the first takes from shared memory. A step's products are summed in order, in
steps of 16; with GROUPED each step's sum is multiplied by its scale and added, else each part's sums are multiplied by
the scales of their lines. So a row's bits follow from the weight alone (docs/maintainers/same_bits.md). Gluon has no
interpreter: tested on the GPU alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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

from fastspec.kernels.launch import dependent, is_hopper, prefetched
from fastspec.kernels.linear.hopper import _joined, _load, barrier, descriptor
from fastspec.kernels.linear.launches import MULTIPROCESSORS, HopperLaunch
from fastspec.kernels.linear.reference import SILU, Activation
from fastspec.kernels.quantised.conversions import FILL, PLACE, ROOM, fold, pair_assembly, pair_table
from fastspec.kernels.quantised.reference import StoredWeight

_as = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret  # renamed

STEP = 128
"""Input channels of a step."""
FEW = 8192
"""Output channels up to which a depth is cut in parts."""
TALLEST, SIDEWAYS = 128, 64
"""Rows of a tile, and of one whose parts lie side by side, each of them counted."""
TABLE = 32 << 10
"""Bytes of a table of the numbers of two codes, each 32 times."""
SHALLOW = 1024
"""Depth of a program up to which more programs are faster than tall ones."""
STAGES, SHARED = 4, 224 << 10
"""Of a program, at most, and the bytes of all that stand on a multiprocessor."""
TURNS = 2
"""Stages of a ring of few rows, of a step each: one's numbers are made while the products of the other go on."""
KEPT = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 4, [1, 0]))
"""Places of sums in shared memory, where no lanes of a warp meet in a bank."""


class StoredOperands(NamedTuple):
    """A weight as a kernel takes it; on Hopper, whose descriptors of codes are arguments of their own, what it does not
    read is None."""

    codes: Tensor | None
    scales: Tensor
    zeros: Tensor | None
    groups: Tensor | None
    nested: Tensor | None
    factors: Tensor | None
    offset: Tensor | None
    bias: Tensor | None
    lines: int
    columns: int
    """Scales of a line."""
    block_m: int
    block_k: int | None
    stride: int | None
    ahead: int | None
    """Bytes of each line that may be prefetched."""
    first: int | None
    """Output channel of its first line."""


def operands_of(weight: StoredWeight, bias: Tensor | None, first: int = 0) -> StoredOperands:
    """A weight and its bias, whose first output channel is `first`."""
    nested = weight.nested
    return StoredOperands(
        weight.codes,
        weight.scales,
        weight.zeros,
        weight.groups,
        None if nested is None else nested.table,
        None if nested is None else nested.factors,
        None if nested is None else nested.offset,
        bias,
        weight.shape[0],
        weight.scales.shape[1],
        *weight.block,
        weight.codes.stride(0),
        prefetched(weight.codes, 256),
        first,
    )


@gluon.jit
def _ask(codes, bars, w_smem, stage, which, line, o_k, wanted, FORM: gl.constexpr):
    """Ask for a stage of codes, if it is wanted; the barrier waits for the rows' bytes too."""
    COUNT: gl.constexpr = FORM.count
    LINES: gl.constexpr = FORM.lines // FORM.gates
    WORDS: gl.constexpr = w_smem.shape[2]
    TILES: gl.constexpr = FORM.launch.depth * FORM.bits // 32 // WORDS
    bar, o_word = bars.index(stage), o_k * FORM.bits // 32
    mbarrier.expect(
        bar,
        FORM.groups * FORM.lines * FORM.launch.depth * FORM.bits // 8 + FORM.launch.rows * FORM.launch.depth * 2,
        wanted,
    )
    ALL: gl.constexpr = FORM.groups * TILES
    for i in gl.static_range(ALL):
        tile, o_tile = w_smem.index(stage * ALL + i), [line + i // TILES * LINES, o_word + i % TILES * WORDS]
        for j in gl.static_range(COUNT):
            if FORM.gates == 2:
                _load(codes[j], o_tile, bar, tile.slice(j * LINES, LINES), wanted)
            else:
                _load(codes[j], o_tile, bar, tile, wanted & (which == j))


@gluon.jit
def _load_ring(memory, place, FORM: gl.constexpr, PDL: gl.constexpr):
    """Loads of all stages, by a warp of its own: a place is written again once every group of warps is done with it."""
    codes, d_x, full, free, w_smem, x_smem, _ = memory
    which, line, row, begin, count = place
    BK: gl.constexpr = FORM.launch.depth
    SHARES: gl.constexpr = 2 if FORM.launch.series > 1 else 1
    STAGES: gl.constexpr = FORM.launch.stages // SHARES
    part = count // FORM.launch.series
    for i in gl.static_range(SHARES * STAGES):
        o_k = _at(begin, i // STAGES, i % STAGES, part, FORM.launch.series) * BK
        _ask(codes, full, w_smem, i, which, line, o_k, i % STAGES < count // SHARES, FORM)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for i in gl.static_range(SHARES * STAGES):
        o_k = _at(begin, i // STAGES, i % STAGES, part, FORM.launch.series) * BK
        _load(d_x, [row, o_k], full.index(i), x_smem.index(i), i % STAGES < count // SHARES)
    stage, phase = 0, 0
    for turn in range(STAGES, count // SHARES):
        for share in gl.static_range(SHARES):
            o_k, at = _at(begin, share, turn, part, FORM.launch.series) * BK, share * STAGES + stage
            mbarrier.wait(free.index(at), phase)
            _ask(codes, full, w_smem, at, which, line, o_k, True, FORM)
            _load(d_x, [row, o_k], full.index(at), x_smem.index(at))
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _at(begin, share, turn, part, SERIES: gl.constexpr):
    """Stage of a share's turn: of a series one takes parts 0 and 2, the other 1 and 3."""
    place = begin + turn
    if SERIES > 1:
        place += share * part
    if SERIES == 4:
        place += gl.where(turn >= part, part, 0)
    return place


@gluon.jit
def _numbers(
    smem,
    b_beside,
    b_unit,
    BITS: gl.constexpr,
    WORDS: gl.constexpr,
    UNITS: gl.constexpr,
    CODES: gl.constexpr,
    ASSEMBLY: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """Numbers [BM, 8 * U]: a word of 4 bits [BM, U] holds four units of two codes, as two of 8 bits do."""
    BM: gl.constexpr = smem.shape[0]
    COUNT: gl.constexpr = UNITS.shape[1]
    if BITS == 8:
        b_first, b_second = gl.split(gl.reshape(smem.load(WORDS), [BM, COUNT, 2]))
        b_first, b_second = _each(b_first, UNITS), _each(b_second, UNITS)
        b_pairs = gl.inline_asm_elementwise(ASSEMBLY, "=r,r,r,r", [b_first, b_second, b_unit], gl.int32, True, 1)
    else:
        b_words = _each(smem.load(WORDS), UNITS)
        if b_beside is None:
            b_pairs = gl.inline_asm_elementwise(ASSEMBLY, "=r,r,r", [b_words, b_unit], gl.int32, True, 1)
        else:
            b_pairs = gl.inline_asm_elementwise(ASSEMBLY, "=r,r,r,r", [b_words, b_unit, b_beside], gl.int32, True, 1)
    b_even = b_pairs.to(gl.int16).to(DTYPE, bitcast=True)
    b_odd = (b_pairs >> 16).to(gl.int16).to(DTYPE, bitcast=True)
    return gl.convert_layout(gl.reshape(gl.join(b_even, b_odd), [BM, 8 * COUNT]), CODES)


@gluon.jit
def _each(b_words, UNITS: gl.constexpr):
    """Words [BM, U] for each of four units."""
    b_words = gl.convert_layout(b_words, gl.SliceLayout(2, UNITS), assert_trivial=True)
    return gl.expand_dims(b_words, 2).broadcast_to(UNITS.shape)


@gluon.jit
def _fill(p_table, FORM: gl.constexpr):
    """Fill a table of 256 words in shared memory, of which each lane has a copy in a bank of its own."""
    THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [FORM.warps], [0])
    gl.inline_asm_elementwise(FORM.room, "=r,r", [gl.arange(0, 32 * FORM.warps, THREADS)], gl.int32, False, 1)
    LANES: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([4, 1], [1, 32], [FORM.warps, 1], [1, 0]))
    o_word = gl.arange(0, 256, LANES)
    gl.inline_asm_elementwise(FORM.fill, "=r,r,r", [o_word, gl.load(p_table + o_word)], gl.int32, False, 1)
    barrier()


@gluon.jit
def _times(b_x, b_y):
    """Products rounded by themselves, whatever is added to them: a compiler may not join the two."""
    return gl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [b_x, b_y], gl.float32, True, 1)


@gluon.jit
def _fma(b_x, b_y, b_z):
    """b_x * b_y + b_z, rounded once."""
    return gl.inline_asm_elementwise("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [b_x, b_y, b_z], gl.float32, True, 1)


@gluon.jit
def _loaded(first, second, o_line, is_first, GATES: gl.constexpr):
    """Values of a tile's lines: at places o_line of one table, or, for the others, of a second one."""
    return gl.load((gl.where(is_first, first, second) if GATES == 2 else first) + o_line)


@gluon.jit
def _of_lines(first, second, o_line, is_first, GATES: gl.constexpr):
    """`_loaded` in fp32."""
    return _loaded(first, second, o_line, is_first, GATES).to(gl.float32)


@gluon.jit
def _places(o_scale, k, columns, STEP: gl.constexpr, STEPS: gl.constexpr, GROUP: gl.constexpr):
    """Places of the scales of each step of a stage from channel k on; behind a line's last scale that."""
    o_places = ()
    for u in gl.static_range(STEPS):
        o_places += (o_scale + gl.minimum((k + u * STEP) // GROUP, columns - 1),)  # type: ignore[assignment]  # unrolled
    return o_places


@gluon.jit
def _scale_codes(p_scales, above, o_places, is_first, GATES: gl.constexpr, STEPS: gl.constexpr):
    """Codes of nested scales at places, for each step."""
    b_codes = ()
    for u in gl.static_range(STEPS):
        b_codes += (_loaded(p_scales, above.scales, o_places[u], is_first, GATES).to(gl.int32),)  # type: ignore[assignment]  # unrolled
    return b_codes


@gluon.jit
def _opened(
    p_nested,
    p_factors,
    above,
    b_codes,
    o_places,
    is_first,
    GATES: gl.constexpr,
    STEPS: gl.constexpr,
    NESTED: gl.constexpr,
    FACTORS: gl.constexpr,
):
    """Values of nested codes for each step, and their factors: of each step, or one of all."""
    b_wide, b_factors = (), ()
    for u in gl.static_range(STEPS):
        b_wide += (_of_lines(p_nested, above.nested, b_codes[u], is_first, GATES),)  # type: ignore[assignment]  # unrolled
        if u < FACTORS:
            o_factor = o_places[u] // NESTED
            b_factors += (_of_lines(p_factors, above.factors, o_factor, is_first, GATES),)  # type: ignore[assignment]  # unrolled
    return b_wide, b_factors


@gluon.jit
def _zeros(first, second, o_word, o_shift, is_first, GATES: gl.constexpr, DTYPE: gl.constexpr, FOLD: gl.constexpr):
    """Zero point of the codes of a tile's lines, negative and FOLD times smaller, twice in a word."""
    b_word = _loaded(first, second, o_word, is_first, GATES)
    b_half = ((b_word >> o_shift) & 15).to(gl.float32) * (-1.0 / FOLD)
    b_half = b_half.to(DTYPE).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    return b_half | (b_half << 16)


@gluon.constexpr_function
def _units(step: int, warps: int) -> Any:
    """Places of units [lines, U, 4] of two codes: where tensor cores read their numbers, the U of a line one by one."""
    registers = [[0, 1, 0], [0, 2, 0], [8, 0, 0]] + [[0, 1 << i, 0] for i in range(2, (step // 8).bit_length() - 1)]
    lanes = [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    groups = [[16 << i, 0, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, groups, [], [16 * warps, step // 8, 4])


@gluon.constexpr_function
def _words(step: int, warps: int, bits: int) -> Any:
    """Places of words [lines, W] of these units, four of a line at once."""
    count = step * bits // 32
    registers = [[0, 1], [0, 2], [8, 0]] + [[0, 1 << i] for i in range(2, count.bit_length() - 1)]
    lanes = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[16 << i, 0] for i in range(warps.bit_length() - 1)], [], [16 * warps, count]
    )


@gluon.jit
def _products(OF: gl.constexpr, memory, place, out, FORM: gl.constexpr, PDL: gl.constexpr):
    """Products of the lines of a group of warps, the OF-th, which writes its part of out."""
    codes, d_x, full, free, w_smem, x_smem, half_smem = memory
    which, line, row, begin, count = place
    table, weights, chosen, first, part, p_out, R, M = out
    dtype: gl.constexpr = d_x.dtype
    BM: gl.constexpr = FORM.lines
    BR: gl.constexpr = FORM.launch.rows
    BK: gl.constexpr = FORM.launch.depth
    STEP: gl.constexpr = FORM.step
    GATES: gl.constexpr = FORM.gates
    SIDE: gl.constexpr = FORM.launch.side
    SERIES: gl.constexpr = FORM.launch.series
    GROUP: gl.constexpr = FORM.group
    GROUPED: gl.constexpr = FORM.grouped
    NESTED: gl.constexpr = FORM.nested
    FACTORS: gl.constexpr = FORM.factors
    ZEROS: gl.constexpr = FORM.zeros
    STAGES: gl.constexpr = FORM.launch.stages // (2 if SERIES > 1 else 1)
    WARPS: gl.constexpr = FORM.warps
    RING: gl.constexpr = FORM.launch.ring
    PARTS: gl.constexpr = max(1, SERIES // 2)
    SHARE: gl.constexpr = OF if SERIES > 1 else 0
    TURNS: gl.constexpr = FORM.turns
    ASSEMBLY: gl.constexpr = FORM.assembly
    STEPS: gl.constexpr = BK // STEP
    ALONE: gl.constexpr = BR > 64 or RING  # one part of a sum: registers hold no more
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BR, 16])
    CODES: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    UNITS: gl.constexpr = _units(STEP, WARPS)
    WORDS: gl.constexpr = _words(STEP, WARPS, FORM.bits)
    BC: gl.constexpr = BM // SIDE // GATES
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [min(32, BC // 8), 32 // min(32, BC // 8)], [1, WARPS], [0, 1])
    TOLD: gl.constexpr = SUMS if SIDE == 1 else OUT
    WIDE: gl.constexpr = w_smem.shape[2]  # words of a line in a tile
    TILES: gl.constexpr = BK * FORM.bits // 32 // WIDE

    p_scales, p_zeros, p_nested, p_factors, p_offset, p_bias, lines, columns, block = chosen
    cut, at = count // SERIES, SHARE * STAGES
    count = cut * PARTS
    line += (OF - SHARE) * (BM // GATES)
    o_first = line // SIDE
    o_part = gl.arange(0, BM, gl.SliceLayout(1, SUMS))
    is_first = o_part < BM // GATES
    o_mine = gl.minimum((line + o_part % (BM // GATES)) // SIDE, lines - 1)
    o_scale = o_mine // block * columns + o_part % SIDE * (columns // SIDE)
    above, in_part = weights[GATES - 1], columns // SIDE
    if NESTED:  # codes are read two stages ahead, what they stand for one: each read would wait for the one before
        b_offset = _of_lines(p_offset, above.offset, o_scale * 0, is_first, GATES)
        o_now = _places(o_scale, _at(begin, SHARE, 0, cut, SERIES) * BK, in_part, STEP, STEPS, GROUP)
        o_soon = _places(o_scale, _at(begin, SHARE, 1, cut, SERIES) * BK, in_part, STEP, STEPS, GROUP)
        b_codes = _scale_codes(p_scales, above, o_now, is_first, GATES, STEPS)
        b_wide, b_factors = _opened(p_nested, p_factors, above, b_codes, o_now, is_first, GATES, STEPS, NESTED, FACTORS)
        b_codes = _scale_codes(p_scales, above, o_soon, is_first, GATES, STEPS)
    if not RING:
        if PDL:
            tl.extra.cuda.gdc_wait()
        for i in gl.static_range(STAGES):
            _load(d_x, [row, (begin + i) * BK], full.index(i), x_smem.index(i), i < count)
        if table is not None:
            _fill(table, FORM)

    if ZEROS:
        o_zero_part = gl.arange(0, BM, gl.SliceLayout(1, gl.SliceLayout(2, UNITS)))
        is_first_zero = o_zero_part < BM // GATES
        o_zero_line = gl.minimum((line + o_zero_part % (BM // GATES)) // SIDE, lines - 1)
        o_zero = o_zero_line // 8 * columns + o_zero_part % SIDE * (columns // SIDE)
        o_shift = o_zero_line % 8 * 4
    b_none = gl.zeros([BM, BR], gl.float32, SUMS)
    b_unit = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, UNITS)))
    if table is not None:
        b_base = gl.inline_asm_elementwise(FORM.place, "=r,r", [b_unit], gl.int32, False, 1)
        b_base = b_base[None, None, :].broadcast_to([BM, STEP // 8, 4])
    b_unit = b_unit[None, None, :].broadcast_to([BM, STEP // 8, 4])
    b_sum = b_none
    if not GROUPED:
        b_line = _of_lines(p_scales, above.scales, o_mine // block, is_first, GATES) * FORM.fold
    stage, phase, before = 0, 0, STAGES - 1
    for i in gl.static_range(PARTS):
        for pair in range(count // PARTS // TURNS * i, count // PARTS // TURNS * (i + 1)):
            b_scales, b_parts = (), ()
            for j in gl.static_range(TURNS):
                turn = pair * TURNS + j
                o_turn = _at(begin, SHARE, turn, cut, SERIES)
                if NESTED:
                    for u in gl.static_range(STEPS):
                        b_new = _times(b_wide[u], b_factors[u if FACTORS > 1 else 0]) + b_offset
                        b_scales += (b_new * FORM.fold,)  # type: ignore[assignment]  # unrolled
                    o_soon = _places(
                        o_scale, _at(begin, SHARE, turn + 1, cut, SERIES) * BK, in_part, STEP, STEPS, GROUP
                    )
                    b_wide, b_factors = _opened(
                        p_nested, p_factors, above, b_codes, o_soon, is_first, GATES, STEPS, NESTED, FACTORS
                    )
                    o_later = _places(
                        o_scale, _at(begin, SHARE, turn + 2, cut, SERIES) * BK, in_part, STEP, STEPS, GROUP
                    )
                    b_codes = _scale_codes(p_scales, above, o_later, is_first, GATES, STEPS)
                elif GROUPED:
                    o_places = _places(o_scale, o_turn * BK, in_part, STEP, STEPS, GROUP)
                    for u in gl.static_range(STEPS):
                        b_new = _of_lines(p_scales, above.scales, o_places[u], is_first, GATES)
                        b_scales += (b_new * FORM.fold,)  # type: ignore[assignment]  # unrolled
                mbarrier.wait(full.index(at + stage), phase)
                if not RING:  # the products of the stage before are done: its place is free
                    if WARPS > 4:  # in both groups of warps
                        barrier()
                    o_next, wanted = turn - 1 + STAGES, (turn > 0) & (turn - 1 + STAGES < count)
                    o_k = (begin + o_next) * BK
                    _ask(codes, full, w_smem, before, which, line, o_k, wanted, FORM)
                    _load(d_x, [row, o_k], full.index(before), x_smem.index(before), wanted)
                for u in gl.static_range(STEPS):
                    b_x = x_smem.index(at + stage).slice(u * STEP, STEP, dim=1).permute((1, 0))
                    b_beside = None
                    if table is not None:
                        b_beside = b_base
                    elif ZEROS:
                        o_group = gl.minimum((o_turn * BK + u * STEP) // GROUP, columns // SIDE - 1) + o_zero
                        b_zero = _zeros(p_zeros, above.zeros, o_group, o_shift, is_first_zero, GATES, dtype, FORM.fold)
                        b_beside = gl.expand_dims(gl.expand_dims(b_zero, 1), 2).broadcast_to([BM, STEP // 8, 4])
                    o_tile = ((at + stage) * FORM.groups + OF % FORM.groups) * TILES + u * WORDS.shape[1] // WIDE
                    codes_smem = w_smem.index(o_tile).slice(u * WORDS.shape[1] % WIDE, WORDS.shape[1], dim=1)
                    b_w = _numbers(codes_smem, b_beside, b_unit, FORM.bits, WORDS, UNITS, CODES, ASSEMBLY, dtype)
                    if GROUPED:
                        if ALONE and j + u > 0:
                            b_part = mma_wait(0, deps=(b_parts[j * STEPS + u - 1],))
                            b_sum = _fma(b_part, b_scales[j * STEPS + u - 1][:, None], b_sum)
                        if j > 0 and u == 0:
                            barrier()  # all warps of the group have read
                            mbarrier.arrive(free.index(at + before))
                        b_parts += (mma(b_w, b_x, b_none, use_acc=False, is_async=True),)  # type: ignore[assignment]
                        if not ALONE and u > 0:
                            b_sum = _fma(mma_wait(1, deps=(b_parts[u - 1],)), b_scales[u - 1][:, None], b_sum)
                    else:
                        b_sum = mma(b_w, b_x, b_sum, is_async=True)
                if not GROUPED and j > 0:
                    b_sum = mma_wait(STEPS, deps=(b_sum,))
                    barrier()
                    mbarrier.arrive(free.index(at + before))
                if j == TURNS - 1:
                    if GROUPED:
                        b_part = mma_wait(0, deps=(b_parts[TURNS * STEPS - 1],))
                        b_sum = _fma(b_part, b_scales[TURNS * STEPS - 1][:, None], b_sum)
                    else:
                        b_sum = mma_wait(0, deps=(b_sum,))
                    if RING:
                        barrier()
                        mbarrier.arrive(free.index(at + stage))
                before = stage
                stage += 1
                if stage == STAGES:
                    stage = 0
                    phase ^= 1
        if not GROUPED:
            b_sum = _times(b_sum, b_line[:, None])
        if PARTS == 2 and i == 0:
            if SHARE == 1:
                half_smem.store(b_sum)
                barrier()
                mbarrier.arrive(free.index(2 * STAGES))
            else:
                mbarrier.wait(free.index(2 * STAGES), 0)
                half_smem.store(b_sum + half_smem.load(SUMS))
            b_sum = b_none
    barrier()  # as in kernels/linear/hopper.py
    if SERIES > 1:  # one share's sum lies where its rows were
        sums = _as(x_smem.index(STAGES), gl.float32, [BM, BR], KEPT)
        if SHARE == 1:
            sums.store(b_sum)
            barrier()
            mbarrier.arrive(free.index(2 * STAGES + 1))
            return
        mbarrier.wait(free.index(2 * STAGES + 1), 0)
        b_sum = b_sum + sums.load(SUMS)
        if PARTS == 2:
            b_sum = half_smem.load(SUMS) + b_sum
    if SIDE > 1:
        b_sum = _joined(b_sum, SIDE, BM, BR, SUMS, OUT)

    o_told = gl.arange(0, BM // SIDE, gl.SliceLayout(1, TOLD))
    is_told = o_told < BC
    o_line = gl.minimum(o_first + o_told % BC, lines - 1)
    if FORM.bias:
        b_sum += _of_lines(p_bias, above.bias, o_line, is_told, GATES)[:, None]
    if FORM.apart:
        b_out = gl.convert_layout(b_sum, OUT)
    elif GATES == 2:
        PAIRS: gl.constexpr = gl.BlockedLayout(
            [8, 1, 2], [min(32, BC // 8), 32 // min(32, BC // 8), 1], [1, WARPS, 1], [2, 0, 1]
        )
        b_both = gl.permute(gl.reshape(b_sum.to(dtype), [2, BC, BR]), (1, 2, 0))
        b_gate, b_up = gl.split(gl.convert_layout(b_both, PAIRS))
        b_gate, b_up = gl.convert_layout(b_gate, OUT).to(gl.float32), gl.convert_layout(b_up, OUT).to(gl.float32)
        b_in = b_gate + FORM.cubic * b_gate * b_gate * b_gate if FORM.cubic != 0.0 else b_gate
        b_gate = (b_gate / (1.0 + gl.exp(-FORM.alpha * b_in))).to(dtype)
        b_out = (b_gate.to(gl.float32) * b_up).to(dtype)
    else:
        b_out = gl.convert_layout(b_sum.to(dtype), OUT)
    o_m = o_first + gl.arange(0, BC, gl.SliceLayout(1, OUT))
    o_r = row // SIDE + gl.arange(0, BR // SIDE, gl.SliceLayout(0, OUT))
    m_out = (o_m < lines)[:, None] & (o_r < R)[None, :]
    gl.store(p_out + (part * R + o_r)[None, :].to(gl.int64) * M + (first + o_m)[:, None], b_out, mask=m_out)


@gluon.jit(do_not_specialize=["R"])
def _hopper_stored(
    d_first, d_second, d_third, weights, d_x, p_out, R, M, stages, table, FORM: gl.constexpr, PDL: gl.constexpr
):
    """Out [R, M] in d_x's dtype, or apart [S, R, M] fp32. The grid's second side counts tiles of rows. With parts side
    by side codes and rows are those of the parts; a series divides the stages."""
    BC: gl.constexpr = FORM.groups * FORM.lines // FORM.launch.side // FORM.gates
    S: gl.constexpr = FORM.launch.parts
    COUNT: gl.constexpr = FORM.count
    STAGES: gl.constexpr = FORM.launch.stages
    codes = (d_first, d_second, d_third)
    tile, part, which, first, lines = gl.program_id(0) // S, gl.program_id(0) % S, 0, 0, weights[0].lines
    p_scales, p_bias, columns, block = weights[0].scales, weights[0].bias, weights[0].columns, weights[0].block_m
    p_zeros, p_nested, p_factors, p_offset = weights[0].zeros, weights[0].nested, weights[0].factors, weights[0].offset
    if FORM.gates == 1:
        for i in gl.static_range(1, COUNT):
            tiles = (lines + BC - 1) // BC
            if (which == i - 1) & (tile >= tiles):
                tile -= tiles
                which = i
                first += lines
                lines, columns, block = weights[i].lines, weights[i].columns, weights[i].block_m
                p_scales = weights[i].scales
                if FORM.zeros:
                    p_zeros = weights[i].zeros
                if FORM.nested:
                    p_nested, p_factors, p_offset = weights[i].nested, weights[i].factors, weights[i].offset
                if FORM.bias:
                    p_bias = weights[i].bias
    line, row, count = tile * (BC * FORM.launch.side), gl.program_id(1) * FORM.launch.rows, stages // S
    begin = part * count
    WIDE: gl.constexpr = d_first.block_shape[1]
    TILES: gl.constexpr = STAGES * FORM.groups * (FORM.launch.depth * FORM.bits // 32 // WIDE)
    w_smem = gl.allocate_shared_memory(d_first.dtype, [TILES, FORM.lines, WIDE], d_first.layout)
    x_smem = gl.allocate_shared_memory(d_x.dtype, [STAGES, FORM.launch.rows, FORM.launch.depth], d_x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = full
    if FORM.launch.ring:
        free = gl.allocate_shared_memory(gl.int64, [STAGES + 2, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES, STAGES + 2):
            mbarrier.init(free.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        if FORM.launch.ring:
            mbarrier.init(free.index(i), count=FORM.groups)
    fence()
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    chosen = (p_scales, p_zeros, p_nested, p_factors, p_offset, p_bias, lines, columns, block)
    half_smem = full
    if FORM.launch.series == 4:
        half_smem = gl.allocate_shared_memory(gl.float32, [FORM.lines, FORM.launch.rows], KEPT)
    memory = (codes, d_x, full, free, w_smem, x_smem, half_smem)
    place = (which, line, row, begin, count)
    out = (table, weights, chosen, first, part, p_out, R, M)
    if not FORM.launch.ring:
        for i in gl.static_range(STAGES):
            _ask(codes, full, w_smem, i, which, line, (begin + i) * FORM.launch.depth, i < count, FORM)
    elif table is not None:
        _fill(table, FORM)
    if not FORM.launch.ring:
        _products(0, memory, place, out, FORM, PDL)
    elif FORM.groups == FORM.launch.series:
        gl.warp_specialize(
            [(_products, (0, memory, place, out, FORM, PDL)), (_load_ring, (memory, place, FORM, PDL))], [1], [24]
        )
    else:
        gl.warp_specialize(
            [
                (_products, (0, memory, place, out, FORM, PDL)),
                (_products, (1, memory, place, out, FORM, PDL)),
                (_load_ring, (memory, place, FORM, PDL)),
            ],
            [4, 1],
            [232, 24],
        )


def step_of(weight: StoredWeight) -> int:
    """Input channels of a step."""
    group = min(weight.block[1], weight.depth)
    return STEP if group == weight.depth else min(STEP, group)


def parts_of(weight: StoredWeight) -> int:
    """Parts that a weight's depth is cut in, by its shape and its groups alone."""
    (channels, depth), group = weight.shape, min(weight.block[1], weight.depth)
    if channels > FEW or not weight.codes.is_contiguous() or weight.codes.shape[1] * 8 != depth * weight.kind.bits:
        return 1
    whole = (parts for parts in (4, 2) if depth % (parts * STEP) == 0)
    return next((parts for parts in whole if group == depth or depth // parts % group == 0), 1)


def takes(x: Tensor, weight: StoredWeight) -> bool:
    """True where this kernel multiplies x [R, K] by a weight, which follows from the weight, the dtype and the device
    alone: on Hopper, in 16 bits, codes that `pair_assembly` knows, whose groups are whole steps, lines (not with nested
    scales or zero points), or 64 or 32 channels, in their order, with zero points of 4 bits in words, aligned to 16
    bytes."""
    depth, group, codes, bits = weight.depth, min(weight.block[1], weight.depth), weight.codes, weight.kind.bits
    words = weight.zeros is None or (bits == 4 and weight.zeros.dtype == torch.int32)
    whole = group == depth and (weight.nested is not None or weight.zeros is not None)
    if not words or whole or weight.groups is not None or x.element_size() != 2 or not is_hopper(x.device):
        return False
    aligned = (codes.data_ptr() | codes.stride(0)) % 16 == 0 and depth % 8 == 0
    stepped = group == depth or group % STEP == 0 or group in (32, 64)
    return aligned and stepped and depth >= STEP and pair_assembly(weight.kind, x.dtype, False) is not None


def launch_of(
    weights: Sequence[StoredWeight], rows: int, gated: bool, apart: bool = False, most_stages: int = STAGES
) -> HopperLaunch:
    """The launch of weights beside each other, or of a gate and an up part; with `apart` of programs for each part of a
    depth, that are left to a norm. They were found on an H200 for the shapes of a model of 8 billion weights, over
    weights that were not in the L2. How parts are summed changes no bit. As many programs stand side by side on a
    multiprocessor as there are: that hides more than stages do. More than SIDEWAYS rows take tiles that read rows half
    as often, but for parts in series whose lower tiles have a multiprocessor each. Nested scales have shorter stages,
    for the registers' sake."""
    one, parts = weights[0], 1 if gated else min(map(parts_of, weights))
    bits, table, nested, cut = one.kind.bits, bool(one.kind.table), one.nested is not None, one.depth // parts
    side = parts if not apart and parts * rows <= SIDEWAYS else 1
    series = parts if not apart and side == 1 else 1
    lines = sum(weight.shape[0] for weight in weights) * side * (parts if apart else 1)
    few = series > 1 and -(-lines // 64) * -(-rows // SIDEWAYS) <= MULTIPROCESSORS
    tallest = SIDEWAYS if few or step_of(one) <= 32 else TALLEST
    wide = min(tallest, max(8, 1 << (rows * side - 1).bit_length()))
    tall, lined = wide > SIDEWAYS, min(one.block[1], one.depth) == one.depth
    ring = tall or series > 1 or (table and side == 1 and wide > 16)
    several = series == 1 and (tall or gated or not ring if table else tall and lined and cut > SHALLOW)
    channels = 128 if several else 64
    programs = -(-lines // channels) * -(-rows * side // wide)
    here = 1 + (programs - 1) // MULTIPROCESSORS
    if ring or channels == 128:  # registers hold no more
        here = min(here, 1 if channels == 128 and wide > 16 else 2)
    if wide <= 16:
        most = 512 if bits == 4 and not nested else 128 if bits == 8 and gated and wide > 8 else 256
    elif ring or gated or side > 1:
        most = 256 if ring and gated and not tall else 128
    else:
        most = 512 if bits == 4 and not nested and here == series == 1 else 256
    depth = next((each for each in (512, 256) if each <= most and cut % each == 0), STEP)
    stage = depth * (channels * bits // 8 + 2 * wide)
    scratch = channels * wide * 2 if ring else 0  # for the change of layout of what is written
    stages = max(2, min((SHARED // here - TABLE * table - scratch) // stage, most_stages))
    if series > 1:  # a stage for either half at least
        kept = 4 * channels * wide * (series == 4)
        stages = max(4, min((SHARED - TABLE * table - kept) // stage, 2 * most_stages) // 2 * 2)
    if table:  # else the launcher grants a program 48 KiB, this table among them
        stages = max(stages, (48 << 10) // stage + 1)
    return HopperLaunch(channels, depth, stages, stages, parts if apart else 1, wide, side, series, ring=ring)


def hopper_stored(
    x: Tensor,
    weights: Sequence[StoredWeight],
    biases: Sequence[Tensor | None],
    out: Tensor,
    launch: HopperLaunch,
    kind: Activation | None = None,
) -> None:
    """Fill out [..., M], or out [S, ..., M] fp32 with the parts, contiguous, with the products of x [R, K] and up to
    three weights of one form, side by side, or with a kind opened(gate) * up; operands as `takes` says."""
    (rows, depth), one, side, gates = x.shape, weights[0], launch.side, 1 if kind is None else 2
    if not x.is_contiguous() or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    group, step, lines, bits = min(one.block[1], depth), step_of(one), launch.channels // side // gates, one.kind.bits
    operands, described, tiles = [], [], 0
    for weight, bias in zip(weights, biases, strict=True):
        codes = weight.codes[:, : depth * bits // 8]
        codes = codes if side == 1 else codes.view(-1, codes.shape[1] // side)
        width = launch.depth * bits // 32
        width = width if gates == 1 else min(width, 32)  # of two weights a tile is as wide as its swizzle
        described.append(descriptor(codes.view(torch.int32), (64 if launch.ring else launch.channels) // gates, width))
        whole = operands_of(weight, bias)
        operands.append(whole._replace(codes=None, groups=None, block_k=None, stride=None, ahead=None, first=None))
        tiles += -(-weight.shape[0] // lines)
    rows_of_parts = x if side == 1 else x.view(rows * side, -1)
    steps, cut = launch.depth // step, launch.parts * launch.series
    # Scales of a stage's steps share a factor where stages begin at whole multiples of so many scales.
    shared = one.nested is not None and one.nested.block % steps == 0 and group == step
    shared = shared and all(weight.scales.shape[1] % (side * steps) == 0 for weight in weights)
    form = HopperForm(
        launch=launch,
        lines=64 if launch.ring else launch.channels,
        groups=launch.channels // 64 if launch.ring else 1,
        warps=4 if launch.ring else launch.channels // 16,
        step=step,
        count=len(weights),
        gates=gates,
        bits=bits,
        group=group,
        grouped=group < depth,
        zeros=one.zeros is not None,
        nested=0 if one.nested is None else one.nested.block,
        factors=1 if shared else steps,
        turns=TURNS
        if launch.ring and steps == 1 and launch.rows <= SIDEWAYS and depth % (2 * cut * launch.depth) == 0
        else 1,
        bias=biases[0] is not None,
        apart=out.dtype == torch.float32,
        alpha=(kind or SILU).alpha,
        cubic=(kind or SILU).cubic,
        fold=fold(one.kind, x.dtype),
        assembly=pair_assembly(one.kind, x.dtype, one.zeros is not None),
    )
    _hopper_stored[(tiles // gates * launch.parts, -(-rows * side // launch.rows))](
        *(described + described[:1] * 2)[:3],
        tuple(operands),
        descriptor(rows_of_parts, launch.rows, launch.depth),
        out,
        rows,
        out.shape[-1],
        -(-depth // side // launch.depth),
        pair_table(one.kind, x.dtype, x.device) if one.kind.table else None,
        FORM=form,
        num_warps=form.warps,
        maxnreg=128 if launch.ring and form.groups == launch.series else None,
        **dependent(x.device),
    )


@dataclass(frozen=True, slots=True)
class HopperForm:
    """Form of a program, which it is compiled for; `lines` and `warps` are those of each of its groups of warps."""

    launch: HopperLaunch
    lines: int
    groups: int
    warps: int
    step: int
    count: int
    gates: int
    bits: int
    group: int
    grouped: bool
    zeros: bool
    nested: int
    factors: int
    turns: int
    bias: bool
    apart: bool
    alpha: float
    cubic: float
    fold: float
    assembly: str | None
    room: str = ROOM
    place: str = PLACE
    fill: str = FILL
