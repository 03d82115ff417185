"""Answers beside each other: a column for each strategy, all on the screen while they are written in turn."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console

COLUMN = 36
"""Characters of the screen's width that a column needs."""
PAUSE = 0.1
"""Seconds between two pictures; a terminal takes its time for each."""


def fits(console: Console, names: Sequence[str]) -> bool:
    """Whether there are several answers, and room for all."""
    return 1 < len(names) <= console.width // COLUMN


class Columns:
    """The columns as a context manager: they are drawn anew while it is open, and stay as they are at its end."""

    def __init__(self, console: Console, names: Sequence[str]) -> None:
        self.texts = {name: Text() for name in names}
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), expand=True)
        for name in names:
            table.add_column(escape(name), ratio=1, overflow="fold")
        table.add_row(*self.texts.values())
        self.live = Live(table, console=console, auto_refresh=False)
        self._drawn = 0.0

    def __enter__(self) -> Columns:
        self.live.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.live.stop()  # draws what was added since the last picture

    def column(self, name: str) -> Column:
        """What a strategy's answer is printed to."""
        return Column(self, name)

    def add(self, name: str, text: Text) -> None:
        """Append to a column."""
        self.texts[name].append_text(text)
        now = time.perf_counter()
        if now - self._drawn > PAUSE:
            self.live.refresh()
            self._drawn = now


class Column:
    """A column as a streamer's console: `print` as far as streamers use it."""

    def __init__(self, columns: Columns, name: str) -> None:
        self.columns, self.name = columns, name

    def print(self, text: str = "", *, style: str | None = None, end: str = "\n", **_: Any) -> None:
        """Append a text in a style."""
        self.columns.add(self.name, Text(text + end, style or ""))
