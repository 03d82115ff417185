"""An open batch in a process of its own, as a server uses it: HTTP and texts do not share an interpreter with the rounds."""

from __future__ import annotations

import itertools
import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from fastspec.errors import FastSpecError
from fastspec.generation.stats import Stats
from fastspec.patches.hf.stop_strings import KEPT
from fastspec.serving.batch import Reader, Sent
from fastspec.serving.rounds_process import Cancelled, Close, Criterion, Ended, Opened, Prompt, Ready, Taken, Tokens, run_rounds
from fastspec.serving.wire import Failure, Wire

PATIENCE = 30.0
"""Seconds that the process has to end when it is asked to."""
LOST = 5.0
"""The same where it says nothing any more."""


@dataclass(frozen=True, slots=True)
class Described:
    """What transformers' handlers ask of a model."""

    config: Any
    generation_config: Any
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - immutable; prompts stay there until the other process has them


class Remote:
    """The batch that `build` opens in a process of its own; `build` is pickled, and returns the batch and its tokenizer. See `Served`.

    Returns when the batch is open. Raises what `build` raises, and FastSpecError where the process ends before. The process ends with
    this one, however that ends.
    """

    def __init__(self, build: Callable[[], Opened]) -> None:
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        self.process = spawn.Process(target=run_rounds, args=(theirs, build), name="fastspec-rounds")
        self.process.start()
        theirs.close()
        self.wire = Wire(ours)
        self._numbers = itertools.count()
        self._asked: dict[int, tuple[Sent, Reader]] = {}
        self._told: dict[tuple[str, ...], bool] = {}
        """The sets of stop strings that the process knows, by their last use."""
        self._lock = threading.Lock()
        self._gone: str | None = None
        """Why it takes no prompts any more."""
        self.running, self.stats, self._lives = 0, Stats(), True
        self._parcels = self.wire.parcels()
        try:
            ready = self._opened()
        except BaseException:
            self._end_process(0.0)
            raise
        self.tokenizer, self.max_length = ready.tokenizer, ready.max_length
        self.model = Described(ready.config, ready.generation_config)
        self._thread = threading.Thread(target=self._read, name="fastspec-remote", daemon=True)
        self._thread.start()

    def _opened(self) -> Ready:
        for messages, state in self._parcels:
            if messages and isinstance(messages[0], Failure):
                raise messages[0].arrived()
            self._note(state)
            if messages:
                assert isinstance(messages[0], Ready)
                return messages[0]
        self.process.join()
        raise FastSpecError(f"the process of the rounds has ended with status {self.process.exitcode} before its batch was open")

    @property
    def waiting(self) -> int:
        """See `Served`."""
        return max(0, len(self._asked) - self.running)

    @property
    def alive(self) -> bool:
        """See `Served`."""
        return self._gone is None and self._lives

    def send(self, ids: Tensor, mask: Tensor | None, config: Any, reader: Reader, seed: int | None) -> Sent:
        """See `Served`."""
        sent, number = Sent(), next(self._numbers)
        reader.put(ids)
        with self._lock:
            if self._gone is not None:
                sent.taken.set_exception(FastSpecError(self._gone))
                return sent
            self._asked[number] = sent, reader
        sent.answer.add_done_callback(lambda answer: self._forget(number, answer))
        self.wire.post(Prompt(number, ids[0].tolist(), None if mask is None else mask[0].tolist(), config, seed))
        return sent

    def know(self, strings: tuple[str, ...], criterion: Any) -> None:
        """See `Served`: a table as long as the vocabulary, which is sent once for the sets of strings that the other process keeps."""
        with self._lock:
            told = self._told.pop(strings, False)
            self._told[strings] = True
            while len(self._told) > KEPT:
                self._told.pop(next(iter(self._told)))
        if not told:
            self.wire.post(Criterion(strings, criterion))

    def close(self) -> None:
        """See `Served`; the process ends."""
        self._end("this batch is closed", cancel=True)
        self.wire.post(Close())
        self._end_process(PATIENCE)

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _end_process(self, patience: float) -> None:
        self.process.join(patience)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.wire.connection.close()

    def _forget(self, number: int, answer: Future[Any]) -> None:
        with self._lock:
            known = self._asked.pop(number, None)
        if answer.cancelled() and known is not None:
            self.wire.post(Cancelled(number))

    def _read(self) -> None:
        """Take what the process says, until it has gone."""
        for messages, state in self._parcels:
            self._note(state)
            for message in messages:
                sent, reader = self._asked.get(message.number, (None, None))
                if sent is not None and reader is not None:  # else it was cancelled
                    self._take(message, sent, reader)
        self._end_process(LOST)
        self._end(f"the process of the rounds has ended with status {self.process.exitcode}", cancel=False)

    def _note(self, state: tuple[Any, ...]) -> None:
        self.running, self._lives, counts = state
        stats = self.stats
        stats.assistant, stats.rows, stats.rounds, stats.row_rounds, stats.round_tokens, stats.drafted, stats.accepted = counts

    def _take(self, message: Any, sent: Sent, reader: Reader) -> None:
        error: BaseException | None = None
        try:
            if isinstance(message, Tokens):
                reader.put_tokens(message.tokens)
                return
            if isinstance(message, Ended):
                error = None if message.failure is None else message.failure.arrived()
                if error is None:
                    reader.end()
        except BaseException as raised:  # a reader's
            error = raised
            if isinstance(message, Tokens):
                self.wire.post(Cancelled(message.number))
        if isinstance(message, Taken):
            _settle(sent.taken, None if message.failure is None else message.failure.arrived())
            if message.failure is not None:
                self._drop(message.number)
            return
        self._drop(message.number)
        _settle(sent.answer, error)

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
            else:
                _settle(sent.answer, FastSpecError(reason))
            _settle(sent.taken, FastSpecError(reason))


def _settle(future: Future[Any], error: BaseException | None) -> None:
    """A future is done, with an error or without; not where it is already, or was cancelled."""
    if future.done() or not future.set_running_or_notify_cancel():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
