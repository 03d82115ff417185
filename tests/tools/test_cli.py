"""The command line on real input: one JSON object from the demo, what inspect says of the shipped head, and
refusals."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.cli import HEAD, check_demo, run
from helpers.heads import save_eagle3
from helpers.models import tiny_head
from helpers.training import save_with_tokenizer, small_target
from rich.console import Console

from fastspec.generation.stats import Stats
from fastspec.programs.compare import MeasuredAnswer
from fastspec.programs.demo import Result, print_table, run_demo


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A tiny model with its tokenizer, and a head for it, in folders."""
    folder, target = tmp_path_factory.mktemp("demo"), small_target()
    save_with_tokenizer(target, folder / "model")
    save_eagle3(tiny_head(target), folder / "head")
    return folder


def test_demo_json_is_one_object_on_stdout_and_nothing_else(saved: Path) -> None:
    """In a process of its own: transformers writes while it loads. tests/patches/test_smollm2.py has the demo's own
    model."""
    files = ["--model", str(saved / "model"), "--head", str(saved / "head")]
    command = [
        sys.executable,
        "-m",
        "fastspec",
        "demo",
        "--json",
        *files,
        "--max-new-tokens",
        "8",
        "--prompt",
        "w9 w12",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    check_demo(json.loads(done.stdout), str(saved / "model"), "w9 w12")


@pytest.mark.parametrize("terminal", [False, True])
def test_demo_counts_the_answers_and_says_at_the_start_that_the_machine_is_busy(
    saved: Path, terminal: bool, monkeypatch
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (3.0 * (os.cpu_count() or 1), 0.0, 0.0))
    console = Console(record=True, width=200, force_terminal=terminal, file=io.StringIO())
    files = {"model": str(saved / "model"), "head": str(saved / "head")}
    run_demo(prompts=["w9", "w12"], max_new_tokens=4, device="cpu", console=console, **files)
    told = console.export_text()
    places = [told.index("This machine is busy (load average 3.0 per processor)")]
    for method in ("transformers", "autoregressive", "eagle3"):
        counted = f"prompts answered by {method}"
        lines = [line for line in told.splitlines() if counted in line]
        assert any("2/2" in line for line in lines) if terminal else lines == [f"{n} of 2 {counted}" for n in range(3)]
        places.append(told.index(counted))
    assert places == sorted(places)


def test_demo_refuses_what_no_position_is_left_for(saved: Path) -> None:
    files = ["--head", str(saved / "head"), "--device", "cpu"]
    done = run("demo", str(saved / "model"), *files, "--prompt", "w9 w12", "--max-new-tokens", "511")
    assert done.exit_code == 1 and "positions for 512: shorten" in " ".join(done.output.split()), done.output


def test_demo_refuses_what_cannot_be_patched_before_transformers_answers(saved: Path, monkeypatch) -> None:
    monkeypatch.setenv("FASTSPEC_CPU", "fast")
    files = ["--head", str(saved / "head"), "--device", "cpu"]
    done = run("demo", str(saved / "model"), *files, "--prompt", "w9 w12")
    assert done.exit_code == 1 and "FASTSPEC_CPU" in done.output and "answered by" not in done.output, done.output


@pytest.mark.parametrize("command", ["demo", "bench"])
def test_a_prompt_that_is_no_utf_8_is_refused_by_its_place(saved: Path, command: str) -> None:
    files = ["--head", str(saved / "head"), "--device", "cpu"]
    done = run(command, str(saved / "model"), *files, "--prompt", os.fsdecode(b"w9 \xe9"))
    assert done.exit_code == 1 and r"the prompt has '\udce9' at position 3" in done.output, done.output


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["demo", "--max-new-tokens", "0"], 2, "max-new-tokens"),
        (["demo", "--model", "{}/model"], 1, "--head"),
        (["demo", "--model", "no-such-file.gguf", "--head", HEAD], 1, "no such GGUF file"),
        (["demo", "--model", "no/such-model-anywhere", "--head", HEAD], 1, "no/such-model-anywhere"),
        (["inspect", "no/such-head-anywhere"], 1, "no/such-head-anywhere"),
        (["inspect", HEAD, "--probe"], 2, "--model"),
        (["inspect", HEAD, "--probe-prompt", "Hello"], 2, "--probe"),
        (["inspect", HEAD, "--device", "cpu"], 2, "--probe"),
        (["inspect", HEAD, "--target", "{}/model", "--probe", "--device", "tpu"], 1, "device 'tpu' is unknown"),
        (
            ["train", "--target", "{}/model", "--output", "out", "--prompts", "p.jsonl", "--device", "tpu"],
            1,
            "device 'tpu' is unknown",
        ),
        (["tune", "--model", "some/model", "--backend", "torch"], 1, "backend 'torch' has no launches to tune"),
        (["tune", "--model", "some/model", "--backend", "cpp"], 1, "backend 'cpp' has no launches to tune"),
        (["tune", "--model", "{}/model", "--device", "tpu", "--backend", "triton"], 1, "device 'tpu' is unknown"),
        (["nonsense"], 2, "nonsense"),
    ],
)
def test_bad_arguments_get_a_message_and_no_traceback(
    saved: Path, arguments: list[str], status: int, words: str
) -> None:
    done = run(*(word.format(saved) for word in arguments))
    assert done.exit_code == status
    assert words in done.output
    assert "Traceback" not in done.output


def test_help_lists_only_what_exists() -> None:
    done = run("--help")
    assert done.exit_code == 0
    assert all(name in done.output for name in ("demo", "chat", "bench", "inspect", "train"))


def test_inspect_names_the_dialect_of_the_shipped_head() -> None:
    done = run("inspect", HEAD)
    assert done.exit_code == 0, done.output
    assert re.search(r"hidden size +576, made for a target of 576", done.output)
    assert "EAGLE-3" in done.output and re.search(r"dialect +fastspec", done.output) and "SpecForge" not in done.output


def answer(*tokens: int, seconds: float = 1.0, length: int = 1) -> MeasuredAnswer:
    return MeasuredAnswer([list(tokens)], seconds, Stats(row_rounds=1, round_tokens=length))


@pytest.mark.parametrize(("load", "told"), [(None, False), (0.2, False), (2.5, True)])
def test_the_table_says_that_the_machine_was_busy(load: float | None, told: bool) -> None:
    console = Console(record=True, width=200)
    print_table(Result("m", "cpu", "float32", ["a"], {"transformers": [answer(1, 2)]}, load), console)
    assert ("load average 2.5 per processor" in console.export_text()) == told


def test_rows_pair_each_prompt_with_its_own_baseline() -> None:
    base = [answer(1, 2), answer(3, 4, seconds=4.0), answer(5, 6, seconds=2.0)]
    fast = [answer(1, 2, seconds=0.5, length=2), answer(3, 4, length=3), answer(5, 7, seconds=2.0)]
    rows = Result("m", "cpu", "float32", ["a", "b", "c"], {"transformers": base, "eagle3": fast}).rows()
    assert [row["ratio"] for row in rows] == [1.0, 2.0]
    assert [row["identical"] for row in rows] == [True, False]
    assert rows[1]["acceptance_length"] == 2.0
