"""Norms: root-mean-square norms of sums, of Gated DeltaNet's heads, and gates that multiply what heads have read.

A row alone lets the kernel behind it start before it waits: a product asks for its weights meanwhile. On one H200, one
row, that made a token of the 8B shape 0.6 % and of the 1.5B shape 1.8 % shorter; a round of 60 nodes 0.3 % longer and
1.3 % shorter, so that more rows wait first (commit `c0f133b`, benchmarks/results/full_size_steps_h200.jsonl).

x, residual, out, total [..., H] with rows a fixed distance apart, weight [H]; R rows in all. Of heads rows have D
channels, and their gates lie in wider rows of a product.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.arguments import CONTIGUOUS, PACKED, expect, strides
from fastspec.kernels.launch import dependent, wait_for_previous
from fastspec.kernels.linear.reference import Parts

MAX_SIZE = 32768


@triton.jit
def added(p, m, stride, S: tl.constexpr):
    """The sums of S parts fp32 that lie stride (int64) apart, the first of them at p, in the order that `Parts`
    gives."""
    total = tl.zeros(m.shape, tl.float32)
    later = tl.zeros(m.shape, tl.float32)
    for part in tl.static_range(S):
        b_part = tl.load(p + part * stride, mask=m, other=0.0, cache_modifier=".cg")
        if S == 4 and part > 1:
            later += b_part
        else:
            total += b_part
    return total + later if S == 4 else total


@triton.jit
def summed(p_parts, row, rows, o_n, m_n, N: tl.constexpr, S: tl.constexpr):
    """One row of a product from its parts [S, R, N] fp32."""
    return added(p_parts + tl.cast(row, tl.int64) * N + o_n, m_n, tl.cast(rows, tl.int64) * N, S)


@triton.jit
def whole(p, m, stride, DTYPE: tl.constexpr, S: tl.constexpr):
    """The values at p, or with S their sums as in `added`, rounded to DTYPE."""
    b_out = added(p, m, stride, S).to(DTYPE) if S > 0 else tl.load(p, mask=m, other=0.0)
    return b_out


@triton.jit
def norm_row(b_x, b_weight, eps, SIZE: tl.constexpr, OFFSET: tl.constexpr = None):
    """The norm of a row, in its dtype: computed in fp32, rounded before the weight (fp32) is applied and after; an
    OFFSET is added to the weight, and the result rounded once."""
    b_wide = b_x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(b_wide * b_wide, 0) / SIZE + eps)
    if OFFSET is not None:
        return (b_wide * scale * (OFFSET + b_weight)).to(b_x.dtype)
    b_normed = (b_wide * scale).to(b_x.dtype).to(tl.float32)
    return (b_normed * b_weight).to(b_x.dtype)


@triton.jit
def _rms_norm(
    p_x,
    p_residual,
    p_weight,
    p_out,
    p_sum,
    stride_x,
    stride_residual,
    stride_out,
    stride_sum,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PARTS: tl.constexpr,
    SUM: tl.constexpr,
    OFFSET: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    o_h = tl.arange(0, BLOCK)
    m_h = o_h < SIZE
    b_weight = tl.load(p_weight + o_h, mask=m_h, other=0.0).to(tl.float32)  # no kernel writes it
    if PDL:
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if not EARLY:
            tl.extra.cuda.gdc_launch_dependents()
    dtype: tl.constexpr = p_out.dtype.element_ty
    if PARTS > 0:
        b_x = summed(p_x, row, tl.num_programs(0), o_h, m_h, SIZE, PARTS).to(dtype)
    else:
        b_x = tl.load(p_x + row * stride_x + o_h, mask=m_h, other=0.0)
    if ADD:
        b_residual = tl.load(p_residual + row * stride_residual + o_h, mask=m_h, other=0.0)
        b_x = (b_x.to(tl.float32) + b_residual.to(tl.float32)).to(dtype)
    if SUM:
        tl.store(p_sum + row * stride_sum + o_h, b_x, mask=m_h)
    tl.store(p_out + row * stride_out + o_h, norm_row(b_x, b_weight, eps, SIZE, OFFSET), mask=m_h)


def rows_of(x: Tensor, name: str) -> Tensor:
    """x [..., H] as [R, H], a view: the last dimension contiguous, the rows a fixed distance apart."""
    if x.dim() == 0 or (x.stride(-1) != 1 and x.shape[-1] > 1):
        raise ValueError(
            f"{name} has strides {x.stride()}: its last dimension must be contiguous; pass {name}.contiguous()"
        )
    try:
        return x.view(-1, x.shape[-1])
    except RuntimeError:
        raise ValueError(
            f"{name} {list(x.shape)} has strides {x.stride()}: its rows must lie a fixed distance apart, as in a "
            f"contiguous tensor or a slice of its last dimension; pass {name}.contiguous()"
        ) from None


def rms_norm(
    x: Tensor | Parts,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    total: Tensor | None = None,
    offset: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`reference.rms_norm`: the norm of x [..., H], or of x + residual, by weight [H] -> the norm and what was normed,
    both [..., H].

    x may be the parts of a product, which are added up on the way. x, residual, out and total may be views whose last
    dimension is contiguous and whose rows lie a fixed distance apart; all have the same dtype (fp32, fp16 or bf16), and
    H is at most 32768. Without a residual the second result is x itself, or the sum of its parts, unless `total` is
    given. `out` and `total` must not overlap the inputs in part, nor each other; one may be x or the residual.
    """
    size = x.shape[-1]
    values, parts = (x.values, len(x.values)) if isinstance(x, Parts) else (x, 0)
    if not 0 < size <= MAX_SIZE:
        raise ValueError(f"x has rows of {size}; 1 to {MAX_SIZE} are accepted")
    normed = values.new_empty(x.shape, dtype=x.dtype) if out is None else out
    expect("rms_norm", (size,), x.dtype, CONTIGUOUS, weight=weight)
    expect("rms_norm", x.shape, x.dtype, residual=residual, out=normed, total=total)
    x_rows, out_rows = rows_of(values, "x"), rows_of(normed, "out")
    residual_rows = out_rows if residual is None else rows_of(residual, "residual")
    summing = bool(parts) or residual is not None or total is not None
    if total is None:
        total = values.new_empty(x.shape, dtype=x.dtype) if summing else values
    total_rows = rows_of(total, "total") if summing else out_rows
    if normed.numel() == 0:
        return normed, total
    block = max(16, triton.next_power_of_2(size))
    _rms_norm[(len(out_rows),)](
        *(x_rows, residual_rows, weight, out_rows, total_rows),
        *(*strides(1, x_rows, residual_rows, out_rows, total_rows), eps),
        SIZE=size,
        BLOCK=block,
        ADD=residual is not None,
        PARTS=parts,
        SUM=summing,
        OFFSET=offset,
        EARLY=len(out_rows) == 1,
        num_warps=row_warps(block, normed.element_size()),
        **dependent(normed.device),
    )
    return normed, total


def row_warps(block: int, itemsize: int) -> int:
    """Warps of a row, 8 bytes of it a thread: a row alone waits for its loads, and parts are several for each value."""
    return min(16, max(1, block * itemsize // (32 * 8)))


HEADS = 4
"""Heads of a program."""


@triton.jit(do_not_specialize=["nodes"])
def _gated_norm(
    p_x,
    p_gate,
    p_weight,
    p_out,
    eps,
    s_gate_b,
    s_gate_n,
    nodes,
    HEADS_ALL: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    o_d = tl.arange(0, BLOCK)
    m_d = o_d < SIZE
    b_weight = tl.load(p_weight + o_d, mask=m_d, other=0.0).to(tl.float32)  # no kernel writes it
    wait_for_previous(PDL)
    node = tl.program_id(0).to(tl.int64)
    p_row = p_gate + (node // nodes) * s_gate_b + (node % nodes) * s_gate_n
    o_h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    m = (o_h < HEADS_ALL)[:, None] & m_d[None, :]
    o_head = o_h[:, None] * SIZE + o_d[None, :]
    b_x = tl.load(p_x + node * (HEADS_ALL * SIZE) + o_head, mask=m, other=0.0)
    b_wide = b_x.to(tl.float32)
    b_normed = (b_wide * tl.rsqrt(tl.sum(b_wide * b_wide, 1) / SIZE + eps)[:, None]).to(b_x.dtype).to(tl.float32)
    b_gate = tl.load(p_row + o_head, mask=m, other=0.0).to(tl.float32)
    b_out = (b_normed * b_weight[None, :]).to(b_x.dtype).to(tl.float32) * (b_gate * tl.sigmoid(b_gate))
    tl.store(p_out + node * (HEADS_ALL * SIZE) + o_head, b_out.to(b_x.dtype), mask=m)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`recurrent.reference.gated_norm`: x [B, N, H, D] contiguous, gate [B, N, H, D] contiguous but for its rows' and
    nodes' strides, weight [D] contiguous, all of one dtype."""
    batch, nodes, heads, size = x.shape
    expect("gated_norm", x.shape, None, CONTIGUOUS, x=x)
    expect("gated_norm", x.shape, x.dtype, gate=gate)
    expect("gated_norm", (heads, size), x.dtype, CONTIGUOUS, **{"gate of a node": gate[0, 0]})
    expect("gated_norm", (size,), x.dtype, weight=weight)
    out = x.new_empty(x.shape)
    _gated_norm[(batch * nodes, triton.cdiv(heads, HEADS))](
        *(x, gate, weight, out),
        *(eps, *gate.stride()[:2], nodes),
        HEADS_ALL=heads,
        SIZE=size,
        BLOCK=max(16, triton.next_power_of_2(size)),
        HEADS=HEADS,
        num_warps=1,
        **dependent(x.device),
    )
    return out


@triton.jit(do_not_specialize=["nodes"])
def _gate_heads(
    p_x,
    p_qkv,
    p_out,
    s_part,
    s_qkv_b,
    s_qkv_n,
    nodes,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    node = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = o < WIDTH
    p_row = p_qkv + (node // nodes) * s_qkv_b + (node % nodes) * s_qkv_n
    b_x = tl.load(p_x + node * WIDTH + o, mask=m, other=0.0)
    p_gate = p_row + (o // SIZE) * (2 * SIZE) + SIZE + o % SIZE
    b_gate = whole(p_gate, m, tl.cast(s_part, tl.int64), b_x.dtype, PARTS)
    b_open = tl.sigmoid(b_gate.to(tl.float32)).to(b_x.dtype).to(tl.float32)
    tl.store(p_out + node * WIDTH + o, (b_x.to(tl.float32) * b_open).to(b_x.dtype), mask=m)


def gate_heads(x: Tensor, qkv: Tensor | Parts) -> Tensor:
    """`reference.gate_heads`: x [B, N, Hq, D] contiguous, qkv [B, N, at least 2 * Hq * D] of one dtype, its last
    dimension contiguous, or the parts of a product, which are added up on the way."""
    batch, nodes, heads, size = x.shape
    expect("gate_heads", x.shape, None, CONTIGUOUS, x=x)
    values, parts, apart = laid_out("gate_heads", qkv, (batch, nodes, "2 * Hq * D or more"), x.dtype)
    if qkv.shape[2] < 2 * heads * size:
        raise ValueError(f"gate_heads: qkv is {list(qkv.shape)}; gates behind every head's queries are accepted")
    out, width = x.new_empty(batch, nodes, heads * size), heads * size
    _gate_heads[(batch * nodes, triton.cdiv(width, 1024))](
        *(x, values, out),
        *(*apart, nodes),
        WIDTH=width,
        SIZE=size,
        BLOCK=1024,
        PARTS=parts,
        num_warps=4,
        **dependent(x.device),
    )
    return out


def laid_out(
    op: str, x: Tensor | Parts, shape: Sequence[int | str], dtype: torch.dtype | None
) -> tuple[Tensor, int, tuple[int, int, int]]:
    """The values of x [B, N, H], a tensor with a contiguous last dimension or the parts of a product, how many parts
    (0: a tensor), and how far apart parts, rows and nodes lie. Raises ValueError for another shape or dtype."""
    if not isinstance(x, Parts):
        expect(op, shape, dtype, PACKED, qkv=x)
        return x, 0, (0, x.stride(0), x.stride(1))
    expect(op, ("S", *shape), torch.float32, CONTIGUOUS, **{"qkv's parts": x.values})
    if dtype is not None and x.dtype != dtype:
        raise ValueError(f"{op}: qkv's parts are rounded to {x.dtype}; accepted is {dtype}")
    apart, rows, nodes, _ = x.values.stride()
    return x.values, len(x.values), (apart, rows, nodes)
