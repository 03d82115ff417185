"""A prompt on its way into a row of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from fastspec.generation.drafters.base import Drafter, Unread
from fastspec.generation.engine.call import HostCopy, Prefix
from fastspec.generation.engine.verifier import Verifier
from fastspec.generation.target import Target

Defer: TypeAlias = Callable[[Drafter | None, Tensor, Tensor, Tensor, Tensor], Unread | None]
"""`Engine.defer`."""


class Joining:
    """A prompt on its way into a row: a target and a drafter of one row read it, a part at a time.

    `prompt` is its number in the batch, ids [1, T] are its tokens, of which those of a prefix are not read again.
    """

    def __init__(
        self, row: int, prompt: int, ids: Tensor, target: Target, drafter: Drafter | None, prefix: Prefix | None = None
    ) -> None:
        self.row, self.prompt, self.ids, self.target, self.drafter = row, prompt, ids, target, drafter
        self.prefix = prefix
        target.reserve(ids.shape[1])  # at once, and not as its parts need it: what is captured hangs on the buffers
        self.done, self.drafts_from = (0, 0) if prefix is None else (prefix.count, prefix.begin(target, drafter))
        """Tokens that were read, and the first one that the drafter has not."""
        self.features: list[Tensor] = []
        self.unread: Unread | None = None
        """The prompt, where its drafter begins with it later."""
        self.logits: Tensor
        self.first: HostCopy
        """Its first new token, which waits neither for the drafter nor for the row."""

    @property
    def left(self) -> int:
        """Tokens that are still to be read."""
        return self.ids.shape[1] - self.done

    def read(self, most: int) -> None:
        """Read so many of the tokens."""
        part = self.ids[:, self.done : self.done + most]
        self.logits, features = self.target.prefill(part, part.new_full((1,), part.shape[1]))  # waits for nothing
        self.done += part.shape[1]
        if self.drafter is not None:
            self.features.append(features.clone() if self.left else features)  # the next part may write over them

    def take_over(self, ids: Tensor, features: Tensor) -> None:
        """Go on behind tokens ids [1, k] of an answer that the target has committed, with their features [1, k, F]."""
        self.ids = torch.cat((self.ids, ids), 1)
        self.done += ids.shape[1]
        if self.features and self.features[-1].shape[2]:
            self.features.append(features)

    def begin(
        self, verifier: Verifier, first: tuple[Tensor, Tensor] | None = None, defer: Defer | None = None
    ) -> tuple[Tensor, Tensor]:
        """Begin behind the whole prompt -> its first new token [1], NO_TOKEN where there is none, and the processed
        scores [1, V]: `first`, where they are known. The drafter begins later where `defer` says so."""
        text = self.ids, self.ids.new_full((1,), self.done)
        root, scores = first or verifier.joined(self.logits, text, self.prompt, self.drafter)
        self.first = HostCopy(root)
        if self.drafter is not None:
            features = self.features[0] if len(self.features) == 1 else torch.cat(self.features, 1)
            if features.shape[1] < self.done - self.drafts_from:  # of a drafter that reads no features
                features = features.new_empty(1, self.done, 0)
            behind = self.ids[:, self.drafts_from :], text[1] - self.drafts_from, features, root.clamp(min=0)
            self.unread = None if defer is None or self.prefix is not None else defer(self.drafter, *behind)
            if self.unread is None:
                self.drafter.begin(*behind)
        return root, scores
