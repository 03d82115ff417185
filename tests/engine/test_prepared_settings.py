"""Settings that were prepared before: a prompt that brings them again is what `generate` would make of it, and goes
through it no more."""

from __future__ import annotations

from types import MethodType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from helpers.grammars import END, TOKENIZER, terse
from helpers.models import tiny_model
from helpers.open import GREEDY, SECONDS, Gate, alone, made, texts, told
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import GenerationConfig, TopPLogitsWarper
from transformers.generation import utils

import fastspec
from fastspec import FastSpecError, Unsupported
from fastspec.patches.call.grammar import GrammarState
from fastspec.patches.call.one_prompt import PreparedPrompt, SettingsCache, prepare
from fastspec.patches.call.processors import Streaming
from fastspec.patches.session import session_of

SETTLED: dict[str, Any] = {
    "do_sample": st.booleans(),
    "temperature": st.sampled_from([0.3, 1.0, 1.7]),
    "top_k": st.sampled_from([0, 3, 50]),
    "top_p": st.sampled_from([0.4, 1.0]),
    "min_p": st.sampled_from([None, 0.1]),
    "eos_token_id": st.sampled_from([None, 7, [7, 9]]),
    "pad_token_id": st.sampled_from([0, 3]),
}
OTHERS: dict[str, Any] = {
    "repetition_penalty": st.sampled_from([1.0, 1.3]),
    "min_new_tokens": st.sampled_from([None, 2]),
    "max_time": st.sampled_from([None, 60.0]),
    "suppress_tokens": st.sampled_from([None, [5, 6]]),
    "typical_p": st.sampled_from([1.0, 0.5]),
    "no_repeat_ngram_size": st.sampled_from([0, 2]),
    "max_length": st.sampled_from([None, 64]),
    "epsilon_cutoff": st.sampled_from([0.0, 0.1]),
}


class Counted:
    """A model's own `generate`, which counts its calls."""

    def __init__(self, model: Any) -> None:
        self.generate, self.calls = type(model).generate.__get__(model), 0
        self.__func__ = type(model).generate

    def __call__(self, **options: Any) -> Any:
        self.calls += 1
        return self.generate(**options)


class Seen:
    """A streamer that takes rounds."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self.rounds: list[list[int]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.prompts.append(value[0].tolist())

    def put_tokens(self, tokens: list[int]) -> None:
        self.rounds.append(tokens)

    def end(self) -> None:
        self.ended += 1


def asked(ids: Tensor, config: GenerationConfig, **more: Any) -> dict[str, Any]:
    return {"input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None], "generation_config": config, **more}


def asked_by_name(ids: Tensor, settings: dict[str, Any], mask: bool) -> dict[str, Any]:
    """The same, with settings as keywords, and without a mask where nothing says that all of it counts."""
    return {"input_ids": ids[None], **({"attention_mask": torch.ones_like(ids)[None]} if mask else {}), **settings}


def like(one: PreparedPrompt, other: PreparedPrompt) -> None:
    """Both are the same prompt."""
    assert torch.equal(one.ids, other.ids) and torch.equal(one.shown, other.shown)
    assert (one.limit, one.ends, one.stop is None) == (other.limit, other.ends, other.stop is None)
    mine, theirs = one.rule, other.rule
    assert (mine.sample, mine.seed, mine.settings, mine.is_plain) == (
        theirs.sample,
        theirs.seed,
        theirs.settings,
        theirs.is_plain,
    )
    assert (mine.process is None, mine.process_at is None) == (theirs.process is None, theirs.process_at is None)
    if mine.process is not None:
        scores = torch.randn(3, 97, generator=torch.Generator().manual_seed(0))
        assert torch.equal(mine.process(scores.clone()), theirs.process(scores.clone()))  # type: ignore[misc]


@given(
    settings=st.lists(st.fixed_dictionaries(SETTLED, optional=OTHERS), min_size=1, max_size=3),
    order=st.lists(st.integers(0, 2), max_size=6),
)
def test_a_prompt_of_known_settings_is_what_generate_makes_of_it(
    settings: list[dict[str, Any]], order: list[int]
) -> None:
    model = fastspec.patch(tiny_model())
    known, original = SettingsCache(), Counted(model)
    for step, index in enumerate(order):
        ids = texts(3 + step, seed=step)[0]
        config = GenerationConfig(max_new_tokens=2 + step, **settings[index % len(settings)])
        mine = prepare(model, original, asked(ids, GenerationConfig.from_dict(config.to_dict())), 5, known)
        like(mine, prepare(model, Counted(model), asked(ids, config), 5))
    assert original.calls <= len(order)


@given(
    settings=st.lists(st.fixed_dictionaries(SETTLED, optional=OTHERS), min_size=1, max_size=3),
    order=st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=6),
    own=st.booleans(),
)
def test_a_prompt_of_known_keywords_is_what_generate_makes_of_it(
    settings: list[dict[str, Any]], order: list[tuple[int, bool]], own: bool
) -> None:
    model = fastspec.patch(tiny_model())
    known, original = SettingsCache(), Counted(model)
    for step, (index, mask) in enumerate(order):
        named = settings[index % len(settings)] | {"max_new_tokens": 2 + step}
        config = {"generation_config": GenerationConfig(temperature=0.9, max_new_tokens=9)} if own else {}
        given = asked_by_name(texts(3 + step, seed=step)[0], named, mask) | config
        like(prepare(model, original, dict(given), 5, known), prepare(model, Counted(model), dict(given), 5))
    assert original.calls <= len(order)


@pytest.mark.parametrize("mask", [False, True])
def test_generate_prepares_keywords_once(mask: bool) -> None:
    model = fastspec.patch(tiny_model())
    known, original = SettingsCache(), Counted(model)
    for count in (4, 9, 2):
        given = asked_by_name(texts(count + 3)[0], {"max_new_tokens": count, "do_sample": False}, mask)
        assert prepare(model, original, given, 1, known).limit == count
    assert original.calls == 1 and len(known.known) == 1


@pytest.mark.parametrize("where", ["call", "config", "model"])
def test_a_prompt_without_a_mask_that_has_tokens_of_padding_is_prepared_anew(where: str) -> None:
    model = fastspec.patch(tiny_model())
    known, original = SettingsCache(), Counted(model)
    ids = texts(6)[0]
    pad = int(ids[0])
    given: dict[str, Any] = {"max_new_tokens": 4, "eos_token_id": 90}
    if where == "call":
        given["pad_token_id"] = pad
    elif where == "config":
        given = {"generation_config": GenerationConfig(pad_token_id=pad, **given)}
    else:
        model.generation_config.pad_token_id = pad
    for calls in (1, 2):
        padded = prepare(model, original, {"input_ids": ids[None], **given}, 1, known)
        assert original.calls == calls and padded.ids.shape[1] < len(ids) == padded.shown.shape[1]
    whole = prepare(model, original, {"input_ids": ids[ids != pad][None], **given}, 1, known)
    assert original.calls == 2 and torch.equal(whole.ids[0], ids[ids != pad])


@pytest.mark.parametrize("sampled", [False, True])
def test_generate_prepares_settings_once(sampled: bool) -> None:
    model = fastspec.patch(tiny_model())
    known, original = SettingsCache(), Counted(model)
    for count in (4, 9, 2):
        config = GenerationConfig(max_new_tokens=count, do_sample=sampled, temperature=0.7, eos_token_id=7)
        assert prepare(model, original, asked(texts(count + 3)[0], config), 1, known).limit == count
    assert original.calls == 1 and len(known.known) == 1


@pytest.mark.parametrize("known", [None, SettingsCache()], ids=["anew", "known"])
def test_a_prompt_has_the_seed_that_it_was_given_or_one_that_is_drawn(known: SettingsCache | None) -> None:
    model = fastspec.patch(tiny_model())

    def seed(given: int | None, sampled: bool = True) -> int:
        config = GenerationConfig(max_new_tokens=4, do_sample=sampled)
        return prepare(model, Counted(model), asked(texts(6)[0], config), given, known).rule.seed

    for _ in range(2):
        assert seed(5) == 5 and seed(0) == 0 and seed(5, sampled=False) == 0
        torch.manual_seed(1)
        drawn = seed(None), seed(None)
        torch.manual_seed(1)
        assert drawn == (seed(None), seed(None)) and drawn[0] != drawn[1]


@pytest.mark.parametrize("count", [0, -3])
def test_an_answer_of_no_tokens_is_refused_whatever_is_known(count: int) -> None:
    model = fastspec.patch(tiny_model())
    known, original = SettingsCache(), Counted(model)
    prepare(model, original, asked(texts(6)[0], GenerationConfig(max_new_tokens=4)), 1, known)
    config = GenerationConfig(max_new_tokens=4)
    config.max_new_tokens = count
    with pytest.raises(ValueError, match="greater than 0"):
        prepare(model, original, asked(texts(6)[0], config), 1, known)


def test_one_entry_of_equal_settings_is_kept_and_none_of_tensors() -> None:
    model = fastspec.patch(tiny_model())
    known, original = SettingsCache(), Counted(model)
    for _ in range(3):
        prepare(
            model,
            original,
            {"input_ids": texts(6)[0][None], "generation_config": GenerationConfig(max_new_tokens=4)},
            1,
            known,
        )
    assert len(known.known) == 1 and original.calls == 1
    for _ in range(2):
        config = GenerationConfig(max_new_tokens=4, eos_token_id=torch.arange(7, 9))
        prepare(model, original, asked(texts(6)[0], config), 1, known)
    assert len(known.known) == 1 and original.calls == 3


@pytest.mark.parametrize("where", ["generate", "instance", "class", "everywhere"])
def test_nothing_is_kept_where_someone_else_prepares_calls(where: str, monkeypatch) -> None:
    """An own method may look at the prompt."""
    made = tiny_model()

    class Mine(type(made)):  # type: ignore[misc]
        def _get_stopping_criteria(self, *given: Any, **named: Any) -> Any:
            return super()._get_stopping_criteria(*given, **named)

    if where == "class":
        made.__class__ = Mine
    elif where == "instance":
        made._get_stopping_criteria = MethodType(Mine._get_stopping_criteria, made)
    elif where == "everywhere":
        real = utils.GenerationMixin._get_stopping_criteria
        monkeypatch.setattr(
            utils.GenerationMixin, "_get_stopping_criteria", lambda self, *given, **named: real(self, *given, **named)
        )
    model = fastspec.patch(made)
    known, original = SettingsCache(), Counted(model)
    if where == "generate":
        original.__func__ = Counted.__call__
    if where == "instance":
        made._get_stopping_criteria = type(made)._get_stopping_criteria.__get__(made)
    for _ in range(2):
        prepare(model, original, asked(texts(6)[0], GenerationConfig(max_new_tokens=4)), 1, known)
    assert original.calls == 2 and not known.known


def test_a_prompt_may_be_written_over_once_it_is_submitted() -> None:
    plain, model = made()
    ids = texts(9)[0]
    said, written = alone(plain, ids, 6), ids.clone()
    config, mask = GenerationConfig(max_new_tokens=6, eos_token_id=None), torch.ones_like(ids)[None]
    with fastspec.continuous(model, "autoregressive", rows=1) as batch:
        for _ in range(2):
            gate = Gate()
            first = batch.submit(texts(5)[0], streamer=gate, max_new_tokens=3, **GREEDY)
            written.copy_(ids)
            second = batch.submit(written, config, attention_mask=mask)
            written.fill_(7)
            gate.go.release(9)
            first.result(SECONDS)
            assert told([second]) == [said]


def test_a_prompt_that_cannot_be_moved_ends_alone_and_a_thread_that_fails_ends_all(monkeypatch) -> None:
    plain, model = made()
    ids, move = texts(5, 6), PreparedPrompt.move

    def failing(self: PreparedPrompt, device: Any) -> None:
        if self.ids.shape[1] == 6:
            raise MemoryError("no room")
        move(self, device)

    monkeypatch.setattr(PreparedPrompt, "move", failing)
    batch = fastspec.continuous(model, "autoregressive", rows=1)
    with pytest.raises(MemoryError, match="no room"):
        batch.submit(ids[1], max_new_tokens=3, **GREEDY).result(SECONDS)
    assert told([batch.submit(ids[0], max_new_tokens=3, **GREEDY)]) == [alone(plain, ids[0], 3)]

    def broken() -> None:
        raise ArithmeticError("planted")

    monkeypatch.setattr(batch._batch, "cancel", broken)
    with pytest.raises(ArithmeticError, match="planted"):
        batch.submit(ids[0], max_new_tokens=3, **GREEDY).result(SECONDS)
    with pytest.raises(FastSpecError, match="planted"):
        batch.submit(ids[0], max_new_tokens=3, **GREEDY)
    assert not batch.alive
    batch.close()


def test_streamers_that_take_lists_hear_of_rounds_first_and_others_get_tokens() -> None:
    class Both(Seen):
        def on_round(self, tokens: list[int], accepted: int) -> None:
            self.prompts.append([-1, *tokens])

    both, any_name = Both(), MagicMock()
    for streamer in (both, any_name):
        streaming = Streaming(streamer, 1, 0)
        streaming.emit(0, [4, 5], 1, False)
        streaming.emit(0, [6], 0, True)
    assert both.prompts == [[-1, 4, 5], [-1, 6]] and both.rounds == [[4, 5], [6]]
    assert [int(call.args[0]) for call in any_name.put.call_args_list] == [4, 5, 6]
    two = Streaming(Seen(), 2, 0)
    assert two.put_tokens is None


def others() -> dict[str, Any]:
    """What parts a call from one whose settings are known, by name: of a model and a call's options, each changed in
    place."""

    def mask(model: Any, options: dict[str, Any]) -> None:
        options["attention_mask"][0, 0] = 0

    def own_method(model: Any, options: dict[str, Any]) -> None:
        model._get_stopping_criteria = MethodType(type(model)._get_stopping_criteria, model)

    def default(model: Any, options: dict[str, Any]) -> None:
        model.generation_config.eos_token_id = 11

    def setting(model: Any, options: dict[str, Any]) -> None:
        options["generation_config"].eos_token_id = 12

    def option(model: Any, options: dict[str, Any]) -> None:
        options["repetition_penalty"] = 1.2

    def width(model: Any, options: dict[str, Any]) -> None:
        options["input_ids"] = options["input_ids"].int()

    return {each.__name__: each for each in (mask, own_method, default, setting, option, width)}


@pytest.mark.parametrize("change", others())
def test_what_changes_goes_through_generate_again(change: str) -> None:
    model = fastspec.patch(tiny_model())
    known, original = SettingsCache(), Counted(model)
    for step in range(3):
        options = asked(texts(6)[0], GenerationConfig(max_new_tokens=4))
        if step:
            others()[change](model, options)
        like(prepare(model, original, dict(options), 1, known), prepare(model, Counted(model), dict(options), 1))
    assert original.calls >= 2


def test_a_warper_of_another_kind_is_seen(monkeypatch) -> None:
    model = fastspec.patch(tiny_model())
    known, original = SettingsCache(), Counted(model)

    class Other(TopPLogitsWarper):
        """Of someone else's."""

    config = GenerationConfig(max_new_tokens=4, do_sample=True, top_p=0.5)
    prepare(model, original, asked(texts(6)[0], config), 1, known)
    monkeypatch.setattr(utils, "TopPLogitsWarper", Other)
    with pytest.raises(Unsupported, match="Other"):
        prepare(model, original, asked(texts(6)[0], config), 1, known)


def test_a_prompt_beyond_the_positions_is_refused_whatever_is_known() -> None:
    model = fastspec.patch(tiny_model("gpt2", n_positions=32))
    known, original = SettingsCache(), Counted(model)
    for length in (8, 33):
        options = asked(texts(length)[0], GenerationConfig(max_new_tokens=2))
        if length == 8:
            prepare(model, original, options, 1, known)
        else:
            with pytest.raises(Unsupported, match="positions end at 32"):
                prepare(model, original, options, 1, known)


def test_an_open_batch_answers_as_before_and_streams_rounds() -> None:
    plain, model = made()
    ids = texts(5, 9, 3, 7)
    with fastspec.continuous(model, "eagle3", rows=2) as batch:
        for _ in range(2):
            seen = [Seen() for _ in ids]
            config = GenerationConfig(max_new_tokens=10, eos_token_id=None)
            masks = [torch.ones_like(each)[None] for each in ids]
            futures = [
                batch.submit(*one, attention_mask=mask)
                for *one, mask in zip(ids, [config] * len(ids), seen, masks, strict=True)
            ]
            answers = told(futures)
            assert answers == [alone(plain, each, 10) for each in ids]
            for answer, streamer, each in zip(answers, seen, ids, strict=True):
                assert streamer.prompts == [each.tolist()] and streamer.ended == 1
                assert [token for part in streamer.rounds for token in part] == answer[len(each) :]
        assert len(batch._settled.known) == 1
    assert session_of(model).batches == 0


@pytest.mark.parametrize("how", [{"do_sample": False}, {"do_sample": True, "temperature": 0.7, "top_k": 20}], ids=str)
def test_generate_prepares_settings_beside_a_grammar_once(how: dict[str, Any]) -> None:
    """Each prompt has its own grammar, which begins anew; without one, or with more, these are other settings."""
    pytest.importorskip("llguidance")
    model = fastspec.patch(terse())
    known, original = SettingsCache(), Counted(model)
    words, numbers = (fastspec.Grammar(TOKENIZER, regex=form) for form in ("[ab]{40}", "[0-9]{40}"))
    for step, grammar in enumerate((words, numbers, words)):
        config = GenerationConfig(max_new_tokens=3 + step, eos_token_id=END, **how)
        given = asked(texts(5)[0], config, logits_processor=[grammar])
        mine = prepare(model, original, given, 5, known)
        like(mine, prepare(model, Counted(model), given, 5))
        assert isinstance(mine.rule.constraint, GrammarState) and mine.rule.constraint.grammar is grammar
        assert original.calls == 1
        mine.rule.constraint.follow([TOKENIZER.convert_tokens_to_ids("1" if grammar is numbers else "a")])
    for count, more in enumerate(
        ({}, {"logits_processor": [words, TopPLogitsWarper(0.5)]}, {"logits_processor": []}), 2
    ):
        given = asked(texts(5)[0], config, **more)
        like(prepare(model, original, given, 5, known), prepare(model, Counted(model), given, 5))
        assert original.calls == min(count, 3)
