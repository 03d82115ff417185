"""One seed, one sampled answer: assistants that draft without drawing give the tokens that `autoregressive` draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.generate import EAGLE1, bigram, prompts, seer
from helpers.models import tiny_head
from helpers.seq2seq import sources, tiny_seq2seq
from torch import Tensor

import fastspec
from fastspec.patches.hf.cache import CACHE

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "settings": {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
    "blind": {"typical_p": 0.9},
    "history": {"repetition_penalty": 1.2, "top_k": 50},
    "several of each": {"num_return_sequences": 3, "temperature": 1.3},
}
ASSISTANTS: dict[str, Any] = {
    "a tree": fastspec.Eagle3(depth=4, top_k=3, total_tokens=12),
    "another tree": fastspec.Eagle3(depth=2, top_k=2, total_tokens=4),
    "a chain": fastspec.Eagle3(depth=3, top_k=1, total_tokens=4),
    "a head of the first form": "eagle",
    "n-grams": "nasd",
    "first layers, the likeliest tokens": fastspec.Speculative(early_exit=1, gamma=3, branches=2),
    "rows in turns": fastspec.ContinuousBatch("eagle3", rows=2),
}


def drawn(model: Any, inputs: dict[str, Tensor], assistant: Any, seed: int = 3, **options: Any) -> Any:
    torch.manual_seed(seed)
    return model.generate(
        **inputs, assistant=assistant, do_sample=True, max_new_tokens=24, pad_token_id=0, **{"top_k": 0} | options
    )


@pytest.fixture(scope="module")
def model() -> Any:
    """A target whose head is right half of the time."""
    model = bigram()
    head = seer(model)
    return fastspec.patch(model, eagle3=head, eagle=tiny_head(model, seed=1, **EAGLE1))


@pytest.fixture(scope="module", params=WAYS.values(), ids=WAYS)
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


@pytest.fixture(scope="module")
def undrafted(model: Any, way: dict[str, Any]) -> list[list[int]]:
    """What `autoregressive` draws, and does not draw by another seed."""
    wanted, other = (drawn(model, prompts(5, 9, 2), "autoregressive", seed, **way).tolist() for seed in (3, 4))
    assert wanted != other
    return wanted


@pytest.mark.each_value
@pytest.mark.parametrize("assistant", ASSISTANTS.values(), ids=ASSISTANTS)
def test_drafts_do_not_change_what_is_drawn(
    model: Any, assistant: Any, way: dict[str, Any], undrafted: list[list[int]]
) -> None:
    assert drawn(model, prompts(5, 9, 2), assistant, **way).tolist() == undrafted
    assert assistant is not ASSISTANTS["a tree"] or fastspec.report(model).last.acceptance_length > 1.3


def test_rows_draw_each_by_itself(model: Any) -> None:
    """Equal prompts in one call have answers of their own, and a row's do not hang on how long the others are."""
    ids = prompts(6)["input_ids"].expand(3, -1)
    told = drawn(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, "eagle3")
    assert len({tuple(row) for row in told.tolist()}) == 3
    longer = prompts(6, 11)
    longer["input_ids"][0, -6:] = ids[0]
    assert drawn(model, longer, "eagle3")[0, -24:].tolist() == told[0, -24:].tolist()


def test_a_second_turn_draws_as_any_other(model: Any) -> None:
    """On the cache that a turn left behind, whose answer begins further back than its mask."""
    inputs, turns = prompts(7, 4), {}
    for assistant in ("autoregressive", "eagle3"):
        said = drawn(model, inputs, assistant, return_dict_in_generate=True, eos_token_id=None)
        more = torch.cat((said.sequences, torch.full((2, 3), 9)), 1)
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, more.shape[1] - 7), value=1)
        again = {"input_ids": more, "attention_mask": mask, CACHE: said[CACHE]}
        turns[assistant] = drawn(model, again, assistant, seed=5, eos_token_id=None).tolist()
    assert turns["eagle3"] == turns["autoregressive"]


def test_an_encoder_decoder_draws_the_same_with_n_grams() -> None:
    model, inputs = fastspec.patch(tiny_seq2seq("t5")), sources(8, 5)
    assert drawn(model, inputs, "nasd").tolist() == drawn(model, inputs, "autoregressive").tolist()
