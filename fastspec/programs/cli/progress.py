"""Progress bars of long commands: in a terminal; elsewhere lines, as a log wants them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

PARTS = 10_000
"""A training run's share that is done is counted in these."""


def _bars(console: Console, *columns: Any) -> Progress:
    times = TimeElapsedColumn(), TimeRemainingColumn()
    return Progress(TextColumn("{task.description}"), BarColumn(bar_width=18), *columns, *times, console=console)


@contextmanager
def counting(what: str, console: Console | None = None) -> Iterator[Callable[[int, int], None]]:
    """A function to call with (how many are done, of how many): a bar in a terminal, else a line "3 of 8 <what>" each
    time."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, of: console.print(f"{done} of {of} {what}", markup=False, highlight=False)
        return
    with _bars(console, MofNCompleteColumn()) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, of: bars.update(task, completed=done, total=of)


class TrainingBars:
    """Bars of the answers and of the training, from what `training.train` reports. They start with the first report,
    since the other processes of a run report nothing."""

    def __init__(self, console: Console) -> None:
        self.bars = _bars(console, TextColumn("{task.percentage:>3.0f} %"), TextColumn("{task.fields[told]}"))
        self.tasks: dict[str, TaskID] = {}

    def report(self, row: dict[str, Any]) -> None:
        """A row of `train`: answers that are made, a training step with its loss, or what was added to the texts."""
        if "answered" in row:
            self._show(f"answering {row['answering']}", row["answered"], row["of"], f"{row['answered']} of {row['of']}")
        elif "loss" in row:
            self._show("training", PARTS * row["done"], PARTS, f"step {row['step']}, loss {row['loss']:.2f}")
        else:
            self.bars.console.print(row)

    def tick(self, done: float) -> None:
        """The share of the training that is done, after every step."""
        self._show("training", PARTS * done, PARTS)

    def _show(self, name: str, done: float, of: float, told: str | None = None) -> None:
        if not self.tasks:
            self.bars.start()
        if name not in self.tasks:
            self.tasks[name] = self.bars.add_task(name, total=of, told="")
        self.bars.update(self.tasks[name], completed=done, total=of)
        if told is not None:
            self.bars.update(self.tasks[name], told=told)


@contextmanager
def training_bars(console: Console | None = None) -> Iterator[TrainingBars | None]:
    """Bars for `fastspec.programs.training.train` in a terminal; None elsewhere, where its rows are printed."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    shown = TrainingBars(console)
    try:
        yield shown
    finally:
        shown.bars.stop()
