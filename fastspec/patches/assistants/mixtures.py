"""The cascade's other two modes as decodings: a mixture of two models' distributions token by token, and a chain of models that draft
losslessly."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from fastspec.cascade.config import Cascade
from fastspec.cascade.deferral import mixed
from fastspec.generation.drafters.base import Decoding
from fastspec.generation.drafters.draft_model.mixture import MixedDrafter
from fastspec.generation.drafters.draft_model.staged import StagedDrafter, room
from fastspec.generation.ops import Ops
from fastspec.patches.assistants.speculative import vocabulary
from fastspec.patches.hf.factory import language_model


@dataclass(frozen=True, slots=True)
class MixedDecoding(Decoding):
    """Decoding whose every token follows a deferral rule's mixture of the target's distribution and the draft model's."""

    config: Cascade
    draft: Any
    target: Any
    name: str = "cascade"
    taps: None = None

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The draft model."""
        return (self.draft,)

    def drafter(self, *, rows: int, capacity: int, device: Any, ops: Ops, process: Any) -> MixedDrafter:
        """The drafter of one call."""
        config, more = self.config, self.config.gamma + 2
        model = language_model(self.draft, None, rows=rows, capacity=capacity + more, tail=2, taps=None, ops=ops)
        blend = partial(mixed, config.rule, config.alpha)
        return MixedDrafter(model, config.gamma, blend, vocab=vocabulary(self.target), draft_vocab=vocabulary(self.draft), ops=ops)


@dataclass(frozen=True, slots=True)
class StagedDecoding(Decoding):
    """Decoding with drafts of a chain of models, the smallest first: the target's distribution exactly."""

    config: Cascade
    drafts: tuple[Any, ...]
    target: Any
    name: str = "cascade"
    taps: None = None

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The draft models."""
        return self.drafts

    def drafter(self, *, rows: int, capacity: int, device: Any, ops: Ops, process: Any) -> StagedDrafter:
        """The drafter of one call."""
        gamma = self.config.gamma
        more, tail = room(len(self.drafts), gamma)
        models = [
            language_model(draft, None, rows=rows, capacity=capacity + more, tail=tail, taps=None, ops=ops, drafts=True)
            for draft in self.drafts
        ]
        vocabs = [vocabulary(draft) for draft in self.drafts]
        return StagedDrafter(models, gamma, vocab=vocabulary(self.target), vocabs=vocabs, ops=ops, process=process)
