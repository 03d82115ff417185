"""Joins over the processes of one host through words in each other's memory: columns, the likeliest token, and a
look-up in a shared table.

x [..., M] in R rows. Columns go in chunks of CHUNK, each a message of its own and a program.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fastspec.kernels.arguments import FLOATS, packed
from fastspec.kernels.drafting.topk_expand import EMPTY, key_index
from fastspec.kernels.launch import dependent, wait_for_previous
from fastspec.kernels.layer.norms import row_warps
from fastspec.kernels.parallel import reference, symmetric
from fastspec.kernels.parallel.words import (
    MAX_BYTES,
    ROWS,
    Space,
    come,
    fits,
    from_words,
    make_all_blank,
    make_blank,
    place_in,
    send_words,
    space_for,
    space_of,
    sum_words,
    to_words,
)
from fastspec.kernels.verification.posterior_eval import chunk_keys

CHUNK = 4096


@triton.jit(do_not_specialize=["width", "part", "stride_x"])
def _gather(
    p_x,
    p_out,
    p_addresses,
    p_counts,
    width,
    part,
    chunks,
    stride_x,
    CHUNK: tl.constexpr,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    PROCESSES: tl.constexpr,
    LOOKS: tl.constexpr,
    PDL: tl.constexpr,
):
    message = tl.program_id(0)
    row, o_c = (message // chunks).to(tl.int64), message % chunks * CHUNK + tl.arange(0, CHUNK)
    o_w = tl.arange(0, WORDS)
    m_w = o_w < WORDS
    p_mine, p_next = space_of(p_addresses, RANK), space_of(p_addresses, (RANK + 1) % PROCESSES)  # no kernel writes them
    wait_for_previous(PDL)
    count = tl.load(p_counts + message) + 1
    p_line = p_out + row * width
    m_x = o_c < tl.minimum(part, width - RANK * part)
    b_x = tl.load(p_x + row * stride_x + o_c, mask=m_x, other=0.0)
    send_words(to_words(b_x, WORDS), p_addresses, p_next, message, count, o_w, m_w, RANK, PROCESSES, ROWS, WORDS)
    tl.store(p_line + RANK * part + o_c, b_x, mask=m_x)
    dtype: tl.constexpr = p_out.dtype.element_ty
    for process in tl.static_range(PROCESSES):
        if process != RANK:
            p_got = place_in(p_mine, process, message, count, PROCESSES, ROWS, WORDS) + o_w
            b_got = come(tl.load(p_got, mask=m_w, other=0, volatile=True), p_got, m_w, LOOKS)
            m_got = o_c < tl.minimum(part, width - process * part)
            tl.store(p_line + process * part + o_c, from_words(b_got, dtype, CHUNK).to(dtype), mask=m_got)
            make_blank(p_got, m_w)
    tl.store(p_counts + message, count)


@triton.jit
def _likeliest(
    p_keys,
    p_out,
    p_addresses,
    p_counts,
    chunks,
    first,
    TP: tl.constexpr,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    PROCESSES: tl.constexpr,
    LOOKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The token of the highest key of a row, of this process's chunks and all others'; a key is four words, whose upper
    halves are 0."""
    row = tl.program_id(0).to(tl.int64)
    o_t, o_w = tl.arange(0, TP), tl.arange(0, 4)
    m_w = o_w < 4
    p_mine, p_next = space_of(p_addresses, RANK), space_of(p_addresses, (RANK + 1) % PROCESSES)  # no kernel writes them
    wait_for_previous(PDL)
    count = tl.load(p_counts + row) + 1
    best = tl.max(tl.load(p_keys + row * chunks + o_t, mask=o_t < chunks, other=EMPTY), 0)
    best = tl.where(best == EMPTY, best, best - first)  # of the whole vocabulary's ids; a process may have none of them
    b_sent = ((best >> (16 * o_w)) & 0xFFFF).to(tl.int32)
    send_words(b_sent, p_addresses, p_next, row, count, o_w, m_w, RANK, PROCESSES, ROWS, WORDS)
    for process in tl.static_range(PROCESSES):
        if process != RANK:
            p_got = place_in(p_mine, process, row, count, PROCESSES, ROWS, WORDS) + o_w
            b_got = come(tl.load(p_got, mask=m_w, other=0, volatile=True), p_got, m_w, LOOKS)
            best = tl.maximum(best, tl.sum(b_got.to(tl.int64) << (16 * o_w), 0))
            make_blank(p_got, m_w)
    tl.store(p_out + row, key_index(best))
    tl.store(p_counts + row, count)


def all_gather(x: Tensor, width: int, group: dist.ProcessGroup) -> Tensor:
    """Columns of all processes side by side, as `reference.all_gather` computes them."""
    part = reference.share(width, group.size())
    messages = math.prod(x.shape[:-1]) * -(
        -part // CHUNK
    )  # what all processes find alike: the last one's columns may be none
    fits = x.dtype in FLOATS and 0 < messages <= ROWS and messages * CHUNK * x.element_size() <= MAX_BYTES
    space = space_for(x, CHUNK, x.dtype, group) if fits else None
    return reference.all_gather(x, width, group) if space is None else gathered(x, width, space)


def gathered(x: Tensor, width: int, space: Space) -> Tensor:
    """The launch."""
    rows, part = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), reference.share(width, space.processes)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out, chunks = x.new_empty(*x.shape[:-1], width), -(-part // CHUNK)
    _gather[(len(rows) * chunks,)](
        *(rows, out, space.addresses, space.counts),
        *(width, part, chunks, rows.stride(0)),
        CHUNK=CHUNK,
        **space.options(),
        num_warps=8,
        **dependent(x.device),
    )
    return out


def ordered_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over the processes, as `reference.ordered_sum` computes it. Two addends have one sum, rounded once, whoever
    adds them up."""
    if isinstance(x, FakeTensor):  # as in `symmetric.all_reduce`
        return torch.empty_like(x)
    if group.size() == 2:
        return symmetric.all_reduce(x, group)
    return reference.ordered_sum(x, group, all_gather)


def likeliest(scores: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
    """Likeliest tokens over the processes' columns, as `reference.likeliest` finds them."""
    rows = math.prod(scores.shape[:-1])
    fits = scores.dtype in FLOATS and 0 < rows <= ROWS and (packed(scores) or not scores.numel())
    space = space_for(scores, 1, torch.int32, group) if fits else None
    return reference.likeliest(scores, first, group) if space is None else chosen(scores, first, space)


def chosen(scores: Tensor, first: int, space: Space) -> Tensor:
    """The launches."""
    rows = math.prod(scores.shape[:-1])
    keys = chunk_keys(scores) if scores.numel() else torch.empty(rows, 0, dtype=torch.int64, device=scores.device)
    out = torch.empty((*scores.shape[:-1], 1), dtype=torch.int64, device=scores.device)
    _likeliest[(len(keys),)](
        *(keys, out, space.addresses, space.counts),
        *(keys.shape[1], first),
        TP=max(2, triton.next_power_of_2(keys.shape[1])),
        **space.options(),
        num_warps=1,
        **dependent(scores.device),
    )
    return out


_TOKENS = (torch.int64, torch.int32)


@triton.jit
def _look_up(
    p_tokens,
    p_table,
    p_out,
    p_addresses,
    p_counts,
    first,
    held,
    stride_table,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
    USED: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    PROCESSES: tl.constexpr,
    LOOKS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    o_h = tl.arange(0, BLOCK)
    m_h = o_h < SIZE
    o_w = tl.arange(0, WORDS)
    m_w = o_w < USED
    p_mine, p_next = space_of(p_addresses, RANK), space_of(p_addresses, (RANK + 1) % PROCESSES)  # no kernel writes them
    wait_for_previous(PDL)
    count = tl.load(p_counts + row) + 1
    token = tl.load(p_tokens + row).to(tl.int64) - first
    near = tl.maximum(tl.minimum(token, held - 1), 0)
    b_x = tl.load(
        p_table + near * stride_table + o_h, mask=m_h & (o_h < held * SIZE), other=0.0
    )  # of a table that may be empty
    b_x = tl.where((near == token) & (near < held), b_x, 0.0)
    send_words(to_words(b_x, WORDS), p_addresses, p_next, row, count, o_w, m_w, RANK, PROCESSES, ROWS, WORDS)
    dtype: tl.constexpr = p_out.dtype.element_ty
    b_total = sum_words(
        b_x, p_mine, row, count, count, o_w, m_w, dtype, BLOCK, False, RANK, PROCESSES, ROWS, WORDS, LOOKS
    )
    make_all_blank(p_mine, row, count, o_w, m_w, False, RANK, PROCESSES, ROWS, WORDS)
    tl.store(p_out + row * SIZE + o_h, b_total.to(dtype), mask=m_h)
    tl.store(p_counts + row, count)


def look_up(tokens: Tensor, table: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
    """Embeddings of tokens from a table whose rows the processes share out, as `reference.look_up` gives them."""
    shape = torch.Size((*tokens.shape, table.shape[1]))
    plain = table.stride(1) == 1 and tokens.dtype in _TOKENS and fits(shape, table.dtype) and not table.requires_grad
    space = space_for(table, table.shape[1], table.dtype, group) if plain else None
    if space is None:
        return reference.look_up(tokens, table, first, group, partial(symmetric.all_reduce, group=group))
    return summed_rows(tokens, table, first, space)


def summed_rows(tokens: Tensor, table: Tensor, first: int, space: Space) -> Tensor:
    """The launch."""
    size, flat = table.shape[1], tokens.reshape(-1).contiguous()
    block, out = max(16, triton.next_power_of_2(size)), table.new_empty(*tokens.shape, size)
    _look_up[(len(flat),)](
        *(flat, table, out, space.addresses, space.counts),
        *(first, len(table), table.stride(0)),
        SIZE=size,
        BLOCK=block,
        USED=size * table.element_size() // 4,
        **space.options(),
        num_warps=row_warps(block, table.element_size()),
        **dependent(table.device),
    )
    return out
