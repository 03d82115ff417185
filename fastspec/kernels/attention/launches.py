"""Launches of attention: the kinds of launches, and the tables from which one is chosen by dtype, head size and
queries.

Measured on an H200 (commit `c0f133b`: kernels_h200.jsonl and kernels_steps_h200.jsonl in benchmarks/results). What was
tuned on a machine goes before these (`fastspec.kernels.tuned_launches`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class TreeLaunch:
    """Rows and slots of a tile, warps, pipeline stages, how many programs a processor holds at once, and the fewest
    blocks of a share: one of fewer costs more in merging than it saves."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    resident: int
    least: int = 3


TREE: dict[tuple[int, int], tuple[tuple[int, TreeLaunch], ...]] = {
    (2, 64): (
        (16, TreeLaunch(16, 32, 4, 3, 2)),
        (32, TreeLaunch(32, 64, 4, 3, 2)),
        (512, TreeLaunch(64, 64, 4, 3, 2)),
        (0, TreeLaunch(128, 128, 8, 3, 1)),
    ),
    (2, 128): (
        (16, TreeLaunch(16, 64, 4, 3, 1)),
        (512, TreeLaunch(64, 64, 4, 3, 2, least=2)),
        (0, TreeLaunch(128, 64, 8, 4, 1)),
    ),
    (2, 256): (
        (16, TreeLaunch(16, 32, 4, 3, 2)),
        (32, TreeLaunch(32, 32, 4, 3, 2)),
        (64, TreeLaunch(64, 32, 4, 3, 1)),
        (0, TreeLaunch(128, 32, 8, 3, 1)),
    ),
    (2, 512): ((16, TreeLaunch(16, 16, 4, 2, 1)), (0, TreeLaunch(32, 16, 8, 2, 1))),
    (4, 64): ((16, TreeLaunch(16, 32, 4, 2, 2)), (0, TreeLaunch(32, 32, 4, 2, 3))),
    (4, 128): ((16, TreeLaunch(16, 32, 8, 2, 1)), (0, TreeLaunch(32, 32, 8, 2, 1))),
    (4, 256): ((0, TreeLaunch(16, 32, 8, 2, 1)),),
    (4, 512): ((0, TreeLaunch(16, 16, 8, 1, 1)),),
}
"""By bytes of an element and head size, rounded up to a power of two: for at most so many matrix rows; the last takes
the rest."""

SHORT, SHORT_TREE = 16384, {(2, 256): (64, TreeLaunch(16, 32, 4, 3, 2))}
"""Slots of all pairs together, and by the same the launch for at most so many matrix rows over no more of them: several
small tiles read keys from the L2 that one read from memory (measured after 2,048 slots of four pairs)."""

FEW: dict[tuple[int, int], tuple[TreeLaunch, TreeLaunch]] = {
    (2, 64): (TreeLaunch(16, 64, 4, 2, 2), TreeLaunch(16, 128, 4, 3, 1)),
    (2, 128): (TreeLaunch(16, 64, 4, 2, 2), TreeLaunch(16, 128, 4, 3, 1)),
    (2, 256): (TreeLaunch(16, 32, 4, 3, 2), TreeLaunch(16, 32, 4, 3, 2)),
    (2, 512): (TreeLaunch(16, 16, 4, 3, 1), TreeLaunch(16, 16, 4, 3, 1)),
    (4, 64): (TreeLaunch(16, 32, 4, 2, 2), TreeLaunch(16, 32, 4, 2, 2)),
    (4, 128): (TreeLaunch(16, 32, 8, 2, 1), TreeLaunch(16, 32, 8, 2, 1)),
    (4, 256): (TreeLaunch(16, 32, 8, 2, 1), TreeLaunch(16, 32, 8, 2, 1)),
    (4, 512): (TreeLaunch(16, 16, 8, 1, 1), TreeLaunch(16, 16, 8, 1, 1)),
}
"""For a few queries, by the same: over a short text, and over a long one."""


@lru_cache
def tree_launch_for(element: int, block_d: int, rows: int, pairs: int, slots: int, reach: int = SHORT) -> TreeLaunch:
    """The row of the table for so many bytes per element, a padded head size, and so many matrix rows of each of the
    pairs, which see so many slots: the last where its tiles come to more than half of the chip's processors, else the
    tile of 64 rows before it."""
    most, small = SHORT_TREE.get((element, block_d), (0, None))
    if small is not None and rows <= most and pairs * reach <= SHORT:
        return small
    *before, (_, last) = options = TREE[element, max(64, block_d)]
    half = bool(before) and before[-1][1].block_m >= 64 and 2 * -(-rows // last.block_m) * pairs <= slots
    return next((launch for most, launch in options if rows <= most), before[-1][1] if half else last)
