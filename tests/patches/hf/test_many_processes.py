"""Four and eight processes that hold a model together say what it says in one: over gloo on the CPU, and over NCCL and
symmetric memory where there are as many GPUs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ranks
from helpers.generate import bigram
from helpers.models import tiny_model
from helpers.processes import spawn
from helpers.ranks import (
    calls,
    captured,
    cut_heads,
    drafted,
    family,
    mixed,
    on_gpus,
    sized,
    sizes,
    staged,
    whole,
    work,
)
from torch import multiprocessing

FAMILIES = "llama", "qwen3", "gemma4_text", "gpt_oss", "qwen3_5_text", "llama4_text", "glm4_moe", "hunyuan_v1_dense"
"""One of each kind of layer, and one without an adapter."""
MIXTURES = "qwen2_moe", "glm4_moe"
KINDS = drafted, cut_heads, calls, captured, sized, staged
Job = tuple[str, Any, str]


def jobs_of(count: int) -> list[Job]:
    """The heads of the tests have four key heads, which eight processes leave whole."""
    kinds = [(run.__name__, run, "") for run in KINDS if count == 4]
    mixtures = [(f"{kind}, mixed", mixed, kind) for kind in MIXTURES]
    return [*kinds, *mixtures, *((kind, family, kind) for kind in FAMILIES)]


@pytest.mark.parametrize(
    "count, device",
    [
        pytest.param(4, "cpu", marks=pytest.mark.slow),
        pytest.param(8, "cpu", marks=pytest.mark.slow),
        *(pytest.param(count, "cuda", marks=[pytest.mark.gpu, *on_gpus(count)]) for count in (4, 8)),
    ],
)
def test_many_say_what_one_says(count: int, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "SIZE", count)
    monkeypatch.setattr(ranks, "HERE", device)
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"))
    for kind in {*FAMILIES, *MIXTURES}:
        tiny_model(kind, **sizes()).save_pretrained(tmp_path / kind)
    bigram(**sizes()).save_pretrained(tmp_path / "bigram")
    jobs = jobs_of(count)
    if device == "cpu":
        spawn(work, (tmp_path, jobs, device, count), count)
    else:
        multiprocessing.spawn(work, args=(tmp_path, jobs, device, count), nprocs=count)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(count)]
    wrong = []
    for name, run, kind in jobs:
        torch.manual_seed(0)
        expected = run(whole(tmp_path), kind)
        for rank in range(count):
            made = found[rank][name]
            if not isinstance(made, list):
                wrong.append(f"{name}, process {rank}: {made}")
                continue
            assert len(made) == len(expected)
            for index, (mine, alone) in enumerate(zip(made, expected, strict=True)):
                alike = torch.equal(mine, alone.cpu()) if isinstance(alone, torch.Tensor) else mine == alone
                if not alike:
                    wrong.append(f"{name}, process {rank}, answer {index}: {mine} instead of {alone}")
    assert not wrong, "\n".join(wrong)
