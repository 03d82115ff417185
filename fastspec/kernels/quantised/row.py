"""One row times stored weights on Hopper: warps on their own, which hardly compute anything but their products.

K input channels, M output channels. A warp takes 16 output channels, of a gate and of an up part each, and a share of
the depth. It asks for stages of its codes while one is multiplied, the first ones while the kernel in front still runs,
and waits for no other warp. Its tensor cores' tiles are 16 channels by 8 columns, each of which is the row
(row_programs.py makes the numbers). They add up 16 products at once as those of tall tiles do: the bits are those of
hopper.py.

The row lies in shared memory as threads read it. With groups a group's sum goes there too; at the end a thread for each
channel and part of the depth adds them up, times their scales, in order. Parts are added up as (0 + 1) + (2 + 3). Gluon
has no interpreter: tests/helpers/emulator.py runs these statements on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fastspec.kernels.launch import dependent
from fastspec.kernels.linear.reference import SILU, Activation
from fastspec.kernels.quantised import row_programs as programs
from fastspec.kernels.quantised.conversions import fold, pair_table
from fastspec.kernels.quantised.hopper import TABLE, operands_of, parts_of
from fastspec.kernels.quantised.launches import StoredRowLaunch
from fastspec.kernels.quantised.reference import StoredWeight

SHARED, HALF = 227 << 10, 112 << 10
"""Bytes of shared memory of a program, and of one that another stands beside."""
AT_ONCE = 16 * 2 * 132
"""Lines of programs that an H200 runs at once. Each loads a table: of more, as of the 8B shape's queries, keys and
values, tall tiles are faster."""
FEW = 32 << 20
"""Bytes of 8-bit codes without groups. Tall tiles read more of them, and gates, faster: as of an 8B shape's
feed-forward."""
SCALES = torch.bfloat16, torch.float16, torch.float32


@gluon.jit
def _of(first, second, is_first, GATES: gl.constexpr):
    """A place for each thread: one of the first lines, or of the second ones."""
    if GATES == 2:
        place = gl.where(is_first, first.to(gl.int64), second.to(gl.int64))
    else:
        place = gl.where(is_first, first.to(gl.int64), first.to(gl.int64))
    return place


@gluon.jit
def _fp32(place):
    return gl.load(place.to(gl.pointer_type(gl.float32)))


@gluon.jit(do_not_specialize=["steps"])
def _row_stored(p_x, weights, p_out, steps, table, FORM: gl.constexpr, PDL: gl.constexpr):
    """Out of x [1, K] and up to three weights side by side, or of a gate and an up part, by `steps` stages of a
    share."""
    GATES: gl.constexpr = FORM.gates
    SHARES: gl.constexpr = FORM.shares
    WARPS: gl.constexpr = GATES * SHARES
    COUNT: gl.constexpr = 32 * WARPS
    LINES: gl.constexpr = 16 * GATES
    PARTS: gl.constexpr = FORM.parts
    STAGES: gl.constexpr = FORM.stages
    SIZE: gl.constexpr = FORM.size
    STAGE: gl.constexpr = 16 * (SIZE + FORM.pad)
    COLUMNS: gl.constexpr = FORM.columns
    PITCH: gl.constexpr = FORM.pitch
    DEEP: gl.constexpr = SIZE * 8 // FORM.bits  # input channels of a stage
    THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    smem = gl.allocate_shared_memory(
        gl.int32, [FORM.shared // (4 * COUNT), COUNT], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    thread = gl.arange(0, COUNT, THREADS)
    lane, warp = thread % 32, thread // 32
    smem.index(FORM.at_none // (4 * COUNT)).store(thread)  # memory that nothing names is not given
    base = gl.inline_asm_elementwise(FORM.memory, "=r,r", [thread], gl.int32, False, 1)

    WEIGHTS: gl.constexpr = FORM.count
    tile, which, first, one, above = gl.program_id(0), 0, 0, weights[0], weights[GATES - 1]
    p_codes, p_scales, p_zeros, p_bias, block, lines = (
        one.codes,
        one.scales,
        one.zeros,
        one.bias,
        one.block_m,
        one.lines,
    )
    p_nested, p_factors, p_offset = one.nested, one.factors, one.offset
    if GATES == 1:
        for i in gl.static_range(1, WEIGHTS):
            if (which == i - 1) & (tile >= lines // 16):
                tile -= lines // 16
                which = i
                first += lines
                p_codes, p_scales, block, lines = (
                    weights[i].codes,
                    weights[i].scales,
                    weights[i].block_m,
                    weights[i].lines,
                )
                if FORM.zeros:
                    p_zeros = weights[i].zeros
                if FORM.bias:
                    p_bias = weights[i].bias
                if FORM.nested:
                    p_nested, p_factors, p_offset = weights[i].nested, weights[i].factors, weights[i].offset
    begin = tile * 16

    gate, share = warp // SHARES, warp % SHARES
    PIECES: gl.constexpr = SIZE // 16
    o_line, o_piece = lane // PIECES, lane % PIECES * 16
    p_from = _of(p_codes, above.codes, gate == 0, GATES) + (begin + o_line).to(gl.int64) * FORM.stride
    p_from += share * (steps * SIZE) + o_piece
    ring = base + FORM.at_ring + warp * (STAGES * STAGE)
    into = ring + o_line * (SIZE + FORM.pad) + o_piece
    for i in gl.static_range(STAGES - 1):
        wanted = thread * 0 + (i < steps).to(gl.int32)
        gl.inline_asm_elementwise(
            FORM.ask, "=r,r,l,r", [into + i * STAGE, p_from + i * SIZE, wanted], gl.int32, False, 1
        )

    quarter, t = lane // 4, lane % 4
    o_mine = gate * 16 + quarter + t % 2 * 8  # the line whose sum a thread has
    b_line = gl.zeros([COUNT], gl.float32, THREADS)
    if FORM.grouped:
        QUADS: gl.constexpr = COLUMNS // 4
        for i in gl.static_range((LINES * QUADS + COUNT - 1) // COUNT):
            o_at = i * COUNT + thread
            o_told, o_group = gl.minimum(o_at // QUADS, LINES - 1), o_at % QUADS * 4
            o_scale = ((begin + o_told % 16) // block * COLUMNS + o_group).to(gl.int64)
            is_first = o_told < 16
            p_scale = _of(p_scales, above.scales, is_first, GATES) + o_scale * FORM.scale_bytes
            p_open, b_factor, b_offset = p_scale, b_line, b_line
            if FORM.nested:
                p_open = _of(p_nested, above.nested, is_first, GATES)
                b_factor = _fp32(_of(p_factors, above.factors, is_first, GATES) + o_scale // FORM.nested * 4)
                b_offset = _fp32(_of(p_offset, above.offset, is_first, GATES))
            at = base + FORM.at_scales + (o_told * PITCH + o_group) * 4
            given = [at, p_scale, o_at, p_open, b_factor, b_offset]
            gl.inline_asm_elementwise(FORM.opened, "=r,r,l,r,l,f,f", given, gl.int32, False, 1)
    else:
        o_scale = (begin + o_mine % 16) // block
        b_line = gl.load(p_scales + o_scale).to(gl.float32)
        if GATES == 2:
            b_line = gl.where(gate == 0, b_line, gl.load(above.scales + o_scale).to(gl.float32))
        b_line *= FORM.fold
    if FORM.zeros:
        for i in gl.static_range((LINES * COLUMNS + COUNT - 1) // COUNT):
            o_at = i * COUNT + thread
            o_told, o_group = gl.minimum(o_at // COLUMNS, LINES - 1), o_at % COLUMNS
            o_zero = begin + o_told % 16
            b_word = gl.load(p_zeros + o_zero // 8 * COLUMNS + o_group)
            if GATES == 2:
                b_word = gl.where(o_told < 16, b_word, gl.load(above.zeros + o_zero // 8 * COLUMNS + o_group))
            b_less = ((b_word >> (o_zero % 8 * 4)) & 15).to(gl.float32) * (-1.0 / FORM.fold)
            b_less = b_less.to(gl.bfloat16).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
            at = base + FORM.at_zeros + (o_told * PITCH + o_group) * 4
            given = [at, b_less | (b_less << 16), o_at, thread * 0 + LINES * COLUMNS]
            gl.inline_asm_elementwise(FORM.store_some, "=r,r,r,r,r", given, gl.int32, False, 1)
    if table is not None:
        for i in gl.static_range(256 // WARPS):
            o_entry = i * WARPS + warp
            given = [base + FORM.at_table + o_entry * 128 + lane * 4, gl.load(table + o_entry)]
            gl.inline_asm_elementwise(FORM.store, "=r,r,r", given, gl.int32, False, 1)

    if PDL:
        tl.extra.cuda.gdc_wait()
    UNITS: gl.constexpr = FORM.depth // 8
    for i in gl.static_range((UNITS + COUNT - 1) // COUNT):
        o_unit = gl.minimum(i * COUNT + thread, UNITS - 1)
        o_from = (o_unit // 4 * 64 + o_unit % 4 * FORM.neighbours).to(gl.int64)
        given = [base + FORM.at_row + o_unit * 16, p_x.to(gl.int64) + o_from]
        gl.inline_asm_elementwise(FORM.row, "=r,r,l", given, gl.int32, False, 1)
    gl.inline_asm_elementwise(FORM.together, "=r,r", [thread], gl.int32, False, 1)

    read = ring + quarter * (SIZE + FORM.pad)
    if FORM.bits == 8:
        read = ring + lane % 16 * (SIZE + FORM.pad) + lane // 16 * 16
    row = base + FORM.at_row + share * (steps * DEEP * 2) + t * 16
    sums = base + FORM.at_sums + o_mine * (PITCH * 4)
    own = base + FORM.at_table + lane * 4
    if FORM.grouped:
        sums += share * (steps * DEEP // FORM.group) * 4
    if FORM.zeros:
        own = base + FORM.at_zeros + (gate * 16 + quarter) * (PITCH * 4) + share * (steps * DEEP // FORM.group) * 4
    c0, c1, c2, c3 = b_line * 0.0, b_line * 0.0, b_line * 0.0, b_line * 0.0
    slot, free, p_ahead = 0, (STAGES - 1) * STAGE, p_from + (STAGES - 1) * SIZE
    for step in range(steps):
        gl.inline_asm_elementwise(FORM.wait, "=r,r", [thread], gl.int32, False, 1)
        is_left = thread * 0 + (step + (STAGES - 1) < steps).to(gl.int32)
        gl.inline_asm_elementwise(FORM.ask, "=r,r,l,r", [into + free, p_ahead, is_left], gl.int32, False, 1)
        if FORM.grouped:
            gl.inline_asm_elementwise(FORM.stage, "=r,r,r,r,r,r", [read + slot, row, sums, own, t], gl.int32, False, 1)
            sums += DEEP // FORM.group * 4
            if FORM.zeros:
                own += DEEP // FORM.group * 4
        else:
            c0, c1, c2, c3 = gl.inline_asm_elementwise(
                FORM.stage,
                "=f,=f,=f,=f,r,r,r,r,r,f,f,f,f",
                [read + slot, row, sums, own, t, c0, c1, c2, c3],
                (gl.float32, gl.float32, gl.float32, gl.float32),
                False,
                1,
            )
        p_ahead += SIZE
        row += DEEP * 2
        free = slot
        slot += STAGE
        slot = 0 if slot == STAGES * STAGE else slot

    parts = base + FORM.at_parts
    if FORM.grouped:
        gl.inline_asm_elementwise(FORM.together, "=r,r", [thread], gl.int32, False, 1)
        o_told = gl.minimum(thread, LINES * PARTS - 1)
        at = base + (o_told % LINES * PITCH + o_told // LINES * (COLUMNS // PARTS)) * 4
        given = [at + FORM.at_sums, at + FORM.at_scales, warp * 32]
        b_sum = gl.inline_asm_elementwise(FORM.scaled, "=f,r,r,r", given, gl.float32, False, 1)
        given = [parts + o_told * 4, b_sum, thread, thread * 0 + LINES * PARTS]
        gl.inline_asm_elementwise(FORM.store_some, "=r,r,f,r,r", given, gl.int32, False, 1)
    else:
        b_sum = gl.where(t % 2 == 1, c2, c0)
        b_sum = gl.inline_asm_elementwise(FORM.times, "=f,f,f", [b_sum, b_line], gl.float32, True, 1)
        given = [parts + (share * LINES + o_mine) * 4, b_sum, t, thread * 0 + 2]
        gl.inline_asm_elementwise(FORM.store_some, "=r,r,f,r,r", given, gl.int32, False, 1)
    gl.inline_asm_elementwise(FORM.together, "=r,r", [thread], gl.int32, False, 1)

    o_out = thread % 16
    at = parts + o_out * 4
    b_sum = gl.inline_asm_elementwise(FORM.load, "=f,r", [at], gl.float32, False, 1)
    if PARTS > 1:
        b_sum += gl.inline_asm_elementwise(FORM.load, "=f,r", [at + LINES * 4], gl.float32, False, 1)
    if PARTS == 4:
        b_two = gl.inline_asm_elementwise(FORM.load, "=f,r", [at + LINES * 8], gl.float32, False, 1)
        b_sum += b_two + gl.inline_asm_elementwise(FORM.load, "=f,r", [at + LINES * 12], gl.float32, False, 1)
    if FORM.bias:
        b_sum += gl.load(p_bias + begin + o_out).to(gl.float32)
    b_out = b_sum.to(gl.bfloat16)
    if GATES == 2:
        b_up = gl.inline_asm_elementwise(FORM.load, "=f,r", [at + 64], gl.float32, False, 1)
        if FORM.bias:
            b_up += gl.load(above.bias + begin + o_out).to(gl.float32)
        b_gate = b_out.to(gl.float32)
        b_in = b_gate + FORM.cubic * b_gate * b_gate * b_gate if FORM.cubic != 0.0 else b_gate
        b_gate = (b_gate / (1.0 + gl.exp(-FORM.alpha * b_in))).to(gl.bfloat16)
        b_out = (b_gate.to(gl.float32) * b_up.to(gl.bfloat16).to(gl.float32)).to(gl.bfloat16)
    gl.store(p_out + first + begin + o_out, b_out, mask=thread < 16)
    smem._keep_alive()


@dataclass(frozen=True, slots=True)
class RowForm:
    """Form of a program, which it is compiled for: warps for `shares` of the depth, stages of `size` bytes of a line,
    and places in shared memory."""

    bits: int
    depth: int
    group: int
    grouped: bool
    nested: int
    zeros: bool
    bias: bool
    gates: int
    count: int
    parts: int
    shares: int
    size: int
    stages: int
    stride: int
    columns: int
    pitch: int
    scale_bytes: int
    neighbours: int
    fold: float
    alpha: float
    cubic: float
    at_table: int
    at_row: int
    at_ring: int
    at_sums: int
    at_scales: int
    at_zeros: int
    at_parts: int
    at_none: int
    shared: int
    ask: str
    wait: str
    stage: str
    row: str
    opened: str
    scaled: str
    pad: int = programs.PAD
    memory: str = programs.SHARED
    load: str = programs.LOAD
    store: str = programs.STORE
    store_some: str = programs.STORE_SOME
    times: str = programs.TIMES
    together: str = "bar.sync 0; mov.u32 $0, 0;"


def form_of(
    weights: Sequence[StoredWeight],
    gated: bool,
    shares: int,
    size: int,
    stages: int,
    kind: Activation = SILU,
    biased: bool = False,
) -> RowForm | None:
    """The form of a launch, or None where it does not divide the depth and its groups, or shared memory is short."""
    one, gates, parts = weights[0], 1 + gated, 1 if gated else min(map(parts_of, weights))
    depth, group, columns = one.depth, min(one.block[1], one.depth), one.scales.shape[1]
    grouped, bits, deep = group < depth, one.kind.bits, size * 8 // one.kind.bits
    steps, rest = divmod(depth, shares * deep)
    divided = shares % parts == 0 and columns % (4 * parts) == 0 and deep % group == 0 if grouped else shares == parts
    if rest or not steps or not divided:
        return None
    warps, lines, pitch = gates * shares, 16 * gates, columns + 4
    kept = lines * pitch * 4 * grouped
    sizes = TABLE * bool(one.kind.table), depth * 2, warps * stages * 16 * (size + programs.PAD), kept, kept
    ends = [0]
    for each in (*sizes, lines * pitch * 4 * (one.zeros is not None), parts * lines * 4, 128 * warps):
        ends.append(ends[-1] + -(-each // (128 * warps)) * 128 * warps)
    if ends[-1] > SHARED:
        return None
    table, row, ring, sums, scales, zeros, in_parts, none, shared = ends
    return RowForm(
        bits=bits,
        depth=depth,
        group=group,
        grouped=grouped,
        nested=0 if one.nested is None else one.nested.block,
        zeros=one.zeros is not None,
        bias=biased,
        gates=gates,
        count=len(weights),
        parts=parts,
        shares=shares,
        size=size,
        stages=stages,
        stride=one.codes.stride(0),
        columns=columns,
        pitch=pitch,
        scale_bytes=one.scales.element_size(),
        neighbours=4 if one.kind.table else 8,
        fold=fold(one.kind, torch.bfloat16),
        alpha=kind.alpha,
        cubic=kind.cubic,
        at_table=table,
        at_row=row,
        at_ring=ring,
        at_sums=sums,
        at_scales=scales,
        at_zeros=zeros,
        at_parts=in_parts,
        at_none=none,
        shared=shared,
        ask=programs.ask(size, one.codes.stride(0)),
        wait=programs.wait(stages),
        stage=programs.stage(one.kind, size, group if grouped else None, one.zeros is not None, pitch * 4),
        row=programs.row(one.kind),
        opened=programs.opened(one.scales.dtype, lines * columns // 4, fold(one.kind, torch.bfloat16))
        if grouped
        else "",
        scaled=programs.scaled(columns // parts, lines * parts) if grouped else "",
    )


def _launches(weights: Sequence[StoredWeight], gated: bool) -> Iterator[tuple[int, int, int]]:
    """Shares of the depth, bytes of a line a stage and stages: those that were the fastest on an H200, of the products
    of an 8B shape, and others for a depth that these do not divide."""
    one, parts = weights[0], 1 if gated else min(map(parts_of, weights))
    grouped, bits = one.block[1] < one.depth, one.kind.bits
    if one.kind.table:
        yield 8, 64, 2
    elif grouped and bits == 4:
        yield (8, 128, 2) if not gated else (2, 128, 3) if one.zeros is not None else (4, 128, 2)
    elif grouped:
        yield (4, 128, 3) if gated else (8, 128, 3)
    most = 8 if grouped else parts
    for shares in (each for each in (8, 4, 2, 1) if parts <= each <= most):
        for size in (256, 128, 64) if bits == 8 else (128, 64):
            yield from ((shares, size, stages) for stages in (3, 2))


def launched(
    weights: Sequence[StoredWeight],
    gated: bool,
    kind: Activation = SILU,
    biased: bool = False,
    tuned: StoredRowLaunch | None = None,
) -> RowForm | None:
    """The form of the launch of weights side by side, or of a gate and an up part: the tuned one's, or the first that
    leaves room for a second program, or the first at all. None where this kernel takes none."""
    one = weights[0]
    nested = () if one.nested is None else (one.nested.table, one.nested.factors, one.nested.offset)
    known = all(each.dtype == torch.float32 for each in nested) if nested else one.scales.dtype in SCALES
    aligned = all(weight.shape[0] % 16 == 0 and weight.scales.data_ptr() % 16 == 0 for weight in weights)
    alike = {(weight.scales.dtype, weight.codes.stride(0), weight.block[0] * gated) for weight in weights}
    if not known or not aligned or len(alike) > 1 or (one.nested is not None and one.nested.block % 4):
        return None
    if tuned is not None:
        return form_of(weights, gated, tuned.shares, tuned.size, tuned.stages, kind, biased)
    if not gated and one.kind.table and sum(weight.shape[0] for weight in weights) > AT_ONCE:
        return None
    if (
        one.kind.bits == 8
        and one.block[1] >= one.depth
        and (gated or sum(weight.codes.nbytes for weight in weights) > FEW)
    ):
        return None
    found = (form_of(weights, gated, *each, kind=kind, biased=biased) for each in _launches(weights, gated))
    widest = None
    for form in filter(None, found):
        if form.shared <= HALF:
            return form
        widest = widest or form
    return widest


def stored_row(
    x: Tensor, weights: Sequence[StoredWeight], biases: Sequence[Tensor | None], out: Tensor, form: RowForm
) -> None:
    """Fill out [..., M], contiguous, with the products of x [1, K] in bf16 and weights of one form, side by side, or of
    a gate and an up part."""
    if not x.is_contiguous() or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    operands, channels = [], sum(weight.shape[0] for weight in weights)
    for weight, bias in zip(weights, biases, strict=True):
        whole = operands_of(weight, bias)
        operands.append(whole._replace(groups=None, block_k=None, stride=None, ahead=None, first=None))
    one = weights[0]
    _row_stored[(channels // (16 * form.gates),)](
        x,
        tuple(operands),
        out,
        form.depth * form.bits // 8 // form.shares // form.size,
        pair_table(one.kind, x.dtype, x.device) if one.kind.table else None,
        FORM=form,
        num_warps=form.gates * form.shares,
        **dependent(x.device),
    )
