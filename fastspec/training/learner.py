"""What a training run needs of a kind of head: how it starts, what it reads of a batch, how far its drafts are accepted."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

from fastspec.generation.drafters.block.head import BlockHead
from fastspec.generation.heads.module import EagleHead
from fastspec.training.data import Batch, Texts
from fastspec.training.target import TargetReader
from fastspec.training.ttt import Teacher


class Learner(Protocol):
    """One kind of head in training. `module` holds the head with its loss; it is called with `inputs` and returns the loss, the losses of
    each draft [D] and whether each draft hit [D, M], NaN where there was none to make."""

    reader: TargetReader

    @property
    def head(self) -> EagleHead | BlockHead: ...

    @property
    def module(self) -> nn.Module: ...

    def prepared(self, batch: Batch, key: tuple[int, ...]) -> Batch:
        """A batch on the CPU with what is drawn at random added; equal keys draw the same."""
        ...

    def inputs(self, batch: Batch, teacher: Teacher) -> tuple[Tensor | Teacher | int, ...]:
        """What `module` is called with for a prepared batch on the device."""
        ...

    def acceptance(self, texts: Texts, limit: int) -> dict[str, Any]:
        """Teacher-forced acceptance over the first `limit` texts: `top1` tokens a round of a chain, bonus counted, and `accuracy` per
        draft."""
        ...
