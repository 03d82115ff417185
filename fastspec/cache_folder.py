"""What fastspec keeps on disk about this machine, as JSON: verdicts of the self-check and launches that were tuned."""

from __future__ import annotations

import json
import os
import re
import tempfile
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

SETTING = "FASTSPEC_CACHE"
_told: set[Path] = set()


def cache_folder() -> Path:
    """Where it lies: the folder that the environment's FASTSPEC_CACHE names, else `fastspec` in XDG_CACHE_HOME, else in ~/.cache."""
    given = os.environ.get(SETTING)
    if given:
        return Path(given).expanduser()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "fastspec"


def versions() -> dict[str, str]:
    """What a measurement is good for, beside its device: torch, triton and fastspec."""
    return {name: str(import_module(name).__version__) for name in ("torch", "triton", "fastspec")}


def file_name(*words: str) -> str:
    """A name for what these words tell apart, that every file system takes."""
    return re.sub(r"[^\w.+-]+", "-", "_".join(words)) + ".json"


def read(path: Path) -> dict[str, Any] | None:
    """What is kept in a file, or None where there is none. A file that is damaged is ignored with a warning that names it."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        ignore(path, str(error))
        return None
    if not isinstance(found, dict):
        ignore(path, f"a JSON object was expected, not {type(found).__name__}")
        return None
    return found


def ignore(path: Path, why: str) -> None:
    """Warn that a file is not used."""
    warnings.warn(f"{path} is damaged and is ignored ({why}): delete it, and it is made anew", RuntimeWarning, stacklevel=2)


def write(path: Path, value: dict[str, Any]) -> bool:
    """Keep an object in a file, all of it or nothing -> whether it was kept. A folder that cannot be written to is named in a warning,
    once."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
            json.dump(value, file, indent=1)
        os.replace(file.name, path)
    except OSError as error:
        if path.parent not in _told:
            _told.add(path.parent)
            warnings.warn(
                f"fastspec cannot keep what it measured in {path.parent} ({error}), and will do it again next time: name a folder that can "
                f"be written to in the environment's {SETTING}", RuntimeWarning, stacklevel=2,
            )  # fmt: skip
        return False
    return True


def kept(kind: str) -> Iterator[Path]:
    """The files of a kind, a folder of the cache."""
    return iter(sorted((cache_folder() / kind).glob("*.json")))
