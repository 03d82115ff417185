"""Compilation of a program's kernels before its first run, several at a time.

The program runs on tensors without data (torch's FakeTensorMode), launches are recorded, and what it sets on objects is
put back. Forked processes, which never touch the device, compile what Triton's cache on disk lacks, since Triton holds
the interpreter's lock while it compiles. Up to Triton 3.6 a C compiler makes what launches a kernel: they run it too.

This module alone uses private parts of Triton. Where a version lacks one, each kernel compiles at its first launch.
"""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

from fastspec.errors import Unsupported

try:
    from triton import AsyncCompileMode
    from triton.compiler import CompiledKernel
    from triton.runtime import driver
    from triton.runtime._async_compile import active_mode
    from triton.runtime.cache import get_cache_manager
    from triton.runtime.jit import JITFunction

    if not hasattr(AsyncCompileMode(None), "future_kernels") or "warmup" not in signature(JITFunction.run).parameters:
        raise ImportError("Triton compiles in the background in another way")
except ImportError as error:
    LACKS: str | None = str(error)
    """The private part that the installed Triton lacks."""
else:
    LACKS = None

WORKERS = "FASTSPEC_COMPILE_WORKERS"
"""Variable of the number of processes that compile; by default one a core that this process may use, MOST_WORKERS
at most. With 0 each kernel compiles at its first launch."""
MOST_WORKERS = 16
PATIENCE = 300.0
"""Seconds after which processes that compile are ended."""
OWN = ("fastspec.generation.", "fastspec.patches.hf.", "fastspec.patches.assistants.")
"""Modules whose objects a program may set attributes of."""
# the first one imports modules, one of which keeps the frames of those that wait for it until a garbage collection
FakeTensorMode()
_turn = threading.Lock()
_warned = False


@dataclass(slots=True)
class Job:
    """One kernel for one kind of arguments: `run` compiles it, or finds it in the cache; `size` is its source's."""

    size: int
    run: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)

    def finish(self) -> None:
        """Compile it here, or take it from the cache."""
        if not self.future.done():
            try:
                self.future.set_result(self.run())
            except Exception as error:  # raised where the result is asked for
                self.future.set_exception(error)


class Collector(Executor):
    """Jobs that Triton submits to be compiled in the background."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.kernel: Any = None
        """The kernel whose launch is recorded."""

    def submit(self, run: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        self.jobs.append(Job(len(self.kernel.src), partial(run, *args, **options)))
        return self.jobs[-1].future


class Pointer:
    """A tensor without data as an argument of a kernel."""

    def __init__(self, x: Tensor) -> None:
        self.dtype, self.shape, self.offset = x.dtype, x.shape, int(x.storage_offset()) * x.element_size()

    def data_ptr(self) -> int:
        """The offset in its storage, which is aligned: Triton asks for the alignment alone."""
        return self.offset


class WithoutData(FakeTensorMode):
    """Torch's mode in which operations have no data. By itself it runs `add_`, `sub_`, `mul_`, `div_` and `copy_` for
    real where all tensors given are real: a counter that a program counts up would stand one too high from then on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = getattr(func, "_schema", None)  # higher-order operators have none
        if schema is not None and schema.is_mutable:
            args, kwargs = tree_map_only(Tensor, self._emptied, (args, kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _emptied(self, x: Tensor) -> Tensor:
        return x if isinstance(x, FakeTensor) else self.from_tensor(x)


def compile_ahead(program: Callable[[], object], say: Callable[[str], None]) -> int:
    """Compile what a program will launch and Triton's cache lacks -> the number of kernels, which `say` is told before.

    The program must not read tensors on the host. One that cannot be run without data compiles as it runs, with a
    warning.
    """
    workers = worker_setting()
    if workers == 0:
        return 0
    if LACKS is not None:
        _warn(LACKS)
        return 0
    with _turn:  # another thread's kernels must not be taken for this program's
        collector = Collector()
        with _background(collector) as mode:
            try:
                _look(program, collector)
                keyed = zip(collector.jobs, mode.future_kernels, strict=True)
                missing = [job for job, key in keyed if not _is_kept(key)]
                if missing:
                    say(f"compiling {len(missing)} kernels, once for this machine")
                    _compile(missing, min(workers, len(missing)))
            finally:
                for job in collector.jobs:  # the mode waits for them
                    job.finish()
    return len(missing)


def _warn(why: str) -> None:
    """Say once why kernels are not compiled ahead."""
    global _warned
    if not _warned:
        _warned = True
        told = "kernels compile one after another at their first launch, which could not be foreseen"
        warnings.warn(f"{told}: {why}", stacklevel=3)


@contextmanager
def _background(collector: Collector) -> Iterator[Any]:
    """Triton's mode of compiling in the background, left for certain: where a kernel fails Triton 3.6 stays in it."""
    try:
        with AsyncCompileMode(collector) as mode:
            yield mode
    finally:
        active_mode.set(None)


def _look(program: Callable[[], object], collector: Collector) -> None:
    """Run a program without data, and record what it launches."""
    try:
        with warnings.catch_warnings(), _restored(program), _noted(collector), WithoutData(allow_non_fake_inputs=True):
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")  # 0 will do: aligned
            program()
    except Exception as error:
        _warn(f"{type(error).__name__}: {error}")


@contextmanager
def _noted(collector: Collector) -> Iterator[None]:
    """In this thread kernels are compiled in the background, which the collector takes down, and not launched."""
    launch, mine = JITFunction.run, threading.get_ident()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if threading.get_ident() != mine:
            return launch(self, *args, grid=grid, warmup=warmup, **options)
        collector.kernel = self
        args = tuple(Pointer(each) if isinstance(each, FakeTensor) else each for each in args)
        return launch(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = launch


@contextmanager
def _restored(program: Callable[[], object]) -> Iterator[None]:
    """Put back what the block sets on the objects of `OWN` modules, lists and dicts that the program reaches; modules
    of a model are left out."""
    held: dict[int, tuple[Any, Any]] = {}
    seen: set[int] = set()
    rest: list[Any] = [program]
    while rest:
        value = rest.pop()
        if id(value) in seen or isinstance(value, (Tensor, nn.Module, str, bytes, int, float, type)):
            continue
        seen.add(id(value))
        if isinstance(value, partial):
            rest += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            if isinstance(value, list):
                held[id(value)] = value, list(value)
            rest += value
        elif isinstance(value, dict):
            held[id(value)] = value, dict(value)
            rest += value.values()
        elif getattr(value, "__self__", None) is not None:
            rest.append(value.__self__)
        elif getattr(value, "__closure__", None):
            rest += [cell.cell_contents for cell in value.__closure__ if cell.cell_contents is not None]
        elif type(value).__module__.startswith(OWN):
            if hasattr(value, "__dict__"):
                held[id(vars(value))] = vars(value), dict(vars(value))
                rest += vars(value).values()
            elif is_dataclass(value):
                rest += [getattr(value, field.name) for field in fields(value)]
    try:
        yield
    finally:
        for owner, before in held.values():
            if isinstance(owner, list):
                owner[:] = before
            else:
                owner.clear()
                owner.update(before)


def _is_kept(key: str) -> bool:
    """True where Triton's cache has a kernel."""
    folder = getattr(get_cache_manager(hashlib.sha256(key.encode("utf-8")).hexdigest()), "cache_dir", None)
    return folder is not None and any(Path(folder).glob("__grp__*.json"))


def worker_setting() -> int:
    """The number of processes that may compile. Raises Unsupported for a setting that is no number."""
    given = os.environ.get(WORKERS, "")
    if given and not given.isdecimal():
        raise Unsupported(f"{WORKERS}={given!r} in the environment: a number of processes is accepted, 0 for none")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(given) if given else min(cores, MOST_WORKERS)


def _compile(jobs: Sequence[Job], workers: int) -> None:
    """Fill Triton's cache, the longest kernels first. The caller compiles those that fail, and sees the error."""
    if workers == 1:
        return
    jobs = sorted(jobs, key=lambda job: -job.size)
    source, sink = os.pipe()
    os.write(sink, bytes(byte for number in range(len(jobs)) for byte in number.to_bytes(2, "big")))
    os.close(sink)
    children: set[int] = set()
    try:
        for _ in range(workers):
            children.add(_fork(partial(_work, jobs, source)))
        _wait(children)
    finally:
        os.close(source)
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _fork(work: Callable[[], None]) -> int:
    """Run work in a process of its own, which ends with it -> its number."""
    name = "TOKENIZERS_PARALLELISM"  # without it every fork of a process that has tokenised is told of on stderr
    given = os.environ.get(name)
    os.environ[name] = given or "false"
    try:
        with warnings.catch_warnings():
            # a fork beside threads: this child takes no lock of theirs
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            child = os.fork()
    finally:
        if given is None:
            del os.environ[name]
    if child:
        return child
    code = 1
    try:
        gc.disable()  # what is freed here is the parent's, on a device that cannot be used
        work()
        code = 0
    finally:
        os._exit(code)


def _work(jobs: Sequence[Job], source: int) -> None:
    """Take numbers of jobs from a pipe, one at a time, and run them; with a kernel comes what launches it."""
    while number := os.read(source, 2):
        made = jobs[int.from_bytes(number, "big")].run()
        if isinstance(made, CompiledKernel):
            driver.active.launcher_cls(made.src, made.metadata)


def _wait(children: set[int]) -> None:
    """Until all have ended, or time is up; those that have ended are taken out."""
    until = time.monotonic() + PATIENCE
    while children and time.monotonic() < until:
        for child in list(children):
            if os.waitpid(child, os.WNOHANG)[0]:
                children.discard(child)
        time.sleep(0.005)
    if children:
        told = f"{len(children)} processes that compile kernels were ended after {PATIENCE:g} s: the rest compile here"
        warnings.warn(told, stacklevel=4)
