"""Logits processors, transformers' own and a user's, see and change what they would in plain decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.generate import LENGTH, NEVER, Oracle, free, prompts, same, stats
from helpers.models import tiny_model
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria
from transformers.generation import logits_process as lp

import fastspec
from fastspec import Unsupported
from fastspec.generation.engine import verifier
from fastspec.kernels.verification.reference import SamplingSettings
from fastspec.patches.call.processors import read_settings
from fastspec.patches.session import session_of


@pytest.mark.each_value
@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.4},
        {"no_repeat_ngram_size": 2},
        {"encoder_no_repeat_ngram_size": 1},
        {"encoder_repetition_penalty": 2.0},
        {"suppress_tokens": [7, 8, 9]},
        {"begin_suppress_tokens": list(range(6, 60))},
        {"forced_eos_token_id": 7},
        {"exponential_decay_length_penalty": (3, 1.5)},
        {"renormalize_logits": True, "repetition_penalty": 1.2, "min_new_tokens": 4},
    ],
    ids=lambda options: next(iter(options)),
)
def test_built_in_processors(pair, assistant, options):
    same(pair, assistant, prompts(6, 2, 9), **options)


@pytest.mark.each_value
def test_a_temperature_that_leaves_scores_no_room_is_refused(pair, assistant):
    """Plain decoding raises there too; the least that it takes is greedy."""
    original, patched = pair
    cold = {"do_sample": True, "top_k": 0, "top_p": 1.0, "max_new_tokens": 4}
    with pytest.raises(RuntimeError, match="probability"):
        original.generate(**prompts(6), temperature=1e-40, **cold)
    with pytest.raises(Unsupported, match="too near 0"):
        patched.generate(**prompts(6), assistant=assistant, temperature=1e-40, **cold)
    assert torch.equal(
        patched.generate(**prompts(6), assistant=assistant, temperature=1e-20, **cold),
        original.generate(**prompts(6), max_new_tokens=4, do_sample=False),
    )


@pytest.mark.each_value
def test_bad_words_and_bias(pair, assistant):
    inputs = prompts(6, 2)
    texts = free(pair[0], inputs)
    same(pair, assistant, inputs, bad_words_ids=[[texts[0][3]], texts[1][4:6], texts[0][6:9]])
    same(pair, assistant, inputs, sequence_bias=[[[texts[0][2]], -9.0], [[11, 12], 6.0]])


@pytest.mark.each_value
def test_prefix_allowed_tokens_sees_each_row_with_its_own_tokens(pair, assistant):
    inputs = prompts(6, 6, 6)
    starts = inputs["input_ids"].tolist()

    def allowed(row: int, ids: Tensor) -> list[int]:
        assert ids[:6].tolist() == starts[row]
        return [token for token in range(6, 96) if token % 3 == (row + int(ids[-1])) % 3]

    same(pair, assistant, inputs, prefix_allowed_tokens_fn=allowed)


class Shift(LogitsProcessor):
    """A user's processor that looks at nothing but the scores."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.roll(1, -1)


class Parity(LogitsProcessor):
    """A user's processor that looks at the tokens so far and at the row, and writes in place."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        for row in range(input_ids.shape[0]):
            scores[row, (int(input_ids[row].sum()) + row) % 2 :: 2] -= 5.0
        return scores


@pytest.mark.each_value
@pytest.mark.parametrize("processor", [Shift, Parity])
def test_user_processors(pair, assistant, processor):
    same(pair, assistant, prompts(5, 9, 2), logits_processor=LogitsProcessorList([processor()]))


@pytest.mark.each_value
def test_stateful_user_processor_is_called_once_per_token(pair, assistant):
    """For a single row the calls are those of plain decoding, so that even a processor that counts them agrees."""

    class Counting(LogitsProcessor):
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            self.calls += 1
            return scores.roll(self.calls % 3, -1)

    texts = [
        model.generate(
            **prompts(5),
            do_sample=False,
            max_new_tokens=LENGTH,
            eos_token_id=NEVER,
            logits_processor=[Counting()],
            **extra,
        ).tolist()
        for model, extra in zip(pair, ({}, {"assistant": assistant}), strict=True)
    ]
    assert texts[0] == texts[1]


class Seen(LogitsProcessor):
    """Writes down every prefix that it is asked about."""

    def __init__(self) -> None:
        self.prefixes: list[tuple[int, ...]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.prefixes += map(tuple, input_ids.tolist())
        return scores


def shown(model: Any, inputs: dict[str, Tensor], **options: Any) -> tuple[list[list[int]], list[tuple[int, ...]]]:
    """The texts of a model, and the prefixes that a processor saw, in order."""
    seen = Seen()
    out = model.generate(**inputs, do_sample=False, logits_processor=[seen], **options)
    return out.tolist(), seen.prefixes


@pytest.mark.parametrize("lengths", [(6,), (6, 3, 9)])
@pytest.mark.parametrize("place", [1, 4, 7, LENGTH])
@pytest.mark.parametrize("count", [1, 3, 8, LENGTH])
def test_processors_see_no_prefix_that_plain_decoding_does_not_show_them(pair, lengths, place, count):
    """Where a text ends inside a round, by an end token or by its length, the walk down a long right draft stops
    there."""
    inputs, width, rows = prompts(*lengths), max(lengths), len(lengths)
    texts = free(pair[0], inputs, 40)
    ends = [row[place] for row in texts] if place < LENGTH else [NEVER]
    options = {"max_new_tokens": count, "eos_token_id": ends}
    expected, plain = shown(pair[0], inputs, **options)
    got, seen = shown(pair[1], inputs, **options, assistant=Oracle(texts, set(range(rows))))
    assert got == expected
    assert seen == plain
    emitted = [
        next((i + 1 for i, token in enumerate(row[width:]) if token in ends), len(row) - width) for row in expected
    ]
    assert stats(pair[1]).rounds <= rows + max(emitted) // 7  # each end of a row but the last cuts a round


@pytest.mark.each_value
@pytest.mark.parametrize("lengths", [(6,), (6, 3, 9)])
@pytest.mark.parametrize("place", [1, 4, 7])
def test_processors_see_nothing_behind_what_a_users_criterion_stopped(pair, lengths, place):
    """A criterion that stops a row inside a round ends the walk too, and is asked once about each text."""
    inputs, width, rows = prompts(*lengths), max(lengths), len(lengths)
    texts = free(pair[0], inputs, 40)
    asked: list[tuple[int, ...]] = []

    class Stops(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            asked.extend(map(tuple, input_ids.tolist()))
            return torch.tensor(
                [row[width:] == text[: place + 1] for row, text in zip(input_ids.tolist(), texts, strict=True)]
            )

    options = {"max_new_tokens": LENGTH, "eos_token_id": NEVER, "stopping_criteria": [Stops()]}
    expected, plain = shown(pair[0], inputs, **options)
    wanted = list(asked)
    asked.clear()
    got, seen = shown(pair[1], inputs, **options, assistant=Oracle(texts, set(range(rows))))
    assert got == expected
    assert seen == plain and asked == wanted


TEMPERATURE, TOP_K = lp.TemperatureLogitsWarper(0.7), lp.TopKLogitsWarper(5)
TOP_P, MIN_P = lp.TopPLogitsWarper(0.9), lp.MinPLogitsWarper(0.1)


class Warmer(lp.TemperatureLogitsWarper):
    """A user's warper, which may do anything."""


@pytest.mark.parametrize(
    ("processors", "distribution"),
    [
        ([], None),
        ([TEMPERATURE], SamplingSettings(0.7)),
        ([TOP_K, MIN_P], SamplingSettings(top_k=5, min_p=0.1)),
        ([TEMPERATURE, TOP_K, TOP_P, MIN_P], SamplingSettings(0.7, 5, 0.9, 0.1)),
        ([TOP_P, TOP_K], None),
        ([TOP_P, TOP_P], None),
        ([Warmer(0.7), TOP_P], None),
        ([TEMPERATURE, lp.TypicalLogitsWarper(0.9)], None),
        ([lp.TopKLogitsWarper(5, filter_value=-1e9)], None),
        ([lp.TopPLogitsWarper(0.9, min_tokens_to_keep=2)], None),
        ([lp.MinPLogitsWarper(0.1, min_tokens_to_keep=2)], None),
        ([lp.RepetitionPenaltyLogitsProcessor(1.2), TEMPERATURE], None),
    ],
    ids=lambda value: "-".join(type(each).__name__ for each in value) if isinstance(value, list) else str(value),
)
def test_only_the_four_warpers_in_their_order_are_a_distribution(processors, distribution):
    assert read_settings(LogitsProcessorList(processors)) == distribution


@pytest.fixture
def distributions(monkeypatch):
    """The distributions that the rounds' choices were made under."""
    seen: list[SamplingSettings | None] = []
    choose = verifier.choose

    def choosing(scores, uniform, ops, distribution=None):
        seen.append(distribution)
        return choose(scores, uniform, ops, distribution)

    monkeypatch.setattr(verifier, "choose", choosing)
    return seen


def drawn(model: Any, assistant: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    settings = {
        "do_sample": True,
        "max_new_tokens": LENGTH,
        "eos_token_id": NEVER,
        "temperature": 0.7,
        "top_k": 5,
        "top_p": 0.9,
    }
    return model.generate(**prompts(6, 3), **{**settings, **options}, assistant=assistant)


@pytest.mark.each_value
def test_sampled_rounds_process_no_scores(pair, assistant, distributions, monkeypatch):
    """The warpers are called for the first token alone, and the tokens are those of the processed scores."""
    calls, warp = [0], lp.TopPLogitsWarper.__call__

    def warping(self, ids, scores):
        calls[0] += 1
        return warp(self, ids, scores)

    monkeypatch.setattr(lp.TopPLogitsWarper, "__call__", warping)
    texts = drawn(pair[1], assistant).tolist()
    count = stats(pair[1]).rounds
    assert calls[0] == 1 and distributions == [None] + [SamplingSettings(0.7, 5, 0.9)] * count and count > 1
    out = drawn(pair[1], assistant, return_dict_in_generate=True, output_scores=True)
    assert (
        out.sequences.tolist() == texts and distributions[count + 1 :] == [None] * (1 + count) and calls[0] == 2 + count
    )


@pytest.mark.each_value
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"repetition_penalty": 1.2},
        {"typical_p": 0.9},
        {"logits_processor": LogitsProcessorList([Shift()])},
        {"return_dict_in_generate": True, "output_scores": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_all_other_calls_process_their_scores(pair, assistant, distributions, options):
    drawn(pair[1], assistant, **options)
    assert not any(distributions)
    drawn(pair[1], assistant)
    assert distributions[-1] == SamplingSettings(0.7, 5, 0.9)


def test_drafts_that_were_drawn_need_processed_scores(pair, monkeypatch):
    seen: list[Tensor] = []
    walk = verifier.walk_drawn
    monkeypatch.setattr(
        verifier, "walk_drawn", lambda tree, scores, *rest: (seen.append(scores), walk(tree, scores, *rest))[1]
    )
    drawn(pair[1], fastspec.Speculative(early_exit=1))
    assert seen and all((scores > -torch.inf).sum(-1).max() <= 5 for scores in seen)


def test_captured_rounds_that_process_no_scores_are_not_those_of_calls_that_want_them(captures):
    model = tiny_model()
    fastspec.patch(model)
    for options in ({}, {"temperature": 0.6}, {"return_dict_in_generate": True, "output_scores": True}, {}):
        drawn(model, "autoregressive", **options)
    assert len(session_of(model).engines.held) == 3
    out = drawn(model, "autoregressive", return_dict_in_generate=True, output_scores=True)
    assert all((scores > -torch.inf).sum(-1).max() <= 5 for scores in out.scores)
