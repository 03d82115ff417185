"""What mixes the tokens of a text in a decoder layer. A mixer writes what it keeps of a tree's nodes into its own state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from torch import Tensor

from fastspec.generation.ops import Ops
from fastspec.generation.state.attention import FullAttentionState
from fastspec.generation.state.recurrent import DeltaState
from fastspec.kernels.attention.reference import Span
from fastspec.kernels.linear.reference import Addends, Parts
from fastspec.kernels.recurrent.reference import DecayRates

Summed: TypeAlias = Tensor | Parts | Addends
"""A tensor, or the parts of a sum where a norm follows, which adds them up, those of other processes too."""
Product: TypeAlias = Callable[[Tensor], Summed]
"""x [..., K] -> [..., M]."""
Linear: TypeAlias = Callable[[Tensor], Tensor]
"""The same where nothing takes parts of it."""


class Sight(NamedTuple):
    """What decides the layout of a layer's attention: the span of the text that its queries see (None: all of it), whether its slots form
    a ring, and the number of query heads per key head."""

    span: Span | None = None
    ring: int | None = None
    group: int = 1


EVERYTHING = Sight()


class Rotary(NamedTuple):
    """Tables by position: cos, sin [P, R / 2], and what queries are multiplied by [P] fp32, where that depends on where they stand."""

    cos: Tensor
    sin: Tensor
    factor: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Nodes:
    """Where the nodes of one pass stand: rotary tables, positions and slots [B, N] int64, and the attention's layouts."""

    rotary: Mapping[str | None, Rotary]
    """By the kind of layer; None: of all layers."""
    positions: Tensor
    slots: Mapping[int | None, Tensor]
    """By how many slots a state goes round in, None: it does not."""
    layouts: Mapping[Sight, object]
    """Of the backend's own kind."""
    parents: Tensor | None = None
    words: Tensor | None = None
    """Parents [B, N] and ancestors [B, N, W] of a tree's nodes; None: the nodes are a text that stands."""
    counts: Tensor | None = None
    """[B] how many nodes of a text that stands are real."""


class SequenceMixer(ABC):
    """The part of a layer that looks at other tokens."""

    @abstractmethod
    def __call__(self, x: Tensor, nodes: Nodes) -> Summed:
        """A normed input x [B, N, H] -> [B, N, H]."""


@dataclass(frozen=True, slots=True)
class FullAttention(SequenceMixer):
    """Attention over committed tokens and a node's ancestors, all of them or those within a span; layer `index` of `state`, which keeps
    the keys and values of all, takes those of the nodes."""

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
    """Whether values are normed too, without a weight."""
    ties_values: bool = False
    """Whether values are the keys, before these are normed and rotated."""
    owns: bool = True
    """Whether the layer has keys and values of its own; else `qkv` gives queries alone, and it reads those of another layer."""
    sight: Sight = EVERYTHING
    rotary: str | None = None
    """The layer's rotary tables."""
    sinks: Tensor | None = None
    """[Hq] a logit of every head that joins its softmax and brings no value."""
    cap: float | None = None
    """Scores s become cap * tanh(s / cap)."""
    gated: bool = False
    """Whether every head's queries are followed by as many gates, which what it reads is multiplied by, through a sigmoid."""
    interleaved: bool = False
    """Whether neighbouring channels are rotated with each other, as in `rope_cache`."""

    def __call__(self, x: Tensor, nodes: Nodes) -> Summed:
        """See `SequenceMixer`."""
        k, v = self.state.k[self.index], self.state.v[self.index]
        qkv, (cos, sin, factor) = self.qkv(x), nodes.rotary[self.rotary]
        written = (k, v) if self.owns else (k[:, :0], v[:, :0])
        q = self.ops.rope_cache(
            qkv, cos, sin, nodes.positions, *written, nodes.slots[self.state.ring], self.q_norm, self.k_norm, self.eps, self.offset,
            self.gated, self.norms_values, self.ties_values, self.interleaved, factor,
        )  # fmt: skip
        mixed = self.ops.tree_attention(q, k, v, nodes.layouts[self.sight], self.scale, sinks=self.sinks, cap=self.cap)
        return self.out(self.ops.gate_heads(mixed, qkv) if self.gated else mixed.flatten(-2))


@dataclass(frozen=True, slots=True)
class GatedDelta(SequenceMixer):
    """Gated DeltaNet: a convolution over the last inputs, a state per head, and a gated norm; layer `index` of `state`."""

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
    """What follows the convolution; None: SiLU."""

    def __call__(self, x: Tensor, nodes: Nodes) -> Summed:
        """See `SequenceMixer`."""
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
            mixed = self._activated(ops.tree_conv(qkv, self.conv, held, nodes.parents, inputs, outputs, silu=self.activation is None))
            read = ops.delta_tree(mixed, a, b, self.rates, state, nodes.words, u, g)
        return self.out(ops.gated_norm(read, gate.unflatten(-1, (heads, size)), self.norm, self.eps).flatten(-2))

    def _activated(self, mixed: Tensor) -> Tensor:
        """In place, for what the state keeps."""
        return mixed if self.activation is None else mixed.copy_(self.activation(mixed))
