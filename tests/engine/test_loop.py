"""The loop of a call by itself: an engine that follows a script stands in for models, rounds and drafters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from fastspec.generation.constraint import Masks
from fastspec.generation.drafters.given_text import GivenText
from fastspec.generation.engine import batching
from fastspec.generation.engine import rounds as loop
from fastspec.generation.engine.call import Outcome, Request, RoundState
from fastspec.generation.engine.round_program import Round, Scored
from fastspec.generation.engine.verifier import Choice, ChoiceRule, InLockstep, WithHistory
from fastspec.generation.tree import TokenTree
from fastspec.generation.verify import measure, walk
from fastspec.patches.backends import TORCH

VOCAB, WRONG, NODES = 12, 11, 3
TEXTS = [
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3],
    [2, 4, 6, 8, 1, 3, 5, 7, 9, 2, 4, 6],
    [9, 8, 7, 6, 5, 4, 3, 2, 1, 9, 8, 7],
]
PROMPTS, COUNTS = [[10, 0, 0, 0], [10, 1, 0, 0], [10, 1, 2, 0]], [1, 2, 3]  # as many tokens as tell them apart
CPU = torch.device("cpu")


def likely(tokens: Tensor) -> Tensor:
    return 3.0 * torch.nn.functional.one_hot(tokens, VOCAB)


class Reader:
    """A target that knows by a prompt's length what is said after it; features are `wide`."""

    captures = False

    def __init__(self, wide: int) -> None:
        self.wide, self.read = wide, []

    def reserve(self, committed: int) -> None:
        pass

    def prefill(self, ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        self.read.append((ids.tolist(), counts.tolist()))
        self.lengths = counts.clone()
        assert ids.shape[0] == counts.shape[0] and ids.shape[1] == int(counts.max())
        return likely(torch.tensor([TEXTS[count - 1][0] for count in counts.tolist()])), 7.0 + torch.zeros(
            *ids.shape, self.wide
        )


class Told:
    """A drafter that keeps how it was begun with."""

    moves = resumes = False

    def __init__(self) -> None:
        self.log: list[Any] = []

    def begin(self, ids: Tensor, counts: Tensor, features: Tensor, root: Tensor) -> None:
        assert ids.shape == features.shape[:2]
        self.log.append([x.clone() for x in (ids, counts, features)] + [root])

    def hint(self, texts: Any) -> None:
        self.log.append(texts)


class Script:
    """The engine's side of a call: rounds of three nodes whose rows have 0, 1 or 2 right drafts in turns. Rows that
    have ended go on."""

    def __init__(self, rows: int, drafter: Any = None, wide: int = 0, sample: bool = False) -> None:
        self.target, self.drafter, self.state = Reader(wide), drafter, RoundState(rows, CPU)
        self.choice, self.sizes, self.masks = Choice(TORCH, ChoiceRule(sample=sample)), None, Masks(CPU)
        self.longest, self.in_flight, self.given, self.joins = NODES, False, None, False
        self.holds, self.generated, self.log, self.rounds = list(range(rows)), [1] * rows, [], 0
        self.verifiers: set[type] = set()
        self.before: Callable[[], Any] = lambda: None
        self.drafted: tuple[int, ...] | None = None

    def begin(self, root: Tensor) -> None:
        self.state.root.copy_(root)
        self.log.append(("begin", root.tolist()))

    def forget(self) -> None:
        """Nothing is kept of rounds without drafts."""

    def interrupt(self) -> None:
        """No time of its rounds is taken."""

    def defer(self, *text: Any, refuse: Any) -> None:
        """No prompt waits for its drafter."""

    def has_unread(self, row: int) -> bool:
        return False

    def end(self) -> None:
        self.log.append("end")

    def entry(self, count: int) -> Any:
        self.one = Reader(self.target.wide), None if self.drafter is None else Told()
        return self.one

    def admit(self, row: int, target: Any, drafter: Any, root: Tensor, count: int, *more: None) -> None:
        assert not self.in_flight and (target, drafter) == self.one and not any(more)
        assert self.drafter is None or len(drafter.log) == 1
        self.log.append(("admit", row, count, root.tolist()))
        self.holds[row], self.generated[row], self.state.root[row] = count - 1, 1, root[0]

    @contextmanager
    def verifying(self, texts: Any) -> Iterator[GivenText]:
        self.given = GivenText(texts, CPU)
        yield self.given
        self.given = None

    def text(self, row: int) -> list[int]:
        return TEXTS[self.holds[row]] + [WRONG - 1] * 99

    def tree(self) -> TokenTree:
        if self.given is not None:
            return self.given.propose(0)
        rows = []
        for row, generated in enumerate(self.generated):
            right = (row + self.rounds) % NODES
            rows.append([*self.text(row)[generated - 1 : generated + right], *[WRONG] * (NODES - 1 - right)])
        return TokenTree.chain(torch.tensor(rows))

    def step(self, longest: int, stats: Any, verifier: Any = None, asynchronous: bool = False) -> list[list[int]]:
        self.before()
        self.log.append(
            ("step", longest, list(self.state.running), list(self.state.padded), asynchronous, self.given is not None)
        )
        self.stats, self.in_flight = stats, asynchronous
        self.verifiers.add(type(verifier))
        tree = self.tree()
        nodes = tree.tokens.shape[1]
        picks = torch.tensor(
            [self.text(row)[generated : generated + nodes] for row, generated in enumerate(self.generated)]
        )
        verdict, logits = walk(tree, picks, TORCH), likely(picks).half() + self.rounds
        features = torch.full((*tree.tokens.shape, self.target.wide), 8.0)
        emitted = torch.cat((verdict.accepted[:, None], verdict.tokens(tree)), 1)
        measures = measure(logits, verdict.tokens(tree))
        if self.given is None and self.drafted is not None:
            tree = TokenTree(tree.tokens, tree.parents, tree.depths, tree.ancestors, tree.max_path, None, self.drafted)
        self.last = Round(Scored(tree, logits, features), verdict, logits * 2, emitted=emitted, measures=measures)
        if self.given is not None:
            self.given.observe(tree, verdict, logits, features, self.state.active, 0)
        self.generated = [
            generated + accepted + 1
            for generated, accepted in zip(self.generated, verdict.accepted.tolist(), strict=True)
        ]
        self.state.root.copy_(torch.where(self.state.active, verdict.bonus, self.state.root))
        self.rounds += 1
        return emitted.tolist()

    @property
    def steps(self) -> list[Any]:
        return [entry[1:] for entry in self.log if entry[0] == "step"]


def asked(count: int, limit: int = 8, **changes: Any) -> Request:
    prompts, counts = torch.tensor(PROMPTS[:count])[:, : COUNTS[count - 1]], torch.tensor(COUNTS[:count])
    kept = {"ends": frozenset[int](), "process_at": None}
    return Request(prompts, counts, [torch.tensor([prompt]) for prompt in range(count)], limit, **kept | changes)


def run(engine: Any, request: Request, name: str = "by hand") -> Outcome:
    return loop.decode(engine, request, name)


def taken(rows: int, limit: int) -> list[list[tuple[int, int]]]:
    """Per row and round, (accepted drafts, tokens taken before the limit), until the row has ended."""
    rounds = []
    for row in range(rows):
        generated, mine = 1, []
        while generated < limit:
            right = (row + len(mine)) % NODES
            mine.append((right, min(right + 1, limit - generated)))
            generated += right + 1
        rounds.append(mine)
    return rounds


@pytest.mark.parametrize("rows, limit", [(1, 1), (1, 6), (2, 8), (3, 12)])
def test_a_call_takes_rounds_until_every_row_has_its_tokens(rows, limit):
    """Rows that have ended are not counted; the engine is told how long the longest row may be, and which rows go
    on."""
    engine = Script(rows)
    out = run(engine, asked(rows, limit), "the name")
    assert out.tokens == [text[:limit] for text in TEXTS[:rows]] and engine.target.read == [
        (asked(rows).prompts.tolist(), COUNTS[:rows])
    ]
    plan, stats = taken(rows, limit), out.stats
    assert (stats.assistant, stats.rows, stats.rounds, stats.joined) == ("the name", rows, max(map(len, plan)), 0)
    assert stats.row_rounds == stats.draft_rounds == sum(map(len, plan)) and stats.drafted == 2 * stats.row_rounds
    assert stats.accepted == sum(right for mine in plan for right, _ in mine) and stats.emitted == rows * limit
    lengths = COUNTS[:rows]
    for step, (longest, running, padded, asynchronous, _) in enumerate(engine.steps):
        assert (
            longest == max(lengths)
            and running == [step < len(mine) for mine in plan]
            and padded == [False] * rows
            and not asynchronous
        )
        lengths = [length + ((row + step) % NODES + 1) * running[row] for row, length in enumerate(lengths)]
    assert engine.log[0] == ("begin", [text[0] for text in TEXTS[:rows]]) and engine.log[-1] == "end"
    assert out.scores == out.logits == [[]] * rows and out.measures == out.kept == []


def test_a_calls_seconds_are_split_by_what_they_went_to(monkeypatch):
    """By a clock that ticks when it is read. First runs and captures are those of this call alone."""
    ticks = iter(range(10, 99))
    monkeypatch.setattr(loop.time, "perf_counter", lambda: float(next(ticks)))
    monkeypatch.setattr(loop.SPENT, "first_runs", 4.0)
    monkeypatch.setattr(loop.SPENT, "captures", 16.0)

    def spend() -> None:
        loop.SPENT.first_runs += 0.5
        loop.SPENT.captures += 2.0

    engine = Script(1)
    engine.before = spend
    stats = run(engine, asked(1, 4)).stats
    assert stats.rounds == 2 and (stats.first_run_seconds, stats.capture_seconds) == (1.0, 4.0)
    assert stats.phases == {"prefill": 1.0} and stats.seconds == 3.0  # before, twice around the prefill, after


@pytest.mark.parametrize("context", [False, True])
@pytest.mark.parametrize("wide", [0, 2])
def test_a_drafter_begins_with_the_prompts_or_where_it_reads_no_features_with_the_whole_text(context, wide):
    drafter, text = Told(), (torch.tensor([[5, 6], [5, 0]]), torch.tensor([2, 1]))
    engine = Script(2, drafter, wide)
    run(engine, asked(2, context=text if context else None))
    ((ids, counts, features, root),) = drafter.log
    want = text if context and not wide else (torch.tensor(PROMPTS[:2])[:, :2], torch.tensor(COUNTS[:2]))
    assert (
        torch.equal(ids, want[0])
        and torch.equal(counts, want[1])
        and features.shape[2] == wide
        and bool((features == 7).all())
    )
    assert root.tolist() == [1, 2]


@pytest.mark.parametrize("scores, logits", [(False, False), (True, False), (False, True), (True, True)])
def test_rounds_leave_what_the_call_keeps_of_each_token(scores, logits):
    watched: list[Any] = []
    engine = Script(2)
    out = run(engine, asked(2, keep_scores=scores, keep_logits=logits, watch=lambda *call: watched.append(call)))
    for row, plan in enumerate(taken(2, 8)):
        raw = [
            likely(torch.tensor(TEXTS[row][0])),
            *(
                likely(torch.tensor(token)) + step
                for step, token in zip(
                    [step for step, (_, count) in enumerate(plan) for _ in range(count)], TEXTS[row][1:8], strict=True
                )
            ),
        ]
        assert len(out.logits[row]) == 8 * logits and len(out.scores[row]) == 8 * scores
        for got, want in zip(out.logits[row], raw, strict=False):
            assert torch.equal(got, want) and got.dtype == torch.float32
        for place, (got, want) in enumerate(zip(out.scores[row], raw, strict=False)):
            assert torch.equal(got, want if place == 0 else 2 * want) and got.dtype == torch.float32
    tree, verdict, shown = watched[-1]
    assert (
        len(watched) == out.stats.rounds
        and (tree, verdict) == (engine.last.tree, engine.last.verdict)
        and shown is engine.last.logits
    )


def test_measures_are_kept_of_every_token_and_not_overwritten_by_the_next_round():
    engine = Script(2)
    engine.before = lambda: engine.rounds and engine.last.measures.fill_(0.0)
    out = run(engine, asked(2, measure=True))
    for row in range(2):  # the same odds at every place
        assert torch.equal(
            out.measures[row], measure(likely(torch.tensor(TEXTS[row][:8])), torch.tensor(TEXTS[row][:8]))
        )


def test_drafts_are_counted_as_far_as_they_are_no_copies():
    engine = Script(2)
    engine.drafted = (1, 0)
    stats = run(engine, asked(2, 2)).stats
    assert (stats.drafted, stats.draft_rounds, stats.row_rounds) == (1, 2, 2)

    class LocalCall(Script):
        def tree(self) -> TokenTree:
            return TokenTree.root_only(self.state.root)

    stats = run(LocalCall(2), asked(2, 4)).stats
    assert (stats.rounds, stats.drafted, stats.draft_rounds, stats.row_rounds) == (3, 0, 0, 6)


class Padding:
    """Plain decoding's steps, whose second row ended with its second token."""

    over, pad_token = False, 0

    def __init__(self) -> None:
        self.lengths: list[int | None] = [None, 2]

    def __call__(self, logits: Tensor, scores: Tensor | None = None) -> list[int]:
        return logits.argmax(-1).tolist()


def test_rows_that_are_padded_go_on_and_are_not_counted():
    steps: Any = Padding()
    engine, told = Script(2), []
    engine.before = lambda: setattr(steps, "over", engine.rounds == 2)
    out = run(engine, asked(2, steps=steps, keep_logits=True, emit=lambda *call: told.append(call)))
    assert out.tokens == [TEXTS[0][:7], TEXTS[1][:2]] and engine.verifiers == {InLockstep}
    assert [running for _, running, *_ in engine.steps] == [[True, True]] * 3
    assert [padded for _, _, padded, *_ in engine.steps] == [[False, True]] * 3
    assert (out.stats.row_rounds, out.stats.accepted, out.stats.rounds, out.logits) == (3, 0 + 1 + 2, 3, [[], []])
    first, second = ([call[1:] for call in told if call[0] == row] for row in (0, 1))
    assert first == [([1], 0, False), ([2], 0, False), ([3, 4], 1, False), ([5, 6, 7], 2, True)]
    assert second == [([2], 0, False), ([4], 1, True)]


@pytest.mark.parametrize("drafts", [False, True])
def test_waiting_prompts_begin_in_rows_that_are_free_when_nothing_is_in_flight(monkeypatch, drafts):
    """No round is asynchronous while a row is free; processors are asked for the prompt that begins."""
    monkeypatch.setattr(batching, "ASYNCHRONOUS_AFTER", 1)
    seen: list[tuple[int, int]] = []

    def process(rows: list[int], texts: Tensor, scores: Tensor) -> Tensor:
        seen.extend(zip(rows, texts[:, 0].tolist(), strict=True))
        return scores * 3

    engine = Script(1, Told() if drafts else None)
    request = asked(3, rows=1, entry=engine.entry, process_at=process, keep_scores=True, keep_logits=True, measure=True)
    out = run(engine, request)
    assert out.tokens == [text[:8] for text in TEXTS] and engine.verifiers == {WithHistory}
    assert (
        seen == [(0, 0), (1, 1), (2, 2)]
        and engine.target.read == [([[10]], [1])]
        and engine.one[0].read == [([[10, 1, 2]], [3])]
    )
    assert [entry for entry in engine.log if entry[0] == "admit"] == [("admit", 0, 2, [2]), ("admit", 0, 3, [9])]
    for text, scores, logits, measures in zip(TEXTS, out.scores, out.logits, out.measures, strict=True):
        assert len(scores) == len(logits) == len(measures) == 8
        assert torch.equal(scores[0], 3 * likely(torch.tensor(text[0]))) and torch.equal(
            logits[0], likely(torch.tensor(text[0]))
        )
    assert out.stats.joined == 2 and out.stats.rows == 1
    if drafts:
        ((ids, counts, features, root),) = engine.one[1].log
        assert (ids.tolist(), counts.tolist(), features.shape, root.tolist()) == ([[10, 1, 2]], [3], (1, 3, 0), [9])


def test_rounds_are_launched_ahead_but_not_while_a_row_is_free(monkeypatch):
    """A round that is in flight when a row ends is read, and launches no other; then a prompt begins there, with a
    length of its own."""
    monkeypatch.setattr(batching, "ASYNCHRONOUS_AFTER", 1)
    engine = Script(1)
    out = run(engine, asked(3, 12, rows=1, entry=engine.entry, ends=frozenset({7})))
    assert out.tokens == [TEXTS[0][:7], TEXTS[1][:8], TEXTS[2][:3]] and out.stats.joined == 2
    rounds = [(running, asynchronous) for _, (running,), _, asynchronous, _ in engine.steps]
    assert (True, True) in rounds and (True, False) in rounds and (False, True) not in rounds
    begun = [place for place, entry in enumerate(engine.log) if entry[0] == "admit"]
    for place, length in zip(begun, (2, 3), strict=True):
        read, following = engine.log[place - 1], engine.log[place + 1]
        assert read[2] == [False] and engine.log[place - 2][4]  # in flight as the row before it ended
        assert following[1:3] == (length, [True])


def test_the_phase_of_prefills_holds_those_of_prompts_that_joined(monkeypatch):
    ticks = iter(range(10, 99))
    monkeypatch.setattr(loop.time, "perf_counter", lambda: float(next(ticks)))
    engine = Script(1)
    assert run(engine, asked(3, rows=1, entry=engine.entry)).stats.phases == {"prefill": 3.0}


@pytest.mark.parametrize("wide", [0, 1])
@pytest.mark.parametrize("drafts", [False, True])
def test_given_answers_are_verified_before_the_calls_own_rounds_begin(monkeypatch, wide, drafts):
    """They may say more than the target, and less; the drafter begins once, behind what was kept, and its statistics
    with it."""
    ticks = iter(range(10, 99))
    monkeypatch.setattr(loop.time, "perf_counter", lambda: float(next(ticks)))
    drafter = Told() if drafts else None
    engine, answers = Script(3, drafter, wide), [TEXTS[0][:3], [*TEXTS[1][:5], 0, 0], [0]]
    out = run(engine, asked(3, 12, answers=answers, process_at=lambda rows, texts, scores: scores))
    verified = [step for *_, step in engine.steps]
    first = verified.index(False)
    assert verified == [True] * first + [False] * (len(verified) - first) and first == 1
    assert out.tokens == TEXTS and out.kept == [3, 5, 0] and out.stats.rounds == len(verified) - first
    assert (
        out.stats.phases == {"prefill": 1.0, "verify": 1.0}
        and engine.verifiers == {WithHistory}
        and engine.stats is out.stats
    )
    if drafts:
        hint, (ids, counts, features, root) = drafter.log
        assert hint is answers and counts.tolist() == [1 + 3, 2 + 5, 3 + 1] and root.tolist() == [4, 3, 8]
        for row, kept in enumerate((3, 5, 1)):
            assert ids[row, : counts[row]].tolist() == PROMPTS[row][: COUNTS[row]] + TEXTS[row][:kept]
        assert features.shape == (3, 7, wide) and root.data_ptr() != engine.state.root.data_ptr()


def test_nothing_of_an_answer_is_kept_or_shown_behind_its_end():
    """A row that ends in its answer goes no further, and others go through theirs to its end."""
    drafter = Told()
    engine, answers = Script(2, drafter), [TEXTS[0], TEXTS[1]]
    out = run(engine, asked(2, 12, answers=answers, ends=frozenset({5, 9})))
    assert out.tokens == [TEXTS[0][:5], TEXTS[1][:7]] == [[1, 2, 3, 4, 5], [2, 4, 6, 8, 1, 3, 5]] and out.kept == [5, 7]
    assert len(engine.steps) == 1 and out.stats.rounds == 0 and drafter.log[1][1].tolist() == [1 + 8, 2 + 8]
    drafter = Told()
    engine = Script(2, drafter)
    out = run(
        engine,
        asked(
            2, 12, answers=[[1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2], [2, 4, 6, 8, 1, 3, 5, 7, 9, 2, 4]], ends=frozenset({8})
        ),
    )
    assert out.tokens == [TEXTS[0][:8], TEXTS[1][:4]] and out.kept == [8, 4]


def test_rows_that_have_ended_are_not_read_with_the_others():
    """One that ended with its first token, and one that is padded in lockstep."""
    drafter = Told()
    out = run(Script(3, drafter), asked(3, 12, answers=TEXTS, ends=frozenset({9})))
    assert out.tokens == [TEXTS[0][:9], TEXTS[1][:9], [9]] and out.kept == [9, 9, 1]
    assert drafter.log[1][1].tolist() == [1 + 8, 2 + 8, 3]
    steps, drafter = Padding(), Told()
    engine = Script(2, drafter)
    engine.before = lambda: setattr(steps, "over", True)
    out = run(engine, asked(2, 12, answers=TEXTS[:2], steps=steps))
    assert out.tokens == [TEXTS[0][:9], TEXTS[1][:2]] and engine.steps[0][2] == [False, True]
    assert drafter.log[1][1].tolist() == [1 + 8, 2] and drafter.log[1][0].tolist()[1][:2] == PROMPTS[1][:2]
