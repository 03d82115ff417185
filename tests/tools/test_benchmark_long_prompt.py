"""The benchmark of long prompts runs on the CPU and its rows add up."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # of a script that is run by hand


def test_rows_of_a_tiny_model(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    long_prompt = importlib.import_module("long_prompt")
    out = tmp_path / "rows.jsonl"
    for name in ("NARROW", "WIDE"):
        monkeypatch.setattr(
            long_prompt.prompt_parts, name, getattr(long_prompt.prompt_parts, name)
        )  # which the script sets
    given = ["--shape", "tiny", "--prompts", "70", "33", "--tokens", "5", "--peer-most", "70", "--parts", "16", "64"]
    long_prompt.main([*given, "--out", str(out)])
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [(row["method"], row["prompt"]) for row in rows] == [
        ("transformers", 33),
        ("transformers", 70),
        *[(method, prompt) for _ in range(2) for method in ("autoregressive", "eagle3") for prompt in (33, 70)],
    ]
    assert [row.get("part") for row in rows] == [None] * 2 + [16] * 4 + [64] * 4
    for row in rows:
        # 6 layers of two key heads of 16 channels in fp32
        assert row["keys_and_values_mib"] == round(2 * 6 * 2 * 16 * 4 * (row["prompt"] + 5) / 2**20)
        assert row["seconds"] > 0 and row["new_tokens"] == 5
        assert row["method"] == "transformers" or (0 < row["prefill_s"] < row["seconds"] and row["prefill_again_s"] > 0)
