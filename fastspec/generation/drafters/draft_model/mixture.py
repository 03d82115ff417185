"""Decode from a mixture of two models' distributions: the small one drafts, and what is accepted follows the mixture, not the large one's
distribution.

Speculative cascades (Narasimhan et al., arXiv 2405.19261, algorithm 5): with q the draft model's distribution, p the target's and pi their
mixture, a draft x ~ q is accepted with probability min(1, pi(x) / q(x)), else norm(max(pi - q, 0)) gives the token. So every token follows
pi where pi takes the place of p at every node, behind the last draft and behind the prompt too: q is needed there as well.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fastspec.generation.drafters.base import MixingDrafter, Process, Traits
from fastspec.generation.drafters.draft_model.chain import ChainDrafter
from fastspec.generation.drafters.policy import Length
from fastspec.generation.ops import Ops
from fastspec.generation.target import Target
from fastspec.generation.tree import TokenTree
from fastspec.generation.verify import pick_draft

Blend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(p, q, p_raw, q_raw), each [..., V] fp32 probabilities -> pi [..., V]; p and q are processed, and one-hot in greedy calls."""


class MixedDrafter(ChainDrafter, MixingDrafter):
    """Chains of `gamma` drafts of a model with a cache of its own, and the mixture that judges them.

    The loop asks `first` for the distribution of the first token, and passes how the call chooses; a round asks `mix` for the
    distribution at the nodes of its tree. Both return log pi in place of the target's processed scores. The cache needs room for `gamma` +
    2 tokens more than the call has, and a tail of 2 nodes.
    """

    traits = Traits(reusable=True, draws=True)

    def __init__(self, draft: Target, gamma: int, blend: Blend, *, vocab: int, draft_vocab: int, ops: Ops) -> None:
        super().__init__(draft, Length(gamma), branches=1, vocab=vocab, draft_vocab=draft_vocab, ops=ops, process=None)
        self.blend = blend
        self.shaped: Process = _untouched

    def first(self, ids: Tensor, counts: Tensor, logits: Tensor, scores: Tensor, *, process: Process | None, sample: bool) -> Tensor:
        """Read the text ids [B, T], of which counts [B] tokens are real -> log pi [B, V] of the first new token.

        logits and scores [B, V] are the target's, raw and processed; `process` is the call's processors, None where there are none, and
        `sample` says whether the call draws.
        """
        self.shaped = process or _untouched
        self.process = self.shaped if sample else None
        draft, _ = self.draft.prefill(self._known(ids), counts)
        return self._mixed(logits, scores, *self._all_probs(self._fitted(draft)))

    def begin(self, ids: Tensor, counts: Tensor, features: Tensor, root: Tensor) -> None:
        """Take the first new token root [B] of the text that `first` has read."""
        self._restart(ids, counts, root)

    def propose(self, extent: int) -> TokenTree:
        """A chain of drafts below the root; the draft model reads the last of them too, for its distribution of the token after."""
        self.base = self.draft.lengths.clone()
        extent += self.nodes + 2
        tokens, probs = [self.root[:, None]], [self._all_probs(self._feed(self._unread(), extent))]
        while len(tokens) <= self.length.most:
            tokens.append(self._drawn(probs[-1][0]))
            probs.append(self._all_probs(self._feed(tokens[-1], extent)))
        self.q, self.q_raw = (torch.stack(each, 1) for each in zip(*probs, strict=True))
        # the distribution of a node's token is its parent's; nothing reads the root's
        q = None if self.process is None else torch.cat((self.q[:, :1], self.q[:, :-1]), 1)
        return TokenTree.chain(torch.cat(tokens, 1), self.max_path, q)

    def mix(self, tree: TokenTree, logits: Tensor, scores: Tensor) -> Tensor:
        """log pi [B, N, V] at the nodes of the last tree, from the target's raw logits and processed scores [B, N, V] there."""
        return self._mixed(logits, scores, self.q, self.q_raw)

    def _mixed(self, logits: Tensor, scores: Tensor, q: Tensor, q_raw: Tensor) -> Tensor:
        p = self._probs(scores)
        blended = self.blend(p, q, torch.softmax(logits.float(), -1), q_raw)
        return (blended + 0 * p).log()  # a rule that compares may pass by a p that is NaN, and nothing may be drawn there

    def _all_probs(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The draft model's scores [B, V] -> its distributions, processed and not."""
        return self._probs(self.shaped(scores)), torch.softmax(scores, -1)

    def _probs(self, scores: Tensor) -> Tensor:
        """Processed scores [..., V] -> the distribution that a token is chosen by: all of it on one token in greedy calls."""
        if self.process is None:
            return one_hot(self.ops.pick(scores.float(), None), scores.shape[-1]).float()
        return torch.softmax(scores.float(), -1)

    def _drawn(self, probs: Tensor) -> Tensor:
        """Drafts [B, 1] of distributions [B, V]."""
        return pick_draft(probs.log(), None if self.process is None else torch.rand(len(probs), device=probs.device), self.ops)[:, None]


def _untouched(scores: Tensor) -> Tensor:
    return scores
