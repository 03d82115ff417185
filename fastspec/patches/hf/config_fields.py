"""Sizes and kinds of a decoder's layers, by the names that families and releases of transformers give them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

from fastspec.generation.heads.bound import rows_in
from fastspec.generation.layer_state import DeltaShape


def attention_name(config: Any) -> str | None:
    """The `attn_implementation` of a configuration."""
    return getattr(config.get_text_config(), "_attn_implementation", None)


def experts_name(config: Any) -> str | None:
    """The `experts_implementation` of a configuration."""
    return getattr(config.get_text_config(), "_experts_implementation", None)


def layer_count(config: Any) -> int:
    """Number of a decoder's layers, from its config."""
    config = config.get_text_config()
    if config.is_encoder_decoder:  # T5 and BART have names of their own
        return getattr(config, "decoder_layers", None) or config.num_decoder_layers
    return config.num_hidden_layers


def layer_shapes(config: Any) -> list[tuple[int, int, int]]:
    """Key heads, and the sizes of a key and a value, of every layer of a decoder, as its caches hold them.
    `per_layer_config` says of every layer what differs (Gemma 4's `head_dim`), which raises for the whole."""
    config, layers = config.get_text_config(), layer_count(config)
    if {"head_dim", "num_key_value_heads"} & set(getattr(config, "per_layer_attributes", None) or ()):
        return [_shape(config.per_layer_config[layer]) for layer in range(layers)]
    heads, key, value = _shape(config)
    kinds, wide = getattr(config, "layer_types", None) or [""] * layers, DOUBLED.get(config.model_type)
    return [(2 * heads if kind == wide else heads, key, value) for kind in kinds[:layers]]


DOUBLED = {"mimo_v2_flash": "sliding_attention"}
"""Model types -> the kind of their layers that has twice the key heads of the others, which no setting says."""


def _shape(config: Any) -> tuple[int, int, int]:
    """Latent attention keeps a head of latents and one of rotated channels since transformers 5.20."""
    latent = _setting(config, "kv_lora_rank")
    if latent:
        return 1, latent, config.qk_rope_head_dim
    heads, size = _heads(config)
    return heads, size, _setting(config, "v_head_dim") or size


def _setting(config: Any, name: str) -> Any:
    """A setting of a configuration; None where its class knows none of this name: a key left over is not read."""
    return getattr(config, name, None) if name in _parameters(type(config).__init__) else None


@cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _heads(config: Any) -> tuple[int, int]:
    if config.is_encoder_decoder:
        heads = getattr(config, "decoder_attention_heads", None) or config.num_heads
        return heads, getattr(config, "d_kv", None) or config.d_model // heads
    heads = config.num_attention_heads
    if getattr(config, "new_decoder_architecture", False):  # Falcon's caches hold its keys once per query head
        return heads, config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or (1 if getattr(config, "multi_query", False) else heads)
    return kv_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def kept_by(config: Any) -> list[int]:
    """Layer whose keys and values each layer reads: itself, or one in front of the shared ones, of its kind."""
    config = config.get_text_config()
    layers, kinds = layer_count(config), getattr(config, "layer_types", None)
    first = layers - (_setting(config, "num_kv_shared_layers") or 0)
    if kinds is None:
        return list(range(layers))
    last = {kinds[layer]: layer for layer in range(first)}  # of its kind
    return [layer if layer < first else last[kinds[layer]] for layer in range(layers)]


RECURRENT = "linear_attention"
"""Name of a layer with a recurrent state in configurations, in `layer_types`."""


def recurrent_layers(config: Any) -> list[bool]:
    """True for the layers of a decoder that keep a recurrent state."""
    layers = layer_count(config)
    kinds = getattr(config.get_text_config(), "layer_types", None)
    return [False] * layers if kinds is None else [kind == RECURRENT for kind in kinds[:layers]]


def delta_shape(config: Any) -> DeltaShape:
    """The sizes of a decoder's Gated DeltaNet layers."""
    config = config.get_text_config()
    heads = config.linear_num_key_heads, config.linear_num_value_heads
    return DeltaShape(*heads, config.linear_key_head_dim, config.linear_value_head_dim, config.linear_conv_kernel_dim)


def varied_lengths(config: Any) -> list[str]:
    """Settings of what a layer sees that differ from layer to layer; reading one from the whole raises."""
    return sorted(set(LENGTHS) & set(getattr(config.get_text_config(), "per_layer_attributes", None) or ()))


LENGTHS = ("sliding_window", "attention_chunk_size", "max_position_embeddings")


def table_rows(module: Any, config: Any) -> int:
    """Rows of an embedding or an LM head; the configuration's where the module tells none."""
    rows = rows_in(module)
    return int(config.get_text_config().vocab_size) if rows is None else rows


def position_limit(config: Any) -> int | None:
    """The longest sequence the positions of a model allow, or None where nothing limits them."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def rope_bound(config: Any) -> int | None:
    """Length up to which rotary frequencies do not depend on the text's, or None: "dynamic" and "longrope" choose one
    set for a whole pass by its largest position."""
    config = config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type")
    if kind == "longrope":
        return rope.get("original_max_position_embeddings") or config.max_position_embeddings
    return config.max_position_embeddings if kind == "dynamic" else None
