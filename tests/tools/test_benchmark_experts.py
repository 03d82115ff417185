"""benchmarks/experts.py in Triton's interpreter: a row for each launch, and the launches that it is told are those that run."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch

from fastspec.kernels.linear import experts


@pytest.mark.parametrize("routing", ["even", "alike"])
def test_rows_of_a_tiny_shape(tmp_path, monkeypatch, routing: str) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out, kernel = tmp_path / "rows.jsonl", experts._gate_up
    given = ["--shapes", "tiny", "--tokens", "7", "70", "--runs", "2", "--routing", routing, "--out", str(out)]
    importlib.import_module("experts").main([*given, "--launches", "32,32,16,32,64,4,3", "64,32,16,16,32,4,2"])
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [(row["tokens"], row["tile"], row["large"], row["large_stages"]) for row in rows] == [
        (7, 32, 64, 3), (7, 64, 32, 2), (70, 32, 64, 3), (70, 64, 32, 2),
    ]  # fmt: skip
    for row in rows:
        assert row["gate_up_ms"] > 0 < row["down_ms"] and row["difference"] < 2e-3 and (row["routing"], row["runs"]) == (routing, 2)
        assert row["dtype"] == "float16" and row["device"] and row["triton"]
    assert experts._gate_up is kernel


def test_without_a_choice_the_launches_that_ship_are_measured(monkeypatch, capsys) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    importlib.import_module("experts").main(["--shapes", "tiny", "--tokens", "300", "--runs", "1"])
    assert [json.loads(line)["large"] for line in capsys.readouterr().out.splitlines()] == [256, 128]
