"""Rounds that a drafter sits out: of one token on the same target, captured whole and launched ahead of the host like any other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fastspec.generation.rounds import Rounds
    from fastspec.generation.stats import Stats
    from fastspec.generation.tree import Verdict


class Aside:
    """Of some rounds, those without their drafter, and what it has not heard yet."""

    def __init__(self) -> None:
        self.plain: Rounds | None = None
        """The rounds of one token, once there were some."""
        self.left = 0
        """How many the drafter sits out from here on."""
        self.unheard: list[list[int]] = []
        """What the rows said in those that it did, a list for each round; `counts` has in how many of them each row went on."""
        self.counts: list[int] = []

    def begin(self) -> None:
        """A call begins."""
        self.left, self.unheard = 0, []

    def asked(self, drafter: Any) -> bool:
        """Whether the drafter sits the next round out; it is asked before every round that it may draft for."""
        if not self.left and hasattr(drafter, "rest"):
            self.left = drafter.rest()
        return self.left > 0

    def step(
        self, rounds: Rounds, longest: int, stats: Stats, decide: Callable[[], tuple[Verdict, Tensor | None]] | None, ahead: bool
    ) -> list[list[int]]:  # fmt: skip
        """`Rounds.step` without the drafter, which hears of it behind the last one."""
        plain = self.plain = self.plain or without_drafter(rounds)
        if not self.unheard:
            plain.clock, self.counts = rounds.clock, [0] * len(rounds.running)
            plain.begin(rounds.root)
        plain.activate(rounds.running, rounds.filled)
        packed = plain.step(longest, stats, None if decide is None else partial(_decided, rounds, plain, decide), ahead and self.left > 1)
        rounds.show(plain)
        self.unheard.append([tokens[0] for _, *tokens in packed])
        going = zip(self.counts, rounds.running, rounds.filled, strict=True)
        self.counts = [count + (running and not filled) for count, running, filled in going]
        self.left -= 1
        if not self.left:
            self.catch_up(rounds)
        return packed

    def catch_up(self, rounds: Rounds) -> None:
        """Bring the rounds and their drafter to where those without it stand."""
        if self.plain is not None and self.unheard:
            rounds.root.copy_(self.plain.root)
        self.tell(rounds)

    def tell(self, rounds: Rounds) -> None:
        """Let the drafter hear what was said without it."""
        if self.unheard:
            rounds.drafter.sat_out(torch.tensor(self.unheard, device=rounds.root.device).T, self.counts)
            self.unheard = []


def without_drafter(rounds: Rounds) -> Rounds:
    """Rounds of one token on the same target, captured by themselves."""
    target = rounds.target
    alone = getattr(target, "alone", False)
    target.alone = getattr(target, "captures", False)
    try:
        return type(rounds)(
            target, None, rounds.ops, rows=len(rounds.root), sample=rounds.sample, process=rounds.process, whole=rounds.whole,
            measure=rounds.measure, law=rounds.law, filler=rounds.filler,
        )  # fmt: skip
    finally:
        target.alone = alone


def _decided(rounds: Rounds, plain: Rounds, decide: Callable[[], tuple[Verdict, Tensor | None]]) -> tuple[Verdict, Tensor | None]:
    rounds.show(plain)
    return decide()
