"""One of two processes that run the snippet on FSDP2."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import torch
from torch import distributed

from helpers.page import shown


def sharded(rank: int, port: int, path: Path) -> None:
    """One of two processes that run the page's snippet on prompts of their own, in rounds of their own number."""
    import fastspec
    from helpers.generate import bigram, prompts, seer

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    distributed.init_process_group("gloo", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=300))
    inputs = prompts(5, 9, seed=rank)
    expected = bigram().generate(**inputs, max_new_tokens=24, do_sample=False)
    names = {"model": fastspec.patch(bigram(), eagle3=seer(bigram()), assistant="eagle3"), "inputs": inputs}
    exec(shown("fully_shard"), names)
    found = fastspec.report(names["model"])
    made = {
        "same": torch.equal(names["answer"], expected),
        "rounds": found.last.rounds,
        "accepted": found.last.acceptance_length,
    }
    torch.save(made | {"left": dict(found.unassisted)}, path / f"{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()
