"""Sizes of rounds' trees in an order that a test says, in place of those that pay."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

from fastspec import Eagle3
from fastspec.generation.drafters.tree_sizes import TreeSizes
from fastspec.patches.call import assembly

AUTO = Eagle3(depth=2, top_k=3, total_tokens="auto")  # 2, 4, 8 and 16 nodes on the CPU
ORDER = (4, 0, 1, 1, 0, 0, 0, 3, 2, 0)
"""Sizes, of which every one follows every kind of another; 0 has no drafts."""


def force_sizes(monkeypatch: Any, order: tuple[int, ...] = ORDER, rounds: int = 1) -> list[tuple[int, list[int]]]:
    """Let rounds have sizes in this order, `rounds` of each -> the size and the accepted drafts of every round."""
    taken: list[tuple[int, list[int]]] = []
    turns: dict[int, Iterator[tuple[int, int]]] = {}
    count = TreeSizes.count

    def choose(self: TreeSizes, begins: bool = False) -> None:
        size, following = next(turns.setdefault(id(self), cycle(zip(order, (*order[1:], order[0]), strict=True))))
        self._use(min(size, len(self.shapes)), rounds)
        self.waits = not size and following > 0

    def watched(self: TreeSizes, size: int, accepted: list[int], *more: Any) -> None:
        taken.append((size, list(accepted)))
        count(self, size, accepted, *more)

    monkeypatch.setattr(TreeSizes, "_choose", choose)
    monkeypatch.setattr(TreeSizes, "_affords", lambda self, size, rounds=1: True)
    monkeypatch.setattr(TreeSizes, "count", watched)
    monkeypatch.setattr(assembly, "keep_times", lambda path, known: None)
    return taken
