"""The benchmark of nasd's storages runs, and its rows say what they claim."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # of a script that is run by hand


def test_rows_of_small_texts(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    storage = importlib.import_module("storage")
    out = tmp_path / "rows.jsonl"
    storage.main(["--sizes", "70", "700", "--out", str(out)])
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [(row["storage"], row["tokens"], row["fillers"]) for row in rows] == [
        (name, size, fillers) for size in (70, 700) for name in ("ngram", "one_level", "suffix") for fillers in (0, 3)
    ]
    for row in rows:
        assert all(0 < low <= middle <= high for low, middle, high in (row["insert_us"], row["look_us"], row["grow_16_us"]))
    for few, many in zip(rows[:6], rows[6:], strict=True):
        assert 0 < few["memory_bytes"] < many["memory_bytes"] and 0 < few["disk_bytes"] < many["disk_bytes"]


def test_words_are_numbered_as_they_occur(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    storage = importlib.import_module("storage")
    (tmp_path / "a.md").write_text("one two, one")
    (tmp_path / "b.py").write_text("two\n  three")
    assert storage.words(tmp_path, 7) == [0, 1, 2, 0, 1, 3, 4]
    assert storage.words(tmp_path, 3) == [0, 1, 2]
    assert [token for *_, token in storage.filled([4, 5])] == [4, 5]
