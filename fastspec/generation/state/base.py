"""What the layers of one kind keep of a text, and what a round asks of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from fastspec.generation.ops import Ops
from fastspec.generation.tree import Verdict

Held: TypeAlias = tuple[Tensor, Tensor]
"""What transformers keeps of one layer: keys and values [B, Hkv, T, D], or the last inputs of a convolution and a recurrent state."""


@dataclass(frozen=True, slots=True)
class Moves:
    """The accepted paths of a round as slots: row b's node path[b, i] stands in slot sources[b, i] and goes to targets[b, i], [B, P]."""

    verdict: Verdict
    active: Tensor
    """[B] bool: the rows whose path is kept."""
    sources: Tensor
    targets: Tensor

    def on(self, device: torch.device) -> Moves:
        """The same on a device."""
        if self.sources.device == device:
            return self
        verdict = replace(
            self.verdict, path=self.verdict.path.to(device), accepted=self.verdict.accepted.to(device), bonus=self.verdict.bonus.to(device)
        )
        return Moves(verdict, self.active.to(device), self.sources.to(device), self.targets.to(device))


class LayerState(ABC):
    """Buffers of all layers of one kind, for every row of a call. Slots below a row's length hold its committed tokens, the tail behind
    them the nodes of the last tree, which the layers' mixer writes.

    A kind that keeps less than every token (a window, a recurrent state) answers the same questions: it may ignore how many slots there
    are, and must not let a node that was rejected change what it keeps.
    """

    layers: int
    """How many layers there are of the kind."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where its layers compute, and its buffers are."""

    @abstractmethod
    def bytes(self, slots: int) -> int:
        """Memory of the buffers with so many slots a row."""

    @abstractmethod
    def resize(self, slots: int) -> None:
        """Replace the buffers by larger ones that hold the same."""

    @abstractmethod
    def commit(self, ops: Ops, moves: Moves) -> None:
        """Keep the accepted paths."""

    @abstractmethod
    def copy_row(self, row: int, other: LayerState, count: int, source: int, reached: int) -> None:
        """Begin a row anew with the `count` committed tokens of row `source` of another state of the same kind. The row's former text
        and its trees have written no slot from `reached` on."""

    @abstractmethod
    def clear(self, reached: int) -> None:
        """Begin with an empty text in every row, none of which has written a slot from `reached` on."""

    @abstractmethod
    def load(self, layer: int, held: Held, order: Tensor, counts: Tensor) -> None:
        """Take what transformers keeps of one layer's first tokens; order [B, T] are the columns that a row's tokens stand in, the first
        counts [B] of them."""

    @abstractmethod
    def export(self, layer: int, slots: Tensor, real: Tensor, lengths: Tensor) -> Held:
        """What transformers keeps of the tokens of one layer in slots [B, T] of texts of lengths [B]; zeros where `real` [B, T] is
        false."""
