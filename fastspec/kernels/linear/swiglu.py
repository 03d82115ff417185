"""SwiGLU: `gated` multiplies an up part by its gate, for the kernels of products; `swiglu` does so for rows that hold
both, where each program takes a slice of one row.

gate_up [..., 2 * I], the gate first; R rows in all.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.launch import dependent, wait_for_previous
from fastspec.kernels.layer.norms import rows_of
from fastspec.kernels.linear.reference import SILU, Activation

BLOCK = 1024


@triton.jit
def gated(b_gate, b_up, KIND: tl.constexpr, OFFSET: tl.constexpr = 0.0, LIMIT: tl.constexpr = None):
    """(up + OFFSET) * `reference.opened`(gate, KIND), both in one dtype, in which the gated part and the product are
    rounded."""
    ALPHA: tl.constexpr = KIND.alpha
    CUBIC: tl.constexpr = KIND.cubic
    b_wide, b_other = b_gate.to(tl.float32), b_up.to(tl.float32)
    if LIMIT is not None:
        b_wide = tl.minimum(b_wide, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        b_other = tl.minimum(b_other, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        b_other = tl.maximum(b_other, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
    b_in = b_wide + CUBIC * b_wide * b_wide * b_wide if CUBIC != 0.0 else b_wide
    b_silu = (b_wide / (1.0 + tl.exp(-ALPHA * b_in))).to(b_gate.dtype)
    return (b_silu.to(tl.float32) * (b_other + OFFSET)).to(b_gate.dtype)


@triton.jit
def _swiglu(p_in, p_out, stride_in, KIND: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    o_i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_i = o_i < SIZE
    p_gate = p_in + row * stride_in + o_i
    b_gate = tl.load(p_gate, mask=m_i, other=0.0)
    b_up = tl.load(p_gate + SIZE, mask=m_i, other=0.0)
    tl.store(p_out + row * SIZE + o_i, gated(b_gate, b_up, KIND), mask=m_i)


def swiglu(gate_up: Tensor, kind: Activation = SILU) -> Tensor:
    """`reference.opened`(gate) * up of gate_up [..., 2 * I], the gate first -> [..., I], contiguous.

    gate_up is fp32, fp16 or bf16, its last dimension contiguous, its rows a fixed distance apart.
    """
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up has rows of {gate_up.shape[-1]}; a gate and an up part of equal length are accepted")
    rows, size = rows_of(gate_up, "gate_up"), gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], size))
    if out.numel() == 0:
        return out
    block = min(BLOCK, max(16, triton.next_power_of_2(size)))
    warps = min(4, max(1, block // 256))  # 16 bytes of half precision per thread
    grid = (len(rows), triton.cdiv(size, block))
    _swiglu[grid](
        rows, out, rows.stride(0), KIND=kind, SIZE=size, BLOCK=block, num_warps=warps, **dependent(out.device)
    )
    return out
