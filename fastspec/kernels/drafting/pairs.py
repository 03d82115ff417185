"""Pairs of a head, each a token and the target's feature of the one before it: those of an accepted path, the last one
that a pass read, and those of rounds without drafts, kept until the head reads them.

B rows (sequences), N nodes of a row's tree, P nodes of the longest path, H width of a head's states, F width of the
target's features, T pairs fed, C pairs kept.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.arguments import CONTIGUOUS, PACKED, expect, strides
from fastspec.kernels.launch import dependent, wait_for_previous

PAIR_BLOCK = 2048  # channels that a program copies
STRIDES = [
    "s_tokens_b",
    "s_tokens_p",
    "s_path_b",
    "s_path_p",
    "s_accepted",
    "s_bonus",
    "s_active",
    "s_root",
    "s_lengths",
    "s_counts",
]


@triton.jit(do_not_specialize=["unit", "steps", *STRIDES])
def _path_pairs_kernel(
    p_features,
    p_path,
    p_accepted,
    p_bonus,
    p_active,
    p_root,
    p_lengths,
    p_tokens,
    p_out,
    p_counts,
    p_slots,
    p_occurrences,
    unit,
    steps,
    size,
    s_tokens_b,
    s_tokens_p,
    s_features_b,
    s_features_n,
    s_path_b,
    s_path_p,
    s_accepted,
    s_bonus,
    s_active,
    s_root,
    s_lengths,
    s_counts,
    BF: tl.constexpr,
    HEARD: tl.constexpr,
    PDL: tl.constexpr,
):
    """A part of one node's features; a node's first part writes its slot, a row's first what there is once. With HEARD
    a node's first part counts its token."""
    wait_for_previous(PDL)
    part, place, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    node = tl.load(p_path + row * s_path_b + place * s_path_p)
    o_f = part * BF + tl.arange(0, BF)
    m_f = o_f < size
    b_x = tl.load(p_features + row * s_features_b + node * s_features_n + o_f, mask=m_f)
    tl.store(p_out + (row * steps + place) * size + o_f, b_x, mask=m_f)
    if part == 0:
        tl.store(p_slots + row * steps + place, tl.load(p_lengths + row * s_lengths) + place)
        active = tl.load(p_active + row * s_active) != 0
        count = tl.where(active, tl.load(p_accepted + row * s_accepted) + 1, 0)
        if HEARD:
            token = tl.load(p_tokens + row * s_tokens_b + place * s_tokens_p)
            tl.atomic_add(p_occurrences + token, tl.cast(unit, tl.int64), mask=place < count, sem="relaxed")
        if place == 0:
            tl.store(p_counts + row * s_counts, count)
            tl.store(p_root + row * s_root, tl.load(p_bonus + row * s_bonus), mask=active)


def path_pairs(
    features: Tensor,
    path: Tensor,
    accepted: Tensor,
    bonus: Tensor,
    active: Tensor,
    root: Tensor,
    lengths: Tensor,
    out: tuple[Tensor, Tensor] | None = None,
    heard: tuple[Tensor, Tensor, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.path_pairs`: features [B, N, F] with a contiguous last dimension, path [B, P], accepted, bonus, root,
    lengths [B] int64 and active [B] bool, of any strides -> features [B, P, F], counts [B] and slots [B, P].

    `out` is where features, contiguous and of any floating dtype, and counts are written. `heard`: tokens [B, P] int64
    of any strides, which must be below V, and occurrences [V] int64, contiguous.
    """
    (batch, steps), size = path.shape, features.shape[2]
    taken, counts = (features.new_empty(batch, steps, size), path.new_empty(batch)) if out is None else out
    columns = {"accepted": accepted, "bonus": bonus, "root": root, "lengths": lengths, "counts": counts}
    expect("path_pairs", (batch,), torch.int64, path=path[:, 0], **columns)
    expect("path_pairs", (batch,), torch.bool, active=active)
    expect("path_pairs", (batch, "N", size), None, PACKED, features=features)
    expect("path_pairs", (batch, steps, size), None, CONTIGUOUS, out=taken)
    tokens, occurrences, unit = (path, counts, 0) if heard is None else heard
    if heard is not None:
        expect("path_pairs", path.shape, torch.int64, tokens=tokens)
        expect("path_pairs", ("V",), torch.int64, CONTIGUOUS, occurrences=occurrences)
    slots = torch.empty(batch, steps, dtype=torch.int64, device=path.device)
    if batch > 0:
        read = features, path, accepted, bonus, active.view(torch.uint8), root, lengths, tokens
        written = taken, counts, slots, occurrences
        apart = *strides(2, tokens, features, path), *strides(1, accepted, bonus, active, root, lengths, counts)
        _path_pairs_kernel[(max(1, triton.cdiv(size, PAIR_BLOCK)), steps, batch)](
            *(*read, *written),
            *(unit, steps, size, *apart, PAIR_BLOCK, heard is not None),
            num_warps=4,
            **dependent(path.device),
        )
    return taken, counts, slots


@triton.jit(do_not_specialize=["bound", *STRIDES])
def _keep_last_kernel(
    p_hidden,
    p_readout,
    p_counts,
    p_last_hidden,
    p_last_readout,
    p_lengths,
    bound,
    size,
    s_hidden_b,
    s_hidden_t,
    s_readout_b,
    s_readout_t,
    s_last_hidden,
    s_last_readout,
    s_counts,
    s_lengths,
    BH: tl.constexpr,
    PDL: tl.constexpr,
):
    """A part of one row's state or readout; the first one of a row counts its pairs."""
    wait_for_previous(PDL)
    part, which, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    count = tl.load(p_counts + row * s_counts)
    o_h = part * BH + tl.arange(0, BH)
    m_h = o_h < tl.where(count > 0, size, 0)  # a row without pairs keeps what it has
    if which == 0:
        b_x = tl.load(p_hidden + row * s_hidden_b + (count - 1) * s_hidden_t + o_h, mask=m_h)
        tl.store(p_last_hidden + row * s_last_hidden + o_h, b_x, mask=m_h)
        if part == 0:
            length = tl.load(p_lengths + row * s_lengths)
            tl.debug_barrier()  # another thread may be about to read the length
            tl.store(p_lengths + row * s_lengths, tl.minimum(length + count, bound))
    else:
        b_x = tl.load(p_readout + row * s_readout_b + (count - 1) * s_readout_t + o_h, mask=m_h)
        tl.store(p_last_readout + row * s_last_readout + o_h, b_x, mask=m_h)


def keep_last(
    hidden: Tensor,
    readout: Tensor,
    counts: Tensor,
    last_hidden: Tensor,
    last_readout: Tensor,
    lengths: Tensor,
    bound: int,
) -> None:
    """`reference.keep_last`: hidden, readout [B, T, H] with a contiguous last dimension, counts, lengths [B] int64 of
    any strides, and what is kept, last_hidden and last_readout [B, H], contiguous."""
    batch, _, size = hidden.shape
    expect("keep_last", (batch,), torch.int64, counts=counts, lengths=lengths)
    expect("keep_last", hidden.shape, None, PACKED, hidden=hidden, readout=readout)
    expect("keep_last", (batch, size), None, CONTIGUOUS, last_hidden=last_hidden, last_readout=last_readout)
    if batch == 0:
        return
    kept = last_hidden, last_readout
    _keep_last_kernel[(max(1, triton.cdiv(size, PAIR_BLOCK)), 2, batch)](
        *(hidden, readout, counts, *kept),
        *(lengths, bound, size, *strides(2, hidden, readout), *strides(1, *kept, counts, lengths), PAIR_BLOCK),
        num_warps=4,
        **dependent(hidden.device),
    )


ROOT_BLOCK = 8192  # channels that a program copies at a time


@triton.jit(do_not_specialize=["capacity", *STRIDES])
def _keep_pair_kernel(
    p_features,
    p_bonus,
    p_active,
    p_counts,
    p_held,
    p_tokens,
    capacity,
    size,
    s_features_b,
    s_bonus,
    s_active,
    s_counts,
    BF: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row's pair."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(p_counts + row * s_counts)
    takes = (tl.load(p_active + row * s_active) != 0) & (count < capacity)
    place = row * capacity + tl.minimum(count, capacity - 1)
    for start in range(0, size, BF):
        o_f = start + tl.arange(0, BF)
        m_f = o_f < tl.where(takes, size, 0)
        b_x = tl.load(p_features + row * s_features_b + o_f, mask=m_f)
        tl.store(p_held + place * size + o_f, b_x, mask=m_f)
    token = tl.load(p_bonus + row * s_bonus)
    tl.debug_barrier()  # another thread may be about to read the count
    tl.store(p_tokens + place, token, mask=takes)
    tl.store(p_counts + row * s_counts, count + 1, mask=takes)


def keep_pair(features: Tensor, bonus: Tensor, active: Tensor, counts: Tensor, held: Tensor, tokens: Tensor) -> None:
    """`reference.keep_pair`: features [B, N, F] with a contiguous last dimension, bonus, counts [B] int64 and active
    [B] bool, of any strides, and what is kept, held [B, C, F] of any floating dtype and tokens [B, C] int64,
    contiguous."""
    (batch, _, size), capacity = features.shape, tokens.shape[1]
    expect("keep_pair", (batch,), torch.int64, bonus=bonus, counts=counts)
    expect("keep_pair", (batch,), torch.bool, active=active)
    expect("keep_pair", features.shape, None, PACKED, features=features)
    expect("keep_pair", (batch, capacity, size), None, CONTIGUOUS, held=held)
    expect("keep_pair", (batch, capacity), torch.int64, CONTIGUOUS, tokens=tokens)
    if batch > 0:
        read, written = (features, bonus, active.view(torch.uint8)), (counts, held, tokens)
        apart = strides(1, features, bonus, active, counts)
        _keep_pair_kernel[(batch,)](
            *read, *written, capacity, size, *apart, ROOT_BLOCK, num_warps=8, **dependent(tokens.device)
        )
