"""Targets whose embedding is of another width than their hidden states, or whose hidden states are several: heads are
refused by name."""

from __future__ import annotations

import pytest
from helpers.generate import prompts
from helpers.models import tiny_head
from helpers.sweep import tiny
from transformers import AutoModelForCausalLM

import fastspec


@pytest.mark.parametrize("kind, setting", [("rembert", "input_embedding_size"), ("electra", "embedding_size")])
def test_a_head_must_be_as_wide_as_the_embedding_that_it_shares(kind: str, setting: str) -> None:
    model = tiny(kind, AutoModelForCausalLM, **{setting: 32})
    with pytest.raises(
        fastspec.CheckpointError, match="64 wide and has no embedding of its own, the target's is 32 wide"
    ):
        fastspec.patch(model, eagle3=tiny_head(model))


def test_hidden_states_of_several_streams_are_refused_by_name() -> None:
    model = tiny("gemma3n_text", AutoModelForCausalLM)
    fastspec.patch(model, eagle3=tiny_head(model))
    with pytest.raises(
        fastspec.Unsupported, match=r"Gemma3nForCausalLM gives hidden states of shape .* for tokens of shape .*nasd"
    ):
        model.generate(**prompts(5, 9), max_new_tokens=4, do_sample=False, assistant="eagle3")
