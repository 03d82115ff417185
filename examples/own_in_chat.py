"""A logits processor and a storage of n-grams of your own, in a chat:

    fastspec chat --own examples/own_in_chat.py --assistant transformers,nasd

then `/logits_processor fresh` and `/storage last`. In Python they are `generate(logits_processor=[Fresh()])` and
`generate(assistant=fastspec.Nasd(storage=Last()))`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LogitsProcessor


class Fresh(LogitsProcessor):
    """Makes the last tokens less likely to come again."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        recent = input_ids[:, -16:]
        return scores.scatter(1, recent, scores.gather(1, recent) - 1.0)


class Last:
    """A `fastspec.Storage` that knows what followed each token last. A cursor is the last token of a text."""

    def __init__(self) -> None:
        self.followers: dict[int, int] = {}

    def start(self) -> int | None:
        return None

    def step(self, cursor: int | None, token: int) -> int:
        return token

    def feed(self, cursor: int | None, token: int, fillers: Sequence[int] = ()) -> int:
        if cursor is not None:
            self.followers[cursor] = token
        return token

    def look(self, cursor: int | None) -> tuple[int, list[tuple[int, int]]]:
        if cursor not in self.followers:
            return 0, []
        return 1, [(self.followers[cursor], 1)]


PROCESSORS = {"fresh": Fresh}
STORAGES = {"last": Last}
