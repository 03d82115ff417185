"""Words of eight bytes that processes write into each other's memory: four bytes of a row, and four of a flag that is written with them.

Who sees the flag has the rest, so that nothing else is waited for. (NCCL's low-latency protocol does the same.) The flag counts a row's
messages, which take two places of a space in turn: words [2, P, ROWS, W] int64 of P processes.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

ROWS = 128
"""Rows that a space has room for."""


class Space(NamedTuple):
    """Where the messages of a process's rows go: `addresses` [P] int64 of every process's space, of `words` words a row, `counts` [ROWS]
    int32 of this process's messages of every row so far, and which of how many processes this is."""

    addresses: Tensor
    counts: Tensor
    rank: int
    processes: int
    words: int


@triton.jit
def to_words(b_x, flag, WORDS: tl.constexpr):
    """A row [H] as words [W] int64, with a flag in their upper halves."""
    if b_x.dtype.primitive_bitwidth == 32:
        b_bits = b_x.to(tl.uint32, bitcast=True).to(tl.int64)
    else:
        b_even, b_odd = tl.split(tl.reshape(b_x.to(tl.uint16, bitcast=True), (WORDS, 2)))
        b_bits = b_even.to(tl.int64) | (b_odd.to(tl.int64) << 16)
    return b_bits | (flag.to(tl.int64) << 32)


@triton.jit
def from_words(b_words, dtype: tl.constexpr, BLOCK: tl.constexpr):
    """A row [H] fp32 of words [W] int64."""
    if dtype.primitive_bitwidth == 32:
        b_row = (b_words & 0xFFFFFFFF).to(tl.uint32).to(dtype, bitcast=True)
    else:
        b_even = (b_words & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
        b_odd = ((b_words >> 16) & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
        b_row = tl.reshape(tl.join(b_even, b_odd), (BLOCK,))
    return b_row.to(tl.float32)


@triton.jit
def place_of(p_addresses, process, sender, row, count, PROCESSES: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Where in a process's space the words of a sender's message lie, the count-th of the row."""
    p_space = tl.load(p_addresses + process).to(tl.pointer_type(tl.int64))
    return p_space + (((count & 1) * PROCESSES + sender) * ROWS + row) * WORDS
