"""A look-up in a table whose rows the processes of one host share out: each sends what it has of a token, or zeros, in flagged words
(`words.py`), and adds up what has come. One launch, where a masked look-up and a sum are eight.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.launch import dependent
from fastspec.kernels.layer.rms_norm import row_warps
from fastspec.kernels.parallel import reference, symmetric
from fastspec.kernels.parallel.words import MAX_LOOKS, ROWS, Space, fits, send_words, space_for, space_of, sum_words, to_words

_TOKENS = (torch.int64, torch.int32)


@triton.jit
def _look_up(
    p_tokens, p_table, p_out, p_addresses, p_counts, first, held, stride_table,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, WORDS: tl.constexpr, USED: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr,
    PROCESSES: tl.constexpr, LOOKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    o_h = tl.arange(0, BLOCK)
    m_h = o_h < SIZE
    o_w = tl.arange(0, WORDS)
    m_w = o_w < USED
    p_mine, p_next = space_of(p_addresses, RANK), space_of(p_addresses, (RANK + 1) % PROCESSES)  # no kernel writes them
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    count = tl.load(p_counts + row) + 1
    token = tl.load(p_tokens + row).to(tl.int64) - first
    near = tl.maximum(tl.minimum(token, held - 1), 0)
    b_x = tl.load(p_table + near * stride_table + o_h, mask=m_h & (o_h < held * SIZE), other=0.0)  # of a table that may be empty
    b_x = tl.where((near == token) & (near < held), b_x, 0.0)
    send_words(to_words(b_x, count, WORDS), p_addresses, p_next, row, count, o_w, m_w, RANK, PROCESSES, ROWS, WORDS)
    dtype: tl.constexpr = p_out.dtype.element_ty
    b_total = sum_words(b_x, p_mine, row, count, count, o_w, m_w, dtype, BLOCK, False, RANK, PROCESSES, ROWS, WORDS, LOOKS)
    tl.store(p_out + row * SIZE + o_h, b_total.to(dtype), mask=m_h)
    tl.store(p_counts + row, count)


def look_up(tokens: Tensor, table: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
    """See `reference.look_up`."""
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
        flat, table, out, space.addresses, space.counts, first, len(table), table.stride(0),
        SIZE=size, BLOCK=block, WORDS=space.words, USED=size * table.element_size() // 4, ROWS=ROWS, RANK=space.rank,
        PROCESSES=space.processes, LOOKS=MAX_LOOKS, num_warps=row_warps(block, table.element_size()), **dependent(table.device),
    )  # fmt: skip
    return out
