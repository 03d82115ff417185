"""Prompts of an open batch that wait for others, by a clock of the test's own."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.captured import stand_in
from helpers.open import GREEDY, alone, made, texts, told

import fastspec
from fastspec.generation.engine import gathering
from fastspec.generation.engine.gathering import LONGEST, MARGIN, Gathering
from fastspec.generation.engine.rounds import Rounds
from fastspec.patches.hf.changes import WeightSample


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test moves, in milliseconds."""
    clock = SimpleNamespace(ms=0.0, perf_counter=lambda: clock.ms / 1e3)
    monkeypatch.setattr(gathering, "time", clock)
    return clock


def known(clock: Any, *, every: int, one: float = 4.0, two: float = 4.2, rounds: int = 2000) -> Gathering:
    """What is known after rounds of 3 ms, before every so many of which a pass reads one prompt, or at times two."""
    found = Gathering(8)
    for number in range(rounds):
        if number % every == 0:
            count = 1 + (number // every % 4 == 0)
            with found.reading([128] * count):
                clock.ms += one if count == 1 else two
        clock.ms += 3.0
        found.ran(False, number % every > 0)
    return found


def test_prompts_wait_where_many_rows_go_on_and_others_come_soon(clock):
    found = known(clock, every=4)
    assert found.saved == pytest.approx(3.8)
    assert found.waits(1, 31) and not found.waits(1, 1) and not found.waits(8, 31)
    assert not known(clock, every=100).waits(1, 31)
    assert not known(clock, every=4, two=8.0).waits(1, 31), "two passes take no longer than one of two prompts"
    assert not Gathering(8).waits(1, 31)


def test_padding_of_prompts_that_join_others_is_no_gain(clock):
    """Where a pass takes as long as its tokens say, as that of a large model does, prompts of other widths save less
    than its fixed part, or nothing."""
    found = known(clock, every=4)
    for widths in [[96], [192]] * 8 + [[192, 96]] * 16:
        with found.reading(widths):
            clock.ms += 1.0 + 0.02 * len(widths) * max(widths)
    assert found.saved == 0.0 and not found.waits(1, 31)
    for widths in [[192, 192]] * 9:
        with found.reading(widths):
            clock.ms += 1.0 + 0.02 * len(widths) * max(widths)
    assert found.saved == pytest.approx(1.0) and found.waits(1, 31)
    for _ in range(9):
        with found.reading([64, 64]):  # which tells nothing: no pass has read 64 alone
            clock.ms += 1.0
    assert found.saved == pytest.approx(1.0)


def test_the_group_is_the_one_that_costs_all_rows_least(clock):
    found = known(clock, every=4)
    least = (2 * found.rate * 31 * found.saved / 3.0 / MARGIN) ** 0.5
    assert [found.waits(ready, 31) for ready in range(1, 9)] == [ready < least for ready in range(1, 9)]


def test_a_prompt_waits_a_few_rounds_at_most(clock):
    found, waited = known(clock, every=4), 0
    while found.waits(1, 31):
        clock.ms += 3.0
        found.ran(True, True)
        waited += 1
    assert waited == LONGEST


def test_what_captures_take_and_where_none_was_timed(clock, monkeypatch):
    found = Gathering(8)
    for _ in range(5):
        with found.reading([128]):
            clock.ms += 4.0
        found.ran(False, False)
    assert found.saved == pytest.approx(2.0) and not found.rounds
    with found.reading([128]):
        clock.ms += 900.0
        monkeypatch.setattr(gathering.SPENT, "captures", gathering.SPENT.captures + 0.9)
    assert max(found.alone[128]) == pytest.approx(4.0)


def test_a_clock_that_stands_still_costs_no_answer(monkeypatch, clock):
    """It says that rounds take no time: prompts wait no longer than they may."""
    stand_in(monkeypatch)
    plain, model = made()
    ids = texts(*[9] * 12)
    with fastspec.continuous(model, "nasd", rows=4, max_length=80) as batch:
        futures = [batch.submit(each, max_new_tokens=9 + at % 3, **GREEDY) for at, each in enumerate(ids)]
        assert told(futures) == [alone(plain, each, 9 + at % 3) for at, each in enumerate(ids)]
        found = batch._gathering
    assert found is not None and {*found.rounds} == {0.0}


@pytest.mark.parametrize("assistant", ["autoregressive", "nasd"])
def test_prompts_that_wait_say_what_they_would(monkeypatch, assistant):
    """They wait for one more while any row goes on, no longer than they may; rows go on meanwhile."""
    stand_in(monkeypatch)
    waits: list[tuple[int, int, bool]] = []
    counts: list[int] = []

    def waiting(self: Gathering, ready: int, going: int) -> bool:
        found = ready < 2 and self.waited < LONGEST
        waits.append((ready, self.waited, found))
        return found

    read = Gathering.reading
    monkeypatch.setattr(Gathering, "waits", waiting)
    monkeypatch.setattr(Gathering, "reading", lambda self, widths: (counts.append(len(widths)), read(self, widths))[1])
    plain, model = made()
    ids = texts(*(5 + place % 7 for place in range(24)))
    with fastspec.continuous(model, assistant, rows=4, max_length=80) as batch:
        with batch._changed:
            futures = [batch.submit(each, max_new_tokens=9 + 5 * (at % 3), **GREEDY) for at, each in enumerate(ids)]
        assert told(futures) == [alone(plain, each, 9 + 5 * (at % 3)) for at, each in enumerate(ids)]
    assert any(found for *_, found in waits) and max(waited for _, waited, _ in waits) <= LONGEST + 1
    assert sum(counts) == len(ids) and 2 in counts


@pytest.mark.parametrize("why", ["alone", "long", "whole", "cascade"])
def test_prompts_that_no_pass_reads_together_do_not_wait(monkeypatch, why):
    if why != "alone":
        stand_in(monkeypatch)
    asked: list[int] = []
    monkeypatch.setattr(Gathering, "waits", lambda self, ready, going: bool(asked.append(ready)))
    if why == "cascade":
        monkeypatch.setattr(fastspec.patches.open_turns.OpenTurns, "verifies", True)
    plain, model = made()
    ids = texts(*[70 if why == "long" else 9] * 6)
    chunk = None if why == "whole" else 100
    with fastspec.continuous(model, "autoregressive", rows=2, max_length=200, prefill_chunk=chunk) as batch:
        futures = [batch.submit(each, max_new_tokens=4 + at, **GREEDY) for at, each in enumerate(ids)]
        assert told(futures) == [alone(plain, each, 4 + at) for at, each in enumerate(ids)]
    assert not asked


def test_the_time_of_a_round_is_that_of_turns_with_nothing_else(monkeypatch):
    """Neither of those that read a prompt, of any length, nor of one whose round was launched before the batch
    was idle."""
    stand_in(monkeypatch)
    turns = list[tuple[bool, bool]]()
    ran, read = Gathering.ran, Rounds._read
    reads = list[int]()
    monkeypatch.setattr(Rounds, "_read", lambda self, room: (reads.append(1), read(self, room))[1])

    def noting(self: Gathering, waiting: bool, alone: bool) -> None:
        turns.append((bool(reads), alone))
        reads.clear()
        ran(self, waiting, alone)

    monkeypatch.setattr(Gathering, "ran", noting)
    plain, model = made()
    ids = texts(9, 70, 150)
    says = alone(plain, ids[0], 12)[9:]
    with fastspec.continuous(model, "autoregressive", rows=1, max_length=200, prefill_chunk=100) as batch:
        told([batch.submit(each, max_new_tokens=12, **GREEDY) for each in ids])
        last = next(at for at in range(6, 12) if says[at] not in says[:at])
        told([batch.submit(ids[0], max_new_tokens=12, do_sample=False, eos_token_id=says[last])])
        assert batch._widths.current.engine.in_flight, "the end was foreseen"
        told([batch.submit(ids[0], max_new_tokens=4, **GREEDY)])
    assert sum(was for was, _ in turns) >= 4 and not any(alone for was, alone in turns if was)
    assert [alone for _, alone in turns[-4:]] == [False, False, True, True]


def test_a_prompt_that_goes_on_after_a_rows_text_does_not_wait(monkeypatch):
    """It is read alone in any case; weights, for which the host waits for the device, are looked at once."""
    stand_in(monkeypatch)
    looked, holds = list[WeightSample](), WeightSample.holds
    monkeypatch.setattr(WeightSample, "holds", lambda self: (looked.append(self), holds(self))[1])
    monkeypatch.setattr(Gathering, "waits", lambda self, ready, going: self.waited < LONGEST)
    waited, read = list[tuple[bool, int]](), Rounds._read_alone

    def noting(self: Any, *given: Any, **more: Any) -> int:
        waited.append((more.get("prefix") is not None, self.gathering.waited))
        return read(self, *given, **more)

    monkeypatch.setattr(Rounds, "_read_alone", noting)
    plain, model = made()
    first, other, long = texts(140, 140, 9)
    turn = torch.cat((first, other[:9]))
    with fastspec.continuous(model, "autoregressive", rows=4, max_length=200, prefill_chunk=1024) as batch:
        told([batch.submit(first, max_new_tokens=2, **GREEDY)])
        with batch._changed:
            goes_on = batch.submit(long, max_new_tokens=150, **GREEDY)
        while batch.running < 1:
            time.sleep(1e-3)
        told([batch.submit(other, max_new_tokens=2, **GREEDY)])
        assert told([batch.submit(turn, max_new_tokens=2, **GREEDY)]) == [alone(plain, turn, 2)]
        told([goes_on])
    assert [prefix for prefix, _ in waited] == [False, False, False, True]
    assert waited[2][1] >= LONGEST and waited[3][1] <= 1 and len(looked) == 1
