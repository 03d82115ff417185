"""The benchmark of trees by device, on a tiny model: its rows, and the programs that run beside it."""

from __future__ import annotations

import importlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import tiny_head
from helpers.training import small_target, small_tokenizer

from fastspec.programs.training.save import save_head


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return importlib.import_module("cpu_tree")


def test_every_method_answers_every_prompt_beside_busy_programs(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    started: list[subprocess.Popen] = []
    popen = subprocess.Popen

    def noted(*args: Any, **options: Any) -> subprocess.Popen:
        started.append(popen(*args, **options))
        return started[-1]

    target = small_target(1, peak=0.2)
    target.save_pretrained(tmp_path / "model")
    small_tokenizer().save_pretrained(tmp_path / "model")
    save_head(tiny_head(target, taps=(1, 2, 3)), tmp_path / "head", "a card")
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in ("w9 w12 w40", "w5 w6 w7"))
    )
    monkeypatch.setattr(script.subprocess, "Popen", noted)
    out = tmp_path / "rows.jsonl"
    given = [
        "--model",
        str(tmp_path / "model"),
        "--head",
        str(tmp_path / "head"),
        "--prompts",
        str(tmp_path / "prompts.jsonl"),
    ]
    script.main([*given, "--shapes", "4,2,2", "--tokens", "5", "--backend", "torch", "--busy", "2", "--out", str(out)])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["method"], row["total_tokens"]) for row in rows] == [
        ("transformers", None),
        ("autoregressive", None),
        ("eagle3", 4),
    ] * 2
    assert all(
        row["identical"] and row["tokens"] == 5 and row["busy"] == 2 and row["backend"] == "torch" for row in rows
    )
    busy = [program for program in started if "while True: pass" in program.args]
    assert len(busy) == 2 and all(program.poll() is not None for program in busy)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "transformers",
        "autoregressive",
        "eagle3",
    ]
