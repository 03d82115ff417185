"""Products whose rows have the same bits beside any others: the depth is summed in its order, in steps of 16, by tensor
cores, whole or in parts whose number follows from the weight's shape alone.

A tile's height, its width and the instruction that multiplies it change no bit (measured on Hopper, `mma` and `wgmma`).
What would is a number of parts that follows the number of rows, or sums by other units. So there is no kernel of its
own for one row here. On Hopper, where an output has few channels, the depth is cut in 2 or 4 parts, added up as (0 + 1)
+ (2 + 3): one sum over it would take longer than the weight takes to read. Up to MAX_ROWS rows take the kernels of this
folder; more of them, where the depth is whole, torch's product, which does not split it there either
(tests/kernels/test_ordered.py compares its bits).

R rows, K input channels, M output channels.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from fastspec.kernels.linear import linear as portable
from fastspec.kernels.linear import swiglu
from fastspec.kernels.linear.hopper import hopper_linear, takes
from fastspec.kernels.linear.launches import MAX_ROWS, MULTIPROCESSORS, HopperLaunch, Launch
from fastspec.kernels.linear.reference import SILU, Activation

HALVES = {torch.bfloat16}, {torch.float16}
TALLEST = 64
"""Rows of a tile."""
WIDEST = 256
"""Rows of a tile whose parts lie side by side, each of them counted."""
FEW_CHANNELS = 2048
"""Of an output whose depth is cut: tiles of 64 of them leave most of an H100's multiprocessors idle."""
STAGES, SHARED = 8, 208 << 10
"""Of a program, and the bytes of all of them, at most."""


def parts_of(channels: int, depth: int, gated: bool) -> int:
    """The parts of a depth on Hopper, each of whole steps of 64 or 32."""
    if gated or channels > FEW_CHANNELS:
        return 1
    return 4 if depth % 256 == 0 else 2 if depth % 64 == 0 else 1


def hopper_launch(rows: int, channels: int, depth: int, gated: bool) -> HopperLaunch:
    """Hopper's launch of so many rows: found on an H100 over weights that were not in the L2."""
    parts = parts_of(channels, depth, gated)
    if parts > 1 and rows * parts > WIDEST:
        return HopperLaunch(64, 64 if parts == 4 else 32, STAGES, STAGES // 2, rows=TALLEST, series=parts)
    wide = max(8, min(triton.next_power_of_2(rows * parts), WIDEST if parts > 1 else TALLEST))
    whole, left = divmod(-(-channels * parts // 64), MULTIPROCESSORS)
    pair = gated and whole > 0 and 0 < left < MULTIPROCESSORS // 4  # programs on one: else the last would run alone
    step = 128 if wide <= (16 if pair else 64) else 64
    most = SHARED // 2 if pair else SHARED
    stages = max(2, min(STAGES, most // (((1 + gated) * 64 + wide) * step * 2), -(-depth // parts // step)))
    return HopperLaunch(64, step, stages, max(2, min(stages - pair, STAGES // 2)), rows=wide, side=parts)


def launch_of(channels: int, depth: int) -> Launch:
    """The launch on other devices."""
    return Launch(16 if channels < 4096 else 64, 128 if depth % 128 == 0 else 64, 4, 6, pdl=True)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool, kind: Activation) -> Tensor | None:
    """The product of x [..., K], or None where it is torch's."""
    depth, channels = weight.shape[1], weight.shape[0] // (1 + gated)
    rows = x.numel() // depth if depth else 0
    operands = [operand for operand in (x, weight, bias) if operand is not None]
    graded = torch.is_grad_enabled() and any(operand.requires_grad for operand in operands)
    if graded or not rows or not channels or {each.dtype for each in operands} not in HALVES:
        return None
    flat = x.reshape(rows, depth)
    hopper = takes(weight, weight)  # not by the rows: the parts follow from the weight alone
    if rows > MAX_ROWS and not (hopper and parts_of(channels, depth, gated) > 1):
        return None
    out = x.new_empty(*x.shape[:-1], channels)
    if hopper:
        launch = hopper_launch(rows, channels, depth, gated)
        if launch.side > 1 and not weight.is_contiguous():
            launch = hopper_launch(WIDEST, channels, depth, gated)
        if not takes(flat, weight) or (launch.side > 1 and not flat.is_contiguous()):
            flat = flat.clone(memory_format=torch.contiguous_format)
        hopper_linear(flat, weight, bias, out, launch, gated, kind)
        return out
    lines = out.view(rows, channels)
    for first in range(0, rows, TALLEST):
        part = slice(first, min(first + TALLEST, rows))
        portable.linear(
            flat[part], weight, bias, swiglu=gated, launch=launch_of(channels, depth), kind=kind, out=lines[part]
        )
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear.linear` of x [..., K] and weight [M, K], bias [M] -> [..., M]."""
    out = _product(x, weight, bias, False, SILU)
    return F.linear(x, weight, bias) if out is None else out


def gate_up(x: Tensor, weight: Tensor, bias: Tensor | None, kind: Activation = SILU) -> Tensor:
    """`linear.gate_up` of x [..., K] and a packed weight [2 * M, K], bias [2 * M] -> [..., M]."""
    out = _product(x, weight, bias, True, kind)
    return swiglu.swiglu(F.linear(x, weight, bias), kind) if out is None else out
