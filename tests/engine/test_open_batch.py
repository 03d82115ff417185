"""Open batches: prompts arrive, join, end and go, and each is answered as by `generate` alone."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from helpers.captured import stand_in
from helpers.families import recurrent, windowed
from helpers.generate import NEVER, TREE, Recorder, answer, shallow_model
from helpers.open import GREEDY, alone, made, texts, told
from helpers.vision import prompts_with_images, seeing
from torch import Tensor
from transformers import GenerationConfig

import fastspec
from fastspec import Unsupported
from fastspec.generation.engine import batching
from fastspec.kernels.verification.reference import uniform_at
from fastspec.patches.backends import TORCH
from fastspec.patches.call import one_prompt
from fastspec.patches.hf.cache import CACHE

COUNTS = (9, 3, 14, 5, 7, 2, 11, 6, 4)


def test_none_unsets_what_the_models_generation_config_sets():
    """As in `generate`: end tokens, penalties, forbidden words, stop strings, a guidance that no assistant takes."""
    plain, model = made("bigram")
    [ids] = texts(9)
    free = alone(plain, ids, 8, eos_token_id=None)
    said = free[len(ids) :]
    unset = {
        "eos_token_id": said[2],
        "repetition_penalty": 1.8,
        "bad_words_ids": [[said[1]]],
        "stop_strings": ["a"],
        "guidance_scale": 2.0,
        "exponential_decay_length_penalty": (1, 2.0),
        "forced_eos_token_id": said[0],
    }
    with fastspec.continuous(model, "eagle3", rows=2, max_length=64) as batch:
        for name, value in unset.items():
            setattr(model.generation_config, name, value)
            asked = {"eos_token_id": None, name: None, "do_sample": False}
            assert told([batch.submit(ids, max_new_tokens=8, **asked)]) == [free], name
            setattr(model.generation_config, name, None)


def settings_of(plain: Any, ids: list[Tensor]) -> list[dict[str, Any]]:
    """A different set of greedy settings for each prompt in turn."""
    generated = alone(plain, ids[0], 12)
    kinds: list[dict[str, Any]] = [
        {"max_new_tokens": 17},
        {"max_new_tokens": 1},
        {"eos_token_id": [generated[-1], generated[-3]], "max_new_tokens": 30},
        {"repetition_penalty": 1.4, "max_new_tokens": 9},
        {"suppress_tokens": generated[-4:], "max_new_tokens": 12},
        {"min_new_tokens": 6, "eos_token_id": generated[-5:], "max_new_tokens": 11},
        {"do_sample": True, "top_k": 1, "max_new_tokens": 8},
    ]
    return [
        {"do_sample": False, "eos_token_id": NEVER, "pad_token_id": 0, **kinds[index % len(kinds)]}
        for index in range(len(ids))
    ]


@pytest.mark.some("Eagle3", "eagle", "nasd")
@pytest.mark.each_value
@pytest.mark.parametrize("kind, captured", [("random", False), ("bigram", True)])
@pytest.mark.parametrize("assistant", ["autoregressive", TREE, "eagle", "nasd"], ids=str)
def test_every_prompt_is_answered_by_its_own_settings_as_alone(monkeypatch, kind, assistant, captured):
    """With fewer rows than prompts, and with chunks smaller than some prompts."""
    if captured:
        stand_in(monkeypatch)
        monkeypatch.setattr(batching, "ASYNCHRONOUS_AFTER", 0)
    plain, model = made(kind)
    ids = texts(*COUNTS)
    settings = settings_of(plain, ids)
    want = [
        answer(plain, {"input_ids": each[None]}, **options)[0].tolist()
        for each, options in zip(ids, settings, strict=True)
    ]
    with fastspec.continuous(model, assistant, rows=3, max_length=64, prefill_chunk=4) as batch:
        futures = [batch.submit(each, **options) for each, options in zip(ids, settings, strict=True)]
        assert told(futures) == want
        assert batch.stats.joined == len(ids) and batch.stats.emitted == sum(map(len, want)) - sum(COUNTS)
        batch.stats.joined = 0
        again = [
            batch.submit(ids[at], **settings[at]) for at in reversed(range(len(ids)))
        ]  # into rows that others had before
        assert told(again) == want[::-1]
    assert batch.running == batch.waiting == 0 and fastspec.report(model).last is batch.stats


@pytest.mark.some("Eagle3", "eagle")
@pytest.mark.parametrize(
    "assistant, options",
    [
        (TREE, {"temperature": 0.8, "top_p": 0.9}),
        ("nasd", {"repetition_penalty": 1.2}),
        ("eagle", {"typical_p": 0.9}),
    ],
    ids=str,
)
def test_a_seed_gives_its_answer_whatever_is_decoded_beside_it_and_with_whatever(assistant, options):
    """The same tokens as without a draft, in a row of its own or among others."""
    _, model = made()
    ids = texts(*COUNTS[:5])
    given = {"do_sample": True, "eos_token_id": NEVER, "max_new_tokens": 10, **options}
    with fastspec.continuous(model, "autoregressive", rows=1, max_length=64) as batch:
        want = [told([batch.submit(each, seed=seed, **given)])[0] for seed, each in enumerate(ids)]
    with fastspec.continuous(model, assistant, rows=4, max_length=64, prefill_chunk=3) as batch:
        others = [
            batch.submit(each, do_sample=False, max_new_tokens=5 + index, eos_token_id=NEVER)
            for index, each in enumerate(ids)
        ]
        assert told([batch.submit(each, seed=seed, **given) for seed, each in enumerate(ids)]) == want
        assert len(told(others)) == len(ids)
        assert told([batch.submit(ids[0], seed=seed, **given) for seed in range(3)])[0] == want[0]
        assert (
            len(
                {
                    tuple(generated)
                    for generated in told([batch.submit(ids[0], seed=seed, **given) for seed in range(6)])
                }
            )
            > 3
        )


def test_a_token_is_drawn_by_the_number_of_its_position():
    plain, model = made()
    ids = texts(6)[0]
    with fastspec.continuous(model, TREE, rows=2, max_length=64) as batch:
        future = batch.submit(ids, do_sample=True, top_k=0, seed=9, max_new_tokens=20, eos_token_id=NEVER)
        generated = torch.tensor(told([future]))
    with torch.no_grad():
        logits = plain(generated).logits
    places = torch.arange(6, 26)
    assert TORCH.pick(logits[:, 5:-1], uniform_at(torch.tensor(9), places)[None]).tolist() == generated[:, 6:].tolist()


def test_who_gives_no_seed_draws_from_torchs_own_generator():
    _, model = made()
    given = {"do_sample": True, "eos_token_id": NEVER, "max_new_tokens": 12}
    with fastspec.continuous(model, TREE, rows=2, max_length=64) as batch:
        generated = []
        for _ in range(2):
            torch.manual_seed(5)
            generated.append(told([batch.submit(texts(6)[0], **given) for _ in range(2)]))
    assert generated[0] == generated[1] and generated[0][0] != generated[0][1]


KINDS = (
    partial(recurrent, "qwen3_next"),
    partial(windowed, "gemma2"),
    partial(shallow_model, "gpt2"),
    partial(seeing, "qwen2_5_vl"),
)


@pytest.mark.some("qwen3_next", "gemma2", "qwen2_5_vl")
@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.args[0])
def test_models_of_other_kinds_read_their_prompts_in_chunks_too(make):
    """With a recurrent state, with windows, without an adapter, and text alone with one that sees."""
    plain, model = make(), fastspec.patch(make())
    ids = texts(5, 23, 11, 3)
    with fastspec.continuous(model, "nasd", rows=2, max_length=60, prefill_chunk=7) as batch:
        generated = told([batch.submit(each, max_new_tokens=12, **GREEDY) for each in ids])
    assert generated == [alone(plain, each, 12) for each in ids]


@pytest.mark.slow
@pytest.mark.parametrize("assistant", ["autoregressive", TREE], ids=str)
def test_sampled_answers_follow_the_targets_distribution(assistant):
    """The second token of 4,000 answers, by a chi-squared test against the exact probabilities."""
    plain, model = made()
    prompt = texts(5)[0]
    with torch.no_grad():
        first = torch.softmax(plain(prompt[None]).logits[0, -1].double(), -1)
        after = torch.cat((prompt.expand(len(first), -1), torch.arange(len(first))[:, None]), 1)
        want = first @ torch.softmax(plain(after).logits[:, -1].double(), -1)
    with fastspec.continuous(model, assistant, rows=16, max_length=32) as batch:
        futures = [
            batch.submit(prompt, seed=seed, do_sample=True, top_k=0, max_new_tokens=2, eos_token_id=NEVER)
            for seed in range(4000)
        ]
        counts = torch.bincount(
            torch.tensor([generated[-1] for generated in told(futures)]), minlength=len(want)
        ).double()
    chi = ((counts - 4000 * want) ** 2 / (4000 * want)).sum()
    assert chi < len(want) + 5 * (2 * len(want)) ** 0.5  # five standard deviations


def test_a_streamer_gets_the_prompt_then_each_token_then_the_end():
    plain, model = made("bigram")
    ids, heard = texts(5, 7), [Recorder(), Recorder()]
    with fastspec.continuous(model, TREE, rows=2, max_length=64) as batch:
        config = GenerationConfig(max_new_tokens=9, do_sample=False, eos_token_id=NEVER)
        futures = [batch.submit(each, config, streamer) for each, streamer in zip(ids, heard, strict=True)]
        generated = told(futures)
    for each, streamer, row in zip(ids, heard, generated, strict=True):
        assert row == plain.generate(each[None], generation_config=config)[0].tolist()
        assert streamer.events == [[each.tolist()], *([token] for token in row[len(each) :]), "end"]


@pytest.mark.parametrize(
    "words, options",
    [
        ("one row", {"num_return_sequences": 2, "do_sample": True}),
        ("num_beams", {"num_beams": 2}),
        ("tokens alone", {"return_dict_in_generate": True}),
        ("room for 40", {"max_new_tokens": 36}),
        ("belongs to fastspec.continuous", {"assistant": "nasd"}),
        (CACHE, {CACHE: ()}),
        ("keep a state over a whole call", {"logits_processor": [lambda ids, scores: scores]}),
        ("keep a state over a whole call", {"stopping_criteria": [lambda ids, scores: torch.tensor([False])]}),
        ("pixel_values", {"pixel_values": torch.zeros(1)}),
        ("ends in padding", {"attention_mask": torch.tensor([[1, 1, 1, 1, 0]])}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_what_an_open_batch_does_not_decode_is_refused_at_once(words, options):
    _, model = made()
    with fastspec.continuous(model, TREE, rows=2, max_length=40) as batch:
        with pytest.raises(Unsupported, match=words):
            batch.submit(texts(5)[0], **{"max_new_tokens": 4, **options})
        with pytest.raises(ValueError, match="temperature"):
            batch.submit(texts(5)[0], temperature=-1.0, do_sample=True, max_new_tokens=4)
        for limit in (float("nan"), float("inf"), 35.5):
            with pytest.raises(Unsupported, match="has room for 40"):
                batch.submit(texts(5)[0], max_new_tokens=limit)
        assert batch.waiting == 0 and len(told([batch.submit(texts(5)[0], max_new_tokens=4, **GREEDY)])[0]) == 9


@pytest.mark.parametrize("limit", [{"max_new_tokens": 4.0}, {"max_new_tokens": 4.5}, {"max_length": 9.5}], ids=str)
def test_an_answer_is_as_long_as_generates_where_its_limit_is_a_fraction(limit):
    plain, model = made()
    ids = texts(5)[0]
    expected = plain.generate(ids[None], **GREEDY, **limit)[0].tolist()
    with fastspec.continuous(model, TREE, rows=2, max_length=40) as batch:
        assert told([batch.submit(ids, **GREEDY, **limit)]) == [expected]
    assert len(expected) == 5 + math.ceil(limit.get("max_new_tokens", 4.5))


def test_a_prompt_is_moved_to_the_models_device(monkeypatch):
    """With all tensors that come with it; a tokenizer leaves them on the host."""
    _, model = made()
    given: list[dict[str, Any]] = []

    def generate(**options: Any) -> Any:
        given.append(options)
        raise Unsupported("seen")

    with fastspec.continuous(model, "autoregressive", rows=1, max_length=40) as batch:
        batch._original = generate
        monkeypatch.setattr(one_prompt, "device_of", lambda model: torch.device("meta"))
        for ids in (texts(5)[0], texts(5)[0][None]):
            with pytest.raises(Unsupported, match="seen"):
                batch.submit(ids, attention_mask=torch.ones(1, 5), max_new_tokens=3)
    for options in given:
        assert (
            options["input_ids"].is_meta and options["attention_mask"].is_meta and options["input_ids"].shape == (1, 5)
        )


class Taking(torch.nn.Module):
    """An embedding that takes one token more."""

    def __init__(self, inner: torch.nn.Embedding) -> None:
        super().__init__()
        self.inner, self.weight = inner, inner.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(ids % 97)


def test_tokens_that_the_model_has_not_are_refused():
    """They would end the process on CUDA; here, with captured passes, those that come later."""
    plain, model = made()
    ids = texts(9)[0]
    with fastspec.continuous(model, "autoregressive", rows=2, max_length=40) as batch:
        for _ in range(2):  # the second time with settings that are known
            for token in (-1, 97):
                with pytest.raises(ValueError, match=f"tokens from .*{token}.* the model those from 0 to 96"):
                    batch.submit(torch.cat((ids, torch.tensor([token]))), max_new_tokens=4, **GREEDY)
            assert told([batch.submit(ids, max_new_tokens=4, **GREEDY)]) == [alone(plain, ids, 4)]
            model.model.embed_tokens, own = (
                Taking(model.model.embed_tokens),
                model.model.embed_tokens,
            )  # nobody knows what that has
            assert batch.submit(torch.cat((ids, torch.tensor([97]))), max_new_tokens=4, **GREEDY).result().shape == (
                1,
                14,
            )
            model.model.embed_tokens = own
        padded, mask = (
            torch.cat((torch.tensor([-1, 97]), ids)),
            torch.tensor([[0, 0] + [1] * 9]),
        )  # nobody reads what is masked
        found = batch.submit(padded, attention_mask=mask, max_new_tokens=4, **GREEDY).result()
        assert found[0, 2:].tolist() == alone(plain, ids, 4)


def test_prompts_with_images_are_refused():
    model = fastspec.patch(seeing("qwen2_5_vl"))
    with (
        fastspec.continuous(model, "nasd", rows=1, max_length=60) as batch,
        pytest.raises(Unsupported, match="tokens alone, without"),
    ):
        batch.submit(
            **{
                ("ids" if name == "input_ids" else name): each
                for name, each in prompts_with_images(model, ((2, 3),)).items()
            }
        )
    with pytest.raises(Unsupported, match="see more of a prompt"):
        fastspec.continuous(fastspec.patch(seeing("paligemma")), "nasd")


def test_a_padded_prompt_is_answered_as_by_generate():
    plain, model = made()
    ids = torch.cat((torch.zeros(3, dtype=torch.long), texts(6)[0]))[None]
    given = {"attention_mask": (ids > 0).long(), "max_new_tokens": 8, "repetition_penalty": 1.3, **GREEDY}
    with fastspec.continuous(model, TREE, rows=2, max_length=40) as batch:
        assert told([batch.submit(ids, **given)])[0] == plain.generate(ids, **given)[0].tolist()
