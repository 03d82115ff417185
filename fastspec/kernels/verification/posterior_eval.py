"""Draw numbers for the nodes, choose one token per node from the target's scores, and walk the tree by them.

B rows (sequences), N nodes of a row's tree, R rows of scores, V vocabulary, T chunks of the vocabulary. `pick` reads
the scores in chunks that fill the chip, then merges a row's chunks in one program; under settings it reads them as
these leave them (`sampling`), which is written nowhere. `posterior_walk` is one launch, one program per row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.arguments import FLOATS, PACKED, expect, strides
from fastspec.kernels.drafting.topk_expand import EMPTY, key_index, sort_key, tile_mass
from fastspec.kernels.launch import dependent, wait_for_previous
from fastspec.kernels.verification.reference import LAST_SHIFT, MIXERS, NO_TOKEN, STEP, SamplingSettings, signed
from fastspec.kernels.verification.sampling import (
    CHUNK,
    CHUNK_WARPS,
    cut,
    first_above,
    inverse_of,
    kept_chunk,
    row_chunk,
)

DRAW_WARPS = 8
MAX_NODES = 4096
NONE = tl.constexpr(NO_TOKEN)
_STEP, _LAST_SHIFT = tl.constexpr(signed(STEP)), tl.constexpr(LAST_SHIFT)
_SHIFT_1, _FACTOR_1 = tl.constexpr(MIXERS[0][0]), tl.constexpr(signed(MIXERS[0][1]))
_SHIFT_2, _FACTOR_2 = tl.constexpr(MIXERS[1][0]), tl.constexpr(signed(MIXERS[1][1]))


@triton.jit
def _shifted(x, BY: tl.constexpr):
    """x to the right, filled up with zeros."""
    return (x.to(tl.uint64, bitcast=True) >> BY).to(tl.int64, bitcast=True)


@triton.jit(do_not_specialize=["nodes", "s_d"])
def _draws_kernel(p_streams, p_lengths, p_depths, p_out, nodes, s_d, BN: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    o_n = tl.arange(0, BN)
    b_depth = tl.load(p_depths + row * s_d + o_n, mask=o_n < nodes, other=0)
    b_x = tl.load(p_streams + row) + (tl.load(p_lengths + row) + b_depth + 1) * _STEP
    b_x = (b_x ^ _shifted(b_x, _SHIFT_1)) * _FACTOR_1
    b_x = (b_x ^ _shifted(b_x, _SHIFT_2)) * _FACTOR_2
    b_x = _shifted(b_x ^ _shifted(b_x, _LAST_SHIFT), 40)
    tl.store(p_out + row * nodes + o_n, b_x.to(tl.float32) * 2.0**-24, mask=o_n < nodes)


def draws(streams: Tensor, lengths: Tensor, depths: Tensor) -> Tensor:
    """`reference.draws`: numbers [B, N] fp32 of streams, lengths [B] and depths [B, N] int64."""
    rows, nodes = depths.shape
    out = torch.empty((rows, nodes), dtype=torch.float32, device=depths.device)
    if out.numel():
        if depths.stride(1) != 1:
            depths = depths.contiguous()
        _draws_kernel[(rows,)](
            *(streams.contiguous(), lengths.contiguous(), depths, out),
            *(nodes, depths.stride(0)),
            BN=triton.next_power_of_2(nodes),
            num_warps=1,
            **dependent(depths.device),
        )
    return out


@triton.jit(do_not_specialize=["nodes"])
def _chunk_best_kernel(p_x, p_keys, vocab, nodes, chunks, s_xb, s_xm, BV: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    row, chunk = tl.program_id(1).to(tl.int64), tl.program_id(0)
    o_v, b_x = row_chunk(p_x, row, chunk, vocab, nodes, s_xb, s_xm, BV)
    b_key = tl.where(o_v < vocab, sort_key(b_x, o_v), EMPTY)
    tl.store(p_keys + row * chunks + chunk, tl.max(b_key, 0))


@triton.jit
def _best_kernel(p_keys, p_ids, chunks, TP: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    o_t = tl.arange(0, TP)
    b_key = tl.load(p_keys + row * chunks + o_t, mask=o_t < chunks, other=EMPTY)
    tl.store(p_ids + row, key_index(tl.max(b_key, 0)))


@triton.jit(do_not_specialize=["nodes"])
def _chunk_mass_kernel(
    p_x,
    p_peak,
    p_mass,
    p_low,
    p_first,
    vocab,
    nodes,
    chunks,
    inverse,
    s_xb,
    s_xm,
    BV: tl.constexpr,
    WARP: tl.constexpr,
    CUT: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    row, chunk = tl.program_id(1).to(tl.int64), tl.program_id(0)
    _, b_x = kept_chunk(p_x, p_low, p_first, row, chunk, vocab, nodes, inverse, s_xb, s_xm, BV, WARP, CUT)
    peak, mass = tile_mass(b_x, 0)
    tl.store(p_peak + row * chunks + chunk, peak)
    tl.store(p_mass + row * chunks + chunk, mass)


@triton.jit(do_not_specialize=["nodes", "s_ub", "s_um"])
def _draw_kernel(
    p_x,
    p_peak,
    p_mass,
    p_low,
    p_first,
    p_uniform,
    p_ids,
    vocab,
    nodes,
    chunks,
    inverse,
    s_xb,
    s_xm,
    s_ub,
    s_um,
    TP: tl.constexpr,
    BV: tl.constexpr,
    WARP: tl.constexpr,
    CUT: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    o_t = tl.arange(0, TP)
    b_peak = tl.load(p_peak + row * chunks + o_t, mask=o_t < chunks, other=float("-inf"))
    b_mass = tl.load(p_mass + row * chunks + o_t, mask=o_t < chunks, other=0.0)
    uniform = tl.load(p_uniform + (row // nodes) * s_ub + (row % nodes) * s_um).to(tl.float64)
    top = tl.max(b_peak, 0)
    b_scale = tl.where(b_mass > 0.0, tl.exp(b_peak - top), 0.0)
    # exact, so that all threads get one sum whether it is fused or not
    b_chunk = b_mass.to(tl.float64) * b_scale.to(tl.float64)
    total = tl.sum(b_chunk, 0)  # NaN where a score is NaN or +inf, 0 where all are -inf
    level = uniform * total
    chunk, before = first_above(b_chunk, o_t, level, TP)

    # Within its chunk the mass is relative to the chunk's own maximum, which therefore has mass 1: some place is always
    # found.
    peak = tl.load(p_peak + row * chunks + chunk)
    scale = tl.sum(tl.where(o_t == chunk, b_scale, 0.0), 0).to(tl.float64)
    rest = tl.where(scale > 0.0, tl.maximum(level - before, 0.0) / scale, 0.0)
    o_v, b_x = kept_chunk(p_x, p_low, p_first, row, chunk, vocab, nodes, inverse, s_xb, s_xm, BV, WARP, CUT)
    b_mass_v = tl.where((o_v < vocab) & (b_x > float("-inf")), tl.exp(b_x - peak), 0.0).to(tl.float64)
    place, _ = first_above(b_mass_v, tl.arange(0, BV), rest, BV)
    tl.store(p_ids + row, tl.where(total > 0.0, (chunk * BV + place).to(tl.int64), NONE))


@triton.jit(do_not_specialize=["nodes", "steps", "s_tokens", "s_parents", "s_picks"])
def _walk_kernel(
    p_tokens,
    p_parents,
    p_picks,
    p_path,
    p_accepted,
    p_bonus,
    nodes,
    steps,
    s_tokens,
    s_parents,
    s_picks,
    NP: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    o_n = tl.arange(0, NP)
    m_n = o_n < nodes
    b_token = tl.load(p_tokens + row * s_tokens + o_n, mask=m_n, other=0)
    b_parent = tl.load(p_parents + row * s_parents + o_n, mask=m_n, other=0).to(tl.int32)
    b_pick = tl.load(p_picks + row * s_picks + o_n, mask=m_n, other=0)
    b_picked = tl.gather(b_pick, b_parent, 0)  # memory is waited for once
    m_step = m_n & (o_n > 0) & (b_token == b_picked)  # whether the parent's pick names this node
    b_from = tl.where(m_step, b_parent, -1)
    node = tl.full([], 0, tl.int32)
    accepted = tl.full([], 0, tl.int64)
    tl.store(p_path + row * steps, accepted)
    for i in range(1, steps):
        child = tl.min(tl.where(b_from == node, o_n, NP), 0)
        accepted += (child < NP).to(tl.int64)
        node = tl.where(child < NP, child, node)
        tl.store(p_path + row * steps + i, node.to(tl.int64))
    tl.store(p_accepted + row, accepted)
    tl.store(p_bonus + row, tl.sum(tl.where(o_n == node, b_pick, 0), 0))


def pick(scores: Tensor, uniform: Tensor | None, settings: SamplingSettings | None = None) -> Tensor:
    """`reference.pick`: one token per row of scores [..., V] fp32, fp16 or bf16, the argmax or a draw by uniform [...]
    -> [...] int64.

    The last dimension of scores must be contiguous; up to two leading dimensions may have any strides (more are
    flattened, which copies where they cannot be viewed as one). uniform is fp32 or fp64 in [0, 1). The mass is summed
    in fp32 within a chunk of 4096 ids, and in fp64 from there.
    """
    expect("pick", scores.shape, FLOATS, PACKED, scores=scores)
    if scores.shape[-1] == 0:
        raise ValueError(f"pick: scores {list(scores.shape)} have no token; accepted is a last dimension of 1 or more")
    expect("pick", scores.shape[:-1], (torch.float32, torch.float64), uniform=uniform)
    ids = torch.empty(scores.shape[:-1], dtype=torch.int64, device=scores.device)
    if not ids.numel():
        return ids
    if uniform is None:
        keys = chunk_keys(scores)
        padded = max(2, triton.next_power_of_2(keys.shape[1]))
        _best_kernel[(len(keys),)](keys, ids, keys.shape[1], padded, num_warps=1, **dependent(scores.device))
        return ids
    x, vocab = _in_rows(scores, 1), scores.shape[-1]
    batch, nodes = x.shape[:2]
    rows, chunks, apart = batch * nodes, triton.cdiv(vocab, CHUNK), x.stride()[:2]
    padded, pdl = max(2, triton.next_power_of_2(chunks)), dependent(scores.device)
    u, settings = _in_rows(uniform, 0), settings or SamplingSettings()
    low, first = cut(x, settings) if settings.filters else (None, None)
    peak, mass = torch.empty(2, rows, chunks, dtype=torch.float32, device=scores.device)
    sizes, kept = (vocab, nodes, chunks, inverse_of(settings)), (settings.temperature != 1, settings.filters)
    _chunk_mass_kernel[(chunks, rows)](
        x, peak, mass, low, first, *sizes, *apart, CHUNK, *kept, num_warps=CHUNK_WARPS, **pdl
    )
    _draw_kernel[(rows,)](
        *(x, peak, mass, low, first, u, ids),
        *(*sizes, *apart, *u.stride(), padded, CHUNK, *kept),
        num_warps=DRAW_WARPS,
        **pdl,
    )
    return ids


def chunk_keys(scores: Tensor) -> Tensor:
    """The highest sort keys of all chunks of scores [..., V], whose rows are R, not none -> [R, T] int64."""
    x, vocab = _in_rows(scores, 1), scores.shape[-1]
    batch, nodes = x.shape[:2]
    keys = torch.empty(batch * nodes, triton.cdiv(vocab, CHUNK), dtype=torch.int64, device=scores.device)
    _chunk_best_kernel[keys.shape[::-1]](
        x, keys, vocab, nodes, keys.shape[1], *x.stride()[:2], CHUNK, num_warps=CHUNK_WARPS, **dependent(scores.device)
    )
    return keys


def _in_rows(x: Tensor, trailing: int) -> Tensor:
    """x with two leading dimensions before its `trailing` ones, viewed where its strides allow."""
    leading = x.dim() - trailing
    if leading == 2:
        return x
    return x[None, None] if leading == 0 else x.flatten(0, leading - 1)[None]


def posterior_walk(tokens: Tensor, parents: Tensor, picks: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.posterior_walk`: tokens, parents, picks [B, N] int64, steps >= 1 -> path [B, steps], accepted [B] and
    bonus [B] int64.

    Rows may be strided, the last dimension must be contiguous. N is at most 4096.
    """
    given = {"tokens": tokens, "parents": parents, "picks": picks}
    expect("posterior_walk", tokens.shape, torch.int64, PACKED, **given)
    batch, nodes = tokens.shape
    if not 1 <= nodes <= MAX_NODES or steps < 1:
        raise ValueError(
            f"posterior_walk: {nodes} nodes and steps={steps}; accepted are 1 to {MAX_NODES} nodes, and 1 step or more"
        )
    path = torch.empty(batch, steps, dtype=torch.int64, device=tokens.device)
    accepted, bonus = torch.empty(2, batch, dtype=torch.int64, device=tokens.device)
    padded = max(32, triton.next_power_of_2(nodes))
    _walk_kernel[(batch,)](
        *(*given.values(), path, accepted, bonus, nodes, steps, *strides(1, *given.values()), padded),
        num_warps=1 if padded <= 256 else 4,
        **dependent(tokens.device),
    )
    return path, accepted, bonus
