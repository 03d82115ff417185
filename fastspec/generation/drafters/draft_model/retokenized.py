"""The base of drafters whose draft model has another tokenizer. Each round the end of every row's text is encoded with the draft model's
tokenizer, and the draft model reads it from where it differs from what its cache holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastspec.generation.drafters.base import Drafter, Traits
from fastspec.generation.drafters.draft_model.chain import Passes
from fastspec.generation.drafters.draft_model.tokenizer import Tokenizer, decoded, encoded
from fastspec.generation.drafters.policy import Credit, Length, Trust, mean_accepted
from fastspec.generation.target import Target
from fastspec.generation.tree import TokenTree, Verdict

LONGEST_CHARACTER = 4
"""Bytes of the longest character in UTF-8, and so the most tokens that may end in the middle of one."""
ANEW, TRIES = 64, 8
"""Tokens at the end of a text that are always encoded anew, and places that are tried as the cut before them."""


class RetokenizingDrafter(Drafter):
    """The texts of a call's rows, and a draft model with a cache of its own rows, `room` tokens each, and one node of a tree behind.

    Texts are read with `tokenizer`, the target's, and `draft_tokenizer`; both decode lists of ids and encode text when called. `known` are
    the draft model's ids of target tokens that mean the same. A text that does not encode or outgrows `room` is not drafted for.
    """

    traits = Traits(reusable=True, reads_logits=False)

    def __init__(
        self, draft: Target, length: Length, *, room: int, tokenizer: Tokenizer, draft_tokenizer: Tokenizer, known: dict[int, int],
        device: torch.device,
    ) -> None:  # fmt: skip
        self.draft, self.length, self.room, self.device, self.known = draft, length, room, device, known
        self.tokenizer, self.draft_tokenizer = tokenizer, draft_tokenizer
        self.opening = _opening(draft_tokenizer)
        self.nodes = self.max_path = length.most + 1
        self.passes = Passes(draft)
        self.written = 0
        """Tokens that the draft model wrote in this round."""

    def open(self, capacity: int) -> None:
        """Begin another call of the same rows, of at most `capacity` tokens each."""
        self.room = room_for(capacity, self.length)
        self.draft.open(self.room)

    def begin(self, ids: Tensor, counts: Tensor, features: Tensor, root: Tensor) -> None:
        """Take the text ids [B, T] with counts [B] real tokens, and its first new token root [B]."""
        self.history = [[*row[:count], first] for row, count, first in zip(ids.tolist(), counts.tolist(), root.tolist(), strict=True)]
        self.read: list[list[int]] = [[] for _ in self.history]
        self.fed: list[list[int]] = [[] for _ in self.history]
        """What the draft's cache holds."""
        starts = [int(history[0] == getattr(self.tokenizer, "bos_token_id", None)) for history in self.history]
        self.settled: list[tuple[int, list[int]]] = [(start, []) for start in starts]
        """How many of a text's tokens are encoded for good, and as what."""
        self.due = [start + 2 * ANEW for start in starts]
        """How long a text is when more of it shall be."""
        self.trust, self.credit = Trust(root.device), Credit(self.length.pause, root.device)
        self.active = torch.ones_like(root, dtype=torch.bool)
        """Which rows go on: the rounds' own tensor after the first of them, which is current by the next one."""

    def pause(self) -> int:
        """Rounds without drafts, where these do not pay."""
        return self.credit.rest()

    def catch_up(self, tokens: Tensor, counts: Sequence[int]) -> None:
        """Append what was emitted in rounds without drafts [B, n], counts [B] of it."""
        for history, more, count in zip(self.history, tokens.tolist(), counts, strict=True):
            history += more[:count]

    def observe(self, tree: TokenTree, verdict: Verdict, logits: Tensor, features: Tensor, active: Tensor, extent: int) -> None:
        """Append what the target emitted."""
        if self.length.cost:
            gained = mean_accepted(verdict.accepted, active)
            self.trust.judge(gained)
            self.credit.judge(gained, self.length.price(self.written))
        self.active = active
        read_back = torch.cat((active[:, None].long(), verdict.accepted[:, None], verdict.tokens(tree)), 1).tolist()  # one read-back
        for history, (going, count, *tokens) in zip(self.history, read_back, strict=True):
            history += tokens[: count + 1] if going else []

    def _roots(self) -> Tensor:
        """The last token of every row [B]."""
        return torch.tensor([history[-1] for history in self.history], device=self.device)

    def _encode_all(self) -> list[bool]:
        """Encode the texts of the rows that go on -> which rows can be drafted for; the others read some token."""
        self.alive: list[bool] = self.active.tolist()
        able = []
        for row, going in enumerate(self.alive):
            read = self._encoded(row) if going else []
            able.append(0 < len(read) <= self.room - self.length.most)
            self.read[row] = read if able[row] else [0]
        return able

    def _encoded(self, row: int) -> list[int]:
        """A row's text in the draft model's tokens, begun as its tokenizer begins one. What lies far behind is not encoded again."""
        history = self.history[row]
        if len(history) > self.due[row]:
            self._settle(row)
        start, ids = self.settled[row]
        return [*self.opening, *ids, *self._end(history[start:])]

    def _settle(self, row: int) -> None:
        """Encode more of a row's text for good, where it can be cut so that the parts are the whole; else try again much later."""
        history, (start, ids) = self.history[row], self.settled[row]
        whole = decoded(self.tokenizer, history[start:])
        want, last = encoded(self.draft_tokenizer, whole), len(history) - ANEW
        self.due[row] = 2 * len(history)
        for cut in range(last, last - TRIES, -1):
            front, back = decoded(self.tokenizer, history[start:cut]), decoded(self.tokenizer, history[cut:])
            first = encoded(self.draft_tokenizer, front)
            if front + back == whole and [*first, *encoded(self.draft_tokenizer, back)] == want:
                self.settled[row], self.due[row] = (cut, [*ids, *first]), cut + 2 * ANEW
                return

    def _end(self, history: Sequence[int]) -> list[int]:
        """A text's end in the draft model's tokens. Where it ends within a character, the last tokens are their own counterparts, if they
        have any."""
        for behind in range(LONGEST_CHARACTER):
            end = len(history) - behind
            text = decoded(self.tokenizer, history[:end]) if end > 0 else ""
            if not text.endswith("\ufffd"):
                break
        rest = [self.known.get(token) for token in history[end:]]
        if None in rest:
            text, rest = decoded(self.tokenizer, history), []
        ids = encoded(self.draft_tokenizer, text)
        return [*ids, *(token for token in rest if token is not None)]

    def _catch_up(self) -> Tensor:
        """Feed what the draft's cache lacks of the rows' texts -> logits of what follows them [B, its vocabulary].

        Every row feeds as many of its last tokens as any row lacks: then none is filled up beyond the room of the cache.
        """
        lacks = max(len(read) - _common(fed, read) for fed, read in zip(self.fed, self.read, strict=True))
        parts = [read[-lacks:] for read in self.read]
        starts = [len(read) - len(part) for read, part in zip(self.read, parts, strict=True)]
        self.draft.rewind(torch.tensor(starts, device=self.device))
        ids = torch.tensor([part + [0] * (lacks - len(part)) for part in parts], device=self.device)
        return self.draft.prefill(ids, torch.tensor([len(part) for part in parts], device=self.device))[0]

    def _feed(self, token: Tensor, behind: int) -> Tensor:
        """Append the draft model's token [B], with `behind` drafts between the text and it -> logits of what follows."""
        return self.passes(token[:, None], max(map(len, self.read)) + behind)

    def _keep(self, rows: Sequence[Sequence[int]]) -> None:
        """Take note of the draft model's tokens that were fed behind the text of each row."""
        self.fed = [[*read, *row] for read, row in zip(self.read, rows, strict=True)]


def room_for(capacity: int, length: Length) -> int:
    """How many of the draft model's tokens there is room for: a text may be longer in them than in the target's, twice as long at most."""
    return 2 * capacity + length.most + 2


def _opening(tokenizer: Tokenizer) -> list[int]:
    """The begin token, if the tokenizer puts it before a text."""
    first = getattr(tokenizer, "bos_token_id", None)
    return [first] if first is not None and list(tokenizer("")["input_ids"])[:1] == [first] else []


def _common(fed: Sequence[int], read: Sequence[int]) -> int:
    """How many tokens of a text the cache holds, short of the last one, which is always fed."""
    kept, end = 0, min(len(fed), len(read) - 1)
    while kept < end:  # parts are compared much faster than tokens one by one
        half = (kept + end + 1) // 2
        kept, end = (half, end) if fed[kept:half] == read[kept:half] else (kept, half - 1)
    return kept
