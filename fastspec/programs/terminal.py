"""Output of programs in a terminal: tables, and progress bars of long commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
from rich.table import Column, Table


def table(
    titles: Iterable[str | Column], rows: Iterable[Sequence[Any]], *, numbers: bool = True, whole: str = "", **more: Any
) -> Table:
    """Table of rows, its columns as given or by title: with `numbers` all but the first are aligned right, and cells of
    the first and of the column `whole` are not wrapped."""

    def column(at: int, title: str) -> Column:
        unbroken = numbers and (at == 0 or title == whole)
        return Column(title, justify="right" if numbers and at else "left", no_wrap=unbroken, overflow="fold")

    columns = [column(at, each) if isinstance(each, str) else each for at, each in enumerate(titles)]
    made = Table(*columns, **{"box": None, "pad_edge": False} | more)
    for row in rows:
        made.add_row(*row)
    return made


PARTS = 10_000
"""A training run's share that is done is counted in these."""


def _bars(console: Console, *columns: Any, per_second: float = 10) -> Progress:
    shown = TextColumn("{task.description}"), BarColumn(bar_width=18), *columns
    return Progress(*shown, TimeElapsedColumn(), TimeRemainingColumn(), console=console, refresh_per_second=per_second)


@contextmanager
def counting(what: str, console: Console | None = None, per_second: float = 10) -> Iterator[Callable[[int, int], None]]:
    """A function to call with (done, of how many): a bar in a terminal, else a line "3 of 8 <what>" each time."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, of: console.print(f"{done} of {of} {what}", markup=False, highlight=False)
        return
    with _bars(console, MofNCompleteColumn(), per_second=per_second) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, of: bars.update(task, completed=done, total=of)


@contextmanager
def training_bars(console: Console | None = None) -> Iterator[dict[str, Callable[..., None]]]:
    """`report` and `tick` of `fastspec.programs.training.train` as bars in a terminal, nothing elsewhere; they start
    with the first report, which only the main process has."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield {}
        return
    bars = _bars(console, TextColumn("{task.percentage:>3.0f} %"), TextColumn("{task.fields[told]}"))
    tasks: dict[str, TaskID] = {}

    def show(name: str, done: float, of: float, **told: Any) -> None:
        if not tasks:
            bars.start()
        if name not in tasks:
            tasks[name] = bars.add_task(name, total=of, told="")
        bars.update(tasks[name], completed=done, total=of, **told)

    def report(row: dict[str, Any]) -> None:
        if "answered" in row:
            done, of = row["answered"], row["of"]
            show(f"answering {row['answering']}", done, of, told=f"{done} of {of}")
        elif "loss" in row:
            show("training", PARTS * row["done"], PARTS, told=f"step {row['step']}, loss {row['loss']:.2f}")
        else:
            bars.console.print(row)

    try:
        yield {"report": report, "tick": lambda done: show("training", PARTS * done, PARTS)}
    finally:
        bars.stop()
