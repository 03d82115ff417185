"""The number of rows of an open batch: it follows the load, and prompts move between batches of different sizes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic

from fastspec.generation.engine.engine import TargetT
from fastspec.generation.engine.open_batch import OpenBatch
from fastspec.generation.engine.rounds import Rounds

PATIENCE = 16
"""After so many turns that needed fewer rows there are fewer. Where more are needed there are more at once."""


class Widths(Generic[TargetT]):
    """Rounds of as many rows as the load needs: 1, 2, 4, ... or `rows`. Those of `rows` are made at once, the others when they are first
    needed, and all are kept: together keys and values take the memory of twice `rows` at most.

    `make(count, other)` makes rounds of `count` rows, whose prompts are read in the same target as those of `other`, if any. Beside
    others it may give None: then these go on. Without `narrows`, and with a drafter whose rows do not move, there are always `rows`.
    """

    def __init__(
        self, make: Callable[[int, Rounds[TargetT] | None], Rounds[TargetT] | None], batch: OpenBatch, rows: int, *, narrows: bool
    ) -> None:
        self.make, self.batch, self.rows = make, batch, rows
        self.steps = [*(1 << power for power in range((rows - 1).bit_length())), rows] if narrows else [rows]
        self.made: dict[int, Rounds[TargetT]] = {}
        self.needed: deque[int] = deque(maxlen=PATIENCE)
        """The rows that the last turns had prompts for."""
        self.room = 0
        """Committed tokens of each row that all rounds have room for."""
        self.begin()

    def begin(self) -> None:
        """Make rounds of all rows, which hold nothing; what there was is dropped."""
        self.made.clear()
        self.needed.clear()
        self.batch.resize(self.rows)
        made = self.make(self.rows, None)
        assert made is not None
        self.current = self.made[self.rows] = made
        made.engine.reserve(self.room)
        drafter = self.current.engine.drafter
        if drafter is not None and not drafter.moves:
            self.steps = [self.rows]

    def reserve(self, room: int) -> None:
        """Make room for so many committed tokens of each row in all rounds, those that are made later too."""
        self.room = room
        for each in self.made.values():
            each.engine.reserve(room)

    def turn(self) -> None:
        """A turn of the rounds that the load needs. Before these change no round is launched ahead, since prompts move between two."""
        self.needed.append(self.batch.held + len(self.batch.queue))
        width = next((step for step in self.steps if step >= max(self.needed)), self.rows)
        stays = width == len(self.batch.prompts) or self.current.joining is not None
        if not stays and not self.current.engine.in_flight:
            self._move(width)
            stays = True
        self.current.turn(stays)

    def _move(self, width: int) -> None:
        former = self.current
        made = self.made.get(width) or self.make(width, former)
        if made is None:
            return
        self.current = self.made[width] = made
        made.engine.reserve(self.room)
        self.batch.lengths = self.current.engine.take_rows(former.engine, self.batch.resize(width))
