"""One row times a weight, as fast as the weight can be read: no tensor cores, and no sum goes through memory.

K input channels, M output channels. A program takes CHANNELS lines of the weight (as many of gate and of up under
SwiGLU) and goes through them in blocks of DEPTH, the next of which is on its way while one is multiplied. The first is
asked for before the kernel in front has finished: no kernel of a stream writes weights.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.launch import dependent
from fastspec.kernels.linear.launches import RowLaunch
from fastspec.kernels.linear.reference import SILU, Activation
from fastspec.kernels.linear.swiglu import gated
from fastspec.kernels.parallel.words import ROWS, Space, place_in, to_words

EACH = 8  # neighbours whose products a thread adds up first: 16 bytes of half precision


@triton.jit
def _block(p_lines, o_k, K, EVEN: tl.constexpr):
    """Weights [CHANNELS, DEPTH], zero past K."""
    if EVEN:
        b_w = tl.load(p_lines + o_k[None, :])
    else:
        b_w = tl.load(p_lines + o_k[None, :], mask=(o_k < K)[None, :], other=0.0)
    return b_w


@triton.jit
def _products(b_w, b_x, CHANNELS: tl.constexpr, DEPTH: tl.constexpr, EACH: tl.constexpr):
    """Sums [CHANNELS, DEPTH / EACH] of the products of neighbours, in fp32."""
    return tl.sum(tl.reshape(b_w.to(tl.float32) * b_x.to(tl.float32)[None, :], [CHANNELS, DEPTH // EACH, EACH]), 2)


@triton.jit
def _row_kernel(
    p_x,
    p_w,
    p_bias,
    p_out,
    p_addresses,
    p_counts,
    M,
    K,
    stride_w,
    CHANNELS: tl.constexpr,
    DEPTH: tl.constexpr,
    EACH: tl.constexpr,
    SWIGLU: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    KIND: tl.constexpr,
    RANK: tl.constexpr,
    PROCESSES: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Out [M] of x [K] and w [M, K], or [2 * M, K] under SWIGLU; with PROCESSES sent to their spaces, this one's too,
    in place of out."""
    first = tl.program_id(0) * CHANNELS
    o_i = first + tl.arange(0, CHANNELS)
    m_i = o_i < M
    o_k = tl.arange(0, DEPTH)
    p_lines = p_w + tl.minimum(o_i, M - 1).to(tl.int64)[:, None] * stride_w
    p_above = p_lines + tl.cast(M, tl.int64) * stride_w
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    b_w = _block(p_lines, o_k, K, EVEN)
    b_u = b_w
    if SWIGLU:
        b_u = _block(p_above, o_k, K, EVEN)
    b_spaces = tl.zeros([PADDED], tl.int64)
    if PROCESSES > 0:
        b_spaces = tl.load(p_addresses + tl.minimum(tl.arange(0, PADDED), PROCESSES - 1))  # no kernel writes them
    if PDL:
        tl.extra.cuda.gdc_wait()
    count = 0
    if PROCESSES > 0:
        count = tl.load(p_counts) + 1

    b_sums = tl.zeros([CHANNELS, DEPTH // EACH], tl.float32)
    b_ups = tl.zeros([CHANNELS, DEPTH // EACH], tl.float32)
    last = (K - 1) // DEPTH * DEPTH
    for start in tl.range(0, last, DEPTH, num_stages=1):
        b_next = _block(p_lines, start + DEPTH + o_k, K, EVEN)
        b_next_up = b_next
        if SWIGLU:
            b_next_up = _block(p_above, start + DEPTH + o_k, K, EVEN)
        b_x = tl.load(p_x + start + o_k)
        b_sums += _products(b_w, b_x, CHANNELS, DEPTH, EACH)
        if SWIGLU:
            b_ups += _products(b_u, b_x, CHANNELS, DEPTH, EACH)
        b_w, b_u = b_next, b_next_up
    b_x = tl.load(p_x + last + o_k, mask=last + o_k < K, other=0.0)
    b_sum = tl.sum(b_sums + _products(b_w, b_x, CHANNELS, DEPTH, EACH), 1)
    if BIAS:
        b_sum += tl.load(p_bias + o_i, mask=m_i, other=0.0).to(tl.float32)
    b_out = b_sum.to(p_x.dtype.element_ty)
    if SWIGLU:
        b_up = tl.sum(b_ups + _products(b_u, b_x, CHANNELS, DEPTH, EACH), 1)
        if BIAS:
            b_up += tl.load(p_bias + M + o_i, mask=m_i, other=0.0).to(tl.float32)
        b_out = gated(b_out, b_up.to(p_x.dtype.element_ty), KIND)
    if PROCESSES > 0:
        HALF: tl.constexpr = CHANNELS // 2
        o_w = tl.program_id(0) * HALF + tl.arange(0, HALF)
        b_words = to_words(b_out, HALF)
        p_places = (
            place_in(b_spaces.to(tl.pointer_type(tl.int32)), RANK, 0, count, PROCESSES, ROWS, WORDS)[:, None]
            + o_w[None, :]
        )
        m_words = (tl.arange(0, PADDED) < PROCESSES)[:, None] & (o_w < M // 2)[None, :]
        tl.store(p_places, tl.broadcast_to(b_words[None, :], [PADDED, HALF]), mask=m_words, cache_modifier=".wt")
    else:
        tl.store(p_out + o_i, b_out, mask=m_i)


def linear_row(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor | None,
    launch: RowLaunch,
    swiglu: bool,
    kind: Activation = SILU,
    space: Space | None = None,
) -> None:
    """Fill out [..., M] of one row, contiguous, with the product of x [1, K] and weight [M, K] ([2 * M, K] with
    swiglu), as `linear`; or send it, M even and of two bytes each, to a space of all processes, as the next message of
    their first row."""
    depth, width = weight.shape[1], weight.shape[0] // (1 + swiglu)
    addresses, counts, rank, processes, words = space or (None, None, 0, 0, 0)
    _row_kernel[(triton.cdiv(width, launch.channels),)](
        x,
        weight,
        bias,
        out,
        addresses,
        counts,
        width,
        depth,
        weight.stride(0),
        CHANNELS=launch.channels,
        DEPTH=launch.depth,
        EACH=min(EACH, launch.depth),
        SWIGLU=swiglu,
        BIAS=bias is not None,
        EVEN=depth % launch.depth == 0,
        KIND=kind,
        RANK=rank,
        PROCESSES=processes,
        PADDED=triton.next_power_of_2(max(1, processes)),
        ROWS=ROWS,
        WORDS=words,
        num_warps=launch.warps,
        **dependent(x.device),
    )
