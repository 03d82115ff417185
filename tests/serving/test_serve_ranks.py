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
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.serve import MARKS, NAME, SECONDS, Served, alone, ask_all, hold_as_alone, post, requests
from helpers.training import small_target, small_tokenizer
from typer.testing import CliRunner

import fastspec
from fastspec.models import load_model
from fastspec.programs.cli.app import app
from fastspec.programs.cli.serving import refuse_cut

pytestmark = MARKS
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "fastspec"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its tokenizer."""
    made = tmp_path_factory.mktemp("cut")
    for part in (small_target(peak=0.15), small_tokenizer()):
        part.save_pretrained(made)
    return made


@contextmanager
def launched(command: list[str]) -> Iterator[Any]:
    """A command over two processes."""
    with subprocess.Popen([*TORCHRUN, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        try:
            yield run
        finally:
            if run.poll() is None:
                run.send_signal(signal.SIGTERM)
            try:
                run.wait(SECONDS)
            finally:
                run.kill()


@pytest.mark.slow
def test_a_server_over_processes_answers_as_the_model_alone(folder: Path) -> None:
    """Chats and completions, whole and streamed, greedy and sampled; what only one process could answer is refused; at
    the end no process is left."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve = ["serve", str(folder), "--name", NAME, "--port", str(port), "--rows", "4", "--max-length", "400"]
    with launched([*serve, "--warmup", "--warmup-length", "16"]) as run:
        server: Any = SimpleNamespace(url=f"http://127.0.0.1:{port}")
        server.client, end = partial(Served.client, server), time.monotonic() + SECONDS
        while True:
            try:
                assert Served.get(server, "/health")
                break
            except urllib.error.URLError:
                assert run.poll() is None and time.monotonic() < end, run.communicate()[0]
                time.sleep(0.1)
        asked = requests(12, 2)
        hold_as_alone(small_target(peak=0.15), asked, ask_all(server, asked))
        echo = {"model": NAME, "prompt": "w5 w6", "max_tokens": 0, "echo": True, "logprobs": 1}
        status, told = post(server, "/v1/completions", json.dumps(echo).encode())
        assert status == 400 and "several hold this LlamaForCausalLM" in told["error"]["message"]
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(server.url, timeout=SECONDS)


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


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_what_a_cut_model_does_not_take_is_told_before_it_is_loaded(
    command: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ["--prompts", str(tmp_path / "none"), "--out", str(tmp_path / "out"), "--tensor-parallel"]
    given = [command, "--model", str(folder), "--device", "cpu", *(files if command == "generate" else [])]
    for size, why in (("2", "takes the GPU of its rank"), ("1", "under torchrun")):
        monkeypatch.setenv("WORLD_SIZE", size)
        if command == "generate" or size == "2":
            done = CliRunner().invoke(app, given)
            assert done.exit_code == 1 and why in " ".join(done.output.split()), done.output
    with pytest.raises(fastspec.Unsupported, match="each stage of an open batch decodes by itself"):
        refuse_cut(None, fastspec.Cascade(stages=["small"], mode="token"), 2)


def test_a_gguf_file_is_not_cut(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(fastspec.Unsupported, match="is a GGUF file, which is loaded whole"):
        load_model(str(tmp_path / "a.gguf"), distributed_config=object())
