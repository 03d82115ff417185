"""Prompts of an open batch that wait a few rounds for others, to be read in one pass with them.

All rows stand still while a pass reads prompts. One pass over several short prompts takes little longer than over one.
Where its time grows with its tokens it saves nothing, and padding costs more. So a prompt waits where passes are
measured to save more than the wait costs, which takes many rows that go on and other prompts that are about to come.
Rows that began together end together where answers are of equal length, and bring such prompts at once.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median

from fastspec.generation.capture import SPENT

LONGEST = 2
"""Rounds at most that a prompt waits for others, beside one that is in flight by then."""
MARGIN = 3.0
"""Factor by which a wait has to pay."""
LATELY = 256
"""Rounds after which what joined before counts for a third."""
ROUNDS, PASSES, LEAST = 9, 16, 3
"""Rounds, and passes of one prompt of a width and of several, whose times are used; passes before any are."""
UNKNOWN = 0.5
"""Share of a pass that a prompt saves which joins another's, before such passes were timed."""


class Gathering:
    """Times of passes that read prompts and of rounds that read none, by which prompts wait. A pass reads up to `most`
    prompts; those that are read alone in any case, as long ones are, do not count."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.alone: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=PASSES))
        """Milliseconds of the last passes that read one prompt, by the width that it was padded to."""
        self.together: deque[tuple[tuple[int, ...], float]] = deque(maxlen=PASSES)
        """Widths that the prompts of the last other passes would have been padded to alone, and milliseconds."""
        self.saved = 0.0
        """Milliseconds that a prompt saves which joins the pass of another, its padding counted."""
        self.rounds: deque[float] = deque(maxlen=ROUNDS)
        """Milliseconds of the last turns that read no prompt, from tokens to tokens."""
        self.ended: float | None = None
        """Second in which the last turn ended."""
        self.rate, self.joined, self.waited = 0.0, 0, 0
        """Prompts a round lately, those of this turn, and rounds that the oldest has waited."""

    def waits(self, ready: int, going: int) -> bool:
        """True where prompts that are `ready` wait another round, while so many rows go on: by the number of a group
        that costs all rows least, of those that wait and those that stand still, as for orders of goods to a store."""
        if self.waited >= LONGEST or ready >= self.most or not self.rounds:
            return False
        return MARGIN * ready**2 * median(self.rounds) < 2 * self.rate * going * self.saved

    @contextmanager
    def reading(self, widths: Sequence[int]) -> Iterator[None]:
        """Block that reads prompts in one pass, which alone would be padded to these widths."""
        began, made = time.perf_counter(), SPENT.first_runs + SPENT.captures
        yield
        self.joined += len(widths)
        if made == SPENT.first_runs + SPENT.captures:
            spent = 1e3 * (time.perf_counter() - began)
            if len(widths) == 1:
                self.alone[widths[0]].append(spent)
            else:
                self.together.append((tuple(widths), spent))
            self.saved = self._saving()

    def _saving(self) -> float:
        alone = {width: median(spent) for width, spent in self.alone.items()}
        if sum(map(len, self.alone.values())) < LEAST:
            return 0.0
        found = [
            (sum(alone[width] for width in widths) - spent) / (len(widths) - 1)
            for widths, spent in self.together
            if alone.keys() >= {*widths}
        ]
        return max(0.0, median(found)) if found else UNKNOWN * min(alone.values())

    def ran(self, waiting: bool, alone: bool) -> None:
        """A turn has ended, through which prompts have waited or not, and whose time was a round's alone or not."""
        now = time.perf_counter()
        if self.ended is not None and alone:
            self.rounds.append(1e3 * (now - self.ended))
        self.ended = now
        self.rate += (self.joined - self.rate) / LATELY
        self.waited = self.waited + 1 if waiting else 0
        self.joined = 0
