"""Counts, times and the profile of a generate call."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias, TypeVar

import torch


@dataclass
class Profile:
    """Milliseconds of each part of each round, in order; `host` is the device's wait for the host, or the host's own
    work. `print` shows the 20, 50 and 80 % quantiles."""

    rounds: list[dict[str, float]] = field(default_factory=list)

    @property
    def parts(self) -> list[str]:
        """The names of the parts, in the order in which they first came."""
        return list(dict.fromkeys(name for each in self.rounds for name in each))

    def quantiles(self, name: str) -> tuple[float, float, float]:
        """The 20, 50 and 80 % quantiles of a part, in ms; a round without it counts as 0."""
        values = [each.get(name, 0.0) for each in self.rounds]
        if len(values) < 2:
            return (values[0],) * 3 if values else (0.0, 0.0, 0.0)
        cuts = statistics.quantiles(values, n=10, method="inclusive")
        return cuts[1], cuts[4], cuts[7]

    def __str__(self) -> str:
        if not self.rounds:
            return "no rounds: call generate(..., assistant=...) inside the block"
        whole = [sum(each.values()) for each in self.rounds]
        rows = [(name, *self.quantiles(name)) for name in self.parts]
        width = max(len(name) for name, *_ in rows)
        middle = statistics.median(whole)
        head = f"{'part':{width}}     20 %     50 %     80 %  share"
        lines = [f"{len(self.rounds)} rounds, median {middle:.3f} ms; quantiles in ms", head]
        lines += [
            f"{name:{width}} {a:8.3f} {b:8.3f} {c:8.3f} {b / middle if middle else 0.0:6.1%}" for name, a, b, c in rows
        ]
        return "\n".join(lines)

    def write_trace(self, path: str | Path) -> None:
        """Write the rounds as trace events (JSON) for Perfetto or chrome://tracing, on one track."""
        events, at = [], 0.0
        for number, each in enumerate(self.rounds):
            for name, spent in each.items():
                place = {"ts": at, "dur": 1e3 * spent, "pid": 0, "tid": 0}
                events.append({"name": name, "ph": "X", **place, "args": {"round": number}})
                at += 1e3 * spent
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


Mark: TypeAlias = tuple[str, "torch.cuda.Event | float"]
Marks: TypeAlias = tuple[Mark, ...]
"""Names of parts, each with the event or the second at which it ended; the name of a round's beginning is empty."""
Value = TypeVar("Value")


def unmarked(name: str) -> None:
    """Stands for `Clock.mark` where no clock runs."""


class Clock:
    """Marks of one round after another into a Profile; on CUDA, events in the stream, captured or not."""

    def __init__(self, profile: Profile, device: torch.device) -> None:
        self.profile, self.device, self.cuda = profile, device, device.type == "cuda"
        self.marks: list[Mark] = []
        self.began = 0.0

    def start(self) -> None:
        """A round begins on the host."""
        self.began = time.perf_counter()

    def open(self) -> None:
        """The round's program begins, or is captured: forget the marks of another."""
        self.marks = []
        self.mark("")

    def mark(self, name: str) -> None:
        """The part `name` ends here."""
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True, external=True)
            event.record()
            self.marks.append((name, event))
        else:
            self.marks.append((name, time.perf_counter()))

    def watch(self, phases: Callable[[], Value]) -> tuple[Value, Marks]:
        """Run phases, which may be captured -> their result, and their marks, which are not kept here."""
        kept, self.marks = self.marks, []
        value = phases()
        made, self.marks = tuple(self.marks), kept
        return value, made

    def add(self, marks: Marks) -> None:
        """Take marks that a graph made; the first of a round forget those of the round before."""
        opens = bool(marks) and not marks[0][0]
        self.marks = [*([] if opens else self.marks), *marks]

    def close(self) -> None:
        """The round has ended and was read back: take its times down, once the device has passed the last mark."""
        if self.cuda:
            torch.cuda.current_stream(self.device).synchronize()
        spent: dict[str, float] = {}
        for (_, before), (name, after) in pairwise(self.marks):
            spent[name] = spent.get(name, 0.0) + _milliseconds(before, after)
        spent["host"] = max(0.0, 1e3 * (time.perf_counter() - self.began) - sum(spent.values()))
        self.profile.rounds.append(spent)


def _milliseconds(before: torch.cuda.Event | float, after: torch.cuda.Event | float) -> float:
    """Between two marks of one kind."""
    if isinstance(before, float) and isinstance(after, float):
        return 1e3 * (after - before)
    assert not isinstance(before, float) and not isinstance(after, float)
    took: float = before.elapsed_time(after)
    return took


@dataclass(slots=True)
class Stats:
    """Counts over all rows of one call. Times are host seconds by phase; on CUDA of launches."""

    assistant: str = ""
    rows: int = 0
    """Rows of a round: all prompts, or as many of them as were decoded at a time."""
    joined: int = 0
    """Prompts that took the place of one that had ended."""
    reused: int = 0
    """Tokens of prompts that were not read, since a row had read them for another."""
    rounds: int = 0
    row_rounds: int = 0
    """Rounds summed over the rows that were still running."""
    emitted: int = 0
    """New tokens returned, after trimming at the end token and at the length limit."""
    round_tokens: int = 0
    """Tokens that rounds emitted, bonus included, none after an answer's end; the prefill gives the first token."""
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
    """Host seconds of the first runs of captured programs, which compile kernels; a part of `seconds`."""
    capture_seconds: float = 0.0
    """Host seconds of captures; a part of `seconds`."""
    explanations: tuple[object, ...] = ()
    """A cascade's `fastspec.cascade.decisions.Explanation` of each row."""
    prepare_seconds: float = 0.0
    """Host seconds of a `generate` call before its prefill, which are no part of `seconds`: transformers' preparation,
    the call's plan and its engine, and the wait for another call on the model."""
    seconds: float = 0.0
    """Host seconds from the prefill to the end of the last round."""
    phases: dict[str, float] = field(default_factory=dict)

    def begin(self) -> None:
        """Count anew, of the same assistant and rows."""
        blank = Stats(assistant=self.assistant, rows=self.rows)
        for each in fields(blank):
            setattr(self, each.name, getattr(blank, each.name))

    @property
    def acceptance_length(self) -> float:
        """Mean tokens that a round emits for a row, the bonus token counted (1.0 without any accepted draft). An answer
        that ends within its drafts has no bonus token."""
        return self.round_tokens / self.row_rounds if self.row_rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of the draft tokens that rounds emitted: accepted over drafted, as vLLM and published code count it.

        A tree drafts many tokens of which one path can be accepted, so this tells chains apart, and
        `acceptance_length` all drafts. 0.0 without drafts.
        """
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of the rounds of all rows that emitted a draft token at draft position 1, 2, ..."""
        rounds = sum(self.lengths)
        return [sum(self.lengths[position:]) / rounds for position in range(1, len(self.lengths))]

    def count_rows(self, rows: Sequence[tuple[int, int, int]], has_drafts: bool) -> None:
        """Count a round of running rows, by row: how many of its accepted drafts and its bonus token it emitted before
        its answer ended, its accepted drafts, and its drafts. `has_drafts` says whether any row had drafts."""
        self.row_rounds += len(rows)
        self.draft_rounds += has_drafts * len(rows)
        for emitted, accepted, drafted in rows:
            if accepted > emitted:
                accepted = emitted
            self.drafted += drafted
            self.accepted += accepted
            self.round_tokens += emitted
            self.count_accepted(accepted)

    def count_accepted(self, accepted: int) -> None:
        """Count how many drafts a round of one row accepted."""
        lengths = self.lengths
        if accepted >= len(lengths):
            lengths += [0] * (accepted + 1 - len(lengths))
        lengths[accepted] += 1

    @property
    def tokens_per_second(self) -> float:
        """Returned new tokens of all rows over `seconds`, prefill included."""
        return self.emitted / self.seconds if self.seconds else 0.0


@contextmanager
def timed(stats: Stats, phase: str) -> Iterator[None]:
    """Add the host's seconds to a phase."""
    start = time.perf_counter()
    yield
    stats.phases[phase] = stats.phases.get(phase, 0.0) + time.perf_counter() - start
