"""Targets whose embedding is of another width than their hidden states, or whose hidden states are several: heads are
refused by name."""

from __future__ import annotations

import pytest
import torch
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


@pytest.mark.parametrize(
    "kind, told", [("gemma3n_text", "hidden states of shape"), ("longcat_flash", "no hidden state behind layer")]
)
def test_hidden_states_of_several_streams_or_of_fewer_layers_are_refused_by_name(kind: str, told: str) -> None:
    model = tiny(kind, AutoModelForCausalLM)
    with pytest.raises(
        fastspec.Unsupported, match=rf"{type(model).__name__} gives {told} .* for tokens of shape .*nasd"
    ):
        fastspec.patch(model, eagle3=tiny_head(model))
    fastspec.patch(model)


def test_a_head_for_a_model_that_fails_is_refused_by_name() -> None:
    model = tiny("gpt2", AutoModelForCausalLM)
    model.transformer.h[0].mlp.c_fc.bias.data = torch.ones(3)
    with pytest.raises(fastspec.Unsupported, match=r"GPT2LMHeadModel fails over two tokens .*RuntimeError"):
        fastspec.patch(model, eagle3=tiny_head(model))
    assert "generate" not in vars(model)
