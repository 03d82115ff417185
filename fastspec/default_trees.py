"""Sizes of dynamic draft trees, and the default ones of every device by rows and temperature; free of torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from fastspec.errors import Unsupported, check_whole


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Size of a dynamic draft tree (EAGLE-2, section 4; EAGLE-3 keeps it).

    `total_tokens` counts the root. `top_k` children are drawn from each of the `top_k` best nodes of a level, and
    `depth` levels are grown below the root's children: a path holds at most depth + 1 draft tokens.
    """

    total_tokens: int = 60
    depth: int = 7
    top_k: int = 10

    def __post_init__(self) -> None:
        check_whole("TreeShape", 1, total_tokens=self.total_tokens, top_k=self.top_k)
        check_whole("TreeShape", 0, depth=self.depth)
        if not 2 <= self.total_tokens <= min(256, self.candidates + 1):
            raise Unsupported(
                f"TreeShape: total_tokens={self.total_tokens} must lie between 2 and {min(256, self.candidates + 1)}: "
                f"depth={self.depth} and top_k={self.top_k} grow {self.candidates} candidates besides the root, and a "
                "tree holds at most 256 nodes"
            )

    @property
    def candidates(self) -> int:
        """Number of nodes grown before the re-ranking, the root not counted."""
        return self.top_k + self.depth * self.top_k**2

    @property
    def max_path(self) -> int:
        """Longest path in nodes, the root included; a round emits at most this many tokens."""
        return min(self.depth + 2, self.total_tokens)

    def limited(self, nodes: int) -> TreeShape:
        """The same with fewer nodes, grown no further than these reach."""
        top_k = min(self.top_k, nodes - 1)
        return TreeShape(total_tokens=nodes, depth=min(self.depth, nodes - 2), top_k=top_k)


# (device type) -> tree used when the caller names none; chosen by measurement, see docs/performance/batches.md.
DEFAULT_TREES = {
    "cpu": TreeShape(total_tokens=16, depth=3, top_k=4),
    "cuda": TreeShape(total_tokens=60, depth=7, top_k=10),
}
# The same of EAGLE-3 on the C++ kernels of the CPU, whose products of 8 rows cost less than those of 16.
CPP_TREE = TreeShape(total_tokens=8, depth=3, top_k=2)
# (device type) -> the same in batches of so many rows and more, ascending: 256 nodes in all and, at 128 rows,
# 512, beyond which arithmetic binds a pass (measured on an H100).
BATCH_TREES = {
    "cuda": (
        (8, TreeShape(total_tokens=32, depth=6, top_k=8)),
        (16, TreeShape(total_tokens=16, depth=5, top_k=4)),
        (32, TreeShape(total_tokens=8, depth=5, top_k=2)),
        (128, TreeShape(total_tokens=4, depth=3, top_k=1)),
    ),
}
# (temperature, depth) -> the depth of the device's trees at the most in calls that sample at this temperature and
# above, where fewer levels are accepted than a greedy call's.
SAMPLED_DEPTHS = ((0.8, 3), (0.0, 5))
# (device type) -> trees that total_tokens="auto" chooses from, ascending, beside the device's own: MOST_STEPS of them.
TREE_STEPS = {
    "cpu": (TreeShape(2, 0, 1), TreeShape(4, 2, 1), TreeShape(8, 3, 2), TreeShape(16, 3, 4)),
    "cuda": (TreeShape(2, 0, 1), TreeShape(4, 2, 1), TreeShape(8, 5, 2), TreeShape(16, 5, 4), TreeShape(60, 7, 10)),
}
MOST_STEPS = 5
# (device type) -> nodes of the trees of all rows at the most, where the device's own have fewer.
MOST_NODES = {"cpu": 64, "cuda": 512}


def for_rows(shape: TreeShape, batched: Iterable[tuple[int, TreeShape]], rows: int) -> TreeShape:
    """The tree in a batch of so many rows: the last of `batched` for as few, else `shape`."""
    return next((each for least, each in reversed(tuple(batched)) if rows >= least), shape)


def sampled(shape: TreeShape, temperature: float) -> TreeShape:
    """The device's tree, for calls that sample at this temperature."""
    depth = next(depth for least, depth in SAMPLED_DEPTHS if temperature >= least)
    return shape if shape.depth <= depth else replace(shape, depth=depth)
