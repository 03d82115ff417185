"""States of the layers of one kind: keys and values of all tokens, of the last ones, or a matrix per head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from fastspec.generation.ops import Ops
from fastspec.generation.tree import Verdict
from fastspec.kernels.attention.reference import Span

LayerCache: TypeAlias = tuple[Tensor, Tensor]
"""One layer of transformers' cache: keys and values [B, Hkv, T, D], or a convolution's last inputs and a state."""


@dataclass(frozen=True, slots=True)
class Moves:
    """The accepted paths of a round as slots: row b's node path[b, i] is in slot sources[b, i] and goes to targets[b,
    i], [B, P], in the active rows [B] bool."""

    verdict: Verdict
    active: Tensor
    sources: Tensor
    targets: Tensor

    def on(self, device: torch.device) -> Moves:
        """The same on a device."""
        if self.sources.device == device:
            return self
        path, accepted, bonus = (x.to(device) for x in (self.verdict.path, self.verdict.accepted, self.verdict.bonus))
        verdict = replace(self.verdict, path=path, accepted=accepted, bonus=bonus)
        return Moves(verdict, self.active.to(device), self.sources.to(device), self.targets.to(device))


class LayerState(ABC):
    """Buffers of all layers of one kind, for every row of a call. Slots below a row's length hold its committed tokens,
    the tail after them the nodes of the last tree, which the layers' mixer writes. A kind that keeps less than every
    token (a window, a recurrent state) may ignore the number of slots; no rejected node may change it."""

    layers: int
    """The number of layers of the kind."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of its layers and buffers."""

    @abstractmethod
    def bytes(self, slots: int) -> int:
        """Memory of the buffers with so many slots a row."""

    @abstractmethod
    def resize(self, slots: int) -> None:
        """Replace the buffers by larger ones that hold the same."""

    @abstractmethod
    def commit(self, ops: Ops, moves: Moves) -> None:
        """Keep the accepted paths."""

    @abstractmethod
    def copy_row(self, row: int, other: LayerState, count: int, source: int, reached: int) -> None:
        """Begin a row anew with the `count` committed tokens of row `source` of another state of the same kind. The row
        has written no slot from `reached` on."""

    def holds(self, count: int, reached: int) -> bool:
        """True where a row that was written up to slot `reached`, without its tail, has all that token `count` sees."""
        return True

    @abstractmethod
    def clear(self, reached: int) -> None:
        """Begin with an empty text in every row, none of which has written a slot from `reached` on."""

    @abstractmethod
    def load(self, layer: int, held: LayerCache, order: Tensor, counts: Tensor) -> None:
        """Take transformers' cache of one layer's first tokens: the first counts [B] of the columns order [B, T]."""

    @abstractmethod
    def export(self, layer: int, slots: Tensor, real: Tensor, lengths: Tensor) -> LayerCache:
        """Transformers' cache of one layer's tokens in slots [B, T] of texts of lengths [B]; zeros where not real."""


class FullAttentionState(LayerState):
    """Keys `k` [L, B, Hkv, C, D] and values `v` [L, B, Hkv, C, Dv] of L layers and B rows, C slots a row. Latent
    attention keeps one head's latents and rotated channels in their places."""

    ring: int | None = None
    """Slots of the ring that positions go round in; None: the token at position p is in slot p."""

    def __init__(
        self,
        layers: int,
        rows: int,
        kv_heads: int,
        size: int,
        value_size: int | None = None,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers, value_size = layers, size if value_size is None else value_size
        self.k = torch.zeros((layers, rows, kv_heads, 0, size), dtype=dtype, device=device)
        self.v = torch.zeros((layers, rows, kv_heads, 0, value_size), dtype=dtype, device=device)

    @property
    def device(self) -> torch.device:
        return self.k.device

    def bytes(self, slots: int) -> int:
        layers, rows, heads, _, size = self.k.shape
        return self.k.element_size() * layers * rows * heads * slots * (size + self.v.shape[-1])

    def resize(self, slots: int) -> None:
        self.k, self.v = self._resized(self.k, slots), self._resized(self.v, slots)

    def clear(self, reached: int) -> None:
        """Zero the written slots: attention multiplies unseen values by weights of 0, and 0 * NaN is NaN."""
        self.k[:, :, :, :reached].zero_()
        self.v[:, :, :, :reached].zero_()

    def write(self, ops: Ops, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Write k, v [B, N, Hkv, D] of one layer at slots [B, N]."""
        ops.cache_write(self.k[layer], self.v[layer], k, v, slots)

    def commit(self, ops: Ops, moves: Moves) -> None:
        if moves.verdict.path.shape[1] > 1:
            places = moves.sources, moves.targets
            ops.kv_block_copy(self.k, self.v, *(each if self.ring is None else each % self.ring for each in places))

    def copy_row(self, row: int, other: LayerState, count: int, source: int, reached: int) -> None:
        """Begin a row anew; there must be room for its tokens. Slots after them are zeroed, as by `clear`."""
        assert isinstance(other, FullAttentionState)
        for mine, theirs in ((self.k, other.k), (self.v, other.v)):
            mine[:, row, :, :count] = theirs[:, source, :, :count]
            mine[:, row, :, count:reached].zero_()

    def load(self, layer: int, held: LayerCache, order: Tensor, counts: Tensor) -> None:
        row = torch.arange(len(order), device=order.device)[:, None]
        for buffer, states in zip((self.k, self.v), held, strict=True):
            buffer[layer][:, :, : order.shape[1]] = states.transpose(1, 2)[row, order].transpose(1, 2)

    def export(self, layer: int, slots: Tensor, real: Tensor, lengths: Tensor) -> LayerCache:
        row = torch.arange(len(slots), device=slots.device)[:, None]
        kept = real[:, :, None, None].bool()
        found = (buffer[layer].transpose(1, 2)[row, slots].where(kept, 0) for buffer in (self.k, self.v))
        keys, values = (each.transpose(1, 2).contiguous() for each in found)
        return keys, values

    def _resized(self, buffer: Tensor, slots: int) -> Tensor:
        layers, rows, heads, held, size = buffer.shape
        grown = torch.zeros((layers, rows, heads, slots, size), dtype=buffer.dtype, device=buffer.device)
        grown[:, :, :, :held] = buffer
        return grown


class FirstLayers(FullAttentionState):
    """The first layers of another state, as they are now."""

    def __init__(self, whole: FullAttentionState, layers: int) -> None:
        self.whole, self.layers, self.ring = whole, layers, whole.ring

    @property
    def k(self) -> Tensor:  # type: ignore[override]
        return self.whole.k[: self.layers]

    @property
    def v(self) -> Tensor:  # type: ignore[override]
        return self.whole.v[: self.layers]


SLACK = 512
"""A text can be made shorter by so many tokens, and the window at its new end is still whole."""
STEP = 128


def ring_of(span: Span, tail: int, chunk: int) -> int:
    """Slots of a span's ring: the span, those of a pass of `tail` nodes or `chunk` prompt tokens, and SLACK."""
    return -(-(span.size + max(tail, chunk) + SLACK) // STEP) * STEP


class WindowState(FullAttentionState):
    """Keys `k` and values `v` of at least the last `ring` tokens of every row: the token at position p is in slot p %
    ring.

    A pass writes nodes no further than `ring` - `span.size` after the tokens that are still seen, so that no node takes
    the place of one of these. Texts shorter than the ring take no more slots than they have tokens.
    """

    ring: int

    def __init__(self, *sizes: int, span: Span, ring: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(*sizes, dtype=dtype, device=device)
        self.span, self.ring = span, ring

    def bytes(self, slots: int) -> int:
        return super().bytes(min(slots, self.ring))

    def resize(self, slots: int) -> None:
        """Replace the buffers by larger ones that hold the same, until they hold the ring."""
        if self.k.shape[3] < min(slots, self.ring):
            super().resize(min(slots, self.ring))

    def copy_row(self, row: int, other: LayerState, count: int, source: int, reached: int) -> None:
        assert isinstance(other, WindowState) and other.ring == self.ring
        super().copy_row(row, other, min(count, self.ring), source, reached)

    def holds(self, count: int, reached: int) -> bool:
        """True where the window before `count` was not written over: the ring has room for a tail behind SLACK."""
        return reached - count <= SLACK or reached <= self.span.size + SLACK

    def load(self, layer: int, held: LayerCache, order: Tensor, counts: Tensor) -> None:
        """Take the last of the keys and values [B, Hkv, T, D] of one layer's tokens."""
        width = self.k.shape[3]
        last = counts[:, None] - 1  # and then the last position that a slot holds
        place = last - (last - torch.arange(width, device=order.device)) % self.ring
        columns = order.gather(1, place.clamp(0, order.shape[1] - 1))
        row = torch.arange(len(order), device=order.device)[:, None]
        for buffer, states in zip((self.k, self.v), held, strict=True):
            kept = states.transpose(1, 2)[row, columns].where((place >= 0)[:, :, None, None], 0)
            buffer[layer] = kept.transpose(1, 2)

    def export(self, layer: int, slots: Tensor, real: Tensor, lengths: Tensor) -> LayerCache:
        """Keys and values [B, Hkv, T, D] of one layer at slots [B, T]; zeros where not real [B, T], or not seen."""
        seen = real & (slots >= lengths[:, None] - self.span.size)
        return super().export(layer, slots % self.ring, seen, lengths)


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Key and value heads, their sizes, and the width of the convolution."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    width: int

    @property
    def channels(self) -> int:
        """Queries, keys and values side by side."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size


class DeltaState(LayerState):
    """States `s` [L, B, Hv, Dk, Dv] fp32 and the convolution's last inputs `held` [L, B, K, C] of the committed text,
    which cannot be made shorter again.

    A pass leaves of its N nodes, for `commit`: the convolution's `inputs` and outputs `mixed` [L, B, N, C], and the
    updates `u` [L, B, N, Hv, Dv] and summed gates `g` [L, B, N, Hv], fp32.
    """

    def __init__(
        self, layers: int, rows: int, nodes: int, shape: DeltaShape, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layers, heads, size = layers, shape.value_heads, shape.value_size
        self.s = torch.zeros((layers, rows, heads, shape.key_size, size), dtype=torch.float32, device=device)
        self.held = torch.zeros((layers, rows, shape.width, shape.channels), dtype=dtype, device=device)
        self.inputs = torch.zeros((layers, rows, nodes, shape.channels), dtype=dtype, device=device)
        self.mixed = torch.zeros_like(self.inputs)
        self.u = torch.zeros((layers, rows, nodes, heads, size), dtype=torch.float32, device=device)
        self.g = torch.zeros((layers, rows, nodes, heads), dtype=torch.float32, device=device)

    @property
    def device(self) -> torch.device:
        return self.s.device

    def bytes(self, slots: int) -> int:
        """Memory of the buffers, the same for texts of any length."""
        return sum(each.nbytes for each in (self.s, self.held, self.inputs, self.mixed, self.u, self.g))

    def resize(self, slots: int) -> None:
        """Nothing grows."""

    def clear(self, reached: int) -> None:
        self.s.zero_()
        self.held.zero_()

    def commit(self, ops: Ops, moves: Moves) -> None:
        path, accepted = moves.verdict.path, moves.verdict.accepted
        ops.delta_commit(self.s, self.held, self.inputs, self.mixed, self.u, self.g, path, accepted, moves.active)

    def copy_row(self, row: int, other: LayerState, count: int, source: int, reached: int) -> None:
        assert isinstance(other, DeltaState)
        self.s[:, row] = other.s[:, source]
        self.held[:, row] = other.held[:, source]

    def load(self, layer: int, held: LayerCache, order: Tensor, counts: Tensor) -> None:
        """Take the inputs [B, C, K] of a convolution and a state [B, Hv, Dk, Dv], which are those after the text."""
        inputs, state = held
        self.held[layer] = inputs.transpose(1, 2)
        self.s[layer] = state

    def export(self, layer: int, slots: Tensor, real: Tensor, lengths: Tensor) -> LayerCache:
        """The inputs and the state of one layer after all committed tokens."""
        return self.held[layer].transpose(1, 2).contiguous(), self.s[layer].clone()
