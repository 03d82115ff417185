"""Open batches that narrow and widen: prompts move between rounds of one row and of many, and say what they say
alone."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers.captured import stand_in
from helpers.families import recurrent, windowed
from helpers.generate import TREE, shallow_model
from helpers.open import GREEDY, SECONDS, Gate, alone, made, texts, told

import fastspec
from fastspec.generation.drafters.base import Decoding, Drafter
from fastspec.generation.engine import batching, open_batch
from fastspec.generation.engine.engine import Engine
from fastspec.generation.tree import TokenTree

COUNTS = 5, 9, 3, 12, 4, 7
NEW = 30, 6, 14, 9, 20, 3


@pytest.fixture
def rows_seen(monkeypatch) -> list[tuple[int, int]]:
    """(rows, of which go on) of every round; rounds narrow after a turn with rows to spare."""
    seen: list[tuple[int, int]] = []
    step = Engine.step

    def stepping(self: Any, *rest: Any) -> Any:
        seen.append((len(self.state.running), sum(self.state.running)))
        return step(self, *rest)

    monkeypatch.setattr(Engine, "step", stepping)
    monkeypatch.setattr(open_batch, "PATIENCE", 1)
    return seen


def asked(batch: Any, ids: list[Any], options: list[dict[str, Any]]) -> list[list[int]]:
    """The first alone until it has said a few tokens, then the others with it."""
    gate = Gate()
    gate.go.release(3)
    first = batch.submit(ids[0], streamer=gate, **options[0])
    for _ in range(4):
        assert gate.seen.acquire(timeout=SECONDS)
    others = [batch.submit(each, **given) for each, given in zip(ids[1:], options[1:], strict=True)]
    gate.go.release(99)
    return told([first, *others])


@pytest.mark.some(
    "autoregressive-False", "Eagle3(depth=3, top_k=3, total_tokens=12, fused=None)-True", "eagle", "nasd-True"
)
@pytest.mark.parametrize(
    "assistant, captured",
    [
        ("autoregressive", False),
        (TREE, False),
        ("eagle", False),
        ("nasd", False),
        ("autoregressive", True),
        (TREE, True),
        ("nasd", True),
    ],
    ids=str,
)
def test_rows_follow_the_load_and_no_answer_changes(monkeypatch, rows_seen, assistant, captured):
    """Also where rounds are launched before the one in front is read, and each width has graphs of its own."""
    if captured:
        stand_in(monkeypatch)
        monkeypatch.setattr(batching, "ASYNCHRONOUS_AFTER", 0)
    plain, model = made()
    ids = texts(*COUNTS)
    options: list[dict[str, Any]] = [{**GREEDY, "max_new_tokens": count} for count in NEW]
    options[4]["repetition_penalty"] = 1.3
    options[2] |= {"stop_strings": None, "max_time": 60.0}  # a criterion that remembers what it was asked
    want = [alone(plain, each, count) for each, count in zip(ids, NEW, strict=True)]
    want[4] = alone(plain, ids[4], NEW[4], repetition_penalty=1.3)
    with fastspec.continuous(model, assistant, rows=4, max_length=64) as batch:
        for _ in range(2 if captured else 1):
            assert asked(batch, ids, options) == want
    assert {rows for rows, _ in rows_seen} == {1, 2, 4} and rows_seen[0][0] == 1
    changes = [b - a for (a, _), (b, _) in pairwise(rows_seen)]
    assert min(changes) < 0 < max(changes)


MAKE = partial(recurrent, "qwen3_next"), partial(windowed, "gemma2"), partial(shallow_model, "gpt2")


@pytest.mark.some("qwen3_next", "gemma2")
@pytest.mark.parametrize("make", MAKE, ids=lambda make: make.args[0])
def test_whatever_the_layers_keep_moves(rows_seen, make):
    plain, model = make(), fastspec.patch(make())
    ids = texts(*COUNTS)
    with fastspec.continuous(model, "nasd", rows=3, max_length=64) as batch:
        emitted = asked(batch, ids, [{**GREEDY, "max_new_tokens": count} for count in NEW])
    assert emitted == [alone(plain, each, count) for each, count in zip(ids, NEW, strict=True)]
    assert {rows for rows, _ in rows_seen} == {1, 2, 3}


def test_a_seed_gives_its_answer_in_rounds_of_any_width(rows_seen):
    _, model = made()
    ids = texts(*COUNTS)
    options = [
        {"do_sample": True, "seed": seed, "max_new_tokens": count, "eos_token_id": 1000}
        for seed, count in enumerate(NEW)
    ]
    with fastspec.continuous(model, TREE, rows=4, max_length=64, narrows=False) as batch:
        want = told([batch.submit(each, **given) for each, given in zip(ids, options, strict=True)])
    assert {rows for rows, _ in rows_seen} == {4}
    rows_seen.clear()
    with fastspec.continuous(model, TREE, rows=4, max_length=64) as batch:
        assert asked(batch, ids, options) == want
    assert {rows for rows, _ in rows_seen} == {1, 2, 4}


def test_rows_wait_before_they_narrow(rows_seen, monkeypatch):
    """Not while a prompt ends and the next one comes, and no further than the most that the turns in between had need
    of."""
    monkeypatch.setattr(open_batch, "PATIENCE", 5)
    plain, model = made()
    ids = texts(5, 6)
    with fastspec.continuous(model, "autoregressive", rows=2, max_length=64) as batch:
        asked(batch, ids, [{**GREEDY, "max_new_tokens": 20}, {**GREEDY, "max_new_tokens": 4}])
        widest = [rows for rows, _ in rows_seen].index(2)
        wide = [(rows, running) for rows, running in rows_seen[widest:] if rows == 2]
        assert len([running for _, running in wide if running == 1]) in (4, 5) and rows_seen[-1] == (1, 1)
        gate = Gate()
        both = [
            batch.submit(each, streamer=streamer, max_new_tokens=3, **GREEDY)
            for each, streamer in zip(ids, (gate, None), strict=True)
        ]
        gate.go.release(9)
        told(both)
        rows_seen.clear()
        for _ in range(3):
            assert told([batch.submit(ids[0], max_new_tokens=5, **GREEDY)]) == [alone(plain, ids[0], 5)]
        seen = [rows for rows, _ in rows_seen]
        assert 1 <= seen.count(2) <= 5 and seen == sorted(seen, reverse=True) and seen[-1] == 1


def test_rounds_ahead_of_the_host_do_not_keep_others_waiting(monkeypatch, rows_seen):
    """A prompt that comes while the only row is asynchronous joins it: rounds widen long before that row's answer
    ends."""
    stand_in(monkeypatch)
    monkeypatch.setattr(batching, "ASYNCHRONOUS_AFTER", 0)
    _, model = made()
    ids = texts(5, 6)
    with fastspec.continuous(model, "autoregressive", rows=2, max_length=64) as batch:
        asked(batch, ids, [{**GREEDY, "max_new_tokens": 40}, {**GREEDY, "max_new_tokens": 30}])
    before = [rows for rows, _ in rows_seen].index(2)
    assert before <= 8 and rows_seen.count((2, 2)) >= 25


def test_all_widths_read_their_prompts_in_one_place(rows_seen):
    """One row of keys and values, and one set of graphs, for the prompts of all of them."""
    _, model = made()
    with fastspec.continuous(model, TREE, rows=4, max_length=64) as batch:
        asked(batch, texts(*COUNTS), [{**GREEDY, "max_new_tokens": count} for count in NEW])
        rounds = batch._widths.made.values()
        assert len(rounds) == 3 and len({id(each.entry) for each in rounds}) == 1
        assert sum(bool(each.engine.entries) for each in rounds) == 1


def test_rounds_that_do_not_fit_are_named_when_the_batch_is_opened(monkeypatch):
    """Those of all rows, though one row would do at first."""
    from fastspec.generation import sequence_state

    _, model = made()
    monkeypatch.setattr(sequence_state, "memory_of", lambda device: 2**22)
    with pytest.raises(fastspec.FastSpecError, match="for 64 rows needs"):
        fastspec.continuous(model, "autoregressive", rows=64, max_length=2000)


class Said(Decoding, Drafter):
    """A third party's drafter that joins and does not move."""

    name, taps, continuous, nodes, max_path = "said", None, True, 1, 1

    def drafter(self, **_: Any) -> Any:
        return Said()

    def begin(self, ids: Any, counts: Any, features: Any, root: Any) -> None:
        self.root = root.clone()

    def copy_row(self, row: int, other: Any, count: int) -> None:
        self.root[row] = other.root[0]

    def propose(self, extent: int) -> TokenTree:
        return TokenTree.root_only(self.root)

    def observe(self, tree: Any, verdict: Any, logits: Any, features: Any, active: Any, extent: int) -> None:
        self.root = torch.where(active, verdict.bonus, self.root)


@pytest.mark.parametrize("captured", [False, True])
def test_where_rows_do_not_move_or_are_not_to_there_are_always_as_many(monkeypatch, rows_seen, captured):
    if captured:
        stand_in(monkeypatch)
    plain, model = made()
    ids = texts(*COUNTS)
    with fastspec.continuous(model, TREE if captured else Said(), rows=4, max_length=64, narrows=not captured) as batch:
        generated = asked(batch, ids, [{**GREEDY, "max_new_tokens": count} for count in NEW])
    assert generated == [alone(plain, each, count) for each, count in zip(ids, NEW, strict=True)]
    assert {rows for rows, _ in rows_seen} == {4}
