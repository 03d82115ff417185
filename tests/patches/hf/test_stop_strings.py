"""Criteria of stop strings are made once for a tokenizer, and say what transformers' own say."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from helpers.saying import saying
from helpers.tokenizers import TARGET, worded
from helpers.training import small_target
from transformers.generation import stopping_criteria
from transformers.generation.stopping_criteria import StopStringCriteria

import fastspec
from fastspec.patches.hf import ends
from fastspec.patches.hf.ends import StopStrings, stop_criterion


def test_a_set_of_strings_is_compared_with_the_vocabulary_once(monkeypatch):
    made = []

    def counted(*given):
        made.append(given)
        return StopStrings(*given)

    monkeypatch.setattr(ends, "StopStrings", counted)
    tokenizer, model = worded(), fastspec.patch(small_target(peak=0.15))
    ids = torch.tensor([[5, 6]])
    given = {"assistant": "nasd", "max_new_tokens": 12, "do_sample": False, "eos_token_id": 1000}
    emitted = model.generate(ids, **given)[0, 2:].tolist()
    word = tokenizer.decode(emitted[3])
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


def test_texts_of_drawn_tokens_end_where_transformers_own_ends_them():
    tokenizer, draw = saying("aab ba abab aaaa <b> a")[1], torch.Generator().manual_seed(0)
    ids = torch.randint(0, len(tokenizer) + 9, (2000, 24), generator=draw)  # some are of no token
    for strings in (["aa"], ["ab", "ba a"], ["a" * 30], ["b", "aaab", "<b> a"]):
        found = StopStrings(tokenizer, strings)(ids, None)
        assert torch.equal(found, StopStringCriteria(tokenizer, strings)(ids, None))
        assert found.any() or strings == ["a" * 30]


def test_a_table_has_a_row_for_each_kind_of_token():
    """A server sends it to the process of its rounds, and keeps it."""
    found, whole = stop_criterion(TARGET, "a" * 200), StopStringCriteria(TARGET, ["a" * 200])
    assert len(found.embedding_vec) < 9 and len(whole.embedding_vec) > 97
    kept = list(stopping_criteria.STOP_STRING_EMBEDDING_CACHE)  # transformers' own
    stop_criterion(TARGET, "a" * 199)
    assert kept and list(stopping_criteria.STOP_STRING_EMBEDDING_CACHE) == kept


def test_strings_that_no_tokens_make_up_are_refused():
    with pytest.raises(ValueError, match="unable to identify tokens"):
        stop_criterion(worded(), "\U0001f600")
