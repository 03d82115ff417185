"""Processes that hold tiny models together, started once for all cases of a session: over gloo on the CPU, or over NCCL
with a GPU for each.

All of them run a case at once, and this process runs it alone meanwhile. Where one raises, ends or does not answer in
time, all are ended, the case fails with what each told or where it stood, and the next case starts others.
"""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import io
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastspec import files
from fastspec.kernels import ahead
from helpers import ranks
from helpers.libraries import share_libraries
from helpers.processes import forks

LIMIT = {"cpu": 300.0, "cuda": 90.0}
"""Seconds of a case."""
START = 90.0
"""Seconds more for the first case, in which the processes import torch and find each other."""
LAG = 10.0
"""Seconds that the others have to tell something once one has failed."""
Case = Callable[[Any, str], list[Any]]


class Failed(AssertionError):
    """A case that a process did not end well, with what each told."""


@dataclass
class RankPool:
    """So many processes on a device, and the folder in which they meet."""

    count: int
    device: str
    folder: Path = field(init=False)
    processes: list[BaseProcess] = field(default_factory=list)
    ends: list[connection.Connection] = field(default_factory=list)
    times: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Seconds of the last case, and of these seconds of compiling kernels, by process."""
    limit: float = 0.0
    until: float = 0.0

    def start(self) -> None:
        """Start the processes, where none run."""
        self.limit = LIMIT[self.device]
        if self.processes:
            return
        self.limit += START
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        context = forks() if self.device == "cpu" else get_context("spawn")  # CUDA's driver survives no fork
        for rank in range(self.count):
            mine, other = context.Pipe()
            args = rank, self.count, self.device, self.folder, other
            process: BaseProcess = context.Process(target=serve, args=args, daemon=True)  # type: ignore[attr-defined]
            process.start()
            other.close()
            self.processes.append(process)
            self.ends.append(mine)

    def begin(self, run: Case, folder: Path, kind: str) -> None:
        """Have all processes run a case on the models of a folder."""
        self.start()
        self.until = time.monotonic() + self.limit
        for end in self.ends:
            with suppress(OSError):  # it has ended, as `finish` finds
                end.send((run, folder, kind))

    def finish(self) -> list[list[Any]]:
        """Results of the case by process. Raises Failed where one has none, and ends the processes."""
        try:
            told = self.answers()
            lost = {rank for rank in range(self.count) if not isinstance(told.get(rank), list)}
            if not lost:
                return [told[rank] for rank in range(self.count)]
            late = "it did not answer in time, and stands at\n"
            lines = [
                "it ran the case" if rank not in lost else told[rank] if rank in told else late + self.stack(rank)
                for rank in range(self.count)
            ]
            raise Failed("\n".join(f"process {rank} of {self.count}: {line}" for rank, line in enumerate(lines)))
        except BaseException:
            self.close(patience=0.0)
            raise

    def answers(self) -> dict[int, Any]:
        """What each process that answers in time tells: its results, or in words why there are none."""
        until, waiting, told = self.until, set(range(self.count)), dict[int, Any]()
        while waiting:
            ready = connection.wait([self.ends[rank] for rank in waiting], max(0.0, until - time.monotonic()))
            if not ready:
                break
            for rank in [rank for rank in waiting if self.ends[rank] in ready]:
                waiting.remove(rank)
                try:
                    sent = io.BytesIO(self.ends[rank].recv_bytes())
                    told[rank], self.times[rank] = torch.load(sent, weights_only=False)
                except (EOFError, OSError):
                    self.processes[rank].join(LAG)
                    told[rank] = f"it has ended, with {self.processes[rank].exitcode}"
                if isinstance(told[rank], str):
                    until = min(until, time.monotonic() + LAG)
        return told

    def stack(self, rank: int) -> str:
        """Python's stack of a process that hangs."""
        place, process = self.folder / f"stack{rank}", self.processes[rank]
        if not place.exists() or process.pid is None:
            return "its start"
        os.kill(process.pid, signal.SIGUSR1)
        end = time.monotonic() + 2.0
        while not place.read_text() and time.monotonic() < end:
            time.sleep(0.05)
        return place.read_text()

    def close(self, patience: float = 5.0) -> None:
        """End the processes, which go by themselves where they wait for a case."""
        for end in self.ends:
            end.close()
        until = time.monotonic() + patience
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))
            process.kill()
            process.join()
        if self.processes:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.processes, self.ends = [], []


class RankPools:
    """The processes of a session, by their number and device."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, str], RankPool] = {}

    def run(
        self, run: Case, folder: Path, kind: str = "", *, count: int = 2, device: str = "cpu", alone: bool = True
    ) -> tuple[list[list[Any]], list[Any]]:
        """Results of a case by process, and those of this one alone, which are none without `alone`."""
        pool = self.held.setdefault((count, device), RankPool(count, device))
        if device == "cpu":  # their memory is wanted
            for other in self.held.values():
                if other is not pool and other.device == device:
                    other.close()
        with ranks.of_size(count, device):
            pool.begin(run, folder, kind)
            began = time.perf_counter()
            try:
                torch.manual_seed(0)
                expected = [ranks.on_cpu(each) for each in run(ranks.whole(folder), kind)] if alone else []
            finally:
                spent = time.perf_counter() - began
                made = pool.finish()
        times = ", ".join(f"{whole:.1f} s ({compiling:.1f} of compiling)" for whole, compiling in pool.times.values())
        print(f"in {count} processes {times}; alone {spent:.1f} s")
        return made, expected

    def compare(self, run: Case, folder: Path, kind: str = "", **where: Any) -> list[Any]:
        """Results of one process, which are those of every process that runs the case with others."""
        made, expected = self.run(run, folder, kind, **where)
        for rank, mine in enumerate(made):
            assert len(mine) == len(expected)
            for index, (one, other) in enumerate(zip(mine, expected, strict=True)):
                assert torch.equal(one, other) if isinstance(other, Tensor) else one == other, (rank, index)
        return expected

    def close(self) -> None:
        for pool in self.held.values():
            pool.close()


def serve(rank: int, count: int, device: str, folder: Path, end: connection.Connection) -> None:
    """One of the processes: a case after another, until it is ended."""
    stack = (folder / f"stack{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, stack)
    os.environ[files.SETTING] = str(folder / "cache")  # one process must not find what `alone` has just kept
    with suppress(FileExistsError):  # another of them was first
        share_libraries(folder / "cache")
    ranks.join(rank, folder, device, count)
    dist.init_device_mesh = cache(dist.init_device_mesh)  # each has groups, whose threads would look about for ever
    compile_all, compiling = ahead._compile, 0.0

    def in_turn(*given: Any) -> None:
        """Compile one after another: what the first has compiled the others find in Triton's cache."""
        nonlocal compiling
        began = time.perf_counter()
        with (folder / "compiles").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            compile_all(*given)
        compiling += time.perf_counter() - began

    ahead._compile = in_turn
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            run, models, kind = end.recv()
            torch.manual_seed(0)
            made, began, compiling = io.BytesIO(), time.perf_counter(), 0.0
            try:
                found: Any = [ranks.on_cpu(each) for each in run(ranks.cut(models), kind)]
            except BaseException:
                found = traceback.format_exc()
            torch.save((found, (time.perf_counter() - began, compiling)), made)
            end.send_bytes(made.getvalue())
            del found
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
