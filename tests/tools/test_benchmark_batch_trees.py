"""The benchmark of trees in batches of many rows writes a row of each."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_every_tree_and_number_of_rows_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    script, out = importlib.import_module("batch_trees"), tmp_path / "rows.jsonl"
    script.main([
        "--shape", "tiny", "--draft-vocab", "64", "--rows", "2", "3", "--trees", "plain", "4,2,1", "--times", "2", "--tokens", "4",
        "--repeats", "1", "--out", str(out),
    ])  # fmt: skip
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    sizes = [(row["rows"], row["tree"], row["prompts"]) for row in rows]
    assert sizes == [(2, "plain", 4), (2, "4,2,1", 4), (3, "plain", 6), (3, "4,2,1", 6)]
    for row in rows:
        assert row["model"] == "tiny" and 0 < row["rounds"] <= 8 and row["acceptance_length"] >= 1
        assert row["tokens_per_second"] == pytest.approx(row["prompts"] * 4 / min(row["seconds"]), rel=0.01)
        assert 0 < row["round_ms"] < 1e3 * min(row["seconds"])
    with pytest.raises(SystemExit):
        script.main([])
