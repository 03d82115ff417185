"""benchmarks/tuned.py: its rows, with the clock and the tuner of a GPU stood in for."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch

import fastspec
from fastspec.patches.tuning.tune import Tuned, Tuning


def test_rounds_before_and_after_and_every_place_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.MonkeyPatch.context() as path:
        path.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        script = importlib.import_module("tuned")
    seen: list[tuple[str, int]] = []

    def ours(model, ids, assistant, tokens):
        seen.append((assistant, ids.shape[1]))
        return {"round_ms": float(len(seen))}

    place = Tuned("linear", (1, 48, 64, torch.float16), 9.0, 7.5, "a launch", True, 30)
    monkeypatch.setattr(script, "ours", ours)
    monkeypatch.setattr(fastspec, "tune", lambda model, length, minutes: Tuning("a device", (place,), None, 60.0 * minutes, left=length))
    script.main(["--shapes", "tiny", "--prefix", "12", "--minutes", "0.5", "--out", str(tmp_path / "rows.jsonl")])
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row["shape"], row["when"]) for row in rows] == [("tiny", when) for when in ("before", "before", "place", "after", "after")]
    assert [row["round_ms"] for row in rows if row["when"] != "place"] == [1.0, 2.0, 3.0, 4.0]
    assert seen == [("autoregressive", 12), ("eagle3", 12)] * 2
    assert (rows[2]["op"], rows[2]["before_us"], rows[2]["best_us"], rows[2]["kept"], rows[2]["left"]) == ("linear", 9.0, 7.5, True, 12)
