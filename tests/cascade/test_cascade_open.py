"""The cascade as open batches: answers of its own `generate`, whatever is decoded beside them, and who leaves."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.cascade import Told, cascaded, stages
from helpers.generate import prompts, shallow_model
from helpers.tokenizers import DRAFT, TARGET
from transformers import GenerationConfig

import fastspec
from fastspec.cascade.decisions import Visit
from fastspec.cascade.predictor import Predictor
from fastspec.errors import FastSpecError, Unsupported
from fastspec.patches.call.processors import RoundStreamer, StreamedRound
from fastspec.patches.session import session_of

GREEDY = {"do_sample": False, "max_new_tokens": 24}
HIGH, SECONDS = 1e9, 120.0


@pytest.fixture(scope="module")
def model() -> Any:
    return cascaded(stages())


def config(model: Any, **over: Any) -> fastspec.Cascade:
    return replace(session_of(model).resources["cascade"].config, **over)


@contextmanager
def opened(model: Any, cascade: Any = "cascade", rows: int = 3, **options: Any) -> Iterator[Any]:
    with fastspec.continuous(model, cascade, rows=rows, **options) as batch:
        yield batch
    assert not batch.alive and not batch.running


class Heard(RoundStreamer):
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.rounds: list[StreamedRound] = []
        self.visits: list[Visit] = []

    def put_round(self, round: StreamedRound) -> None:
        self.rounds.append(round)

    def put_visit(self, visit: Visit) -> None:
        self.visits.append(visit)

    @property
    def tokens(self) -> list[int]:
        return [token for each in self.rounds for token in each.tokens]


def soak(model: Any, count: int, seed: int = 0, **options: Any) -> None:
    """So many mixed requests at once, each beside the cascade's own `generate`."""
    rng = random.Random(seed)
    asked = []
    for number in range(count):
        ids = prompts(rng.randint(1, 30), seed=seed + number)["input_ids"]
        settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": rng.choice([1, 2, 9, 24])}
        if rng.random() < 0.3:
            settings["repetition_penalty"] = 1.2
        if rng.random() < 0.7:
            settings["eos_token_id"] = rng.choice([5, [5, 9]])
        asked.append((ids, settings, rng.choice([0.0, 10.0, 40.0, 100.0, HIGH])))
    with opened(model, **options) as batch:
        heard = [Heard() if rng.random() < 0.5 else None for _ in asked]
        futures = [
            batch.submit(ids, streamer=streamer, price=price, **settings)
            for (ids, settings, price), streamer in zip(asked, heard, strict=True)
        ]
        got = [future.result(SECONDS) for future in futures]
    reached = set()
    for (ids, settings, price), out, future, streamer in zip(asked, got, futures, heard, strict=True):
        wanted = model.generate(ids, **settings, assistant=config(model, price=price))
        assert out.tolist() == wanted.tolist()
        (own,) = fastspec.report(model).last.explanations
        told = future.explanation
        assert [(each.stage, each.new_tokens, each.kept_tokens, each.handed_tokens) for each in told.visits] == [
            (each.stage, each.new_tokens, each.kept_tokens, each.handed_tokens) for each in own.visits
        ]
        for mine, theirs in zip(told.visits, own.visits, strict=True):
            assert mine.quality == pytest.approx(theirs.quality, abs=1e-4)
        if streamer is not None:
            assert streamer.tokens == out[0, ids.shape[1] :].tolist() and streamer.visits == list(told.visits)
        reached.add(told.stage)
    assert reached == {0, 1, 2}


def test_answers_are_those_of_the_cascades_own_generate(model: Any) -> None:
    soak(model, 24)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 4])
def test_a_hundred_mixed_requests_are_answered_as_by_generate(model: Any, rows: int) -> None:
    soak(model, 100, seed=100, rows=rows, prefill_chunk=8)
