"""The command line on real input: one JSON object from the demo, what inspect says of the shipped head, and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from fastspec.cli import app
from fastspec.demo import PROMPTS, MarkedStreamer, Result, Run
from fastspec.patches import heads

HEAD = "smollm2-135m-instruct"


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_demo_json_is_one_object_on_stdout_and_nothing_else() -> None:
    command = [sys.executable, "-m", "fastspec.cli", "demo", "--json", "--max-new-tokens", "24", "--prompt", "Name two colours."]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert set(found) == {"model", "device", "dtype", "prompts", "rows"}
    assert found["prompts"] == ["Name two colours."]
    assert [row["method"] for row in found["rows"]] == ["transformers", "autoregressive", "eagle3"]
    for row in found["rows"]:
        assert set(row) == {"method", "tokens_per_second", "ratio", "acceptance_length", "identical"}
        assert row["tokens_per_second"] > 0
        assert row["identical"] is True or found["dtype"] != "float32"
    assert found["rows"][0]["ratio"] == 1.0
    assert found["rows"][1]["acceptance_length"] == 1.0
    assert found["rows"][2]["acceptance_length"] > 1.0


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["demo", "--max-new-tokens", "0"], 2, "max-new-tokens"),
        (["demo", "--model", "some/model"], 1, "--head"),
        (["demo", "--model", "no-such-file.gguf", "--head", HEAD], 1, "no such GGUF file"),
        (["demo", "--model", "no/such-model-anywhere", "--head", HEAD], 1, "no/such-model-anywhere"),
        (["inspect", "no/such-head-anywhere"], 1, "no/such-head-anywhere"),
        (["inspect", HEAD, "--probe"], 2, "--target"),
        (["inspect", HEAD, "--probe-prompt", "Hello"], 2, "--probe"),
        (["nonsense"], 2, "nonsense"),
    ],
)
def test_bad_arguments_get_a_message_and_no_traceback(arguments: list[str], status: int, words: str) -> None:
    done = run(*arguments)
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
    assert "EAGLE-3" in done.output and "specforge" in done.output


@pytest.mark.parametrize("prompt", [None, "Name three rivers."])
@pytest.mark.parametrize("template", [True, False])
def test_probe_measures_on_the_answer_to_a_prompt(smollm2, monkeypatch, prompt: str | None, template: bool) -> None:
    seen, real = [], heads.probe_head

    def probe_head(path: str, model: Any, ids: torch.Tensor) -> Any:
        seen.append(smollm2[1].decode(ids[0]))
        return real(path, model, ids)

    monkeypatch.setattr("fastspec.models.load_model", lambda name: smollm2)
    monkeypatch.setattr(heads, "probe_head", probe_head)
    monkeypatch.setattr(heads, "PROBE_TOKENS", 4)
    monkeypatch.setattr(heads, "_readings", lambda checkpoint, layers: [checkpoint])
    if not template:
        monkeypatch.setattr(smollm2[1], "chat_template", None)
    done = run("inspect", HEAD, "--target", "any", "--probe", *(("--probe-prompt", prompt) if prompt else ()))
    assert done.exit_code == 0, done.output
    assert "agreement" in done.output and "as declared" in done.output
    text = prompt or PROMPTS[0][1]
    assert text in seen[0]
    assert ("<|im_start|>assistant" in seen[0]) == template and (seen[0] == text) != template


def test_probe_says_what_is_wrong_with_an_empty_prompt(smollm2, monkeypatch) -> None:
    monkeypatch.setattr("fastspec.models.load_model", lambda name: smollm2)
    monkeypatch.setattr(smollm2[1], "chat_template", None)
    done = run("inspect", HEAD, "--target", "any", "--probe", "--probe-prompt", "")
    assert done.exit_code == 2
    assert "--probe-prompt" in done.output and "Traceback" not in done.output


def test_accepted_tokens_are_marked_and_the_text_is_whole(smollm2) -> None:
    tokenizer = smollm2[1]
    text = "def naïve(x):\n    return x  # 🙂 done"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    console = Console(record=True, width=400, force_terminal=True, file=open("/dev/null", "w"))  # noqa: SIM115
    streamer = MarkedStreamer(tokenizer, console, style="bold")
    streamer.put(torch.tensor([[1, 2, 3]]))
    for start in range(0, len(ids), 3):
        chunk = ids[start : start + 3]
        streamer.on_round(chunk, len(chunk) - 1)
        for token in chunk:
            streamer.put(torch.tensor([token]))
    streamer.end()
    styled = console.export_text(clear=False, styles=True)
    assert console.export_text().rstrip("\n") == text
    assert "\x1b[1m" in styled


def test_rows_pair_each_prompt_with_its_own_baseline() -> None:
    base = [Run([1, 2], 1.0, 1.0), Run([3, 4], 4.0, 1.0), Run([5, 6], 2.0, 1.0)]
    fast = [Run([1, 2], 0.5, 2.0), Run([3, 4], 1.0, 3.0), Run([5, 7], 2.0, 1.0)]
    rows = Result("m", "cpu", "float32", ["a", "b", "c"], {"transformers": base, "eagle3": fast}).rows()
    assert [row["ratio"] for row in rows] == [1.0, 2.0]
    assert [row["identical"] for row in rows] == [True, False]
    assert rows[1]["acceptance_length"] == 2.0
