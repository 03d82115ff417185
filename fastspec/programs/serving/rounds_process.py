"""The process that a server's rounds run in: a model, an open batch, and nothing of HTTP and texts."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from fastspec.cascade.decisions import Visit
from fastspec.patches.call.processors import StreamedRound
from fastspec.patches.continuous import PromptBatch
from fastspec.patches.hf.ends import keep_criterion
from fastspec.programs.serving.batch import BatchPrompt, Here, Sent, read_tokens
from fastspec.programs.serving.wire import Failure, Wire

Opened = tuple[PromptBatch, Any]
"""An open batch and its tokenizer."""


@dataclass(frozen=True, slots=True)
class Ready:
    """What the other process needs to know of a batch, once it is open."""

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
class Settled:
    """A prompt is decoded, or its answer is `over`; with the error that refused or ended it."""

    number: int
    over: bool
    failure: Failure | None = None


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
    wire.post(Failure.of(error))
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

    def score(self, number: int, ids: list[int], count: int) -> None:
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
        self.wire.post(Settled(number, over, None if error is None else Failure.of(error)))
