"""Inputs of whole layers: two that follow each other, with what differs between families."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from fastspec.kernels.attention.reference import attention_layout
from fastspec.kernels.layer.reference import LayerPlace, PlainLayer, PlainLayers, RootMeanSquare, Weighted
from fastspec.patches.checks.inputs import Draw, tree

Stacked = tuple[PlainLayers, Sequence[LayerPlace], Tensor, Tensor, Mapping[int, Tensor], Tensor | None]
KEYS, QUERIES, SIZE, SLOTS = 2, 4, 16, 24


def layers(
    nodes: int, *, rows: int = 2, width: int = 64, inner: int = 48, apart: bool = True, biased: bool = False, norms: bool = False,
    offset: float | None = None, given: bool = False, tapped: bool = True, single: bool = False,
) -> Callable[[Draw], tuple[Stacked, dict[str, object]]]:  # fmt: skip
    """`rows` texts of `nodes` nodes each; weights side by side or `apart`, with or without biases and norms of heads; with `given` the
    first layer reads an input of twice the width, and has no norm; with `single` cosines and sines are in fp32 whatever the dtype."""

    def make(draw: Draw) -> tuple[Stacked, dict[str, object]]:
        def linear(depth: int, *channels: int) -> Weighted:
            sizes = channels if apart else (sum(channels),)
            weights = tuple(draw.floats(count, depth, scale=depth**-0.5) for count in sizes)
            return Weighted(weights, tuple(draw.floats(count) if biased else None for count in sizes))

        def layer(first: bool) -> PlainLayer:
            norm, behind = (RootMeanSquare(draw.floats(width), 1e-6, offset) for _ in "ab")
            return PlainLayer(
                norm=None if first and given else norm,
                qkv=linear(2 * width if first and given else width, QUERIES * SIZE, KEYS * SIZE, KEYS * SIZE),
                q_norm=draw.floats(SIZE) if norms else None, k_norm=draw.floats(SIZE) if norms else None, eps=1e-5, offset=offset,
                scale=SIZE**-0.5, out=linear(QUERIES * SIZE, width), mlp_norm=behind, gate_up=linear(width, inner, inner),
                down=linear(inner, width),
            )  # fmt: skip

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

    return make
