"""JSON and YAML from files that anyone may have written: bounded in depth and size before anything walks over what was read."""

from __future__ import annotations

import json
from typing import Any

DEEPEST = 64
"""Lists and objects inside each other."""
LARGEST = 1 << 20
"""Characters of a YAML file; its parser takes minutes for a nesting that it then cannot read."""


def parse_json(text: str) -> Any:
    """What a JSON text holds. Raises ValueError for what is no JSON, and for more than DEEPEST lists and objects inside each other."""
    try:
        found = json.loads(text)
    except RecursionError as error:
        raise _too_deep() from error
    level = [found]
    for _ in range(DEEPEST + 1):
        level = [each for each in level if isinstance(each, (list, dict))]
        deepest, level = level, [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    if deepest:
        raise _too_deep()
    return found


def parse_yaml(text: str) -> Any:
    """What a YAML text holds, plain data alone. Raises ValueError for what is no YAML, and for what is too long, too deep, or refers to
    other parts of itself: a few such references stand for any number of values."""
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
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _too_deep() -> ValueError:
    return ValueError(f"lists and objects lie deeper than {DEEPEST} inside each other")
