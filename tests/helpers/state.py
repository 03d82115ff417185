"""The state of a model that has full attention in every layer, as the tests of buffers make it."""

from __future__ import annotations

from typing import Any

import torch

from fastspec.generation.layer_state import FullAttentionState
from fastspec.generation.sequence_state import SequenceState


class AttentionState(SequenceState):
    """Keys `k` and values `v` [L, B, Hkv, C, D] behind a length per row."""

    def __init__(
        self,
        layers: int,
        rows: int,
        heads: int,
        capacity: int,
        tail: int,
        size: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        device = torch.device("cpu")
        self.attention = FullAttentionState(layers, rows, heads, size, dtype=dtype, device=device)
        super().__init__([self.attention], rows=rows, capacity=capacity, tail=tail, device=device)

    def __getattr__(self, name: str) -> Any:
        if name not in ("k", "v", "write"):
            raise AttributeError(name)
        return getattr(self.attention, name)
