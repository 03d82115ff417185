"""The snippets of docs/guide/clients.md, and how one is run as it stands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import fastspec

PAGE = (Path(__file__).parents[2] / "docs" / "guide" / "clients.md").read_text(encoding="utf-8")
SET_UP, *SNIPPETS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def shown(word: str) -> str:
    """The one snippet with a word."""
    (found,) = [text for text in SNIPPETS if word in text]
    return found


@contextmanager
def patching(monkeypatch: pytest.MonkeyPatch, really: bool) -> Iterator[list[Any]]:
    """The models that the block calls `fastspec.patch` with; it leaves them alone unless they are `really` to be
    patched."""
    models, patch = [], fastspec.patch

    def seen(model: Any, **options: Any) -> Any:
        models.append(model)
        return patch(model, **options) if really else model

    with monkeypatch.context() as undone:
        undone.setattr(fastspec, "patch", seen)
        yield models


def run(snippet: str, names: dict[str, Any]) -> None:
    """Run a snippet on the page's set-up, or alone where it patches a model that it loads."""
    if "fastspec.patch(" not in snippet:
        exec(SET_UP, names)
    exec(snippet, names)
