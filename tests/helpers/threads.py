"""Threads that run one function, and torch's own operations on the host, which take a thread for every core where a
tensor is large enough."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

GRAIN = 2**15
"""Elements from which on torch's threads share an operation."""


def in_threads(run: Callable[[int], object], count: int) -> None:
    """run(0), run(1), ... at the same time; what one raises is raised."""
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(run, range(count)))


class Writes(TorchDispatchMode):
    """Sizes of the tensors that torch's operations write; not of those that it allocates or views."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and not func.is_view and not func.name().startswith("aten::empty"):
            self.sizes.append(found.numel())
        return found

    @property
    def wakes(self) -> bool:
        """True where an operation was shared."""
        return max(self.sizes, default=0) >= GRAIN
