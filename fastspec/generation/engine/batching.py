"""The prompts of a call on the host: which row holds which, each answer so far, and when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from fastspec.errors import NoDistribution
from fastspec.generation.engine.call import Outcome, Request
from fastspec.generation.stats import Stats
from fastspec.generation.tree import DraftTree
from fastspec.generation.verify import Steps, measure, until_end
from fastspec.kernels.verification.reference import NO_TOKEN

Value = TypeVar("Value")
ASYNCHRONOUS_AFTER = 8
"""Rounds of a call before its rounds are asynchronous: each is launched before the one in front of it is read."""


def brought(waiting: Sequence[Value], places: Sequence[int]) -> list[Value]:
    """The prompts that wait, with those at these places in front; the others keep their order."""
    taken = {*places}
    return [*map(waiting.__getitem__, places), *(each for place, each in enumerate(waiting) if place not in taken)]


class Wants(NamedTuple):
    """Raw logits and draft trees that a prompt asks for, and whether drafts of its row may be accepted."""

    logits: bool = False
    tree: bool = False
    drafts: bool = True


class Batch:
    """The prompts of a call on the host: each answer and whether it goes on. Prompts are counted through the whole
    call, and rows of the rounds hold them in turns, where there are fewer."""

    def __init__(self, request: Request, stats: Stats) -> None:
        rows = request.prompts.shape[0]
        self.request, self.stats = request, stats
        self.places = list(range(request.width))
        """The prompt that each row holds."""
        self.limits, self.ends = [request.limit] * rows, [request.ends] * rows
        """Of each prompt, how many tokens its answer has at most, and the tokens that end it."""
        self.waiting = list(range(len(self.places), rows))
        self.counts: list[int] = request.counts.tolist()
        self.lengths: list[int] = []
        """No less than the committed tokens of each row, from the prefill on, and no more where it goes on."""
        self.out = Outcome([[] for _ in range(rows)], [[] for _ in range(rows)], [[] for _ in range(rows)], stats=stats)
        self.active = [True] * rows
        """Of each prompt, whether its answer goes on; also of those that wait."""
        self.alone = bool(request.ends) or request.rows is not None
        """True where `stop` ends an answer by itself; else all go on until each was stopped, as in transformers."""
        self.asked: dict[tuple[int, int], bool] = {}  # (prompt, tokens of its answer) -> what `stop` answered
        self.stops: dict[int, int] = {}  # prompt -> length of its answer when it was stopped, where they go on
        self.uncounted: list[tuple[Stats, int, int, int, int, int, bool]] = []
        """Rounds of answers that go on until each of them was stopped, whose common end is not known yet: prompt,
        tokens of its answer before and after, and the rest of what `count` was called with."""
        self.measures: list[list[Tensor]] = [[] for _ in range(rows)]
        self.reads_together = True
        """True where one pass may read several of the prompts that wait; not where one could not."""

    @property
    def running(self) -> list[bool]:
        """Rows of the rounds that go on."""
        return [self.active[prompt] for prompt in self.places]

    def free(self) -> list[int]:
        """Rows whose prompts have ended, as many as there are prompts that wait."""
        return [row for row, goes_on in enumerate(self.running) if not goes_on][: len(self.waiting)]

    def ahead(self, count: int) -> list[int]:
        """The tokens of the prompts that wait, of the first `count`."""
        return [self.counts[prompt] for prompt in self.waiting[:count]]

    def next(self, row: int) -> tuple[int, Tensor]:
        """The prompt that is to join the rounds in a free row -> its number, its tokens [1, T]."""
        prompt = self.waiting.pop(0)
        return prompt, self.request.prompts[prompt : prompt + 1, : self.counts[prompt]]

    def expects(self, row: int) -> bool:
        """True where the prompt that is on its way into a row is still wanted there."""
        return True

    def bring(self, places: Sequence[int]) -> None:
        """Let the waiting prompts at these places come first, in this order."""
        self.waiting = brought(self.waiting, places)

    def seat(self, row: int, prompt: int, count: int) -> None:
        """A row goes on with a prompt of so many tokens."""
        self.places[row], self.lengths[row], self.active[prompt] = prompt, count, True

    def escalate(self, error: BaseException) -> None:
        """Raise an error that ends more than one prompt."""

    def refuse(self, prompt: int, error: Exception) -> None:
        """A prompt could not join: it is the call that fails."""
        raise error

    def wants_of(self, prompt: int) -> Wants:
        """Values that a round gives a prompt beside its tokens."""
        return Wants(self.request.keep_logits)

    @property
    def wants(self) -> list[Wants]:
        """The same by row."""
        return [self.wants_of(prompt) for prompt in self.places]

    @property
    def drafting(self) -> bool:
        """True unless rows go on, none of which takes drafts."""
        return True

    @property
    def takes_drafts(self) -> list[bool] | None:
        """Rows of which drafts may be accepted; None: all."""
        return None

    def read(self, prompt: int, tokens: list[int], scores: Tensor, logits: Tensor) -> None:
        """Take a prompt's first token, of scores and logits [1, V]."""
        if self.request.measure:
            self.measures[prompt].append(measure(logits, torch.tensor(tokens, device=logits.device)))
        kept = scores if self.request.keep_scores else None
        self.take(prompt, tokens, 0, kept, logits.float() if self.wants_of(prompt).logits else None)

    def take(
        self,
        prompt: int,
        tokens: list[int],
        accepted: int,
        scores: Tensor | None,
        logits: Tensor | None,
        drafted: int = 0,
        tree: DraftTree | None = None,
    ) -> None:
        """Append tokens of a round, which had `drafted` draft tokens and this tree, to a prompt's answer until it ends;
        scores and logits are [len(tokens), V]. Raises NoDistribution where it goes on behind the last of them, and that
        is `NO_TOKEN`."""
        request, answer = self.request, self.out.tokens[prompt]
        if request.steps is not None:
            self._take_steps(request.steps, prompt, tokens, accepted)
            return
        count, ends, stops = 0, self.ends[prompt], self.has_stop(prompt)
        for token in tokens:
            if token == NO_TOKEN:
                break
            answer.append(token)
            count += 1
            stopped = stops and self.stopped(prompt, answer)
            if stopped and not self.alone:
                self._wait(prompt)
                stopped = False
            if token in ends or len(answer) >= self.limits[prompt] or stopped:
                self.active[prompt] = False
                break
        if scores is not None:
            self.out.scores[prompt] += list(scores[:count])
        if logits is not None:
            self.out.logits[prompt] += list(logits[:count])
        fails = self.active[prompt] and count < len(tokens)
        if request.emit is not None and not (fails and count == 0):
            request.emit(prompt, tokens[:count], min(accepted, count), not self.active[prompt])
        if fails:
            raise NoDistribution.after(len(answer), self.row_of(prompt))

    def row_of(self, prompt: int) -> int | None:
        """The number by which the caller knows a prompt, if any."""
        return prompt

    def _take_steps(self, steps: Steps, prompt: int, tokens: list[int], accepted: int) -> None:
        """`take` in lockstep: `steps` has ended rows and call already, and rows that have ended stay in the batch."""
        answer = self.out.tokens[prompt]
        more = until_end(tokens, steps.lengths[prompt], len(answer))
        answer += more
        self.active[prompt] = not steps.over
        if self.request.emit is not None and more:
            self.request.emit(
                prompt, more, min(accepted, len(more)), steps.over or steps.lengths[prompt] == len(answer)
            )

    @property
    def padded(self) -> list[bool]:
        """Rows that have ended and are padded, in lockstep."""
        steps = self.request.steps
        return [False] * len(self.places) if steps is None else [length is not None for length in steps.lengths]

    def has_stop(self, prompt: int) -> bool:
        """True where `stop` is asked of a prompt."""
        return self.request.stop is not None

    def stopped(self, prompt: int, answer: list[int]) -> bool:
        """True where `stop` ends a prompt at this answer; it is asked once, by the walk or after it."""
        key = prompt, len(answer)
        if self.request.stop is not None and key not in self.asked:
            self.asked[key] = self.request.stop(prompt, list(answer))
        return self.asked.get(key, False)

    def over(self, prompt: int, more: list[int]) -> bool:
        """True where an answer ends after `more` tokens of this round, the last of which is new."""
        return more[-1] in self.ends[prompt] or (self.alone and self.stopped(prompt, self.out.tokens[prompt] + more))

    def goes_on(self, longest: int) -> bool:
        """True where the round after the next one may be launched before the next one is read. It may if the call asks
        for nothing but tokens, and if some row cannot reach its limit in the next round, which emits `longest` tokens
        at most. A round that nobody needs takes as long as any, so the first ASYNCHRONOUS_AFTER rounds of a call are
        read one by one."""
        request = self.request
        plain = request.watch is None and not (request.keep_scores or request.keep_logits or request.measure)
        if not plain or self.stats.rounds < ASYNCHRONOUS_AFTER:
            return False
        return any(
            self.active[prompt] and len(self.out.tokens[prompt]) + longest < self.limits[prompt]
            for prompt in self.places
        )

    def grow(self, more: list[int], ran: list[bool], follows: int) -> None:
        """Add what a round committed, `more` tokens a row, to the lengths of the rows that `ran`. Those that ended in
        it still take part in the round that was launched already, if any, which commits up to `follows` tokens."""
        for row, (count, was, goes_on) in enumerate(zip(more, ran, self.running, strict=True)):
            if was:
                self.lengths[row] += count if goes_on else count + follows

    def _wait(self, prompt: int) -> None:
        """An answer was stopped without an end token: it goes on until every one was stopped once."""
        self.stops.setdefault(prompt, len(self.out.tokens[prompt]))
        if len(self.stops) == len(self.active):
            common = min(*self.limits, max(self.stops.values()))
            self.limits = [common] * len(self.limits)
            self.active = [len(answer) < common for answer in self.out.tokens]

    def count(self, rows: Sequence[tuple[int, int, int, int]], has_drafts: bool) -> None:
        """Count a round after `take`, by prompt: number, tokens of its answer before, accepted drafts and drafts."""
        answers = self.out.tokens
        if self.alone:
            told = [(len(answers[prompt]) - begin, accepted, drafted) for prompt, begin, accepted, drafted in rows]
            self.stats.count_rows(told, has_drafts)
            return
        for prompt, begin, accepted, drafted in rows:
            self.uncounted.append((self.stats, prompt, begin, len(answers[prompt]), accepted, drafted, has_drafts))

    def finish(self) -> None:
        """Cut what a row emitted beyond the common end, and count."""
        for stats, prompt, begin, end, accepted, drafted, has_drafts in self.uncounted:
            if begin < self.limits[prompt]:
                stats.count_rows([(min(end, self.limits[prompt]) - begin, accepted, drafted)], has_drafts)
        for prompt, limit in enumerate(self.limits):
            del self.out.tokens[prompt][limit:], self.out.scores[prompt][limit:], self.out.logits[prompt][limit:]
        self.stats.emitted = sum(map(len, self.out.tokens))
        if self.request.measure:
            parts = [torch.cat(row)[: len(answer)] for row, answer in zip(self.measures, self.out.tokens, strict=True)]
            self.out.measures = [part.cpu() for part in parts]
