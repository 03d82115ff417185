"""Messages between two processes, and mail from the batch's thread to the event loop."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]  # typeshed leaves it out
from queue import Empty, SimpleQueue
from typing import Any

LOOK = 0.1
"""Seconds without a message after which it is looked whether there is news of what goes beside them."""


def sendable(error: BaseException) -> ExceptionWithTraceback:
    """An error on its way to another process, which reads it as the error itself with its trace as the cause. One that
    cannot be pickled comes as an error that says its name."""
    try:
        found = pickle.loads(pickle.dumps(error))
    except Exception:
        found = None
    sent = ExceptionWithTraceback(error, error.__traceback__)
    if type(found) is not type(error) or str(found) != str(error):
        sent.exc = RuntimeError(f"{type(error).__name__}: {error}")
    return sent


class Wire:
    """One end of a connection. A thread sends what is posted in its order, all that waits as one parcel with what
    `beside` says then; a change of that goes alone. A message that cannot be pickled ends the connection."""

    def __init__(self, connection: Connection, beside: Callable[[], Any] = lambda: None) -> None:
        self.connection, self.beside = connection, beside
        self._posted: SimpleQueue[Any] = SimpleQueue()
        self._over = object()
        self._thread = threading.Thread(target=self._write, name="fastspec-wire", daemon=True)
        self._thread.start()

    def post(self, message: Any) -> None:
        """From any thread. Where the other end has gone nothing happens: `parcels` ends there."""
        self._posted.put(message)

    def parcels(self) -> Iterator[tuple[list[Any], Any]]:
        """(messages, what goes beside them) as they come, until the other end has gone."""
        while True:
            try:
                parcel = self.connection.recv_bytes()
            except (EOFError, OSError, TypeError):  # the last where this end is closed meanwhile
                return
            messages, beside = pickle.loads(parcel)
            yield messages, beside

    def end(self) -> None:
        """Post nothing more: the thread ends when all that was posted is sent."""
        self._posted.put(self._over)

    def flush(self) -> None:
        """Return when all that was posted is sent, behind `end`."""
        self._thread.join()

    def _write(self) -> None:
        try:
            told, over = self.beside(), False
            while not over:
                messages = self._waiting()
                over, before, told = messages[-1:] == [self._over], told, self.beside()
                if messages or told != before:
                    self.connection.send_bytes(pickle.dumps((messages[:-1] if over else messages, told)))
        except OSError:  # the other end has gone
            pass
        except BaseException:  # an unpicklable message: both ends hear of it, none waits for what will not come
            with socket.socket(fileno=os.dup(self.connection.fileno())) as held:
                held.shutdown(socket.SHUT_RDWR)
            raise

    def _waiting(self) -> list[Any]:
        """All that waits; nothing where for a while nothing is posted."""
        messages: list[Any] = []
        with suppress(Empty):
            messages.append(self._posted.get(timeout=LOOK))
            while messages[-1] is not self._over:
                messages.append(self._posted.get_nowait())
        return messages


PACE = 0.001
"""Seconds for every reader of one delivery that pass before the next: to send a chunk takes the event loop some tenths
of a millisecond, for which the rounds' thread waits."""
LONGEST_PACE = 0.04


class Mail:
    """Mail from the batch's thread to the event loop, all that waits in one wake-up, `PACE` a reader apart."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.waiting: deque[tuple[asyncio.Queue[Any], Any]] = deque()
        self.called = False

    def post(self, queue: asyncio.Queue[Any], item: Any, urgent: bool = False) -> None:
        """From any thread; what one thread posts to a queue keeps its order. What is `urgent` waits for no pace, and
        takes along what waits for the same reader."""
        self.waiting.append((queue, item))
        if not self.called:
            self.called = True
            self.loop.call_soon_threadsafe(self._bring)
        elif urgent:
            self.loop.call_soon_threadsafe(self._deliver_to, queue)

    def _bring(self) -> None:
        readers = self._deliver()
        if readers > 1:  # called still: who posts meanwhile waits for that
            self.loop.call_later(min(LONGEST_PACE, PACE * readers), self._bring)
            return
        self.called = False
        if self.waiting:  # posted before that line, by who saw that it was called
            self.called = True
            self.loop.call_soon(self._bring)

    def _deliver(self) -> int:
        """Bring what waits -> to how many readers."""
        readers: set[int] = set()
        while self.waiting:
            queue, item = self.waiting.popleft()
            readers.add(id(queue))
            queue.put_nowait(item)
        return len(readers)

    def _deliver_to(self, reader: asyncio.Queue[Any]) -> None:
        """Bring what waits for one reader; what is posted meanwhile comes behind the rest."""
        kept: list[tuple[asyncio.Queue[Any], Any]] = []
        for _ in range(len(self.waiting)):
            queue, item = self.waiting.popleft()
            if queue is reader:
                queue.put_nowait(item)
            else:
                kept.append((queue, item))
        self.waiting.extendleft(reversed(kept))


async def all_of(queue: asyncio.Queue[Any]) -> list[Any]:
    """Items that have come; waits where nothing has."""
    found = [await queue.get()]
    while not queue.empty():
        found.append(queue.get_nowait())
    return found
