"""Speculative decoding with a draft model: it writes a few tokens, the target judges them in one pass.

Chen et al. (arXiv 2302.01318) and Leviathan et al. (arXiv 2211.17192). In sampled calls the drafts are drawn from the draft model's own
distribution q, processed as the target's is, and judged by p / q; else they are its most likely tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fastspec.generation.protocols import LanguageModel, Ops
from fastspec.generation.tree import TokenTree, Verdict

Process = Callable[[Tensor], Tensor]

PRIOR = 1.0
"""Drafts that count as promised and kept before the first round: how long a draft model's confidence is taken at its word."""


@dataclass(frozen=True, slots=True)
class Length:
    """How far a round drafts: `most` tokens, or fewer where going on does not pay.

    A further token, accepted with probability S, is worth its cost c while S / c exceeds the tokens per cost so far,
    E / T = (1 + sum of S) / (1 + drafted * c), with one target pass as the unit. `cost` is c; 0 always drafts `most` tokens. S is the
    product of the draft model's highest probabilities so far, averaged over the rows that are still running, times the share of what such
    products promised before that was accepted: known before the token is drawn, as it must be where drafts are drawn. No clock is read,
    so the same seed gives the same output.
    """

    most: int
    cost: float = 0.0

    def goes_on(self, survival: float, expected: float, drafted: int) -> bool:
        """Whether to draft one more token after `drafted` ones that yield `expected` tokens, bonus counted."""
        return drafted < self.most and survival * (1 + drafted * self.cost) > self.cost * expected


class Trust:
    """How far a draft model's confidence is taken at its word in one call: its share, what was accepted over what it had promised, in
    tokens a row and round, at most 1. It knows only of rounds that are over, so drafts stay functions of what came before them."""

    def __init__(self, device: torch.device) -> None:
        self.promised, self.delivered = PRIOR, torch.full((), PRIOR, device=device)
        self.hoped = 0.0
        """What this round's drafts promise."""

    def weigh(self, hope: Tensor) -> tuple[float, float]:
        """A confidence (a scalar) as it is, and times that share, in one read-back."""
        plain, delivered = torch.stack((hope, self.delivered)).tolist()
        return plain, plain * min(1.0, delivered / self.promised)

    def judge(self, accepted: Tensor, active: Tensor) -> None:
        """Count a round: drafts accepted [B] in the rows that were active [B]. Nothing is waited for."""
        self.promised += self.hoped
        self.delivered += (accepted * active).sum() / active.sum().clamp(min=1)
        self.hoped = 0.0


class ChainDrafter:
    """Drafts of a draft model with a cache of its own, or (`share`) of one that writes into the target's cache.

    The draft's cache ends before the last two tokens of the text; a round begins by feeding both, so that rows which accepted the whole
    chain and rows which did not are fed alike. A shared cache ends before the root alone. `branches` - 1 further children, the next best,
    stand beside every drafted token; then drafts are never drawn at random.
    """

    def __init__(
        self, draft: LanguageModel, length: Length, *, branches: int, vocab: int, draft_vocab: int, ops: Ops, process: Process | None
    ) -> None:
        self.draft, self.length, self.branches, self.ops = draft, length, branches, ops
        self.vocab, self.draft_vocab = vocab, draft_vocab
        self.whole: LanguageModel | None = None
        self.process = process if branches == 1 else None
        self.nodes, self.max_path = 1 + length.most * branches, length.most + 1

    def share(self, draft: LanguageModel, whole: LanguageModel) -> None:
        """Draft with a model that writes behind the committed tokens of `whole`, the target, and has their keys and values already."""
        self.draft, self.whole = draft, whole

    def open(self, capacity: int) -> None:
        """Begin another call of the same rows, of at most `capacity` tokens each."""
        if self.whole is None:
            self.draft.open(capacity + self.length.most + 2)

    def begin(self, ids: Tensor, counts: Tensor, features: Tensor, root: Tensor) -> None:
        """Feed the text ids [B, T], of which counts [B] tokens are real, but for its last token."""
        if self.whole is None:
            self.draft.prefill(self._known(ids), counts)
        self._restart(ids, counts, root)

    def _restart(self, ids: Tensor, counts: Tensor, root: Tensor) -> None:
        """Stand behind a text that the draft model has read, but for its last token."""
        self.root = root
        self.alive = torch.ones_like(root, dtype=torch.bool)
        self.trust = Trust(root.device)
        self.draft.rewind(counts - 1 if self.whole is None else self.whole.lengths)
        self.previous = ids.gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0]

    def propose(self, extent: int) -> TokenTree:
        """A chain of drafts below the root, with their alternatives as leaves."""
        self.base = self.draft.lengths.clone()
        extent += self.nodes + 1
        fed = torch.stack((self.previous, self.root), 1) if self.whole is None else self.root[:, None]
        tokens, parents, q = [self.root[:, None]], [0], []
        survival, expected, node, drafted = self.alive.float(), 1.0, 0, 0
        while True:
            scores = self._feed(fed, extent)
            scores = scores if self.process is None else self.process(scores)
            law = torch.softmax(scores, -1)
            mean = 1.0
            if self.length.cost:  # before the draw: a token that decided over its own being drafted would not follow its law
                survival = survival * law.amax(-1)
                hope, mean = self.trust.weigh(survival.sum() / self.alive.sum().clamp(min=1))
                if drafted and not self.length.goes_on(mean, expected, drafted):
                    break
                self.trust.hoped += hope
            chosen = self._choose(scores)
            tokens.append(chosen)
            parents += [node] * self.branches
            node, drafted, expected = len(parents) - self.branches, drafted + 1, expected + mean
            if self.process is not None:
                q.append(law)
            if drafted == self.length.most or (self.length.cost and not self.length.goes_on(mean, expected, drafted)):
                break  # the next token's chance is no higher than this one's: its pass need not be run to know
            fed = chosen[:, :1]
        if self.branches == 1:
            return TokenTree.chain(torch.cat(tokens, 1), self.max_path, torch.stack((q[0], *q), 1) if q else None)
        above = torch.tensor(parents, device=self.root.device).expand(len(self.root), -1)
        return TokenTree.from_parents(torch.cat(tokens, 1), above, self.max_path)

    def observe(self, tree: TokenTree, verdict: Verdict, logits: Tensor, features: Tensor, active: Tensor, extent: int) -> None:
        """Keep what the target accepted in the draft's cache, but for the last token of it, which may have been an alternative."""
        if self.length.cost:
            self.trust.judge(verdict.accepted, active)
        said = tree.tokens.gather(1, verdict.path)
        last = said.gather(1, verdict.accepted[:, None])[:, 0]
        kept = torch.where(active, self.base + verdict.accepted + 1, self.base)
        self.draft.rewind(kept if self.whole is None else self.whole.lengths)
        self.previous = torch.where(active, last, self.previous)
        self.root = torch.where(active, verdict.bonus, self.root)
        self.alive = active

    def _feed(self, tokens: Tensor, extent: int) -> Tensor:
        """Append tokens [B, T] to the draft's text -> fp32 scores of what follows, over the target's vocabulary [B, V]."""
        tree = TokenTree.chain(self._known(tokens))
        logits, _ = self.draft.score(tree, extent)
        last = tree.depths[:, -1]
        self.draft.commit(Verdict(tree.depths, last, last), torch.ones_like(self.alive))
        return self._fitted(logits[:, -1])

    def _fitted(self, logits: Tensor) -> Tensor:
        """The draft model's logits [B, its vocabulary] as fp32 scores over the target's [B, V]."""
        scores = logits[:, : self.vocab].float()
        return torch.nn.functional.pad(scores, (0, self.vocab - scores.shape[1]), value=-torch.inf)

    def _choose(self, scores: Tensor) -> Tensor:
        """Drafts [B, branches] of scores [B, V]: the best, or one drawn."""
        if self.process is None:
            return scores.topk(self.branches, -1).indices
        return self.ops.pick(scores, torch.rand(len(scores), device=scores.device))[:, None]

    def _known(self, tokens: Tensor) -> Tensor:
        """Tokens that the draft model has no embedding for are shown to it as another: its drafts are judged all the same."""
        return tokens.clamp(max=self.draft_vocab - 1)
