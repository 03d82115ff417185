"""Calls as long as the model's windows and positions allow give what the model gives; longer ones are refused by
name."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from helpers.generate import free, prompts
from helpers.models import tiny_model
from helpers.vision import seeing
from transformers import (
    BltConfig,
    BltForCausalLM,
    DogeConfig,
    DogeForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MistralConfig,
    MistralForCausalLM,
)

import fastspec
from fastspec.patches.hf import limits

ROWS = prompts(5, 9)
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "max_position_embeddings": 512,
}
ASSISTANTS = "autoregressive", "nasd", fastspec.Speculative(gamma=3, branches=3)


def _patched(kind: str, **over: Any) -> Any:
    return fastspec.patch(
        tiny_model(kind, num_hidden_layers=2, **over), speculative=tiny_model(kind, seed=1, num_hidden_layers=1, **over)
    )


@pytest.mark.some("phi3", "gpt_neox", "xglm")
@pytest.mark.parametrize("kind", ["phi3", "stablelm", "olmo2", "gpt_neox", "persimmon", "xglm"])
def test_computed_positions_go_on_past_the_limit(kind: str) -> None:
    model = _patched(
        kind, max_position_embeddings=32, **({"original_max_position_embeddings": 32} if kind == "phi3" else {})
    )
    expected = free(model, ROWS, 30)
    if kind == "phi3" and limits.DROPS_CACHES:
        with pytest.raises(fastspec.Unsupported, match="begins this family's caches anew past 32 tokens"):
            free(model, ROWS, 30, assistant="nasd")
        return
    for assistant in ASSISTANTS:
        assert free(model, ROWS, 30, assistant=assistant) == expected


@pytest.mark.some("gpt2", "opt", "codegen")
@pytest.mark.parametrize("kind", ["gpt2", "opt", "gptj", "gpt_bigcode", "codegen"])
def test_a_table_of_positions_ends(kind: str) -> None:
    model = _patched(kind, max_position_embeddings=32, **({"rotary_dim": 8} if kind in ("gptj", "codegen") else {}))
    expected = free(model, ROWS, 24)  # 33 tokens: the last has no position
    with pytest.raises((IndexError, RuntimeError)):
        free(model, ROWS, 25)
    for assistant in ASSISTANTS:
        assert free(model, ROWS, 24, assistant=assistant) == expected
        with pytest.raises(
            fastspec.Unsupported, match=r"may reach 34 tokens.*positions end at 32.*at most 33, prompt included"
        ):
            free(model, ROWS, 25, assistant=assistant)


def test_a_window_is_no_matter_of_drafts() -> None:
    model, draft = tiny_model("llama"), tiny_model("mistral", sliding_window=16, num_hidden_layers=2)
    fastspec.patch(model, speculative=draft)
    assert free(model, ROWS, 40, assistant="speculative") == free(model, ROWS, 40)


def _llama4(**over: Any) -> Any:
    sizes = {
        **SIZES,
        "head_dim": 16,
        "intermediate_size_mlp": 96,
        "num_local_experts": 2,
        "no_rope_layers": [1, 0],
        **over,
    }
    return Llama4ForCausalLM(Llama4TextConfig(**sizes)).eval()


def _hooked(model: Any) -> Any:
    """The model in generic mode."""
    model.model.layers[0].register_forward_hook(lambda *_: None)
    return model


WINDOWED = {
    "doge": (lambda: DogeForCausalLM(DogeConfig(**SIZES, keep_window_size=250)).eval(), "keep_window_size"),
    "llama4 scaling, generic": (lambda: _hooked(_llama4(attention_chunk_size=500, floor_scale=250)), "floor_scale"),
}


@pytest.mark.parametrize("kind", WINDOWED)
def test_settings_that_cut_long_texts_bound_the_call(kind: str) -> None:
    make, message = WINDOWED[kind]
    torch.manual_seed(0)
    model = make()
    expected = free(model, ROWS, 30)
    with fastspec.patched(model):
        assert free(model, ROWS, 30, assistant="nasd") == expected
        with pytest.raises(fastspec.Unsupported, match=message):
            free(model, ROWS, 300, assistant="nasd")


def test_falcons_new_layout_works() -> None:
    model = _patched("falcon", new_decoder_architecture=True, num_kv_heads=2, alibi=False)
    expected = free(model, ROWS)
    for assistant in ASSISTANTS:
        assert free(model, ROWS, assistant=assistant) == expected


def _two_windows() -> Any:
    kinds = {
        "layer_types": ["sliding_attention"] * 2,
        "per_layer_config": {0: {"sliding_window": 8}, 1: {"sliding_window": 16}},
    }
    return MistralForCausalLM(MistralConfig(**SIZES, **kinds))


def _blt() -> Any:
    part = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 1,
        "intermediate_size": 32,
    }
    parts = {f"{name}_config": {**part, "vocab_size": 260} for name in ("patcher", "encoder", "decoder", "global")}
    return BltForCausalLM(BltConfig(**parts, vocab_size=260, encoder_hash_byte_group_vocab=100))


@pytest.mark.parametrize(
    "make, message", [(_two_windows, "layers that differ in sliding_window"), (_blt, "BltForCausalLM")]
)
def test_models_of_several_sizes_are_refused_at_patch(make: Any, message: str) -> None:
    with pytest.raises(fastspec.Unsupported, match=message):
        fastspec.patch(make())


def test_a_prompt_past_the_rotary_positions_runs_on():
    """As in plain `generate`: rotary embeddings are computed for any position, and a table of the vision tower's bounds
    no text."""
    for make in (partial(tiny_model, "llama"), partial(tiny_model, "persimmon"), partial(seeing, "llava")):
        plain, model = (make(max_position_embeddings=16) for _ in range(2))
        options = {**prompts(20, 11), "max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
        want = plain.generate(**options)
        assert fastspec.patch(model).generate(**options, assistant="nasd").tolist() == want.tolist()
