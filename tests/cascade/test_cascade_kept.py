"""Calls that begin from what was kept: the same tokens as calls that compute it all, whatever became of it in
between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.examples import examples
from helpers.generate import NEVER
from helpers.models import tiny_model
from hypothesis import given
from hypothesis import strategies as st

import fastspec
from fastspec.cascade.memory import CacheManager
from fastspec.errors import Unsupported
from fastspec.patches.cascade.stages import check_kept, keep_past, past_of
from fastspec.patches.hf.cache import CACHE, kept_cache

BIG = 10**8
OPTIONS = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": NEVER, "return_dict_in_generate": True}
MODELS = {kind: fastspec.patch(tiny_model(kind, num_hidden_layers=3)) for kind in ("llama", "qwen2")}


@pytest.fixture(params=MODELS)
def model(request: Any) -> Any:
    return MODELS[request.param]


@pytest.fixture(params=[None, "autoregressive", "nasd"])
def assistant(request: Any) -> Any:
    return request.param


def text(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(6, 97, (1, length), generator=torch.Generator().manual_seed(seed))


def say(model: Any, ids: torch.Tensor, assistant: Any, past: Any = None, **options: Any) -> Any:
    """A greedy call, from a cache or from nothing. The tiny models say the pad token too: the mask tells that it is
    none."""
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), **{CACHE: past}, assistant=assistant, **{**OPTIONS, **options}
    )


def first_turn(manager: CacheManager, model: Any, assistant: Any, ids: torch.Tensor, stage: int = 0) -> torch.Tensor:
    """Keep what a call leaves -> its text."""
    out = say(model, ids, assistant)
    assert kept_cache(out).get_seq_length() == out.sequences.shape[1] - 1
    keep_past(manager, stage, out.sequences, kept_cache(out))
    return out.sequences


def same_as_without(manager: CacheManager, model: Any, assistant: Any, ids: torch.Tensor, kept: int) -> None:
    """A call on `kept` tokens of the past says what one without it says, and leaves as long a cache."""
    past = past_of(manager, 0, model, ids)
    assert (0 if past is None else past.get_seq_length()) == kept
    got, expected = say(model, ids, assistant, past), say(model, ids, assistant)
    assert got.sequences.tolist() == expected.sequences.tolist()
    assert kept_cache(got).get_seq_length() == kept_cache(expected).get_seq_length() == got.sequences.shape[1] - 1


@pytest.mark.each_value
def test_a_second_turn_begins_from_the_first(model: Any, assistant: Any) -> None:
    manager = CacheManager(BIG)
    emitted = first_turn(manager, model, assistant, text(30))
    ids = torch.cat((emitted, text(7, 1)), 1)
    for _ in range(2):  # the first call writes into its own copy
        same_as_without(manager, model, assistant, ids, emitted.shape[1] - 1)
    third = first_turn(manager, model, assistant, ids)
    same_as_without(manager, model, assistant, torch.cat((third, text(2, 2)), 1), third.shape[1] - 1)
    layers, heads, size = 3, 2, 16
    assert manager.held(moved=False) == 2 * layers * heads * size * 4 * (
        third.shape[1] - 1
    )  # the second turn's entry replaced the first's


def test_the_same_prompt_again_feeds_its_last_token(model: Any, assistant: Any) -> None:
    manager = CacheManager(BIG)
    emitted = first_turn(manager, model, assistant, text(30))
    same_as_without(manager, model, assistant, emitted, emitted.shape[1] - 1)
    same_as_without(manager, model, assistant, emitted[:, :30], 29)


@pytest.mark.each_value
@pytest.mark.parametrize("place", [16, 29, 30, 36])
def test_a_prompt_that_parts_from_what_was_kept(model: Any, assistant: Any, place: int) -> None:
    manager = CacheManager(BIG)
    emitted = first_turn(manager, model, assistant, text(30))
    other = (emitted[:, place : place + 1] - 5) % 91 + 6  # another token than the one said there
    same_as_without(manager, model, assistant, torch.cat((emitted[:, :place], other, text(4, 3)), 1), place)
    assert past_of(manager, 1, model, emitted) is None


@pytest.mark.some("llama-nasd", "qwen2-autoregressive")
@pytest.mark.each_value
def test_what_was_moved_to_the_cpu_and_back_or_dropped(model: Any, assistant: Any) -> None:
    bytes_of = 2 * 3 * 2 * 16 * 4 * 41  # 30 tokens and 11 of 12 new ones
    manager = CacheManager(bytes_of, host_budget=2 * bytes_of)
    texts = [first_turn(manager, model, assistant, text(30, seed)) for seed in (0, 1)]
    assert (manager.held(moved=False), manager.held(moved=True), manager.stats.moves) == (bytes_of, bytes_of, 1)
    for emitted in (*texts, *texts):
        same_as_without(manager, model, assistant, torch.cat((emitted, text(3, 4)), 1), 41)
    assert manager.stats.moves == 1 + 2 * 4  # every find moved one back and the other out
    texts += [first_turn(manager, model, assistant, text(30, seed)) for seed in (2, 3)]
    assert manager.stats.drops == 1
    same_as_without(manager, model, assistant, texts[0], 0)
    assert manager.stats.recomputes == 1


turn = st.tuples(st.integers(0, 2), st.integers(0, 60), st.integers(1, 9))


@examples(12)
@given(turns=st.lists(turn, min_size=2, max_size=6), budget=st.integers(44, 120))
def test_any_order_of_texts_gives_what_calls_without_a_past_gives(turns: Any, budget: int) -> None:
    """Texts grow, are cut and taken up in any order; entries are moved and dropped on the way."""
    token = 2 * 3 * 2 * 16 * 4  # bytes
    for model in MODELS.values():
        manager, texts = CacheManager(token * budget, host_budget=token * 60), [text(18, seed) for seed in range(3)]
        for place, (which, cut, more) in enumerate(turns):
            ids = torch.cat((texts[which][:, : max(cut, 18)], text(more, 10 + place)), 1)[:, :40]
            name = (None, "autoregressive", "nasd")[place % 3]
            expected = say(model, ids, None, max_new_tokens=5)
            out = say(model, ids, name, past_of(manager, 0, model, ids), max_new_tokens=5)
            assert out.sequences.tolist() == expected.sequences.tolist()
            keep_past(manager, 0, out.sequences, kept_cache(out))
            texts[which] = out.sequences
            assert manager.held(moved=False) <= manager.budget and manager.held(moved=True) <= manager.host_budget


def test_a_model_cast_since_gets_nothing_of_the_other_dtype() -> None:
    model, manager = fastspec.patch(tiny_model(num_hidden_layers=2)), CacheManager(BIG)
    emitted = first_turn(manager, model, None, text(30))
    assert past_of(manager, 0, model, emitted) is not None
    model.to(torch.bfloat16)
    assert past_of(manager, 0, model, emitted) is None
    first_turn(manager, model, None, text(30))
    past = past_of(manager, 0, model, emitted[:, :31])
    assert past is not None and past.layers[0].keys.dtype == torch.bfloat16


def test_models_whose_keys_cannot_be_kept_are_refused_by_name() -> None:
    windowed = tiny_model("mistral", num_hidden_layers=2, sliding_window=8)
    with pytest.raises(Unsupported, match=r"MistralForCausalLM.*DynamicSlidingWindowLayer.*memory=None"):
        past_of(CacheManager(BIG), 0, windowed, text(20))
    dynamic = tiny_model(
        num_hidden_layers=2, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    )
    with pytest.raises(Unsupported, match=r"LlamaForCausalLM.*length of the text"):
        check_kept(dynamic)
    asking = tiny_model(num_hidden_layers=2)
    for wanted in ("static", "dynamic"):  # transformers takes neither beside a cache that is handed in
        asking.generation_config.cache_implementation = wanted
        with pytest.raises(Unsupported, match=rf"LlamaForCausalLM.*'{wanted}'"):
            check_kept(asking)
    asking.generation_config.cache_implementation = "hybrid"  # as Gemma's are published, which transformers unsets
    check_kept(asking)
    with pytest.raises(Unsupported, match=r"T5ForConditionalGeneration.*encoder-decoder"):
        check_kept(t5())


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(T5Config(vocab_size=97, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2))
