"""Layers that a backend runs in one call, as rows of data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from torch import Tensor, nn

from fastspec.generation.decoder_layer import FullAttention, Gated, LayerParts, Linears, Nodes, RmsNorm
from fastspec.generation.layer_state import FullAttentionState
from fastspec.generation.ops import Ops
from fastspec.kernels.attention.reference import AttentionLayout
from fastspec.kernels.layer.reference import LayerPlace, PlainLayer, PlainLayers, RootMeanSquare, Weighted
from fastspec.kernels.linear.reference import SILU


class WholeLayers:
    """The layers of a target or of a head, for a backend that has `Ops.stack`."""

    def __init__(self, layers: Sequence[LayerParts], ops: Ops) -> None:
        self.parts, self.run = layers, ops.stack
        self.mixers = [cast(FullAttention, layer.mixer) for layer in layers]
        self.layers = self._rows()
        self.read = [] if self.layers is None else [each for layer in layers for each in read_by(layer)]
        """The modules of the rows' tensors."""
        self.seen = self._now()

    def _rows(self) -> PlainLayers | None:
        """The layers as they are now, or None where one of them is not to be run so."""
        rows = [plain_row(layer, number) for number, layer in enumerate(self.parts)] if self.run is not None else []
        return PlainLayers(tuple(cast(list[PlainLayer], rows))) if rows and None not in rows else None

    def _now(self) -> list[object]:
        """The parameters that the modules have: one may get another while a batch is open."""
        return [own.get(name) for own, name in self.read]

    def __call__(
        self, total: Tensor, nodes: Nodes, taps: Mapping[int, Tensor] | None = None, x: Tensor | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """`reference.stack` over all layers; None, and nothing has happened, where they are to be run one by one."""
        if self.layers is None or self.run is None:
            return None
        now = self._now()
        if any(new is not old for new, old in zip(now, self.seen, strict=True)):
            self.layers, self.seen = self._rows(), now
            return self(total, nodes, taps, x)
        caches: dict[int, tuple[Tensor, Tensor]] = {}
        places = []
        for mixer in self.mixers:
            state: FullAttentionState = mixer.state
            if id(state) not in caches:
                caches[id(state)] = state.k, state.v
            cos, sin, factor = nodes.rotary[mixer.rotary]
            if factor is not None:
                return None
            layout = cast(AttentionLayout, nodes.layouts[mixer.layout])
            places.append(LayerPlace(*caches[id(state)], mixer.index, cos, sin, nodes.slots[state.ring], layout))
        return self.run(self.layers, places, total, nodes.positions, taps or {}, x)


def read_by(layer: LayerParts) -> Iterator[tuple[Mapping[str, object], str]]:
    """The dictionaries and names of a plain layer's parameters: a look there costs less than an attribute."""
    mixer, mlp = cast(FullAttention, layer.mixer), cast(Gated, layer.mlp)
    products = (mixer.qkv, mixer.out, mlp.gate_up, mlp.out)
    modules = [module for product in products for module in cast(Linears, product).layers]
    norms = [norm.module for norm in (layer.input_norm, layer.mlp_norm) if isinstance(norm, RmsNorm)]
    for module in (*modules, *norms):
        own: Mapping[str, object] = module._parameters if isinstance(module, nn.Module) else {}
        yield from ((own, name) for name in ("weight", "bias") if name in own)


def plain_row(layer: LayerParts, number: int) -> PlainLayer | None:
    """A layer as a row, or None of one that does more."""
    norm, mixer, mlp_norm, mlp = layer.input_norm, layer.mixer, layer.mlp_norm, layer.mlp
    more = layer.mixer_out_norm, layer.mlp_out_norm, layer.beside, layer.after
    known = isinstance(norm, RmsNorm) or (norm is None and number == 0)
    if any(each is not None for each in more) or not known or not isinstance(mlp_norm, RmsNorm):
        return None
    if not isinstance(mixer, FullAttention) or mixer.sinks is not None or mixer.cap is not None:
        return None
    rare = mixer.gated or mixer.norms_values or mixer.ties_values or mixer.interleaved or not mixer.owns
    if rare or not isinstance(mixer.qkv, Linears) or not isinstance(mixer.out, Linears):
        return None
    if not isinstance(mlp, Gated) or not isinstance(mlp.gate_up, Linears) or not isinstance(mlp.out, Linears):
        return None
    if mlp.gate_up.kind != SILU:
        return None
    return PlainLayer(
        norm=None if norm is None else _norm(cast(RmsNorm, norm)),
        qkv=_weighted(mixer.qkv),
        q_norm=mixer.q_norm,
        k_norm=mixer.k_norm,
        eps=mixer.eps,
        offset=mixer.offset,
        scale=mixer.scale,
        out=_weighted(mixer.out),
        mlp_norm=_norm(mlp_norm),
        gate_up=_weighted(mlp.gate_up),
        down=_weighted(mlp.out),
    )


def _norm(norm: RmsNorm) -> RootMeanSquare:
    return RootMeanSquare(norm.module.weight, norm.eps, norm.offset)


def _weighted(product: Linears) -> Weighted:
    one = product.one()
    if one is not None:
        return Weighted(one[:1], one[1:])
    weights, biases = product.apart()
    return Weighted(tuple(weights), tuple(biases))
