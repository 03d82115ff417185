"""`fastspec cascade train` and `evaluate` on tiny models: answers, a judge's word on them, a predictor, the frontier, a
run cut short."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers.training import small_target, small_tokenizer, write_prompts
from typer.testing import CliRunner

import fastspec
from fastspec.cascade import records
from fastspec.cascade.predictor import Predictor
from fastspec.distribution import install_command
from fastspec.programs.cli.app import app


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models that agree on some prompts: some rows of the small one's LM head are noise."""
    found = tmp_path_factory.mktemp("cascade")
    for name, noise in (("small", 0.5), ("large", 0.0)):
        model = small_target(peak=0.3)
        torch.manual_seed(1)
        model.lm_head.weight[4:] += noise * torch.randn(124, 64)
        model.save_pretrained(found / name)
        tokenizer = small_tokenizer()
        tokenizer.chat_template = None  # a bigram model's answer depends on the prompt's last word
        tokenizer.save_pretrained(found / name)
    write_prompts(found / "first.jsonl", 30)
    write_prompts(found / "second.jsonl", 40)
    return found


@pytest.fixture(autouse=True)
def few_rated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates are measured of four tokens behind two items, in place of eight items and the longest answers: what is
    measured of each is the same."""
    monkeypatch.setattr("fastspec.programs.cli.cascade.RATED", 2)
    monkeypatch.setattr("fastspec.programs.cli.cascade.LONG", 4)


def run(folder: Path, *arguments: str) -> str:
    result = CliRunner().invoke(app, ["cascade", *arguments])
    assert result.exit_code == 0, result.output + str(result.exception)
    return result.output


def training(folder: Path, *more: str) -> list[str]:
    return [
        "train",
        "--stage",
        f"small={folder}/small",
        "--model",
        f"large={folder}/large",
        "--prompts",
        f"{folder}/first.jsonl",
        "--prompts",
        f"{folder}/second.jsonl",
        "--out",
        f"{folder}/p.safetensors",
        "--answers",
        f"{folder}/answers.jsonl",
        "--max-new-tokens",
        "16",
        "--batch",
        "8",
        "--right",
        f"{folder}/right.jsonl",
        *more,
    ]


def judge(folder: Path) -> None:
    """Write what agrees with the last stage's answer, with the script of docs/guide/cascade.md."""
    page = (Path(__file__).parents[2] / "docs/guide/cascade.md").read_text(encoding="utf-8")
    script = page.split("<<'END'\n")[1].split("\nEND\n")[0]
    subprocess.run([sys.executable, "-c", script], cwd=folder, check=True)


def test_a_predictor_is_trained_judged_and_used(folder: Path) -> None:
    asked = CliRunner().invoke(app, ["cascade", *training(folder)])
    assert asked.exit_code == 1 and "70 of 70 items answered by 2 stages" in asked.output, asked.output
    assert "right.jsonl: no such file. The 140 answers to judge are in" in asked.output
    judge(folder)
    emitted = run(folder, *training(folder, "--report", str(folder / "calibration.jsonl")))
    assert "of 70 items" not in emitted and "predictor written" in emitted and "ms a token" in emitted
    held = records.read(folder / "answers.jsonl")
    assert len(held) == 140 and all(record.label is not None for record in held)
    assert all(record.label == 1 for record in held if record.stage == "large")
    assert {record.split for record in held} == {"train", "held-out"}
    rows = [json.loads(line) for line in (folder / "calibration.jsonl").read_text().splitlines()]
    assert {row["set"] for row in rows} == {"all", "first", "second"}

    lines = (folder / "answers.jsonl").read_text().splitlines(keepends=True)
    (folder / "answers.jsonl").write_text("".join(lines[:60]))  # as a run that was cut short leaves it
    again = run(folder, *training(folder))
    assert "70 of 70" not in again
    assert len(records.read(folder / "answers.jsonl")) == 140

    emitted = run(
        folder,
        "evaluate",
        "--predictor",
        f"{folder}/p.safetensors",
        "--answers",
        f"{folder}/answers.jsonl",
        "--out",
        f"{folder}/rows.jsonl",
    )
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert {record.label for record in held if record.stage == "small"} == {0.0, 1.0}
    points = [row for row in rows if row["kind"] == "frontier" and row["set"] == "all"]
    assert (
        points[0]["stage"] == 0
        and points[-1]["stage"] >= points[0]["stage"]
        and "mean gain over mixing at random" in emitted
    )
    assert all(before["stage"] <= after["stage"] for before, after in pairwise(points))
    assert {row["kind"] for row in rows} == {"stage", "frontier", "gain", "calibration"}
    assert {row["stage"]: row["quality"] for row in rows if row["kind"] == "stage" and row["set"] == "all"}[
        "large"
    ] == 1


def test_the_records_are_what_the_models_answer(folder: Path) -> None:
    """Whatever the batch, a stage's answer is its own greedy answer."""
    path = folder / "alone.jsonl"
    arguments = training(folder, "--most", "25", "--seed", "3")
    arguments[arguments.index("--answers") + 1] = str(path)
    assert CliRunner().invoke(app, ["cascade", *arguments]).exit_code == 1  # nobody has judged
    tokenizer = small_tokenizer()
    from fastspec.models import load_model

    models = {name: load_model(str(folder / name))[0] for name in ("small", "large")}
    prompts = {
        f"first-{at}": json.loads(line)["prompt"]
        for at, line in enumerate((folder / "first.jsonl").read_text().splitlines(), 1)
    }
    checked = 0
    for record in records.read(path):
        if record.set == "first" and checked < 12:
            ids = tokenizer(prompts[record.item], return_tensors="pt")
            out = models[record.stage].generate(**ids, max_new_tokens=16, do_sample=False, pad_token_id=0)[
                0, ids["input_ids"].shape[1] :
            ]
            assert record.answer == tokenizer.decode(out, skip_special_tokens=True)
            assert (
                record.new_tokens + record.kept_tokens == len(out) and record.prompt_tokens == ids["input_ids"].shape[1]
            )
            checked += 1
    assert checked == 12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--stage": "small"}, "NAME=MODEL"),
        ({"--head": "other=x"}, "no --stage"),
        ({"--prompts": "/nowhere.jsonl"}, "no such file"),
        ({"--model": "large=/nowhere"}, "could not load"),
    ],
)
def test_bad_arguments_end_with_a_message(folder: Path, change: dict[str, str], message: str) -> None:
    arguments: list[Any] = training(folder, "--head", "small=x")
    if "--head" not in change:
        del arguments[-2:]
    for option, value in change.items():
        arguments[arguments.index(option) + 1] = value
    result = CliRunner().invoke(app, ["cascade", *arguments])
    assert result.exit_code == 1 and message in " ".join(result.output.split())


def answered(folder: Path) -> None:
    """Let there be answers, judged."""
    if not (folder / "answers.jsonl").exists():
        CliRunner().invoke(app, ["cascade", *training(folder)])
        judge(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--max-new-tokens": "12"}, "limit: 16 new tokens, and it is 12 now"),
        ({"--seed": "1"}, "seed: 0, and it is 1 now"),
        ({"--share": "0.9"}, "share: item"),
        ({"--model": "large={}/small"}, "models: stage 'large' had other weights"),
        ({"--stage": "tiny={}/small"}, "stages: 'small', which is none now"),
        ({"--dtype": "bfloat16"}, "dtype: float32, and it is bfloat16 now"),
        ({"--prompts": "{}/reworded/first.jsonl"}, "was asked in other words"),
        ({"--stage": "large={}/large", "--model": "small={}/small"}, "stages: 'small' was stage 0, and is stage 1 now"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_answers_of_another_run_are_refused_by_name(folder: Path, change: dict[str, str], message: str) -> None:
    answered(folder)
    before = (folder / "answers.jsonl").read_bytes()
    (folder / "reworded").mkdir(exist_ok=True)
    texts = (folder / "first.jsonl").read_text()
    (folder / "reworded" / "first.jsonl").write_text(texts.replace('"prompt": "', '"prompt": "w8 '))
    arguments = training(folder)
    for option, value in change.items():
        value = value.format(folder)
        if option in arguments:
            arguments[arguments.index(option) + 1] = value
        else:
            arguments += [option, value]
    result = CliRunner().invoke(app, ["cascade", *arguments])
    told = " ".join(result.output.split())
    assert result.exit_code == 1 and message in told and "write to another file" in told, told
    assert (folder / "answers.jsonl").read_bytes() == before


def test_answers_to_items_that_are_not_asked_are_refused_at_the_start(folder: Path) -> None:
    answered(folder)
    arguments = training(folder)
    del arguments[arguments.index("--prompts") : arguments.index("--prompts") + 2]
    result = CliRunner().invoke(app, ["cascade", *arguments, "--share", "0.9"])
    assert result.exit_code == 1 and "items: " in result.output and "which is not asked now" in result.output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--share", "0"], "0 of 70 items are for training"),
        (["--most", "9"], "at least 20 are needed"),
        (["--head", "large=x"], "--head names large, which is no --stage"),
        (["--out", "/nowhere/p.safetensors"], "/nowhere is no directory"),
        (["--out", "/"], "/ cannot be written: name a file"),
        (["--answers", "/"], "/ cannot be written: name a file"),
    ],
    ids=lambda each: each[0] if isinstance(each, list) else "",
)
def test_what_would_fail_at_the_end_is_refused_at_the_start(
    folder: Path, change: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastspec.programs.cli.cascade.load_model", lambda *_, **__: pytest.fail("a model is loaded"))
    result = CliRunner().invoke(app, ["cascade", *training(folder), *change])
    assert result.exit_code == 1 and message in " ".join(result.output.split()), result.output


def test_options_come_from_a_file_and_a_stage_without_tokenizer_has_the_large_ones(
    folder: Path, tmp_path: Path
) -> None:
    answered(folder)
    shutil.copytree(folder / "small", tmp_path / "small")
    for path in tmp_path.glob("small/*token*"):
        path.unlink()
    settings = {
        "stage": {"small": str(tmp_path / "small")},
        "model": {"large": str(folder / "large")},
        "prompts": [str(folder / "first.jsonl"), str(folder / "second.jsonl")],
        "answers": str(folder / "answers.jsonl"),
        "out": str(tmp_path / "other.safetensors"),
        "max-new-tokens": 99,
        "batch": 8,
        "right": str(folder / "right.jsonl"),
    }
    (tmp_path / "training.yaml").write_text(yaml.safe_dump(settings))
    given = ["train", "--config", str(tmp_path / "training.yaml"), "--max-new-tokens", "16"]
    run(folder, *given, "--out", str(tmp_path / "p.safetensors"))
    assert (tmp_path / "p.safetensors").exists() and not (tmp_path / "other.safetensors").exists()
    for text, message in (
        ("stages: []", "unknown key stages; did you mean stage?"),
        ("lambda: 3", "a cascade's `price`, what a bad answer costs in milliseconds, is the trade-off"),
        ("model: {}", "model must be one NAME: MODEL, not {}"),
        ("model: {large: a, other: b}", "model must be one NAME: MODEL"),
        ("- a", "keys and values"),
        ("a: [", "as YAML"),
    ):
        (tmp_path / "training.yaml").write_text(text)
        result = CliRunner().invoke(app, ["cascade", *given])
        assert result.exit_code == 1 and message in " ".join(result.output.split()), result.output


def test_what_train_writes_is_a_cascade_s_predictor(folder: Path) -> None:
    if not (folder / "p.safetensors").exists():
        CliRunner().invoke(app, ["cascade", *training(folder)])
        judge(folder)
        run(folder, *training(folder))
    from fastspec.models import load_model

    predictor = Predictor.load(folder / "p.safetensors")
    assert predictor.rates is not None and predictor.place["dtype"] == "float32"
    small, _ = load_model(str(folder / "small"))
    large, tokenizer = load_model(str(folder / "large"))
    cascade = fastspec.Cascade(
        stages=[fastspec.Stage(small, name="small")], label="large", predictor=folder / "p.safetensors", price=1e6
    )
    fastspec.patch(large, cascade=cascade)
    ids = tokenizer("w5 w6 w7", return_tensors="pt")
    assert large.generate(**ids, assistant="cascade", max_new_tokens=8, do_sample=False).shape[1] <= 11


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--agreement"], "--right FILE"),
        (["train", "--threshold=0.5"], "--right FILE"),
        (["train", "--allow-code-execution"], "--task humaneval --confirm-run-unsafe-code"),
        (["evaluate", "--plot", "a.png"], "--out FILE"),
        (["evaluate", "--seed", "1"], "standard errors need none"),
    ],
)
def test_an_option_that_left_says_where_it_went(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["cascade", *arguments])
    assert result.exit_code == 1 and arguments[1].partition("=")[0] in result.output and message in result.output


def test_rows_that_could_not_be_written_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Predictor, "load", lambda *_: pytest.fail("a predictor is loaded"))
    given = ["evaluate", "--predictor", "p", "--answers", "a", "--out", "/nowhere/rows.jsonl"]
    result = CliRunner().invoke(app, ["cascade", *given])
    assert result.exit_code == 1 and "/nowhere is no directory" in " ".join(result.output.split()), result.output


@pytest.mark.parametrize("risk", ["0", "1", "-0.5", "nan"])
def test_a_risk_that_is_no_quantile_is_refused(risk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Predictor, "load", lambda *_: pytest.fail("a predictor is loaded"))
    result = CliRunner().invoke(app, ["cascade", "evaluate", "--predictor", "p", "--answers", "a", "--risk", risk])
    assert result.exit_code == 1 and f"--risk {risk} must lie between 0 and 1" in result.output, result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no items to answer: --prompts FILE or --task NAME"),
        (["--metric", "exact_match"], "give --task NAME"),
        (["--confirm-run-unsafe-code"], "give --task NAME"),
        (["--task", "gsm8k"], install_command("eval")),
    ],
)
def test_a_run_without_items_ends_before_a_model_is_loaded(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    given = ["train", "--stage", "a=/nowhere", "--model", "b=/nowhere", "--out", "p", "--answers", "a"]
    result = CliRunner().invoke(app, ["cascade", *given, *arguments])
    assert result.exit_code == 1 and message in result.output, result.output
