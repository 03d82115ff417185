"""Small inputs of the kernels, the same on every device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class Draw:
    """Draws tensors of one dtype on a device from a seed."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        self.dtype, self.device = dtype, device
        self.generator = torch.Generator().manual_seed(seed)

    def floats(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers of the dtype, or of another."""
        normal = torch.randn(shape, generator=self.generator, dtype=torch.float32, device="cpu")
        return (normal * scale).to(dtype or self.dtype).to(self.device)

    def single(self, *shape: int) -> Tensor:
        """Normal numbers in fp32."""
        return self.floats(*shape, dtype=torch.float32)

    def uniform(self, *shape: int) -> Tensor:
        """fp32 numbers in [0, 1)."""
        return self._uniform(*shape).to(self.device)

    def whole(self, below: int, *shape: int) -> Tensor:
        """int64 numbers from 0 on."""
        return torch.randint(below, shape, generator=self.generator, device="cpu").to(self.device)

    def order(self, count: int, *shape: int) -> Tensor:
        """The numbers below `count` in an order of their own for every place of the shape: int64 [*shape, count]."""
        return self._uniform(*shape, count).argsort(-1).to(self.device)

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float32, device="cpu")  # whatever torch's defaults are

    def fixed(self, values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        """These values."""
        return torch.tensor(values, dtype=dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class Laid:
    """Stands for the attention layout that a backend makes of these arguments."""

    args: tuple[Any, ...]
    options: dict[str, Any]


def tree(draw: Draw, rows: int, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random trees -> parents, depths [B, N] and ancestors [B, N, 1], N at most 64."""
    parents = torch.zeros(rows, nodes, dtype=torch.int64, device="cpu")
    for node in range(2, nodes):
        parents[:, node] = torch.randint(node, (rows,), generator=draw.generator, device="cpu")
    depths, words = torch.zeros_like(parents), torch.ones(rows, nodes, 1, dtype=torch.int64, device="cpu")
    every = torch.arange(rows, device="cpu")
    for node in range(1, nodes):
        above = parents[:, node]
        depths[:, node], words[:, node, 0] = depths[every, above] + 1, words[every, above, 0] | (1 << node)
    return parents.to(draw.device), depths.to(draw.device), words.to(draw.device)
