"""Chances that texts go on as before: what is learnt of a text, and what drafts are expected to bring by it."""

from __future__ import annotations

import random

import pytest

import fastspec
from fastspec.generation.drafters.recurrence import BEFORE, LEARNT, LENGTHS, PRIOR, STREAKS, Recurrence


def follow(text: list[int], most: int = 8) -> tuple[Recurrence, fastspec.NgramStorage]:
    """A row that has gone through a text, which is counted token by token."""
    storage, known = fastspec.NgramStorage(4), Recurrence(1, most)
    cursor = storage.feed(storage.start(), text[0])
    known.stand(0, storage, cursor)
    for token in text[1:]:
        known.hear(0, storage, [token])
        cursor = storage.feed(cursor, token)
        known.stand(0, storage, cursor)
    return known, storage


def test_before_a_text_the_chances_are_those_of_contexts():
    known = Recurrence(2, 8)
    first, second = PRIOR[0], (BEFORE * PRIOR[1] + 1) / (BEFORE + 1)  # whose token was foretold by the first
    assert known.expected[0] == pytest.approx(first * (1 + second * (1 + known.expected[2 * STREAKS + 2])))
    assert known.of(0) == 0.0 and known.counted_share([0, 1]) == 1.0


@pytest.mark.parametrize("most", [1, 2, 8, 255])
def test_a_text_that_repeats_itself_promises_whole_drafts_and_one_that_does_not_nothing(most):
    repeats, _ = follow([3, 4, 5, 6, 7] * 200, most)
    assert repeats.of(0) == pytest.approx(most, rel=0.1) and repeats.streaks == [STREAKS - 1]
    draws = random.Random(1)
    never, _ = follow([draws.randrange(6) for _ in range(3000)], most)
    assert never.of(0) < 0.4


def test_what_is_expected_is_what_comes():
    """Of a text whose tokens come as before in four of five places."""
    draws, text = random.Random(2), [*range(40)] * 2
    for _ in range(6000):
        text.append((text[-1] + 1) % 40 if draws.random() < 0.8 else draws.randrange(40))
    known, _ = follow(text)
    chance = 0.8 + 0.2 / 40
    whole = sum(chance**count for count in range(1, 9))
    assert known.expected[(LENGTHS - 1) * STREAKS + 4] == pytest.approx(whole, rel=0.25)
    kind, _ = known.guesses[0]
    assert known.following[kind] == pytest.approx(known.expected[kind] - known.chances[kind], abs=0.35)


def test_a_round_that_holds_up_most_rows_counts_for_little():
    known = Recurrence(8, 8)
    known.gains = [6.0] * 8
    assert known.counted_share(range(8)) == pytest.approx(1.0)
    known.gains = [6.0] + [0.0] * 7
    assert known.counted_share(range(8)) == pytest.approx((8 / (7 + 1 / 7) - 1) / 0.75)
    assert known.counted_share([1, 2]) == 1.0


def test_rows_move_with_their_places_and_begin_without_any():
    known, storage = follow([3, 4, 5, 6] * 40)
    other = Recurrence(2, 8)
    other.move(1, known, 0)
    assert other.guesses == [None, known.guesses[0]] and other.streaks[1] == known.streaks[0]
    other.hear(1, storage, [3] * LEARNT)
    assert other.streaks[1] < STREAKS - 1 and other.cursors[1] == (3, 3, 3)
    other.begin(1)
    assert other.cursors == other.guesses == [None, None] and other.of(1) == 0.0
