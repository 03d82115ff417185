"""The tensors that all rounds of a call share: the last token of every row, and which rows go on."""

from __future__ import annotations

import torch


class RoundState:
    """What all rounds of a call share and change in place: every program of the call, and every graph, reads the same tensors."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.root = torch.zeros(rows, dtype=torch.long, device=device)
        """[B] int64: the last token of every row, emitted and not yet in the target's cache."""
        self.active = torch.ones(rows, dtype=torch.bool, device=device)
        """[B] bool: the rows that go on."""
        self.ended = torch.zeros_like(self.active)
        """[B] bool: of these, the rows that have ended and are padded, in lockstep."""
        self.running, self.padded = [True] * rows, [False] * rows
        """The same two on the host."""

    def activate(self, running: list[bool], padded: list[bool] | None = None) -> None:
        """Say which rows go on, and which of them are padded."""
        padded = padded or [False] * len(running)
        if running != self.running:
            self.running = list(running)
            self.active.copy_(torch.tensor(running, device="cpu"))
        if padded != self.padded:
            self.padded = list(padded)
            self.ended.copy_(torch.tensor(padded, device="cpu"))
