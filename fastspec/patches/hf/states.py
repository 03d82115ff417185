"""What the layers of a transformers decoder keep of a text: one state for all layers of a kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fastspec.generation.state.attention import FullAttentionState
from fastspec.generation.state.base import LayerState
from fastspec.generation.state.recurrent import DeltaState
from fastspec.generation.state.sequence import SequenceState
from fastspec.generation.state.window import WindowState, ring_of
from fastspec.kernels.attention.reference import Span
from fastspec.patches.hf.compat import cache_geometry, delta_shape, device_of, recurrent_layers


def sequence_state(
    model: Any, spans: Sequence[Span | None], *, rows: int, capacity: int, tail: int, chunk: int, bounded: bool
) -> SequenceState:  # fmt: skip
    """The state of `rows` texts of at most `capacity` tokens, for passes over up to `tail` nodes or `chunk` tokens of a prompt.

    Where it is `bounded`, layers that see a span of the text keep no more than they can see again.
    """
    _, kv_heads, size = cache_geometry(model.config)
    device, dtype = device_of(model), model.dtype
    keys: list[Span | str | None] = [
        "recurrent" if recurrent else span if bounded else None
        for span, recurrent in zip(spans, recurrent_layers(model.config), strict=True)
    ]
    made: list[LayerState] = []
    found = list(dict.fromkeys(keys))
    for key in found:
        layers = keys.count(key)
        if isinstance(key, Span):
            ring = ring_of(key, tail, chunk)
            made.append(WindowState(layers, rows, kv_heads, size, span=key, ring=ring, dtype=dtype, device=device))
        elif key is None:
            made.append(FullAttentionState(layers, rows, kv_heads, size, dtype=dtype, device=device))
        else:
            made.append(DeltaState(layers, rows, tail, delta_shape(model.config), dtype=dtype, device=device))
    order = [found.index(key) for key in keys]
    return SequenceState(made, rows=rows, capacity=capacity, tail=tail, device=torch.device(device), order=order)
