"""Prompts of an open batch that wait a few rounds for others, to be read in one pass with them.

All rows stand still while a pass reads prompts, one or eight of them in much the same time. So the time that a prompt
waits is worth less than the pass that it saves where many rows go on and other prompts are about to come. Rows that
began together end together where answers are of equal length, and bring such prompts at once: drafts, which let rows
part, cost that.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import linear_regression, median

from fastspec.generation.capture import SPENT

LONGEST = 2
"""Rounds at most that a prompt waits for others, beside one that is in flight by then."""
MARGIN = 3.0
"""Factor by which a wait has to pay, and which parting costs are multiplied by: by 1, n-grams lost 8 %."""
LATELY = 256
"""Rounds after which what joined before counts for a third."""
ROUNDS, PASSES, LEAST = 9, 32, 3
"""Rounds and passes whose times are used, and passes before any are."""
UNKNOWN = 0.5
"""Share of a pass that does not hang on its tokens, before passes of other numbers of tokens were timed."""
PARTED, AGO = 2.0, 64
"""Prompts of a pass where rows have parted, before any was counted, and rounds after drafts in which passes count."""
RENEWED = 1 / 16
"""Weight of a further pass and of a further answer."""


class Gathering:
    """Times of passes that read prompts and of rounds that read none, by which prompts wait. A pass reads up to `most`
    prompts; those that are read alone in any case, as long ones are, do not count."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.passes: deque[tuple[int, float]] = deque(maxlen=PASSES)
        """Tokens of the last passes, padding counted, and their milliseconds."""
        self.saved = 0.0
        """Milliseconds of a pass that do not hang on its tokens, which are saved where one takes the place of two."""
        self.rounds: deque[float] = deque(maxlen=ROUNDS)
        """Milliseconds of the last turns that read no prompt, from tokens to tokens."""
        self.ended: float | None = None
        """Second in which the last turn ended."""
        self.rate, self.joined, self.waited = 0.0, 0, 0
        """Prompts a round lately, those of this turn, and rounds that the oldest has waited."""
        self.group, self.since = PARTED, AGO
        """Prompts of a pass where rounds have drafts, and rounds since the last one that had some."""
        self.alike, self.length = 0.0, 0
        """Share of answers about as long as the one that ended before, and the length of the last."""

    def waits(self, ready: int, going: int) -> bool:
        """True where prompts that are `ready` wait another round, while so many rows go on: by the number of a group
        that costs all rows least, of those that wait and those that stand still, as for orders of goods to a store."""
        if self.waited >= LONGEST or ready >= self.most or not self.rounds:
            return False
        return MARGIN * ready**2 * median(self.rounds) < 2 * self.rate * going * self.saved

    def parting(self, held: int) -> float:
        """Rounds' time that every round is taken to lose where so many prompts have rows which do not end together,
        over rounds without drafts, whose rows would."""
        spent = median(self.rounds) if self.rounds else 0.0
        if held < 2 or spent <= 0:  # a clock may be coarse
            return 0.0
        passes = max(0.0, 1 / self.group - 1 / min(held, self.most))
        return MARGIN * self.alike * self.rate * passes * (1 - 1 / held) * self.saved / spent

    @contextmanager
    def reading(self, count: int, tokens: int) -> Iterator[None]:
        """Block that reads so many prompts in one pass of so many tokens."""
        began, made = time.perf_counter(), SPENT.first_runs + SPENT.captures
        yield
        self.joined += count
        if made == SPENT.first_runs + SPENT.captures:
            self.passes.append((tokens, 1e3 * (time.perf_counter() - began)))
            self.saved = self._fixed()
        if self.since < AGO:
            self.group += RENEWED * (count - self.group)

    def _fixed(self) -> float:
        if len(self.passes) < LEAST:
            return 0.0
        tokens, spent = [count for count, _ in self.passes], [ms for _, ms in self.passes]
        if len({*tokens}) == 1:
            return UNKNOWN * min(spent)
        fixed: float = linear_regression(tokens, spent).intercept
        return min(max(0.0, fixed), *spent)

    def end(self, length: int) -> None:
        """An answer of so many tokens has ended."""
        self.alike += RENEWED * ((abs(length - self.length) <= LONGEST) - self.alike)
        self.length = length

    def ran(self, waiting: bool, drafted: bool, alone: bool) -> None:
        """A turn has ended, through which prompts have waited or not, whose round had drafts or not, and whose time was
        a round's alone or not."""
        now = time.perf_counter()
        if self.ended is not None and alone:
            self.rounds.append(1e3 * (now - self.ended))
        self.ended = now
        self.rate += (self.joined - self.rate) / LATELY
        self.waited = self.waited + 1 if waiting else 0
        self.since = 0 if drafted else self.since + 1
        self.joined = 0
