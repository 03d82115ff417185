"""What the layers of a transformers decoder keep of a text: one state for all layers of a kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastspec.generation.state.attention import FullAttentionState
from fastspec.generation.state.base import LayerState
from fastspec.generation.state.recurrent import DeltaState
from fastspec.generation.state.sequence import SequenceState
from fastspec.generation.state.window import WindowState, ring_of
from fastspec.kernels.attention.reference import Span
from fastspec.patches.hf.compat import delta_shape, device_of, dtype_of, kept_by, layer_shapes, recurrent_layers
from fastspec.patches.hf.placement import layer_devices
from fastspec.patches.hf.shards import local_heads


def sequence_state(
    model: Any, spans: Sequence[Span | None], *, rows: int, capacity: int, tail: int, chunk: int, bounded: bool,
    first: int | None = None,
) -> SequenceState:  # fmt: skip
    """The state of `rows` texts of at most `capacity` tokens, for passes over up to `tail` nodes or `chunk` tokens of a prompt. What a
    layer keeps is where it computes.

    Where it is `bounded`, layers that see a span of the text keep no more than they can see again. `first` is that of `SequenceState`.
    """
    dtype, owners, devices = dtype_of(model), kept_by(model.config), layer_devices(model)
    kinds: list[tuple[Any, ...]] = [
        ("recurrent",) if recurrent else (span if bounded else None, local_heads(model, heads), *sizes)
        for span, (heads, *sizes), recurrent in zip(spans, layer_shapes(model.config), recurrent_layers(model.config), strict=True)
    ]
    keys = list(zip(kinds, devices, strict=True))
    of = {key: [layer for layer in dict.fromkeys(owners) if keys[layer] == key] for key in keys}
    made: list[LayerState] = []
    for (key, device), layers in of.items():
        if key == ("recurrent",):
            made.append(DeltaState(len(layers), rows, tail, delta_shape(model.config), dtype=dtype, device=device))
        elif key[0] is None:
            made.append(FullAttentionState(len(layers), rows, *key[1:], dtype=dtype, device=device))
        else:
            ring = ring_of(key[0], tail, chunk)
            made.append(WindowState(len(layers), rows, *key[1:], span=key[0], ring=ring, dtype=dtype, device=device))
    found = list(of)
    order = [(found.index(keys[owner]), of[keys[owner]].index(owner)) for owner in owners]
    return SequenceState(made, rows=rows, capacity=capacity, tail=tail, device=device_of(model), order=order, first=first)
