"""Files of prompts: JSON lines, an object each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastspec.errors import Unsupported
from fastspec.files import parse_json


def read_jsonl(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) of every line that is not blank, one after another. Raises Unsupported, naming the file, where it
    cannot be read or is no UTF-8, and naming the line too where that is no JSON object."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")  # not splitlines: JSON texts may hold U+2028 and the like
    except FileNotFoundError as error:
        raise Unsupported(f"{path}: no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise Unsupported(f"could not read {path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise Unsupported(f"{path}, line {number} is no JSON object: {error}") from error
        if not isinstance(row, dict):
            raise Unsupported(f"{path}, line {number} is no JSON object: {line[:60]}")
        yield number, row
