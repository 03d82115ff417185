"""Criteria of stop strings are made once for a tokenizer, and say what transformers' own say."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import transformers
from helpers.tokenizers import worded
from helpers.training import small_target
from packaging.version import Version
from transformers.generation import stopping_criteria
from transformers.generation.stopping_criteria import StopStringCriteria

import fastspec
from fastspec.patches.hf import ends
from fastspec.patches.hf.ends import stop_criterion


def test_a_set_of_strings_is_compared_with_the_vocabulary_once(monkeypatch):
    made = []

    class Counted(StopStringCriteria):
        def __init__(self, *given):
            made.append(given)
            super().__init__(*given)

    monkeypatch.setattr(ends, "StopStringCriteria", Counted)
    tokenizer, model = worded(), fastspec.patch(small_target(peak=0.15))
    ids = torch.tensor([[5, 6]])
    given = {"assistant": "nasd", "max_new_tokens": 12, "do_sample": False, "eos_token_id": 1000}
    emitted = model.generate(ids, **given)[0, 2:].tolist()
    word = tokenizer.decode(emitted[3])
    monkeypatch.setattr(
        "fastspec.patches.call.processors.CRITERIA", (*fastspec.patches.call.processors.CRITERIA, Counted)
    )
    for _ in range(3):
        out = model.generate(ids, **given, stop_strings=[word], tokenizer=tokenizer)
        assert out[0, 2:].tolist() == emitted[: emitted.index(emitted[3]) + 1]
    assert len(made) == 1
    assert stop_criterion(tokenizer, word) is stop_criterion(tokenizer, (word,)) and len(made) == 1
    assert stop_criterion(worded(), word) is not stop_criterion(tokenizer, word)
    before = stop_criterion(tokenizer, word)
    tokenizer.add_tokens(["w5000"])
    assert stop_criterion(tokenizer, word) is not before


def test_few_sets_are_kept_and_none_for_a_tokenizer_that_is_gone(monkeypatch):
    monkeypatch.setattr(ends, "KEPT", 2)
    tokenizer = worded()
    first, second = stop_criterion(tokenizer, "w5"), stop_criterion(tokenizer, "w6")
    assert stop_criterion(tokenizer, "w5") is first  # the latest now
    stop_criterion(tokenizer, "w7")
    assert stop_criterion(tokenizer, "w5") is first and stop_criterion(tokenizer, "w6") is not second
    gone = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert gone() is None


def test_it_gives_what_transformers_own_gives():
    ids = torch.tensor([[5, 9, 6], [5, 6, 9]])
    found = stop_criterion(worded(), "w9")(ids, None)
    assert torch.equal(found, StopStringCriteria(worded(), ["w9"])(ids, None)) and found.tolist() == [False, True]


def test_strings_that_no_tokens_make_up_are_refused():
    with pytest.raises(ValueError, match="unable to identify tokens"):
        stop_criterion(worded(), "\U0001f600")


@pytest.mark.skipif(
    Version(transformers.__version__) >= Version("5.24"), reason="transformers sorts the vocabulary since 5.24"
)
def test_transformers_own_cache_still_misses_shuffled_vocabularies():
    """Where no version that is accepted does, `stop_criterion` may go."""
    stopping_criteria.STOP_STRING_EMBEDDING_CACHE.clear()
    tokenizer = worded()
    for _ in range(6):
        StopStringCriteria(tokenizer, "w5")
    assert len(stopping_criteria.STOP_STRING_EMBEDDING_CACHE) > 1
