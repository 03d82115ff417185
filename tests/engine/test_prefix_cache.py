"""Prefix caching in open batches: a prompt that begins like a row's text is read from there on, and is answered as one
that is read whole."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from helpers.captured import stand_in
from helpers.families import recurrent, windowed
from helpers.generate import NEVER, TREE, shallow_model
from helpers.models import tiny_head
from helpers.open import GREEDY, SECONDS, Gate, alone, made, texts, told
from torch import Tensor

import fastspec
from fastspec.generation import layer_state
from fastspec.generation.engine import batching, prefix_cache
from fastspec.patches.hf.model import HFModel

FAMILIES: dict[str, Any] = {
    "llama": shallow_model,
    "mistral": lambda **over: windowed("mistral", **over),
    "gemma2": lambda **over: windowed("gemma2", **over),
    "gemma3_text": lambda **over: windowed("gemma3_text", **over),
    "gpt_oss": lambda **over: windowed("gpt_oss", **over),
    "llama4_text": lambda **over: windowed("llama4_text", **over),
    "mixtral": lambda **over: windowed("mixtral", **over),
    "qwen3_5": lambda **over: recurrent(**over),
}
TURNS, ASKED, ANSWERED = 10, 7, 9
LENGTH = {"max_position_embeddings": 512}


@pytest.fixture
def read(monkeypatch) -> list[int]:
    """The tokens of every pass over prompts, once a batch is open."""
    found: list[int] = []
    prefill = HFModel.prefill

    def reading(self: Any, ids: Tensor, counts: Tensor) -> Any:
        found.append(int(counts.sum()))
        return prefill(self, ids, counts)

    monkeypatch.setattr(HFModel, "prefill", reading)
    return found


@pytest.fixture(autouse=True)
def short(monkeypatch) -> None:
    """Prefixes of few tokens are kept."""
    monkeypatch.setattr("fastspec.patches.continuous.LEAST", 2)


def whole(text: Tensor) -> dict[str, Tensor]:
    """No token of a text is padding."""
    return {"attention_mask": torch.ones_like(text)[None]}


def talk(batch: Any, plain: Any, turns: int = TURNS) -> None:
    """A conversation, each answer of which is that of a cold start."""
    text = texts(12)[0]
    for turn in range(turns):
        text = torch.cat((text, texts(ASKED, seed=turn + 1)[0]))
        [answer] = told([batch.submit(text, max_new_tokens=ANSWERED, **GREEDY, **whole(text))])
        assert alone(plain, text, ANSWERED, **whole(text)) == answer
        text = torch.tensor(answer)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("assistant", ["autoregressive", TREE, "nasd"], ids=str)
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_conversation_is_answered_as_cold_and_read_once(monkeypatch, read, kind, assistant, captured):
    """Each turn reads what was asked, and the last token of the answer before it."""
    if captured:
        stand_in(monkeypatch)
        monkeypatch.setattr("fastspec.patches.continuous.LEAST_CAPTURED", 2)
        monkeypatch.setattr(batching, "ASYNCHRONOUS_AFTER", 0)
    plain, model = FAMILIES[kind](**LENGTH), FAMILIES[kind](**LENGTH)
    fastspec.patch(model, eagle3=tiny_head(model))
    with fastspec.continuous(model, assistant, rows=4, max_length=256) as batch:
        read.clear()
        talk(batch, plain)
        expected = [12 + ASKED] + [ASKED + 1] * (TURNS - 1)
        if kind != "qwen3_5":
            assert [count for count in read if count > 1] == expected
