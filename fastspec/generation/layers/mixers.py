"""What mixes the tokens of a text in a decoder layer. A mixer writes what it keeps of a tree's nodes into its own state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from fastspec.generation.ops import Ops
from fastspec.generation.state.attention import FullAttentionState
from fastspec.kernels.attention.reference import Span
from fastspec.kernels.linear.reference import Parts

Summed: TypeAlias = Tensor | Parts
"""A tensor, or the parts of a sum where a norm follows, which adds them up."""
Product: TypeAlias = Callable[[Tensor], Summed]
"""x [..., K] -> [..., M]."""
Linear: TypeAlias = Callable[[Tensor], Tensor]
"""The same where nothing takes parts of it."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """Where the nodes of one pass stand: rotary tables, positions and slots [B, N], and the attention's layouts."""

    rotary: Mapping[str | None, tuple[Tensor, Tensor]]
    """Tables cos, sin [P, R / 2] by the kind of layer; None: of all layers."""
    positions: Tensor
    slots: Tensor
    layouts: Mapping[Span | None, object]
    """By what a layer's queries see of the text, all of it (None) or a span; of the backend's own kind."""


class SequenceMixer(ABC):
    """The part of a layer that looks at other tokens: attention here; a window, a recurrence or latent keys are others of its kind."""

    @abstractmethod
    def __call__(self, x: Tensor, nodes: Nodes) -> Summed:
        """A normed input x [B, N, H] -> [B, N, H]."""


@dataclass(frozen=True, slots=True)
class FullAttention(SequenceMixer):
    """Attention over committed tokens and a node's ancestors, all of them or those within `span`; layer `index` of `state`, which keeps
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
    unit_offset: bool = False
    """Of the norms of queries and keys, as in `rms_norm`."""
    span: Span | None = None
    rotary: str | None = None
    """The layer's rotary tables."""
    sinks: Tensor | None = None
    """[Hq] a logit of every head that joins its softmax and brings no value."""
    cap: float | None = None
    """Scores s become cap * tanh(s / cap)."""

    def __call__(self, x: Tensor, nodes: Nodes) -> Summed:
        """See `SequenceMixer`."""
        k, v = self.state.k[self.index], self.state.v[self.index]
        q = self.ops.rope_cache(
            self.qkv(x), *nodes.rotary[self.rotary], nodes.positions, k, v, nodes.slots, self.q_norm, self.k_norm, self.eps,
            self.unit_offset,
        )  # fmt: skip
        mixed = self.ops.tree_attention(q, k, v, nodes.layouts[self.span], self.scale, sinks=self.sinks, cap=self.cap)
        return self.out(mixed.flatten(-2))
