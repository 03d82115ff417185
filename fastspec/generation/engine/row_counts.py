"""The number of rows of an open batch: it follows the load, and prompts move between batches of different sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic

from fastspec.generation.engine.engine import TargetT
from fastspec.generation.engine.open_batch import OpenBatch
from fastspec.generation.engine.rounds import Rounds

PATIENCE = 8
"""Turns with rows to spare before rounds narrow."""


class Widths(Generic[TargetT]):
    """Rounds of 1, 2, 4, ... and `rows` rows, each made when it is first needed and kept.

    Without `narrows`, and with a drafter whose rows do not move, there are always `rows`: a captured round takes about as long with one row
    as with eight. Keys and values take the memory of twice the rows at most.
    """

    def __init__(self, make: Callable[[int], Rounds[TargetT]], batch: OpenBatch, rows: int, *, narrows: bool) -> None:
        self.make, self.batch, self.rows = make, batch, rows
        self.steps = [*(1 << power for power in range((rows - 1).bit_length())), rows] if narrows else [rows]
        self.made: dict[int, Rounds[TargetT]] = {}
        self.spare = 0
        """Turns in a row in which fewer rows would have done."""
        self.begin()

    def begin(self) -> None:
        """Make the first rounds, whose rows hold nothing; what there was is dropped."""
        self.made.clear()
        self.batch.resize(self.steps[0])
        self.current = self.made[self.steps[0]] = self.make(self.steps[0])
        drafter = self.current.engine.drafter
        if len(self.steps) > 1 and drafter is not None and not drafter.moves:
            self.steps = [self.rows]
            self.begin()

    def fit(self) -> Rounds[TargetT]:
        """The rounds that the next turn is one of."""
        rounds, batch = self.current, self.batch
        if len(self.steps) == 1 or rounds.joining is not None or rounds.engine.in_flight:
            return rounds
        width, need = len(batch.prompts), batch.held + len(batch.queue)
        wanted = next((step for step in self.steps if step >= need), self.rows)
        self.spare = self.spare + 1 if wanted < width else 0
        if wanted > width or (self.spare and (self.spare >= PATIENCE or not batch.held)):
            self.spare = 0
            self._move(wanted)
        return self.current

    def _move(self, width: int) -> None:
        former = self.current
        self.current = self.made.get(width) or self.made.setdefault(width, self.make(width))
        self.batch.lengths = self.current.engine.take_rows(former.engine, self.batch.resize(width))
