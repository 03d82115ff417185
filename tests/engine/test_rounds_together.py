"""Prompts that one pass reads together, by themselves: what the target, the drafter, the verifier and the batch hear of it."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers_rounds import CPU, Counting, Reader, Stepping, Told, Waiting
from torch import Tensor

from fastspec.generation.drafters.base import MixingDrafter
from fastspec.generation.engine.rounds import TOGETHER_TOKENS, Rounds

ELSEWHERE = torch.device("meta")  # as the default device: a tensor that is made without one cannot meet the others


class Readers(Reader):
    """A target of several rows that keeps what it reads; a row's logits say how many tokens it has."""

    def prefill(self, ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        if self.fails:
            raise ValueError("unreadable")
        assert counts.device == CPU
        self.parts.append((ids.tolist(), counts.tolist()))
        return counts[:, None].float(), ids[..., None].float()


class Begun(Told):
    """A drafter of several rows."""

    fails = False

    def begin(self, ids: Tensor, counts: Tensor, features: Tensor, root: Tensor) -> None:
        if self.fails:
            raise ValueError("unheard of")
        assert counts.device == root.device == CPU
        self.told = ids.tolist(), counts.tolist(), features[..., 0].tolist(), root.tolist()


class Grouped(Stepping):
    """An engine whose passes are captured; `spoilt` targets cannot read together, `unwilling` drafters cannot begin so, and `closed` rows
    admit nobody."""

    def __init__(self, rows: int, drafts: bool = False) -> None:
        super().__init__(rows, drafts)
        self.target, self.sources = SimpleNamespace(captures=True), []  # type: tuple[Any, list[Any]]
        self.spoilt, self.unwilling, self.closed = False, False, set()  # type: tuple[bool, bool, set[int]]

    def entry(self, count: int) -> tuple[Any, Any]:
        if count == 1:
            return super().entry(1)
        target, drafter = Readers(), Begun() if self.drafts else None
        target.fails = self.spoilt
        if drafter is not None:
            drafter.fails = self.unwilling
        self.entries.append((target, drafter))
        return target, drafter

    def admit(self, row: int, target: Any, drafter: Any, root: Tensor, count: int, source: int | None = None) -> None:
        if row in self.closed:
            raise ValueError("no room")
        super().admit(row, target, drafter, root, count)
        self.sources.append(source)


class Choosy(Counting):
    """A verifier that refuses a prompt."""

    def __init__(self, *refused: int) -> None:
        super().__init__()
        self.refused = refused

    def first(self, logits: Tensor, text: tuple[Tensor, Tensor], prompts: list[int]) -> tuple[Tensor, Tensor]:
        if prompts[0] in self.refused:
            raise ValueError("not this one")
        return super().first(logits, text, prompts)


class Mixing(MixingDrafter):
    """A drafter that two of do the work of."""

    moves = True


Mixing.__abstractmethods__ = frozenset()


@pytest.fixture(autouse=True)
def _nothing_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastspec.generation.engine.rounds.take", lambda *given: None)


def made(batch: Any, verifier: Any = None, drafts: bool = False, **options: Any) -> tuple[Rounds[Any], Grouped]:
    engine = Grouped(len(batch.running), drafts)
    return Rounds(engine, batch, verifier or Counting(), engine.entry, **options), engine  # type: ignore[arg-type]


def told(batch: Any) -> list[Any]:
    return [entry for entry in batch.log if entry[0] != "expects"]


@pytest.mark.parametrize("drafts", [False, True])
def test_two_prompts_are_read_in_one_pass(drafts):
    """Each begins by its own length and tokens, padding apart, and takes its place of what was read for its row."""
    batch: Any = Waiting(3, 4, 2)
    batch.running[1] = True
    rounds, engine = made(batch, drafts=drafts)
    with ELSEWHERE:
        rounds.turn()
    ids = [[0, 1, 2, 3], [100, 101, 0, 0]]
    (target, drafter), = engine.entries  # fmt: skip
    assert target.parts == [(ids, [4, 2])]
    assert rounds.verifier.asked == [([[4.0]], [ids[0]], [4], [0]), ([[2.0]], [[100, 101]], [2], [1])]  # type: ignore[attr-defined]
    assert engine.admitted == [(0, 0, [4], 4), (2, 0, [2], 2)] and engine.sources == [0, 1]
    assert told(batch) == [
        ("next", 0, 0), ("next", 2, 1),
        ("seat", 0, 0, 4), ("read", 0, [4], [[4.5]], [[4.0]]), ("seat", 2, 1, 2), ("read", 1, [2], [[2.5]], [[2.0]]),
    ]  # fmt: skip
    assert batch.stats.joined == 2 and batch.reads_together
    assert not drafts or drafter.told == (ids, [4, 2], [[0.0, 1.0, 2.0, 3.0], [100.0, 101.0, 0.0, 0.0]], [4, 2])  # type: ignore[union-attr]


def test_a_refused_prompt_leaves_the_others_their_places():
    batch: Any = Waiting(4, 4, 2, 3, 5)
    rounds, engine = made(batch, Choosy(1), drafts=True)
    rounds.turn()
    (_, drafter), = engine.entries  # fmt: skip
    assert drafter.told[3] == [4, 0, 3, 5]  # type: ignore[union-attr]
    assert engine.admitted == [(0, 0, [4], 4), (2, 0, [3], 3), (3, 0, [5], 5)] and engine.sources == [0, 2, 3]
    assert ("refuse", 1, "not this one") in batch.log and [entry[1] for entry in batch.log if entry[0] == "read"] == [0, 2, 3]


def test_what_one_row_cannot_take_is_that_prompt_s():
    batch: Any = Waiting(2, 4, 2)
    rounds, engine = made(batch)
    engine.closed = {0}
    rounds.turn()
    assert ("refuse", 0, "no room") in batch.log and engine.admitted == [(1, 0, [2], 2)] and batch.reads_together


def test_what_cannot_be_read_together_is_read_alone_from_then_on():
    batch: Any = Waiting(2, 4, 2)
    rounds, engine = made(batch)
    engine.spoilt = True
    with pytest.warns(RuntimeWarning, match=r"2 prompts could not be read in one pass \(ValueError: unreadable\)"):
        rounds.turn()
    assert engine.admitted == [(0, 1, [4], 4), (1, 2, [2], 2)] and engine.sources == [None, None] and not batch.reads_together
    assert [target.parts for target, _ in engine.entries] == [[], [[0, 1, 2, 3]], [[100, 101]]]
    batch.queue.extend([(2, 3), (3, 3)])
    batch.running, batch.reserved = [False, False], set()
    rounds.turn()
    assert engine.admitted[2:] == [(0, 3, [3], 3), (1, 4, [3], 3)]


def test_a_prompt_that_cannot_be_read_alone_either_is_what_fails():
    """The other was read, and later ones are read together."""
    batch: Any = Waiting(2, 4, 2)
    rounds, engine = made(batch)
    engine.spoilt, engine.failing = True, {2}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rounds.turn()
    assert engine.admitted == [(0, 1, [4], 4)] and ("refuse", 1, "unreadable") in batch.log and batch.reads_together


@pytest.mark.parametrize("refused", [(), (1,)])
def test_first_tokens_that_are_known_stay_when_a_drafter_cannot_begin(refused):
    """No prompt is asked for its first token twice, and one that was refused is not read again."""
    batch: Any = Waiting(2, 4, 2)
    rounds, engine = made(batch, Choosy(*refused), drafts=True)
    engine.unwilling = True
    with pytest.warns(RuntimeWarning, match=rf"{2 - len(refused)} prompts could not be read in one pass \(ValueError: unheard of\)"):
        rounds.turn()
    kept = [0] if refused else [0, 1]
    assert [prompts for *_, prompts in rounds.verifier.asked] == [[each] for each in kept]  # type: ignore[attr-defined]
    assert engine.admitted == [(0, 1, [4], 4), (1, 2, [2], 2)][: len(kept)]
    assert [entry[3] for entry in batch.log if entry[0] == "read"] == [[[4.5]], [[2.5]]][: len(kept)]


def test_a_warning_that_is_an_error_is_the_prompts():
    batch: Any = Waiting(2, 4, 2)
    rounds, engine = made(batch)
    engine.spoilt = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rounds.turn()
    assert [entry[1] for entry in batch.log if entry[0] == "refuse"] == [0, 1]
    assert all("could not be read in one pass" in entry[2] for entry in batch.log if entry[0] == "refuse")


def test_a_pass_counts_with_its_padding():
    """For what one turn may read while others go on: 20 and 1 are 40, which leaves 24 of 64."""
    for third, passes in ((24, 2), (25, 1)):
        batch: Any = Waiting(4, 20, 1, third)
        batch.running[3] = True
        rounds, engine = made(batch, chunk=64)
        rounds.turn()
        assert len(engine.entries) == passes, third


def test_the_next_prompt_waits_for_a_turn_that_has_room_for_all_of_it():
    for together, parts in ((2, [[3], [4]]), (1, [[3], [2, 2]])):
        batch: Any = Waiting(3, 3, 4)
        batch.running[1] = True
        rounds, engine = made(batch, chunk=5, together=together)
        rounds.turn()
        assert len(engine.entries) == (1 if together == 2 else 2)
        rounds.turn()
        assert [[len(part) for part in target.parts] for target, _ in engine.entries] == parts


def test_a_prompt_longer_than_a_turn_does_not_wait():
    batch: Any = Waiting(3, 3, 6)
    batch.running[1] = True
    rounds, engine = made(batch, chunk=5)
    rounds.turn()
    assert [[len(part) for part in target.parts] for target, _ in engine.entries] == [[3], [2]]


@pytest.mark.parametrize(("rows", "gathered"), [(1, 1), (31, 1), (32, 2), (47, 2), (128, 8), (200, 8)])
def test_rows_stand_idle_for_prompts_that_nobody_waits_for(rows, gathered):
    assert made(Waiting(rows))[0].gathered == gathered and made(Waiting(rows), chunk=9)[0].gathered == 1
    assert made(Waiting(rows), together=2)[0].gathered == min(2, gathered)


def test_what_passes_are_not_captured_for_or_rows_cannot_move_between_is_read_alone():
    batch: Any = Waiting(2, 4, 2)
    engine = Grouped(2)
    for captures, drafter, together in (
        (True, None, 8), (False, None, 1), (True, SimpleNamespace(moves=True), 8), (True, SimpleNamespace(moves=False), 1),
        (True, object.__new__(Mixing), 1),
    ):  # fmt: skip
        engine.target.captures, engine.drafter = captures, drafter  # type: ignore[assignment]
        assert Rounds(engine, batch, Counting(), engine.entry).together == together  # type: ignore[arg-type]


@pytest.mark.parametrize(("lengths", "count"), [
    ([9] * 9, 8), ([9] * 7, 4), ([9] * 3, 2), ([9], 1), ([TOGETHER_TOKENS // 4] * 8, 4), ([TOGETHER_TOKENS // 2, 9, 9, 9], 2),
    ([TOGETHER_TOKENS, 9], 1),
])  # fmt: skip
def test_a_pass_takes_a_power_of_two_that_fits(lengths, count):
    batch: Any = Waiting(9, *lengths)
    rounds, _ = made(batch)
    assert rounds._count_of_next(None) == count and rounds._count_of_next(1) == 1
    batch.reads_together = False
    assert rounds._count_of_next(None) == 1
