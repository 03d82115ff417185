"""What a generate call did: counts and times, filled by the loop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields


@dataclass(slots=True)
class Stats:
    """Counts over all rows of one call. Times are host seconds by phase; on CUDA they are launch times, not kernel times."""

    assistant: str = ""
    rows: int = 0
    """Rows of a round: all prompts, or as many of them as were decoded at a time."""
    joined: int = 0
    """Prompts that took the place of one that had ended."""
    rounds: int = 0
    row_rounds: int = 0
    """Rounds summed over the rows that were still running."""
    emitted: int = 0
    """New tokens returned, after trimming at the end token and at the length limit."""
    round_tokens: int = 0
    """Tokens that rounds emitted, bonus included, none behind an answer's end; the first token comes from the prefill."""
    accepted: int = 0
    """Draft tokens among these."""
    drafted: int = 0
    draft_rounds: int = 0
    """Rounds that had drafts, summed over the rows that were still running."""
    lengths: list[int] = field(default_factory=list)
    """`lengths[i]` counts the rounds, summed over the rows, that emitted exactly i draft tokens."""
    replays: int = 0
    """Replays of captured graphs: one a round where rounds are captured whole."""
    first_run_seconds: float = 0.0
    """Host seconds of first runs of what is captured, compiling included where kernels were not compiled yet; 0 where nothing is."""
    capture_seconds: float = 0.0
    """Seconds of captures. Both are 0 in a call that finds its graphs, and are within `seconds` in one that does not."""
    explanations: tuple[object, ...] = ()
    """What a cascade did with each row: `fastspec.cascade.decisions.Explanation`."""
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)

    def begin(self) -> None:
        """Count anew, of the same assistant and rows."""
        blank = Stats(assistant=self.assistant, rows=self.rows)
        for each in fields(blank):
            setattr(self, each.name, getattr(blank, each.name))

    @property
    def acceptance_length(self) -> float:
        """Mean tokens that a round emits for a row, the bonus token counted (1.0 without any accepted draft). An answer that ends within
        its drafts has nothing behind its end, nor a bonus token."""
        return self.round_tokens / self.row_rounds if self.row_rounds else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """For draft position 1, 2, ...: the share of rounds, over all rows, that emitted a draft token there. Their sum is the
        acceptance length less the share of rounds with a bonus token."""
        rounds = sum(self.lengths)
        return [sum(self.lengths[position:]) / rounds for position in range(1, len(self.lengths))]

    def count_round(self, emitted: int, accepted: int, drafted: int, has_drafts: bool) -> None:
        """Count one round of one row that was still running, of whose `accepted` drafts and bonus token it `emitted` so many before its
        answer ended; `has_drafts` says whether any row of it had drafts."""
        accepted = min(accepted, emitted)
        self.row_rounds += 1
        self.drafted += drafted
        self.draft_rounds += has_drafts
        self.accepted += accepted
        self.count_accepted(accepted)
        self.round_tokens += emitted

    def count_accepted(self, accepted: int) -> None:
        """Count how many drafts a round of one row accepted."""
        self.lengths += [0] * (accepted + 1 - len(self.lengths))
        self.lengths[accepted] += 1

    @property
    def tokens_per_second(self) -> float:
        """Returned new tokens of all rows over the seconds of the whole call, prefill included."""
        return self.emitted / self.seconds if self.seconds else 0.0


@contextmanager
def timed(stats: Stats, phase: str) -> Iterator[None]:
    """Add the host's seconds to a phase."""
    start = time.perf_counter()
    yield
    stats.phases[phase] = stats.phases.get(phase, 0.0) + time.perf_counter() - start
