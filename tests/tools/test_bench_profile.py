"""`fastspec bench --profile`: one more pass over the first prompt for every assistant, its table and its trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.training import save_with_tokenizer, small_target
from typer.testing import CliRunner

from fastspec.programs.bench import run_bench
from fastspec.programs.cli.app import app

pytestmark = pytest.mark.usefixtures("quick")
torch.set_num_threads(1)  # models this small lose time to more, and workers share the cores


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A tiny model with its tokenizer, and a file of two prompts, in a folder."""
    folder = tmp_path_factory.mktemp("bench")
    save_with_tokenizer(small_target(1, peak=0.2), folder / "model")
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in ("w9 w12 w40", "w5 w6 w7 w8 w9"))
    )
    return folder


def bench(saved: Path, *arguments: str):
    command = [
        "bench",
        "--model",
        str(saved / "model"),
        "--prompts",
        str(saved / "prompts.jsonl"),
        "--max-new-tokens",
        "12",
    ]
    methods = ["--methods", "prompt-lookup,autoregressive,nasd"]
    return CliRunner().invoke(app, [*command, *methods, *arguments], env={"COLUMNS": "160"})


def events(path: Path) -> set[str]:
    return {event["name"] for event in json.loads(path.read_text())["traceEvents"]}


def test_every_assistant_has_a_table_and_a_trace_beside_the_rows(saved: Path, tmp_path: Path) -> None:
    done = bench(saved, "--profile", "--out", str(tmp_path / "rows.jsonl"))
    assert done.exit_code == 0, done.output
    traces = [tmp_path / f"TRACE-{name}.json" for name in ("autoregressive", "nasd")]
    assert sorted(tmp_path.iterdir()) == [*traces, tmp_path / "rows.jsonl"]  # none of transformers' own methods
    assert all(events(path) >= {"draft", "score", "choose", "commit", "host"} for path in traces)
    after = done.output[done.output.index("quantiles over the prompts") :]
    for path in traces:
        name = path.stem.removeprefix("TRACE-")
        table = after[after.index(f"\n{name}\n") : after.index(f"trace: {path}")]
        assert "rounds, median" in table and "score" in table and "share" in table
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 2 * 4  # what is profiled is no row


def test_without_a_file_of_rows_traces_go_to_the_current_directory(saved: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = bench(saved, "--profile")
    assert done.exit_code == 0, done.output
    assert events(tmp_path / "TRACE-nasd.json") and "trace: TRACE-nasd.json" in done.output


def test_without_the_option_nothing_is_profiled(saved: Path, tmp_path: Path) -> None:
    done = bench(saved, "--out", str(tmp_path / "rows.jsonl"))
    assert done.exit_code == 0, done.output
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"] and "trace:" not in done.output


def test_json_is_refused_by_name(saved: Path) -> None:
    done = bench(saved, "--profile", "--json")
    assert done.exit_code == 2 and "--profile" in done.output and "--json" in done.output


def test_a_trace_that_cannot_be_written_is_an_error(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "TRACE-autoregressive.json").mkdir()
    done = bench(saved, "--profile", "--out", str(tmp_path / "rows.jsonl"))
    assert done.exit_code == 1 and "could not write the trace" in done.output and "Traceback" not in done.output


def test_the_first_batch_is_profiled(saved: Path) -> None:
    found = {}
    rows = run_bench(
        prompts=[saved / "prompts.jsonl"],
        model=str(saved / "model"),
        methods=["autoregressive"],
        max_new_tokens=9,
        batch=2,
        on_profile=found.__setitem__,
    )
    assert set(found) == {"autoregressive"} and len(found["autoregressive"].rounds) == rows[-1]["rounds"] == 8
