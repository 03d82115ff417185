"""Rounds without drafts, where drafts do not pay: how many are left, and what the drafter has not observed yet."""

from __future__ import annotations

import torch

from fastspec.generation.drafters.base import Drafter
from fastspec.generation.engine.round_state import RoundState


class Fallback:
    """The rounds that a call runs without its drafter."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.left = 0
        """How many of the next rounds are such rounds."""
        self.missed: list[list[int]] = []
        """What the rows emitted in such rounds that the drafter has not observed yet, a list for each round."""
        self.counts: list[int] = []
        """In how many of these each row was still running."""

    def begin(self) -> None:
        """A call begins."""
        self.left, self.missed = 0, []

    def is_next(self, drafter: Drafter | None) -> bool:
        """Whether the next round is such a round; the drafter is asked before every round that it may draft for."""
        if not self.left and drafter is not None:
            self.left = drafter.pause()
        return self.left > 0

    def count(self, emitted: list[list[int]], state: RoundState) -> None:
        """Take what such a round emitted."""
        if not self.missed:
            self.counts = [0] * len(state.running)
        self.missed.append([tokens[0] for _, *tokens in emitted])
        going = zip(self.counts, state.running, state.padded, strict=True)
        self.counts = [count + (running and not padded) for count, running, padded in going]
        self.left -= 1

    def tell(self, drafter: Drafter | None) -> None:
        """Show the drafter what was emitted without it."""
        if self.missed and drafter is not None:
            drafter.catch_up(torch.tensor(self.missed, device=self.device).T, self.counts)
            self.missed = []
