"""Find where temperature, top-k, top-p and min-p cut each row of scores: what is kept, without a sort.

R rows of scores, V vocabulary, T chunks of the vocabulary. Values are ordered by an integer of 32 bits, their rank, and
the rank at which top-k cuts is found digit by digit: a launch counts, chunk by chunk, how many values have each digit
next, and the last of a row's programs to arrive takes the first digit whose running count passes the level. Top-p is
the same with exp(score) in place of 1. Of scores in half precision only the leading digits can differ. The cut of a row
is a value and, for values equal to it, the first id that is kept.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.drafting.topk_expand import order_bits
from fastspec.kernels.launch import dependent, wait_for_previous
from fastspec.kernels.verification.reference import SamplingSettings

CHUNK, CHUNK_WARPS = 4096, 4
DIGIT_WARPS = {False: 4, True: 8}  # of counts, of masses
CLOSE_WARPS = 8
DIGIT_BITS = 4
DIGITS = tl.constexpr(2**DIGIT_BITS)
STEPS = {torch.float32: 8, torch.float16: 5, torch.bfloat16: 4}  # digits that can differ
_SIGN = tl.constexpr(-(2**31))


@triton.jit
def row_chunk(p_x, row, chunk, vocab, nodes, s_xb, s_xm, BV: tl.constexpr):
    """Ids of one chunk, and its scores in fp32 [BV], -inf past the end."""
    o_v = chunk * BV + tl.arange(0, BV)
    p_row = p_x + (row // nodes) * s_xb + (row % nodes) * s_xm
    return o_v, tl.load(p_row + o_v, mask=o_v < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def kept_chunk(
    p_x,
    p_low,
    p_first,
    row,
    chunk,
    vocab,
    nodes,
    inverse,
    s_xb,
    s_xm,
    BV: tl.constexpr,
    WARP: tl.constexpr,
    CUT: tl.constexpr,
):
    """The same under settings: times the inverse temperature, and -inf below the row's cut. NaN and +inf stay."""
    o_v, b_x = row_chunk(p_x, row, chunk, vocab, nodes, s_xb, s_xm, BV)
    if WARP:
        b_x *= inverse
    if CUT:
        low, first = tl.load(p_low + row), tl.load(p_first + row)
        m_odd = (b_x != b_x) | (b_x == float("inf"))
        b_x = tl.where(m_odd | (b_x > low) | ((b_x == low) & (o_v >= first)), b_x, float("-inf"))
    return o_v, b_x


@triton.jit
def first_above(b_mass, o, level, SIZE: tl.constexpr):
    """The first place of positive mass [SIZE] fp64 whose running sum exceeds level, and the sum before it.

    A parallel running sum may rise by rounding where the mass is 0, or end short of level: so places of mass 0 are
    never taken, and the last place with mass is where none exceeds.
    """
    b_sum = tl.cumsum(b_mass, 0)
    m_some = b_mass > 0.0
    first = tl.min(tl.where(m_some & (b_sum > level), o, SIZE), 0)
    place = tl.minimum(first, tl.max(tl.where(m_some, o, 0), 0))
    return place, tl.max(tl.where(o < place, b_sum, 0.0), 0)


@triton.jit
def _rank(b_x):
    """int32 of fp32 whose digits, read without a sign, order as the values do."""
    return order_bits(b_x) ^ _SIGN


@triton.jit
def _value(rank, end):
    """The fp32 value of a rank whose bits below `end` are those of a value in lower precision: zeros before the order
    is made."""
    bits = rank ^ _SIGN
    bits = tl.where(bits < 0, bits | ((1 << end) - 1), bits)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _highest(p_peak, row, chunks, TP: tl.constexpr):
    """The row's maximum, 0 where all is -inf."""
    o_t = tl.arange(0, TP)
    top = tl.max(tl.load(p_peak + row * chunks + o_t, mask=o_t < chunks, other=float("-inf")), 0)
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit(do_not_specialize=["nodes"])
def _peaks_kernel(
    p_x,
    p_peak,
    p_rank,
    p_level,
    p_low,
    p_arrived,
    vocab,
    nodes,
    chunks,
    level,
    s_xb,
    s_xm,
    BV: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each chunk's maximum, and a row's state before the first digit, of which `level` is top-k's."""
    wait_for_previous(PDL)
    row, chunk = tl.program_id(1).to(tl.int64), tl.program_id(0)
    _, b_x = row_chunk(p_x, row, chunk, vocab, nodes, s_xb, s_xm, BV)
    tl.store(p_peak + row * chunks + chunk, tl.max(b_x, 0))
    if chunk == 0:
        tl.store(p_rank + row, 0)
        tl.store(p_level + row, level)
        tl.store(p_low + row, float("-inf"))
        tl.store(p_arrived + row, 0)


@triton.jit(do_not_specialize=["nodes"])
def _digit_kernel(
    p_x,
    p_peak,
    p_part,
    p_rank,
    p_level,
    p_low,
    p_arrived,
    vocab,
    nodes,
    chunks,
    shift,
    before,
    after,
    share,
    s_xb,
    s_xm,
    MASS: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    BV: tl.constexpr,
    TP: tl.constexpr,
    PDL: tl.constexpr,
):
    """The next digit of the rank that cuts a row: each digit's count or mass in a chunk, then the last one's choice."""
    wait_for_previous(PDL)
    row, chunk = tl.program_id(1).to(tl.int64), tl.program_id(0)
    o_v, b_x = row_chunk(p_x, row, chunk, vocab, nodes, s_xb, s_xm, BV)
    rank = tl.load(p_rank + row)
    b_x *= before
    b_rank = _rank(b_x)
    m_in = (o_v < vocab) & (((b_rank ^ rank) & ((-1 << shift) << 4)) == 0)  # the digits before are those of the cut
    b_digit = (b_rank >> shift) & (DIGITS - 1)
    o_d = tl.arange(0, DIGITS)
    if MASS:
        top = _highest(p_peak, row, chunks, TP) * before * after
        b_x *= after
        b_mass = tl.where(m_in & (b_x >= tl.load(p_low + row)), tl.exp(b_x - top), 0.0)
        b_part = tl.zeros([DIGITS], dtype=tl.float32)
        if tl.max(b_mass, 0) > 0.0:
            # one after another: a tile of values and digits takes too many registers
            for digit in tl.static_range(DIGITS):
                b_part = tl.where(o_d == digit, tl.sum(tl.where(b_digit == digit, b_mass, 0.0), 0), b_part)
    else:
        b_part = tl.histogram(b_digit, DIGITS, mask=m_in).to(tl.float32)
    tl.store(p_part + (row * chunks + chunk) * DIGITS + o_d, b_part)

    tl.debug_barrier()  # all of this program's sums are stored before it says so
    if tl.atomic_add(p_arrived + row, 1, sem="acq_rel") == chunks - 1:
        o_t = tl.arange(0, TP)
        p_row = p_part + (row * chunks + o_t)[:, None] * DIGITS + o_d[None, :]
        b_all = tl.load(p_row, mask=(o_t < chunks)[:, None], other=0.0, cache_modifier=".cg")
        b_sum = tl.sum(b_all.to(tl.float64), 0)
        level = tl.load(p_level + row)
        if MASS and FIRST:
            level = tl.sum(b_sum, 0) * share
        digit, below = first_above(b_sum, o_d, level, DIGITS)
        rank |= digit << shift
        if LAST and not MASS:
            tl.store(p_low + row, _value(rank, shift) * after)
            rank = 0
        tl.store(p_rank + row, rank)
        tl.store(p_level + row, tl.maximum(level - below, 0.0))
        tl.store(p_arrived + row, 0)


@triton.jit(do_not_specialize=["nodes"])
def _close_kernel(
    p_x,
    p_peak,
    p_part,
    p_rank,
    p_level,
    p_low,
    p_first,
    vocab,
    nodes,
    chunks,
    end,
    before,
    after,
    log_min_p,
    s_xb,
    s_xm,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    BV: tl.constexpr,
    TP: tl.constexpr,
    PDL: tl.constexpr,
):
    """A row's cut: top-p's value and the first of the equal ids that it keeps, or a higher value of min-p's."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    top = _highest(p_peak, row, chunks, TP) * before * after
    low = tl.load(p_low + row)
    first = 0
    if TOP_P:
        rank = tl.load(p_rank + row)
        low = _value(rank, end) * after
        o_t = tl.arange(0, TP)
        digit = (rank >> end) & (DIGITS - 1)
        b_mass = tl.load(p_part + (row * chunks + o_t) * DIGITS + digit, mask=o_t < chunks, other=0.0).to(tl.float64)
        # of each of the equal ids, which is all the mass that this digit has
        one = tl.maximum(tl.exp(low - top), 1e-45).to(tl.float64)
        b_count = tl.floor(b_mass / one + 0.5)
        removed = tl.minimum(tl.floor(tl.load(p_level + row) / one), tl.sum(b_count, 0) - 1.0)
        chunk, passed = first_above(b_count, o_t, removed, TP)
        o_v, b_x = row_chunk(p_x, row, chunk, vocab, nodes, s_xb, s_xm, BV)
        m_equal = (o_v < vocab) & ((_rank(b_x * before) >> end) == (rank >> end))
        place, _ = first_above(m_equal.to(tl.float64), tl.arange(0, BV), removed - passed, BV)
        first = chunk * BV + place
    if MIN_P:
        floor = top + log_min_p
        first = tl.where(floor > low, 0, first)
        low = tl.maximum(low, floor)
    tl.store(p_low + row, low)
    tl.store(p_first + row, first)


def cut(x: Tensor, settings: SamplingSettings) -> tuple[Tensor, Tensor]:
    """Bounds at which settings cut scores x [B, N, V] fp32, fp16 or bf16 with a contiguous last dimension -> low [B *
    N] fp32, first [B * N] int32.

    With y = x * (1 / temperature) in fp32, ids with y > low are kept, and those with y == low from id `first` on.
    Masses are summed in fp32 within a chunk of 4096 ids, and in fp64 from there, always in the same order.
    """
    batch, nodes, vocab = x.shape
    rows, chunks, strides, pdl = batch * nodes, triton.cdiv(vocab, CHUNK), x.stride()[:2], dependent(x.device)
    padded = max(2, triton.next_power_of_2(chunks))
    peak, low = (torch.empty(rows, width, dtype=torch.float32, device=x.device) for width in (chunks, 1))
    part = torch.empty(rows, chunks, 2**DIGIT_BITS, dtype=torch.float32, device=x.device)
    level = torch.empty(rows, dtype=torch.float64, device=x.device)
    rank, first, arrived = torch.empty(3, rows, dtype=torch.int32, device=x.device)
    state = x, peak, part, rank, level, low
    inverse, steps = inverse_of(settings), STEPS[x.dtype]
    # Temperature can make neighbours in fp32 equal, and not in half precision, whose own few digits are then enough.
    before, after = (inverse, 1.0) if x.dtype == torch.float32 else (1.0, inverse)
    end, sizes = 32 - DIGIT_BITS * steps, (vocab, nodes, chunks)
    # the cut of top-k is the first value up to which there are more than so many
    below = max(0, vocab - settings.top_k)
    _peaks_kernel[(chunks, rows)](
        x, peak, rank, level, low, arrived, *sizes, below, *strides, CHUNK, num_warps=CHUNK_WARPS, **pdl
    )
    for wanted, mass in ((0 < settings.top_k < vocab, False), (settings.top_p < 1, True)):
        for step in range(steps if wanted else 0):
            _digit_kernel[(chunks, rows)](
                *(*state, arrived, *sizes, 32 - DIGIT_BITS * (step + 1), before, after, 1 - settings.top_p),
                *(*strides, mass, step == 0, step == steps - 1, CHUNK, padded),
                num_warps=DIGIT_WARPS[mass],
                **pdl,
            )
    # fp32's 0 removes nothing, as in the reference
    by_share = torch.tensor(settings.min_p, dtype=torch.float32, device="cpu").item() > 0
    least = math.log(settings.min_p) if by_share else 0.0
    _close_kernel[(rows,)](
        *(*state, first, *sizes, end, before, after, least, *strides, settings.top_p < 1, by_share, CHUNK, padded),
        num_warps=CLOSE_WARPS,
        **pdl,
    )
    return low[:, 0], first


def inverse_of(settings: SamplingSettings) -> float:
    """1 / temperature, in fp32."""
    return torch.tensor(settings.temperature, dtype=torch.float32, device="cpu").reciprocal().item()
