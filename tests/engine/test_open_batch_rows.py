"""The rows of an open batch on the host: who holds which, whose error is whose, and who leaves."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.open import GREEDY, made, texts, told
from torch import Tensor

import fastspec
from fastspec.generation.engine.open_batch import OpenBatch, Rule
from fastspec.generation.engine.prefix_cache import PrefixCache
from fastspec.generation.stats import Stats

CPU = torch.device("cpu")


@dataclass
class Told:
    """A prompt that notes what it is told; `stop` and `emit` may raise."""

    name: int
    said: tuple[int, ...] = ()
    limit: int = 4
    ends: frozenset[int] = frozenset()
    rule: Rule = Rule()  # noqa: RUF009
    stop: Any = None
    raises: Exception | None = None
    is_cancelled: bool = False
    keeps_logits: bool = False
    keeps_tree: bool = False
    handed: tuple[int, ...] = ()
    reused: int = 0
    finished: list[tuple[list[int], BaseException | None]] = field(default_factory=list)

    @property
    def ids(self) -> Tensor:
        return torch.tensor([self.said]) if self.said else torch.full((1, self.name), 7)

    @property
    def text(self) -> Tensor:
        return self.ids[0]

    def reuse(self, count: int) -> None:
        self.reused = count

    def observe(self, drafted: int, logits: Tensor | None, tree: Any) -> None:
        """Nobody reads it here."""

    def emit(self, tokens: list[int], accepted: int, done: bool) -> None:
        if self.raises is not None:
            raise self.raises

    def finish(self, tokens: list[int], error: BaseException | None) -> None:
        self.finished.append((tokens, error))


def opened(rows: int, *prompts: Told) -> OpenBatch:
    """A batch whose first rows hold these prompts."""
    batch = OpenBatch(rows, Stats(), CPU)
    batch.queue.extend(prompts)
    for row in batch.free():
        batch.seat(row, batch.next(row)[0], 1)
    return batch


def test_rows_are_given_to_those_who_wait_and_are_free_again() -> None:
    first, second, third = Told(1), Told(2), Told(3)
    batch = opened(2, first, second, third)
    assert batch.free() == [] and batch.held == 2 and batch.ahead(5) == [3] and batch.ahead(0) == []
    batch.take(0, [5, 6, 7, 8, 9], 4, None, None)
    assert first.finished == [([5, 6, 7, 8], None)] and not second.finished
    assert batch.free() == [0] and not batch.expects(0) and batch.expects(1) and batch.stats.emitted == 4
    row, ids = batch.next(0)
    assert row == 0 and ids.shape == (1, 3) and batch.out.tokens[0] == [] and batch.free() == []


def test_what_a_prompt_was_asked_and_what_it_raised_is_not_the_next_ones() -> None:
    answers: list[list[int]] = []
    first, second = Told(1, stop=lambda answer: True), Told(2, stop=lambda answer: answers.append(answer) or False)
    batch = opened(1, first, second)
    batch.take(0, [5], 0, None, None)
    assert first.finished == [([5], None)]
    batch.errors[0] = ValueError("of a round that was launched before")
    batch.seat(0, batch.next(0)[0], 1)
    batch.take(0, [6, 7], 1, None, None)
    assert answers == [[6], [6, 7]] and not second.finished and batch.active == [True]


def test_rows_that_move_take_along_what_is_theirs() -> None:
    first, second, third = Told(1, limit=1), Told(2, limit=5, ends=frozenset({9})), Told(3, stop=lambda answer: True)
    batch = opened(4, first, second, third)
    batch.take(0, [5], 0, None, None)
    batch.take(1, [6, 7], 1, None, None)
    assert batch.stopped(2, [8]) and batch.asked == {(2, 1): True}
    assert batch.resize(2) == {0: 1, 1: 2}
    assert batch.prompts == [second, third] and batch.limits == [5, 4] and batch.ends == [frozenset({9}), frozenset()]
    assert batch.out.tokens == [[6, 7], []] and batch.active == [True, True] and batch.asked == {(1, 1): True}
    assert batch.places == [0, 1] and batch.lengths == [1, 1]
    batch.take(0, [9, 4], 1, None, None)
    assert second.finished == [([6, 7, 9], None)]
    assert batch.resize(3) == {0: 1} and batch.prompts == [third, None, None] and batch.active == [True, False, False]


class Rewinding:
    """An engine whose rows can go on from any of their tokens."""

    drafter, main = None, SimpleNamespace(longest=1)

    def __init__(self) -> None:
        self.target = self

    def reusable(self, row: int, known: int, most: int, reached: int) -> int:
        return min(known, most)

    def end(self) -> None:
        """It has no drafter to tell."""


def test_a_prompt_goes_on_from_the_longest_text_that_it_begins_like() -> None:
    prefixes: PrefixCache[Any] = PrefixCache(2)
    batch = OpenBatch(3, Stats(), CPU, prefixes)
    prefixes.begin(Rewinding(), 3)  # type: ignore[arg-type]
    batch.queue.extend([Told(1, (7, 8, 5)), Told(2, (7, 8, 9, 4))])
    for row in batch.free():
        batch.seat(row, batch.next(row)[0], 3)
    for said, row, count in (((7, 8, 9, 6, 1), 1, 3), ((7, 8, 5, 6), 0, 2), ((7, 6, 5, 4), None, 0)):
        batch.queue.append(Told(3, said))
        prefix = batch.prefix()
        assert ((None, 0) if prefix is None else (prefix.row, prefix.count)) == (row, count)
        batch.queue.clear()
    last = Told(3, (7, 8, 9, 6, 1))
    batch.queue.append(last)
    prefix = batch.prefix()
    assert prefix is not None
    batch.seat(2, batch.next(2)[0], 5, prefix)
    assert last.reused == batch.stats.reused == 3


@pytest.mark.parametrize(
    ("waiting", "least", "count"),
    [
        (((1, 2, 3), (4, 5, 6), (2, 3, 1)), 1, 3),
        (((1, 2, 3), (4, 5, 6), (1, 2, 4)), 1, 2),
        (((1, 2, 3), (4, 5, 6), (1, 2, 4)), 2, 3),
        (((1, 2, 3), (4, 5, 6), (1, 2, 4)), None, 3),
        (((1, 2, 3), (7, 8, 6), (4, 5, 6)), 1, 1),
        (((7, 8, 6), (1, 2, 3), (4, 5, 6)), 1, 3),
    ],
)
def test_prompts_that_begin_like_others_are_not_read_with_them(waiting, least, count) -> None:
    """Each goes on from the text of the other, or of a row, once that is read; the first one was asked for already."""
    prefixes: PrefixCache[Any] = PrefixCache(least)
    batch = OpenBatch(4, Stats(), CPU, prefixes)
    prefixes.begin(Rewinding(), 4)  # type: ignore[arg-type]
    batch.queue.append(Told(1, (7, 8, 9)))
    batch.seat(0, batch.next(0)[0], 3)
    batch.queue.extend(Told(2, said) for said in waiting)
    assert batch.unlike(range(3)) == count


def test_an_error_ends_its_own_prompt_and_the_first_one_counts() -> None:
    error = ValueError("no")
    first, second = Told(1, raises=error), Told(2)
    batch = opened(2, first, second)
    batch.take(0, [5], 0, None, None)
    batch.take(1, [5], 0, None, None)
    assert first.finished == [([5], error)] and not second.finished and batch.errors == {}
    for raised in (error, TypeError("later")):
        with batch.guarded(1):
            raise raised
    batch.take(1, [6], 0, None, None)
    assert second.finished == [([5, 6], error)]
    batch.refuse(1, error)  # it has ended: nobody is told twice
    batch.fail(error)
    assert len(first.finished) == len(second.finished) == 1 and batch.stats.emitted == 3


def test_who_is_cancelled_leaves_row_or_queue() -> None:
    first, second, third = Told(1), Told(2, is_cancelled=True), Told(3, is_cancelled=True)
    batch = opened(2, first, second, third)
    batch.cancel()
    assert (
        second.finished == third.finished == [([], None)] and not first.finished and not batch.queue and batch.held == 1
    )
    error = RuntimeError("the round failed")
    batch.fail(error)
    assert first.finished == [([], error)] and batch.held == 0 and batch.active == [False, False]


def test_a_prompt_that_fills_its_row_is_taken_and_one_token_more_is_not() -> None:
    _, model = made()
    (ids,) = texts(6)
    with fastspec.continuous(model, "autoregressive", rows=1, max_length=10) as batch:
        assert len(told([batch.submit(ids, max_new_tokens=4, **GREEDY)])[0]) == 10
        with pytest.raises(fastspec.Unsupported, match="6 tokens and may be answered with 5, 11 together"):
            batch.submit(ids, max_new_tokens=5, **GREEDY)
    assert fastspec.report(model).last is batch.stats
