"""Prompts that come while a head rests: it reads them before it drafts, as it would have read them, or never."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.captured import stand_in
from helpers.generate import NEVER
from helpers.open import GREEDY, SECONDS, Gate, alone, made, texts, told
from helpers.sizes import AUTO, force_sizes
from torch import Tensor

import fastspec
from fastspec.generation.drafters import head_drafter
from fastspec.generation.drafters.base import RootsOnly
from fastspec.generation.drafters.head_drafter import HeadDrafter
from fastspec.generation.drafters.tree_sizes import TreeSizes
from fastspec.generation.engine.engine import Engine

CAPTURED = pytest.mark.parametrize("captured", [False, True])


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of the longest prompt of every pass in which a head begins with prompts."""
    found: list[int] = []
    begin = HeadDrafter.begin

    def watched(self: HeadDrafter, ids: Tensor, counts: Tensor, *more: Any) -> None:
        found.append(int(counts.max()))
        begin(self, ids, counts, *more)

    monkeypatch.setattr(HeadDrafter, "begin", watched)
    return found


def never(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no prompt wait for a head."""
    monkeypatch.setattr(Engine, "defer", lambda self, *text, refuse: None)


def rest(monkeypatch: pytest.MonkeyPatch, order: tuple[int, ...] = (0,), rounds: int = 1) -> list[Any]:
    """Let rounds have no drafts, or sizes in this order, those of the first text too."""
    taken = force_sizes(monkeypatch, order=order, rounds=rounds)
    monkeypatch.setattr(TreeSizes, "_start", lambda self: self._choose(begins=True))
    return taken


def same_cache(one: HeadDrafter, other: HeadDrafter, row: int, count: int) -> bool:
    """True where two heads have read the same `count` tokens of a row."""
    pairs = (one.attention.k, other.attention.k), (one.attention.v, other.attention.v)
    return min(int(each.state.lengths[row]) for each in (one, other)) >= count and all(
        torch.allclose(a[0][row, :, :count], b[0][row, :, :count], atol=1e-4, rtol=1e-4) for a, b in pairs
    )


@CAPTURED
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_a_head_that_rests_reads_no_prompt(
    captured: bool, prefix_caching: bool, begun: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor what these are answered with, of however many short answers; a prompt that asks for no drafts is none
    of its business either."""
    if captured:
        stand_in(monkeypatch)
    monkeypatch.setattr(RootsOnly, "backlog", 25)
    rest(monkeypatch)
    monkeypatch.setattr(HeadDrafter, "take_pairs", lambda *given: pytest.fail("the head has read answers"))
    plain, model = made("random")
    with fastspec.continuous(
        model, AUTO, rows=2, max_length=150, narrows=False, prefix_caching=prefix_caching
    ) as batch:
        begun.clear()
        for seed, drafts in enumerate((True, False, True)):
            ids = texts(40, 9, 33, 7, 45, seed=seed)
            found = told([batch.submit(each, **GREEDY, max_new_tokens=11, drafts=drafts) for each in ids])
            assert found == [alone(plain, each, 11) for each in ids]
        assert not begun
        engine = batch._widths.current.engine
        assert engine.resting is not None and 1 <= len(engine.resting.unread) <= 2


@CAPTURED
@pytest.mark.parametrize("kind", ["bigram", "random"])
def test_a_head_that_wakes_drafts_as_one_that_has_read_all(
    captured: bool, kind: str, begun: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that were read alone and together, some of them too long to wait; each is read once before drafts."""
    if captured:
        stand_in(monkeypatch)
    monkeypatch.setattr(head_drafter, "UNREAD", 250)
    hand_over = Engine._hand_over

    def handed(self: Engine[Any]) -> None:
        assert self.resting is not None and not (self.resting.unread and self.in_flight), "hidden in another round"
        hand_over(self)

    defer = Engine.defer

    def deferred(
        self: Engine[Any], reader: Any, ids: Tensor, counts: Tensor, features: Tensor, *root: Tensor, **to: Any
    ) -> Any:
        found = defer(self, reader, ids, counts, features, *root, **to)
        assert found is None or found.features.data_ptr() != features.data_ptr(), "the next pass writes over them"
        return found

    monkeypatch.setattr(Engine, "_hand_over", handed)
    monkeypatch.setattr(Engine, "defer", deferred)
    runs = []
    for waits in (True, False):
        if not waits:
            never(monkeypatch)
        taken = rest(monkeypatch, (0, 0, 0, 4, 4, 0), rounds=4)
        plain, model = made(kind)
        ids = texts(20, 9, 33, 7, 45, 300, 12, 8, 11, 13, 6, 9, 10, 12, 7)
        counts = [60, *(8 + 5 * (at % 4) for at in range(len(ids) - 1))]
        with fastspec.continuous(model, AUTO, rows=4, max_length=400, narrows=False, prefix_caching=False) as batch:
            begun.clear(), taken.clear()
            with batch._changed:
                futures = [
                    batch.submit(each, **GREEDY, max_new_tokens=count) for each, count in zip(ids, counts, strict=True)
                ]
            assert told(futures) == [alone(plain, each, count) for each, count in zip(ids, counts, strict=True)]
        runs.append((list(taken), list(begun), batch._widths.current.engine.drafter))
    (taken, lazily, one), (wanted, eagerly, other) = runs
    assert taken == wanted and {size for size, _ in taken} == {0, 4}
    assert len(lazily) <= len(eagerly) and max(lazily) == 300 and set(lazily) <= set(eagerly)
    assert isinstance(one, HeadDrafter) and isinstance(other, HeadDrafter)
    lengths = [min(int(each.state.lengths[row]) for each in (one, other)) for row in range(4)]
    assert all(same_cache(one, other, row, length - 1) for row, length in enumerate(lengths))


@CAPTURED
def test_a_head_that_wakes_with_a_prompt_reads_it_before_the_first_round(
    captured: bool, begun: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one row, whose next text is another question for the sizes."""
    if captured:
        stand_in(monkeypatch)
    runs = []
    for waits in (True, False):
        if not waits:
            never(monkeypatch)
        taken = rest(monkeypatch, (0, 0, 4, 0), rounds=100)
        plain, model = made("bigram")
        ids = texts(9, 12, 7)
        with fastspec.continuous(model, AUTO, rows=1, max_length=100, prefix_caching=False) as batch:
            begun.clear()
            for each in ids:
                assert told([batch.submit(each, **GREEDY, max_new_tokens=30)]) == [alone(plain, each, 30)]
            runs.append((list(taken), list(begun)))
    (taken, lazily), (wanted, eagerly) = runs
    assert taken == wanted and sum(sum(accepted) for _, accepted in taken) > 10
    assert lazily == [12, 7] and eagerly == [9, 12, 7], "and the one that comes while it drafts"


@CAPTURED
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_head_that_has_no_memory_for_a_prompt_ends_that_one_alone(
    captured: bool, goes_on: bool, begun: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once drafts come back, or a prompt goes on from what it reads; nobody goes on from the text that it has not."""
    if captured:
        stand_in(monkeypatch)
    rest(monkeypatch, (0,) if goes_on else (0, 4), rounds=8)
    begin = HeadDrafter.begin

    def failing(self: HeadDrafter, ids: Tensor, counts: Tensor, *more: Any) -> None:
        begin(self, ids, counts, *more)
        if int(counts.max()) == 33:
            raise torch.OutOfMemoryError("no memory for 33 tokens")

    monkeypatch.setattr(HeadDrafter, "begin", failing)
    plain, model = made("bigram")
    first, lost, last = texts(20, 33, 9)
    with fastspec.continuous(model, AUTO, rows=4, max_length=200, narrows=False, prefix_caching=True) as batch:
        batch._prefixes.least = 8
        gate = Gate()
        with batch._changed:
            futures = [batch.submit(first, **GREEDY, max_new_tokens=60, streamer=gate)]
            futures += [batch.submit(each, **GREEDY, max_new_tokens=60) for each in (lost, last)]
        if goes_on:
            assert gate.seen.acquire(timeout=SECONDS)
            follows = batch.submit(torch.cat((lost, last)), **GREEDY, max_new_tokens=5)
        gate.go.release(100)
        with pytest.raises(torch.OutOfMemoryError, match="33 tokens"):
            futures.pop(1).result(SECONDS)
        assert told(futures) == [alone(plain, each, 60) for each in (first, last)]
        if not goes_on:
            follows = batch.submit(torch.cat((lost, last)), **GREEDY, max_new_tokens=5)
        assert told([follows]) == [alone(plain, torch.cat((lost, last)), 5)]
        assert batch.stats.reused == 0 and 33 in begun


def test_a_head_reads_no_ended_prompt_where_rows_become_fewer(
    begun: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a prompt go on from one of these."""
    rest(monkeypatch)
    plain, model = made("random")
    ids, counts = texts(40, 33, 20, 9), (6, 60, 7, 8)
    with fastspec.continuous(model, AUTO, rows=4, max_length=200) as batch:
        batch._prefixes.least = 8
        with batch._changed:
            futures = [
                batch.submit(each, **GREEDY, max_new_tokens=count) for each, count in zip(ids, counts, strict=True)
            ]
        found = told(futures)
        assert found == [alone(plain, each, count) for each, count in zip(ids, counts, strict=True)]
        assert len(batch._batch.prompts) == 1 and [count for count in begun if count > 1] == [33]
        for text, kept in ((found[0], False), (found[1], True)):
            told([batch.submit(torch.tensor([*text, 7]), **GREEDY, max_new_tokens=4)])
            assert (batch.stats.reused > 0) == kept


def test_a_prompt_in_parts_and_one_that_waits_share_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head wakes while a long prompt is on its way into a row."""
    monkeypatch.setattr("fastspec.patches.continuous_batch.CHUNKS", {"cpu": 16})
    drafters = []
    for waits in (True, False):
        if not waits:
            never(monkeypatch)
        rest(monkeypatch, (0, *[4] * 50), rounds=4)
        plain, model = made("random")
        first, long = texts(9, 200)
        gate = Gate()
        with fastspec.continuous(model, AUTO, rows=2, max_length=400, narrows=False, prefix_caching=False) as batch:
            futures = [batch.submit(first, **GREEDY, max_new_tokens=60, streamer=gate)]
            assert gate.seen.acquire(timeout=SECONDS)
            futures.append(batch.submit(long, **GREEDY, max_new_tokens=40))
            gate.go.release(100)
            assert told(futures) == [alone(plain, first, 60), alone(plain, long, 40)]
        drafters.append(batch._widths.current.engine.drafter)
    assert same_cache(*drafters, 0, 60) and same_cache(*drafters, 1, 235)


@CAPTURED
def test_a_text_that_a_head_has_not_read_is_read_where_another_goes_on_from_it(
    captured: bool, begun: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat whose turns follow one another: its second turn finds the first one's text."""
    if captured:
        stand_in(monkeypatch)
    drafters = []
    for waits in (True, False):
        if not waits:
            never(monkeypatch)
        rest(monkeypatch)
        plain, model = made("random")
        (text,) = texts(40)
        with fastspec.continuous(model, AUTO, rows=2, max_length=300) as batch:
            batch._prefixes.least = 8
            begun.clear()
            for turn in range(3):
                (found,) = told([batch.submit(text, **GREEDY, max_new_tokens=12)])
                assert found == alone(plain, text, 12)
                assert begun or not (turn or not waits), "of a text that nothing has gone on from"
                text = torch.cat((torch.tensor(found), texts(6, seed=turn)[0]))
            reused = batch.stats.reused
        assert not batch._prefixes.idle and reused > 40 + 58 - 10
        drafters.append((batch._widths.made[1].engine.drafter, reused))
    (one, mine), (other, theirs) = drafters
    assert mine == theirs and same_cache(one, other, 0, 40 + 12 + 6 + 12 + 6)


def test_texts_that_a_head_has_not_read_are_kept_once_one_was_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chats that take turns in one row: the first turns are lost, no later ones."""
    reused: list[int] = []
    rest(monkeypatch)
    plain, model = made("random")
    chats = texts(40, 44)
    with fastspec.continuous(model, AUTO, rows=2, max_length=300) as batch:
        batch._prefixes.least = 8
        for turn in range(4):
            for at, text in enumerate(chats):
                (found,) = told([batch.submit(text, **GREEDY, max_new_tokens=8)])
                assert found == alone(plain, text, 8)
                reused.append(batch.stats.reused)
                chats[at] = torch.cat((torch.tensor(found), texts(6, seed=9 * turn + at)[0]))
    counts = [after - before for before, after in zip([0, *reused], reused, strict=False)]
    assert counts[:3] == [0, 0, 0] and min(counts[4:]) > 40


def test_a_text_of_no_prompt_lately_lets_heads_rest_again(begun: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    rest(monkeypatch)
    monkeypatch.setattr("fastspec.generation.engine.prefix_cache.IDLE", 3)
    _, model = made("random")
    with fastspec.continuous(model, AUTO, rows=1, max_length=300) as batch:
        batch._prefixes.least = 8
        first, *others = texts(40, 20, 21, 22, 23)
        begun.clear()
        for text in (first, torch.cat((first, others[0])), *others):
            told([batch.submit(text, **GREEDY, max_new_tokens=4)])
        assert begun == [40, 21, 20], "the first one's, for the second, which goes on from it; and the third"


def test_prompts_of_a_call_that_take_rows_in_turns_are_read_by_the_head_that_wakes(
    begun: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins with the first ones at once, in rows that others take later."""
    ids, mask = torch.zeros(5, 14, dtype=torch.long), torch.zeros(5, 14, dtype=torch.long)
    for row, text in enumerate(texts(9, 3, 14, 5, 8)):
        ids[row, -len(text) :], mask[row, -len(text) :] = text, 1
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": NEVER, "attention_mask": mask, "max_new_tokens": 24}
    runs = []
    for waits in (True, False):
        if not waits:
            never(monkeypatch)
        taken = rest(monkeypatch, (0, 4), rounds=36)
        plain, model = made("bigram")
        found = model.generate(ids, assistant=fastspec.ContinuousBatch(AUTO, rows=2), **options)
        assert torch.equal(found, plain.generate(ids, **options))
        runs.append(list(taken))
        assert begun[0] == 9 and sorted(begun)[-1] == 14
        begun.clear()
    assert runs[0] == runs[1] and sum(sum(accepted) for _, accepted in runs[0]) > 10


def test_prompts_that_wait_at_the_end_of_a_batch_are_read_by_nobody(
    begun: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor by a head of the model as it was before a change."""
    rest(monkeypatch)
    _, model = made("random")
    with fastspec.continuous(model, AUTO, rows=2, max_length=100) as batch:
        for ids in (texts(40), texts(33, seed=1)):
            told([batch.submit(each, **GREEDY, max_new_tokens=4) for each in ids])
            resting = batch._widths.current.engine.resting
            assert resting is not None and resting.unread
            model.to(torch.bfloat16)
    assert set(begun) == {1}, "blank rows alone"
