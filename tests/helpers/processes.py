"""Processes that start where torch and transformers have been imported once: each would take four seconds for that,
alone."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from typing import Any

from torch import multiprocessing

IMPORTED = (
    "torch.distributed.tensor",
    "transformers.modeling_utils",
    "transformers.generation.utils",
    "transformers.models.llama.modeling_llama",
    "fastspec.patches.api",
    "fastspec.programs.serving.remote",
)


def forks() -> ForkServerContext:
    """The context whose processes are forks of one that has imported `IMPORTED`, has run nothing and has one thread, so
    that none is lost in a fork."""
    found = get_context("forkserver")
    found.set_forkserver_preload(list(IMPORTED))
    return found


def spawn(work: Callable[..., None], args: tuple[Any, ...], count: int) -> None:
    """Run work(rank, *args) in `count` new processes, which share nothing with this one or with each other; an error in
    one is raised here.

    They are `forks`.
    """
    forks()
    multiprocessing.start_processes(work, args=args, nprocs=count, start_method="forkserver")


def execute(rank: int, code: str) -> None:
    """Run Python code, as `work` of a `spawn`."""
    exec(code, {})
