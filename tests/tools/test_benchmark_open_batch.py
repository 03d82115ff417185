"""The benchmark of open batches loads them by numbers of clients."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.bench import benchmark

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.mark.slow
def test_every_number_of_clients_is_a_row_of_every_turn(tmp_path: Path) -> None:
    script, out = benchmark("open_batch"), tmp_path / "rows.jsonl"
    given = "--shape tiny --rows 2 --clients 1 3 --loads plain auto --draft-vocab 64 --tokens 4 --repeats 2"
    script.main([*given.split(), "--out", str(out)])
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [(row["load"], row["clients"], row["requests"]) for row in rows] == [
        (load, clients, 6 * clients) for load in ("plain", "auto") for _ in range(2) for clients in (1, 3)
    ]
    assert all(row["warmup_seconds"] > 0 for row in rows)
    assert all(row["model"] == "tiny" and row["tokens_per_second"] > 0 and row["first_token_ms"] > 0 for row in rows)
    with pytest.raises(SystemExit):
        script.main([])


def test_every_tree_and_number_of_rows_is_a_row(tmp_path: Path) -> None:
    script, out = benchmark("open_batch"), tmp_path / "rows.jsonl"
    given = ["--shape", "tiny", "--draft-vocab", "64", "--rows", "2", "3", "--trees", "plain", "4,2,1", "--times", "2"]
    script.main([*given, "--tokens", "4", "--repeats", "1", "--out", str(out)])
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    sizes = [(row["rows"], row["tree"], row["prompts"]) for row in rows]
    assert sizes == [(2, "plain", 4), (2, "4,2,1", 4), (3, "plain", 6), (3, "4,2,1", 6)]
    for row in rows:
        assert row["model"] == "tiny" and 0 < row["rounds"] <= 8 and row["acceptance_length"] >= 1
        assert 0 < row["round_ms"] < 1e3 * min(row["seconds"])
