"""Keys and values of the last tokens: the state of layers that see a span of the text."""

from __future__ import annotations

import torch
from torch import Tensor

from fastspec.generation.ops import Ops
from fastspec.generation.state.attention import FullAttentionState
from fastspec.generation.state.base import Held, LayerState, Moves
from fastspec.kernels.attention.reference import Span

SLACK = 512
"""A text can be made shorter by so many tokens, and the window at its new end is still whole."""
STEP = 128


def ring_of(span: Span, tail: int, chunk: int) -> int:
    """Slots that layers of a span go round in: the span, what a pass of up to `tail` nodes or `chunk` tokens of a prompt writes, and
    SLACK."""
    return -(-(span.size + max(tail, chunk) + SLACK) // STEP) * STEP


class WindowState(FullAttentionState):
    """Keys `k` and values `v` of the last `ring` tokens of every row at least: the token at position p stands in slot p % ring.

    A pass writes nodes no further than `ring` - `span.size` behind the tokens that are still seen, so that no node takes the place of one
    of these, whether it is rejected or not. Texts that are no longer than the ring take no more slots than they have tokens.
    """

    ring: int

    def __init__(
        self, layers: int, rows: int, kv_heads: int, size: int, value_size: int | None = None, *, span: Span, ring: int,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
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
        place = last - (last - torch.arange(width, device=order.device)) % self.ring  # the last position that a slot holds
        columns = order.gather(1, place.clamp(0, order.shape[1] - 1))
        row = torch.arange(len(order), device=order.device)[:, None]
        for buffer, states in zip((self.k, self.v), held, strict=True):
            buffer[layer] = states.transpose(1, 2)[row, columns].where((place >= 0)[:, :, None, None], 0).transpose(1, 2)

    def export(self, layer: int, slots: Tensor, real: Tensor, lengths: Tensor) -> Held:
        """Keys and values [B, Hkv, T, D] of one layer at slots [B, T]; zeros where `real` [B, T] is false, and where a token is no longer
        seen."""
        seen = real & (slots >= lengths[:, None] - self.span.size)
        return super().export(layer, slots % self.ring, seen, lengths)
