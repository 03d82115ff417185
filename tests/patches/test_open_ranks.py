"""An open batch of a model that two processes hold together gives the answers of one, in the same turns in both."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ranks_open
from helpers.generate import bigram
from helpers.grammars import terse
from helpers.models import tiny_model
from helpers.open import SECONDS
from helpers.processes import spawn
from helpers.rank_pool import RankPools
from helpers.ranks import COUNTS, SIZE, folders, sizes, work

from fastspec.errors import FastSpecError
from fastspec.patches.open_ranks import TurnOrder

ALIKE = "mixed", "drafted", "followed", "ended", "clocked", "chat", "changed", "failing", "structured"
"""Kinds of batches that one process opens, too."""
MORE = "mixtures", "cancelled", "warmed", "turned", "sized", "crowded", "idle"
"""More of them."""


def saved(folder: Path) -> None:
    tiny_model("llama", **sizes()).save_pretrained(folder / "llama")
    bigram(**sizes()).save_pretrained(folder / "bigram")
    terse(**sizes()).save_pretrained(folder / "terse")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The folder of the models for so many processes."""
    return folders(tmp_path_factory, saved)


def compare(pools: RankPools, folder: Path, name: str, **where: Any) -> None:
    """Every second result is a batch's state at its end, which is the same in all processes; the others are the
    answers, which are those of one process."""
    (mine, *others), expected = pools.run(getattr(ranks_open, name), folder, **where)
    answers, states = slice(0, None, 2), slice(1, None, 2)
    assert mine[answers] == expected[answers]
    for other in others:
        assert len(mine) == len(other)
        for here, there in zip(mine[states], other[states], strict=True):
            assert repr(here) == repr(there)


@pytest.mark.parametrize("name", [*ALIKE, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
@pytest.mark.parametrize("count", [SIZE, pytest.param(4, marks=pytest.mark.slow)])
def test_answers_are_those_of_one_process(
    rank_pools: RankPools, folder_of: Callable[[int], Path], count: int, name: str
) -> None:
    compare(rank_pools, folder_of(count), name, count=count)


@pytest.mark.parametrize("name", (*ALIKE, *MORE))
@pytest.mark.parametrize("count", COUNTS)
def test_so_are_those_of_several_gpus(
    rank_pools: RankPools, folder_of: Callable[[int], Path], count: int, name: str
) -> None:
    compare(rank_pools, folder_of(count), name, count=count, device="cuda")


def test_what_is_refused_by_name(rank_pools: RankPools, folder_of: Callable[[int], Path]) -> None:
    (mine, other), _ = rank_pools.run(ranks_open.refused, folder_of(SIZE), alone=False)
    differ, second, plain, named, undone, first, *rest = mine
    assert "opened batches with different" in differ
    assert all("an open batch decodes in the 2 processes" in each for each in (second, plain, named))
    assert "close that batch first" in undone and first == "nothing" and rest[:2] == ["True"] * 2
    assert "this batch is closed" in rest[2] and rest[3] == "nothing"
    assert other[:5] == mine[:5]
    submitted, alive, warmed, follows, after, generated = other[5:]
    assert "this is process 1 of the 2 that hold the model together, and the first one takes" in submitted == after
    assert (alive, warmed, follows, generated) == ("False", "0.0", "True", "nothing")


def test_batches_take_turns_and_an_error_of_one_ends_all() -> None:
    """Who waits longest comes first, so that one that always has work leaves another its turns."""
    order, taken = TurnOrder(held=True), list[str]()

    def work(name: str) -> str:
        for _ in range(4):
            order.take(name)
            order.take(name)  # it has it still
            taken.append(name)
            time.sleep(0.02)
            order.release(name)
        return "ended"

    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(work, name) for name in "ab"]
        time.sleep(0.05)
        assert not taken  # before the batches are open
        order.begin()
        assert [run.result(SECONDS) for run in runs] == ["ended"] * 2
        assert {"".join(taken[at : at + 2]) for at in range(1, 5)} <= {"ab", "ba"}
        order.take("a")
        waits = pool.submit(order.take, "b")
        order.fail(OSError("planted"))
        with pytest.raises(FastSpecError, match="another stage's batch has ended: planted"):
            waits.result(SECONDS)
        with pytest.raises(FastSpecError, match="planted"):
            order.take("a")


def test_another_process_takes_the_turns_that_the_first_names() -> None:
    order, heads = TurnOrder(), iter([[1, 0], [2, 1], [3, 1], [4, 0]])
    taken = list[tuple[int, int]]()

    def work(number: int) -> None:
        for _ in range(2):
            head, told = order.hear(number, number, lambda: next(heads))
            taken.append((head, told))
            order.release(number)

    with ThreadPoolExecutor(2) as pool:
        for run in [pool.submit(work, number) for number in (1, 0)]:
            run.result(SECONDS)
    assert taken == [(1, 0), (2, 1), (3, 1), (4, 0)]


def told_by(folder: Path, run: Any, kind: str) -> list[list[Any]]:
    """What each process told before it ended; nothing of one that told nothing."""
    saved(folder)
    spawn(work, (folder, run, f"{kind}{folder}"), SIZE)
    places = [folder / f"told{rank}.pt" for rank in range(SIZE)]
    return [torch.load(place) if place.exists() else [] for place in places]


@pytest.mark.slow
def test_other_tokens_end_the_batch(tmp_path: Path) -> None:
    mine, other = told_by(tmp_path, ranks_open.parted, "")
    assert "made other tokens of the prompts than the first" in other[0]
    assert "a round failed in process 0" in mine[0] or "cannot reach the others" in mine[0]


@pytest.mark.parametrize(
    "how", ["ends", pytest.param("ends idle", marks=pytest.mark.slow), pytest.param("fails", marks=pytest.mark.slow)]
)
def test_a_process_that_is_lost_ends_the_batch(how: str, tmp_path: Path) -> None:
    """The first process is told by a broken connection, and not by a time limit."""
    mine, other = told_by(tmp_path, ranks_open.lost, f"{how} in ")
    *waiting, after, alive, seconds = mine
    assert len(waiting) == (how != "ends idle") and seconds < 60 and alive == "False"
    assert all("a round failed in process 0" in each or "cannot reach the others" in each for each in waiting)
    assert "this batch has stopped" in after and "process 0 of the 2" in after
    assert not other if how != "fails" else "only here" in other[0]
