"""Gates: the norm of Gated DeltaNet's heads, and what attention's heads have read, each multiplied by a function of its gate.

R rows of D channels, whose gates lie in wider rows of a product.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.launch import dependent

HEADS = 4
"""Heads of a program."""


@triton.jit(do_not_specialize=["nodes"])
def _gated_norm(
    p_x, p_gate, p_weight, p_out, eps, s_gate_b, s_gate_n, nodes, HEADS_ALL: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    o_d = tl.arange(0, BLOCK)
    m_d = o_d < SIZE
    b_weight = tl.load(p_weight + o_d, mask=m_d, other=0.0).to(tl.float32)  # no kernel writes it
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
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
    """`recurrent.reference.gated_norm`: x [B, N, H, D] contiguous, gate [B, N, H, D] contiguous but for its rows' and nodes' strides,
    weight [D] contiguous, all of one dtype."""
    batch, nodes, heads, size = x.shape
    if not x.is_contiguous() or gate.shape != x.shape or not gate[0, 0].is_contiguous() or weight.shape != (size,):
        raise ValueError(
            f"x is {list(x.shape)}, gate {list(gate.shape)}, strides {gate.stride()}, weight {list(weight.shape)}; x contiguous, a gate "
            "of its shape with contiguous nodes, and a weight of its last dimension are accepted"
        )
    if not x.dtype == gate.dtype == weight.dtype:
        raise ValueError(f"x is {x.dtype}, gate {gate.dtype}, weight {weight.dtype}; all must have one dtype")
    out = x.new_empty(x.shape)
    _gated_norm[(batch * nodes, triton.cdiv(heads, HEADS))](
        x, gate, weight, out, eps, *gate.stride()[:2], nodes, HEADS_ALL=heads, SIZE=size, BLOCK=max(16, triton.next_power_of_2(size)),
        HEADS=HEADS, num_warps=1, **dependent(x.device),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["nodes"])
def _gate_heads(
    p_x, p_qkv, p_out, s_qkv_b, s_qkv_n, nodes, WIDTH: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    node = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = o < WIDTH
    p_row = p_qkv + (node // nodes) * s_qkv_b + (node % nodes) * s_qkv_n
    b_gate = tl.load(p_row + (o // SIZE) * (2 * SIZE) + SIZE + o % SIZE, mask=m, other=0.0)
    b_x = tl.load(p_x + node * WIDTH + o, mask=m, other=0.0)
    b_open = tl.sigmoid(b_gate.to(tl.float32)).to(b_x.dtype).to(tl.float32)
    tl.store(p_out + node * WIDTH + o, (b_x.to(tl.float32) * b_open).to(b_x.dtype), mask=m)


def gate_heads(x: Tensor, qkv: Tensor) -> Tensor:
    """`reference.gate_heads`: x [B, N, Hq, D] contiguous, qkv [B, N, at least 2 * Hq * D] of one dtype, its last dimension contiguous."""
    batch, nodes, heads, size = x.shape
    if not x.is_contiguous() or qkv.shape[:2] != x.shape[:2] or qkv.shape[2] < 2 * heads * size or qkv.stride(2) != 1:
        raise ValueError(f"x is {list(x.shape)}, qkv {list(qkv.shape)}; x contiguous and gates behind every head's queries are accepted")
    if x.dtype != qkv.dtype:
        raise ValueError(f"x is {x.dtype} and qkv {qkv.dtype}; both must have one dtype")
    out, width = x.new_empty(batch, nodes, heads * size), heads * size
    _gate_heads[(batch * nodes, triton.cdiv(width, 1024))](
        x, qkv, out, *qkv.stride()[:2], nodes, WIDTH=width, SIZE=size, BLOCK=1024, num_warps=4, **dependent(x.device)
    )
    return out
