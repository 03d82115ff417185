"""Verifiers of open batches: the choice in every row by the rule of its own prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fastspec.errors import Unsupported
from fastspec.generation.constraint import Held, Masks, nodes_of, roots_of
from fastspec.generation.drafters.base import Drafter, MixingDrafter, Place
from fastspec.generation.engine.engine import Engine, TargetT
from fastspec.generation.engine.open_batch import OpenBatch, Rule
from fastspec.generation.engine.round_program import Scored, VerifiedTree
from fastspec.generation.engine.verifier import BLIND_MIXTURE, NEVER_PICKED, FedVerifier, Text
from fastspec.generation.ops import Ops
from fastspec.generation.target import Target
from fastspec.generation.tree import TokenTree, Verdict
from fastspec.generation.verify import RowProcessor, choose, pick_allowed, walk, walk_with_history
from fastspec.kernels.verification.reference import uniform_at


class OwnRules(FedVerifier):
    """The choice by the rule of each row's prompt.

    While all rows take the likeliest tokens that is one argmax, which a captured round may hold, also of tokens that
    constraints allow; any other rule is the host's to apply, row by row. Draws are by `uniform_at`, so that a seed
    gives its tokens whatever the trees and the other rows are. Drafts must not be drawn.
    """

    walks = True

    def __init__(self, batch: OpenBatch, target: Target, ops: Ops) -> None:
        self.batch, self.target, self.ops = batch, target, ops
        self.masks = Masks(target.lengths.device)

    @property
    def place(self) -> Place:  # type: ignore[override]
        """The device's while all rows that go on have the plain rule, behind constraints or not."""
        ruled = self._ruled()
        if not ruled:
            return Place.DEVICE
        return Place.FED if all(rule.is_greedy and not rule.is_plain for _, rule in ruled) else Place.HOST

    def check(self, rule: Rule) -> None:
        """Raise Unsupported for a prompt's rule that cannot be followed: there is none."""

    def _ruled(self) -> list[tuple[int, Rule]]:
        """Rows that go on and whose rule is not the plain one, or that take no drafts in a round that has some."""
        held, drafting = zip(self.batch.active, self.batch.prompts, strict=True), self.batch.drafting
        return [
            (row, prompt.rule)
            for row, (on, prompt) in enumerate(held)
            if on and prompt is not None and not (prompt.rule.is_plain and (prompt.rule.drafts or not drafting))
        ]

    def first(self, logits: Tensor, text: Text, prompts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The first token of one prompt, by its own rule. What its processors raise goes to the caller."""
        held = self.batch.prompts[prompts[0]]
        assert held is not None
        rule, scores = held.rule, logits.float()
        if rule.constraint is not None:
            self.masks.fill(roots_of(1), scores.shape[-1], [(0, rule.constraint, [])])
            scores = self.masks.masked(scores[None])[0]
        if rule.process_at is not None:
            assert rule.history is not None
            scores = rule.process_at([0], rule.history[None], scores)
        return self._picks(rule, scores[None], text[1][:, None])[0], scores

    def __call__(self, scored: Scored) -> VerifiedTree:
        tree, ruled = scored.tree, self._ruled()
        logits, size, failed = scored.logits, scored.logits.shape[-1], self._failed
        if drawn := self._constrained(ruled, greedy=False):
            self.masks.fill(nodes_of(tree), size, drawn, failed)
            logits = self.masks.masked(logits)
        picks = choose(logits, None, self.ops)
        if not ruled:
            return VerifiedTree(scored, walk(tree, picks, self.ops), None)
        positions = self.target.lengths[:, None] + tree.depths + 1
        undrafted = [row for row, rule in ruled if not rule.drafts]
        if undrafted:
            tokens = tree.tokens.clone()
            tokens[undrafted, 1:] = NEVER_PICKED
            tree = replace(tree, tokens=tokens)
        if held := self._constrained(ruled):
            picks = pick_allowed(tree, logits, picks, held, self.masks, self.ops, failed)
        for row, rule in ruled:
            if rule.process_at is None and not rule.is_greedy:
                with self.batch.guarded(row):
                    picks[row] = self._picks(rule, logits[row : row + 1], positions[row : row + 1])[0]
        verdict = walk(tree, picks, self.ops)
        for row, rule in ruled:
            if rule.process_at is not None:
                with self.batch.guarded(row):
                    walked = self._walked(row, rule, rule.process_at, replace(scored, tree=tree), positions)
                    for mine, theirs in (
                        (verdict.path, walked.path),
                        (verdict.accepted, walked.accepted),
                        (verdict.bonus, walked.bonus),
                    ):
                        mine[row] = theirs[0]
        return VerifiedTree(scored, verdict, None)

    def fed(self, scored: Scored) -> VerifiedTree:
        picks = choose(self.masks.masked(scored.logits), None, self.ops)
        return VerifiedTree(scored, walk(scored.tree, picks, self.ops), None)

    def _held(self) -> Held:
        return self._constrained(self._ruled())

    def _failed(self, row: int, error: BaseException) -> None:
        self.batch.end_later(row, error)

    def _undrafted(self) -> list[int]:
        return [row for row, rule in self._ruled() if not rule.drafts]

    def _constrained(self, ruled: list[tuple[int, Rule]], greedy: bool = True) -> Held:
        """Constrained rows whose tokens are the likeliest, or are not, and their answers."""
        answers = self.batch.out.tokens
        return [
            (row, rule.constraint, answers[row])
            for row, rule in ruled
            if rule.constraint is not None and rule.is_greedy == greedy
        ]

    def _picks(self, rule: Rule, scores: Tensor, positions: Tensor) -> Tensor:
        """Tokens [1, N] of one prompt, of scores [1, N, V] and the tokens' positions [1, N]."""
        settings = rule.settings if rule.sample else None
        if rule.process is not None and settings is None:
            scores = rule.process(scores[0].float())[None]
        return choose(scores, self._uniform(rule, positions), self.ops, settings)

    def _walked(self, row: int, rule: Rule, process_at: RowProcessor, scored: Scored, positions: Tensor) -> Verdict:
        """The verdict on the tree of a row whose processors look at the history."""
        batch, tree, one = self.batch, scored.tree, slice(row, row + 1)
        alone = TokenTree(tree.tokens[one], tree.parents[one], tree.depths[one], tree.ancestors[one], tree.max_path)
        answer, history = batch.out.tokens[row], rule.history
        assert history is not None
        verdict, _ = walk_with_history(
            alone,
            scored.logits[one],
            self._uniform(rule, positions[one]),
            [torch.cat((history, history.new_tensor(answer)))],
            process_at,
            [batch.limits[row] - len(answer)],
            lambda _, more: batch.over(row, more),
            self.ops,
        )
        return verdict

    def _uniform(self, rule: Rule, positions: Tensor) -> Tensor | None:
        """The numbers of these positions, where the rule draws."""
        return uniform_at(positions.new_full((), rule.seed), positions) if rule.sample else None


class MixedRules(OwnRules):
    """The choice by each row's rule from the mixture of the target's and the drafter's distribution; on the host."""

    place = Place.HOST

    def __init__(self, batch: OpenBatch, target: Target, ops: Ops, drafter: MixingDrafter) -> None:
        super().__init__(batch, target, ops)
        self.drafter = drafter

    def check(self, rule: Rule) -> None:
        """Refuse rules that look at the tokens so far."""
        if rule.process_at is not None or rule.constraint is not None:
            raise Unsupported(BLIND_MIXTURE)

    def joined(self, logits: Tensor, text: Text, prompt: int, drafter: Drafter | None) -> tuple[Tensor, Tensor]:
        held = self.batch.prompts[prompt]
        assert held is not None and isinstance(drafter, MixingDrafter)
        rule = held.rule
        mixed = drafter.first(*text, logits, self._scores(rule, logits), process=rule.process, sample=rule.sample)
        return choose(mixed[None], self._uniform(rule, text[1][:, None]), self.ops)[0], mixed

    def __call__(self, scored: Scored) -> VerifiedTree:
        tree, batch = scored.tree, self.batch
        picks, positions = torch.zeros_like(tree.tokens), self.target.lengths[:, None] + tree.depths + 1
        for row, (on, prompt) in enumerate(zip(batch.active, batch.prompts, strict=True)):
            if on and prompt is not None:
                with batch.guarded(row):
                    rule, logits = prompt.rule, scored.logits[row]
                    scores = self._scores(rule, logits)
                    mixed = self.drafter.mix_row(row, logits, scores, process=rule.process, sample=rule.sample)
                    picks[row] = choose(mixed[None], self._uniform(rule, positions[row : row + 1]), self.ops)[0]
        return VerifiedTree(scored, walk(tree, picks, self.ops), None)

    def _scores(self, rule: Rule, logits: Tensor) -> Tensor:
        """Logits [N, V] as a rule's processors leave them, fp32."""
        return logits.float() if rule.process is None else rule.process(logits.float())


def rules_of(batch: OpenBatch, engine: Engine[TargetT]) -> OwnRules:
    """The verifier of an open batch's engine."""
    drafter, parts = engine.drafter, (batch, engine.target, engine.ops)
    return MixedRules(*parts, drafter) if isinstance(drafter, MixingDrafter) else OwnRules(*parts)
