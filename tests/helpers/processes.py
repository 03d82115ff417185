"""Processes that start where torch and transformers have been imported once: each would take four seconds for that,
alone."""

from __future__ import annotations

import multiprocessing as python_multiprocessing
from collections.abc import Callable
from typing import Any

from torch import multiprocessing

IMPORTED = (
    "torch.distributed.tensor",
    "transformers.modeling_utils",
    "transformers.models.llama.modeling_llama",
    "fastspec",
)


def spawn(work: Callable[..., None], args: tuple[Any, ...], count: int) -> None:
    """Run work(rank, *args) in `count` new processes, which share nothing with this one or with each other; an error in
    one is raised here.

    They are forks of a process that has imported `IMPORTED`, has run nothing and has one thread, so that none is lost
    in a fork.
    """
    python_multiprocessing.set_forkserver_preload(list(IMPORTED))
    multiprocessing.start_processes(work, args=args, nprocs=count, start_method="forkserver")
