"""The choice of tokens where every row has a rule of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastspec.generation.drafters.base import Place
from fastspec.generation.engine.open_batch import OpenBatch, Rule
from fastspec.generation.engine.round_program import Judged, Scored
from fastspec.generation.engine.verifier import Text, Verifier
from fastspec.generation.ops import Ops
from fastspec.generation.random_numbers import uniform_at
from fastspec.generation.target import Target
from fastspec.generation.tree import TokenTree, Verdict
from fastspec.generation.verify import RowProcessor, choose, walk, walk_with_history


class OwnRules(Verifier):
    """The choice by the rule of each row's prompt.

    While all rows take the likeliest tokens that is one argmax, which a captured round may hold; any other rule is the host's to apply, row
    by row. Draws are by `uniform_at`, so that a seed gives its tokens whatever the trees and the other rows are. Drafts must not be drawn.
    """

    def __init__(self, batch: OpenBatch, target: Target, ops: Ops) -> None:
        self.batch, self.target, self.ops = batch, target, ops

    @property
    def place(self) -> Place:  # type: ignore[override]
        """The device's while all rows that go on have the plain rule."""
        return Place.HOST if self._ruled() else Place.DEVICE

    def _ruled(self) -> list[tuple[int, Rule]]:
        """Rows that go on and whose rule is not the plain one."""
        held = zip(self.batch.active, self.batch.prompts, strict=True)
        return [(row, prompt.rule) for row, (on, prompt) in enumerate(held) if on and prompt is not None and not prompt.rule.is_plain]

    def first(self, logits: Tensor, text: Text, prompts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """See `Verifier.first`; of one prompt. What its processors raise goes to the caller."""
        held = self.batch.prompts[prompts[0]]
        assert held is not None
        rule, scores = held.rule, logits.float()
        if rule.process_at is not None:
            assert rule.history is not None
            scores = rule.process_at([0], rule.history[None], scores)
        return self._picks(rule, scores[None], text[1][:, None])[0], scores

    def __call__(self, scored: Scored) -> Judged:
        """See `Verifier`."""
        tree, ruled = scored.tree, self._ruled()
        picks = choose(scored.logits, None, self.ops)
        if not ruled:
            return Judged(scored, walk(tree, picks, self.ops), None)
        positions = self.target.lengths[:, None] + tree.depths + 1
        for row, rule in ruled:
            if rule.process_at is None:
                with self.batch.guarded(row):
                    picks[row] = self._picks(rule, scored.logits[row : row + 1], positions[row : row + 1])[0]
        verdict = walk(tree, picks, self.ops)
        for row, rule in ruled:
            if rule.process_at is not None:
                with self.batch.guarded(row):
                    walked = self._walked(row, rule, rule.process_at, scored, positions)
                    for mine, theirs in ((verdict.path, walked.path), (verdict.accepted, walked.accepted), (verdict.bonus, walked.bonus)):
                        mine[row] = theirs[0]
        return Judged(scored, verdict, None)

    def _picks(self, rule: Rule, scores: Tensor, positions: Tensor) -> Tensor:
        """Tokens [1, N] of one prompt, of scores [1, N, V] and the positions [1, N] of the tokens that are chosen there."""
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
            alone, scored.logits[one], self._uniform(rule, positions[one]), [torch.cat((history, history.new_tensor(answer)))], process_at,
            [batch.limits[row] - len(answer)], lambda _, more: batch.over(row, more), self.ops,
        )  # fmt: skip
        return verdict

    def _uniform(self, rule: Rule, positions: Tensor) -> Tensor | None:
        """The numbers of these positions, where the rule draws."""
        return uniform_at(torch.tensor(rule.seed, device=positions.device), positions) if rule.sample else None
