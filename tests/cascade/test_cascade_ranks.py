"""A cascade over two processes that hold its large model together, and some of its stages: the first decides, and holds
the others alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ranks_cascade
from helpers.models import tiny_model
from helpers.processes import spawn
from helpers.rank_pool import RankPools
from helpers.ranks import COUNTS, SIZE, folders, work

import fastspec
from fastspec.errors import Unsupported

CASES = "served", "called", "failing", "drafted"


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The folder of the models for so many processes."""
    return folders(tmp_path_factory, ranks_cascade.save)


def compare(pools: RankPools, folder: Path, name: str, **where: Any) -> list[list[Any]]:
    """Results of a case by process, of which the first's are those of one process."""
    made, expected = pools.run(getattr(ranks_cascade, name), folder, str(folder), **where)
    assert made[0] == expected
    return made


def test_an_open_batch_answers_as_the_cascades_own_generate_in_one_process(
    rank_pools: RankPools, folder_of: Callable[[int], Path]
) -> None:
    mine, (submitted, loads, alive) = compare(rank_pools, folder_of(SIZE), "served")
    assert "this is process 1 of the 2 that hold the model together, and the first one takes" in submitted
    assert loads == ["medium", "large"] and alive == "False"
    visits = [visit for row in mine[1:-1:2] for visit in row]
    assert {name for name, outcome, *_ in visits if outcome == "answered"} == {"small", "medium", "large"}
    assert any(0 < kept < handed for *_, kept, handed in visits)


@pytest.mark.slow
def test_so_does_generate_over_processes(rank_pools: RankPools, folder_of: Callable[[int], Path]) -> None:
    mine, other = compare(rank_pools, folder_of(SIZE), "called")
    assert other == mine


@pytest.mark.slow
@pytest.mark.parametrize("name", ["failing", "drafted"])
def test_so_do_other_modes_and_a_batch_whose_round_failed(
    rank_pools: RankPools, folder_of: Callable[[int], Path], name: str
) -> None:
    compare(rank_pools, folder_of(SIZE), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_so_do_those_of_four_processes(rank_pools: RankPools, folder_of: Callable[[int], Path], name: str) -> None:
    compare(rank_pools, folder_of(4), name, count=4)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("count", COUNTS)
def test_so_do_those_of_several_gpus(
    rank_pools: RankPools, folder_of: Callable[[int], Path], count: int, name: str
) -> None:
    compare(rank_pools, folder_of(count), name, count=count, device="cuda")


def test_what_is_refused_by_name(rank_pools: RankPools, folder_of: Callable[[int], Path]) -> None:
    folder = folder_of(SIZE)
    (told, other), _ = rank_pools.run(ranks_cascade.refused, folder, str(folder), alone=False)
    assert other == told
    size, loaded, kept, kept_calls, missing, missing_calls, whole, cut, large, called, fine, second, beside, after = (
        told
    )
    assert "stage 'small' has tensor_parallel=3, and 2 processes hold the large model together: give 1" in size
    assert "has tensor_parallel=1, and its model was loaded over 2" in loaded
    assert "memory=1048576" in kept and "keep nothing between calls" in kept_calls
    assert all("could not load the model" in each or "no such" in each for each in (missing, missing_calls)), missing
    assert all("'speculative' has no draft model" in each for each in (whole, cut, large, called))
    assert fine == after == "nothing"
    assert all("an open batch decodes in the 2 processes" in each for each in (second, beside))


@pytest.mark.slow
@pytest.mark.parametrize(
    "how, why", [("ends", ""), ("fails", "only here"), ("parts", "made other tokens of the prompts")]
)
def test_a_process_that_is_lost_or_parts_ends_the_batch(how: str, why: str, tmp_path: Path) -> None:
    ranks_cascade.save(tmp_path)
    spawn(work, (tmp_path, ranks_cascade.lost, f"{how} in {tmp_path}"), SIZE)
    waiting, after, alive, seconds = torch.load(tmp_path / "told0.pt")
    assert seconds < 60 and alive == "False"
    assert "a round failed in process 0" in waiting or "cannot reach the others" in waiting
    assert "this batch has stopped" in after
    if why:
        assert why in torch.load(tmp_path / "told1.pt")[0]


@pytest.mark.parametrize(
    "fields, why",
    [
        ({"tensor_parallel": 0}, "tensor_parallel must be a number of processes of at least 1, not 0"),
        ({"tensor_parallel": True}, "at least 1, not True"),
        ({"tensor_parallel": 2, "device_map": "auto"}, "tensor_parallel=2 cuts the model over processes, and"),
        ({"tensor_parallel": 2, "quantization": "8bit"}, "leave them out, or load it whole"),
    ],
)
def test_fields_that_do_not_fit_together(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(Unsupported, match=why):
        fastspec.Stage("org/small", **fields)


def test_one_process_cuts_no_stage() -> None:
    cascade = fastspec.Cascade([fastspec.Stage("org/small", tensor_parallel=2)], mode="lossless")
    with pytest.raises(Unsupported, match="tensor_parallel=2, and one process holds the large model: start several"):
        fastspec.patch(tiny_model(), cascade=cascade)
