"""Keys and values kept between calls, as transformers' caches: what a call can begin from, and what it leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from fastspec.errors import Unsupported
from fastspec.patches.cascade.fingerprint import check_present
from fastspec.patches.hf.compat import device_of, kept_by, layer_shapes, read_cache, rope_bound

if TYPE_CHECKING:
    from fastspec.cascade.memory import CacheManager


def check_kept(model: Any) -> None:
    """Raise `Unsupported`, naming the reason, for a model whose keys and values cannot be kept between calls."""
    name, instead = type(model).__name__, "keep nothing between calls (Cascade: memory=None)"
    if model.config.is_encoder_decoder:
        raise Unsupported(f"the cache of {name}, an encoder-decoder model, belongs to its source: {instead}")
    check_present(model)
    wanted = model.generation_config.cache_implementation
    if wanted not in (None, "hybrid"):  # beside a cache that is handed in transformers takes none, and this one is its own to unset
        raise Unsupported(f"{name} asks for cache_implementation={wanted!r}: set it to None in its generation_config, or {instead}")
    if rope_bound(model.config) is not None:
        raise Unsupported(f"the keys of {name} depend on the length of the text, by its rope_parameters: {instead}")
    reason = _not_plain(DynamicCache(config=model.config))
    if reason:
        raise Unsupported(f"{name} needs a cache with {reason}, which cannot be cut to a prefix: {instead}")


def check_room(manager: CacheManager, model: Any, tokens: int) -> None:
    """Raise `Unsupported`, before anything is computed, where the keys and values of a text of so many tokens exceed the budget."""
    shapes = layer_shapes(model.config)
    numbers = sum(heads * (key + value) for heads, key, value in (shapes[layer] for layer in set(kept_by(model.config)))) * tokens
    need = numbers * torch.empty((), dtype=model.dtype, device="cpu").element_size()
    if need > manager.budget:
        raise Unsupported(
            f"a request of up to {tokens} tokens needs {need} bytes of keys and values in {type(model).__name__}, and the cascade's memory "
            f"is {manager.budget} bytes: raise Cascade(memory=...), ask for fewer new tokens, or keep nothing (memory=None)"
        )


def past_of(manager: CacheManager, stage: int, model: Any, ids: Tensor) -> DynamicCache | None:
    """What a stage has kept of the beginning of ids [1, T], without padding: a cache of at most T - 1 tokens, the caller's own, or None.

    It goes to `model.generate(ids, attention_mask=..., **{CACHE: ...})`, where None is no cache at all; with a mask of ones, since
    transformers takes pad tokens within the text for padding. It lies on the model's device; a model laid over devices by `device_map`
    gets each layer where it was. What was kept in another dtype than the model's is not given: the model would not have computed it.
    Raises `Unsupported` for a model that `check_kept` refuses, and for several rows.
    """
    check_kept(model)
    found = manager.find(stage, _row(ids))
    if found is None or found[0][0].dtype != model.dtype:
        return None
    cache = DynamicCache(config=model.config)
    for layer in range(len(found)):
        keys, values = found.pop(0)  # the cache copies: each layer is freed before the next is copied
        if getattr(model, "hf_device_map", None) is None:
            keys, values = keys.to(device_of(model)), values.to(device_of(model))
        cache.update(keys, values, layer)
    return cache


def keep_past(manager: CacheManager, stage: int, ids: Tensor, cache: Any) -> None:
    """Keep what a call's cache holds of the text ids [1, T], prompt and answer, without padding.

    The cache holds the text's first tokens; after `generate`, with or without an assistant, all but the last. It stays the caller's.
    Raises `Unsupported` for a cache that is not plain keys and values in every layer, for one that holds more than the text, for
    several rows, and where it exceeds the manager's budget.
    """
    tokens, reason = _row(ids), _not_plain(cache)
    if reason:
        raise Unsupported(f"a cache with {reason} cannot be kept: hand in a call's DynamicCache, or keep nothing between calls")
    layers = read_cache(cache, len(cache.layers))
    if layers is None:
        return
    held = layers[0][0].shape[2]
    if held > len(tokens):
        raise Unsupported(f"the cache holds {held} tokens and the text has {len(tokens)}: pass the whole text, prompt and answer")
    manager.keep(stage, tokens[:held], layers)


def _row(ids: Tensor) -> list[int]:
    if ids.dim() != 2 or ids.shape[0] != 1:
        raise Unsupported(f"keys and values are kept by the text, one row of tokens [1, T], not {list(ids.shape)}")
    return [int(token) for token in ids[0].tolist()]


def _not_plain(cache: Any) -> str:
    """What tells a cache from one that holds every token's keys and values in every layer, where they were computed; "" for nothing.

    Kinds derived from the plain ones (windows, quantised, indexed, recurrent) hold less or more, so that only these two will do.
    """
    if type(cache) is not DynamicCache:
        return f"the class {type(cache).__name__}"
    other = sorted({type(layer).__name__ for layer in cache.layers if type(layer) is not DynamicLayer})
    if other:
        return f"layers of the class {', '.join(other)}"
    return "its layers moved to the CPU (offloading)" if cache.offloading else ""
