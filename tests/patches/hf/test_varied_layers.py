"""Layers of several head sizes, layers that read another's keys and values, and inputs of their own for every layer:
Gemma 4."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.devices import CUDA
from helpers.generate import conversation, free, prompts
from helpers.models import tiny_head, tiny_model

import fastspec
from fastspec.patches.hf.cache import kept_cache

SPAN, NEW = 8, 18
ROWS = prompts(5, 11)
SLIDING, FULL = "sliding_attention", "full_attention"
SIZES = {
    "num_hidden_layers": 6,
    "layer_types": [SLIDING, FULL] * 3,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "sliding_window": SPAN,
    "tie_word_embeddings": False,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 8,
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "values are keys": {"attention_k_eq_v": True},
    "no inputs of layers": {"hidden_size_per_layer_input": 0},
    "shared keys": {"num_kv_shared_layers": 3},
    "shared, wide": {"num_kv_shared_layers": 2, "attention_k_eq_v": True, "use_double_wide_mlp": True},
    "experts": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
}


def varied(kind: str, seed: int = 0, **over: Any) -> Any:
    return tiny_model("gemma4_text", seed, **{**SIZES, **KINDS[kind], **over})


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("kind", KINDS)
def test_every_assistant_gives_the_same_tokens(kind: str, device: str) -> None:
    model, inputs = varied(kind).to(device), {name: each.to(device) for name, each in ROWS.items()}
    expected = free(model, inputs, NEW)
    fastspec.patch(model, speculative=tiny_model(num_hidden_layers=2).to(device), eagle3=tiny_head(model).to(device))
    tree = fastspec.Eagle3(depth=4, top_k=4, total_tokens=16)
    more = "autoregressive", "nasd", fastspec.Speculative(gamma=3, branches=3)
    for assistant in (*(more if kind == next(iter(KINDS)) else ()), tree, fastspec.ContinuousBatch("nasd", rows=1)):
        assert free(model, inputs, NEW, assistant=assistant) == expected, assistant
    assert fastspec.report(model).mode == "adapter gemma4_text"


@pytest.mark.some("plain", "shared, wide", "experts")
@pytest.mark.parametrize("kind", KINDS)
def test_without_the_adapter(kind: str) -> None:
    """A hook on a layer leaves the modules' own forward."""
    model = varied(kind)
    expected = free(model, ROWS, NEW)
    model.model.layers[1].register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="generic"), fastspec.patched(model):
        assert free(model, ROWS, NEW, assistant="nasd") == expected


def test_early_layers_draft_though_they_share_keys() -> None:
    model = varied("shared keys")
    expected = free(model, ROWS, NEW)
    with fastspec.patched(model):
        for layers in (2, 5):
            assert free(model, ROWS, NEW, assistant=fastspec.Speculative(early_exit=layers)) == expected


@pytest.mark.some("shared keys", "values are keys")
@pytest.mark.parametrize("kind", ["plain", "shared keys", "values are keys"])
def test_turns_go_on_from_a_cache(kind: str) -> None:
    model = varied(kind)
    expected = texts_and_caches(model, {})
    fastspec.patch(model)
    found = texts_and_caches(model, {"assistant": "nasd"})
    for (text, cache), (wanted, wanted_cache) in zip(found, expected, strict=True):
        assert text == wanted
        for mine, theirs in zip(cache, wanted_cache, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


def texts_and_caches(model: Any, options: dict[str, Any]) -> list[Any]:
    """Texts, and what the cache holds of real tokens, after each of three turns."""
    found = []
    for out in conversation(model, ROWS, [options] * 3):
        layers = [layer for layer in kept_cache(out).layers if layer.keys is not None]
        real = torch.ones_like(out.sequences[:, :-1])
        real[:, : ROWS["attention_mask"].shape[1]] = ROWS["attention_mask"]
        kept = [each for layer in layers for each in (layer.keys, layer.values)]
        found.append((out.sequences.tolist(), [each * real[:, None, -each.shape[2] :, None] for each in kept]))
    return found
