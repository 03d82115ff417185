"""Linear layers whose inner size is split between programs, and whose sums are left for the next kernel to add up, in Triton.

R rows, K input channels, M output channels, S parts. A program takes BM output channels and one part of the depth: tiles wide enough that
the rows are seldom read again, and one program for each multiprocessor. Nobody waits for the others: what waits for the sums is the next
launch, which reads them where it would have read the product (`rms_norm`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.launch import dependent, padded, stages_within
from fastspec.kernels.linear.hopper import hopper_linear, takes
from fastspec.kernels.linear.launches import MOST_TUNED, HopperLaunch, PartsLaunch, hopper_launch_for, hopper_parts, parts_launch_for
from fastspec.kernels.linear.linear import linear
from fastspec.kernels.linear.reference import Parts
from fastspec.kernels.tuned_launches import MISSING, find


@triton.jit(do_not_specialize=["R"])
def _parts_kernel(
    p_x, p_w, p_bias, p_out, R, M, steps, stride_x, stride_w,
    BM: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, S: tl.constexpr, BIAS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Out [S, R, M] fp32 of x [R, K] and w [M, K]: part s is over the s-th share of the steps of BK channels."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tile, part = tl.program_id(0) // S, tl.program_id(0) % S
    first, last = steps * part // S, steps * (part + 1) // S
    o_m, o_r, o_k = tile * BM + tl.arange(0, BM), tl.arange(0, BR), tl.arange(0, BK)
    m_m, m_r = o_m < M, o_r < R
    p_lines = p_w + tl.minimum(o_m, M - 1).to(tl.int64) * stride_w + first * BK
    p_rows = p_x + o_r.to(tl.int64) * stride_x + first * BK
    b_sum = tl.zeros([BM, BR], tl.float32)
    for step in tl.range(0, last - first, num_stages=STAGES):
        b_x = tl.load(p_rows[:, None] + (step * BK + o_k)[None, :], mask=m_r[:, None], other=0.0)
        b_w = tl.load(p_lines[:, None] + (step * BK + o_k)[None, :])
        b_sum = tl.dot(b_w, tl.trans(b_x), b_sum, input_precision="ieee")
    if BIAS:
        b_bias = tl.load(p_bias + o_m, mask=m_m, other=0.0).to(tl.float32)
        b_sum += tl.where(part == 0, b_bias, 0.0)[:, None]
    o_out = (part * R + o_r)[None, :].to(tl.int64) * M + o_m[:, None]
    tl.store(p_out + o_out, b_sum, mask=m_m[:, None] & m_r[None, :])


def linear_parts(x: Tensor, weight: Tensor, bias: Tensor | None, *, launch: PartsLaunch | HopperLaunch | None = None) -> Tensor | Parts:
    """`linear` of x [..., K] and weight [M, K], bias [M]: the product [..., M], or the parts that it is the sum of, a bias in the first.

    Shapes, strides and dtypes as `linear` has them. `launch` overrides the table; its depth must divide K (ValueError otherwise). Without
    a launch for the size, and where gradients are wanted, it is `linear`.
    """
    channels, depth = weight.shape
    operands = [operand for operand in (x, weight, bias) if operand is not None]
    rows = x.numel() // depth if depth else 0
    if launch is None:
        plain = len({operand.dtype for operand in operands}) == 1 and all(operand.stride(-1) == 1 for operand in operands)
        graded = torch.is_grad_enabled() and any(operand.requires_grad for operand in operands)
        if plain and not graded and x.shape[-1] == depth:
            place = 1 if rows == 1 else padded(rows), channels, depth, x.dtype
            found: Any = MISSING
            if 0 < rows <= MOST_TUNED and x.dtype != torch.float32:
                found = find("linear_parts", x.device, place, (rows, channels, depth, x.dtype))
            if found is not MISSING and (not isinstance(found, HopperLaunch) or takes(x.reshape(rows, depth), weight)):
                return linear(x, weight, bias) if found is None else linear_parts(x, weight, bias, launch=found)
            parts = hopper_parts(rows, channels, depth) if rows and takes(x.reshape(rows, depth), weight) else 1
            size = rows, channels, depth
            launch = hopper_launch_for(*size, parts=parts) if parts > 1 else parts_launch_for(*size, x.dtype)
    if launch is None:
        return linear(x, weight, bias)
    if x.shape[-1] != depth or depth % launch.depth or not rows:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)}: {launch} wants [..., K], [M, K], K a multiple of its depth")
    flat, steps = x.reshape(rows, depth), depth // launch.depth
    parts = min(launch.parts, steps)
    out = torch.empty((parts, rows, channels), dtype=torch.float32, device=x.device)
    if isinstance(launch, HopperLaunch):
        hopper_linear(flat, weight, bias, out, replace(launch, parts=parts))
        return Parts(out.view(parts, *x.shape[:-1], channels), x.dtype)
    stages = stages_within(launch.stages, (launch.channels + padded(rows)) * launch.depth * x.element_size(), x.device)
    _parts_kernel[(triton.cdiv(channels, launch.channels) * parts,)](
        flat, weight, bias, out, rows, channels, steps, flat.stride(0), weight.stride(0), BM=launch.channels, BK=launch.depth,
        BR=padded(rows), S=parts, BIAS=bias is not None, STAGES=stages, num_warps=launch.warps, num_stages=stages,
        **dependent(x.device),
    )  # fmt: skip
    return Parts(out.view(parts, *x.shape[:-1], channels), x.dtype)
