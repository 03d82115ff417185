"""`patch(exact=True)` of a model that several processes hold together: sums in the order of the ranks, over gloo, and
the same bits beside any drafts and rows, on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.generate import bigram
from helpers.models import tiny_model
from helpers.rank_pool import RankPools
from helpers.ranks import COUNTS, SIZE, folders, sizes
from helpers.ranks_exact import bits, sums, taken

KINDS = "llama", "qwen2", "qwen2_moe", "glm4_moe", "mixtral", "gpt_oss"
"""Plain layers, biases, and experts: with a shared one that all have whole, or that is cut, and whole in each."""


def saved(folder: Path) -> None:
    for kind in KINDS:
        tiny_model(kind, **sizes()).save_pretrained(folder / kind)
    bigram(**sizes()).save_pretrained(folder / "bigram")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The folder of the models for so many processes."""
    return folders(tmp_path_factory, saved)


@pytest.mark.parametrize("count", [SIZE, pytest.param(4, marks=pytest.mark.slow)])
def test_sums_are_in_the_order_of_the_ranks_whatever_rows_there_are(
    rank_pools: RankPools, tmp_path: Path, count: int
) -> None:
    (mine, *others), _ = rank_pools.run(sums, tmp_path, count=count, alone=False)
    assert all(torch.equal(a, b) for other in others for a, b in zip(mine, other, strict=True))


@pytest.mark.some("glm4_moe")
@pytest.mark.parametrize("kind", ["llama", "glm4_moe"])
def test_a_cut_model_is_held_where_that_is_asked_for(
    rank_pools: RankPools, folder_of: Callable[[int], Path], kind: str
) -> None:
    (mine, other), _ = rank_pools.run(taken, folder_of(SIZE), kind, alone=False)
    for told in (mine, other):
        assert told[2:5] == [True, None, True] and "was not measured" in told[5]
    assert all(torch.equal(a, b) for a, b in zip(mine[:2], other[:2], strict=True))


@pytest.mark.parametrize("kind", [*KINDS, "bigram"])
@pytest.mark.parametrize("count", COUNTS)
def test_drafts_and_rows_change_no_bit_over_gpus(
    rank_pools: RankPools, folder_of: Callable[[int], Path], count: int, kind: str
) -> None:
    rank_pools.run(bits, folder_of(count), kind, count=count, device="cuda", alone=False)
