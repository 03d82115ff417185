"""Commands under torchrun, over two processes that hold a model together."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.cascade import NAMED, trained
from helpers.ranks import COUNTS
from helpers.serve import MARKS, NAME, SECONDS, Served, alone, ask_all, hold_as_alone, post, requests
from helpers.training import save_with_tokenizer, small_target
from typer.testing import CliRunner

import fastspec
from fastspec.models import load_model
from fastspec.programs.cli.app import app

pytestmark = MARKS
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "-m", "--nproc-per-node"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its tokenizer."""
    made = tmp_path_factory.mktemp("cut")
    save_with_tokenizer(small_target(peak=0.15), made)
    return made


@contextmanager
def launched(command: list[str], count: int = 2) -> Iterator[Any]:
    """A command over so many processes."""
    whole = [*TORCHRUN, str(count), "fastspec", *command]
    with subprocess.Popen(whole, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        try:
            yield run
        finally:
            if run.poll() is None:
                run.send_signal(signal.SIGTERM)
            try:
                run.wait(SECONDS)
            finally:
                run.kill()


@contextmanager
def served(*command: Any, count: int = 2) -> Iterator[Any]:
    """A server over so many processes; at the end no process is left."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve = ["serve", *command, "--name", NAME, "--port", port, "--rows", "4", "--max-length", "400"]
    with launched([*map(str, serve), "--warmup", "--warmup-length", "16"], count) as run:
        server: Any = SimpleNamespace(url=f"http://127.0.0.1:{port}")
        server.client, end = partial(Served.client, server), time.monotonic() + SECONDS
        while True:
            try:
                assert Served.get(server, "/health")
                break
            except urllib.error.URLError:
                assert run.poll() is None and time.monotonic() < end, run.communicate()[0]
                time.sleep(0.1)
        yield server
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(server.url, timeout=SECONDS)


@pytest.mark.slow
def test_a_server_over_processes_answers_as_the_model_alone(folder: Path) -> None:
    """Chats and completions, whole and streamed, greedy and sampled; what only one process could answer is refused."""
    with served(folder) as server:
        asked = requests(12, 2)
        hold_as_alone(small_target(peak=0.15), asked, ask_all(server, asked))
        echo = {"model": NAME, "prompt": "w5 w6", "max_tokens": 0, "echo": True, "logprobs": 1}
        status, told = post(server, "/v1/completions", json.dumps(echo).encode())
        assert status == 400 and "several hold this LlamaForCausalLM" in told["error"]["message"]


@pytest.mark.timeout(150)
@pytest.mark.parametrize("count", COUNTS)
def test_so_does_one_over_gpus(count: int, tmp_path: Path) -> None:
    """Greedy chats and completions, whole and streamed."""
    model = small_target(peak=0.15, key_heads=4)
    save_with_tokenizer(model, tmp_path)
    with served(tmp_path, count=count) as server:
        asked = [each for each in requests(24, 2) if each.seed is None]
        hold_as_alone(model, asked, ask_all(server, asked))


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A large model, two stages that begin like it, their predictor and a cascade's file, where the first is whole."""
    made = tmp_path_factory.mktemp("stages")
    for name, noise in zip(NAMED, (0.5, 0.2, 0.0), strict=True):
        model = small_target()
        with torch.no_grad():
            model.lm_head.weight.add_(noise * torch.randn(128, 64, generator=torch.Generator().manual_seed(0)))
        save_with_tokenizer(model, made / name)
    trained(NAMED).save(made / "predictor.safetensors")
    below = [
        fastspec.Stage(str(made / name), name=name, tensor_parallel=size)
        for name, size in zip(NAMED, (1, 2), strict=False)
    ]
    given: dict[str, Any] = {"label": NAMED[-1], "predictor": str(made / "predictor.safetensors")}
    fastspec.Cascade(below, costs=[1.0, 2.0, 4.0], **given).to_yaml(made / "cascade.yaml")
    return made


def whole_cascade(stages: Path, **more: Any) -> tuple[Any, fastspec.Cascade, Any]:
    """(model, cascade, tokenizer) of the same in one process."""
    large, tokenizer = load_model(f"{stages}/{NAMED[-1]}")
    config = replace(fastspec.Cascade.from_yaml(stages / "cascade.yaml"), tokenizer=tokenizer, **more)
    config = replace(config, stages=[replace(stage, tensor_parallel=None) for stage in config.stages])
    return fastspec.patch(large, cascade=config), config, tokenizer


def own_answer(whole: tuple[Any, fastspec.Cascade, Any], text: str, count: int, price: float) -> tuple[str, str]:
    """What the cascade's own `generate` answers, and the stage that does."""
    model, config, tokenizer = whole
    ids = tokenizer(text, return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=count, do_sample=False, assistant=replace(config, price=price))
    answered = fastspec.report(model).last.explanations[0].visits[-1].name
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True), answered


@pytest.mark.slow
def test_a_served_cascade_over_processes_answers_as_its_own_generate(stages: Path) -> None:
    """Whole and streamed, at several prices; each stage's answers are counted."""
    whole, counts = whole_cascade(stages), dict.fromkeys(NAMED, 0)
    with served(stages / NAMED[-1], "--cascade", stages / "cascade.yaml") as server:
        with server.client() as client:
            for number, price in enumerate((0.0, 60.0, 150.0, 200.0, 400.0, 1e9) * 3):
                given = {"temperature": 0, "max_tokens": 12, "extra_body": {"price": price}, "stream": number % 2 == 0}
                text = f"w{number + 5} w6"
                out = client.completions.create(model=NAME, prompt=text, **given)
                got = "".join(part.choices[0].text for part in out) if given["stream"] else out.choices[0].text
                want, answered = own_answer(whole, text, 12, price)
                assert got == want
                counts[answered] += 1
        page = Served.get(server, "/metrics")
    assert all(counts.values()), counts
    for name, count in counts.items():
        assert f'fastspec_stage_requests_total{{outcome="answered",stage="{name}"}} {count:.1f}' in page


@pytest.mark.slow
def test_a_file_is_answered_over_processes(folder: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    texts = ["w5 w6", "w9 w10 w11", "w4"]
    file.write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
    command = ["generate", "--model", str(folder), "--prompts", str(file), "--out", str(out), "--tensor-parallel"]
    with launched([*command, "--max-new-tokens", "9", "--rows", "2", "--raw"]) as run:
        told, _ = run.communicate(timeout=SECONDS)
    assert run.returncode == 0 and "3 answers written" in told, told
    found = sorted(map(json.loads, out.read_text().splitlines()), key=lambda row: row["line"])
    plain = small_target(peak=0.15)
    assert [row["text"] for row in found] == [alone(plain, text, 9)[0] for text in texts]


@pytest.mark.slow
def test_a_file_is_answered_by_a_cascade_over_processes(stages: Path, tmp_path: Path) -> None:
    """Its stages are the command's, both cut."""
    file, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    texts = [f"w{number} w6" for number in range(5, 13)]
    file.write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
    command = ["generate", "--model", stages / NAMED[-1], "--prompts", file, "--out", out, "--tensor-parallel"]
    for name in NAMED[:-1]:
        command += ["--stage", f"{name}={stages / name}", "--stage-tensor-parallel", f"{name}=2"]
    command += ["--predictor", stages / "predictor.safetensors", "--price", "1e9"]
    with launched([*map(str, command), "--max-new-tokens", "9", "--rows", "2", "--raw"]) as run:
        told, _ = run.communicate(timeout=SECONDS)
    assert run.returncode == 0 and "8 answers written" in told, told
    found = sorted(map(json.loads, out.read_text().splitlines()), key=lambda row: row["line"])
    whole = whole_cascade(stages)
    assert [(row["text"], row["stage"]) for row in found] == [own_answer(whole, text, 9, 1e9) for text in texts]


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_what_a_cut_model_does_not_take_is_told_before_it_is_loaded(
    command: str, folder: Path, stages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ["--prompts", str(tmp_path / "none"), "--out", str(tmp_path / "out"), "--tensor-parallel"]
    given = [command, "--model", str(folder), "--device", "cpu", *(files if command == "generate" else [])]
    for size, why in (("2", "takes the GPU of its rank"), ("1", "under torchrun")):
        monkeypatch.setenv("WORLD_SIZE", size)
        if command == "generate" or size == "2":
            done = CliRunner().invoke(app, given)
            assert done.exit_code == 1 and why in " ".join(done.output.split()), done.output
    monkeypatch.setenv("WORLD_SIZE", "3")
    given = [each for each in given if each not in ("--device", "cpu")]
    named = ["--stage", f"small={stages}/small", "--stage", f"medium={stages}/medium"]
    named += ["--predictor", f"{stages}/predictor.safetensors", "--stage-tensor-parallel"]
    for more, why in (
        (["--cascade", f"{stages}/cascade.yaml"], "'medium' has tensor_parallel=2, and 3 processes hold the large"),
        ([*named, "small=2"], "'small' has tensor_parallel=2, and 3 processes"),
        ([*named, "large=3"], "'large=3' must be NAME=N, the name of a --stage (small, medium)"),
        ([*named, "small=two"], "'small=two' must be NAME=N"),
        (["--stage-tensor-parallel", "small=3"], "are of a cascade: give --cascade FILE or --stage NAME=MODEL"),
        (["--cascade", f"{stages}/cascade.yaml", "--stage-tensor-parallel", "small=3"], "leave out --stage, --stage-"),
    ):
        done = CliRunner().invoke(app, [*given, *more])
        assert done.exit_code == 1 and why in " ".join(done.output.split()), done.output


def test_a_gguf_file_is_not_cut(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(fastspec.Unsupported, match="is a GGUF file, which is loaded whole"):
        load_model(str(tmp_path / "a.gguf"), distributed_config=object())
