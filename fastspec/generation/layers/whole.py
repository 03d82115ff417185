"""Layers that a backend runs in one call: those of which every part is one that it knows, as rows of data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from torch import Tensor

from fastspec.generation.layers.decoder import Gated, LayerParts, Linears, RmsNorm
from fastspec.generation.layers.mixers import FullAttention, Nodes
from fastspec.generation.ops import Ops
from fastspec.generation.state.attention import FullAttentionState
from fastspec.kernels.attention.reference import AttentionLayout
from fastspec.kernels.layer.reference import Place, PlainLayer, PlainLayers, RootMeanSquare, Weighted
from fastspec.kernels.linear.reference import SILU


class WholeLayers:
    """The layers of a target or of a head, for a backend that has `Ops.stack`."""

    def __init__(self, layers: Sequence[LayerParts], ops: Ops) -> None:
        rows = [plain_row(layer, number) for number, layer in enumerate(layers)] if ops.stack is not None else [None]
        self.mixers = [cast(FullAttention, layer.mixer) for layer in layers]
        self.layers = None if not layers or None in rows else PlainLayers(tuple(cast(list[PlainLayer], rows)))
        self.run = ops.stack

    def __call__(
        self, total: Tensor, nodes: Nodes, taps: Mapping[int, Tensor] | None = None, x: Tensor | None = None
    ) -> tuple[Tensor, Tensor] | None:  # fmt: skip
        """`reference.stack` over all layers; None, and nothing has happened, where they are to be run one by one."""
        if self.layers is None or self.run is None:
            return None
        caches: dict[int, tuple[Tensor, Tensor]] = {}
        places = []
        for mixer in self.mixers:
            state: FullAttentionState = mixer.state
            if id(state) not in caches:
                caches[id(state)] = state.k, state.v
            cos, sin, factor = nodes.rotary[mixer.rotary]
            if factor is not None:
                return None
            layout = cast(AttentionLayout, nodes.layouts[mixer.sight])
            places.append(Place(*caches[id(state)], mixer.index, cos, sin, nodes.slots[state.ring], layout))
        return self.run(self.layers, places, total, nodes.positions, taps or {}, x)


def plain_row(layer: LayerParts, number: int) -> PlainLayer | None:
    """A layer as a row, or None of one that does more."""
    norm, mixer, behind, mlp = layer.input_norm, layer.mixer, layer.mlp_norm, layer.mlp
    more = layer.mixer_out_norm, layer.mlp_out_norm, layer.beside, layer.after
    known = isinstance(norm, RmsNorm) or (norm is None and number == 0)
    if any(each is not None for each in more) or not known or not isinstance(behind, RmsNorm) or not isinstance(mixer, FullAttention):
        return None
    rare = mixer.gated or mixer.norms_values or mixer.ties_values or mixer.interleaved or not mixer.owns
    if rare or mixer.sinks is not None or mixer.cap is not None or not isinstance(mixer.qkv, Linears) or not isinstance(mixer.out, Linears):
        return None
    if not isinstance(mlp, Gated) or mlp.kind != SILU or not isinstance(mlp.out, Linears):
        return None
    return PlainLayer(
        norm=None if norm is None else _norm(cast(RmsNorm, norm)), qkv=_weighted(mixer.qkv), q_norm=mixer.q_norm, k_norm=mixer.k_norm,
        eps=mixer.eps, offset=mixer.offset, scale=mixer.scale, out=_weighted(mixer.out), mlp_norm=_norm(behind),
        gate_up=_weighted(mlp.gate_up), down=_weighted(mlp.out),
    )  # fmt: skip


def _norm(norm: RmsNorm) -> RootMeanSquare:
    return RootMeanSquare(norm.weight, norm.eps, norm.offset)


def _weighted(product: Linears) -> Weighted:
    if product.weight is not None:
        return Weighted((product.weight,), (product.bias,))
    weights, biases = product.apart()
    return Weighted(tuple(weights), tuple(biases))
