"""Two GPUs of one host: a model that two processes hold together says what it says on one, over NCCL and symmetric
memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.generate import bigram
from helpers.models import tiny_model
from helpers.rank_pool import RankPools
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
)
from helpers.vision import seeing

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the models."""
    made = tmp_path_factory.mktemp("gpus")
    for kind in {*FAMILIES, *MIXTURES, GENERIC}:
        tiny_model(kind, **SMALL).save_pretrained(made / kind)
    bigram(**SMALL).save_pretrained(made / "bigram")
    seeing(SEEING).save_pretrained(made / SEEING)
    return made


@pytest.mark.parametrize("run, kind", [job for _, *job in JOBS], ids=[name for name, *_ in JOBS])
def test_two_say_what_one_says(rank_pools: RankPools, folder: Path, run: Any, kind: str) -> None:
    rank_pools.compare(run, folder, kind, device="cuda")
