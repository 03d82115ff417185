"""What an open batch tells a streamer of its rounds, and log-probabilities of answers and texts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.open import GREEDY, SECONDS, alone, made, texts
from transformers.generation.logits_process import LogitsProcessorList

import fastspec
from fastspec.patches.call.processors import RoundStreamer, StreamedRound, TokenPenalties
from fastspec.patches.scoring import text_logprobs

TREE = fastspec.Eagle3(depth=3, top_k=2, total_tokens=6)


class Rounds(RoundStreamer):
    """Keeps what it is told."""

    def __init__(self, logprobs: int | None) -> None:
        self.logprobs, self.told = logprobs, []

    def put_round(self, round: StreamedRound) -> None:
        self.told.append(round)


def wanted(plain: Any, text: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [T, V] behind each token of a text."""
    with torch.no_grad():
        return plain(text[None]).logits[0].float().log_softmax(-1)


@pytest.mark.parametrize("assistant", [TREE, "nasd", "autoregressive"])
def test_rounds_tell_of_drafts_and_log_probabilities(assistant: Any) -> None:
    """Of the model's own distribution, whatever processors make of it; rows that ask for none have none."""
    plain, model = made("bigram")
    with fastspec.continuous(model, assistant, rows=3, max_length=80) as batch:
        streamers = [Rounds(count) for count in (4, 0, None)]
        asked = list(zip(texts(9, 5, 7), streamers, strict=True))
        futures = [
            batch.submit(text, streamer=streamer, max_new_tokens=30, repetition_penalty=1.2, **GREEDY)
            for text, streamer in asked
        ]
        answers = [future.result(SECONDS)[0] for future in futures]
    for (text, streamer), answer in zip(asked, answers, strict=True):
        new = answer[len(text) :].tolist()
        assert [token for each in streamer.told for token in each.tokens] == new
        assert len(new) == len(streamer.told) + sum(each.accepted for each in streamer.told)
        assert all(each.accepted <= each.drafted for each in streamer.told)
        assert (sum(each.drafted for each in streamer.told) > 0) == (assistant != "autoregressive")
        if streamer.logprobs is None:
            assert all(each.logprobs is None for each in streamer.told)
            continue
        found = [one for each in streamer.told for one in each.logprobs or ()]
        logs = wanted(plain, answer)[len(text) - 1 : -1]
        assert [one.token for one in found] == new
        for one, row in zip(found, logs, strict=True):
            assert one.logprob == pytest.approx(float(row[one.token]), abs=1e-4)
            best = row.topk(streamer.logprobs)
            assert [token for token, _ in one.top] == best.indices.tolist()
            assert [value for _, value in one.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.some("1", "65", "130")
@pytest.mark.parametrize("count", [1, 2, 65, 66, 130])
def test_a_text_is_scored_beside_an_open_batch(count: int) -> None:
    plain, model = made()
    with fastspec.continuous(model, "nasd", rows=2, max_length=80) as batch:
        running = batch.submit(texts(9)[0], max_new_tokens=60, **GREEDY)
        text = texts(count, seed=1)[0]
        found = [each for part in text_logprobs(model, text.tolist(), 2) for each in part]
        logs = wanted(plain, text)
        running.result(SECONDS)
    assert [each.token for each in found] == text[1:].tolist()
    for each, row in zip(found, logs, strict=False):
        assert each.logprob == pytest.approx(float(row[each.token]), abs=1e-4)
        assert [token for token, _ in each.top] == row.topk(2).indices.tolist()


@pytest.mark.some("3.0", "-2.0-9.0")
@pytest.mark.each_value  # what is counted does not hang on who drafts
@pytest.mark.parametrize("assistant", [TREE, "nasd"])
@pytest.mark.parametrize(("frequency", "presence"), [(3.0, 0.0), (0.0, 20.0), (-2.0, 9.0)])
def test_penalties_count_the_tokens_of_the_answer(assistant: Any, frequency: float, presence: float) -> None:
    """In an open batch with drafts as step by step."""
    plain, model = made("bigram")
    with fastspec.continuous(model, assistant, rows=3, max_length=80) as batch:
        prompts = texts(9, 5, 7)
        futures = []
        for text in prompts:
            penalties = LogitsProcessorList([TokenPenalties(frequency, presence, len(text))])
            futures.append(batch.submit(text, max_new_tokens=40, logits_processor=penalties, **GREEDY))
        got = [future.result(SECONDS)[0].tolist() for future in futures]
        assert batch.stats.accepted > 0 or assistant == "nasd"  # which drafts what came before
    for text, answer in zip(prompts, got, strict=True):
        ids = text
        for _ in range(40):
            scores = plain(ids[None]).logits[0, -1]
            counts = torch.bincount(ids[len(text) :], minlength=len(scores))
            ids = torch.cat((ids, (scores - frequency * counts - presence * (counts > 0)).argmax()[None]))
        assert answer == ids.tolist()
    assert got != [alone(plain, text, 40) for text in prompts]


def test_top_h_is_refused_before_its_processor_is_made() -> None:
    _, model = made()
    with fastspec.continuous(model, "nasd", rows=1, max_length=80) as batch:
        with pytest.raises(fastspec.errors.Unsupported, match=r"top_h=0\.5: an open batch"):
            batch.submit(texts(5)[0], max_new_tokens=2, do_sample=True, top_h=0.5)
        batch.submit(texts(5)[0], max_new_tokens=2, top_h=0.5, **GREEDY).result(SECONDS)
