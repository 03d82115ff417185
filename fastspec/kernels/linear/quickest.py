"""Which of several ways to multiply is the quickest on this machine, by a measurement at the first product of a size."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor

Way = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(rows [R, K], weight [M, K], bias [M] or None) -> [R, M]."""
COLD = 48 * 2**20
"""Bytes of weights that are multiplied in turn. A model's weights are read from memory in every pass: the same one again and again would be
timed as it lies in a cache, where another way wins."""
REPEATS, ENOUGH = 3, 0.03
"""Timed turns behind one that warms up, and the seconds of a turn that decides alone."""
MOST = 1.0
"""Seconds of measuring in a process, of one set of ways, after which no measurement begins: a first call waits no longer."""


class Measured:
    """A choice among ways, made once for each size of a weight, group of rows and number of threads."""

    def __init__(self, *ways: Way) -> None:
        self.ways = ways
        self.chosen: dict[tuple[torch.Size, int, int], int] = {}
        """(weight's shape, rows rounded up to a power of two, threads) -> which way."""
        self.seconds = 0.0
        """What measuring took so far."""

    def fastest(self, rows: Tensor, weight: Tensor) -> Way:
        """The quickest way for rows [R, K] times weight [M, K]; once measuring has taken `MOST` seconds, the way that was chosen most often
        for as many rows, or else the last one."""
        key = weight.shape, 1 << (len(rows) - 1).bit_length(), torch.get_num_threads()
        if key not in self.chosen:
            self.chosen[key] = self._measured(rows, weight) if self.seconds < MOST else self._usual(key[1])
        return self.ways[self.chosen[key]]

    def _measured(self, rows: Tensor, weight: Tensor) -> int:
        start = perf_counter()
        spent = times(self.ways, rows, weight)
        self.seconds += perf_counter() - start
        return spent.index(min(spent))

    def _usual(self, group: int) -> int:
        alike = [way for (_, each, _), way in self.chosen.items() if each == group]
        return max(set(alike), key=alike.count) if alike else len(self.ways) - 1


def times(ways: tuple[Way, ...], rows: Tensor, weight: Tensor) -> list[float]:
    """Seconds of each way, the shortest of some turns, on as many copies of the weight as a cache does not hold."""
    count = max(1, COLD // (weight.numel() * weight.element_size()))
    weights = [weight.clone() for _ in range(count)] if count > 1 else [weight]
    best = [float("inf")] * len(ways)
    for turn in range(1 + REPEATS):
        for index, multiply in enumerate(ways):
            start = perf_counter()
            for each in weights:
                multiply(rows, each, None)
            spent = perf_counter() - start
            best[index] = spent if turn == 1 else min(best[index], spent)  # the first turn warms up
        if sum(best) > ENOUGH:
            break
    return best
