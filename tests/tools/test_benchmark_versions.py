"""`benchmarks/versions.py` compares two versions case by case, and fails where their tokens differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.bench import benchmark


@pytest.fixture(scope="module")
def versions() -> Any:
    return benchmark("versions")


@pytest.fixture
def told(versions, monkeypatch):
    """What each version's process gives, by turn; the second one is half as fast."""
    tokens = {"before": "a", "after": "a"}

    def run(name, folder, args):
        slow = 2.0 if name == "after" else 1.0
        one = {"way": "greedy", "rounds": 3, "acceptance_length": 1.0, "replays": 0}
        return [
            {"assistant": "nasd", "round_ms": [slow, slow * 1.1], "tokens": tokens[name], **one},
            {"assistant": "eagle3", "round_ms": [slow], "tokens": "b", **one},
        ]

    monkeypatch.setattr(versions, "run", run)
    return tokens


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_both_versions_are_written_with_the_median_of_all_turns(versions, told, tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    versions.main(["--code", "before=x", "--code", "after=y", "--device", "cpu", "--turns", "3", "--out", str(out)])
    rows = rows_of(out)
    found = [(row["assistant"], row["code"]) for row in rows]
    assert found == [(name, code) for name in ("nasd", "eagle3") for code in ("before", "after")]
    assert [row["round_ms"] for row in rows] == [1.05, 2.1, 1.0, 2.0] and {row["shape"] for row in rows} == {
        "smollm2-135m"
    }
    assert "2.000  same tokens" in capsys.readouterr().out


def test_other_tokens_fail(versions, told, capsys):
    told["after"] = "c"
    with pytest.raises(SystemExit, match="other tokens in nasd, greedy"):
        versions.main(["--code", "before=x", "--code", "after=y", "--device", "cpu"])
    assert "DIFFERENT" in capsys.readouterr().out


def test_two_versions_are_asked_for(versions, capsys):
    with pytest.raises(SystemExit):
        versions.main(["--code", "before=x"])
    assert "two --code NAME=FOLDER are compared" in capsys.readouterr().err


@pytest.mark.slow
def test_a_version_s_own_rows_have_every_case(versions, monkeypatch):
    """This version, on a tiny shape: every assistant and way of calling decodes."""
    monkeypatch.setattr(versions, "CALLS", 1)
    rows = versions.measure("tiny", "cpu", "float32", 3, [""])
    assert [(row["assistant"], row["way"]) for row in rows] == versions.cases()
    assert all(row["rounds"] > 0 and row["round_ms"] and row["tokens"] for row in rows)
