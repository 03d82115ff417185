"""Verifiers decide which tokens a call emits: on the device in one go, or on the host where processors, criteria or a
mixture ask for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastspec.errors import Unsupported
from fastspec.generation.drafters.base import MixingDrafter, Place, Process
from fastspec.generation.engine.batching import Batch
from fastspec.generation.engine.call import Request
from fastspec.generation.engine.round_program import Scored, VerifiedTree
from fastspec.generation.ops import Ops
from fastspec.generation.verify import RowProcessor, Steps, choose, walk, walk_drawn, walk_in_step, walk_with_history
from fastspec.kernels.verification.reference import SamplingSettings

Text = tuple[Tensor, Tensor]
"""Tokens [B, T] and how many of them are real in each row [B]."""


class Verifier(ABC):
    """Chooses the tokens of a call."""

    place: Place = Place.HOST

    @abstractmethod
    def first(self, logits: Tensor, text: Text, prompts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The first tokens of these prompts, whose text was read, from raw logits [B, V] -> tokens [B], processed
        scores [B, V] fp32."""

    @abstractmethod
    def __call__(self, scored: Scored) -> VerifiedTree:
        """The verdict on a scored tree."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule that a call chooses tokens by: the likeliest, or with `sample` one draw.

    `process` maps scores [R, V] as the call's processors do, None without any. Where temperature, top-k, top-p and
    min-p are all that they do, `settings` holds these: tokens are then drawn under them from the logits, and no scores
    are processed, unless drafts bring a distribution of their own. `place` is HOST where processors wait for the
    device.
    """

    sample: bool = False
    process: Process | None = None
    settings: SamplingSettings | None = None
    place: Place = Place.DEVICE


class Choice(Verifier):
    """The target's own choice at all nodes at once, by a rule."""

    def __init__(self, ops: Ops, rule: Rule) -> None:
        self.ops, self.rule, self.place = ops, rule, rule.place

    def uniform(self, shape: Sequence[int], device: torch.device) -> Tensor | None:
        """Random numbers in [0, 1) where the call samples."""
        return torch.rand(tuple(shape), device=device) if self.rule.sample else None

    def processed(self, logits: Tensor) -> Tensor:
        """logits [..., V] as the processors leave them: fp32, or untouched where there are none."""
        process = self.rule.process
        return logits if process is None else process(logits.flatten(0, -2).float()).view(logits.shape)

    def pick(self, scores: Tensor) -> Tensor:
        """Tokens [B] of scores [B, V]."""
        return choose(scores[:, None], self.uniform((len(scores), 1), scores.device), self.ops)[:, 0]

    def first(self, logits: Tensor, text: Text, prompts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """First tokens of prompts, and the scores that they were chosen by."""
        scores = self.processed(logits)
        return self.pick(scores), scores.float()

    def __call__(self, scored: Scored) -> VerifiedTree:
        """The likeliest token, or one draw, at every node, and the walk by them."""
        tree, uniform = scored.tree, self.uniform(scored.tree.tokens.shape, scored.logits.device)
        drawn = tree.q is not None and uniform is not None
        settings = None if drawn else self.rule.settings
        scores = self.processed(scored.logits) if settings is None else scored.logits
        return self._walked(scored, scores, uniform, settings)

    def _walked(
        self, scored: Scored, scores: Tensor, uniform: Tensor | None, settings: SamplingSettings | None
    ) -> VerifiedTree:
        tree = scored.tree
        if tree.q is not None and uniform is not None:
            return VerifiedTree(scored, walk_drawn(tree, scores, tree.q, uniform, self.ops), scores)
        return VerifiedTree(scored, walk(tree, choose(scores, uniform, self.ops, settings), self.ops), scores)


class MixedChoice(Choice):
    """The choice from a mixture of the target's distribution and the drafter's, on the host."""

    def __init__(self, ops: Ops, drafter: MixingDrafter, rule: Rule) -> None:
        super().__init__(ops, rule)
        self.drafter, self.place = drafter, Place.HOST

    def mixed_first(self, logits: Tensor, text: Text) -> Tensor:
        """Log-probabilities [B, V] of the first new tokens; the drafter reads the text for it."""
        rule = self.rule
        return self.drafter.first(*text, logits, self.processed(logits), process=rule.process, sample=rule.sample)

    def mixed(self, scored: Scored) -> Tensor:
        """Log-probabilities [B, N, V] at a tree's nodes."""
        return self.drafter.mix(scored.tree, scored.logits, self.processed(scored.logits))

    def first(self, logits: Tensor, text: Text, prompts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """First tokens of prompts by the mixture, and its log-probabilities."""
        scores = self.mixed_first(logits, text)
        return self.pick(scores), scores.float()

    def __call__(self, scored: Scored) -> VerifiedTree:
        """The walk by the mixture of both distributions."""
        uniform = self.uniform(scored.tree.tokens.shape, scored.logits.device)
        return self._walked(scored, self.mixed(scored), uniform, None)


class WithHistory(Verifier):
    """The choice node by node, for processors that look at the tokens so far."""

    def __init__(self, choice: Choice, process_at: RowProcessor, history: Sequence[Tensor], batch: Batch) -> None:
        self.choice, self.process_at, self.history, self.batch = choice, process_at, history, batch

    def first(self, logits: Tensor, text: Text, prompts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """First tokens of prompts, by processors that see their history."""
        scores = self.process_at(
            list(prompts), torch.stack([self.history[prompt] for prompt in prompts]), logits.float()
        )
        return self.choice.pick(scores), scores.float()

    def __call__(self, scored: Scored) -> VerifiedTree:
        """The walk node by node, by processors that see the tokens so far."""
        batch, tree = self.batch, scored.tree
        places, answers = batch.places, batch.out.tokens
        history = [torch.cat((h := self.history[prompt], h.new_tensor(answers[prompt]))) for prompt in places]
        left = [batch.limits[prompt] - len(answers[prompt]) if batch.active[prompt] else 0 for prompt in places]
        uniform = self.choice.uniform(tree.tokens.shape, scored.logits.device)

        def process(rows: list[int], texts: Tensor, scores: Tensor) -> Tensor:
            return self.process_at([places[row] for row in rows], texts, scores)

        def over(row: int, more: list[int]) -> bool:
            return batch.over(places[row], more)

        verdict, scores = walk_with_history(tree, scored.logits, uniform, history, process, left, over, self.choice.ops)
        return VerifiedTree(scored, verdict, scores, along_path=True)


class InLockstep(Verifier):
    """Plain decoding's own steps, which choose every token of the whole batch and say when a row has ended."""

    def __init__(self, choice: Choice, steps: Steps) -> None:
        self.choice, self.steps = choice, steps

    def first(self, logits: Tensor, text: Text, prompts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """First tokens of prompts, by a step of plain decoding."""
        choice = self.choice
        scores = choice.mixed_first(logits, text) if isinstance(choice, MixedChoice) else None
        tokens = torch.tensor(self.steps(logits, scores), device=logits.device)
        return tokens, (choice.processed(logits) if scores is None else scores).float()

    def __call__(self, scored: Scored) -> VerifiedTree:
        """The walk of all rows together, a step of plain decoding at a time."""
        scores = self.choice.mixed(scored) if isinstance(self.choice, MixedChoice) else None
        return VerifiedTree(scored, walk_in_step(scored.tree, scored.logits, self.steps, scores), None)


def verifier_of(choice: Choice, request: Request, batch: Batch) -> Verifier:
    """Verifier of a call's tokens: plain decoding's steps or processors that look at the history, where it has
    them, else `choice`. Raises Unsupported for what a mixture cannot be combined with."""
    if isinstance(choice, MixedChoice) and (request.process_at is not None or request.answers is not None):
        raise Unsupported(
            "a mixture of two models' distributions takes no processors that look at the tokens so far "
            "(repetition_penalty, "
            "no_repeat_ngram_size, ...) and no answers to verify: leave them out, or decode the large model's own "
            "distribution"
        )
    if request.steps is not None:
        return InLockstep(choice, request.steps)
    if request.process_at is not None:
        return WithHistory(choice, request.process_at, request.history, batch)
    return choice
