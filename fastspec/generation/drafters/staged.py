"""Staged speculative decoding: a chain of models, each of which drafts for the next, the last for the target.

Spector and Re (arXiv 2308.04623), for any number of models and with every stage's exact distribution. Stage 0 draws
tokens of its own; stage k verifies those of stage k - 1 by p / q (Leviathan et al., arXiv 2211.17192), so that what it
writes follows its own distribution, which is the q that stage k + 1 judges by. In calls that do not draw, every stage
writes its most likely tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fastspec.generation.drafters.base import Drafter, Process, Traits
from fastspec.generation.drafters.chain import Passes, over_vocabulary
from fastspec.generation.ops import Ops
from fastspec.generation.target import Target
from fastspec.generation.tree import TokenTree, Verdict
from fastspec.generation.verify import choose, pick_draft, walk, walk_drawn


def drafted(stages: int, gamma: int) -> list[int]:
    """Tokens that every stage writes at a time, stage 0 first: `gamma` the last, each below one fewer, since a stage
    adds a token to those that it verified, and one at least, so that no cache falls behind."""
    return [max(gamma - above, 1) for above in reversed(range(stages))]


def room(stages: int, gamma: int) -> tuple[int, int]:
    """Room of a stage's cache: (tokens beyond the call's capacity, nodes of its tail)."""
    return gamma + sum(drafted(stages, gamma)) + stages + 1, stages + 1 + gamma


class StagedDrafter(Drafter):
    """Chains of `gamma` drafts of models [M0, M1, ...], the smallest first, each with a cache of its own (`room`).

    `vocab` is the target's vocabulary and vocabs[k] stage k's. The models write on a tape [B, W] that holds the end of
    every row's text and, after it, their drafts. A stage's pass begins with the tokens that its cache lacks: its own
    last one and those of the verdicts of every stage above, stages + 1 - k at most. Between rounds a cache holds the
    beginning of the text and nothing else.
    """

    traits = Traits(reusable=True, reads_logits=False)
    observes_roots = True

    def __init__(
        self,
        models: Sequence[Target],
        gamma: int,
        *,
        vocab: int,
        vocabs: Sequence[int],
        ops: Ops,
        process: Process | None,
    ) -> None:
        self.models, self.gamma, self.ops, self.process = list(models), gamma, ops, process
        self.vocab, self.vocabs = vocab, list(vocabs)
        self.traits = replace(self.traits, draws=process is not None)
        self.passes = [Passes(model) for model in self.models]
        self.stages = len(self.models)
        self.kept = self.stages + 1
        """Tokens of the text that the tape begins with."""
        self.width = 2 * self.kept + sum(drafted(self.stages, gamma)) + 1
        self.nodes = self.max_path = gamma + 1

    def open(self, capacity: int) -> None:
        for model in self.models:
            model.open(capacity + room(self.stages, self.gamma)[0])

    def begin(self, ids: Tensor, counts: Tensor, features: Tensor, root: Tensor) -> None:
        """Let every stage read the text ids [B, T], of which counts [B] tokens are real; root [B] follows it."""
        for model, vocab in zip(self.models, self.vocabs, strict=True):
            model.prefill(ids.clamp(max=vocab - 1), counts)
        self.length = counts + 1
        self.alive = torch.ones_like(root, dtype=torch.bool)
        self.tape = root.new_zeros(len(root), self.width)  # no cache lacks a token before the root
        self.tape[:, self.kept - 1] = root

    def propose(self, extent: int) -> TokenTree:
        at = torch.full_like(self.length, self.kept)
        q = self._write(self.stages - 1, at, self.gamma, self.alive, extent + self.width)
        return self._chain(at, self.gamma, q)

    def observe(
        self, tree: TokenTree, verdict: Verdict, logits: Tensor, features: Tensor, active: Tensor, extent: int
    ) -> None:
        """Move the tape on after the emitted tokens, and cut the stages' caches to it."""
        at = torch.full_like(self.length, self.kept)
        self._set(at, verdict.accepted, verdict.bonus)
        self._move_on((verdict.accepted + 1) * active, active)
        self._cut(self.stages - 1, at)

    def catch_up(self, tokens: Tensor, counts: Sequence[int]) -> None:
        """Let every stage read what it lacks before each of the tokens [B, n]."""
        at, taken = torch.full_like(self.length, self.kept), torch.tensor(counts, device=tokens.device)
        for place, column in enumerate(tokens.T):
            extent = int(self.length.max())
            for stage in range(self.stages):
                self._feed(stage, at, 0, extent)
            self._set(at, torch.zeros_like(at), column)
            active = taken > place
            self._move_on(active.long(), active)

    def move_row(self, row: int, other: Drafter, source: int, count: int) -> None:
        assert isinstance(other, StagedDrafter)
        for mine, theirs in zip(self.models, other.models, strict=True):
            mine.copy_row(row, theirs, int(theirs.lengths[source]), source)
        self.tape, self.length, self.alive = self.tape.clone(), self.length.clone(), self.alive.clone()
        self.tape[row], self.length[row], self.alive[row] = other.tape[source], other.length[source], True

    def _move_on(self, gained: Tensor, active: Tensor) -> None:
        """Move the tape on by so many tokens [B], which it has after the text of the rows that are active [B]."""
        steps = gained[:, None] + torch.arange(self.width, device=gained.device)
        self.tape = self.tape.gather(1, steps.clamp(max=self.width - 1))
        self.length = self.length + gained
        self.alive = active

    def _write(self, stage: int, at: Tensor, count: int, active: Tensor, extent: int) -> Tensor | None:
        """Write `count` tokens of a stage after texts that end before the tape's slots at [B] -> their distributions
        [B, count, V], None where tokens are not drawn. Rows that are not active [B] may get fewer.

        The number of tokens that the stage below is asked for depends on those accepted so far, never on those it is
        going to draw; so they follow its distribution.
        """
        if stage == 0:
            return self._draw(at, count, extent)
        goal, probs = at + count, at.new_zeros((len(at), count + 1, self.vocab), dtype=torch.float32)
        missing = count
        while missing > 0:
            ahead = max(missing - 1, 1)
            going = active & (at < goal)
            q = self._write(stage - 1, at, ahead, going, extent)
            scores = self._feed(stage, at, ahead, extent)
            scores = scores if self.process is None else self.process(scores.flatten(0, 1)).view(scores.shape)
            tree = self._chain(at, ahead, q)
            verdict = self._judged(tree, scores)
            if self.process is not None:
                # rows after the accepted tokens are written again by the next round; those after the goal are dropped
                place = (at + count - goal)[:, None] + torch.arange(ahead + 1, device=at.device)
                place = place.clamp(max=count)[..., None].expand(-1, -1, self.vocab)
                probs.scatter_(1, place, torch.softmax(scores, -1))
            self._set(at, verdict.accepted, verdict.bonus)
            at = torch.where(going, torch.minimum(at + verdict.accepted + 1, goal), at)
            self._cut(stage, at)
            missing = int(torch.where(active, goal - at, 0).max())
        return None if self.process is None else probs[:, :count]

    def _draw(self, at: Tensor, count: int, extent: int) -> Tensor | None:
        """Tokens of stage 0, one after another."""
        q = []
        for drawn in range(count):
            scores = self._feed(0, at + drawn, 0, extent, first=drawn == 0)[:, 0]
            uniform = None
            if self.process is not None:
                scores = self.process(scores)
                uniform = torch.rand(len(scores), device=scores.device)
                q.append(torch.softmax(scores, -1))
            self.tape.scatter_(1, (at + drawn)[:, None], pick_draft(scores, uniform, self.ops)[:, None])
        return torch.stack(q, 1) if q else None

    def _feed(self, stage: int, at: Tensor, more: int, extent: int, first: bool = True) -> Tensor:
        """Feed a stage the tokens that its cache lacks of the tape up to slot at [B] and `more` -> fp32 scores after
        the text and each of them [B, 1 + more, V]. Its `first` pass may lack several tokens, a later one lacks one."""
        model, slot = self.models[stage], self.length - self.kept
        lacks = self.stages + 1 - stage if first else 1
        begin = torch.minimum(model.lengths - slot, at - 1)
        model.rewind(begin + slot)
        count = at - begin
        steps = torch.arange(lacks + more, device=at.device)
        # the rows' new tokens lie side by side; what a row feeds beyond them is forgotten again
        tokens = self.tape.gather(1, begin[:, None] + steps).clamp(max=self.vocabs[stage] - 1)
        logits = self.passes[stage](tokens, extent, count + more - 1)
        wanted = (count - 1)[:, None] + torch.arange(1 + more, device=at.device)
        return over_vocabulary(logits.gather(1, wanted[..., None].expand(-1, -1, logits.shape[2])), self.vocab)

    def _chain(self, at: Tensor, count: int, q: Tensor | None) -> TokenTree:
        """The last token of texts that end before slots at [B], and `count` drafts with their q [B, count, V]."""
        tokens = self.tape.gather(1, (at - 1)[:, None] + torch.arange(count + 1, device=at.device))
        return TokenTree.chain(tokens, q=None if q is None else torch.cat((q[:, :1], q), 1))

    def _judged(self, tree: TokenTree, scores: Tensor) -> Verdict:
        """A stage's verdict on a chain by its processed scores [B, N, V]."""
        if tree.q is None:
            return walk(tree, choose(scores, None, self.ops), self.ops)
        return walk_drawn(tree, scores, tree.q, torch.rand(tree.tokens.shape, device=scores.device), self.ops)

    def _set(self, at: Tensor, accepted: Tensor, bonus: Tensor) -> None:
        """Put a verdict's own token [B] after the accepted drafts at slots at [B]."""
        self.tape.scatter_(1, (at + accepted)[:, None], bonus.clamp(min=0)[:, None])

    def _cut(self, stage: int, at: Tensor) -> None:
        """Make the stages up to this one forget the tape from the verdict's own token, before slots at [B], on."""
        for model in self.models[: stage + 1]:
            model.rewind(torch.minimum(model.lengths, self.length - self.kept + at - 1))
