"""Long texts of `ordered.py` on Hopper, at the speed of its tensor cores: warps that load, and two groups of warps that
compute, as in hopper.py.

Names and the order of sums are those of ordered.py. A tile has two halves of BLOCK_M matrix rows, each with a group of
four warps; one more warp brings the full blocks of a text through tensor descriptors, and both halves read them from
shared memory. What is no full block, or not seen by all, each half loads by pointers: slots behind it may hold
anything. The sum of the runs that have ended is kept in shared memory, and that of the run that goes on in registers:
a program adds up all the runs of a text, or where there are few programs those of its begin, and leaves the sums of
the others. In bf16 alone, where a maximum may be raised at every block. Gluon has no interpreter: these kernels are
tested on the GPU, beside those of ordered_tree.py and ordered_chain.py, to the bit, and elsewhere by
tests/helpers/gluon.py.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fastspec.kernels.attention import hopper
from fastspec.kernels.attention.hopper import BLOCK_M, BLOCK_N, STAGES, TILE, descriptor, produce
from fastspec.kernels.attention.ordered_hopper_sums import (
    ONES,
    ROWS,
    SCORES,
    SUMS,
    block_at,
    by_rows,
    empty,
    end_run,
    keep,
    shared_memory,
    wait_for_own,
    whole_blocks,
)
from fastspec.kernels.attention.ordered_sums import MOST_SUMS, OrderedPass, runs_of
from fastspec.kernels.attention.parts import run_start, share_of
from fastspec.kernels.launch import dependent

LONG, FULL, EARLY = hopper.LONG, 100, 1024
"""Slots from which these kernels are the faster ones; tiles of all pairs that fill the GPU, and slots from which they
are the faster ones for those. On an H200."""
WAVE, BLOCK, START, SUM = 132, 1.6, 5.0, 3e-4
"""Multiprocessors of an H200, and microseconds that a block of keys, a program beside its blocks, and a row's sums of a
run that are written and read again take of one."""


@gluon.jit
def _half(
    HALF: gl.constexpr,
    shared,
    pointers,
    numbers,
    S_K: gl.constexpr,
    S_V: gl.constexpr,
    SHARED: gl.constexpr,
    FINE: gl.constexpr,
):
    """One half of a tile: the runs from `run` on, before `past`, of a text that ends at `end`, of which the producer
    brings `count` full blocks. Pointers are those of the program's pair."""
    p_k, p_v, p_part, p_state = pointers
    scale2, run, past, end, count, lead, places, i_tile, rows = numbers
    q_smem, ones, text, blocks = shared
    BLOCK_M: gl.constexpr = q_smem.shape[1]
    BLOCK_N: gl.constexpr = blocks[0].shape[1]
    place = p_part, p_state, i_tile * (2 * BLOCK_M) + HALF * BLOCK_M, rows
    first = run_start(run, FINE)
    b_acc, b_max, b_sum, b_most, b_weights, number = whole_blocks(
        HALF, shared, place, first, count, run, lead, scale2, SHARED, FINE
    )
    b_text, at = text.index(HALF), first + count * BLOCK_N
    close = run_start(past, FINE)
    if (end < close) & (end > at):
        if at == run_start(number + 1, FINE):
            b_most, b_weights = end_run(b_text, place, number, lead, b_acc, b_max, b_sum, b_most, b_weights, SHARED)
            b_acc, b_max, b_sum = empty(BLOCK_M, q_smem.shape[2], ones.shape[0])
        wait_for_own(HALF, blocks, count)
        b_last = gl.full([BLOCK_M], 0, gl.int32, gl.SliceLayout(1, SCORES)) + (end - 1)
        b_acc, b_max, b_sum = block_at(HALF, shared, at, end, b_last, p_k, p_v, b_acc, b_max, b_sum, scale2, S_K, S_V)
    if end < close:
        keep(place, places - 1, number, b_acc, *by_rows(b_max, b_sum))
    else:
        b_most, b_weights = end_run(b_text, place, past - 1, lead, b_acc, b_max, b_sum, b_most, b_weights, SHARED)
    if (run == 0) & (end >= run_start(1, FINE)):
        keep(place, run, number, b_text.load(SUMS), b_most, b_weights)


@gluon.jit
def _chain_half(
    HALF: gl.constexpr,
    shared,
    pointers,
    numbers,
    S_K: gl.constexpr,
    S_V: gl.constexpr,
    GROUP: gl.constexpr,
    FINE: gl.constexpr,
):
    """One half of a tile of a chain: `count` full blocks that the producer brings, which all rows see, and from there
    to `end` blocks that it loads itself."""
    p_k, p_v, p_out = pointers
    scale2, count, prefix, end, i_tile, i_head, nodes, s_on = numbers
    q_smem, ones, text, blocks = shared
    BLOCK_M: gl.constexpr = q_smem.shape[1]
    D: gl.constexpr = q_smem.shape[2]
    BLOCK_N: gl.constexpr = blocks[0].shape[1]
    b_text = text.index(HALF)
    first = i_tile * (2 * BLOCK_M) + HALF * BLOCK_M
    place = p_out, p_out, first, nodes  # of runs that are written, which a chain has none of
    none = count * 0
    b_acc, b_max, b_sum, b_most, b_weights, number = whole_blocks(
        HALF, shared, place, none, count, none, none, scale2, False, FINE
    )
    wait_for_own(HALF, blocks, count)
    b_last = prefix + (first + gl.arange(0, BLOCK_M, gl.SliceLayout(1, SCORES))) // GROUP
    for at in range(count * BLOCK_N, end, BLOCK_N):
        if at == run_start(number + 1, FINE):
            b_most, b_weights = end_run(b_text, place, number, none, b_acc, b_max, b_sum, b_most, b_weights, False)
            b_acc, b_max, b_sum = empty(BLOCK_M, D, ones.shape[0])
            number += 1
        b_acc, b_max, b_sum = block_at(HALF, shared, at, end, b_last, p_k, p_v, b_acc, b_max, b_sum, scale2, S_K, S_V)
    b_most, b_weights = end_run(b_text, place, number, none, b_acc, b_max, b_sum, b_most, b_weights, False)
    b_out = b_text.load(SUMS) * (1.0 / gl.where(b_weights > 0.0, b_weights, 1.0))[:, None]
    o_m = first + gl.arange(0, BLOCK_M, ROWS)
    o_c = gl.arange(0, D, gl.SliceLayout(0, SUMS))
    o_out = (o_m // GROUP).to(gl.int64) * s_on + (i_head * GROUP + o_m % GROUP) * D
    gl.store(p_out + o_out[:, None] + o_c[None, :], b_out.to(q_smem.dtype), mask=(o_m < nodes * GROUP)[:, None])


@gluon.jit(do_not_specialize=["nodes", "extent", "places", "shares", "kv_heads", "r_kb", "r_kh", "r_vb", "r_vh"])
def _hopper_runs(
    p_q,
    p_k,
    p_v,
    d_k,
    d_v,
    p_part,
    p_state,
    p_prefix,
    scale2,
    nodes,
    extent,
    places,
    shares,
    kv_heads,
    r_kb,
    r_kh,
    r_vb,
    r_vh,
    s_qb,
    s_qn,
    s_qh,
    s_p,
    S_K: gl.constexpr,
    S_V: gl.constexpr,
    GROUP: gl.constexpr,
    SIZES: gl.constexpr,
    GRAIN: gl.constexpr,
    SHARED: gl.constexpr,
    FINE: gl.constexpr,
    PDL: gl.constexpr,
):
    """`ordered_tree._runs` of a share of the runs, without spans and caps."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    i_tile, i_pair, i_share = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    i_row, i_head = i_pair // kv_heads, i_pair % kv_heads
    rows = nodes * GROUP
    end = gl.minimum(gl.load(p_prefix + i_row.to(gl.int64) * s_p), extent).to(gl.int32) // GRAIN * GRAIN
    run, past = share_of(end, i_share, shares, FINE), share_of(end, i_share + 1, shares, FINE)
    if run >= past:
        return
    lead = share_of(end, 1, shares, FINE)
    first = run_start(run, FINE)
    count = gl.minimum(end, run_start(past, FINE)) // SIZES[1] - first // SIZES[1]
    shared = shared_memory(p_q, d_k, d_v, i_row, i_tile, i_head, rows, s_qb, s_qn, s_qh, GROUP, SIZES)
    k_line, v_line = i_row * r_kb + i_head * r_kh, i_row * r_vb + i_head * r_vh
    p_k += k_line.to(gl.int64) * S_K
    p_v += v_line.to(gl.int64) * S_V
    o_pair = (i_pair * places).to(gl.int64) * rows
    p_part += o_pair * SIZES[2]
    p_state += 2 * o_pair
    pointers = p_k, p_v, p_part, p_state
    numbers = scale2, run, past, end, count, lead, places, i_tile, rows
    gl.warp_specialize(
        [
            (_half, (0, shared, pointers, numbers, S_K, S_V, SHARED, FINE)),
            (_half, (1, shared, pointers, numbers, S_K, S_V, SHARED, FINE)),
            (produce, (d_k, d_v, shared[3], k_line + first, v_line + first, count)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit(do_not_specialize=["nodes", "extent", "kv_heads", "r_kb", "r_kh", "r_vb", "r_vh"])
def _hopper_chain(
    p_q,
    p_k,
    p_v,
    d_k,
    d_v,
    p_out,
    p_prefix,
    scale2,
    nodes,
    extent,
    kv_heads,
    r_kb,
    r_kh,
    r_vb,
    r_vh,
    s_qb,
    s_qn,
    s_qh,
    s_ob,
    s_on,
    s_p,
    S_K: gl.constexpr,
    S_V: gl.constexpr,
    GROUP: gl.constexpr,
    SIZES: gl.constexpr,
    FINE: gl.constexpr,
    PDL: gl.constexpr,
):
    """`ordered_chain._chain` without spans, sinks and caps."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    i_tile, i_pair = gl.num_programs(0) - 1 - gl.program_id(0), gl.program_id(1)
    i_row, i_head = i_pair // kv_heads, i_pair % kv_heads
    rows = nodes * GROUP
    prefix = gl.minimum(gl.load(p_prefix + i_row.to(gl.int64) * s_p), extent).to(gl.int32)
    end = gl.minimum(prefix + (gl.minimum((i_tile + 1) * (2 * SIZES[0]), rows) - 1) // GROUP + 1, extent)
    count = gl.minimum(prefix + i_tile * (2 * SIZES[0]) // GROUP + 1, end) // SIZES[1]
    shared = shared_memory(p_q, d_k, d_v, i_row, i_tile, i_head, rows, s_qb, s_qn, s_qh, GROUP, SIZES)
    k_line, v_line = i_row * r_kb + i_head * r_kh, i_row * r_vb + i_head * r_vh
    p_k += k_line.to(gl.int64) * S_K
    p_v += v_line.to(gl.int64) * S_V
    p_out += i_row.to(gl.int64) * s_ob
    pointers = p_k, p_v, p_out
    numbers = scale2, count, prefix, end, i_tile, i_head, nodes, s_on
    gl.warp_specialize(
        [
            (_chain_half, (0, shared, pointers, numbers, S_K, S_V, GROUP, FINE)),
            (_chain_half, (1, shared, pointers, numbers, S_K, S_V, GROUP, FINE)),
            (produce, (d_k, d_v, shared[3], k_line, v_line, count)),
        ],
        [4, 1],
        [240, 24],
    )


def programs_of(given: OrderedPass) -> int:
    """Tiles of all pairs."""
    return -(-given.rows // TILE) * given.pairs


def fits(given: OrderedPass) -> bool:
    """True where these kernels take a pass: `hopper.fits`, in bf16 and without spans, sinks and caps."""
    plain = given.tree.span is None and given.sinks is None and given.cap is None
    least = LONG if programs_of(given) < FULL else EARLY
    half = given.q.dtype == torch.bfloat16
    return plain and half and hopper.fits(given.q, given.k, given.v, given.rows, given.extent, least)


def places_of(shares: int, extent: int, fine: bool) -> int:
    """Sums that so many shares of a text leave at most: one of the first share, of each run after it, of an open
    run."""
    return 2 if shares == 1 else runs_of(extent, fine) - runs_of(max(1, extent // shares), fine) + 3


@lru_cache
def shares_of(programs: int, rows: int, extent: int, fine: bool) -> int:
    """The shares that the runs of a text are cut into, of so many tiles of all pairs, which have so many matrix rows:
    the first is added up where it is read, of the others each run's sums are written and read again."""

    def cost(shares: int) -> float:
        waves, sums = -(-programs * shares // WAVE), (places_of(shares, extent, fine) - 2) * rows
        return waves * (extent / BLOCK_N / shares * BLOCK + START) + (sums * SUM if sums < MOST_SUMS else math.inf)

    return min(range(1, WAVE // 4), key=cost)


def _operands(given: OrderedPass) -> tuple[tuple[Any, ...], tuple[int, ...], dict[str, Any]]:
    """Operands of both kernels, heads and strides of theirs, and what they are compiled for."""
    q, k, v = given.q, given.k, given.v
    (r_kb, r_kh), (r_vb, r_vh) = ((x.stride(0) // x.stride(2), x.stride(1) // x.stride(2)) for x in (k, v))
    return (
        (q, k, v, descriptor(k), descriptor(v)),
        (k.shape[1], r_kb, r_kh, r_vb, r_vh, *q.stride()[:3]),
        {
            "S_K": k.stride(2),
            "S_V": v.stride(2),
            "GROUP": given.tree.group,
            "SIZES": (BLOCK_M, BLOCK_N, q.shape[3], STAGES, ONES),
            "FINE": given.fine,
            "num_warps": 4,
            **dependent(q.device),
        },
    )


def launch(given: OrderedPass, part: Tensor, state: Tensor, shares: int) -> None:
    """Fill part [pairs, P, rows, D] and state [pairs, P, 2, rows], as `ordered_tree._tail` reads them of so many
    shares; operands as `fits` takes them."""
    operands, counts, options = _operands(given)
    prefix, nodes = given.tree.prefix, given.q.shape[1]
    _hopper_runs[(-(-given.rows // TILE), given.pairs, shares)](
        *(*operands, part, state, prefix, given.scale2, nodes, given.extent, part.shape[1], shares, *counts),
        prefix.stride(0),
        GRAIN=given.grain,
        SHARED=shares > 1,
        **options,
    )


def chain(given: OrderedPass) -> None:
    """Fill the pass's output, of nodes that each see the ones before; operands as `fits` takes them."""
    operands, counts, options = _operands(given)
    prefix, out = given.tree.prefix, given.out
    _hopper_chain[(-(-given.rows // TILE), given.pairs)](
        *(*operands, out, prefix, given.scale2, given.q.shape[1], given.extent, *counts, *out.stride()[:2]),
        prefix.stride(0),
        **options,
    )
