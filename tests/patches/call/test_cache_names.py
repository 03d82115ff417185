"""A user's cache by the names that transformers takes, and which of them fastspec uses itself."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from helpers.generate import TREE, prompts, shallow_model
from helpers.models import tiny_head, tiny_model
from helpers.seq2seq import tiny_seq2seq
from transformers import DynamicCache
from transformers.utils import generic

import fastspec
from fastspec.patches.hf.cache import CACHE, GIVEN, OLD, cache_argument, given_cache, kept_cache

OPTIONS: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False}
renamed = pytest.mark.skipif(CACHE == OLD, reason="transformers before 5.24 takes one name")


def told(error: bool, call: Any) -> Any:
    """What a call gives, with transformers' warning of the old name where it is due, and without any else."""
    if error:
        with pytest.warns(FutureWarning, match=f"{OLD}.* is deprecated"):
            return call()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        return call()


@pytest.mark.each_value
@pytest.mark.parametrize("name", GIVEN[:2])
@pytest.mark.parametrize("assistant", ["autoregressive", "nasd", TREE], ids=str)
def test_a_cache_is_read_and_filled_by_either_name(name: str, assistant: Any) -> None:
    model, held, found = shallow_model(), [], []
    fastspec.patch(model, eagle3=tiny_head(model))
    for extra in ({}, {"assistant": assistant}):
        cache = DynamicCache(config=model.config)
        model(prompts(5)["input_ids"], **{CACHE: cache})
        ids = torch.cat((prompts(5)["input_ids"], torch.tensor([[7, 8]])), 1)
        call = lambda ids=ids, cache=cache, extra=extra: model.generate(ids, **{name: cache}, **OPTIONS, **extra)  # noqa: E731
        found.append(told(name != CACHE, call).tolist())
        held.append(cache)
    assert found[0] == found[1]
    assert held[0].get_seq_length() == held[1].get_seq_length() == 5 + 2 + 9 - 1
    for mine, theirs in zip(held[1].layers, held[0].layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys, rtol=0.0, atol=1e-4)


@renamed
def test_of_two_names_the_new_one_holds() -> None:
    model = fastspec.patch(shallow_model())
    new, old = DynamicCache(config=model.config), DynamicCache(config=model.config)
    with pytest.warns(FutureWarning, match="Both `past_key_values` and `cache`"):
        model.generate(**prompts(5), cache=new, past_key_values=old, **OPTIONS, assistant="nasd")
    assert (new.get_seq_length(), old.get_seq_length()) == (5 + 9 - 1, 0)


@pytest.mark.parametrize("name", GIVEN)
def test_refusals_know_every_name(name: str) -> None:
    model, source = fastspec.patch(shallow_model()), fastspec.patch(tiny_seq2seq("t5"))
    given = {name: DynamicCache(config=model.config)}
    with pytest.raises(fastspec.Unsupported, match=f"{CACHE} cannot be combined"):
        source.generate(torch.tensor([[5, 6, 7]]), **given, **OPTIONS, assistant="nasd")
    with (
        fastspec.continuous(model, "nasd", rows=1) as batch,
        pytest.raises(fastspec.Unsupported, match=f"without {CACHE}"),
    ):
        batch.submit(prompts(5)["input_ids"], **given)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3_next", "t5"])
def test_nothing_here_uses_an_old_name(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old argument warns, an old field of an output is logged once, by whichever call comes first."""
    said: list[Any] = []
    monkeypatch.setattr(generic.logger, "warning_once", lambda *args, **kwargs: said.append(args))
    model = fastspec.patch(tiny_seq2seq(kind) if kind == "t5" else tiny_model(kind))
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        out = model.generate(
            **prompts(5, 3), **OPTIONS, return_dict_in_generate=True, output_scores=True, assistant="nasd"
        )
    assert kept_cache(out) is not None and said == []


def test_a_forward_s_own_name_is_read_from_its_signature() -> None:
    def old(input_ids: Any, past_key_values: Any = None) -> None: ...
    def both(input_ids: Any, past_key_values: Any = None, cache: Any = None) -> None: ...
    def neither(input_ids: Any, **kwargs: Any) -> None: ...

    assert [cache_argument(each) for each in (old, both, neither)] == [OLD, CACHE, CACHE]
    assert cache_argument(type(tiny_model("llama")).forward) == CACHE


def test_a_cache_that_is_not_given() -> None:
    assert given_cache({"input_ids": 1}) is None and given_cache({CACHE: None, "cache_params": 1}) is None
