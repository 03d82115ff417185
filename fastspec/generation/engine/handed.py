"""Answers that another model gave, verified as drafts between the rounds of an open batch."""

from __future__ import annotations

from itertools import islice
from typing import Generic

import torch
from torch import Tensor

from fastspec.generation.drafters.given_text import GivenText, Transcript
from fastspec.generation.engine.engine import Engine, TargetT
from fastspec.generation.engine.joining import Joining
from fastspec.generation.engine.open_batch import OpenBatch, Prompt
from fastspec.generation.engine.own_rules import OwnRules
from fastspec.generation.engine.rounds import AHEAD, Rounds, take
from fastspec.generation.engine.verifier import ChoiceRule
from fastspec.generation.stats import Stats


class HandedAnswer(Generic[TargetT]):
    """Verification of the answer that a prompt was handed, a pass at a time, by a target of one row that has read the
    prompt. `engine` is that target's, for no other prompt meanwhile; tokens go to the prompt as in its row."""

    def __init__(self, engine: Engine[TargetT], prompt: Prompt, joining: Joining) -> None:
        self.engine, self.joining = engine, joining
        ids, counts = joining.ids, torch.tensor([joining.done], device=joining.ids.device)
        self.batch = OpenBatch(1, Stats(), ids.device)
        self.batch.queue.append(prompt)
        self.batch.next(0)
        self.batch.seat(0, 0, joining.done)
        self.verifier = OwnRules(self.batch, engine.target, engine.ops)
        root, self.scores = self.verifier.first(joining.logits, (ids, counts), [0])
        features = joining.features[-1] if joining.features else ids.new_empty(1, 1, 0)
        self.read = Transcript(ids[:, :0], counts - counts, features[:, :0] if features.shape[2] else features[:, :1])
        begun = root.clamp(min=0)
        self.given = GivenText([prompt.handed], ids.device)
        self.given.begin(ids, counts, features, begun)
        engine.drafter = self.given
        engine.begin(begun)
        self.batch.read(0, root.tolist(), self.scores, joining.logits)

    @property
    def goes_on(self) -> bool:
        """True where more of the answer is to be verified."""
        return self.given.goes_on and self.batch.active[0]

    def verify(self) -> int:
        """Run one pass -> its tokens."""
        engine, batch = self.engine, self.batch
        engine.state.activate(batch.running)
        take(engine.step(max(batch.lengths), batch.stats, self.verifier), engine, batch)
        self.read.add(engine.last.tree, engine.last.verdict, engine.last.features, [True])
        return engine.last.tree.tokens.shape[1]

    def end(self) -> tuple[Tensor, Tensor]:
        """Let prompt and drafter go on behind what was kept -> the last token [1], and scores [1, V] of the first."""
        ids, _, features = self.read.whole()
        self.joining.take_over(ids, features)
        return self.engine.state.root.clone(), self.scores


class VerifyingRounds(Rounds[TargetT]):
    """Rounds of an open batch whose prompts may bring an answer. It is verified by the target that has read the prompt,
    before this takes a row, in passes that count as tokens of the prompt. What is kept of it, and the rest as a hint,
    goes to the row's drafter. Such prompts are read one by one."""

    batch: OpenBatch
    frees_early = False  # an answer that ends while it is verified takes no row
    handed: HandedAnswer[TargetT] | None = None
    verifying: Engine[TargetT] | None = None
    """The engine of the target that prompts are read by, which stays the same."""

    def _gather(self, room: int | None) -> int:
        if any(prompt.handed for prompt in islice(self.batch.queue, AHEAD)):
            return 1
        return super()._gather(room)

    def _arrive(self, joining: Joining, first: tuple[Tensor, Tensor] | None) -> int:
        prompt = self.batch.prompts[joining.prompt]
        if prompt is None or not prompt.handed:
            return super()._arrive(joining, first)
        if self.handed is None or self.handed.joining is not joining:
            if self.verifying is None or self.verifying.target is not joining.target:
                assert isinstance(joining.target, type(self.engine.target))
                self.verifying = Engine(joining.target, None, self.engine.ops, ChoiceRule(), rows=1)
            self.handed = HandedAnswer(self.verifying, prompt, joining)
        spent = self.handed.verify() if self.handed.goes_on else 0
        if not self.handed.goes_on:
            handed, self.handed, self.joining = self.handed, None, None
            self._take_over(handed, prompt)
        return spent

    def _take_over(self, handed: HandedAnswer[TargetT], prompt: Prompt) -> None:
        """Give a prompt whose answer was verified its row, unless it has ended with that."""
        batch, joining, tokens = self.batch, handed.joining, handed.batch.out.tokens[0]
        row = joining.row
        if not handed.batch.active[0]:
            batch.ended(row, len(tokens))
            return
        first = handed.end()
        if joining.drafter is not None:
            joining.drafter.hint([prompt.handed])
        root, _ = joining.begin(self.verifier, first)
        batch.give_away(row)
        self.engine.admit(row, joining.target, joining.drafter, root, joining.done)
        if self.engine.joins:
            text = joining.ids[0, : joining.done].cpu()
            self.engine.join(row, text, int(root), joining.prefix, prompt.handed)
        batch.out.tokens[row] += tokens
        batch.seat(row, joining.prompt, joining.done, joining.prefix)
        self.verifier.seat([row], [joining.prompt])
        batch.stats.joined += 1
