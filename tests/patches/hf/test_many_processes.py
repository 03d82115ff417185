"""Four and eight processes that hold a model together say what it says in one: over gloo on the CPU, and over NCCL and
symmetric memory where there are as many GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.generate import bigram
from helpers.models import tiny_model
from helpers.rank_pool import RankPools
from helpers.ranks import (
    calls,
    captured,
    cut_heads,
    drafted,
    family,
    folders,
    mixed,
    on_gpus,
    sized,
    sizes,
    staged,
)

FAMILIES = "llama", "qwen3", "gemma4_text", "gpt_oss", "qwen3_5_text", "llama4_text", "glm4_moe", "hunyuan_v1_dense"
"""One of each kind of layer, and one without an adapter."""
MIXTURES = "qwen2_moe", "glm4_moe"
KINDS = drafted, cut_heads, calls, captured, sized, staged


def cases() -> list[Any]:
    """The heads of the tests have four key heads, which eight processes leave whole."""
    made = []
    for count, device in ((4, "cpu"), (8, "cpu"), (4, "cuda"), (8, "cuda")):
        jobs = [(run.__name__, run, "") for run in KINDS if count == 4]
        jobs += [(f"{kind}, mixed", mixed, kind) for kind in MIXTURES]
        jobs += [(kind, family, kind) for kind in FAMILIES]
        marks = [pytest.mark.slow] if device == "cpu" else [pytest.mark.gpu, *on_gpus(count)]
        where = f"{count}gpus" if device == "cuda" else f"{count} on the CPU"
        made += [pytest.param(count, device, *job, id=f"{where}-{name}", marks=marks) for name, *job in jobs]
    return made


def saved(folder: Path) -> None:
    for kind in {*FAMILIES, *MIXTURES}:
        tiny_model(kind, **sizes()).save_pretrained(folder / kind)
    bigram(**sizes()).save_pretrained(folder / "bigram")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The folder of the models for so many processes."""
    return folders(tmp_path_factory, saved)


@pytest.mark.parametrize("count, device, run, kind", cases())
def test_many_say_what_one_says(
    rank_pools: RankPools, folder_of: Callable[[int], Path], count: int, device: str, run: Any, kind: str
) -> None:
    rank_pools.compare(run, folder_of(count), kind, count=count, device=device)
