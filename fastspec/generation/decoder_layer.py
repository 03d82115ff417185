"""Decoder layers as data, run by a backend's ops: a target's and an EAGLE head's are one program.

Parameters stay the model's own and become views of one packed buffer. Products read from the storages whether weights
are packed: those of a model that was moved, cast or copied since are not, and are multiplied one by one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from fastspec.generation.layer_state import DeltaState, FullAttentionState
from fastspec.generation.ops import Ops
from fastspec.kernels.attention.reference import Span
from fastspec.kernels.linear.reference import SILU, Activation, DeferredSum, Parts, joined
from fastspec.kernels.quantised.reference import StoredWeight
from fastspec.kernels.recurrent.reference import DecayRates


class Weights(Protocol):
    """A linear layer, or a part of one: weight [M, K] and bias [M]."""

    @property
    def weight(self) -> Tensor: ...
    @property
    def bias(self) -> Tensor | None: ...


def joint(parts: Sequence[Tensor]) -> Tensor | None:
    """One view [sum of rows, ...] of tensors [rows, ...] that are neighbours in one storage, or None."""
    first, at = parts[0], parts[0].storage_offset()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and part.dtype == first.dtype
        if not same or part.storage_offset() != at or not part.is_contiguous() or part.shape[1:] != first.shape[1:]:
            return None
        at += part.numel()
    rows = sum(part.shape[0] for part in parts)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def pack(layers: Sequence[Weights]) -> list[Tensor]:
    """Lay the weights, and the biases, of these layers one after another; returns the tensors that were moved.

    Nothing is done where some have a bias and some have none, or the layers differ in input width, dtype or device.
    """
    weights = [layer.weight for layer in layers]
    biases = [layer.bias for layer in layers if layer.bias is not None]
    kinds = {(weight.dtype, weight.device, weight.shape[1]) for weight in weights}
    if len(kinds) > 1 or len(biases) not in (0, len(layers)):
        return []
    moved: list[Tensor] = []
    for group in (weights, biases):
        if group and joint(group) is None:
            whole = torch.cat([parameter.detach() for parameter in group])
            for parameter, part in zip(group, whole.split([parameter.shape[0] for parameter in group]), strict=True):
                parameter.data = part
            moved += group
    return moved


def turn(weight: Tensor) -> list[Tensor]:
    """Lay a weight [..., in, out] so that the inputs of an output are neighbours -> it, where it was moved."""
    if weight.transpose(-1, -2).is_contiguous():
        return []
    weight.data = weight.detach().transpose(-1, -2).contiguous().transpose(-1, -2)
    return [weight]


def is_packed(parameter: Tensor) -> bool:
    """True where a parameter is a part of a larger storage, or lies turned in its own."""
    return parameter.untyped_storage().nbytes() != parameter.nbytes or not parameter.is_contiguous()


def unpack(parameter: Tensor) -> None:
    """Give a parameter a storage of its own again, in the order of its shape."""
    if is_packed(parameter):
        parameter.data = parameter.detach().clone(memory_format=torch.contiguous_format)


Summed: TypeAlias = Tensor | Parts | DeferredSum
"""A tensor, or the parts of a sum that a norm adds up."""
Product: TypeAlias = Callable[[Tensor], Summed]
"""x [..., K] -> [..., M]."""
Linear: TypeAlias = Callable[[Tensor], Tensor]
"""The same where nothing takes parts of it."""


class LayoutKey(NamedTuple):
    """Key of the attention layouts of a pass: the span of the text that queries see (None: all of it), the slots of a
    ring, and the number of query heads per key head."""

    span: Span | None = None
    ring: int | None = None
    group: int = 1


FULL_LAYOUT = LayoutKey()


class Rotary(NamedTuple):
    """Tables by position: cos, sin [P, R / 2], and a factor on queries [P] fp32."""

    cos: Tensor
    sin: Tensor
    factor: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Nodes:
    """Places of the nodes of one pass: rotary tables by kind of layer (None: all), positions and slots [B, N] int64,
    the latter by the size of a ring (None: none), and the backend's attention layouts.

    Parents [B, N] and ancestors `words` [B, N, W] are those of a tree; None for a text, of which counts [B] nodes are
    real.
    """

    rotary: Mapping[str | None, Rotary]
    positions: Tensor
    slots: Mapping[int | None, Tensor]
    layouts: Mapping[LayoutKey, object]
    parents: Tensor | None = None
    words: Tensor | None = None
    counts: Tensor | None = None


SequenceMixer: TypeAlias = Callable[[Tensor, Nodes], Summed]
"""The part of a layer that looks at other tokens: a normed input x [B, N, H] -> [B, N, H]."""


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Attention over committed tokens and a node's ancestors, or those within a span; layer `index` of `state` takes
    the nodes' keys and values."""

    ops: Ops
    state: FullAttentionState
    index: int
    qkv: Product
    out: Product
    scale: float
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0
    offset: float | None = None
    """Of the norms of queries and keys, as in `rms_norm`."""
    norms_values: bool = False
    """True where values are normed too, without a weight."""
    ties_values: bool = False
    """True where values are the keys, before these are normed and rotated."""
    owns: bool = True
    """True where the layer has keys and values of its own; else `qkv` gives queries alone, for another layer's."""
    layout: LayoutKey = FULL_LAYOUT
    rotary: str | None = None
    """The layer's rotary tables."""
    sinks: Tensor | None = None
    """[Hq] a logit of every head that joins its softmax and brings no value."""
    cap: float | None = None
    """Scores s become cap * tanh(s / cap)."""
    gated: bool = False
    """True where every head's queries are followed by as many gates, whose sigmoids its output is multiplied by."""
    interleaved: bool = False
    """True where neighbouring channels are rotated with each other, as in `rope_cache`."""

    def __call__(self, x: Tensor, nodes: Nodes) -> Summed:
        k, v = self.state.k[self.index], self.state.v[self.index]
        qkv = self.qkv(x)
        q = self._rotated(qkv, nodes)
        mixed = self.ops.tree_attention(q, k, v, nodes.layouts[self.layout], self.scale, sinks=self.sinks, cap=self.cap)
        return self.out(self.ops.gate_heads(mixed, qkv) if self.gated else mixed.flatten(-2))

    def write(self, x: Tensor, nodes: Nodes) -> None:
        """Write the nodes' keys and values, and read none."""
        self._rotated(self.qkv(x), nodes)

    def _rotated(self, qkv: Summed, nodes: Nodes) -> Tensor:
        """Queries of a product, whose keys and values are written."""
        k, v = self.state.k[self.index], self.state.v[self.index]
        cos, sin, factor = nodes.rotary[self.rotary]
        written = (k, v) if self.owns else (k[:, :0], v[:, :0])
        norms = self.q_norm, self.k_norm, self.eps, self.offset
        switches = self.gated, self.norms_values, self.ties_values, self.interleaved
        slots = nodes.slots[self.state.ring]
        return self.ops.rope_cache(qkv, cos, sin, nodes.positions, *written, slots, *norms, *switches, factor)


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """Gated DeltaNet: a convolution over the last inputs, a state per head, a gated norm; layer `index` of `state`."""

    ops: Ops
    state: DeltaState
    index: int
    project: Linear
    """x [..., H] -> the convolution's channels, the norm's gate, b and a, side by side [..., C + Hv * Dv + 2 * Hv]."""
    conv: Tensor
    """[C, K]."""
    rates: DecayRates
    norm: Tensor
    """[Dv]."""
    eps: float
    out: Product
    activation: Callable[[Tensor], Tensor] | None = None
    """Activation after the convolution; None: SiLU."""

    def __call__(self, x: Tensor, nodes: Nodes) -> Summed:
        ops, kept, at, count = self.ops, self.state, self.index, x.shape[1]
        _, heads, _, size = kept.s[at].shape
        qkv, gate, b, a = self.project(x).split((len(self.conv), heads * size, heads, heads), -1)
        held, state = kept.held[at], kept.s[at]
        if nodes.words is None:
            assert nodes.counts is not None
            mixed = self._activated(ops.tree_conv(qkv, self.conv, held, None, silu=self.activation is None))
            ops.hold(qkv, held, nodes.counts)
            read = ops.delta_chain(mixed, a, b, self.rates, state, nodes.counts)
        else:
            inputs, outputs, u, g = (each[at][:, :count] for each in (kept.inputs, kept.mixed, kept.u, kept.g))
            mixed = self._activated(
                ops.tree_conv(qkv, self.conv, held, nodes.parents, inputs, outputs, silu=self.activation is None)
            )
            read = ops.delta_tree(mixed, a, b, self.rates, state, nodes.words, u, g)
        return self.out(ops.gated_norm(read, gate.unflatten(-1, (heads, size)), self.norm, self.eps).flatten(-2))

    def _activated(self, mixed: Tensor) -> Tensor:
        """In place, for what the state keeps."""
        return mixed if self.activation is None else mixed.copy_(self.activation(mixed))


Norm = Callable[..., tuple[Tensor, Tensor]]
"""(x, residual=None, out=None, total=None) -> (the norm of their sum, the sum); a model's own norms lack `out`."""


@dataclass(frozen=True, slots=True)
class LayerParts:
    """One decoder layer: its norms, its mixer, and its feed-forward. Some families norm their outputs as well."""

    input_norm: Norm | None
    mixer: SequenceMixer
    mlp_norm: Norm | None
    """None: the feed-forward reads what the mixer reads, and both are added at once."""
    mlp: Product
    mixer_out_norm: Norm | None = None
    mlp_out_norm: Norm | None = None
    beside: Callable[[Tensor, Tensor], Tensor] | None = None
    """Output of the feed-forward, and input of its norm, [B, N, H] each -> both feed-forwards' output [B, N, H]."""
    after: Callable[[Tensor, Tensor | None], Tensor] | None = None
    """The layer's output [B, N, H], and its own input of every token [B, N, P] where it has one -> its output."""


Attend: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""A caller's attention: a layer's number, queries [B, T, Hq, D], keys and values [B, T, Hkv, D] -> [B, T, Hq, D]."""


class LayerFamily(ABC):
    """Maker of layers, norms and tables of a target's family from modules that are no part of the target."""

    @abstractmethod
    def layer(self, module: nn.Module, ops: Ops, state: FullAttentionState) -> LayerParts:
        """A layer, the first of a state."""

    @abstractmethod
    def norm(self, module: nn.Module, ops: Ops) -> Norm:
        """A norm."""

    @abstractmethod
    def tables(self, count: int) -> tuple[Tensor, Tensor]:
        """Number of positions P -> cos and sin [P, R / 2] of full attention."""

    @abstractmethod
    def products(self, module: nn.Module) -> list[nn.Module]:
        """Modules of a layer whose products `layer` runs by the backend."""

    @abstractmethod
    def pack(self, module: nn.Module) -> None:
        """Lay the weights of a layer that read one input one after another."""

    @abstractmethod
    def forward(self, module: nn.Module, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """A layer's output [B, T, H] with gradients, of hidden [B, T, H] at positions [B, T]; `attend` takes the number
        of the layer, 0, and queries, keys and values [B, T, heads, D]."""


def one_by_one(
    layers: Sequence[LayerParts],
    total: Tensor,
    own: Tensor | None,
    nodes: Nodes,
    taps: Mapping[int, Tensor],
    x: Tensor | None = None,
) -> tuple[Summed | None, Tensor]:
    """Run layers over total [B, N, H] -> what the last one adds to the sum, where that is not in it, and the sum.

    `own` [B, N, L, P] is each layer's own input of every token; `taps` take what layers read, before norms; x [B, N, K]
    is what the first layer reads, where it is normed already.
    """
    change: Summed | None = None
    for index, layer in enumerate(layers):
        if index or x is None:
            assert layer.input_norm is not None
            given = (total,) if change is None else (change, total)
            x, total = layer.input_norm(*given, total=taps[index]) if index in taps else layer.input_norm(*given)
        mixed = layer.mixer(x, nodes)
        if layer.mlp_norm is None:
            change = joined(mixed) + joined(layer.mlp(x))
            continue
        x, total = layer.mlp_norm(mixed if layer.mixer_out_norm is None else layer.mixer_out_norm(mixed)[0], total)
        change = layer.mlp(x)
        if layer.beside is not None:
            change = layer.beside(joined(change), total)
        if layer.mlp_out_norm is not None:
            change, _ = layer.mlp_out_norm(change)
        if layer.after is not None:
            total, change = layer.after(total + joined(change), None if own is None else own[:, :, index]), None
    return change, total


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """A root-mean-square norm by the backend's `Ops.rms_norm`, with the weight [H] that its module has at the time."""

    ops: Ops
    module: Any
    eps: float
    offset: float | None = None

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None, total: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return self.ops.rms_norm(x, self.module.weight, self.eps, residual, out, total, self.offset)


@dataclass(frozen=True, slots=True)
class Linears:
    """Plain linear layers over one input, their outputs side by side; with a kind, opened(gate) * up of two parts."""

    ops: Ops
    layers: tuple[Weights, ...]
    parts: bool
    """True where the result goes to a norm, which takes the parts of a product."""
    packed: tuple[Tensor, Tensor | None] | None
    """Weight and bias of all as one product, where they lie so."""
    kind: Activation | None = None

    def __call__(self, x: Tensor) -> Any:
        one = self.one()
        if one is None:
            return self.ops.linears(x, *self.apart(), self.kind)
        if self.kind is not None:
            return self.ops.gate_up(x, *one, self.kind)
        multiply = self.ops.linear_parts if self.parts and self.ops.linear_parts is not None else self.ops.linear
        return multiply(x, *one)

    def one(self) -> tuple[Tensor, Tensor | None] | None:
        """Weight and bias of one product, or None where there are several."""
        return (self.layers[0].weight, self.layers[0].bias) if len(self.layers) == 1 else self.packed

    def apart(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """Weights and biases one by one, as they are now."""
        return [layer.weight for layer in self.layers], [layer.bias for layer in self.layers]


class StoredLayer(Protocol):
    """A linear layer whose weight [M, K] is multiplied as a quantiser stored it: its weight and bias [M]."""

    @property
    def weight(self) -> StoredWeight: ...
    @property
    def bias(self) -> Tensor | None: ...


@dataclass(frozen=True, slots=True)
class StoredLinears:
    """`Linears` of stored weights."""

    ops: Ops
    layers: tuple[StoredLayer, ...]
    kind: Activation | None = None
    parts: bool = False
    """True where the result goes to a norm or to `rope_cache`, which take the parts of a product."""

    def __call__(self, x: Tensor) -> Any:
        weights, biases = zip(*((each.weight, each.bias) for each in self.layers), strict=True)
        if self.parts and self.ops.stored_parts is not None:
            return self.ops.stored_parts(x, weights, biases)
        assert self.ops.stored_linears is not None  # who makes one sees to it
        return self.ops.stored_linears(x, weights, biases, self.kind)


def for_heads(qkv: Product) -> Product:
    """A product of queries, keys and values, which leaves its parts to `rope_cache` where its weights are stored."""
    return replace(qkv, parts=True) if isinstance(qkv, StoredLinears) else qkv


@dataclass(frozen=True, slots=True)
class Gated:
    """A gated feed-forward: products of gates and of what they open, in this order, and the product that follows."""

    gate_up: Linears | StoredLinears
    out: Product

    def __call__(self, x: Tensor) -> Summed:
        return self.out(self.gate_up(x))


def product(ops: Ops, layers: Sequence[Weights], *, parts: bool = False, kind: Activation | None = None) -> Linears:
    """`Linears` of these layers; one product where their weights are packed."""
    weight = joint([layer.weight for layer in layers])
    biases = [layer.bias for layer in layers if layer.bias is not None]
    bias = joint(biases) if biases else None
    whole = (bias is not None) == bool(biases) and len(biases) in (0, len(layers))
    return Linears(ops, tuple(layers), parts, (weight, bias) if weight is not None and whole else None, kind)


def gated(ops: Ops, gate: Weights, up: Weights, out: Product, kind: Activation = SILU) -> Product:
    """The gated feed-forward of plain linear layers, or of parts of them, with the product `out`."""
    return Gated(product(ops, (gate, up), kind=kind), out)


def is_plain(module: nn.Module, kind: type[nn.Module] = nn.Linear) -> bool:
    """True where a module is torch's own class of this kind, and its forward neither hooked nor replaced."""
    hooks = module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
    weight = getattr(module, "weight", None)  # which a packed layer has not
    return type(module) is kind and type(weight) is nn.Parameter and not hooks and _is_torchs_own(kind)


def _is_torchs_own(kind: type[nn.Module]) -> bool:
    """True where a class's `forward` and `__call__` are torch's, wherever `functools.wraps` says that they are from."""
    methods = kind.forward, kind.__call__
    return all(isinstance(each, FunctionType) and each.__globals__["__name__"].startswith("torch.") for each in methods)
