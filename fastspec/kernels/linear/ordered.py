"""Products whose rows have the same bits beside any others: the depth is summed in its order, in steps of 16, by tensor
cores, whole or in parts whose number follows from the weight's shape alone.

A tile's height, its width and the instruction that multiplies it change no bit (measured on Hopper, `mma` and `wgmma`).
What would is a number of parts that follows the number of rows, or sums by other units. So there is no kernel of its
own for one row here. On Hopper, where an output has few channels, the depth is cut in 2 or 4 parts, added up as (0 + 1)
+ (2 + 3): one sum over it would take longer than the weight takes to read. Up to MAX_ROWS rows take the kernels of this
folder; more of them, where the depth is whole and the output is not narrow, torch's product, which does not split it
there either (tests/kernels/test_ordered.py compares its bits).

R rows, K input channels, M output channels.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from fastspec.kernels.arguments import dtypes_of
from fastspec.kernels.linear import linear as portable
from fastspec.kernels.linear import swiglu
from fastspec.kernels.linear.hopper import hopper_linear, takes
from fastspec.kernels.linear.launches import MAX_ROWS, MULTIPROCESSORS, HopperLaunch, Launch
from fastspec.kernels.linear.reference import SILU, Activation, Parts

HALVES = {torch.bfloat16}, {torch.float16}
FLOATS = {torch.float32}
"""The dtype of routers that compute in fp32 whatever their weights are: no tensor cores, and a thread adds up the whole
depth of its outputs, in order."""
MOST_FLOATS = 256
"""Rows of a launch of these."""
FLOAT_LAUNCH = Launch(16, 32, 4, 3)
TALLEST = 64
"""Rows of a tile."""
WIDEST = 256
"""Rows of a tile whose parts lie side by side, each of them counted."""
FEW_ROWS = 256
"""Rows of a product whose parts are left to the norm behind it."""
NARROW = 512
"""Channels of outputs, such as a router's, of which torch might split the depth for any number of rows."""
FEW_CHANNELS, SOME_CHANNELS = 2048, 4096
"""Of an output whose depth is cut, in 4 parts at most or in 2: tiles of 64 of them leave most of an H100's
multiprocessors idle, or half of them."""
TALL = {
    False: ((64, 64, 1.0), (64, 128, 1.4), (128, 128, 2.0), (192, 128, 2.75), (128, 256, 3.65)),
    True: ((64, 64, 1.0), (64, 128, 1.28), (128, 64, 1.74), (128, 128, 2.45)),
}
"""Channels and rows of the tiles of more rows, by gated or not, and how long a program of each takes beside the
smallest."""
SHALLOW = 1024
"""Depth of products that are over before their first weights have come."""
STAGES, SHARED = 8, 208 << 10
"""Of a program, and the bytes of all of them, at most."""
AHEAD = 4
"""Stages of weights that are asked for before the rows are there."""


def parts_of(channels: int, depth: int, gated: bool) -> int:
    """The parts of a depth on Hopper, each of whole steps of 64 or 32."""
    if gated or channels > SOME_CHANNELS:
        return 1
    most = 4 if depth % 256 == 0 else 2 if depth % 64 == 0 else 1
    return most if channels <= FEW_CHANNELS else min(most, 2)


def hopper_launch(rows: int, channels: int, depth: int, gated: bool) -> HopperLaunch:
    """Hopper's launch of so many rows: found on an H100, and of more rows than one tile has on an H200, over weights
    that were not in the L2."""
    parts = parts_of(channels, depth, gated)
    widest = TALLEST if parts == 1 else WIDEST // 2 if parts == 4 and depth <= FEW_CHANNELS else WIDEST
    if rows * parts > widest:
        return tall_launch(rows, channels, depth, gated, series=parts)
    return few_launch(rows, channels, depth, gated, side=parts)


def few_launch(rows: int, channels: int, depth: int, gated: bool, side: int = 1, parts: int = 1) -> HopperLaunch:
    """Hopper's launch of rows that fit one tile, of parts side by side or programs of their own."""
    wide = max(8, triton.next_power_of_2(rows * side))
    whole, left = divmod(-(-channels * side * parts // 64), MULTIPROCESSORS)
    pair = gated and whole > 0 and 0 < left < MULTIPROCESSORS // 4  # programs on one: else the last would run alone
    cut = depth // (side * parts)
    step = 128 if wide <= (16 if pair else 64) and (cut % 128 == 0 or parts == 1) else 64 if cut % 64 == 0 else 32
    most = SHARED // 2 if pair else SHARED
    stages = max(2, min(STAGES, most // (((1 + gated) * 64 + wide) * step * 2), -(-cut // step)))
    return HopperLaunch(64, step, stages, max(2, min(stages - pair, AHEAD)), parts, wide, side=side)


def tall_launch(rows: int, channels: int, depth: int, gated: bool, series: int = 1, parts: int = 1) -> HopperLaunch:
    """Hopper's launch of tiles of many rows, of parts that a program takes one after another or programs of their own:
    the cheapest by waves of programs."""

    def waves(tile: tuple[int, int, float]) -> int:
        return -(-(-(-channels // tile[0]) * -(-rows // tile[1])) * parts // MULTIPROCESSORS)

    tiles = [tile for tile in TALL[gated] if tile[1] <= max(rows, TALLEST) and (series == 1 or tile[1] < 256)]
    tiles = [tile for tile in tiles if series * parts == 1 or tile[0] < 192]
    best = min(tiles, key=lambda tile: tile[2] * waves(tile))
    lines, wide, _ = best
    cut = depth // (series * parts)
    step = 64 if cut % 64 == 0 or series * parts == 1 else 32
    if wide == lines == 64 and cut % (2 * step) == 0:
        step *= 2
    ring = series * parts == 1 and (lines > 64 or (gated and wide > 64))
    most = SHARED // 3 if waves(best) > 1 and depth <= SHALLOW and not ring else SHARED  # side by side: soon over
    stages = max(2, min(STAGES, most // ((lines * (1 + gated) + wide) * step * 2)))
    warps = 4 if ring else lines // 16
    return HopperLaunch(lines, step, stages, stages // 2 + 1, parts, wide, series=series, warps=warps, ring=ring)


def launch_of(channels: int, depth: int) -> Launch:
    """The launch on other devices."""
    return Launch(16 if channels < 4096 else 64, 128 if depth % 128 == 0 else 64, 4, 6)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool, kind: Activation) -> Tensor | None:
    """The product of x [..., K], or None where it is torch's."""
    depth, channels = weight.shape[1], weight.shape[0] // (1 + gated)
    rows = x.numel() // depth if depth else 0
    dtypes = dtypes_of(x, weight, bias)
    if not rows or not channels or dtypes not in (*HALVES, FLOATS):
        return None
    flat, floats = x.reshape(rows, depth), dtypes == FLOATS
    hopper = takes(weight, weight)  # not by the rows: the parts follow from the weight alone
    apart = hopper and parts_of(channels, depth, gated) > 1
    if rows > MAX_ROWS and channels > NARROW and not floats and not apart:
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
    tallest, tile = (MOST_FLOATS, FLOAT_LAUNCH) if floats else (TALLEST, launch_of(channels, depth))
    for first in range(0, rows, tallest):
        part = slice(first, min(first + tallest, rows))
        portable.linear(flat[part], weight, bias, swiglu=gated, launch=tile, kind=kind, out=lines[part])
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear.linear` of x [..., K] and weight [M, K], bias [M] -> [..., M]."""
    out = _product(x, weight, bias, False, SILU)
    return F.linear(x, weight, bias) if out is None else out


def linear_parts(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | Parts:
    """`linear.linear_parts`: the parts of a product whose depth is cut, where it has few rows and a program for each
    fills the device; else the product."""
    channels, depth = weight.shape
    rows = x.numel() // depth if depth else 0
    parts = parts_of(channels, depth, False)
    flat = x.reshape(rows, -1)
    if (
        parts == 1
        or bias is not None
        or dtypes_of(x, weight) not in HALVES
        or not 0 < rows <= FEW_ROWS
        or not takes(flat, weight)
    ):
        return linear(x, weight, bias)
    launch = (few_launch if rows <= TALLEST else tall_launch)(rows, channels, depth, False, parts=parts)
    out = torch.empty((parts, *x.shape[:-1], channels), dtype=torch.float32, device=x.device)
    hopper_linear(flat, weight, None, out, launch)
    return Parts(out, x.dtype)


def gate_up(x: Tensor, weight: Tensor, bias: Tensor | None, kind: Activation = SILU) -> Tensor:
    """`linear.gate_up` of x [..., K] and a packed weight [2 * M, K], bias [2 * M] -> [..., M]."""
    out = _product(x, weight, bias, True, kind)
    return swiglu.swiglu(F.linear(x, weight, bias), kind) if out is None else out
