"""What the parts of a round take: marks between them, by CUDA events also inside a captured graph, by the host's clock elsewhere."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias, TypeVar

import torch


@dataclass
class Profile:
    """Milliseconds of each part of each round, in order; `host` is what the device waited for the host, or the host's own work.

    `print` shows the 20, 50 and 80 % quantiles. `write_trace` writes them for Perfetto or chrome://tracing.
    """

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
        lines += [f"{name:{width}} {a:8.3f} {b:8.3f} {c:8.3f} {b / middle if middle else 0.0:6.1%}" for name, a, b, c in rows]
        return "\n".join(lines)

    def write_trace(self, path: str | Path) -> None:
        """Write the rounds as trace events (JSON), one after another on one track."""
        events, at = [], 0.0
        for number, each in enumerate(self.rounds):
            for name, spent in each.items():
                events.append({"name": name, "ph": "X", "ts": at, "dur": 1e3 * spent, "pid": 0, "tid": 0, "args": {"round": number}})
                at += 1e3 * spent
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


Mark: TypeAlias = tuple[str, "torch.cuda.Event | float"]
Marks: TypeAlias = tuple[Mark, ...]
"""Names of parts, each with the event or the second at which it ended; the name of a round's beginning is empty."""
Value = TypeVar("Value")


def unmarked(name: str) -> None:
    """Stands for `Clock.mark` where no clock runs."""


class Clock:
    """Marks of one round after another into a Profile. On CUDA its events are recorded in the stream, captured or not."""

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
        """Run phases -> what they return, and the marks that they made, which are not kept here: the phases may be being captured."""
        kept, self.marks = self.marks, []
        value = phases()
        made, self.marks = tuple(self.marks), kept
        return value, made

    def add(self, marks: Marks) -> None:
        """Take marks that were made before, or by a graph; the first of a round forget those of the round before."""
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
