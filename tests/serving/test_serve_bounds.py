"""The last value of a request's field that is taken, and the first one that is refused."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException
from helpers.training import small_tokenizer
from transformers import GenerationConfig

from fastspec.programs.serving import handlers
from fastspec.programs.serving.requests import GREEDY_BELOW, STOP_LENGTH, Limits, read

BOUNDS: list[tuple[str, Any, Any]] = [
    ("max_tokens", 1, 0),
    ("max_tokens", 50, 51),
    ("max_completion_tokens", 50, 51),
    ("max_output_tokens", 50, 51),
    ("stop", "w", ""),
    ("stop", ["w"] * 16, ["w"] * 17),
    ("stop", "w" * STOP_LENGTH, "w" * (STOP_LENGTH + 1)),
    ("stop", ["w" * 128] * 2, ["w" * 128, "w" * 129]),
    ("seed", -(2**63), -(2**63) - 1),
    ("seed", 2**63 - 1, 2**63),
    ("temperature", 0, -0.01),
    ("temperature", 100, 100.01),
    ("top_p", 1e-6, 0),
    ("top_p", 1, 1.01),
    ("frequency_penalty", -0.99, -1),
    ("frequency_penalty", 100, 100.01),
    ("logit_bias", {"5": -100}, {"5": -100.01}),
    ("logit_bias", {"5": 100}, {"5": 100.01}),
    ("n", 1, 2),
    ("n", 1, 0),
    ("seed", 1, True),
]


@pytest.mark.parametrize(("name", "last", "first"), BOUNDS)
def test_what_a_field_may_hold_ends_where_it_says(name: str, last: Any, first: Any) -> None:
    read({"prompt": "w5", name: last}, "id", Limits(tokens=50), "prompt")
    with pytest.raises(HTTPException) as refused:
        read({"prompt": "w5", name: first}, "id", Limits(tokens=50), "prompt")
    assert refused.value.status_code == 400


@pytest.mark.parametrize("name", ["top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"])
def test_shares_in_a_generation_config_are_from_0_to_1(name: str) -> None:
    for value, fits in ((0, True), (1, True), (-0.01, False), (1.01, False)):
        body = {"prompt": "w5", "generation_config": json.dumps({name: value})}
        if fits:
            read(body, "id", Limits(), "prompt")
        else:
            with pytest.raises(HTTPException) as refused:
                read(body, "id", Limits(), "prompt")
            assert name in refused.value.detail


def test_a_prompt_of_all_the_room_leaves_none_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "LONG", 10)
    batch = SimpleNamespace(max_length=20)
    made = SimpleNamespace(tokenizer=small_tokenizer(), model_manager=SimpleNamespace(batch=batch))
    asyncio.run(handlers.Checked._check_length(made, ["w5 " * 21]))  # 2 may join with what stands around the text
    with pytest.raises(HTTPException, match="has 20 tokens or more, and this server takes 19 at most"):
        asyncio.run(handlers.Checked._check_length(made, ["w5 " * 22]))


def test_the_vocabulary_ends_before_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=30))
    made = handlers.Completions.__new__(handlers.Completions)
    made.model_manager = SimpleNamespace(batch=SimpleNamespace(model=SimpleNamespace(config=config)))
    monkeypatch.setattr(handlers.CompletionHandler, "_build_generation_config", lambda *_, **__: GenerationConfig())
    for token, fits in (("0", True), ("29", True), ("30", False)):
        body = {"logit_bias": {token: 1}, "temperature": GREEDY_BELOW}
        if fits:
            assert made._build_generation_config(body, GenerationConfig()).do_sample
        else:
            with pytest.raises(HTTPException, match="tokens are 0 to 29"):
                made._build_generation_config(body, GenerationConfig())
    assert not made._build_generation_config({"temperature": GREEDY_BELOW / 2}, GenerationConfig()).do_sample
