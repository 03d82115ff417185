"""Two GPUs of one host: a model that two processes hold together says what it says on one, over NCCL and symmetric
memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ranks
from helpers.generate import bigram
from helpers.models import tiny_model
from helpers.ranks import (
    SEEING,
    SIZE,
    SMALL,
    calls,
    captured,
    cut_heads,
    drafted,
    family,
    in_step,
    mixed,
    on_gpus,
    seen,
    whole,
    work,
)
from helpers.vision import seeing
from torch import multiprocessing

pytestmark = [pytest.mark.gpu, *on_gpus(SIZE)]
FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "mixtral",
    "gemma2",
    "gemma4_text",
    "qwen3_5_text",
    "gpt_oss",
    "llama4_text",
    "cohere2",
    "olmo2",
    "phi3",
    "qwen2_moe",
    "glm4_moe",
)
"""One of each kind of layer; on the CPU all families are tried."""
MIXTURES = ("qwen2_moe", "glm4_moe")
"""A shared expert that all have whole, and one that is cut."""
GENERIC = "hunyuan_v1_dense"
KINDS = [(run.__name__, run, "") for run in (drafted, cut_heads, calls, captured, in_step, seen)]
JOBS = [
    *KINDS,
    *((f"{kind}, mixed", mixed, kind) for kind in MIXTURES),
    *((kind, family, kind) for kind in (*FAMILIES, GENERIC)),
]
Made = tuple[Path, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The folder of the models, and what each of the two processes made of all jobs."""
    folder = tmp_path_factory.mktemp("gpus")
    for kind in {*FAMILIES, *MIXTURES, GENERIC}:
        tiny_model(kind, **SMALL).save_pretrained(folder / kind)
    bigram(**SMALL).save_pretrained(folder / "bigram")
    seeing(SEEING).save_pretrained(folder / SEEING)
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    multiprocessing.spawn(work, args=(folder, JOBS, "cuda"), nprocs=SIZE)
    return folder, [torch.load(folder / f"{rank}.pt") for rank in range(SIZE)]


@pytest.mark.parametrize("name, run, kind", JOBS, ids=[name for name, *_ in JOBS])
def test_two_say_what_one_says(both: Made, name: str, run: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "HERE", "cuda")
    folder, found = both
    torch.manual_seed(0)
    expected = run(whole(folder), kind)
    for rank in range(SIZE):
        made = found[rank][name]
        assert isinstance(made, list), made
        for index, (mine, alone) in enumerate(zip(made, expected, strict=True)):
            assert torch.equal(mine, alone.cpu()) if isinstance(alone, torch.Tensor) else mine == alone, (rank, index)
