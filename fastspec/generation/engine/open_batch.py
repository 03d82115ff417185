"""A batch without an end: prompts arrive while it runs, each with its own settings, and leave it one by one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from fastspec.generation.drafters.base import Process
from fastspec.generation.engine.batching import Batch
from fastspec.generation.engine.call import Request
from fastspec.generation.stats import Stats
from fastspec.generation.verify import RowProcessor
from fastspec.kernels.verification.reference import SamplingSettings


@dataclass(frozen=True, slots=True)
class Rule:
    """How the tokens of one prompt are chosen: the likeliest, or with `sample` drawn by the numbers of `seed`.

    `settings` are all that the processors do, else `process` is what they do to scores [R, V] where they look at no history, or
    `process_at` where they do; then `history` [T] is what they see before the first new token.
    """

    sample: bool = False
    seed: int = 0
    settings: SamplingSettings | None = None
    process: Process | None = None
    process_at: RowProcessor | None = None
    history: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is the likeliest token, of scores that nothing changes."""
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

    def emit(self, tokens: list[int], accepted: int, done: bool) -> None:
        """Take a round's tokens."""

    def finish(self, tokens: list[int], error: BaseException | None) -> None:
        """Take the whole answer, or what went wrong; called once."""

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody waits for the answer any more."""


class OpenBatch(Batch):
    """A batch of so many rows that prompts join as they arrive: each is known by the row that it is in.

    What one of them raises, in a callback or while it is read, ends that one alone. Rows without a prompt hold a text of one token.
    """

    def __init__(self, rows: int, stats: Stats, device: torch.device) -> None:
        blank = torch.zeros(rows, 1, dtype=torch.long, device=device)
        super().__init__(Request(blank, torch.ones_like(blank)[:, 0], [], 0, frozenset(), None, stop=self._stop, emit=self._emit), stats)
        self.alone = True
        self.prompts: list[Prompt | None] = []
        """What each row holds, or is about to."""
        self.resize(rows)
        self.queue: deque[Prompt] = deque()
        self.errors: dict[int, BaseException] = {}
        """What was raised in the middle of a round, by row."""

    def resize(self, rows: int) -> list[int]:
        """Go on with so many rows, the first of which hold the prompts that there are -> the rows that these were in."""
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
        """See `Batch.ahead`."""
        return [prompt.ids.shape[1] for prompt in islice(self.queue, count)]

    def next(self, row: int) -> tuple[int, Tensor]:
        """See `Batch.next`."""
        prompt = self.prompts[row] = self.queue.popleft()
        self.out.tokens[row], self.limits[row], self.ends[row] = [], prompt.limit, prompt.ends
        self.asked = {key: answer for key, answer in self.asked.items() if key[0] != row}
        self.errors.pop(row, None)
        return row, prompt.ids

    def expects(self, row: int) -> bool:
        """See `Batch.expects`: not where it was cancelled."""
        return self.prompts[row] is not None

    def refuse(self, prompt: int, error: BaseException) -> None:
        """End one prompt with an error, if it has not ended."""
        if self.prompts[prompt] is not None:
            self._leave(prompt, error)

    def take(self, prompt: int, tokens: list[int], accepted: int, scores: Tensor | None, logits: Tensor | None) -> None:
        """See `Batch.take`; a prompt that has ended leaves its row."""
        try:  # `guarded`, without what its generator costs a row and round
            super().take(prompt, tokens, accepted, None, None)
        except BaseException as error:
            self.errors.setdefault(prompt, error)
        if prompt in self.errors or not self.active[prompt]:
            self._leave(prompt, self.errors.pop(prompt, None))

    def row_of(self, prompt: int) -> int | None:
        """See `Batch.row_of`: prompts are submitted one by one."""
        return None

    def stopped(self, prompt: int, answer: list[int]) -> bool:
        """See `Batch.stopped`; an answer whose criteria raise is over."""
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
        """Let go of prompts that nobody waits for any more. What a row emits in a round that was launched is not read."""
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
