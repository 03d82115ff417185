"""Files: JSON and YAML of anyone, read within bounds, and what fastspec keeps on disk about this machine."""

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

from fastspec.errors import Unsupported

DEEPEST = 64
"""Lists and objects inside each other."""
LARGEST = 1 << 20
"""Characters of a YAML file; its parser takes minutes for a nesting that it then cannot read."""


def parse_json(text: str) -> Any:
    """Contents of a JSON text. Raises ValueError for none, and for lists and objects deeper than DEEPEST."""
    try:
        found = json.loads(text)
    except RecursionError as error:
        raise _too_deep() from error
    level = [found]
    for _ in range(DEEPEST + 1):
        deepest = [each for each in level if isinstance(each, (list, dict))]
        level = [inner for each in deepest for inner in (each.values() if isinstance(each, dict) else each)]
    if deepest:
        raise _too_deep()
    return found


def parse_yaml(text: str) -> Any:
    """Contents of a YAML text, plain data alone. Raises ValueError for none, for a key that a mapping has twice, and
    for what is too long, too deep, or refers to other parts of itself, which may stand for any number of values."""
    import yaml

    if len(text) > LARGEST:
        raise ValueError(f"it has {len(text)} characters, at most {LARGEST} are accepted")
    try:
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise _too_deep()
            if isinstance(event, yaml.AliasEvent):
                raise ValueError(f"*{event.anchor} refers to another part of the file: write out what it stands for")
        _refuse_repeated(yaml.compose(text, Loader=yaml.SafeLoader))
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _refuse_repeated(node: Any) -> None:
    """Raise ValueError for a key that a mapping of a YAML text, by its node, has twice."""
    if node is None or isinstance(node.value, str):
        return
    seen = set[str]()
    for each in node.value:
        key, value = each if isinstance(each, tuple) else (None, each)
        if key is not None and isinstance(key.value, str):
            if key.value in seen:
                raise ValueError(f"line {key.start_mark.line + 1} has the key {key.value!r} a second time")
            seen.add(key.value)
        _refuse_repeated(value)


def read_yaml(path: str | Path) -> Any:
    """Contents of a YAML file, as `parse_yaml` has them. Raises Unsupported for a file that cannot be read."""
    try:
        return parse_yaml(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Unsupported(f"{path} cannot be read as YAML: {error}") from error


def _too_deep() -> ValueError:
    return ValueError(f"lists and objects lie deeper than {DEEPEST} inside each other")


SETTING = "FASTSPEC_CACHE"
_told: set[Path] = set()


def cache_folder() -> Path:
    """Folder that FASTSPEC_CACHE in the environment names, else `fastspec` in XDG_CACHE_HOME, else in ~/.cache."""
    given = os.environ.get(SETTING)
    if given:
        return Path(given).expanduser()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "fastspec"


def versions() -> dict[str, str]:
    """Versions that a measurement is good for, beside its device: torch, triton and fastspec."""
    return {name: str(import_module(name).__version__) for name in ("torch", "triton", "fastspec")}


def file_name(*words: str) -> str:
    """A name for what these words tell apart, that every file system takes."""
    return re.sub(r"[^\w.+-]+", "-", "_".join(words)) + ".json"


def read(path: Path) -> dict[str, Any] | None:
    """Contents of a file that is kept, or None without it; one that cannot be read is ignored with a warning."""
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
    warnings.warn(
        f"{path} cannot be read and is ignored ({why}): delete it, and it is made anew", RuntimeWarning, stacklevel=2
    )


def write(path: Path, value: dict[str, Any]) -> bool:
    """Keep an object in a file, all of it or nothing -> True where kept; a folder that refuses is warned of once."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
            json.dump(value, file, indent=1)
        os.replace(file.name, path)
    except OSError as error:
        if path.parent not in _told:
            _told.add(path.parent)
            warnings.warn(
                f"fastspec cannot keep what it measured in {path.parent} ({error}), and will do it again next time: "
                f"name a folder that can be written to in the environment's {SETTING}",
                RuntimeWarning,
                stacklevel=2,
            )
        return False
    return True


def kept(kind: str) -> Iterator[Path]:
    """The files of a kind, a folder of the cache."""
    return iter(sorted((cache_folder() / kind).glob("*.json")))
