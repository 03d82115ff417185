"""`fastspec serve` and `fastspec generate` with a cascade: options, refusals, and a file of prompts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cascade import trained
from helpers.training import save_with_tokenizer, small_target, write_prompts
from typer.testing import CliRunner

import fastspec
from fastspec.cascade.config import Cascade
from fastspec.programs.cli.app import app
from fastspec.programs.cli.serving import opened
from fastspec.programs.serving.remote import Remote

STAGES = "small", "large"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, a predictor and a cascade's file."""
    found = tmp_path_factory.mktemp("cascade")
    for name, noise in (("small", 0.5), ("large", 0.0)):
        model = small_target()
        with torch.no_grad():
            model.lm_head.weight.add_(noise * torch.randn(128, 64, generator=torch.Generator().manual_seed(0)))
        save_with_tokenizer(model, found / name)
    trained(STAGES).save(found / "predictor.safetensors")
    stage = fastspec.Stage(str(found / "small"), name="small")
    given: dict[str, Any] = {"label": "large", "predictor": str(found / "predictor.safetensors"), "price": 60}
    Cascade(stages=[stage], costs=[1.0, 2.0], **given).to_yaml(found / "cascade.yaml")
    write_prompts(found / "prompts.jsonl", 12)
    return found


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(each) for each in arguments])


def named(folder: Path) -> list[str]:
    return ["--stage", f"small={folder}/small", "--predictor", f"{folder}/predictor.safetensors"]


def test_a_file_is_answered_as_by_the_cascades_own_generate(folder: Path, tmp_path: Path) -> None:
    """Each line says which stage answered; a run with another price is another file's."""
    out = tmp_path / "out.jsonl"
    asked = ["generate", "--model", f"{folder}/large", "--prompts", f"{folder}/prompts.jsonl", "--out", out]
    asked += ["--max-new-tokens", "12", "--rows", "3", "--raw", "--device", "cpu"]
    done = run(*asked, "--cascade", f"{folder}/cascade.yaml")
    assert done.exit_code == 0, done.output
    large, tokenizer = fastspec.models.load_model(f"{folder}/large")
    fastspec.patch(large, cascade=replace(Cascade.from_yaml(folder / "cascade.yaml"), tokenizer=tokenizer))
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 12 and {line["stage"] for line in lines} == set(STAGES)
    for line in lines:
        ids = tokenizer(line["prompt"], return_tensors="pt").input_ids
        new = large.generate(ids, do_sample=False, max_new_tokens=12, assistant="cascade")[0, ids.shape[1] :]
        visit = fastspec.report(large).last.explanations[0].visits[-1]
        assert (line["text"], line["tokens"]) == (tokenizer.decode(new, skip_special_tokens=True), len(new))
        assert line["stage"] == visit.name and line["finish"] == ("length" if visit.cut else "stop")
    assert {line["finish"] for line in lines} == {"length", "stop"}
    assert line["settings"]["cascade"]["price"] == 60
    again = run(*asked, "--cascade", f"{folder}/cascade.yaml", "--price", "31")
    assert again.exit_code == 1 and "by other settings" in again.output
    assert len(run(*asked, "--cascade", f"{folder}/cascade.yaml").output) and len(out.read_text().splitlines()) == 12


@pytest.mark.some("token")
@pytest.mark.parametrize("mode", ["lossless", "token"])
def test_a_file_is_answered_token_by_token_in_other_modes(folder: Path, tmp_path: Path, mode: str) -> None:
    """The answers are those of `generate` in this mode; a file of another trade-off is another's."""
    config = replace(Cascade.from_yaml(folder / "cascade.yaml"), mode=mode, rule="diff", alpha=0.02)
    config.to_yaml(tmp_path / "cascade.yaml")
    out = tmp_path / "out.jsonl"
    asked = ["generate", "--model", f"{folder}/large", "--prompts", f"{folder}/prompts.jsonl", "--out", out]
    asked += [
        "--max-new-tokens",
        "12",
        "--rows",
        "3",
        "--raw",
        "--device",
        "cpu",
        "--cascade",
        tmp_path / "cascade.yaml",
    ]
    done = run(*asked)
    assert done.exit_code == 0, done.output
    large, tokenizer = fastspec.models.load_model(f"{folder}/large")
    fastspec.patch(large, cascade=replace(config, tokenizer=tokenizer))
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 12
    for line in lines:
        ids = tokenizer(line["prompt"], return_tensors="pt").input_ids
        new = large.generate(ids, do_sample=False, max_new_tokens=12, assistant="cascade")[0, ids.shape[1] :]
        assert line["text"] == tokenizer.decode(new, skip_special_tokens=True) and "stage" not in line
    replace(config, alpha=0.5).to_yaml(tmp_path / "cascade.yaml")
    again = run(*asked)
    assert again.exit_code == 1 and "by other settings" in again.output


@pytest.mark.parametrize("given", ["file", "stages"])
def test_serve_opens_the_cascade_of_its_options(folder: Path, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is built in the process of the rounds, built here."""
    pytest.importorskip("prometheus_client")
    built: list[Callable[[], Any]] = []

    def keep(self: Remote, build: Callable[[], Any]) -> None:
        built.append(build)
        raise fastspec.Unsupported("far enough")

    monkeypatch.setattr(Remote, "__init__", keep)
    options = ["--cascade", f"{folder}/cascade.yaml"] if given == "file" else named(folder)
    done = run("serve", f"{folder}/large", "--port", "0", "--rows", "2", "--device", "cpu", "--price", "7", *options)
    assert "far enough" in done.output
    batch, _ = built[0]()
    with batch:
        assert batch.models.names == STAGES and batch.config.price == 7 and batch.info["rows"] == "2"
        assert [each.decoding.name for each in batch.batches] == ["nasd", "nasd"]
        ids = torch.tensor([[5, 6, 7]])
        future = batch.submit(ids, max_new_tokens=5, do_sample=False)
        assert future.result(60).shape[0] == 1 and future.explanation is not None


def test_the_large_models_assistant_is_the_cascades_unless_the_command_names_one(folder: Path) -> None:
    from fastspec.programs.cli.serving import chosen_beside

    config = Cascade.from_yaml(folder / "cascade.yaml")
    assert chosen_beside(config, "smollm2-135m-instruct", {}, None)[0].assistant == "nasd"
    chosen, changed = chosen_beside(config, "smollm2-135m-instruct", {}, "eagle3")
    assert chosen.head and changed is not None and changed.assistant == "eagle3"
    batch, _ = opened(f"{folder}/large", chosen_beside(config, "m", {}, "autoregressive")[0], device="cpu")
    batch.close()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--cascade", "FOLDER/cascade.yaml", "--predictor", "x"], "--cascade FILE names the stages"),
        (["--price", "3"], "are of a cascade"),
        (["--stage", "small=FOLDER/small"], "--stage needs --predictor"),
        (["--stage", "small", "--predictor", "FOLDER/predictor.safetensors"], "must be NAME=MODEL"),
        (["--stage", "other=x", "--predictor", "FOLDER/predictor.safetensors"], "other"),
        (["--cascade", "FOLDER/none.yaml"], "none.yaml cannot be read as YAML"),
        (["--cascade", "FOLDER/lossless.yaml", "--price", "3"], "--price is of the mode 'adaptive': mode='lossless'"),
        (["--cascade", "FOLDER/thresholds.yaml", "--price", "3"], "--price: this cascade decides by its thresholds"),
        (["--cascade", "FOLDER/token.yaml", "--assistant", "nasd"], "mode='token' of a cascade drafts with its stages"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "generate"])
def test_options_that_do_not_go_together_are_refused_before_a_model_is_loaded(
    folder: Path, tmp_path: Path, command: str, more: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastspec.programs.cli.options.check_model", lambda name: None)
    for mode in ("lossless", "token"):
        Cascade(stages=["x"], mode=mode).to_yaml(folder / f"{mode}.yaml")
    Cascade(stages=["x"], predictor="x", thresholds=[0.5]).to_yaml(folder / "thresholds.yaml")
    files = ["--prompts", folder / "prompts.jsonl", "--out", tmp_path / "out.jsonl", "--model", "no-such-model"]
    named = ["no-such-model", "--port", "0"] if command == "serve" else files
    done = run(command, *named, *(each.replace("FOLDER", str(folder)) for each in more))
    assert done.exit_code == 1 and words in " ".join(done.output.split()), done.output
