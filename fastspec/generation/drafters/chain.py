"""Speculative decoding with a draft model: it writes a chain of tokens, which the target verifies in one pass.

Chen et al. (arXiv 2302.01318) and Leviathan et al. (arXiv 2211.17192). In sampled calls the drafts are drawn from the
draft model's own distribution q, processed as the target's is, and judged by p / q; else they are its most likely
tokens.

Speculative cascades (Narasimhan et al., arXiv 2405.19261, algorithm 5): with q the draft model's distribution, p the
target's and pi their mixture, a draft x ~ q is accepted with probability min(1, pi(x) / q(x)), else norm(max(pi - q,
0)) gives the token. pi takes the place of p at every node, after the last draft and after the prompt too: q is needed
there as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fastspec.generation.capture import CapturedByShape
from fastspec.generation.drafters.base import Drafter, MixingDrafter, Process, Traits
from fastspec.generation.drafters.policy import AdaptiveLength, Length
from fastspec.generation.ops import Ops
from fastspec.generation.target import Target
from fastspec.generation.tree import TokenTree, Verdict
from fastspec.generation.verify import pick_draft


def over_vocabulary(logits: Tensor, vocab: int) -> Tensor:
    """A draft model's logits [..., its vocabulary] as fp32 scores over the target's [..., V]."""
    scores = logits[..., :vocab].float()
    return torch.nn.functional.pad(scores, (0, vocab - scores.shape[-1]), value=-torch.inf)


class Passes:
    """Passes of a draft model that append tokens to its text and commit them; captured by width where they can be."""

    def __init__(self, draft: Target) -> None:
        self.draft = draft
        self.held: CapturedByShape[Tensor] = CapturedByShape()

    def __call__(self, tokens: Tensor, extent: int, *last: Tensor) -> Tensor:
        """Append tokens [B, T], up to places `last` [B] (left out: all) -> logits after each [B, T, V], which the next
        pass may write over."""
        extent = self.draft.reserve(extent)
        if not self.draft.captures:
            return self._append(extent, tokens, *last)
        return self.held(partial(self._append, self.draft.bound), self.draft.buffers, tokens.shape[1], tokens, *last)

    def _append(self, extent: int, tokens: Tensor, last: Tensor | None = None) -> Tensor:
        tree = TokenTree.chain(tokens)
        logits, _ = self.draft.score(tree, extent)
        last = tree.depths[:, -1] if last is None else last
        self.draft.commit(Verdict(tree.depths, last, last), torch.ones_like(last, dtype=torch.bool))
        return logits


class ChainDrafter(Drafter):
    """Drafts of a draft model with a cache of its own, or (`share`) of one that writes into the target's cache.

    The draft's cache ends before the last two tokens of the text; a round begins by feeding both, so that rows which
    accepted the whole chain and rows which did not are fed alike. A shared cache ends before the root alone. `branches`
    - 1 further children, the next best, stand beside every drafted token; then drafts are never drawn at random. Where
    drafts do not pay, rounds go without them: the draft model reads what was emitted meanwhile when it is tried again.
    Its cache needs room for `length.room` tokens beyond the text, and a tail of `length.unread`. Where `early` makes a
    draft model of the target, `draft` is None, and the cache is the target's.
    """

    traits = Traits(reusable=True, reads_logits=False)
    observes_roots = True

    def __init__(
        self,
        draft: Target | None,
        length: Length,
        *,
        branches: int,
        vocab: int,
        draft_vocab: int,
        ops: Ops,
        process: Process | None,
        early: Callable[[Target], Target] | None = None,
    ) -> None:
        self.length, self.branches, self.ops, self.early = length, branches, ops, early
        if draft is not None:
            self.draft, self.passes = draft, Passes(draft)
        self.vocab, self.draft_vocab = vocab, draft_vocab
        self.whole: Target | None = None
        self.process = process if branches == 1 else None
        self.traits = replace(self.traits, draws=self.traits.draws or self.process is not None)
        self.nodes, self.max_path = 1 + length.most * branches, length.most + 1

    def bind(self, target: Target) -> None:
        """Draft with the target's own layers, on its cache, where `early` says how."""
        if self.early is not None:
            self.draft, self.whole = self.early(target), target
            self.passes = Passes(self.draft)

    def open(self, capacity: int) -> None:
        if self.whole is None:
            self.draft.open(capacity + self.length.room)

    def begin(self, ids: Tensor, counts: Tensor, features: Tensor, root: Tensor) -> None:
        """Feed the text ids [B, T], of which counts [B] tokens are real, but for its last token."""
        if self.whole is None:
            self.draft.prefill(self._known(ids), counts)
        self._restart(ids, counts, root)

    def _restart(self, ids: Tensor, counts: Tensor, root: Tensor) -> None:
        """Stand after a text that the draft model has read, but for its last token."""
        self.root = root
        self.alive = torch.ones_like(root, dtype=torch.bool)
        self.adaptive = AdaptiveLength(self.length, root.device)
        self.draft.rewind(counts - 1 if self.whole is None else self.whole.lengths)
        self.unread = ids.gather(1, (counts - 1).clamp(min=0)[:, None])
        """[B, n] the tokens before the root that the draft's own cache lacks; rounds without drafts add to them."""

    def pause(self) -> int:
        return self.adaptive.budget.pause()

    def catch_up(self, tokens: Tensor, counts: Sequence[int]) -> None:
        self.alive = torch.tensor([count == tokens.shape[1] for count in counts], device=tokens.device)
        known = torch.cat((self._lacked(), tokens.clamp(min=0)), 1)
        self.unread, self.root = known[:, :-1], torch.where(self.alive, known[:, -1], self.root)
        if self.whole is not None:
            self.draft.rewind(self.whole.lengths)
        if self.whole is not None or known.shape[1] > self.length.unread:
            self._read_up()

    def move_row(self, row: int, other: Drafter, source: int, count: int) -> None:
        assert isinstance(other, ChainDrafter)
        self._read_up()
        other._read_up()
        if self.whole is None:
            self.draft.copy_row(row, other.draft, count - 1, source)
        else:
            self.draft.rewind(self.whole.lengths)
        self.root, self.unread, self.alive = self.root.clone(), self.unread.clone(), self.alive.clone()
        self.root[row], self.unread[row], self.alive[row] = other.root[source], other.unread[source], True

    def _read_up(self) -> None:
        """Let the draft's own cache lack one token before the root."""
        late = self.unread[:, :-1]
        self.unread = self.unread[:, -1:]
        if self.whole is not None or not late.shape[1]:
            return
        before = self.draft.lengths.clone()
        extent = int(before.max()) + late.shape[1]
        for part in late.split(self.length.unread, 1):
            self.passes(self._known(part), extent)
        self.draft.rewind(torch.where(self.alive, before + late.shape[1], before))

    def propose(self, extent: int) -> TokenTree:
        """A chain of drafts below the root, with their alternatives as leaves."""
        self.base = self.draft.lengths.clone()
        extent += self.nodes + 1
        fed = self._lacked() if self.whole is None else self.root[:, None]
        tokens, parents, q = [self.root[:, None]], [0], []
        node = 0
        self.adaptive.begin(self.alive.sum().clamp(min=1))
        while True:
            scores = self._feed(fed, extent)
            scores = scores if self.process is None else self.process(scores)
            probs = torch.softmax(scores, -1)
            if not self.adaptive.allows(probs, self.alive):
                break
            chosen = self._choose(scores)
            tokens.append(chosen)
            parents += [node] * self.branches
            node = len(parents) - self.branches
            if self.process is not None:
                q.append(probs)
            if not self.adaptive.take():
                break
            fed = chosen[:, :1]
        if self.branches == 1:
            return TokenTree.chain(torch.cat(tokens, 1), self.max_path, torch.stack((q[0], *q), 1) if q else None)
        above = torch.tensor(parents, device=self.root.device).expand(len(self.root), -1)
        return TokenTree.from_parents(torch.cat(tokens, 1), above, self.max_path)

    def observe(
        self, tree: TokenTree, verdict: Verdict, logits: Tensor, features: Tensor, active: Tensor, extent: int
    ) -> None:
        """Keep what the target accepted in the draft's cache, but for the last of it, which may be an alternative."""
        self.adaptive.judge(verdict.accepted, active)
        emitted = tree.tokens.gather(1, verdict.path)
        last = emitted.gather(1, verdict.accepted[:, None])
        if self.whole is not None:
            self.draft.rewind(self.whole.lengths)
        else:
            self.draft.rewind(torch.where(active, self.base + self.unread.shape[1] + verdict.accepted, self.base))
        self.unread = last
        self.root = torch.where(active, verdict.bonus, self.root)
        self.alive = active

    def _lacked(self) -> Tensor:
        """The tokens [B, n + 1] that the draft's own cache lacks, the root the last; any in rows that have ended."""
        return torch.cat((self.unread, self.root[:, None]), 1)

    def _feed(self, tokens: Tensor, extent: int) -> Tensor:
        """Append tokens [B, T] to the draft's text -> fp32 scores over the target's vocabulary [B, V] after them."""
        return over_vocabulary(self.passes(self._known(tokens), extent)[:, -1], self.vocab)

    def _choose(self, scores: Tensor) -> Tensor:
        """Drafts [B, branches] of scores [B, V]: the best, or one drawn."""
        if self.process is None:
            return scores.topk(self.branches, -1).indices
        return pick_draft(scores, torch.rand(len(scores), device=scores.device), self.ops)[:, None]

    def _known(self, tokens: Tensor) -> Tensor:
        """Tokens that the draft model has no embedding for are shown to it as another."""
        return tokens.clamp(max=self.draft_vocab - 1)


Blend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(p, q, p_raw, q_raw), fp32 probabilities -> pi, all [..., V]; p and q are processed, one-hot in greedy calls."""


class MixedDrafter(ChainDrafter, MixingDrafter):
    """Chains of `gamma` drafts of a model with a cache of its own, and the mixture that judges them: `first` and `mix`
    give log pi in place of the target's processed scores. The cache needs room for `gamma` + 2 tokens more than the
    call has, and a tail of 2 nodes."""

    traits = Traits(reusable=True, draws=True)
    observes_roots = False  # where the mixture is asked for at a root, the draft model has to read it

    def __init__(self, draft: Target, gamma: int, blend: Blend, *, vocab: int, draft_vocab: int, ops: Ops) -> None:
        super().__init__(draft, Length(gamma), branches=1, vocab=vocab, draft_vocab=draft_vocab, ops=ops, process=None)
        self.blend = blend
        self.shaped: Process = _untouched

    def first(
        self, ids: Tensor, counts: Tensor, logits: Tensor, scores: Tensor, *, process: Process | None, sample: bool
    ) -> Tensor:
        self.shaped = process or _untouched
        self.process = self.shaped if sample else None
        draft, _ = self.draft.prefill(self._known(ids), counts)
        return self._mixed(logits, scores, *self._all_probs(over_vocabulary(draft, self.vocab)), sample)

    def begin(self, ids: Tensor, counts: Tensor, features: Tensor, root: Tensor) -> None:
        """Take the first new token root [B] of the text that `first` has read."""
        self._restart(ids, counts, root)

    def propose(self, extent: int) -> TokenTree:
        """A chain of drafts below the root, all of which the draft model reads, for its distribution after them."""
        self.base = self.draft.lengths.clone()
        extent += self.nodes + 2
        tokens, drafted, fed = [self.root[:, None]], [], self._lacked()
        while True:
            scores = self._feed(fed, extent)
            drafted.append((*self._all_probs(scores), scores.clone()))  # the next pass may write over them
            if len(tokens) > self.length.most:
                break
            fed = self._drawn(drafted[-1][0])
            tokens.append(fed)
        self.q, self.q_raw, self.scores = (torch.stack(each, 1) for each in zip(*drafted, strict=True))
        # the distribution of a node's token is its parent's; nothing reads the root's
        q = None if self.process is None else torch.cat((self.q[:, :1], self.q[:, :-1]), 1)
        return TokenTree.chain(torch.cat(tokens, 1), self.max_path, q)

    def mix(self, tree: TokenTree, logits: Tensor, scores: Tensor) -> Tensor:
        return self._mixed(logits, scores, self.q, self.q_raw, self.process is not None)

    def mix_row(self, row: int, logits: Tensor, scores: Tensor, *, process: Process | None, sample: bool) -> Tensor:
        q = self._probs((process or _untouched)(self.scores[row]), sample)
        return self._mixed(logits, scores, q, self.q_raw[row], sample)

    def _mixed(self, logits: Tensor, scores: Tensor, q: Tensor, q_raw: Tensor, sample: bool) -> Tensor:
        p = self._probs(scores, sample)
        blended = self.blend(p, q, torch.softmax(logits.float(), -1), q_raw)
        return (blended + 0 * p).log()  # a rule that compares may pass by a p of NaN, where nothing may be drawn

    def _all_probs(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The draft model's scores [B, V] -> its distributions, processed and not."""
        return self._probs(self.shaped(scores), self.process is not None), torch.softmax(scores, -1)

    def _probs(self, scores: Tensor, sample: bool) -> Tensor:
        """Processed scores [..., V] -> the distribution that a token is chosen by, one-hot where none is drawn."""
        if not sample:
            return one_hot(self.ops.pick(scores.float(), None), scores.shape[-1]).float()
        return torch.softmax(scores.float(), -1)

    def _drawn(self, probs: Tensor) -> Tensor:
        """Drafts [B, 1] of distributions [B, V]."""
        uniform = None if self.process is None else torch.rand(len(probs), device=probs.device)
        return pick_draft(probs.log(), uniform, self.ops)[:, None]


def _untouched(scores: Tensor) -> Tensor:
    return scores
