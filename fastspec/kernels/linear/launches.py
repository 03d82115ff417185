"""Launches of products: the kinds of launches, and the tables from which one is chosen by the sizes of a product.

Found on an H200 by the time of whole stacks of layers, in which kernels overlap (commit `c0f133b`: linear_h200.jsonl,
stack_h200.jsonl and stack_steps_h200.jsonl in benchmarks/results). What was tuned on a machine goes before these
(`fastspec.kernels.tuned_launches`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch of a product: weight tiles of channels x depth, a program for each tile of channels, warps and
    pipeline stages.

    `tma` reads the weights through a tensor descriptor, which wants lines of a multiple of 16 bytes. Of several `parts`
    of the depth, which `linear_parts` makes, each has programs of its own.
    """

    channels: int
    depth: int
    warps: int
    stages: int
    tma: bool = False
    parts: int = 1


@dataclass(frozen=True, slots=True)
class RowLaunch:
    """Launch of a product of one row: a program takes blocks of channels x depth, powers of two."""

    channels: int
    depth: int
    warps: int


@dataclass(frozen=True, slots=True)
class HopperLaunch:
    """Weight tiles of channels x depth, `stages` of them at once in shared memory, the first `ahead` before the rows
    are there; `parts` of the inner size, 1 but for `linear_parts`. With `rows` (a power of 2, 8 to 256) a program takes
    so many rows; else it takes all, 256 at most. `side` and `series`: the parts that a program sums itself, side by
    side (each a row of the tile's `rows`) or one after another. Of its 4 or 8 `warps` four multiply 64 channels. With
    a `ring` one warp more loads all stages, and each four, of 4 `warps` here, go on by themselves."""

    channels: int
    depth: int
    stages: int
    ahead: int
    parts: int = 1
    rows: int = 0
    side: int = 1
    series: int = 1
    warps: int = 4
    ring: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsLaunch:
    """Launch of the two products of experts: `tile` rows of the weight by blocks of `depth`, against up to `small`
    pairs of an expert, or up to `medium`, or, where it has more, `large` at a time, with a pass over its weight for
    each. `medium` as small as `small` leaves that case out. The stages are for small tiles and for the others.
    """

    tile: int
    depth: int
    small: int
    medium: int
    large: int
    warps: int
    small_stages: int
    large_stages: int


@dataclass(frozen=True, slots=True)
class LaunchRule:
    """A row of a table: the launch of products with SwiGLU or without, of at least so much depth and so many channels,
    at most so many weights, and where `wide`, of more channels than depth."""

    launch: Launch | RowLaunch
    gated: bool = False
    depth: int = 0
    channels: int = 0
    weights: int | None = None
    wide: bool = False

    def holds(self, channels: int, depth: int, gated: bool) -> bool:
        """True where it is the rule of x [..., depth] times `channels` output channels."""
        few = self.weights is None or channels * depth * (1 + gated) <= self.weights
        return (
            gated == self.gated
            and depth >= self.depth
            and channels >= self.channels
            and few
            and (depth < channels or not self.wide)
        )


MOST_TUNED = 64
"""Rows of products whose launch may be tuned: what a Launch holds at once."""

ROWS: tuple[tuple[int, tuple[LaunchRule, ...]], ...] = (
    (
        1,
        (
            LaunchRule(RowLaunch(2, 2048, 4), gated=True, depth=2049),
            LaunchRule(RowLaunch(2, 512, 1), gated=True, depth=1025),
            LaunchRule(RowLaunch(4, 1024, 4), gated=True),
            LaunchRule(RowLaunch(4, 512, 2), channels=65536),
            LaunchRule(RowLaunch(4, 1024, 4), depth=2049, channels=2049),
            LaunchRule(RowLaunch(4, 2048, 8), depth=2049),  # few programs: longer blocks
            LaunchRule(RowLaunch(4, 2048, 4), depth=1025),
            LaunchRule(RowLaunch(4, 1024, 2), depth=513),
            LaunchRule(RowLaunch(4, 512, 1)),  # a line at once
        ),
    ),
    (
        16,
        (
            LaunchRule(Launch(64, 128, 4, 3, tma=True), gated=True, depth=1025),
            LaunchRule(Launch(32, 64, 4, 4), gated=True),
            LaunchRule(Launch(16, 128, 4, 4), weights=3 * 2**19),
            LaunchRule(Launch(64, 128, 4, 4), channels=65536, depth=1025),
            LaunchRule(Launch(64, 128, 4, 6), depth=4096),
            LaunchRule(Launch(64, 128, 4, 6), depth=1025, wide=True),
        ),
    ),
    (
        MOST_TUNED,
        (
            LaunchRule(Launch(128, 64, 4, 4, tma=True), gated=True, depth=4096),
            LaunchRule(Launch(64, 64, 4, 4), gated=True, depth=1025),
            LaunchRule(Launch(32, 64, 4, 4), gated=True),
            LaunchRule(Launch(128, 64, 4, 4), channels=65536, depth=4096),
        ),
    ),
)
"""For at most so many rows in half precision; what no rule holds for is torch's."""

EXPERTS: dict[bool, tuple[tuple[int, ExpertsLaunch], ...]] = {
    True: ((16, ExpertsLaunch(32, 32, 16, 16, 16, 4, 3, 3)), (0, ExpertsLaunch(32, 32, 16, 16, 32, 4, 3, 3))),
    False: (
        (16, ExpertsLaunch(64, 128, 16, 16, 16, 4, 5, 5)),
        (32, ExpertsLaunch(64, 128, 16, 16, 32, 4, 5, 4)),
        (64, ExpertsLaunch(64, 128, 16, 16, 64, 4, 5, 3)),
        (0, ExpertsLaunch(128, 64, 32, 64, 128, 8, 4, 4)),
    ),
}
"""By whether elements are fp32, which has no tensor cores (small tiles for the registers' sake): for at most so many
tokens; the last takes the rest. For up to 64 tokens an expert's pairs fit in one pass, and two programs' stages (100 KB
each) on a multiprocessor."""
EXPERTS_TURNED = (
    (16, ExpertsLaunch(128, 64, 16, 16, 16, 4, 5, 5)),
    (64, ExpertsLaunch(128, 64, 16, 16, 64, 4, 5, 4)),
    EXPERTS[False][-1],
)
"""The same in half precision where weights lie with their outputs side by side, which a taller tile reads in longer
lines."""
EXPERTS_HOPPER = ExpertsLaunch(128, 64, 32, 128, 256, 8, 4, 4)
"""Of more than 64 tokens in half precision there: its tensor cores read both operands from shared memory, so that
registers have room for a tile of 256 pairs. On 8.x and 12.0 it spills, and on 10.0 nothing was measured. An expert's
weight takes longer to read than a tile of 128 pairs to multiply, so that fewer pairs need no tile of their own but the
smallest."""
EXPERTS_STORED: dict[bool, tuple[tuple[int, ExpertsLaunch], ...]] = {
    True: ((16, ExpertsLaunch(32, 128, 16, 16, 16, 4, 3, 3)), (0, ExpertsLaunch(32, 128, 16, 16, 32, 4, 3, 3))),
    False: (
        (16, ExpertsLaunch(64, 128, 16, 16, 16, 4, 5, 5)),
        (64, ExpertsLaunch(128, 128, 16, 16, 32, 8, 5, 4)),
        (0, ExpertsLaunch(128, 128, 32, 64, 128, 8, 4, 3)),
    ),
}
"""The same of experts in MXFP4, whose numbers are made in registers: by the instructions a weight, registers and what
is read of the rows (counted, not timed). The depth is a multiple of `mxfp4.BLOCK`. A tile of 256 pairs would spill."""

MULTIPROCESSORS = 132
"""Of the GPU that the launches were measured on; a program's stages take most of one's shared memory."""
MAX_ROWS = 512
"""As many as a round of eight sequences with trees of up to 64 nodes has; more were not measured."""
FEW_WEIGHTS = 1536**2
"""Products of fewer are cut into tiles of rows there: those of a hidden size of 576 were measured, not those of
1,536."""
AHEAD = {(32, False): 4, (32, True): 2, (64, False): 3, (64, True): 4}
"""(rows of a tile, with SwiGLU) -> steps of weights that are asked for before the rows are there."""


def launch_for(
    rows: int, channels: int, depth: int, dtype: torch.dtype, swiglu: bool = False
) -> Launch | RowLaunch | None:
    """The launch of x [rows, depth] times `channels` output channels (twice as many weights with swiglu); None: torch
    is as good."""
    if dtype == torch.float32 or not 0 < rows <= MOST_TUNED:
        return None
    rules = next(rules for most, rules in ROWS if rows <= most)
    return next((rule.launch for rule in rules if rule.holds(channels, depth, swiglu)), None)


def experts_launch_for(
    tokens: int, dtype: torch.dtype, turned: bool = False, hopper: bool = False, stored: bool = False
) -> ExpertsLaunch:
    """The launch of experts for so many tokens of a dtype; `turned`: weights lie with their outputs side by side;
    `hopper`: on that GPU; `stored`: in MXFP4."""
    if hopper and tokens > 64 and dtype != torch.float32 and not stored:
        return EXPERTS_HOPPER
    whole = EXPERTS_STORED if stored else EXPERTS
    table = EXPERTS_TURNED if turned and dtype != torch.float32 else whole[dtype == torch.float32]
    return next(launch for most, launch in table if tokens <= most or not most)


def parts_launch_for(rows: int, channels: int, depth: int, dtype: torch.dtype) -> Launch | None:
    """The launch of x [rows, depth] times `channels` output channels in parts; None: `linear` is as good, or what it
    does is not known."""
    tiles, step = -(-channels // 64), 64 if depth % 128 else 128
    deep = depth >= 4096 or (rows > 16 and depth > 2 * channels)
    if dtype == torch.float32 or not 1 < rows <= 64 or depth % step or not deep or 2 * tiles > MULTIPROCESSORS:
        return None
    return Launch(64, step, 4, 6 if rows <= 16 else 4, parts=min(depth // step, MULTIPROCESSORS // tiles))


def _few_weights(rows: int, channels: int, depth: int, swiglu: bool = False) -> bool:
    """True where a product of many rows is of so few weights that it is cut into tiles of rows: only so it fills the
    device, and weights that are read again come from the L2."""
    shape = min(channels, depth) >= 512 and depth <= (2048 if channels < 1024 else 1024)
    return 16 < rows <= MAX_ROWS and shape and channels * depth * (1 + swiglu) < FEW_WEIGHTS


def hopper_parts(rows: int, channels: int, depth: int) -> int:
    """Number of parts that `linear_parts` makes of x [rows, depth] times `channels` output channels on Hopper, three
    steps each; 1: one."""
    tiles = -(-channels // 64)
    if _few_weights(rows, channels, depth):
        return min(6, depth // 192) if rows <= 64 and channels < 1024 and depth % 64 == 0 else 1
    if not 1 < rows <= 64 or channels < 1024 or depth <= 1024 or depth % 128:
        return 1
    return max(1, min(MULTIPROCESSORS // tiles, depth // 128 // 3))


def hopper_launch_for(
    rows: int, channels: int, depth: int, swiglu: bool = False, parts: int = 1
) -> HopperLaunch | None:
    """Hopper's launch of x [rows, depth] times `channels` output channels (twice as many weights with swiglu); None:
    `launch_for` is as good."""
    if _few_weights(rows, channels, depth, swiglu):
        if parts > 1:
            steps = -(-depth // 64 // parts)
            return HopperLaunch(64, 64, min(4, steps), min(4, steps), parts)
        tile = 32 if rows <= 128 else 64
        return HopperLaunch(64, 64 if swiglu else 128, 4, AHEAD[tile, swiglu], rows=tile)
    if not 1 < rows <= 64 or depth <= 1024 or channels >= 65536:
        return None
    few, deep = rows <= 16, depth >= 4096
    if (
        swiglu and not few and deep and channels <= 64 * MULTIPROCESSORS
    ):  # all tiles at once, as where two processes share the 8B shape
        return HopperLaunch(64, 128, 4, 2)
    if swiglu:
        return HopperLaunch(64, 128 if few and deep else 64, 4, 2 if few else 1)
    if parts > 1:
        short = depth // 128 // parts <= 3
        return (
            HopperLaunch(64, 128, 3, 3, parts)
            if short
            else HopperLaunch(64, 128, 8 if few else 6, 2 if few else 6, parts)
        )
    if deep:
        return HopperLaunch(64, 128, 6, 2 if few else 3)
    return None if few else HopperLaunch(64, 128, 4, 2)
