"""Keys and values of every token: the state of layers with full attention."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fastspec.generation.ops import Ops
from fastspec.generation.state.base import Held, LayerState, Moves


class FullAttentionState(LayerState):
    """Keys `k` [L, B, Hkv, C, D] and values `v` [L, B, Hkv, C, Dv] of L layers and B rows, C slots a row. Latent attention keeps one
    head's latents and rotated channels in their places."""

    ring: int | None = None
    """How many slots positions go round in; None: the token at position p stands in slot p."""

    def __init__(
        self, layers: int, rows: int, kv_heads: int, size: int, value_size: int | None = None, *, dtype: torch.dtype, device: torch.device
    ) -> None:  # fmt: skip
        self.layers = layers
        self.k = torch.zeros((layers, rows, kv_heads, 0, size), dtype=dtype, device=device)
        self.v = torch.zeros((layers, rows, kv_heads, 0, size if value_size is None else value_size), dtype=dtype, device=device)

    @property
    def device(self) -> torch.device:
        """See `LayerState`."""
        return self.k.device

    def bytes(self, slots: int) -> int:
        """Memory of keys and values with so many slots a row."""
        layers, rows, heads, _, size = self.k.shape
        return self.k.element_size() * layers * rows * heads * slots * (size + self.v.shape[-1])

    def resize(self, slots: int) -> None:
        """Replace the buffers by larger ones that hold the same."""
        self.k, self.v = self._resized(self.k, slots), self._resized(self.v, slots)

    def clear(self, reached: int) -> None:
        """Zero what was written: attention multiplies the values of slots that are not seen by weights of 0, and 0 * NaN is NaN."""
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
            buffer[layer].transpose(1, 2)[row, slots].where(real[:, :, None, None], 0).transpose(1, 2).contiguous()
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
