"""Programs of static tensors as CUDA graphs: run the first time, captured the second, replayed from then on."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

Result = TypeVar("Result")


class Spent(threading.local):
    """Host seconds of this thread's first runs, which compile, and of its captures, and a function that is called
    before and after anything is made of a model and kept."""

    first_runs = 0.0
    captures = 0.0
    watched: Callable[[], object] | None = None

    @contextmanager
    def making(self) -> Iterator[None]:
        """The block makes something of a model that is kept."""
        if self.watched is not None:
            self.watched()
        yield
        if self.watched is not None:
            self.watched()

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        """Add the seconds of the block, which makes something."""
        start = time.perf_counter()
        with self.making():
            yield
        setattr(self, name, getattr(self, name) + time.perf_counter() - start)


SPENT = Spent()
UNNEEDED, SLOW = 4, 0.5
"""Programs in a row without a kernel to compile after which the next ones are not looked through, which takes longer
than their first runs, and seconds of such a run after which they are again: it has compiled, it seems."""


class Foresight:
    """A backend's function that compiles a program's kernels before its first run, and says how many there were."""

    def __init__(self) -> None:
        self.prepare: Callable[[Callable[[], object]], object] | None = None
        """Compiles what a program launches -> how many kernels that were."""
        self.in_vain = 0
        """Programs in a row that had nothing to compile."""

    def first_run(self, program: Callable[[], Result], new: bool) -> Result:
        """Run a program for the first time, in its first buffers where it is `new`."""
        prepare = self.prepare if new and self.in_vain < UNNEEDED else None
        if prepare is not None:
            self.in_vain = 0 if prepare(program) else self.in_vain + 1
        began = time.perf_counter()
        found = program()
        if prepare is None and time.perf_counter() - began > SLOW:
            self.in_vain = 0
        return found


FORESIGHT = Foresight()
_capturing = threading.Lock()
_graphs: WeakSet[Captured[Any]] = WeakSet()


def graph_bytes(device: torch.device) -> int:
    """Memory that the results and the intermediates of this process's graphs take on a device."""
    with _capturing:
        return sum(each.bytes for each in _graphs if each.device == device)


def _stream() -> torch.cuda.Stream:
    """The current device's stream for captures; torch's own is on that of the first, which it would make current."""
    return _stream_on(torch.cuda.current_device())


@cache
def _stream_on(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextmanager
def recorded(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Capture what the block launches.

    Other threads may use the device meanwhile ("thread_local"; in torch's "global" mode a copy on any thread ends the
    capture). One capture runs at a time, since it begins by waiting for the whole device.
    """
    with _capturing:
        collecting = gc.isenabled()
        gc.disable()  # a collection may free CUDA memory, which ends a capture
        try:
            with torch.cuda.graph(graph, stream=_stream(), capture_error_mode="thread_local"):
                yield
        finally:
            if collecting:
                gc.enable()


class Captured(Generic[Result]):
    """Runs a program and returns its result; with the same `key` as before, from a graph.

    The program reads and writes tensors that stay where they are; the next replay writes over its result. `key` is
    whatever else it depends on, such as the size of a buffer; when it changes the graph is dropped. The first run of a
    key is a real one: it compiles kernels and fills the libraries' workspaces. What a backend prepares it prepares for
    the first key alone (`Foresight`): in larger buffers few kernels are others, and to look for these would stop all
    rows longer than the run does. The program comes with every call and is not kept: as a method of what keeps its
    graph it would make a cycle.
    """

    def __init__(self) -> None:
        self.key: Hashable = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result: Result | None = None
        self.replays = self.keys = 0
        """Replays, and keys so far: the result lies elsewhere where another came."""
        self.bytes, self.device = 0, torch.device("cpu")
        """Memory of the graph, and where it lies."""

    def __call__(self, program: Callable[[], Result], key: Hashable) -> Result:
        """Run the program once."""
        if key != self.key:
            new = self.key is None
            self.key, self.graph, self.result, self.bytes = key, None, None, 0
            self.keys += 1
            with SPENT.on("first_runs"):
                return FORESIGHT.first_run(program, new)
        if self.graph is None:
            graph = torch.cuda.CUDAGraph()
            with SPENT.on("captures"), recorded(graph):
                before = torch.cuda.memory_reserved()
                self.result = program()
                self.bytes = max(0, torch.cuda.memory_reserved() - before)
                if torch.cuda.is_initialized():
                    self.device = torch.device("cuda", torch.cuda.current_device())
                _graphs.add(self)
            self.graph = graph
        self.graph.replay()
        self.replays += 1
        return self.result  # type: ignore[return-value]

    def ready(self, key: Hashable) -> bool:
        """True where a call with this key is a replay."""
        return key == self.key and self.graph is not None


class CapturedByShape(Generic[Result]):
    """A function of tensors, captured once for each set of their shapes: it reads copies that stay where they are.

    Inputs of two and more dimensions may be narrower than `width` in the second; the rest is left from an earlier call.
    The next call of the same shapes writes over the result.
    """

    def __init__(self) -> None:
        self.held: dict[tuple[object, ...], tuple[list[Tensor], Captured[Result]]] = {}

    def __call__(self, run: Callable[..., Result], key: Hashable, width: int, *inputs: Tensor) -> Result:
        """Run it on these inputs; `key` as for `Captured`."""
        shapes = tuple((x.shape[0], width, *x.shape[2:]) if x.dim() > 1 else tuple(x.shape) for x in inputs)
        if shapes not in self.held:
            copies = [x.new_zeros(shape) for x, shape in zip(inputs, shapes, strict=True)]
            self.held[shapes] = copies, Captured()
        copies, captured = self.held[shapes]
        for copy, x in zip(copies, inputs, strict=True):
            (copy[:, : x.shape[1]] if x.dim() > 1 else copy).copy_(x)
        return captured(partial(run, *copies), key)


NARROWEST = 32
"""Tokens that a shorter chunk of a prompt is padded to."""
FINE = range(65, 513)
"""Widths with another between two powers of two. Passes of fewer tokens take the time of their weights; wider chunks of
a prompt are powers themselves."""


def padded_width(width: int) -> int:
    """The width that a chunk of a prompt is padded to: one of few, so that few graphs serve all prompts."""
    power = max(NARROWEST, 1 << (width - 1).bit_length())
    return power * 3 // 4 if width in FINE and width <= power * 3 // 4 else power


def padded_widths(most: int) -> Iterator[int]:
    """All of these up to `most`, ascending."""
    width = padded_width(1)
    while width <= most:
        yield width
        width = padded_width(width + 1)
