"""A norm of a product whose addends the processes of one host hold, each on a GPU of its own: the sum, the residual and the norm in one
launch, with one message between every two GPUs.

A program sends its row to the others' memory in flagged words (`words.py`) and waits for theirs. A process that sends its third message
has got the others' second, which they sent when they had read its first: two places are enough. A product of one row, by `row.py`, sends
its words itself, as soon as it has them, and the norm's launch behind it only reads.

x, residual, out, total [..., H] as in `kernels/layer/rms_norm.py`, R rows in all; W = H / 2 words a row, of 4-byte dtypes W = H.
"""

from __future__ import annotations

import os
from functools import cache

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fastspec.kernels.launch import INTERPRETED, dependent
from fastspec.kernels.layer import rms_norm as layer
from fastspec.kernels.layer.rms_norm import norm_row, summed
from fastspec.kernels.linear.linear import row_launch_of
from fastspec.kernels.linear.reference import Addends, Later, Parts, joined
from fastspec.kernels.linear.row import linear_row
from fastspec.kernels.parallel import symmetric
from fastspec.kernels.parallel.words import ROWS, Space, from_words, place_of, to_words

MAX_ROWS = ROWS
"""Rows of a message, whose programs are on the device together: each waits for another device's."""
MAX_LOOKS = 600_000_000
"""For a message that does not come, minutes of them: a process that waits for one that has failed ends with an error."""
MAX_BYTES = 1024 * 1024
"""Of a message without its flags; longer ones take less time in two shots."""


@triton.jit
def end_program(looks):
    """End this program and the device's context, with an error that the host sees."""
    tl.inline_asm_elementwise("trap; mov.b32 $0, $1;", "=r,r", [looks], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _reduced_norm(
    p_x, p_residual, p_weight, p_out, p_sum, p_addresses, p_counts, stride_x, stride_residual, stride_out, stride_sum, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, WORDS: tl.constexpr, USED: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr,
    PROCESSES: tl.constexpr, LOOKS: tl.constexpr, SENT: tl.constexpr, ADD: tl.constexpr, PARTS: tl.constexpr, OFFSET: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    o_h = tl.arange(0, BLOCK)
    m_h = o_h < SIZE
    o_w = tl.arange(0, WORDS)
    m_w = o_w < USED
    b_weight = tl.load(p_weight + o_h, mask=m_h, other=0.0).to(tl.float32)  # no kernel writes it
    if PDL:
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if not EARLY:
            tl.extra.cuda.gdc_launch_dependents()
    dtype: tl.constexpr = p_out.dtype.element_ty
    count = tl.load(p_counts + row) + 1
    b_residual = tl.zeros((BLOCK,), tl.float32)
    if ADD:  # asked for before the others' words are waited for
        b_residual = tl.load(p_residual + row * stride_residual + o_h, mask=m_h, other=0.0).to(tl.float32)
    b_x = b_residual.to(dtype)
    if not SENT:
        if PARTS > 0:
            b_x = summed(p_x, row, tl.num_programs(0), o_h, m_h, SIZE, PARTS).to(dtype)
        else:
            b_x = tl.load(p_x + row * stride_x + o_h, mask=m_h, other=0.0)
        b_sent = to_words(b_x, count, WORDS)
        for process in tl.static_range(PROCESSES):
            if process != RANK:
                p_theirs = place_of(p_addresses, process, RANK, row, count, PROCESSES, ROWS, WORDS)
                tl.store(p_theirs + o_w, b_sent, mask=m_w, cache_modifier=".wt")
    b_total = tl.zeros((BLOCK,), tl.float32)
    for process in tl.static_range(PROCESSES):
        if process == RANK and not SENT:
            b_total += b_x.to(tl.float32)
        else:
            p_got = place_of(p_addresses, RANK, process, row, count, PROCESSES, ROWS, WORDS) + o_w
            b_got = tl.load(p_got, mask=m_w, other=0, volatile=True)
            looks = 0
            while tl.sum((((b_got >> 32).to(tl.int32) != count) & m_w).to(tl.int32), 0) > 0:
                b_got = tl.load(p_got, mask=m_w, other=0, volatile=True)
                if LOOKS > 0:
                    looks += 1
                    if looks == LOOKS:
                        end_program(looks)
            b_total += from_words(b_got, dtype, BLOCK)
    b_x = b_total.to(dtype)
    if ADD:
        b_x = (b_x.to(tl.float32) + b_residual).to(dtype)
    tl.store(p_sum + row * stride_sum + o_h, b_x, mask=m_h)
    tl.store(p_out + row * stride_out + o_h, norm_row(b_x, b_weight, eps, SIZE, OFFSET), mask=m_h)
    tl.store(p_counts + row, count)


def rms_norm(
    x: Tensor | Parts | Addends, weight: Tensor, eps: float, residual: Tensor | None = None, out: Tensor | None = None,
    total: Tensor | None = None, offset: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`layer.rms_norm`, also of addends. All processes get the same bits."""
    if not isinstance(x, Addends):
        return layer.rms_norm(x, weight, eps, residual, out, total, offset)
    own = x.own
    at = own.values if isinstance(own, Parts) else own.x if isinstance(own, Later) else own
    looks = isinstance(at, FakeTensor)  # a look at a program before its first run (kernels/ahead.py): no one is asked
    if not fits(x) or not at.is_cuda or torch.version.hip is not None or not (looks or symmetric.reachable(x.group)):
        return layer.rms_norm(joined(x), weight, eps, residual, out, total, offset)
    size, rank, processes = x.shape[-1], x.group.rank(), x.group.size()
    words = _words(size, x.dtype)
    space = Space(*(_blank(at, processes) if looks else _space(x.group, at.device, words)), rank, processes, words)
    return reduced_norm(own, weight, eps, residual, out, total, offset, space)


def fits(x: Addends) -> bool:
    """Whether the addends are rows that one launch sums."""
    size = x.shape[-1]
    rows = x.shape.numel() // size if size else 0
    whole = x.dtype == torch.float32 or (x.dtype in (torch.bfloat16, torch.float16) and size % 2 == 0)
    return whole and 0 < rows <= MAX_ROWS and rows * size * x.dtype.itemsize <= MAX_BYTES and size <= layer.MAX_SIZE


def reduced_norm(
    own: Tensor | Parts | Later, weight: Tensor, eps: float, residual: Tensor | None, out: Tensor | None, total: Tensor | None,
    offset: float | None, space: Space,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The launch, behind that of a product that is yet to be made: of one row, where `row.py` takes it, one that sends its words. Spaces
    are zeros at first, and so are counts."""
    size, shape, dtype = own.shape[-1], own.shape, own.dtype
    sent = isinstance(own, Later) and send(own, space)
    made = own.x if sent else own.made() if isinstance(own, Later) else own  # type: ignore[union-attr]
    values, parts = (made.values, len(made.values)) if isinstance(made, Parts) else (made, 0)
    normed = values.new_empty(shape, dtype=dtype) if out is None else out
    total = values.new_empty(shape, dtype=dtype) if total is None else total
    out_rows, total_rows = layer.rows_of(normed, "out"), layer.rows_of(total, "total")
    x_rows = out_rows if sent else layer.rows_of(values, "x")
    residual_rows = out_rows if residual is None else layer.rows_of(residual, "residual")
    block = max(16, triton.next_power_of_2(size))
    _reduced_norm[(len(out_rows),)](
        x_rows, residual_rows, weight, out_rows, total_rows, space.addresses, space.counts,
        x_rows.stride(0), residual_rows.stride(0), out_rows.stride(0), total_rows.stride(0), eps,
        SIZE=size, BLOCK=block, WORDS=space.words, USED=size * dtype.itemsize // 4, ROWS=ROWS, RANK=space.rank, PROCESSES=space.processes,
        LOOKS=0 if INTERPRETED else MAX_LOOKS, SENT=sent, ADD=residual is not None, PARTS=parts, OFFSET=offset, EARLY=len(out_rows) == 1,
        num_warps=layer.row_warps(block, dtype.itemsize), **dependent(normed.device),
    )  # fmt: skip
    return normed, total


def send(product: Later, space: Space) -> bool:
    """Let a product of one row send its words to all processes, this one too, if `row.py` takes it -> whether it does."""
    x, weight, bias = product.x, product.weight, product.bias
    launch = row_launch_of(x, weight, bias) if x.dtype.itemsize == 2 and weight.shape[0] % 2 == 0 else None
    if launch is None:
        return False
    linear_row(x.reshape(1, -1), weight, bias, None, launch, False, space=space)
    return True


def _words(size: int, dtype: torch.dtype) -> int:
    """Words that a row takes of the space."""
    block: int = triton.next_power_of_2(size)
    return max(16, block) * dtype.itemsize // 4


def _blank(like: Tensor, processes: int) -> tuple[Tensor, Tensor]:
    return like.new_empty(processes, dtype=torch.int64), like.new_empty(MAX_ROWS, dtype=torch.int32)


@cache
def _space(group: dist.ProcessGroup, device: torch.device, words: int) -> tuple[Tensor, Tensor]:
    """The addresses of every process's space for rows of so many words, and this one's counts. Every process makes them at the same norm,
    the first of such rows, which is not captured; all wait until all spaces are zeros."""
    from torch.distributed import _symmetric_memory as memory

    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    space = memory.empty((2, group.size(), MAX_ROWS, words), dtype=torch.int64, device=device)
    handle = memory.rendezvous(space, group.group_name)
    space.zero_()
    torch.cuda.synchronize(device)
    dist.barrier(group)
    _held.append((space, handle))
    return torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device), torch.zeros(MAX_ROWS, dtype=torch.int32, device=device)


_held: list[object] = []
"""What the addresses are of."""
