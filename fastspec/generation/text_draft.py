"""Drafts of a model with another tokenizer, handed over as text.

The text so far is encoded anew for the draft model, its continuation is decoded and encoded for the target. The drafts are a function of
the text, so that one draw per node keeps greedy and sampled calls exact, whatever the two encodings lose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastspec.generation.protocols import LanguageModel
from fastspec.generation.tree import TokenTree, Verdict

OVERLAP = 8
"""Tokens of the text that are encoded again together with its continuation, since tokens merge across the seam."""


class TextDrafter:
    """Chains of at most `gamma` target tokens. Each row has a draft model of one row and `room` tokens, made by `model()`; a text that
    outgrows it is drafted for no more. Prompts and answers are read with `tokenizer`, the target's, and `draft_tokenizer`; both decode
    lists of ids and encode text when called.
    """

    def __init__(
        self, model: Callable[[], LanguageModel], gamma: int, room: int, tokenizer: Any, draft_tokenizer: Any, device: torch.device
    ) -> None:
        self.model, self.gamma, self.room = model, gamma, room
        self.tokenizer, self.draft_tokenizer, self.device = tokenizer, draft_tokenizer, device
        self.nodes = self.max_path = gamma + 1

    def begin(self, ids: Tensor, counts: Tensor, features: Tensor, root: Tensor) -> None:
        """Take the text ids [B, T] with counts [B] real tokens, and its first new token root [B]."""
        self.said = [[*row[:count], first] for row, count, first in zip(ids.tolist(), counts.tolist(), root.tolist(), strict=True)]
        self.drafts = [self.model() for _ in self.said]
        self.fed: list[list[int]] = [[] for _ in self.said]
        self.active = [True] * len(self.said)

    def propose(self, extent: int) -> TokenTree:
        """One chain per row; a row whose continuation encodes to fewer tokens is filled up with token 0, a guess like any other."""
        drafted = [self._draft(row) if going else [] for row, going in enumerate(self.active)]
        width = max(1, *map(len, drafted))
        tokens = [[said[-1], *draft, *[0] * (width - len(draft))] for said, draft in zip(self.said, drafted, strict=True)]
        return TokenTree.chain(torch.tensor(tokens, device=self.device), self.max_path)

    def observe(self, tree: TokenTree, verdict: Verdict, logits: Tensor, features: Tensor, active: Tensor, extent: int) -> None:
        """Append what the target said."""
        self.active = active.tolist()
        for row, (count, tokens) in enumerate(zip(verdict.accepted.tolist(), verdict.tokens(tree).tolist(), strict=True)):
            if self.active[row]:
                self.said[row] += tokens[: count + 1]

    def _draft(self, row: int) -> list[int]:
        """Target tokens that the draft model puts after a row's text."""
        said = self.said[row]
        read = encoded(self.draft_tokenizer, decoded(self.tokenizer, said))
        if not read or len(read) + self.gamma > self.room:
            return []
        written = self._go_on(row, read)
        before, after = (decoded(self.draft_tokenizer, ids) for ids in (read, read + written))
        return self._joined(said, after[len(before) :])[: self.gamma] if after.startswith(before) else []

    def _go_on(self, row: int, read: Sequence[int]) -> list[int]:
        """The draft model's greedy continuation by gamma tokens; what it has read already is not read again."""
        draft, fed = self.drafts[row], self.fed[row]
        kept = 0
        while kept < min(len(fed), len(read) - 1) and fed[kept] == read[kept]:
            kept += 1
        draft.rewind(torch.tensor([kept], device=self.device))
        rest = torch.tensor([read[kept:]], device=self.device)
        logits, _ = draft.prefill(rest, torch.tensor([rest.shape[1]], device=self.device))
        written, length = [int(logits[0].argmax())], len(read)
        yes, zero = torch.ones(1, dtype=torch.bool, device=self.device), torch.zeros(1, dtype=torch.long, device=self.device)
        while len(written) < self.gamma:
            tree = TokenTree.root_only(torch.tensor([written[-1]], device=self.device))
            logits, _ = draft.score(tree, length)
            draft.commit(Verdict(zero[None], zero, zero), yes)
            written.append(int(logits[0, 0].argmax()))
            length += 1
        self.fed[row] = [*read, *written[:-1]]
        return written

    def _joined(self, said: Sequence[int], more: str) -> list[int]:
        """`more` as target tokens after `said`: encoded together with the last of them where that gives these back."""
        tail = list(said[-OVERLAP:])
        whole = encoded(self.tokenizer, decoded(self.tokenizer, tail) + more)
        return whole[len(tail) :] if whole[: len(tail)] == tail else encoded(self.tokenizer, more)


def decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of tokens, special ones included."""
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def encoded(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text, nothing added."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []
