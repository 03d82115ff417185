"""Configuration values: frozen, checked when made, free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fastspec.errors import Unsupported


def _whole(where: str, least: int, **values: int) -> None:
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise Unsupported(f"{where}: {name} must be a whole number of at least {least}, not {value!r}")


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Size of a dynamic draft tree (EAGLE-2, section 4; EAGLE-3 keeps it).

    `total_tokens` counts the root, so a verify pass scores exactly that many nodes. `top_k` children are drawn from each
    of the `top_k` best nodes of a level, and `depth` levels are grown below the root's children: a path holds at most
    depth + 1 draft tokens.
    """

    total_tokens: int = 60
    depth: int = 7
    top_k: int = 10

    def __post_init__(self) -> None:
        _whole("TreeShape", 1, total_tokens=self.total_tokens, top_k=self.top_k)
        _whole("TreeShape", 0, depth=self.depth)
        if not 2 <= self.total_tokens <= min(256, self.candidates + 1):
            raise Unsupported(
                f"TreeShape: total_tokens={self.total_tokens} must lie between 2 and {min(256, self.candidates + 1)}: depth={self.depth} "
                f"and top_k={self.top_k} grow {self.candidates} candidates besides the root, and a tree holds at most 256 nodes"
            )

    @property
    def candidates(self) -> int:
        """Number of nodes grown before the re-ranking, the root not counted."""
        return self.top_k + self.depth * self.top_k**2

    @property
    def max_path(self) -> int:
        """Longest path in nodes, the root included; a round emits at most this many tokens."""
        return min(self.depth + 2, self.total_tokens)


# (device type) -> tree used when the caller names none; chosen by measurement, see docs/performance.md.
DEFAULT_TREES = {"cpu": TreeShape(total_tokens=16, depth=3, top_k=4), "cuda": TreeShape(total_tokens=60, depth=7, top_k=10)}


@dataclass(frozen=True, slots=True)
class Autoregressive:
    """One token per forward pass, through the same engine as every assistant."""

    name: ClassVar[str] = "autoregressive"


@dataclass(frozen=True, slots=True)
class Eagle3:
    """EAGLE-3 drafting with dynamic trees. Fields left at None take the device's default tree as a whole or, where one is
    given, the published values (depth 7, top_k 10, total_tokens 60) for the rest.

    Raises `Unsupported` when the sizes do not fit each other.
    """

    name: ClassVar[str] = "eagle3"
    depth: int | None = None
    top_k: int | None = None
    total_tokens: int | None = None

    def __post_init__(self) -> None:
        self.shape("cuda")

    def shape(self, device_type: str) -> TreeShape:
        """The tree to grow on a device of this type ("cpu", "cuda")."""
        if self.depth is None and self.top_k is None and self.total_tokens is None:
            return DEFAULT_TREES.get(device_type, DEFAULT_TREES["cuda"])
        depth = 7 if self.depth is None else self.depth
        top_k = 10 if self.top_k is None else self.top_k
        _whole("Eagle3", 1, top_k=top_k)
        _whole("Eagle3", 0, depth=depth)
        grown = top_k + depth * top_k**2 + 1
        return TreeShape(total_tokens=min(60, grown) if self.total_tokens is None else self.total_tokens, depth=depth, top_k=top_k)
