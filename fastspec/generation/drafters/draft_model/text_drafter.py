"""Drafts of a model with another tokenizer, handed over as text.

The text so far is encoded anew for the draft model, its continuation is decoded and encoded for the target. The drafts are a function of
the text and of rounds that are over, so that one draw per node keeps greedy and sampled calls exact, whatever the two encodings lose.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastspec.generation.drafters.draft_model.retokenized import RetokenizingDrafter
from fastspec.generation.drafters.draft_model.tokenizer import decoded, encoded
from fastspec.generation.drafters.policy import Pace
from fastspec.generation.tree import TokenTree

OVERLAP = 8
"""Tokens of the text that are encoded again together with its continuation, since tokens merge across the seam."""


class TextDrafter(RetokenizingDrafter):
    """Chains of at most `length.most` target tokens, the text of as many of the draft model's most likely ones."""

    def propose(self, extent: int) -> TokenTree:
        """One chain per row; a row whose continuation encodes to fewer tokens is filled up with token 0, a guess like any other. The root
        alone where no row can be drafted for."""
        able, self.written = self._encode_all(), 0
        written = self._write(torch.tensor(able, device=self.device)) if any(able) else []
        drafted = [self._as_target(row, written[row]) if going else [] for row, going in enumerate(able)]
        width = max(map(len, drafted))
        if not width:
            return TokenTree.root_only(self._roots())
        tokens = [[history[-1], *draft, *[0] * (width - len(draft))] for history, draft in zip(self.history, drafted, strict=True)]
        return TokenTree.chain(torch.tensor(tokens, device=self.device), self.max_path)

    def _write(self, going: Tensor) -> list[list[int]]:
        """The draft model's tokens behind every row's text, as many as pay over the rows that can be drafted for, going [B]."""
        logits, survival, pace = self._catch_up(), going.float(), Pace(self.length, self.trust, max(1, sum(self.alive)))
        own: list[Tensor] = []
        while True:
            if self.length.cost:
                survival = survival * torch.softmax(logits.float(), -1).amax(-1)
            if not pace.allows(survival):
                break
            own.append(logits.argmax(-1))
            if not pace.take():
                break
            logits = self._feed(own[-1], len(own) - 1)
        self.written = len(own)
        rows: list[list[int]] = torch.stack(own, 1).tolist()
        self._keep([row[:-1] for row in rows])
        return rows

    def _as_target(self, row: int, written: Sequence[int]) -> list[int]:
        """Target tokens of what the draft model wrote behind a row's text, by the end of it that was encoded anew."""
        end = self.read[row][len(self.opening) + len(self.settled[row][1]) :]
        before, after = (decoded(self.draft_tokenizer, ids) for ids in (end, [*end, *written]))
        return self._joined(self.history[row], after[len(before) :])[: self.length.most] if after.startswith(before) else []

    def _joined(self, history: Sequence[int], more: str) -> list[int]:
        """`more` as target tokens after `history`: encoded together with the last of them where that gives these back."""
        tail = list(history[-OVERLAP:])
        whole = encoded(self.tokenizer, decoded(self.tokenizer, tail) + more)
        return whole[len(tail) :] if whole[: len(tail)] == tail else encoded(self.tokenizer, more)
