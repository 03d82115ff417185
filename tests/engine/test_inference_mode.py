"""Calls and open batches in and out of `torch.inference_mode`, which gives tensors that nobody else may write to."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers.captured import Recorded, stand_in
from helpers.generate import TREE, prompts, shallow_model
from helpers.models import tiny_head
from helpers.open import made, texts

import fastspec
from fastspec.patches.hf.cache import CACHE

OPTIONS = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None}
ASSISTANTS = [TREE, "nasd", "autoregressive"]


@pytest.mark.parametrize("assistant", ASSISTANTS, ids=str)
def test_calls_of_one_mode_follow_those_of_the_other(assistant, monkeypatch):
    stand_in(monkeypatch, Recorded)
    model = shallow_model()
    with fastspec.patched(model, eagle3=tiny_head(model)):
        wanted = model.generate(**prompts(5, 6, 3), **OPTIONS)
        for inside in (True, False, True, False, False):
            with torch.inference_mode(inside):
                assert torch.equal(model.generate(**prompts(5, 6, 3), **OPTIONS, assistant=assistant), wanted)


@pytest.mark.parametrize("assistant", ASSISTANTS, ids=str)
@pytest.mark.parametrize("first", [None, "own"])
def test_a_cache_goes_from_one_mode_to_the_other(assistant, first):
    model = shallow_model()
    given = OPTIONS | {"return_dict_in_generate": True}
    with fastspec.patched(model, eagle3=tiny_head(model)):
        found = []
        for before, after in itertools.product((False, True), repeat=2):
            with torch.inference_mode(before):
                one = model.generate(**prompts(6), **given, **({"assistant": assistant} if first else {}))
            with torch.inference_mode(after):
                ids = torch.cat((one.sequences, torch.tensor([[7, 8, 9]])), 1)
                held = {"input_ids": ids, "attention_mask": torch.ones_like(ids), CACHE: one.past_key_values}
                found.append(model.generate(**held, **OPTIONS, assistant=assistant).tolist())
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("assistant", ASSISTANTS, ids=str)
def test_an_open_batch_that_was_opened_in_inference_mode(assistant):
    plain, model = made()
    with torch.inference_mode(), fastspec.continuous(model, assistant, rows=2) as batch:
        futures = [batch.submit(each, **OPTIONS) for each in texts(5, 9, 3, 7)]
        for ids, future in zip(texts(5, 9, 3, 7), futures, strict=True):
            assert torch.equal(future.result(60), plain.generate(ids[None], **OPTIONS))
