"""Assistants, logits processors and storages of one's own, from a Python file."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from fastspec.errors import Unsupported

TABLES = {"ASSISTANTS": "own", "PROCESSORS": "processors", "STORAGES": "storages"}
"""Dictionary in the file -> the argument of `session.Chat` that takes it."""


def read_own(path: str | Path) -> dict[str, dict[str, Any]]:
    """Arguments of `session.Chat` from the dictionaries of a Python file, which is run. Raises Unsupported for a file
    that is not there or holds none of them, and whatever the file raises."""
    place = Path(path).expanduser()
    if not place.is_file():
        raise Unsupported(f"--own {path}: no such file")
    found = runpy.run_path(str(place))
    given = {argument: found[name] for name, argument in TABLES.items() if name in found}
    if not given or not all(isinstance(each, dict) for each in given.values()):
        raise Unsupported(
            f"--own {path} must assign dictionaries to {', '.join(TABLES)}, or to one of them: a name -> an assistant, "
            "a logits processor or its class, a class or function that makes a storage"
        )
    return given
