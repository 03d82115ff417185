"""The bridge between fastspec's cache and transformers' Cache protocol, for models without an adapter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from fastspec.errors import Unsupported
from fastspec.generation.ops import Ops
from fastspec.generation.state.attention import FullAttentionState
from fastspec.generation.state.base import Held
from fastspec.generation.state.sequence import SequenceState


class SlotCache(Cache):
    """One forward pass's view of a state: `update` writes at given slots, by how many a state goes round in, and returns the first `extent`
    slots, or the ring."""

    def __init__(self, state: SequenceState, ops: Ops, slots: Mapping[int | None, Tensor], extent: int) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self.state, self.ops, self.slots, self.extent = state, ops, slots, extent

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write [B, Hkv, N, D] of one layer -> its keys and values [B, Hkv, extent, D], each of a size of its own."""
        store, index = self.state.places[layer_idx]
        assert isinstance(store, FullAttentionState)
        for name, states, buffer in (("key", key_states, store.k), ("value", value_states, store.v)):
            held = buffer.shape[2], buffer.shape[4]
            if (states.shape[1], states.shape[3]) != held:
                raise Unsupported(
                    f"layer {layer_idx} has {states.shape[1]} {name} heads of size {states.shape[3]}, its config says {held[0]} of "
                    f"{held[1]}: fastspec makes its cache by the config"
                )
        slots = self.slots[store.ring].to(store.device)
        store.write(self.ops, index, key_states.transpose(1, 2), value_states.transpose(1, 2), slots)
        return store.k[index][:, :, : self.extent], store.v[index][:, :, : self.extent]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Committed tokens of the longest row."""
        return int(self.state.lengths.max())

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int = 0) -> tuple[int, int]:
        """Key length and offset, as the mask was made."""
        return self.extent, 0

    @property
    def is_compileable(self) -> bool:  # a plain view; nothing to compile
        """False: the pass is run as it is."""
        return False


def import_past(state: SequenceState, past: list[Held], keep: Tensor) -> None:
    """Copy what a user's cache holds of each layer into slots from 0; keep [B, T] bool drops padded slots of keys and values."""
    counts = keep.sum(1)
    width = int(counts.max())
    order = torch.argsort((~keep).int(), dim=1, stable=True)[:, :width]  # kept slots first, in order
    state.reserve(width)
    for (kind, layer), held in zip(state.owned, past, strict=True):
        kind.load(layer, held, order.to(kind.device), counts.to(kind.device))
    state.lengths.copy_(counts)


def export_span(state: SequenceState, first: Tensor, shown: Tensor) -> list[Held]:
    """What transformers keeps of slots first[b] .. of every row, layer by layer, where each computes: keys and values [B, Hkv, width, D],
    where the row's slots stand one after another in the columns that shown [B, width] bool names; other columns, and those past the row's
    length, are zero."""
    slots = first[:, None] + shown.cumsum(1) - 1
    found = slots.clamp(0, state.slots - 1), shown & (slots < state.lengths[:, None]), state.lengths
    return [kind.export(layer, *(each.to(kind.device) for each in found)) for kind, layer in state.owned]
