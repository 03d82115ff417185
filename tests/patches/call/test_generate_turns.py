"""Chats of several turns: a cache that is handed in, filled and taken up again, by assisted and plain calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.generate import NEVER, free, prompts
from torch import Tensor
from transformers import DynamicCache

from fastspec.patches.hf.cache import CACHE, kept_cache


def two_turns(
    model: Any, first: dict[str, Tensor], more: Tensor, cache: Any, own: bool, count: int, **options: Any
) -> list[Any]:
    """Tokens of two turns of a chat, the second on the cache of the first, with the width of the cache after each."""
    options = {"do_sample": False, "max_new_tokens": count, "return_dict_in_generate": True, **options}
    one = model.generate(**first, **options, **{CACHE: cache})
    widths = [kept_cache(one).get_seq_length()]
    if own:
        assert kept_cache(one) is cache
    new = one.sequences.shape[1] - first["input_ids"].shape[1]
    emitted = (one.sequences[:, -new:] != 0).long()
    ids = torch.cat((one.sequences, more), 1)
    mask = torch.cat((first["attention_mask"], emitted, torch.ones_like(more)), 1)
    two = model.generate(input_ids=ids, attention_mask=mask, **options, **{CACHE: kept_cache(one)})
    widths.append(kept_cache(two).get_seq_length())
    return [one.sequences.tolist(), two.sequences.tolist(), widths]


@pytest.mark.each_value
@pytest.mark.parametrize("lengths", [(5,), (2, 9, 4)])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("count", [3, 17])
def test_a_second_turn_on_the_cache_of_the_first(pair, assistant, lengths, own, count):
    inputs, more = prompts(*lengths), prompts(*[3] * len(lengths), seed=7)["input_ids"]
    ends = [row[min(2 + 4 * i, count - 1)] for i, row in enumerate(free(pair[0], inputs))]
    for eos in (ends, NEVER):
        results = []
        for model, extra in zip(pair, ({}, {"assistant": assistant}), strict=True):
            cache = DynamicCache(config=model.config) if own else None
            results.append(two_turns(model, inputs, more, cache, own, count, eos_token_id=eos, **extra))
        assert results[1] == results[0]


@pytest.mark.each_value
def test_a_second_turn_far_behind_the_first(pair, assistant):
    """The past is longer than the new prompt by more than one bucket of attended slots."""
    inputs, more = prompts(150), prompts(2, seed=3)["input_ids"]
    expected = two_turns(pair[0], inputs, more, None, False, 5, eos_token_id=NEVER)
    assert two_turns(pair[1], inputs, more, None, False, 5, eos_token_id=NEVER, assistant=assistant) == expected


@pytest.mark.each_value
def test_a_cache_of_the_unpatched_model_and_back(pair, assistant):
    """The first turn plain and the second assisted, and the other way round, in a cache of the user that is changed in
    place."""
    inputs = prompts(3, 8)
    texts = []
    for first, second in ((None, None), (None, assistant), (assistant, None)):
        cache = DynamicCache(config=pair[1].config)
        options = {"do_sample": False, "eos_token_id": NEVER, "max_new_tokens": 9, CACHE: cache}
        ids = pair[1].generate(**inputs, **options, assistant=first)
        mask = torch.cat((inputs["attention_mask"], torch.ones(2, 9, dtype=torch.long)), 1)
        assert cache.get_seq_length() == ids.shape[1] - 1
        texts.append(pair[1].generate(ids, attention_mask=mask, **options, assistant=second).tolist())
    assert texts[1] == texts[0]
    assert texts[2] == texts[0]


@pytest.mark.each_value
def test_rows_that_bring_unequal_shares_of_past_and_prompt(pair, assistant):
    """One row has a long past and a short prompt, the other the reverse; both pads lie in the middle of the mask."""
    past, ids = prompts(12, 2), prompts(2, 12, seed=5)
    options = {"do_sample": False, "max_new_tokens": 2, "eos_token_id": NEVER}
    texts = []
    for model, extra in zip(pair, ({}, {"assistant": assistant}), strict=True):
        cache = kept_cache(model(**past, use_cache=True))
        whole = torch.cat((past["input_ids"], ids["input_ids"]), 1)
        mask = torch.cat((past["attention_mask"], ids["attention_mask"]), 1)
        texts.append(model.generate(whole, attention_mask=mask, **{CACHE: cache}, **options, **extra).tolist())
    assert texts[1] == texts[0]
