"""Sums over processes on CUDA: through symmetric memory by two that share one GPU or four that have one each, and
NCCL's in a graph by a process alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.devices import ON_CUDA
from helpers.parallel_gpu import WORK, alone, case, once, shared
from helpers.rank_pool import RankPools
from torch import multiprocessing

pytestmark = ON_CUDA


@pytest.mark.parametrize("name", WORK)
def test_sums_are_exact_and_captured(rank_pools: RankPools, name: str, tmp_path: Path) -> None:
    run, processes = WORK[name]
    devices = torch.cuda.device_count()
    if processes > max(2, devices):
        pytest.skip(f"fewer than {processes} CUDA devices")
    if run in (alone, shared) or devices < processes:
        multiprocessing.spawn(once, args=(name, str(tmp_path)), nprocs=processes)
    else:
        rank_pools.run(case, tmp_path, name, count=processes, device="cuda", alone=False)
