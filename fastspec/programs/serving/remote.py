"""An open batch in a process of its own, as a server uses it: HTTP and texts do not share an interpreter with the
rounds."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from fastspec.errors import FastSpecError
from fastspec.generation.stats import Stats
from fastspec.patches.hf.ends import KEPT
from fastspec.programs.serving.batch import Sent, TokenReader
from fastspec.programs.serving.rounds_process import (
    Cancelled,
    Close,
    Criterion,
    Ended,
    Opened,
    PromptMessage,
    Ready,
    Taken,
    Tokens,
    run_rounds,
)
from fastspec.programs.serving.wire import Failure, Packed, Wire

PATIENCE = 6.0
"""Seconds that the process has to end, when it is asked to and when it says nothing any more."""
TOLD = KEPT // 2
"""Sets of stop strings that the process is taken to know."""


@dataclass(frozen=True, slots=True)
class Described:
    """What transformers' handlers ask of a model."""

    config: Any
    generation_config: Any
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - immutable; prompts stay there until the other process has them


class Remote:
    """The batch that `build` opens in a process of its own; `build` is pickled, and returns the batch and its
    tokenizer. See `Served`.

    Returns when the batch is open. Raises what `build` raises, and FastSpecError where the process ends before. The
    process ends with this one, however that ends.
    """

    def __init__(self, build: Callable[[], Opened]) -> None:
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        self.process = spawn.Process(target=run_rounds, args=(theirs, build), name="fastspec-rounds")
        with _safe_path():
            self.process.start()
        theirs.close()
        self.wire = Wire(ours)
        self._numbers = itertools.count()
        self._asked: dict[int, tuple[Sent, TokenReader]] = {}
        self._told: dict[tuple[str, ...], bool] = {}
        """The sets of stop strings that the process knows, by their last use."""
        self._lock = threading.Lock()
        self._gone: str | None = None
        """Why it takes no prompts any more."""
        self.running, self.stats, self._lives = 0, Stats(), True
        self._ending = threading.Lock()
        self._thread: threading.Thread | None = None
        self._parcels = self.wire.parcels()
        try:
            ready = self._opened()
        except BaseException as error:
            self._end_process(PATIENCE if isinstance(error, Exception) else 0.0)
            raise
        self.tokenizer, self.max_length = ready.tokenizer, ready.max_length
        self.model = Described(ready.config, ready.generation_config)
        self._thread = threading.Thread(target=self._read, name="fastspec-remote", daemon=True)
        self._thread.start()
        self._at_exit = Finalize(
            self, _end_at_exit, (self.wire, self.process), exitpriority=10
        )  # before multiprocessing waits for it

    def _opened(self) -> Ready:
        for messages, state in self._parcels:
            if messages and isinstance(messages[0], Failure):
                raise messages[0].arrived()
            self._note(state)
            if messages:
                assert isinstance(messages[0], Ready)
                return messages[0]
        self.process.join()
        raise FastSpecError(
            f"the process of the rounds has ended with status {self.process.exitcode} before its batch was open"
        )

    @property
    def waiting(self) -> int:
        """See `Served`."""
        return max(0, len(self._asked) - self.running)

    @property
    def alive(self) -> bool:
        """See `Served`."""
        return self._gone is None and self._lives

    def send(self, ids: Tensor, mask: Tensor | None, config: Any, reader: TokenReader, seed: int | None) -> Sent:
        """See `Served`."""
        sent, number = Sent(), next(self._numbers)
        try:
            prompt = Packed.of(
                PromptMessage(number, ids[0].tolist(), None if mask is None else mask[0].tolist(), config, seed)
            )
        except ValueError as error:
            sent.taken.set_exception(error)
            return sent
        reader.put(ids)
        with self._lock:
            if self._gone is not None:
                sent.taken.set_exception(FastSpecError(self._gone))
                return sent
            self._asked[number] = sent, reader
        sent.answer.add_done_callback(lambda answer: self._forget(number, answer))
        self.wire.post(prompt)
        return sent

    def know(self, strings: tuple[str, ...], criterion: Any) -> None:
        """See `Served`: a table as long as the vocabulary, which is sent once for the sets of strings that the other
        process keeps."""
        with self._lock:
            told = self._told.pop(strings, False)
            self._told[strings] = True
            while len(self._told) > TOLD:
                self._told.pop(next(iter(self._told)))
        if not told:
            self.wire.post(Criterion(strings, criterion))

    def close(self) -> None:
        """See `Served`; the process ends."""
        self._end("this batch is closed", cancel=True)
        self.wire.post(Close())
        self.wire.end()
        self._end_process(PATIENCE)
        self._at_exit.cancel()

    def __enter__(self) -> Remote:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _end_process(self, patience: float) -> None:
        with self._ending:
            _end(self.process, patience)
            if self._thread is not None and self._thread is not threading.current_thread():
                self._thread.join()  # it reads until the process has gone
            self.wire.connection.close()

    def _forget(self, number: int, answer: Future[Any]) -> None:
        with self._lock:
            known = self._asked.pop(number, None)
        if answer.cancelled() and known is not None:
            self.wire.post(Cancelled(number))

    def _read(self) -> None:
        """Take what the process says, until it has gone."""
        try:
            for messages, state in self._parcels:
                self._note(state)
                for message in messages:
                    sent, reader = self._asked.get(message.number, (None, None))
                    if sent is not None and reader is not None:  # else it was cancelled
                        self._take(message, sent, reader)
        finally:  # without this thread nobody would hear of anything again
            _end(self.process, PATIENCE)
            self._end(f"the process of the rounds has ended with status {self.process.exitcode}", cancel=False)

    def _note(self, state: tuple[Any, ...]) -> None:
        self.running, self._lives, counts = state
        stats = self.stats
        (
            stats.assistant,
            stats.rows,
            stats.rounds,
            stats.row_rounds,
            stats.round_tokens,
            stats.drafted,
            stats.accepted,
        ) = counts

    def _take(self, message: Any, sent: Sent, reader: TokenReader) -> None:
        if isinstance(message, Tokens):
            try:
                reader.put_tokens(message.tokens)
            except BaseException as raised:
                self.wire.post(Cancelled(message.number))
                self._drop(message.number)
                _settle(sent.answer, raised)
        elif isinstance(message, Taken):
            if message.failure is not None:
                self._drop(message.number)
            _settle(sent.taken, None if message.failure is None else message.failure.arrived())
        elif isinstance(message, Ended):
            self._drop(message.number)
            _settle(sent.answer, None if message.failure is None else message.failure.arrived(), reader.end)

    def _drop(self, number: int) -> None:
        with self._lock:
            self._asked.pop(number, None)

    def _end(self, reason: str, cancel: bool) -> None:
        """Take no prompts any more, and end those that there are."""
        with self._lock:
            self._gone = self._gone or reason
            left = list(self._asked.values())
            self._asked.clear()
        for sent, _ in left:
            if cancel:
                sent.answer.cancel()
            elif sent.taken.done():
                _settle(sent.answer, FastSpecError(reason))
            _settle(sent.taken, FastSpecError(reason))


def _settle(future: Future[Any], error: BaseException | None, last: Callable[[], object] = lambda: None) -> None:
    """A future is done, with an error, or without one behind `last`, whose error is its own; not where it is already,
    or was cancelled. It cannot be cancelled any more before `last`."""
    with suppress(InvalidStateError, RuntimeError):  # of another thread that settles it meanwhile
        if future.done() or not future.set_running_or_notify_cancel():
            return
        try:
            if error is None:
                last()
        except BaseException as raised:
            error = raised
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)


def _end(process: BaseProcess, patience: float) -> None:
    """Return when a process has ended, which has so many seconds for it."""
    process.join(patience)
    if process.is_alive():
        process.kill()
        process.join()


def _end_at_exit(wire: Wire, process: BaseProcess) -> None:
    """What becomes of a process that nobody has closed."""
    wire.post(Close())
    wire.end()
    _end(process, PATIENCE)


@contextmanager
def _safe_path() -> Iterator[None]:
    """A process that starts meanwhile looks for no modules in the current folder before it has this one's path (from
    Python 3.11 on)."""
    name = "PYTHONSAFEPATH"
    former = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if former is None:
            del os.environ[name]
        else:
            os.environ[name] = former
