"""The benchmark of a cascade's stages on several devices writes a row of each way that a request goes."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_a_request_that_stops_and_one_that_is_sent_on_are_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    script, out = importlib.import_module("cascade_devices"), tmp_path / "rows.jsonl"
    given = [
        "--small",
        "tiny",
        "--large",
        "tiny",
        "--places",
        "cpu",
        "--dtype",
        "float32",
        "--prefix",
        "5",
        "--tokens",
        "3",
    ]
    script.main([*given, "--requests", "2", "--out", str(out)])
    stopped, sent_on = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert (stopped["way"], stopped["reached"], sent_on["way"], sent_on["reached"]) == ("stopped", 0, "sent on", 1)
    assert stopped["equal"] == sent_on["equal"] == 1 and min(*stopped["ms"], *sent_on["ms"]) > 0
