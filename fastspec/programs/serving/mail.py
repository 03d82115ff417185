"""Mail from the batch's thread to the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

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
