"""A norm of a product whose addends the processes of one host hold, each on a GPU of its own: the sum, the residual and
the norm in one launch, with one message between every two GPUs.

A program sends its row to the others' memory in words (`words.py`) and waits for theirs. A process that sends
its third message has got the others' second, which they sent when they had read its first: two places are enough. A
product of one row, by `kernels/linear/row.py`, sends its words itself, as soon as it has them, and the norm's launch
after it only reads.

Of more than two processes each would write all of a long message to all others. There a row has an owner, its number
modulo the processes: the others send their addends to it alone, and it sends the sum to them, in the dtype that all
would round it to. The order of the addends is the same, and so are the bits.

x, residual, out, total [..., H] as in `kernels/layer/norms.py`, R rows in all; W = H / 2 words a row, of 4-byte dtypes
W = H.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.launch import dependent, wait_for_previous
from fastspec.kernels.layer import norms as layer
from fastspec.kernels.layer.norms import norm_row, summed
from fastspec.kernels.linear.launches import RowLaunch
from fastspec.kernels.linear.linear import row_launch_of
from fastspec.kernels.linear.reference import DeferredProduct, DeferredSum, Parts, joined
from fastspec.kernels.linear.row import linear_row
from fastspec.kernels.parallel.words import (
    BLANK,
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

OWNED_BYTES = 500_000
"""Bytes saved from which on owners of rows pay: those that NVLink carries while the second message is on its way."""


def has_owners(nbytes: int, processes: int) -> bool:
    """True where rows of so many bytes have owners: each of P processes then writes 2 (P - 1) / P times as many, and
    P - 1 times as many where all write to all."""
    return nbytes * (processes - 1) * (1 - 2 / processes) > OWNED_BYTES


@triton.jit
def _reduced_norm(
    p_x,
    p_residual,
    p_weight,
    p_out,
    p_sum,
    p_addresses,
    p_counts,
    stride_x,
    stride_residual,
    stride_out,
    stride_sum,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
    USED: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    PROCESSES: tl.constexpr,
    LOOKS: tl.constexpr,
    SENT: tl.constexpr,
    OWNED: tl.constexpr,
    ADD: tl.constexpr,
    PARTS: tl.constexpr,
    OFFSET: tl.constexpr,
    ORDERED: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    o_h = tl.arange(0, BLOCK)
    m_h = o_h < SIZE
    o_w = tl.arange(0, WORDS)
    m_w = o_w < USED
    owner = tl.program_id(0) % PROCESSES
    b_weight = tl.load(p_weight + o_h, mask=m_h, other=0.0).to(tl.float32)  # no kernel writes it, nor the addresses
    p_mine, p_next = space_of(p_addresses, RANK), space_of(p_addresses, (RANK + 1) % PROCESSES)
    guess = 0
    if SENT:
        guess = tl.load(p_counts + row, volatile=True) + 1  # the kernel that sets the count may still be running
    if PDL:
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if not EARLY:
            tl.extra.cuda.gdc_launch_dependents()
    dtype: tl.constexpr = p_out.dtype.element_ty
    count = tl.load(p_counts + row, volatile=True) + 1
    b_x = tl.zeros((BLOCK,), dtype)
    b_residual = b_x
    if ADD:  # asked for before the others' words are waited for
        b_residual = tl.load(p_residual + row * stride_residual + o_h, mask=m_h, other=0.0)
    if not SENT:
        if PARTS > 0:
            b_x = summed(p_x, row, tl.num_programs(0), o_h, m_h, SIZE, PARTS).to(dtype)
        else:
            b_x = tl.load(p_x + row * stride_x + o_h, mask=m_h, other=0.0)
        if not OWNED:
            send_words(to_words(b_x, WORDS), p_addresses, p_next, row, count, o_w, m_w, RANK, PROCESSES, ROWS, WORDS)
        guess = count
    if OWNED and owner != RANK:
        p_sent = place_in(space_of(p_addresses, owner), RANK, row, count, PROCESSES, ROWS, WORDS) + o_w
        tl.store(p_sent, to_words(b_x, WORDS), mask=m_w, cache_modifier=".wt")
        p_got = place_in(p_mine, owner, row, count, PROCESSES, ROWS, WORDS) + o_w
        b_got = come(tl.load(p_got, mask=m_w, other=0, volatile=True), p_got, m_w, LOOKS)
        b_x = from_words(b_got, dtype, BLOCK).to(dtype)
        make_blank(p_got, m_w)
    else:
        b_total = sum_words(
            b_x, p_mine, row, guess, count, o_w, m_w, dtype, BLOCK, SENT, RANK, PROCESSES, ROWS, WORDS, LOOKS
        )
        b_x = b_total.to(dtype)
        if OWNED:
            send_words(to_words(b_x, WORDS), p_addresses, p_next, row, count, o_w, m_w, RANK, PROCESSES, ROWS, WORDS)
        make_all_blank(p_mine, row, count, o_w, m_w, SENT, RANK, PROCESSES, ROWS, WORDS)
    if ADD:
        b_x = (b_x.to(tl.float32) + b_residual.to(tl.float32)).to(dtype)
    tl.store(p_sum + row * stride_sum + o_h, b_x, mask=m_h)
    if ORDERED:  # squares are added up by where a thread's values lie: read again, as the norm of a tensor has them
        tl.debug_barrier()
        b_x = tl.load(p_sum + row * stride_sum + o_h, mask=m_h, other=0.0)
    tl.store(p_out + row * stride_out + o_h, norm_row(b_x, b_weight, eps, SIZE, OFFSET), mask=m_h)
    tl.store(p_counts + row, count)


@triton.jit
def _drop(
    p_x,
    p_addresses,
    p_counts,
    USED: tl.constexpr,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    PROCESSES: tl.constexpr,
    LOOKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Wait for the message of the first row, of x's dtype, that all have sent, and make it blank, where this process's
    own words stand: else it has sent none, or the norm has read it."""
    wait_for_previous(PDL)
    o_w = tl.arange(0, WORDS)
    m_w, p_mine, count = o_w < USED, space_of(p_addresses, RANK), tl.load(p_counts) + 1
    dtype: tl.constexpr = p_x.dtype.element_ty
    b_own = tl.load(place_in(p_mine, RANK, 0, count, PROCESSES, ROWS, WORDS) + o_w, mask=m_w, other=0, volatile=True)
    if tl.sum(((b_own == BLANK) & m_w).to(tl.int32), 0) == 0:
        sum_words(0.0, p_mine, 0, count, count, o_w, m_w, dtype, 2 * WORDS, True, RANK, PROCESSES, ROWS, WORDS, LOOKS)
        make_all_blank(p_mine, 0, count, o_w, m_w, True, RANK, PROCESSES, ROWS, WORDS)
        tl.store(p_counts, count)


def rms_norm(
    x: Tensor | Parts | DeferredSum,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    total: Tensor | None = None,
    offset: float | None = None,
    *,
    ordered: bool = False,
) -> tuple[Tensor, Tensor]:
    """`layer.rms_norm`, also of addends. All processes get the same bits; `ordered`: those of `layer.rms_norm` of the
    sum, however many rows there are."""
    if not isinstance(x, DeferredSum):
        return layer.rms_norm(x, weight, eps, residual, out, total, offset)
    own = x.own
    at = own.values if isinstance(own, Parts) else own.x if isinstance(own, DeferredProduct) else own
    space = space_for(at, x.shape[-1], x.dtype, x.group) if fits(x.shape, x.dtype) else None
    if space is None:
        return layer.rms_norm(joined(x), weight, eps, residual, out, total, offset)
    return reduced_norm(own, weight, eps, residual, out, total, offset, space, ordered)


def reduced_norm(
    own: Tensor | Parts | DeferredProduct,
    weight: Tensor,
    eps: float,
    residual: Tensor | None,
    out: Tensor | None,
    total: Tensor | None,
    offset: float | None,
    space: Space,
    ordered: bool = False,
) -> tuple[Tensor, Tensor]:
    """The launch, behind that of a product that is yet to be made: one that sends its words, if it can. Spaces are
    blank at first, and counts zeros."""
    size, shape, dtype = own.shape[-1], own.shape, own.dtype
    launch = sending_launch(own)
    made = own.made() if isinstance(own, DeferredProduct) and launch is None else own
    values = made.values if isinstance(made, Parts) else made.x if isinstance(made, DeferredProduct) else made
    normed = values.new_empty(shape, dtype=dtype) if out is None else out
    total = values.new_empty(shape, dtype=dtype) if total is None else total
    out_rows, total_rows = layer.rows_of(normed, "out"), layer.rows_of(total, "total")
    x_rows = out_rows if isinstance(made, DeferredProduct) else layer.rows_of(values, "x")
    residual_rows = out_rows if residual is None else layer.rows_of(residual, "residual")
    block = max(16, triton.next_power_of_2(size))
    try:  # an interrupt may come behind either launch
        if isinstance(made, DeferredProduct) and launch is not None:
            linear_row(made.x.reshape(1, -1), made.weight, made.bias, None, launch, False, space=space)
        _reduced_norm[(len(out_rows),)](
            *(x_rows, residual_rows, weight, out_rows, total_rows, space.addresses, space.counts),
            *(x_rows.stride(0), residual_rows.stride(0), out_rows.stride(0), total_rows.stride(0), eps),
            SIZE=size,
            BLOCK=block,
            USED=size * dtype.itemsize // 4,
            **space.options(),
            SENT=launch is not None,
            OWNED=launch is None and has_owners(shape.numel() * dtype.itemsize, space.processes),
            ADD=residual is not None,
            PARTS=len(values) if isinstance(made, Parts) else 0,
            OFFSET=offset,
            ORDERED=ordered,
            EARLY=len(out_rows) == 1,
            num_warps=layer.row_warps(block, dtype.itemsize),
            **dependent(normed.device),
        )
    except BaseException:
        if launch is not None:  # what was sent is read, or a later message would find it in its place
            _drop[(1,)](
                *(values, space.addresses, space.counts),
                USED=size * dtype.itemsize // 4,
                **space.options(),
                **dependent(normed.device),
            )
        raise
    return normed, total


def sending_launch(product: Tensor | Parts | DeferredProduct) -> RowLaunch | None:
    """The launch of a product that sends its words to all processes, this one too: of one row that is yet to be made,
    in a dtype of two bytes."""
    if not isinstance(product, DeferredProduct) or product.x.dtype.itemsize != 2 or product.weight.shape[0] % 2:
        return None
    return row_launch_of(product.x, product.weight, product.bias)
