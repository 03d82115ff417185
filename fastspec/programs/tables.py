"""Tables in the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table


def table(
    titles: Iterable[str], rows: Iterable[Sequence[Any]], *, numbers: bool = True, whole: str = "", **options: Any
) -> Table:
    """Table of rows. With `numbers` all columns but the first are aligned right; cells of the first and of the column
    `whole` are not wrapped then."""
    made = Table(**{"box": None, "pad_edge": False} | options)
    for at, title in enumerate(titles):
        unbroken = numbers and (at == 0 or title == whole)
        made.add_column(title, justify="right" if numbers and at else "left", no_wrap=unbroken, overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made
