"""SmolLM2 with every assistant, as `benchmarks/lossless.py` judges it: sampled texts by their distribution, greedy
answers token by token.

COUNT texts find what is grossly wrong; small errors are for the enumerations, and for the script's 50,000 texts on a
GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fastspec
from fastspec.models import SMOLLM2_HEADS
from fastspec.programs.bench.methods import twin
from fastspec.programs.demo import PROMPTS
from fastspec.programs.texts import encode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

COUNT, BATCH, NEW_TOKENS = 200, 100, 24
TOP_K = 4
"""So few texts that begin alike are many then, and a position is judged after each of them."""
SIGNIFICANCE = 1e-4
"""Under which a position fails: 23 cases of three to five positions, so that a right build fails a fresh seed in one of
a hundred runs."""
FOLDER = str(Path(__file__).parents[2] / "benchmarks")
with pytest.MonkeyPatch.context() as path:
    path.syspath_prepend(FOLDER)
    lossless = importlib.import_module("lossless")


@pytest.fixture(scope="module")
def loaded(smollm2) -> Iterator[tuple[Any, Any, Any]]:
    """(the unpatched model, one patched with all heads on the same weights, the tokenizer)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    plain, tokenizer = smollm2
    yield plain, fastspec.patch(twin(plain), **dict(SMOLLM2_HEADS)), tokenizer
    torch.set_num_threads(threads)


DISTRIBUTIONS: dict[float, dict[Any, Any]] = {}
"""Penalty -> the distributions that were computed, by text: assistants share them."""


@pytest.mark.parametrize("penalty", lossless.PENALTY)
@pytest.mark.parametrize("name", lossless.ASSISTANTS)
def test_sampled_texts_of_a_real_model_follow_its_distribution(loaded, monkeypatch, name, penalty):
    if penalty == "with" and name in lossless.DRAWN_ONLY:
        pytest.skip("it draws no drafts with a penalty")
    _, model, tokenizer = loaded
    value = lossless.PENALTY[penalty]
    monkeypatch.setitem(lossless.OPTIONS, "repetition_penalty", value)
    monkeypatch.setitem(lossless.OPTIONS, "top_k", TOP_K)
    inputs = dict(tokenizer(lossless.PROMPT, return_tensors="pt"))  # without a chat's beginning: BATCH rows read it
    assistant = lossless.on(lossless.ASSISTANTS[name], model, tokenizer)
    texts = lossless.draw(
        model, inputs, assistant, COUNT, BATCH, seed=0, length=lossless.TOKENS.get(name, lossless.LENGTH)
    )
    told = lossless.judge(model, inputs["input_ids"], texts, DISTRIBUTIONS.setdefault(value, {}))
    assert all(position["freedom"] >= TOP_K - 1 for position in told[:3])
    assert all(position["p"] > SIGNIFICANCE for position in told), told
    calls = list(fastspec.report(model).calls)[-COUNT // BATCH :]
    # of so short a text nothing recurs for n-grams, unless they are kept from batch to batch
    assert name in ("autoregressive", "nasd") or sum(call.accepted for call in calls) > 0


@pytest.mark.parametrize("name", lossless.ASSISTANTS)
def test_greedy_answers_of_a_real_model_are_its_own(loaded, name):
    plain, model, tokenizer = loaded
    assistant = lossless.on(lossless.ASSISTANTS[name], model, tokenizer)
    for _, prompt in PROMPTS:
        inputs = encode(tokenizer, prompt, "cpu")
        options = {**inputs, "do_sample": False, "max_new_tokens": NEW_TOKENS}
        assert model.generate(**options, assistant=assistant).tolist() == plain.generate(**options).tolist(), prompt
