"""A batch without an end: prompts arrive while it runs, each with its own settings, and its number of rows follows the
load."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Generic, Protocol

import torch
from torch import Tensor

from fastspec.generation.drafters.base import Place, Process
from fastspec.generation.engine.batching import Batch
from fastspec.generation.engine.call import Request
from fastspec.generation.engine.engine import TargetT
from fastspec.generation.engine.round_program import Scored, VerifiedTree
from fastspec.generation.engine.rounds import Rounds
from fastspec.generation.engine.verifier import Text, Verifier
from fastspec.generation.ops import Ops
from fastspec.generation.stats import Stats
from fastspec.generation.target import Target
from fastspec.generation.tree import TokenTree, Verdict
from fastspec.generation.verify import RowProcessor, choose, walk, walk_with_history
from fastspec.kernels.verification.reference import SamplingSettings, uniform_at


@dataclass(frozen=True, slots=True)
class Rule:
    """How the tokens of one prompt are chosen: the likeliest, or with `sample` drawn by the numbers of `seed`.

    `settings` are all that the processors do, else `process` is what they do to scores [R, V] where they look at no
    history, or `process_at` where they do; then `history` [T] is what they see before the first new token.
    """

    sample: bool = False
    seed: int = 0
    settings: SamplingSettings | None = None
    process: Process | None = None
    process_at: RowProcessor | None = None
    history: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """True where it is the likeliest token, of scores that nothing changes."""
        return not self.sample and self.process is None and self.process_at is None


class Prompt(Protocol):
    """A prompt that arrives, and who asked."""

    ids: Tensor
    """[1, T] int64 its tokens, on the target's device."""
    limit: int
    """Tokens of its answer at most."""
    ends: frozenset[int]
    rule: Rule

    @property
    def stop(self) -> Callable[[list[int]], bool] | None:
        """Asked after every token whether the answer ends there, where there are such criteria."""

    @property
    def keeps_logits(self) -> bool:
        """True where `observe` takes the logits of its tokens."""

    def observe(self, drafted: int, logits: Tensor | None) -> None:
        """Take how many draft tokens a round had, and the raw logits [N, V] fp32 of its tokens, before these."""

    def emit(self, tokens: list[int], accepted: int, done: bool) -> None:
        """Take a round's tokens."""

    def finish(self, tokens: list[int], error: BaseException | None) -> None:
        """Take the whole answer, or what went wrong; called once."""

    @property
    def is_cancelled(self) -> bool:
        """True where nobody waits for the answer any more."""


class OpenBatch(Batch):
    """A batch of so many rows that prompts join as they arrive: each is known by the row that it is in.

    What one of them raises, in a callback or while it is read, ends that one alone. Rows without a prompt hold a text
    of one token.
    """

    def __init__(self, rows: int, stats: Stats, device: torch.device) -> None:
        blank = torch.zeros(rows, 1, dtype=torch.long, device=device)
        super().__init__(
            Request(blank, torch.ones_like(blank)[:, 0], [], 0, frozenset(), None, stop=self._stop, emit=self._emit),
            stats,
        )
        self.alone = True
        self.prompts: list[Prompt | None] = []
        """What each row holds, or is about to."""
        self.resize(rows)
        self.queue: deque[Prompt] = deque()
        self.errors: dict[int, BaseException] = {}
        """What was raised in the middle of a round, by row."""

    def resize(self, rows: int) -> list[int]:
        """Go on with so many rows, the first of which hold the prompts that there are -> the rows that these were
        in."""
        kept = [row for row, prompt in enumerate(self.prompts) if prompt is not None]
        asked = {row: index for index, row in enumerate(kept)}
        idle = rows - len(kept)
        self.asked = {(asked[row], count): answer for (row, count), answer in self.asked.items() if row in asked}
        self.active = [self.active[row] for row in kept] + [False] * idle
        self.limits = [self.limits[row] for row in kept] + [0] * idle
        self.ends = [self.ends[row] for row in kept] + [frozenset()] * idle
        self.out.tokens = [self.out.tokens[row] for row in kept] + [[] for _ in range(idle)]
        self.prompts = [self.prompts[row] for row in kept] + [None] * idle
        self.places, self.lengths = list(range(rows)), [1] * rows
        return kept

    def free(self) -> list[int]:
        """Rows without a prompt, as many as there are prompts that wait."""
        return [row for row, prompt in enumerate(self.prompts) if prompt is None][: len(self.queue)]

    def ahead(self, count: int) -> list[int]:
        """Numbers of tokens of the first `count` prompts that wait."""
        return [prompt.ids.shape[1] for prompt in islice(self.queue, count)]

    def next(self, row: int) -> tuple[int, Tensor]:
        """The prompt that joins the rounds in a free row -> its number, its tokens [1, T]."""
        prompt = self.prompts[row] = self.queue.popleft()
        self.out.tokens[row], self.limits[row], self.ends[row] = [], prompt.limit, prompt.ends
        self.asked = {key: answer for key, answer in self.asked.items() if key[0] != row}
        self.errors.pop(row, None)
        return row, prompt.ids

    def expects(self, row: int) -> bool:
        """True while the prompt on its way into a row is wanted there: not where it was cancelled."""
        return self.prompts[row] is not None

    def refuse(self, prompt: int, error: BaseException) -> None:
        """End one prompt with an error, if it has not ended."""
        if self.prompts[prompt] is not None:
            self._leave(prompt, error)

    def keeps_logits(self, prompt: int) -> bool:
        """True where the prompt in this row asks for the logits of its tokens."""
        held = self.prompts[prompt]
        return held is not None and held.keeps_logits

    def goes_on(self, longest: int) -> bool:
        """True where a round may be launched before the one in front of it is read, whose logits nobody asks for."""
        return super().goes_on(longest) and not any(map(self.keeps_logits, self.places))

    def take(
        self,
        prompt: int,
        tokens: list[int],
        accepted: int,
        scores: Tensor | None,
        logits: Tensor | None,
        drafted: int = 0,
    ) -> None:
        """Takes a round's tokens of a prompt; one that has ended leaves its row."""
        held = self.prompts[prompt]
        try:  # `guarded`, without what its generator costs a row and round
            if held is not None:
                held.observe(drafted, logits)
            super().take(prompt, tokens, accepted, None, None)
        except BaseException as error:
            self.errors.setdefault(prompt, error)
        if prompt in self.errors or not self.active[prompt]:
            self._leave(prompt, self.errors.pop(prompt, None))

    def row_of(self, prompt: int) -> int | None:
        """None: prompts are submitted one by one, and no caller has a number for one."""
        return None

    def stopped(self, prompt: int, answer: list[int]) -> bool:
        """True where a prompt's criteria end its answer; an answer whose criteria raise is over."""
        held = self.prompts[prompt]
        return held is not None and held.stop is not None and super().stopped(prompt, answer)

    @contextmanager
    def guarded(self, row: int) -> Iterator[None]:
        """What the block raises ends the prompt of this row alone, once its round is over."""
        try:
            yield
        except BaseException as error:  # a streamer's SystemExit, too, which would end the thread and nobody's waiting
            self.errors.setdefault(row, error)

    def cancel(self) -> None:
        """Let go of prompts that nobody waits for any more. What a row emits in a round that was launched is not
        read."""
        for row, prompt in enumerate(self.prompts):
            if prompt is not None and prompt.is_cancelled:
                self._leave(row, None)
        for prompt in [prompt for prompt in self.queue if prompt.is_cancelled]:
            self.queue.remove(prompt)
            prompt.finish([], None)

    def fail(self, error: BaseException) -> None:
        """End all prompts that hold rows."""
        for row, prompt in enumerate(self.prompts):
            if prompt is not None:
                self._leave(row, error)

    @property
    def held(self) -> int:
        """Rows that hold a prompt."""
        return sum(prompt is not None for prompt in self.prompts)

    def _leave(self, row: int, error: BaseException | None) -> None:
        prompt, self.prompts[row], self.active[row] = self.prompts[row], None, False
        self.stats.emitted += len(self.out.tokens[row])
        if prompt is not None:
            prompt.finish(list(self.out.tokens[row]), error)

    def _stop(self, row: int, answer: list[int]) -> bool:
        held, over = self.prompts[row], True
        assert held is not None and held.stop is not None
        with self.guarded(row):
            over = held.stop(answer)
        return over

    def _emit(self, row: int, tokens: list[int], accepted: int, done: bool) -> None:
        held = self.prompts[row]
        assert held is not None
        held.emit(tokens, accepted, done)


class OwnRules(Verifier):
    """The choice by the rule of each row's prompt.

    While all rows take the likeliest tokens that is one argmax, which a captured round may hold; any other rule is the
    host's to apply, row by row. Draws are by `uniform_at`, so that a seed gives its tokens whatever the trees and the
    other rows are. Drafts must not be drawn.
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
        return [
            (row, prompt.rule)
            for row, (on, prompt) in enumerate(held)
            if on and prompt is not None and not prompt.rule.is_plain
        ]

    def first(self, logits: Tensor, text: Text, prompts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The first token of one prompt, by its own rule. What its processors raise goes to the caller."""
        held = self.batch.prompts[prompts[0]]
        assert held is not None
        rule, scores = held.rule, logits.float()
        if rule.process_at is not None:
            assert rule.history is not None
            scores = rule.process_at([0], rule.history[None], scores)
        return self._picks(rule, scores[None], text[1][:, None])[0], scores

    def __call__(self, scored: Scored) -> VerifiedTree:
        """The choice in a scored tree, row by row where a rule asks for it."""
        tree, ruled = scored.tree, self._ruled()
        picks = choose(scored.logits, None, self.ops)
        if not ruled:
            return VerifiedTree(scored, walk(tree, picks, self.ops), None)
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
                    for mine, theirs in (
                        (verdict.path, walked.path),
                        (verdict.accepted, walked.accepted),
                        (verdict.bonus, walked.bonus),
                    ):
                        mine[row] = theirs[0]
        return VerifiedTree(scored, verdict, None)

    def seat(self, rows: Sequence[int], prompts: Sequence[int]) -> None:
        """Nothing: a rule's numbers are those of its positions."""

    def _picks(self, rule: Rule, scores: Tensor, positions: Tensor) -> Tensor:
        """Tokens [1, N] of one prompt, of scores [1, N, V] and the positions [1, N] of the tokens that are chosen
        there."""
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
        return uniform_at(torch.tensor(rule.seed, device=positions.device), positions) if rule.sample else None


PATIENCE = 16
"""After so many turns that needed fewer rows there are fewer. Where more are needed there are more at once."""


class RowCounts(Generic[TargetT]):
    """Rounds of as many rows as the load needs: 1, 2, 4, ... or `rows`. Those of `rows` are made at once, the others
    when they are first needed, and all are kept: together keys and values take the memory of twice `rows` at most.

    `make(count, other)` makes rounds of `count` rows, whose prompts are read in the same target as those of `other`, if
    any. Beside others it may give None: then these go on. Without `narrows`, and with a drafter whose rows do not move,
    there are always `rows`.
    """

    def __init__(
        self,
        make: Callable[[int, Rounds[TargetT] | None], Rounds[TargetT] | None],
        batch: OpenBatch,
        rows: int,
        *,
        narrows: bool,
    ) -> None:
        self.make, self.batch, self.rows = make, batch, rows
        self.steps = [*(1 << power for power in range((rows - 1).bit_length())), rows] if narrows else [rows]
        self.made: dict[int, Rounds[TargetT]] = {}
        self.needed: deque[int] = deque(maxlen=PATIENCE)
        """The rows that the last turns had prompts for."""
        self.room = 0
        """Committed tokens of each row that all rounds have room for."""
        self.begin()

    def begin(self) -> None:
        """Make rounds of all rows, which hold nothing; what there was is dropped."""
        self.made.clear()
        self.needed.clear()
        self.batch.resize(self.rows)
        made = self.make(self.rows, None)
        assert made is not None
        self.current = self.made[self.rows] = made
        made.engine.reserve(self.room)
        drafter = self.current.engine.drafter
        if drafter is not None and not drafter.moves:
            self.steps = [self.rows]

    def reserve(self, room: int) -> None:
        """Make room for so many committed tokens of each row in all rounds, those that are made later too."""
        self.room = room
        for each in self.made.values():
            each.engine.reserve(room)

    def turn(self) -> None:
        """A turn of the rounds that the load needs. Before these change no round is launched ahead, since prompts move
        between two."""
        self.needed.append(self.batch.held + len(self.batch.queue))
        width = next((step for step in self.steps if step >= max(self.needed)), self.rows)
        stays = width == len(self.batch.prompts) or self.current.joining is not None
        if not stays and not self.current.engine.in_flight:
            self._move(width)
            stays = True
        self.current.turn(stays)

    def _move(self, width: int) -> None:
        former = self.current
        made = self.made.get(width) or self.make(width, former)
        if made is None:
            return
        self.current = self.made[width] = made
        made.engine.reserve(self.room)
        self.batch.lengths = self.current.engine.take_rows(former.engine, self.batch.resize(width))
