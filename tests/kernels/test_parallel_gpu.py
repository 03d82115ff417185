"""Sums over processes on CUDA: through symmetric memory by two that share one GPU or four that have one each, and
NCCL's in a graph by a process alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.parallel_gpu import WORK
from torch import multiprocessing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("run, processes", WORK.values(), ids=list(WORK))
def test_sums_are_exact_and_captured(run: Callable[[int, str], None], processes: int, tmp_path: Path) -> None:
    if processes > max(2, torch.cuda.device_count()):
        pytest.skip(f"fewer than {processes} CUDA devices")
    multiprocessing.spawn(run, args=(str(tmp_path),), nprocs=processes)
