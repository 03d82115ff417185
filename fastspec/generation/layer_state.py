"""What the layers of one kind keep of a text: keys and values of all tokens, of the last ones, or a matrix per head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from fastspec.generation.ops import Ops
from fastspec.generation.tree import Verdict
from fastspec.kernels.attention.reference import Span

Held: TypeAlias = tuple[Tensor, Tensor]
"""What transformers keeps of one layer: keys and values [B, Hkv, T, D], or the last inputs of a convolution and a
recurrent state."""


@dataclass(frozen=True, slots=True)
class Moves:
    """The accepted paths of a round as slots: row b's node path[b, i] stands in slot sources[b, i] and goes to
    targets[b, i], [B, P]."""

    verdict: Verdict
    active: Tensor
    """[B] bool: the rows whose path is kept."""
    sources: Tensor
    targets: Tensor

    def on(self, device: torch.device) -> Moves:
        """The same on a device."""
        if self.sources.device == device:
            return self
        verdict = replace(
            self.verdict,
            path=self.verdict.path.to(device),
            accepted=self.verdict.accepted.to(device),
            bonus=self.verdict.bonus.to(device),
        )
        return Moves(verdict, self.active.to(device), self.sources.to(device), self.targets.to(device))


class LayerState(ABC):
    """Buffers of all layers of one kind, for every row of a call. Slots below a row's length hold its committed tokens,
    the tail behind them the nodes of the last tree, which the layers' mixer writes.

    A kind that keeps less than every token (a window, a recurrent state) answers the same questions: it may ignore how
    many slots there are, and must not let a node that was rejected change what it keeps.
    """

    layers: int
    """How many layers there are of the kind."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where its layers compute, and its buffers are."""

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
        """Begin a row anew with the `count` committed tokens of row `source` of another state of the same kind. The
        row's former text and its trees have written no slot from `reached` on."""

    @abstractmethod
    def clear(self, reached: int) -> None:
        """Begin with an empty text in every row, none of which has written a slot from `reached` on."""

    @abstractmethod
    def load(self, layer: int, held: Held, order: Tensor, counts: Tensor) -> None:
        """Take what transformers keeps of one layer's first tokens; order [B, T] are the columns that a row's tokens
        stand in, the first counts [B] of them."""

    @abstractmethod
    def export(self, layer: int, slots: Tensor, real: Tensor, lengths: Tensor) -> Held:
        """What transformers keeps of the tokens of one layer in slots [B, T] of texts of lengths [B]; zeros where
        `real` [B, T] is false."""


class FullAttentionState(LayerState):
    """Keys `k` [L, B, Hkv, C, D] and values `v` [L, B, Hkv, C, Dv] of L layers and B rows, C slots a row. Latent
    attention keeps one head's latents and rotated channels in their places."""

    ring: int | None = None
    """How many slots positions go round in; None: the token at position p stands in slot p."""

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
        self.layers = layers
        self.k = torch.zeros((layers, rows, kv_heads, 0, size), dtype=dtype, device=device)
        self.v = torch.zeros(
            (layers, rows, kv_heads, 0, size if value_size is None else value_size), dtype=dtype, device=device
        )

    @property
    def device(self) -> torch.device:
        """Device of the keys and values."""
        return self.k.device

    def bytes(self, slots: int) -> int:
        """Memory of keys and values with so many slots a row."""
        layers, rows, heads, _, size = self.k.shape
        return self.k.element_size() * layers * rows * heads * slots * (size + self.v.shape[-1])

    def resize(self, slots: int) -> None:
        """Replace the buffers by larger ones that hold the same."""
        self.k, self.v = self._resized(self.k, slots), self._resized(self.v, slots)

    def clear(self, reached: int) -> None:
        """Zero what was written: attention multiplies the values of slots that are not seen by weights of 0, and 0 *
        NaN is NaN."""
        self.k[:, :, :, :reached].zero_()
        self.v[:, :, :, :reached].zero_()

    def write(self, ops: Ops, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Write k, v [B, N, Hkv, D] of one layer at slots [B, N]."""
        ops.cache_write(self.k[layer], self.v[layer], k, v, slots)

    def commit(self, ops: Ops, moves: Moves) -> None:
        """Move the accepted paths to the end of their rows' tokens."""
        if moves.verdict.path.shape[1] > 1:
            ops.kv_block_copy(self.k, self.v, moves.sources, moves.targets)

    def copy_row(self, row: int, other: LayerState, count: int, source: int, reached: int) -> None:
        """Begin a row anew; there must be room for its tokens. Slots after them are zeroed, as by `clear`."""
        assert isinstance(other, FullAttentionState)
        for mine, theirs in ((self.k, other.k), (self.v, other.v)):
            mine[:, row, :, :count] = theirs[:, source, :, :count]
            mine[:, row, :, count:reached].zero_()

    def load(self, layer: int, held: Held, order: Tensor, counts: Tensor) -> None:
        """Take keys and values [B, Hkv, T, D] of one layer's first tokens."""
        row = torch.arange(len(order), device=order.device)[:, None]
        for buffer, states in zip((self.k, self.v), held, strict=True):
            buffer[layer][:, :, : order.shape[1]] = states.transpose(1, 2)[row, order].transpose(1, 2)

    def export(self, layer: int, slots: Tensor, real: Tensor, lengths: Tensor) -> Held:
        """Keys and values [B, Hkv, T, D] of one layer at slots [B, T]; zeros where `real` [B, T] is false."""
        row = torch.arange(len(slots), device=slots.device)[:, None]
        keys, values = (
            buffer[layer]
            .transpose(1, 2)[row, slots]
            .where(real[:, :, None, None].bool(), 0)
            .transpose(1, 2)
            .contiguous()
            for buffer in (self.k, self.v)
        )
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

    def commit(self, ops: Ops, moves: Moves) -> None:
        """Move the accepted paths to the end of their rows' tokens."""
        if self.ring is not None:
            moves = replace(moves, sources=moves.sources % self.ring, targets=moves.targets % self.ring)
        super().commit(ops, moves)

    @property
    def k(self) -> Tensor:  # type: ignore[override]
        """Keys [layers, B, Hkv, C, D]."""
        return self.whole.k[: self.layers]

    @property
    def v(self) -> Tensor:  # type: ignore[override]
        """Values [layers, B, Hkv, C, D]."""
        return self.whole.v[: self.layers]


SLACK = 512
"""A text can be made shorter by so many tokens, and the window at its new end is still whole."""
STEP = 128


def ring_of(span: Span, tail: int, chunk: int) -> int:
    """Slots that layers of a span go round in: the span, what a pass of up to `tail` nodes or `chunk` tokens of a
    prompt writes, and SLACK."""
    return -(-(span.size + max(tail, chunk) + SLACK) // STEP) * STEP


class WindowState(FullAttentionState):
    """Keys `k` and values `v` of the last `ring` tokens of every row at least: the token at position p stands in slot p
    % ring.

    A pass writes nodes no further than `ring` - `span.size` behind the tokens that are still seen, so that no node
    takes the place of one of these, whether it is rejected or not. Texts that are no longer than the ring take no more
    slots than they have tokens.
    """

    ring: int

    def __init__(
        self,
        layers: int,
        rows: int,
        kv_heads: int,
        size: int,
        value_size: int | None = None,
        *,
        span: Span,
        ring: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(layers, rows, kv_heads, size, value_size, dtype=dtype, device=device)
        self.span, self.ring = span, ring

    def bytes(self, slots: int) -> int:
        """Memory of keys and values of texts of so many slots."""
        return super().bytes(min(slots, self.ring))

    def resize(self, slots: int) -> None:
        """Replace the buffers by larger ones that hold the same, until they hold the ring."""
        if self.k.shape[3] < min(slots, self.ring):
            super().resize(min(slots, self.ring))

    def commit(self, ops: Ops, moves: Moves) -> None:
        """Move the accepted paths to the end of their rows' tokens."""
        if moves.verdict.path.shape[1] > 1:
            ops.kv_block_copy(self.k, self.v, moves.sources % self.ring, moves.targets % self.ring)

    def copy_row(self, row: int, other: LayerState, count: int, source: int, reached: int) -> None:
        """Begin a row anew; there must be room for its tokens."""
        assert isinstance(other, WindowState) and other.ring == self.ring
        super().copy_row(row, other, min(count, self.ring), source, reached)

    def load(self, layer: int, held: Held, order: Tensor, counts: Tensor) -> None:
        """Take the last of the keys and values [B, Hkv, T, D] of one layer's tokens."""
        width = self.k.shape[3]
        last = counts[:, None] - 1
        place = (
            last - (last - torch.arange(width, device=order.device)) % self.ring
        )  # the last position that a slot holds
        columns = order.gather(1, place.clamp(0, order.shape[1] - 1))
        row = torch.arange(len(order), device=order.device)[:, None]
        for buffer, states in zip((self.k, self.v), held, strict=True):
            buffer[layer] = (
                states.transpose(1, 2)[row, columns].where((place >= 0)[:, :, None, None], 0).transpose(1, 2)
            )

    def export(self, layer: int, slots: Tensor, real: Tensor, lengths: Tensor) -> Held:
        """Keys and values [B, Hkv, T, D] of one layer at slots [B, T]; zeros where `real` [B, T] is false, and where a
        token is no longer seen."""
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
    whatever its length.

    Beside them what a pass leaves of its N nodes, for `commit`: the convolution's `inputs` and outputs `mixed` [L, B,
    N, C], and the updates `u` [L, B, N, Hv, Dv] and summed gates `g` [L, B, N, Hv], fp32. A text cannot be made shorter
    again.
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
        """Device of the matrices."""
        return self.s.device

    def bytes(self, slots: int) -> int:
        """Memory of the buffers, the same for texts of any length."""
        return sum(
            each.numel() * each.element_size() for each in (self.s, self.held, self.inputs, self.mixed, self.u, self.g)
        )

    def resize(self, slots: int) -> None:
        """Nothing grows."""

    def clear(self, reached: int) -> None:
        """Begin with an empty text."""
        self.s.zero_()
        self.held.zero_()

    def commit(self, ops: Ops, moves: Moves) -> None:
        """Take the accepted paths in."""
        verdict = moves.verdict
        ops.delta_commit(
            self.s, self.held, self.inputs, self.mixed, self.u, self.g, verdict.path, verdict.accepted, moves.active
        )

    def copy_row(self, row: int, other: LayerState, count: int, source: int, reached: int) -> None:
        """Begin a row anew."""
        assert isinstance(other, DeltaState)
        self.s[:, row] = other.s[:, source]
        self.held[:, row] = other.held[:, source]

    def load(self, layer: int, held: Held, order: Tensor, counts: Tensor) -> None:
        """Take the inputs [B, C, K] of a convolution and a state [B, Hv, Dk, Dv], which stand behind all of the
        text."""
        inputs, state = held
        self.held[layer] = inputs.transpose(1, 2)
        self.s[layer] = state

    def export(self, layer: int, slots: Tensor, real: Tensor, lengths: Tensor) -> Held:
        """The inputs and the state of one layer, behind all of a row's committed tokens: none of an earlier place are
        kept."""
        return self.held[layer].transpose(1, 2).contiguous(), self.s[layer].clone()
