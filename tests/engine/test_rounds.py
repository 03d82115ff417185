"""Turns of a batch by themselves: which prompts join between two rounds, in which parts, and what a round's tokens do
to their prompts."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.rounds import CPU, LONGEST, Counting, Reader, Stepping, Told, Waiting
from torch import Tensor

from fastspec.generation.engine.batching import Batch
from fastspec.generation.engine.call import Request, RoundState
from fastspec.generation.engine.joining import Joining
from fastspec.generation.engine.round_program import Round, Scored
from fastspec.generation.engine.rounds import Rounds, take
from fastspec.generation.stats import Stats
from fastspec.generation.tree import TokenTree, Verdict

VOCAB = 7
ELSEWHERE = torch.device("meta")  # as the default device: a tensor that is made without one cannot meet the others


@pytest.fixture(autouse=True)
def taken(monkeypatch) -> list[Any]:
    """What `turn` hands to `take`, which runs in the tests that call it themselves."""
    found: list[Any] = []
    monkeypatch.setattr("fastspec.generation.engine.rounds.take", lambda *given: found.append(given))
    return found


def made(batch: Any, chunk: int | None = None, drafts: bool = False) -> tuple[Rounds[Any], Stepping]:
    engine = Stepping(len(batch.running), drafts)
    options = {} if chunk is None else {"chunk": chunk}
    return Rounds(engine, batch, Counting(), engine.entry, **options), engine  # type: ignore[arg-type]


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("sizes", [[5], [2, 3], [2, 2, 9]])
def test_a_prompt_is_read_in_parts_and_begun_behind_the_whole_of_it(sizes, drafts):
    """The verifier sees the last part's logits, and the drafter the whole text with the features of all its parts in
    order."""
    target, drafter, verifier = Reader(), Told() if drafts else None, Counting()
    joining = Joining(1, 8, torch.arange(5)[None], target, drafter)  # type: ignore[arg-type]
    with ELSEWHERE:
        for place, size in enumerate(sizes):
            assert joining.left == 5 - sum(sizes[:place])
            joining.read(size)
        root, scores = joining.begin(verifier)  # type: ignore[arg-type]
    assert (
        target.reserved == 5
        and joining.left == 0
        and [len(part) for part in target.parts] == [*sizes[:-1], 5 - sum(sizes[:-1])]
    )
    assert [token for part in target.parts for token in part] == [0, 1, 2, 3, 4]
    assert verifier.asked == [([[5.0]], [[0, 1, 2, 3, 4]], [5], [8])]
    assert (root.tolist(), scores.tolist()) == ([5], [[5.5]])
    assert drafter is None or drafter.told == ([[0, 1, 2, 3, 4]], [5], [0, 1, 2, 3, 4], [5])


@pytest.mark.parametrize("drafts", [False, True])
def test_prompts_take_all_rows_that_are_free_before_a_round(drafts, taken):
    """Each begins in an entry of its own, and the batch hears of its row, its length and its first token."""
    batch: Any = Waiting(3, 4, 2)
    batch.running[1] = True
    rounds, engine = made(batch, drafts=drafts)
    rounds.turn()
    assert batch.log == [
        ("next", 0, 0),
        ("seat", 0, 0, 4),
        ("read", 0, [4], [[4.5]], [[4.0]]),
        ("next", 2, 1),
        ("seat", 2, 1, 2),
        ("read", 1, [2], [[2.5]], [[2.0]]),
    ]
    assert engine.admitted == [(0, 0, [4], 4), (2, 1, [2], 2)] and batch.stats.joined == 2
    assert engine.joined == [(0, 4, 4), (2, 2, 2)]
    assert rounds.verifier.seated == [([0], [0]), ([2], [1])]  # type: ignore[attr-defined]
    assert rounds.joining is None and set(batch.stats.phases) == {"prefill"}
    assert [target.parts for target, _ in engine.entries] == [[[0, 1, 2, 3]], [[100, 101]]]
    ((longest, stats, verifier, asynchronous, running, padded),) = engine.steps
    assert (longest, asynchronous, running, padded) == (20, True, [True] * 3, [False] * 3)
    assert stats is batch.stats and verifier is rounds.verifier and taken == [("emitted", engine, batch)]
    assert not drafts or engine.entries[1][1].told == ([[100, 101]], [2], [100, 101], [2])  # type: ignore[union-attr]


def test_a_long_prompt_is_read_a_chunk_a_turn_while_others_go_on():
    """No round is asynchronous until it has joined, and its last part leaves the rest of the chunk to the next
    prompt."""
    batch: Any = Waiting(3, 7, 5)
    batch.running[1] = True
    rounds, engine = made(batch, 3)
    read = []
    for _ in range(5):
        rounds.turn()
        read.append([list(map(len, target.parts)) for target, _ in engine.entries])
    assert read == [[[3]], [[3, 3]], [[3, 3, 1], [2]], [[3, 3, 1], [2, 3]], [[3, 3, 1], [2, 3]]]
    assert engine.admitted == [(0, 0, [7], 7), (2, 1, [5], 5)]
    assert [asynchronous for *_, asynchronous, _, _ in engine.steps] == [False, False, False, True, True]
    assert [running for *_, running, _ in engine.steps] == [[False, True, False]] * 2 + [[True, True, False]] + [
        [True] * 3
    ] * 2
    assert [entry for entry in batch.log if entry[0] != "expects"] == [
        ("next", 0, 0),
        ("seat", 0, 0, 7),
        ("read", 0, [7], [[7.5]], [[7.0]]),
        ("next", 2, 1),
        ("seat", 2, 1, 5),
        ("read", 1, [5], [[5.5]], [[5.0]]),
    ]


def test_the_last_token_of_a_chunk_is_read_too():
    batch: Any = Waiting(3, 5, 1)
    batch.running[1] = True
    rounds, engine = made(batch, 3)
    rounds.turn()
    rounds.turn()
    assert engine.admitted == [(0, 0, [5], 5), (2, 1, [1], 1)]


def test_where_nobody_goes_on_a_prompt_is_read_whole_and_counts_for_the_chunk():
    """Then there is a row that would wait for the next one."""
    batch: Any = Waiting(2, 7, 2)
    rounds, engine = made(batch, 3)
    rounds.turn()
    assert [target.parts for target, _ in engine.entries] == [[[0, 1, 2, 3, 4, 5, 6]]]
    rounds.turn()
    assert engine.entries[1][0].parts == [[100, 101]] and engine.admitted == [(0, 0, [7], 7), (1, 1, [2], 2)]


def test_without_a_chunk_prompts_are_read_whole_though_others_go_on():
    batch: Any = Waiting(2, 700)
    batch.running[1] = True
    rounds, engine = made(batch)
    rounds.turn()
    assert list(map(len, engine.entries[0][0].parts)) == [700]


@pytest.mark.parametrize("size", [3, 4])
def test_a_prompt_of_the_chunks_size_is_read_at_once(size):
    batch: Any = Waiting(2, size)
    batch.running[0] = True
    rounds, engine = made(batch, 3)
    rounds.turn()
    assert (rounds.joining is None) == (size == 3) and list(map(len, engine.entries[0][0].parts)) == [3]


def test_a_prompt_that_is_not_expected_any_more_is_dropped_and_the_next_begins_anew():
    batch: Any = Waiting(2, 7, 2)
    batch.running[0] = True
    rounds, engine = made(batch, 3)
    rounds.turn()
    assert rounds.joining is not None
    batch.wanted = False
    rounds.turn()
    assert ("expects", 1) in batch.log and engine.admitted == [(1, 1, [2], 2)]
    assert [target.parts for target, _ in engine.entries] == [[[0, 1, 2]], [[100, 101]]]


@pytest.mark.parametrize("late", [False, True])
def test_a_prompt_that_cannot_be_read_is_refused_and_others_go_on(late):
    """At its first part, or at a later one; nothing of it joins, and what it did not read is left to the next."""
    batch: Any = Waiting(2, 5, 3)
    batch.running[0] = True
    rounds, engine = made(batch, 3)
    if late:
        rounds.turn()
        engine.entries[0][0].fails = True
    else:
        engine.failing = {0}
    rounds.turn()
    assert [entry for entry in batch.log if entry[0] in ("refuse", "seat")] == [
        ("refuse", 0, "unreadable"),
        ("seat", 1, 1, 3),
    ]
    assert engine.admitted == [(1, 1, [3], 3)] and rounds.joining is None and batch.stats.joined == 1


@pytest.mark.parametrize("room", [None, 3])
def test_what_a_running_row_raises_while_a_prompt_joins_is_the_turns_error(monkeypatch, room):
    """The prompt is not refused for it, read whole or in parts."""
    batch: Any = Waiting(2, 5)
    batch.running[0] = True
    rounds, engine = made(batch, room)

    def interrupt() -> None:
        raise LookupError("a row's own storage")

    monkeypatch.setattr(engine, "interrupt", interrupt)
    with pytest.raises(LookupError, match="own storage"):
        rounds.turn()
    assert batch.log == [("next", 1, 0)] and engine.admitted == []


def test_a_prompt_that_cannot_begin_is_refused_by_its_number():
    batch: Any = Waiting(1, 5)
    batch.queue = deque([(6, 5)])
    rounds, engine = made(batch)
    engine.admit = None  # type: ignore[assignment,method-assign]
    rounds.turn()
    assert (
        batch.log[-1] == ("refuse", 6, "'NoneType' object is not callable")
        and engine.steps == []
        and rounds.joining is None
    )


def test_nothing_joins_while_a_round_is_in_flight_and_that_one_is_read():
    """Even where all rows have ended meanwhile; a row that is free keeps the next from being launched."""
    batch: Any = Waiting(1, 4)
    rounds, engine = made(batch)
    engine.in_flight = True
    rounds.turn()
    assert batch.log == [] and len(engine.steps) == 1 and engine.steps[0][3] is False
    engine.in_flight = False
    rounds.turn()
    assert engine.admitted == [(0, 0, [4], 4)] and engine.steps[1][3] is True


def test_there_is_no_round_where_no_row_goes_on():
    rounds, engine = made(Waiting(2))
    rounds.turn()
    assert engine.steps == []


@pytest.mark.parametrize(
    ("stays", "ahead", "asynchronous"),
    [
        (None, True, True),
        (True, True, True),
        (False, True, False),
        (True, False, False),
    ],
)
def test_a_round_is_asynchronous_where_the_rows_stay_and_the_batch_goes_on(stays, ahead, asynchronous):
    batch: Any = Waiting(2)
    batch.running, batch.padded, batch.long = [True, True], [False, True], ahead
    rounds, engine = made(batch)
    rounds.turn() if stays is None else rounds.turn(stays)
    assert engine.steps == [(20, batch.stats, rounds.verifier, asynchronous, [True, True], [False, True])]


class Kept(Batch):
    """A batch that keeps what it takes, and how it grows."""

    def __init__(self, request: Request, rows: int) -> None:
        super().__init__(request, Stats())
        self.alone = True
        self.places, self.log, self.grown = list(range(rows)), [], []  # type: tuple[list[int], list[Any], list[Any]]

    def take(
        self,
        prompt: int,
        tokens: list[int],
        accepted: int,
        scores: Tensor | None,
        logits: Tensor | None,
        drafted: int = 0,
        tree: Any = None,
    ) -> None:
        self.log.append((prompt, tokens, accepted, scores, logits))
        self.out.tokens[prompt] += tokens

    def grow(self, more: list[int], ran: list[bool], follows: int) -> None:
        self.grown.append((more, list(ran), follows))


def batch_of(prompts: int, rows: int, **changes: Any) -> Kept:
    return Kept(
        Request(torch.zeros(prompts, 1, dtype=torch.long), torch.ones(prompts), [], 9, frozenset(), None, **changes),
        rows,
    )


EMITTED = [[2, 11, 12, 13], [0, 21, 22, 23], [1, 31, 32, 33]]
PATH = torch.tensor([[0, 1, 2], [0, 0, 0], [0, 2, 2]])


def after(tree: TokenTree, **changes: Any) -> Any:
    """An engine behind a round of three rows: all tokens, one of them, two of them."""
    verdict = Verdict(PATH, torch.tensor([2, 0, 1]), torch.zeros(3, dtype=torch.long))
    logits = torch.randn(3, 3, VOCAB).half()
    last = Round(Scored(tree, logits, logits[..., :0]), verdict, logits * 2, emitted=PATH, **changes)
    return SimpleNamespace(last=last, state=RoundState(3, CPU), in_flight=False, longest=LONGEST)


def wide(nodes: int = 3, drafted: tuple[int, ...] | None = None) -> TokenTree:
    tree = TokenTree.chain(torch.zeros(3, nodes, dtype=torch.long))
    return TokenTree(tree.tokens, tree.parents, tree.depths, tree.ancestors, tree.max_path, None, drafted)


@pytest.mark.parametrize("in_flight", [False, True])
def test_tokens_go_to_the_prompts_that_the_rows_hold_and_go_on(in_flight):
    """As many as were accepted and one more; rows grow by as many, and by what was launched already."""
    batch, engine = batch_of(5, 3), after(wide())
    batch.places, batch.active[4] = [3, 4, 1], False
    engine.state.activate([True, False, True])
    engine.in_flight = in_flight
    take(EMITTED, engine, batch)
    assert batch.log == [(3, [11, 12, 13], 2, None, None), (1, [31, 32], 1, None, None)]
    assert batch.grown == [([3, 1, 2], [True, False, True], LONGEST * in_flight)]
    assert (batch.stats.rounds, batch.stats.row_rounds, batch.stats.accepted, batch.stats.lengths) == (
        1,
        2,
        3,
        [0, 1, 1],
    )
    assert batch.measures == [[]] * 5
    take(EMITTED, engine, batch)
    assert batch.stats.rounds == 2


@pytest.mark.parametrize(
    ("nodes", "drafted", "counted", "rounds"),
    [
        (3, None, 3 * 2, 3),
        (2, None, 3 * 1, 3),
        (1, None, 0, 0),
        (3, (2, 0, 1), 3, 3),
        (3, (0, 0, 0), 0, 3),
    ],
)
def test_drafts_are_counted_by_nodes_but_for_copies(nodes, drafted, counted, rounds):
    """A round of a tree has drafts even in a row where all are copies."""
    batch = batch_of(3, 3)
    take(EMITTED, after(wide(nodes, drafted)), batch)
    assert (batch.stats.drafted, batch.stats.draft_rounds, batch.stats.row_rounds) == (counted, rounds, 3)


@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("logits", [False, True])
def test_scores_and_logits_are_those_along_the_accepted_path_where_they_are_asked_for(scores, logits):
    batch, engine = batch_of(3, 3, keep_scores=scores, keep_logits=logits), after(wide())
    take(EMITTED, engine, batch)
    for row, path in enumerate(([0, 1, 2], [0], [0, 2])):
        *_, found, raw = batch.log[row]
        want = engine.last.logits[row, path].float()
        assert raw is None if not logits else torch.equal(raw, want) and raw.dtype == torch.float32
        assert found is None if not scores else torch.equal(found, 2 * want)


def test_rows_that_are_padded_get_their_tokens_alone():
    """They are not counted, and nothing of theirs is kept; the rows behind them are taken as any."""
    batch, engine = batch_of(3, 3, keep_scores=True, keep_logits=True), after(wide(), measures=torch.rand(3, 3, 3))
    engine.state.activate([True] * 3, [True, True, False])
    take(EMITTED, engine, batch)
    assert batch.log[:2] == [(0, [11, 12, 13], 2, None, None), (1, [21], 0, None, None)]
    assert (
        len(batch.log[2][3]) == len(batch.log[2][4]) == 2
        and batch.measures[:2] == [[], []]
        and len(batch.measures[2]) == 1
    )
    assert (batch.stats.row_rounds, batch.stats.accepted) == (1, 1)


def test_measures_are_kept_of_the_tokens_that_were_taken_and_not_overwritten_by_the_next_round():
    held = torch.rand(3, 3, 3)
    batch, engine, want = batch_of(3, 3), after(wide(), measures=held), held.clone()
    take(EMITTED, engine, batch)
    held.zero_()
    for row, count in enumerate((3, 1, 2)):
        (kept,) = batch.measures[row]
        assert torch.equal(kept, want[row, :count])


def test_who_watches_sees_a_round_before_its_tokens_are_taken():
    seen: list[Any] = []
    batch, engine = batch_of(3, 3), after(wide())
    batch.request = replace(batch.request, watch=lambda *given: seen.append((given, len(batch.log))))
    take(EMITTED, engine, batch)
    (((tree, verdict, logits), before),) = seen
    assert tree is engine.last.tree and verdict is engine.last.verdict and logits is engine.last.logits and before == 0
