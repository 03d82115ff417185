"""Products whose rows have the same bits beside any others: the depth is summed in its order, in steps of 16, by tensor
cores.

A tile's height, its width and the instruction that multiplies it change no bit (measured on Hopper, `mma` and `wgmma`).
What would is a sum over the depth that is split where there are few rows, or taken by other units. So there is no
kernel of its own for one row here, and no parts. Up to MAX_ROWS rows take the kernels of this folder, more of them
torch's product, which does not split the depth there (tests/kernels/test_ordered.py compares its bits).

R rows, K input channels, M output channels.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fastspec.kernels.linear import linear as portable
from fastspec.kernels.linear import swiglu
from fastspec.kernels.linear.hopper import hopper_linear, takes
from fastspec.kernels.linear.launches import MAX_ROWS, HopperLaunch, Launch
from fastspec.kernels.linear.reference import SILU, Activation

TALLEST = 64
"""Rows of a tile."""


def hopper_launch(rows: int, channels: int, depth: int, gated: bool) -> HopperLaunch:
    """Hopper's launch of so many rows: found on an H100 over weights that were not in the L2."""
    step = 128 if depth % 128 == 0 and (not gated or depth >= 4096) else 64
    if gated:
        stages, ahead = (4, 2) if step == 128 else (8, 4)
    elif rows > 16:
        stages, ahead = (6, 3)
    else:
        stages, ahead = (6, 3) if channels >= 32768 else (8, 4)
    return HopperLaunch(64, step, stages, ahead, rows=0 if rows <= TALLEST else TALLEST)


def launch(channels: int, depth: int) -> Launch:
    """The launch on other devices."""
    return Launch(16 if channels < 4096 else 64, 128 if depth % 128 == 0 else 64, 4, 6, pdl=True)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool, kind: Activation) -> Tensor | None:
    """The product of x [..., K], or None where it is torch's."""
    depth, channels = weight.shape[1], weight.shape[0] // (1 + gated)
    rows = x.numel() // depth if depth else 0
    operands = [operand for operand in (x, weight, bias) if operand is not None]
    graded = torch.is_grad_enabled() and any(operand.requires_grad for operand in operands)
    if (
        graded
        or not 0 < rows <= MAX_ROWS
        or not channels
        or {each.dtype for each in operands}
        not in (
            {torch.bfloat16},
            {torch.float16},
        )
    ):
        return None
    flat = x.reshape(rows, depth)
    out = x.new_empty(*x.shape[:-1], channels)
    if takes(flat, weight):
        hopper_linear(flat, weight, bias, out, hopper_launch(rows, channels, depth, gated), gated, kind)
        return out
    lines = out.view(rows, channels)
    for first in range(0, rows, TALLEST):
        part = slice(first, min(first + TALLEST, rows))
        portable.linear(
            flat[part], weight, bias, swiglu=gated, launch=launch(channels, depth), kind=kind, out=lines[part]
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
