"""An open batch in a process of its own, both ends: HTTP and texts do not share an interpreter with the rounds."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

from fastspec.cascade.decisions import Visit
from fastspec.errors import FastSpecError
from fastspec.patches.api import PromptBatch
from fastspec.patches.call.processors import StreamedRound
from fastspec.patches.hf.ends import KEPT, keep_criterion
from fastspec.programs.serving.batch import BatchPrompt, BatchState, Here, PutRound, Sent, Served, read_tokens, settle
from fastspec.programs.serving.wire import Wire, sendable

PATIENCE = 6.0
"""Seconds that the process has to end, when it is asked to and when it says nothing any more."""
TOLD = KEPT // 2
"""Sets of stop strings that the process is taken to know."""


class Remote(Served, AbstractContextManager["Remote"]):
    """The batch that `build`, which is pickled, opens in a process of its own; it returns the batch and its tokenizer.
    Raises what `build` raises, and FastSpecError where the process ends before. The process ends with this one."""

    def __init__(self, build: Callable[[], Opened]) -> None:
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        self.process = spawn.Process(target=run_rounds, args=(theirs, build), name="fastspec-rounds")
        with _safe_path():
            self.process.start()
        theirs.close()
        self.wire = Wire(ours)
        self._numbers = itertools.count()
        self._asked: dict[int, tuple[Sent, PutRound]] = {}
        self._told: dict[tuple[str, ...], bool] = {}
        """The sets of stop strings that the process knows, by their last use."""
        self._lock = threading.Lock()
        self._gone: str | None = None
        """Why it takes no prompts any more."""
        self._state = BatchState()
        self._ending = threading.Lock()
        self._thread: threading.Thread | None = None
        self._parcels = self.wire.parcels()
        try:
            ready = self._opened()
        except BaseException as error:
            self._end_process(PATIENCE if isinstance(error, Exception) else 0.0)
            raise
        self.model, self.tokenizer, self.max_length = ready, ready.tokenizer, ready.max_length
        self.info = ready.info
        self._thread = threading.Thread(target=self._read, name="fastspec-remote", daemon=True)
        self._thread.start()
        # before multiprocessing waits for it
        self._at_exit = Finalize(self, _end_at_exit, (self.wire, self.process), exitpriority=10)

    def _opened(self) -> Ready:
        for messages, state in self._parcels:
            if messages and isinstance(messages[0], BaseException):
                raise messages[0]
            self._state = state
            if messages:
                assert isinstance(messages[0], Ready)
                return messages[0]
        self.process.join()
        raise FastSpecError(
            f"the process of the rounds has ended with status {self.process.exitcode} before its batch was open"
        )

    state = property(lambda self: self._state)
    waiting = property(lambda self: max(0, len(self._asked) - self.running))
    alive = property(lambda self: self._gone is None and self._state.alive)

    def send(self, prompt: BatchPrompt, put_round: PutRound) -> Sent:
        return self._send(partial(BatchEnd.send, prompt=prompt), put_round)

    def score(self, ids: Sequence[int], count: int, put_round: PutRound) -> Sent:
        return self._send(partial(BatchEnd.score, ids=ids, count=count), put_round)

    def _send(self, call: Callable[..., None], put_round: PutRound) -> Sent:
        sent, number = Sent(), next(self._numbers)
        with self._lock:
            if self._gone is not None:
                sent.taken.set_exception(FastSpecError(self._gone))
                return sent
            self._asked[number] = sent, put_round
        sent.answer.add_done_callback(lambda answer: self._forget(number, answer))
        self.wire.post(partial(call, number=number))
        return sent

    def know(self, strings: tuple[str, ...], criterion: Any) -> None:
        """Send what stop strings come to, once for the sets of strings that the other process keeps."""
        with self._lock:
            told = self._told.pop(strings, False)
            self._told[strings] = True
            while len(self._told) > TOLD:
                self._told.pop(next(iter(self._told)))
        if not told:
            self.wire.post(partial(BatchEnd.know, strings=strings, criterion=criterion))

    def close(self) -> None:
        self._end("this batch is closed", cancel=True)
        self.wire.post(BatchEnd.close)
        self.wire.end()
        self._end_process(PATIENCE)
        self._at_exit.cancel()

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _end_process(self, patience: float) -> None:
        with self._ending:
            reader = self._thread
            if reader is None or reader is threading.current_thread():
                _end(self.process, patience)
            else:  # it reads until the process has gone, and waits for that alone: one thread hears of its status
                reader.join(patience)
                if reader.is_alive():
                    self.process.kill()
                    reader.join()
            self.wire.connection.close()

    def _forget(self, number: int, answer: Future[Any]) -> None:
        with self._lock:
            known = self._asked.pop(number, None)
        if answer.cancelled() and known is not None:
            self.wire.post(partial(BatchEnd.cancel, number=number))

    def _read(self) -> None:
        """Take what the process says, until it has gone."""
        try:
            for messages, state in self._parcels:
                self._state = state
                for message in messages:
                    known = self._asked.get(message.number)
                    if known is not None:  # else it was cancelled
                        self._take(message, *known)
        finally:  # without this thread nobody would hear of anything again
            _end(self.process, PATIENCE)
            self._end(f"the process of the rounds has ended with status {self.process.exitcode}", cancel=False)

    def _take(self, message: Tokens | PromptStatus, sent: Sent, put_round: PutRound) -> None:
        if isinstance(message, Tokens):
            try:
                put_round(message.round)
            except BaseException as raised:
                self.wire.post(partial(BatchEnd.cancel, number=message.number))
                self._drop(message.number)
                settle(sent.answer, raised)
            return
        if message.over or message.error is not None:
            self._drop(message.number)
        settle(sent.answer if message.over else sent.taken, message.error)

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
                settle(sent.answer, FastSpecError(reason))
            settle(sent.taken, FastSpecError(reason))


def _end(process: BaseProcess, patience: float) -> None:
    """Return when a process has ended, which has so many seconds for it."""
    process.join(patience)
    if process.is_alive():
        process.kill()
        process.join()


def _end_at_exit(wire: Wire, process: BaseProcess) -> None:
    wire.post(BatchEnd.close)
    wire.end()
    _end(process, PATIENCE)


@contextmanager
def _safe_path() -> Iterator[None]:
    """A process that starts meanwhile looks for no modules in the current folder (from Python 3.11 on)."""
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


Opened = tuple[PromptBatch, Any]
"""An open batch and its tokenizer."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Facts of an open batch that the other process needs."""

    tokenizer: Any
    config: Any
    generation_config: Any
    max_length: int
    info: dict[str, str]


class Tokens(NamedTuple):
    """A round of one prompt, a stage's part in its answer, or a part of a text that was scored."""

    number: int
    round: StreamedRound | Visit


@dataclass(frozen=True, slots=True)
class PromptStatus:
    """State of a prompt: decoded, or its answer is `over`; with the error that refused or ended it, `sendable`."""

    number: int
    over: bool
    error: Any = None


@contextmanager
def left_alone_by_the_collector() -> Iterator[None]:
    """Objects that there are stay out of garbage collections: a full one goes through a million objects of torch and
    transformers, holds the interpreter for some tenths of a second, and stops all streams meanwhile."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def run_rounds(connection: Connection, build: Callable[[], Opened]) -> None:
    """The process' work: open a batch, and decode what the other process asks for until that closes it or has gone.
    Signals are the other process's matter."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="fastspec-parent", daemon=True).start()
    try:
        batch, tokenizer = build()
    except BaseException as error:  # a command's exit, too, is the other process's to make
        _fail(connection, error)
        return
    ready = Ready(tokenizer, batch.model.config, batch.model.generation_config, batch.max_length, batch.info)
    try:
        pickle.dumps(ready)
    except Exception as error:
        batch.close()
        said = f"{type(error).__name__}: {error}"
        _fail(connection, ValueError(f"the batch's model and tokenizer cannot be handed to another process ({said})"))
        return
    read_tokens(batch, tokenizer)
    with batch, left_alone_by_the_collector():
        BatchEnd(connection, batch, tokenizer).run(ready)


def _fail(connection: Connection, error: BaseException) -> None:
    wire = Wire(connection)
    wire.post(sendable(error))
    wire.end()
    wire.flush()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class BatchEnd:
    """This process's end of the connection. Messages to it are calls of its methods."""

    def __init__(self, connection: Connection, batch: PromptBatch, tokenizer: Any) -> None:
        self.here = Here(batch, tokenizer)
        self.answers: dict[int, Future[Any]] = {}
        self.wire = Wire(connection, lambda: self.here.state)
        self.closed = False

    def run(self, ready: Ready) -> None:
        self.wire.post(ready)
        for calls, _ in self.wire.parcels():
            for call in calls:
                call(self)
                if self.closed:
                    self.wire.end()
                    self.wire.flush()
                    return

    def send(self, number: int, prompt: BatchPrompt) -> None:
        self._is_sent(number, self.here.send(prompt, lambda round: self.wire.post(Tokens(number, round))))

    def score(self, number: int, ids: Sequence[int], count: int) -> None:
        self._is_sent(number, self.here.score(ids, count, lambda round: self.wire.post(Tokens(number, round))))

    def cancel(self, number: int) -> None:
        """Let go of a prompt or a text that nobody waits for any more."""
        if number in self.answers:
            self.answers[number].cancel()

    def know(self, strings: tuple[str, ...], criterion: Any) -> None:
        """Keep the criterion that stop strings come to, which was made where no round waits for it."""
        keep_criterion(self.here.tokenizer, strings, criterion)

    def close(self) -> None:
        self.here.close()
        self.closed = True

    def _is_sent(self, number: int, sent: Sent) -> None:
        self._settle(number, False, sent.taken)
        if sent.taken.exception() is None:
            self.answers[number] = sent.answer
            sent.answer.add_done_callback(lambda done: self._ended(number, done))

    def _ended(self, number: int, answer: Future[Any]) -> None:
        self.answers.pop(number, None)
        self._settle(number, True, answer)

    def _settle(self, number: int, over: bool, done: Future[Any]) -> None:
        error = None if done.cancelled() else done.exception()
        self.wire.post(PromptStatus(number, over, None if error is None else sendable(error)))
