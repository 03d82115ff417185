"""Words of four bytes that processes write into each other's memory, where every word is BLANK until it comes.

Who sees another has it, so that nothing else is sent or waited for, and makes it BLANK again: a row's messages take two
places of a space in turn, words [2, P, ROWS, W] int32 of P processes. (NVIDIA's "Lamport" sums do so with three.)
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor
from torch._guards import detect_fake_mode

from fastspec.kernels.launch import INTERPRETED
from fastspec.kernels.layer.norms import MAX_SIZE
from fastspec.kernels.parallel import symmetric

ROWS = 128
"""Rows that a space has room for: as many as a message has, whose programs each wait for another device's. They begin
in the order of the rows, so that the first one that is not done is on every device, where not all of them are."""
MAX_BYTES = 2 * 1024 * 1024
"""Bytes of a message at most; longer ones are added up in two shots."""
BLANK = tl.constexpr(-1)
"""A word that has not come: in every dtype a NaN, or two."""
NANS = tl.constexpr(0x7FFF7FFF)
"""Word that is sent in place of one with the BLANK's bits."""
MAX_LOOKS = 0 if INTERPRETED else 600_000_000
"""For a message that does not come, minutes of them: a process that waits for one that has failed ends with an
error."""


class Space(NamedTuple):
    """Space for the messages of a process's rows: `addresses` [P] int64 of every process's space, of `words` words a
    row, `counts` [ROWS] int32 of this process's messages of every row so far, and which of how many processes this
    is."""

    addresses: Tensor
    counts: Tensor
    rank: int
    processes: int
    words: int

    def options(self) -> dict[str, int]:
        """Compile-time numbers of a launch that uses the space."""
        sizes = {"WORDS": self.words, "ROWS": ROWS, "RANK": self.rank, "PROCESSES": self.processes}
        return {**sizes, "LOOKS": MAX_LOOKS}


def fits(shape: torch.Size, dtype: torch.dtype) -> bool:
    """True where [..., H] are rows that one launch sums."""
    size = shape[-1]
    rows = shape.numel() // size if size else 0
    whole = dtype == torch.float32 or (dtype in (torch.bfloat16, torch.float16) and size % 2 == 0)
    return whole and 0 < rows <= ROWS and rows * size * dtype.itemsize <= MAX_BYTES and size <= MAX_SIZE


def space_for(like: Tensor, size: int, dtype: torch.dtype, group: dist.ProcessGroup) -> Space | None:
    """The space of rows of so many elements on a tensor's device, or None where the processes do not see each other's
    memory. While a program is looked at before its first run (kernels/ahead.py) it is blank, and no process is
    asked."""
    if not like.is_cuda or torch.version.hip is not None:
        return None
    words, rank, processes = words_of(size, dtype), group.rank(), group.size()
    if detect_fake_mode() is not None:  # whatever `like` is: a table is the model's own, and has data
        blank = like.new_empty(processes, dtype=torch.int64), like.new_empty(ROWS, dtype=torch.int32)
        return Space(*blank, rank, processes, words)
    return Space(*_space(group, like.device, words), rank, processes, words) if symmetric.reachable(group) else None


def words_of(size: int, dtype: torch.dtype) -> int:
    """Words that a row takes of the space."""
    block: int = triton.next_power_of_2(size)
    return max(16, block) * dtype.itemsize // 4


@cache
def _space(group: dist.ProcessGroup, device: torch.device, words: int) -> tuple[Tensor, Tensor]:
    """The addresses of every process's space for rows of so many words, and this one's counts. Every process makes them
    at the same sum, the first of such rows, which is not captured; all wait until all spaces are blank."""
    space, handle = symmetric.shared((2, group.size(), ROWS, words), torch.int32, group, device)
    space.fill_(BLANK.value)
    torch.cuda.synchronize(device)
    dist.barrier(group)
    _held.append((space, handle))
    return torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device), torch.zeros(
        ROWS, dtype=torch.int32, device=device
    )


_held: list[object] = []
"""Memory that the addresses are of."""


@triton.jit
def to_words(b_x, WORDS: tl.constexpr):
    """A row [H] as words [W] int32, none of them BLANK."""
    if b_x.dtype.primitive_bitwidth == 32:
        b_words = b_x.to(tl.int32, bitcast=True)
    else:
        b_even, b_odd = tl.split(tl.reshape(b_x.to(tl.uint16, bitcast=True), (WORDS, 2)))
        b_words = (b_even.to(tl.uint32) | (b_odd.to(tl.uint32) << 16)).to(tl.int32, bitcast=True)
    return tl.where(b_words == BLANK, NANS, b_words)


@triton.jit
def from_words(b_words, dtype: tl.constexpr, BLOCK: tl.constexpr):
    """A row [H] fp32 of words [W] int32."""
    if dtype.primitive_bitwidth == 32:
        b_row = b_words.to(dtype, bitcast=True)
    else:
        b_even = (b_words & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
        b_odd = ((b_words >> 16) & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
        b_row = tl.reshape(tl.join(b_even, b_odd), (BLOCK,))
    return b_row.to(tl.float32)


@triton.jit
def space_of(p_addresses, process):
    """A process's space. The table of addresses stands, so that a kernel may ask for it before it waits."""
    return tl.load(p_addresses + process).to(tl.pointer_type(tl.int32))


@triton.jit
def place_in(p_space, sender, row, count, PROCESSES: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Place in a space where the words of a sender's message lie, the count-th of the row."""
    return p_space + (((count & 1) * PROCESSES + sender) * ROWS + row) * WORDS


@triton.jit
def end_program(looks):
    """End this program and the device's context, with an error that the host sees."""
    tl.inline_asm_elementwise("trap; mov.b32 $0, $1;", "=r,r", [looks], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def come(b_got, p_got, m_w, LOOKS: tl.constexpr):
    """The words at p_got [W], of which b_got is a first look, when all of them have come."""
    looks = 0
    while tl.sum(((b_got == BLANK) & m_w).to(tl.int32), 0) > 0:
        b_got = tl.load(p_got, mask=m_w, other=0, volatile=True)
        if LOOKS > 0:
            looks += 1
            if looks == LOOKS:
                end_program(looks)
    return b_got


@triton.jit
def make_blank(p_got, m_w):
    """Make words [W] BLANK again, when every warp has read them."""
    tl.debug_barrier()
    tl.store(p_got, tl.full(p_got.shape, BLANK, tl.int32), mask=m_w)


@triton.jit
def send_words(
    b_words,
    p_addresses,
    p_next,
    row,
    count,
    o_w,
    m_w,
    RANK: tl.constexpr,
    PROCESSES: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Write a message of a row into the other processes' spaces; p_next is that of the process behind this one."""
    for turn in tl.static_range(1, PROCESSES):
        p_space = p_next
        if turn > 1:
            p_space = space_of(p_addresses, (RANK + turn) % PROCESSES)
        tl.store(
            place_in(p_space, RANK, row, count, PROCESSES, ROWS, WORDS) + o_w, b_words, mask=m_w, cache_modifier=".wt"
        )


@triton.jit
def sum_words(
    b_x,
    p_mine,
    row,
    guess,
    count,
    o_w,
    m_w,
    dtype: tl.constexpr,
    BLOCK: tl.constexpr,
    SENT: tl.constexpr,
    RANK: tl.constexpr,
    PROCESSES: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    LOOKS: tl.constexpr,
):
    """The sum [BLOCK] fp32 of all processes' rows in the order of their ranks, when they have come to this one's space;
    its own is b_x, or where it was SENT in its space too. A first look is at where the message would be if it were the
    guess-th: right or wrong, it need not wait for the count."""
    b_total = tl.zeros((BLOCK,), tl.float32)
    for process in tl.static_range(PROCESSES):
        if process == RANK and not SENT:
            b_total += b_x.to(tl.float32)
        else:
            p_guessed = place_in(p_mine, process, row, guess, PROCESSES, ROWS, WORDS) + o_w
            b_got = tl.load(p_guessed, mask=m_w, other=0, volatile=True)
            if SENT:
                b_got = tl.where(guess == count, b_got, BLANK)
            p_got = place_in(p_mine, process, row, count, PROCESSES, ROWS, WORDS) + o_w
            b_total += from_words(come(b_got, p_got, m_w, LOOKS), dtype, BLOCK)
    return b_total


@triton.jit
def make_all_blank(
    p_mine,
    row,
    count,
    o_w,
    m_w,
    SENT: tl.constexpr,
    RANK: tl.constexpr,
    PROCESSES: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Make the messages of all processes BLANK again that `sum_words` has read."""
    for process in tl.static_range(PROCESSES):
        if process != RANK or SENT:
            make_blank(place_in(p_mine, process, row, count, PROCESSES, ROWS, WORDS) + o_w, m_w)
