"""Linear layers on the CPU: MKL or oneDNN, whichever of several ways is the quickest on this machine."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor
from torch.nn import functional as F

Way = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(rows [R, K], weight [M, K], bias [M] or None) -> [R, M]."""
COLD = 48 * 2**20
"""Bytes of weights that are multiplied in turn. A model's weights are read from memory in every pass: the same one
again and again would be timed as it lies in a cache, where another way wins."""
REPEATS, ENOUGH = 3, 0.03
"""Timed turns behind one that warms up, and the seconds of a turn that decides alone."""
MOST = 1.0
"""Seconds of measuring in a process, of one set of ways, after which no measurement begins: a first call waits no
longer."""


class Measured:
    """A choice among ways, made once for each size of a weight, group of rows and number of threads."""

    def __init__(self, *ways: Way) -> None:
        self.ways = ways
        self.chosen: dict[tuple[torch.Size, int, int], int] = {}
        """(weight's shape, rows rounded up to a power of two, threads) -> which way."""
        self.seconds = 0.0
        """Seconds of measuring so far."""

    def fastest(self, rows: Tensor, weight: Tensor) -> Way:
        """The quickest way for rows [R, K] times weight [M, K]; once measuring has taken `MOST` seconds, the way that
        was chosen most often for as many rows, or else the last one."""
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


FEW_ROWS = 64
SMALL = 2**20
"""Multiplications below which oneDNN's own overhead, some 20 us a call, outweighs what it could gain."""


def available() -> bool:
    """True where this torch carries oneDNN and the operator that takes a plain weight. Delete when `F.linear` takes
    this path itself."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`reference.linear` for x [..., K] and weight [M, K]; what is not fp32, or needs gradients, is multiplied by torch
    as ever.

    Through oneDNN up to 64 rows are multiplied as weight @ x^T, so that the weight is read once, row by row, and only x
    is repacked: the result [..., M] is then a transposed view.
    """
    if x.numel() * weight.shape[0] < SMALL or torch.is_grad_enabled() or not x.dtype == weight.dtype == torch.float32:
        return F.linear(x, weight, bias)
    if x.device.type != "cpu":
        return F.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    multiply = through_onednn if len(rows) > FEW_ROWS else MEASURED.fastest(rows, weight)
    return multiply(rows, weight, bias).view(*x.shape[:-1], -1)


def through_onednn(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product of fp32 rows [R, K] and weight [M, K] -> [R, M], by oneDNN."""
    product = torch.ops.mkldnn._linear_pointwise
    if len(rows) > FEW_ROWS:
        many: Tensor = product(rows, weight, bias, "none", [], "")
        return many
    out: Tensor = product(weight, rows, None, "none", [], "").t()
    return out if bias is None else out + bias


MEASURED = Measured(F.linear, through_onednn)
