"""Small inputs of the kernels and of whole layers, the same on every device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastspec.kernels.attention.reference import attention_layout
from fastspec.kernels.layer.reference import LayerPlace, PlainLayer, PlainLayers, RootMeanSquare, Weighted


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
        # whatever torch's defaults are
        return torch.rand(shape, generator=self.generator, dtype=torch.float32, device="cpu")

    def fixed(self, values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        """These values."""
        return torch.tensor(values, dtype=dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class LayoutArguments:
    """Arguments of an attention layout, which each backend makes for itself."""

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


Stacked = tuple[PlainLayers, Sequence[LayerPlace], Tensor, Tensor, Mapping[int, Tensor], Tensor | None]
KEYS, QUERIES, SIZE, SLOTS = 2, 4, 16, 24


def layers(
    draw: Draw,
    nodes: int,
    *,
    rows: int = 2,
    width: int = 64,
    inner: int = 48,
    apart: bool = True,
    biased: bool = False,
    norms: bool = False,
    offset: float | None = None,
    given: bool = False,
    tapped: bool = True,
    single: bool = False,
) -> tuple[Stacked, dict[str, object]]:
    """`rows` texts of `nodes` nodes; weights side by side or `apart`, with or without biases and norms of heads;
    `given`: the first layer reads twice the width and has no norm; `single`: cosines and sines are in fp32."""

    def linear(depth: int, *channels: int) -> Weighted:
        sizes = channels if apart else (sum(channels),)
        weights = tuple(draw.floats(count, depth, scale=depth**-0.5) for count in sizes)
        return Weighted(weights, tuple(draw.floats(count) if biased else None for count in sizes))

    def layer(first: bool) -> PlainLayer:
        norm, behind = (RootMeanSquare(draw.floats(width), 1e-6, offset) for _ in "ab")
        return PlainLayer(
            norm=None if first and given else norm,
            qkv=linear(2 * width if first and given else width, QUERIES * SIZE, KEYS * SIZE, KEYS * SIZE),
            q_norm=draw.floats(SIZE) if norms else None,
            k_norm=draw.floats(SIZE) if norms else None,
            eps=1e-5,
            offset=offset,
            scale=SIZE**-0.5,
            out=linear(QUERIES * SIZE, width),
            mlp_norm=behind,
            gate_up=linear(width, inner, inner),
            down=linear(inner, width),
        )

    _, depths, words = tree(draw, rows, nodes)
    prefix = draw.whole(SLOTS - nodes, rows) + 1
    angles = draw.uniform(2 * SLOTS, SIZE // 2) * 6
    cos, sin = (table if single else table.to(draw.dtype) for table in (angles.cos(), angles.sin()))
    slots = prefix[:, None] + draw.fixed([list(range(nodes))])
    k, v = (draw.floats(2, rows, KEYS, 2 * SLOTS, SIZE) for _ in "kv")
    layout = attention_layout(prefix, words, nodes, nodes, SLOTS + nodes, QUERIES // KEYS)
    places = [LayerPlace(k, v, index, cos, sin, slots, layout) for index in range(2)]
    taps = {1: draw.floats(rows, nodes, 3 * width)[..., width : 2 * width]} if tapped else {}
    x = draw.floats(rows, nodes, 2 * width) if given else None
    rows_of = PlainLayers((layer(True), layer(False)))
    return (rows_of, places, draw.floats(rows, nodes, width), prefix[:, None] + depths, taps, x), {}
