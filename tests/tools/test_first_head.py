"""The snippet of docs/train/first_head.md trains a head that drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.pages import snippets
from helpers.training import small_target, small_tokenizer

import fastspec

SNIPPET = next(each for each in snippets(Path("docs/train/first_head.md")) if each.language == "python")
LINES = 40


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, loaded: tuple[Any, Any]) -> Any:
    """What `report` says after the snippet, of a model that stands for the one that it names."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("fastspec.models.load_model", lambda name: loaded)
    exec(compile(SNIPPET.text, SNIPPET.name, "exec"), {})
    assert (folder / "first-head" / "model.safetensors").is_file()
    return fastspec.report(loaded[0]).last


def test_the_snippet_trains_a_head_that_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(SNIPPET.text.splitlines()) <= LINES
    last = run(tmp_path, monkeypatch, (small_target(), small_tokenizer()))
    assert last.acceptance_length > 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_snippet_trains_a_head_for_the_real_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smollm2) -> None:
    last = run(tmp_path, monkeypatch, smollm2)
    fastspec.unpatch(smollm2[0])
    assert last.rounds > 1 and last.emitted > 32
