"""A text that another model wrote, verified as a draft before the rounds of a call's own drafter begin.

A token of it is kept where it is what the target drew, so the call's distribution is the target's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fastspec.generation.drafters.base import Drafter
from fastspec.generation.tree import TokenTree, Verdict

# device type -> nodes of the first, second, ... pass, the last for all that follow: on a CPU a pass costs what its
# nodes cost, and a text may be left early; a GPU reads its weights once for all of them
CHUNKS = {"cpu": (8, 16, 32, 64), "cuda": (64,)}


class GivenText(Drafter):
    """Chains of the next tokens of each row's text, as long as the target emits the same. Rows that have left their
    text go on token by token until every row has."""

    def __init__(self, texts: Sequence[Sequence[int]], device: torch.device) -> None:
        self.texts, self.device = [list(text) for text in texts], device
        self.chunks = CHUNKS.get(device.type, CHUNKS["cuda"])
        self.nodes = self.max_path = self.chunks[-1]
        self.kept = [0] * len(self.texts)
        """Tokens of each row's text that the target has emitted too, from its beginning."""

    def begin(self, ids: Tensor, counts: Tensor, features: Tensor, root: Tensor) -> None:
        """Take each row's first new token root [B]."""
        self.roots, self.step = root.tolist(), 0
        self.following = [True] * len(self.texts)
        for row, first in enumerate(self.roots):
            self._follow(row, [first])

    @property
    def goes_on(self) -> bool:
        """True where a row is still in its text, and has more of it."""
        return any(self.following)

    def propose(self, extent: int) -> TokenTree:
        """The next chunk of every row's text, filled up with token 0."""
        nodes = self.chunks[min(self.step, len(self.chunks) - 1)]
        self.step += 1
        rows = []
        for row, root in enumerate(self.roots):
            more = self.texts[row][self.kept[row] :][: nodes - 1] if self.following[row] else []
            rows.append([root, *more, *[0] * (nodes - 1 - len(more))])
        return TokenTree.chain(torch.tensor(rows, device=self.device))

    def observe(
        self, tree: TokenTree, verdict: Verdict, logits: Tensor, features: Tensor, active: Tensor, extent: int
    ) -> None:
        """Follow every running row as far as the target emitted its text."""
        for row, emitted in enumerate(verdict.read(tree, active)):
            if emitted:
                self.roots[row] = emitted[-1]
                self._follow(row, emitted)
            else:
                self.following[row] = False

    def _follow(self, row: int, emitted: list[int]) -> None:
        text = self.texts[row]
        for token in emitted:
            if not self.following[row]:
                return
            same = self.kept[row] < len(text) and text[self.kept[row]] == token
            self.kept[row] += same
            self.following[row] = same and self.kept[row] < len(text)


class Transcript:
    """Text of every row for a drafter to begin with: the prompts ids [B, T], counts [B] and their features [B, T, F],
    and the emitted tokens that are in the target's cache."""

    def __init__(self, ids: Tensor, counts: Tensor, features: Tensor) -> None:
        real = counts.tolist()
        self.ids = [[row[:count]] for row, count in zip(ids, real, strict=True)]
        wide = features.shape[1] == ids.shape[1] and features.shape[2] > 0
        self.features = [[row[:count]] for row, count in zip(features, real, strict=True)] if wide else None
        self.blank = features[:, :1, :0]

    def add(self, tree: TokenTree, verdict: Verdict, features: Tensor, running: Sequence[bool]) -> None:
        """Append the root and the accepted nodes of a round, for the rows that were running in it."""
        for row, accepted in enumerate(verdict.accepted.tolist()):
            if running[row]:
                path = verdict.path[row, : accepted + 1]
                self.ids[row].append(tree.tokens[row, path])
                if self.features is not None:
                    self.features[row].append(features[row, path])

    def whole(self) -> tuple[Tensor, Tensor, Tensor]:
        """ids [B, T'], counts [B], features [B, T', F], filled up on the right."""
        texts = [torch.cat(parts) for parts in self.ids]
        ids = pad_sequence(texts, batch_first=True)
        counts = torch.tensor([len(text) for text in texts], device=ids.device)
        if self.features is None:
            return ids, counts, self.blank.expand(-1, ids.shape[1], -1)
        return ids, counts, pad_sequence([torch.cat(parts) for parts in self.features], batch_first=True)
