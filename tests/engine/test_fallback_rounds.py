"""The count of rounds without drafts by itself: when one is next, and what the drafter hears of them behind the
last."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fastspec.generation.engine.call import Fallback, RoundState

CPU = torch.device("cpu")
ELSEWHERE = torch.device("meta")  # as the default device: a tensor that is made without one cannot meet the others


class Pausing:
    """A drafter that pauses by a list of its own, and keeps what it is told."""

    def __init__(self, *pauses: int, rests: Sequence[bool] = ()) -> None:
        self.pauses, self.told = list(pauses), []  # type: tuple[list[int], list[tuple[list[list[int]], list[int]]]]
        self.rests = list(rests)

    def pause(self) -> int:
        return self.pauses.pop(0)

    def rests_on(self) -> bool:
        return bool(self.rests) and self.rests.pop(0)

    def catch_up(self, tokens: Tensor, counts: Sequence[int]) -> None:
        with torch.device(CPU):
            self.told.append((tokens.tolist(), list(counts)))


def emitted(*tokens: int) -> list[list[int]]:
    """What a round of one token a row leaves: no accepted draft, the token, and filler."""
    return [[0, token, 99] for token in tokens]


def state(running: Sequence[bool], padded: Sequence[bool] | None = None) -> RoundState:
    held = RoundState(len(running), CPU)
    held.activate(list(running), None if padded is None else list(padded))
    return held


def test_before_any_round_nothing_is_left_missed_or_counted():
    fallback, drafter = Fallback(CPU), Pausing()
    assert fallback.is_next(None) is False and fallback.counts == []
    fallback.tell(drafter)  # type: ignore[arg-type]
    assert drafter.told == []


@pytest.mark.parametrize("pause", [0, 1, 2, 3])
def test_a_drafter_is_asked_before_every_round_that_it_may_draft_for_and_not_while_it_pauses(pause):
    """As many rounds without drafts follow as it says; then it is asked again."""
    fallback, drafter, on = Fallback(CPU), Pausing(0, pause, 0), state([True])
    assert fallback.is_next(drafter) is False  # type: ignore[arg-type]
    for left in range(pause, 0, -1):
        assert fallback.is_next(drafter) is True and fallback.left == left  # type: ignore[arg-type]
        fallback.count(emitted(5), on)
    assert fallback.left == 0 and len(drafter.pauses) == 1 + (pause == 0)
    assert fallback.is_next(drafter) is False  # type: ignore[arg-type]


def test_a_drafter_rests_on_before_the_last_of_its_rounds():
    """So the round after the next one is known to be plain, and may be launched before the next one is read."""
    fallback, drafter, on = Fallback(CPU), Pausing(2, 0, rests=[True, True, False]), state([True])
    left = []
    while fallback.is_next(drafter):  # type: ignore[arg-type]
        left.append(fallback.left)
        fallback.count(emitted(5), on)
    assert left == [2, 2, 2, 1] and not drafter.rests and not drafter.pauses


def test_a_drafter_may_rest_on_while_the_last_of_its_rounds_runs():
    fallback, drafter, on = Fallback(CPU), Pausing(1, 0, rests=[True, False]), state([True])
    for left in (2, 1):
        assert fallback.is_next(drafter, later=True) and fallback.left == 1  # type: ignore[arg-type]
        fallback.extend(drafter)  # type: ignore[arg-type]
        assert fallback.left == left
        fallback.count(emitted(5), on)
    assert fallback.is_next(drafter) is False and not drafter.pauses  # type: ignore[arg-type]


def test_a_drafter_catches_up_with_every_rows_tokens_and_with_how_many_of_them_are_the_rows_own():
    """Rows that have ended, and rows that are padded, go on in the tensor but not in their counts."""
    fallback, drafter = Fallback(CPU), Pausing()
    fallback.count(emitted(1, 2, 3), state([True, True, True]))
    fallback.count(emitted(4, 5, 6), state([True, False, True], [False, False, True]))
    fallback.count(emitted(7, 8, 9), state([True, False, True], [False, False, True]))
    with ELSEWHERE:
        fallback.tell(drafter)  # type: ignore[arg-type]
    assert drafter.told == [([[1, 4, 7], [2, 5, 8], [3, 6, 9]], [3, 1, 1])]


def test_what_a_drafter_was_told_is_not_told_again_and_rows_are_counted_anew():
    fallback, drafter = Fallback(CPU), Pausing()
    fallback.count(emitted(1, 2), state([True, False]))
    fallback.tell(drafter)  # type: ignore[arg-type]
    fallback.tell(drafter)  # type: ignore[arg-type]
    fallback.count(emitted(3, 4), state([True, True]))
    fallback.tell(drafter)  # type: ignore[arg-type]
    assert drafter.told == [([[1], [2]], [1, 0]), ([[3], [4]], [1, 1])]


def test_where_there_is_no_drafter_nobody_is_told():
    fallback, drafter = Fallback(CPU), Pausing()
    fallback.count(emitted(1), state([True]))
    fallback.tell(None)
    fallback.tell(drafter)  # type: ignore[arg-type]
    assert drafter.told == [([[1]], [1])]


def test_a_call_begins_without_what_the_one_before_it_left():
    """Neither its pause, nor its tokens, nor its number of rows."""
    fallback, drafter = Fallback(CPU), Pausing(3, 0)
    assert fallback.is_next(drafter)  # type: ignore[arg-type]
    fallback.count(emitted(1, 2), state([True, True]))
    fallback.begin()
    assert fallback.is_next(None) is False
    fallback.tell(drafter)  # type: ignore[arg-type]
    assert drafter.told == []
    fallback.count(emitted(7), state([True]))
    fallback.tell(drafter)  # type: ignore[arg-type]
    assert drafter.told == [([[7]], [1])]
