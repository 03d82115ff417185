"""Caches: what a decoder's layers keep of a text, as fastspec's states, and as transformers' own cache.

CACHE is the installed version's name of an argument of `generate`, of what it hands to a custom loop and of a field of
its outputs; a forward of someone else's class may still have the old one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationMixin
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer

from fastspec.errors import Unsupported
from fastspec.generation.layer_state import DeltaState, FullAttentionState, LayerCache, LayerState, WindowState, ring_of
from fastspec.generation.ops import Ops
from fastspec.generation.sequence_state import SequenceState
from fastspec.kernels.attention.reference import Span
from fastspec.patches.hf.compat import device_of, dtype_of
from fastspec.patches.hf.config_fields import delta_shape, kept_by, layer_shapes, recurrent_layers
from fastspec.patches.hf.parallel import layer_devices, local_heads

_IS_RENAMED = "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
"""Delete this, and the old name, when 5.24 is the oldest version and transformers takes no old name (6.0)."""
OLD = "past_key_values"
_NAMES = ("cache", OLD) if _IS_RENAMED else (OLD,)
CACHE = _NAMES[0]
"""The installed version's name."""
GIVEN = (*_NAMES, "cache_params") if _IS_RENAMED else _NAMES
"""Under which names a user's cache comes to `generate`: transformers takes old ones for the new one, and warns."""


def given_cache(given: dict[str, Any]) -> Any:
    """The cache among the arguments of `generate`, or None: of several names the first, as in transformers."""
    return next((given[name] for name in GIVEN if name in given), None)


def cache_argument(forward: Callable[..., Any]) -> str:
    """The name of a forward's argument for a cache; the version's, where it names none."""
    names = inspect.signature(forward).parameters
    return next((name for name in _NAMES if name in names), CACHE)


def kept_cache(output: Any) -> Any:
    """The cache that an output of `generate` or of one of transformers' models holds."""
    return getattr(output, CACHE)


class SlotCache(Cache):
    """A pass's view of a state: `update` writes at given slots and returns the first `extent` slots, or the ring."""

    def __init__(self, state: SequenceState, ops: Ops, slots: Mapping[int | None, Tensor], extent: int) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self.state, self.ops, self.slots, self.extent = state, ops, slots, extent

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [B, Hkv, N, D] of one layer -> its keys and values [B, Hkv, extent, D], each of a size of its own."""
        store, index = self.state.places[layer_idx]
        assert isinstance(store, FullAttentionState)
        for name, states, buffer in (("key", key_states, store.k), ("value", value_states, store.v)):
            held = buffer.shape[2], buffer.shape[4]
            if (states.shape[1], states.shape[3]) != held:
                raise Unsupported(
                    f"layer {layer_idx} has {states.shape[1]} {name} heads of size {states.shape[3]}, its config says "
                    f"{held[0]} of {held[1]}: fastspec makes its cache by the config"
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


def import_past(state: SequenceState, past: list[LayerCache], keep: Tensor) -> None:
    """Copy a user's cache into slots from 0 on; keep [B, T] bool drops padded slots of keys and values."""
    counts = keep.sum(1)
    width = max(1, int(counts.max()))  # of padding alone too, a window has a column to point at
    order = torch.argsort((~keep).int(), dim=1, stable=True)[:, :width]  # kept slots first, in order
    state.reserve(width)
    for (kind, layer), held in zip(state.owned, past, strict=True):
        kind.load(layer, held, order.to(kind.device), counts.to(kind.device))
    state.lengths.copy_(counts)


def export_span(state: SequenceState, first: Tensor, shown: Tensor) -> list[LayerCache]:
    """Slots first[b] .. of every row as transformers keeps them, layer by layer: keys and values [B, Hkv, width, D],
    the row's slots in the columns that shown [B, width] bool names; all other columns are zero."""
    slots = first[:, None] + shown.cumsum(1) - 1
    found = slots.clamp(0, state.slots - 1), shown & (slots < state.lengths[:, None]), state.lengths
    return [kind.export(layer, *(each.to(kind.device) for each in found)) for kind, layer in state.owned]


PADDED = "fastspec_padded"
"""Attribute of a cache in which an assisted call has left zeros for what its mask hid: the columns, of any row."""


def note_padding(cache: Any, keep: Tensor, past: int) -> None:
    """Note on a cache that keep [B, T] bool hides tokens behind the first `past`: it holds zeros there."""
    hidden: list[int] = (~keep[:, past:]).any(0).nonzero().flatten().tolist()
    if hidden:
        setattr(cache, PADDED, getattr(cache, PADDED, frozenset()) | {past + column for column in hidden})


def shown_padding(cache: Any, keep: Tensor) -> list[int]:
    """Rows of which keep [B, T] bool shows columns that an earlier mask hid and that are still empty."""
    length = int(cache.get_seq_length())
    columns: frozenset[int] = getattr(cache, PADDED, frozenset())
    if not columns:
        return []
    held = [layer for layer in cache.layers if not is_recurrent(layer) and layer.keys is not None]
    longest = max((layer.keys.shape[2] for layer in held), default=0)
    times, rest = divmod(held[0].keys.shape[0] if held else 0, len(keep))
    if rest or not times:  # of another call, which refuses it itself
        return []
    blank = keep.repeat_interleave(times, 0)[:, :length]  # beams have one row each
    others = sorted(set(range(length)) - columns)
    blank[:, others] = False  # whatever is read there
    blank[:, : max(0, length - longest)] = False  # dropped by every layer
    for states in (each for layer in held for each in (layer.keys, layer.values)):
        if not bool(blank.any()):
            break
        blank &= ~_last(states, length).any(3).any(1).to(blank.device)
    return blank.any(1).nonzero().flatten().tolist()


def sequence_state(
    model: Any,
    spans: Sequence[Span | None],
    *,
    rows: int,
    capacity: int,
    tail: int,
    chunk: int,
    bounded: bool,
    first: int | None = None,
) -> SequenceState:
    """The state of `rows` texts of at most `capacity` tokens, for passes over up to `tail` nodes or `chunk` tokens of a
    prompt, each layer's where it computes. Where it is `bounded`, layers keep no more than the span that they see.
    `first` is that of `SequenceState`."""
    dtype, owners, devices = dtype_of(model), kept_by(model.config), layer_devices(model)
    shapes, recurrent = layer_shapes(model.config), recurrent_layers(model.config)
    alike: dict[tuple[Any, ...], list[int]] = {}
    for layer in dict.fromkeys(owners):
        span = spans[layer] if bounded else None
        alike.setdefault((recurrent[layer], span, shapes[layer], devices[layer]), []).append(layer)
    made: list[LayerState] = []
    for (has_delta, span, (heads, key, value), device), held in alike.items():
        count, heads = len(held), local_heads(model, heads)
        if has_delta:
            made.append(DeltaState(count, rows, tail, delta_shape(model.config), dtype=dtype, device=device))
        elif span is None:
            made.append(FullAttentionState(count, rows, heads, key, value, dtype=dtype, device=device))
        else:
            ring = ring_of(span, tail, chunk)
            made.append(WindowState(count, rows, heads, key, value, span=span, ring=ring, dtype=dtype, device=device))
    places = {layer: (part, at) for part, held in enumerate(alike.values()) for at, layer in enumerate(held)}
    order = [places[owner] for owner in owners]
    return SequenceState(
        made, rows=rows, capacity=capacity, tail=tail, device=device_of(model), order=order, first=first
    )


def read_cache(cache: Any, layers: int) -> list[LayerCache] | None:
    """Contents of a user's cache for each layer that keeps anything: keys and values [B, Hkv, T, D], zeros where a
    window has dropped them, or a recurrent layer's inputs and state; None when it is empty or absent."""
    if cache is None or int(cache.get_seq_length()) == 0:
        return None
    length = int(cache.get_seq_length())
    return [
        (layer.conv_states[0], layer.recurrent_states[0])
        if is_recurrent(layer)
        else (_last(layer.keys, length), _last(layer.values, length))
        for layer in held_layers(cache, layers)
    ]


def held_layers(cache: Any, layers: int) -> list[Any]:
    """The layers of a filled cache that keep anything."""
    return [layer for layer in cache.layers[:layers] if is_recurrent(layer) or layer.keys is not None]


def changing_part(cache: Any) -> Any:
    """The part of a cache, itself or a layer, that may give back other keys and values than it is given: its `update`
    is not transformers' own, or it quantises; or None. A cache without layers makes them of a class that it names.

    Quantising layers have a common base since transformers 5.18; delete its other name when that is the oldest.
    """
    for part in (cache, *cache.layers, getattr(cache, "layer_class_to_replicate", None)):
        update = getattr(part, "update", None)  # a recurrent layer has none
        names = {base.__name__ for base in (part if isinstance(part, type) else type(part)).__mro__}
        own = update is None or str(getattr(update, "__module__", "")).startswith("transformers.")
        if not own or {"BaseQuantizedLayer", "QuantizedLayer"} & names:
            return part
    return None


def records_past(cache: Any) -> bool:
    """True where a cache's windows or recurrent states keep what they held before, to be cropped."""
    return any(getattr(layer, "record_past", False) for layer in cache.layers)


def keeps_all(cache: Any, layer: int) -> bool:
    """True where a cache keeps every token of a layer; layers that are made when they are needed do."""
    return layer >= len(cache.layers) or not getattr(cache.layers[layer], "is_sliding", False)


def kept_lengths(cache: Any, layers: int) -> list[int | None]:
    """Last tokens that a pass of one token finds in each layer of a cache, its own counted; None for all."""
    kept = [None if keeps_all(cache, layer) else cache.layers[layer] for layer in range(layers)]
    return [None if layer is None else getattr(layer, "sliding_window", None) or layer.max_cache_len for layer in kept]


def is_recurrent(layer: Any) -> bool:
    """True where a layer of a cache keeps the last inputs of a convolution and a state."""
    return isinstance(layer, LinearAttentionLayer)


def text_length(held: list[LayerCache] | None) -> int:
    """Number of tokens that `read_cache` has read, by layers whose keys and values are of one length."""
    return max((keys.shape[2] for keys, values in held or () if keys.shape[:-1] == values.shape[:-1]), default=0)


def _last(states: Tensor, length: int) -> Tensor:
    """The tokens [B, Hkv, T, D] of states that hold all of them, or the last ones."""
    return F.pad(states, (0, 0, length - states.shape[2], 0)) if states.shape[2] < length else states[:, :, :length]


def fill_cache(cache: Any, kept: int, more: list[LayerCache]) -> Any:
    """Append keys and values [B, Hkv, T, D] per layer to a cache of `kept` tokens by its own `update`; a recurrent
    layer's inputs [B, C, K] and state replace what it has."""
    if int(cache.get_seq_length()) != kept:
        raise RuntimeError(
            f"the cache changed during generation: it held {kept} tokens and now holds {cache.get_seq_length()}"
        )
    for layer, (keys, values) in enumerate(more):
        # a cache that was not told of layers makes them now
        if layer < len(cache.layers) and is_recurrent(cache.layers[layer]):
            cache.update_conv_state(keys, layer, conv_kernel_size=keys.shape[-1])
            cache.update_recurrent_state(values, layer)
        else:
            cache.update(keys, values, layer)
    return cache
