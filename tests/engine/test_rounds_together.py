"""Prompts that join a batch together: which of them one pass reads, and what becomes of each where something fails."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.rounds import Counting, Stepping, Waiting
from torch import Tensor

from fastspec.generation.capture import padded_width
from fastspec.generation.engine.rounds import TOGETHER, Rounds, groups


@pytest.fixture(autouse=True)
def _untaken(monkeypatch) -> None:
    """Nobody reads what rounds emit."""
    monkeypatch.setattr("fastspec.generation.engine.rounds.take", lambda *given: None)


class Group:
    """A target or a drafter of several rows, that keeps what it reads and may fail; logits [N, 1] say how many tokens
    each row has."""

    def __init__(self, fails: bool = False, unreadable: int = -1) -> None:
        self.told: list[Any] = []
        self.fails, self.unreadable = fails, unreadable

    def reserve(self, committed: int) -> None:
        pass

    def prefill(self, ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        assert not self.fails, "no room"
        assert self.unreadable not in ids[:, 0].tolist()
        self.told.append([text[:count] for text, count in zip(ids.tolist(), counts.tolist(), strict=True)])
        return counts[:, None].float(), ids[..., None].float()

    def begin(self, ids: Tensor, counts: Tensor, features: Tensor, root: Tensor) -> None:
        assert not self.fails, "no drafts"
        assert torch.equal(features[..., 0], ids.float())
        texts = [text[:count] for text, count in zip(ids.tolist(), counts.tolist(), strict=True)]
        self.told.append((texts, root.tolist()))


class Capturing(Stepping):
    """An engine whose passes are captured: prompts may begin together. `broken` are the numbers of rows whose target or
    drafter fails."""

    def __init__(self, rows: int, drafts: bool = False, broken: tuple[str, ...] = ()) -> None:
        super().__init__(rows, drafts)
        self.target, self.drafter = SimpleNamespace(captures=True), SimpleNamespace(moves=True) if drafts else None
        self.broken, self.counts, self.unreadable = broken, [], -1  # type: tuple[tuple[str, ...], list[int], int]

    def entry(self, count: int) -> tuple[Any, Any]:
        self.counts.append(count)
        target = Group(count > 1 and "target" in self.broken, self.unreadable)
        self.entries.append((target, Group(count > 1 and "drafter" in self.broken) if self.drafts else None))  # type: ignore[arg-type]
        return self.entries[-1]

    def admit(
        self,
        row: int,
        target: Any,
        drafter: Any,
        root: Tensor,
        count: int,
        source: int | None = None,
        unread: None = None,
    ) -> None:
        assert row not in self.failing and unread is None, "no row"
        self.admitted.append((row, self.entries.index((target, drafter)), root.tolist(), count, source))


def capturing(
    batch: Any, *, drafts: bool = False, broken: tuple[str, ...] = (), **options: Any
) -> tuple[Rounds[Any], Capturing]:
    engine = Capturing(len(batch.running), drafts, broken)
    return Rounds(engine, batch, Counting(), engine.entry, **options), engine  # type: ignore[arg-type]


def outcomes(batch: Any) -> list[Any]:
    return [entry[:3] for entry in batch.log if entry[0] in ("read", "refuse")]


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize(
    ("lengths", "counts"),
    [
        ([4, 2], [2]),
        ([3], [1]),
        ([3, 3, 3], [2, 1]),
        ([1] * 7, [4, 2, 1]),
        ([1] * 20, [8, 8, 4]),
        ([600, 5, 5], [1, 2]),
        ([512, 512, 5, 5], [2, 2]),
        ([513, 513], [1, 1]),
        ([200] * 4, [4]),
        ([200] * 5 + [3], [4, 1, 1]),
        ([300] * 3, [2, 1]),
        ([60] * 7 + [30], [8]),
    ],
)
def test_short_prompts_are_read_together(lengths, counts, drafts):
    """As many as a power of two says and as fit a pass; each gets its row of what has read them, and its own first
    token. Passes have the shapes that a warm-up captures."""
    batch: Any = Waiting(len(lengths), *lengths)
    rounds, engine = capturing(batch, drafts=drafts)
    with torch.device("meta"):  # a tensor that is made without a device cannot meet the others
        rounds.turn()
    assert engine.counts == counts and batch.stats.joined == len(lengths)
    places = [(group, place if count > 1 else None) for group, count in enumerate(counts) for place in range(count)]
    assert engine.admitted == [
        (row, group, [length], length, source)
        for row, (length, (group, source)) in enumerate(zip(lengths, places, strict=True))
    ]
    passes = [texts for target, _ in engine.entries for texts in target.told]  # type: ignore[attr-defined]
    warmed = {(len(texts), padded_width(max(map(len, texts)))) for texts in passes if len(texts) > 1}
    assert warmed <= set(groups(TOGETHER)) and all(padded_width(width) == width for _, width in groups(TOGETHER))
    read = [text for texts in passes for text in texts]
    assert read == [[100 * prompt + place for place in range(length)] for prompt, length in enumerate(lengths)]
    if drafts:
        told = [drafter.told[0] for _, drafter in engine.entries]  # type: ignore[union-attr]
        assert [text for texts, _ in told for text in texts] == read and [
            root for _, roots in told for root in roots
        ] == lengths
    assert [entry[1:3] for entry in batch.log if entry[0] == "read"] == [
        (prompt, [length]) for prompt, length in enumerate(lengths)
    ]
    assert [asked[3] for asked in rounds.verifier.asked] == [[prompt] for prompt in range(len(lengths))]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("lengths", "read"),
    [
        ([5, 600, 5], [[0, 2], [1]]),
        ([600, 5, 5], [[0], [1, 2]]),
        ([300, 20, 290, 600, 200, 310], [[0, 2], [1], [3], [4], [5]]),
        ([180, 250, 130, 250, 190], [[0, 2, 4, 1], [3]]),  # 192, 256, 192, 256, 192 wide
        ([120, 20, 100, 250, 33, 128], [[0, 2, 5, 4], [1], [3]]),
        (
            [9] * 70 + [400] + [9] * 2,
            [[*range(at, at + 8)] for at in range(0, 64, 8)] + [[*range(64, 70), 71, 72], [70]],
        ),
    ],
)
def test_a_pass_reads_prompts_of_like_lengths(lengths, read):
    """Whoever waits longest is in it, narrower ones before wider ones, and it is padded with no more than saves time;
    those that are left keep their order."""
    batch: Any = Waiting(len(lengths), *lengths)
    rounds, engine = capturing(batch)
    rounds.turn()
    passes = [[text[0] // 100 for text in texts] for target, _ in engine.entries for texts in target.told]  # type: ignore[attr-defined]
    assert passes == read


@pytest.mark.parametrize("count", [1, 2])
def test_what_waits_for_the_device_comes_before_a_pass_or_after_its_rows(count, monkeypatch):
    """What a row has kept goes elsewhere before its next prompt is read, and the host reads first tokens when all rows
    have what was read: meanwhile the device is busy."""
    batch: Any = Waiting(2, *[5] * count)
    rounds, engine = capturing(batch)
    order = []
    for owner, name in ((batch, "give_away"), (Group, "prefill"), (engine, "admit"), (batch, "seat")):
        method = getattr(owner, name)
        told = lambda *given, method=method, name=name: order.append(name) or method(*given)  # noqa: E731
        monkeypatch.setattr(owner, name, told)
    rounds.turn()
    again = ["give_away"] if count == 1 else []  # by then it has nothing
    assert order == [*["give_away"] * count, "prefill", *again, *["admit"] * count, *["seat"] * count]


def test_together_takes_a_drafter_whose_rows_move_and_passes_that_are_captured():
    for change in ({"target": SimpleNamespace(captures=False)}, {"drafter": SimpleNamespace(moves=False)}):
        batch: Any = Waiting(2, 1, 1)
        engine = Capturing(2, True)
        vars(engine).update(change)
        Rounds(engine, batch, Counting(), engine.entry).turn()  # type: ignore[arg-type]
        assert engine.counts == [1, 1]
    batch = Waiting(2, 1, 1)
    rounds, engine = capturing(batch, together=1)
    rounds.turn()
    assert engine.counts == [1, 1]


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("broken", [("target",), ("drafter",)])
def test_prompts_that_cannot_be_read_together_are_read_alone(broken, drafts):
    """Their processors, which may keep something, are asked once. It is said, and not tried again."""
    batch: Any = Waiting(3, 4, 2)
    rounds, engine = capturing(batch, drafts=drafts, broken=broken)
    together = broken == ("drafter",) and not drafts
    with (
        nullcontext()
        if together
        else pytest.warns(RuntimeWarning, match=r"2 prompts could not be read in one pass \(AssertionError: no")
    ):
        rounds.turn()
    assert batch.reads_together is together
    assert engine.counts == ([2] if together else [2, 1, 1])
    assert outcomes(batch) == [("read", 0, [4]), ("read", 1, [2])]
    assert [(row, source) for row, *_, source in engine.admitted] == (
        [(0, 0), (1, 1)] if together else [(0, None), (1, None)]
    )
    assert [asked[3] for asked in rounds.verifier.asked] == [[0], [1]]  # type: ignore[attr-defined]


def test_other_rounds_of_the_batch_do_not_try_again_either():
    batch: Any = Waiting(4, 4, 2)
    with pytest.warns(RuntimeWarning, match="as all that come are"):
        capturing(batch, broken=("target",))[0].turn()
    batch.queue += [(7, 3), (8, 3)]
    others, engine = capturing(batch)
    others.turn()
    assert engine.counts == [1, 1] and [prompt for _, prompt, _ in outcomes(batch)] == [0, 1, 7, 8]


def test_where_warnings_are_errors_they_end_the_group_alone():
    batch: Any = Waiting(3, 4, 2)
    rounds, _ = capturing(batch, broken=("target",))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rounds.turn()
    refused = [entry for entry in batch.log if entry[0] == "refuse"]
    assert [prompt for _, prompt, _ in refused] == [0, 1] and all(
        "read in one pass" in str(error) for *_, error in refused
    )


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("where", ["first", "row", "both ways"])
def test_what_one_of_them_raises_ends_that_one_alone(where, drafts):
    batch: Any = Waiting(4, 4, 2, 3, 1)
    rounds, engine = capturing(batch, drafts=drafts, broken=("drafter",) if where == "both ways" else ())
    first = rounds.verifier.first

    def some(logits: Tensor, text: Any, prompts: list[int]) -> Any:
        assert prompts != [1], "no token"
        return first(logits, text, prompts)

    if where == "row":
        engine.failing = {1}
    else:
        rounds.verifier.first = some  # type: ignore[method-assign]
    with (
        pytest.warns(RuntimeWarning, match="3 prompts could not") if drafts and where == "both ways" else nullcontext()
    ):
        rounds.turn()
    said = "no row" if where == "row" else "no token"
    assert sorted(entry[:2] for entry in outcomes(batch)) == [("read", 0), ("read", 2), ("read", 3), ("refuse", 1)]
    assert [str(entry[2]).splitlines()[0] for entry in batch.log if entry[0] == "refuse"] == [said]
    assert [row for row, *_ in engine.admitted] == [0, 2, 3]
    if drafts and where == "first":
        assert engine.entries[0][1].told[0][1] == [4, 0, 3, 1]  # type: ignore[union-attr]


@pytest.mark.parametrize("drafts", [False, True])
def test_a_row_whose_text_cannot_be_kept_ends_its_own_prompt_alone(drafts, monkeypatch):
    """Its copy may find no memory."""
    batch: Any = Waiting(4, 4, 2, 3, 1)
    rounds, engine = capturing(batch, drafts=drafts)
    give_away = batch.give_away

    def full(row: int) -> None:
        assert row != 1, "no memory"
        give_away(row)

    monkeypatch.setattr(batch, "give_away", full)
    rounds.turn()
    assert sorted(entry[:2] for entry in outcomes(batch)) == [("read", 0), ("read", 2), ("read", 3), ("refuse", 1)]
    assert [row for row, *_ in engine.admitted] == [0, 2, 3] and batch.reads_together


def test_where_one_cannot_be_read_alone_either_it_is_that_one_s_and_together_is_tried_again():
    batch: Any = Waiting(4, 4, 2, 3, 1)
    rounds, engine = capturing(batch)
    engine.unreadable = 100  # the second prompt's first token
    rounds.turn()
    assert engine.counts == [4, 1, 1, 1, 1] and rounds.together == 8
    assert [entry[:2] for entry in outcomes(batch)] == [("read", 0), ("refuse", 1), ("read", 2), ("read", 3)]
    assert [row for row, *_ in engine.admitted] == [0, 2, 3]


def test_between_two_rounds_no_more_is_read_together_than_the_chunk():
    batch: Any = Waiting(9, *[32] * 8)
    batch.running[8] = True
    rounds, engine = capturing(batch, chunk=128)
    rounds.turn()
    assert engine.counts == [4] and len(engine.steps) == 1
    rounds.turn()
    assert engine.counts == [4, 4]


def test_a_prompt_that_fits_the_next_turn_is_not_begun_in_what_is_left_of_this_one():
    """A longer one than that is: its parts are passes anyway. So is one that fits what is left, and every one where
    none are read together."""
    for first, length, together, left in (
        (64, 100, 8, [64]),
        (64, 100, 2, [64]),
        (64, 100, 1, [64, 64]),
        (64, 129, 8, [64, 64]),
        (96, 32, 8, [96, 32]),
        (96, 33, 8, [96]),
    ):
        batch: Any = Waiting(3, first, length)
        batch.running[2] = True
        rounds, engine = capturing(batch, chunk=128, together=together)
        rounds.turn()
        assert [len(text) for target, _ in engine.entries for texts in target.told for text in texts] == left  # type: ignore[attr-defined]
        rounds.turn()
        rounds.turn()
        assert batch.stats.joined == 2


@pytest.mark.parametrize(
    ("rows", "waiting", "free", "joined"),
    [
        (64, 9, 3, 0),
        (64, 9, 4, 4),
        (64, 9, 7, 4),
        (64, 2, 2, 2),
        (64, 3, 2, 0),
        (31, 9, 1, 1),
        (32, 9, 1, 0),
        (500, 30, 7, 0),
        (500, 30, 8, 8),
    ],
)
def test_a_call_lets_rows_stand_idle_until_prompts_can_be_read_together(rows, waiting, free, joined):
    """One in sixteen, as long as so many prompts wait; meanwhile rounds are launched ahead."""
    batch: Any = Waiting(rows, *[2] * waiting)
    batch.running = [False] * free + [True] * (rows - free)
    rounds, engine = capturing(batch)
    rounds.turn()
    assert batch.stats.joined == joined and engine.steps[0][3]


def test_no_row_stands_idle_where_someone_waits_for_each_answer_or_nothing_else_goes_on():
    batch: Any = Waiting(64, *[2] * 9)
    batch.running = [False] + [True] * 63
    rounds, _ = capturing(batch, chunk=256)
    rounds.turn()
    assert batch.stats.joined == 1
    batch = Waiting(64, *[2] * 3)
    rounds, _ = capturing(batch)
    rounds.turn()
    assert batch.stats.joined == 3


def test_what_a_running_row_raises_while_prompts_join_is_the_turns_error(monkeypatch):
    """It is raised once: the prompts are not read again one by one, nor refused."""
    batch: Any = Waiting(3, 4, 4)
    batch.running[0] = True
    rounds, engine = capturing(batch)

    def interrupt() -> None:
        raise LookupError("a row's own storage")

    monkeypatch.setattr(engine, "interrupt", interrupt)
    with pytest.raises(LookupError, match="own storage"):
        rounds.turn()
    assert engine.counts == [2] and outcomes(batch) == [] and batch.reads_together
