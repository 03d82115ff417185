"""Two processes over gloo: replicas generate by themselves, sharded weights are left to transformers."""

from __future__ import annotations

import datetime
import os
import socket
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_clients import MARKS
from torch import distributed, multiprocessing

pytestmark = MARKS


def wrapped(kind: str, served: Any) -> Any:
    """The model that a process generates with."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if kind == "ddp":
        return DistributedDataParallel(served).module
    for layer in served.model.layers:
        fully_shard(layer)
    fully_shard(served)
    return served


def process(rank: int, kind: str, port: int, path: Path) -> None:
    """One of two processes: prompts and lengths of its own, compared with its own unpatched model; writes down what came of it."""
    from helpers_generate import bigram, prompts, seer

    import fastspec

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    distributed.init_process_group("gloo", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))
    original, served = bigram(), fastspec.patch(bigram(), eagle3=seer(bigram()), assistant="eagle3")
    inputs = prompts(5, 9, seed=rank)
    options = {"max_new_tokens": 12 + 12 * rank, "do_sample": False, "eos_token_id": 1000}
    expected = original.generate(**inputs, **options)
    model = wrapped(kind, served)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        got = model.generate(**inputs, **options)
    found = fastspec.report(model)
    lengths = [call.acceptance_length for call in found.calls]
    torch.save({"same": torch.equal(got, expected), "lengths": lengths, "left": list(found.unassisted)}, path / f"{rank}.pt")
    assert not found.unassisted or any("spread over several processes" in str(each.message) for each in told)
    distributed.barrier()
    distributed.destroy_process_group()


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes(kind, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.spawn(process, args=(kind, port, tmp_path), nprocs=2)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert found["same"]
        if kind == "ddp":
            assert found["lengths"] and min(found["lengths"]) > 4
        else:  # processes must run the same number of passes
            assert not found["lengths"] and "spread over several processes" in found["left"][0]
