"""`fastspec warmup` on a tiny model in a folder, and which kernels `fastspec tune` patches it with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.heads import save_eagle3
from helpers.models import tiny_head
from helpers.training import save_with_tokenizer, small_target
from typer.testing import CliRunner

from fastspec.errors import Unsupported
from fastspec.models import SMOLLM2
from fastspec.programs.cli import device as cli_device
from fastspec.programs.cli.app import app


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A tiny model with its tokenizer, and a head for it, in folders."""
    folder, target = tmp_path_factory.mktemp("device"), small_target()
    save_with_tokenizer(target, folder / "model")
    save_eagle3(tiny_head(target), folder / "head")
    return folder


def test_warmup_calls_every_assistant(saved):
    done = CliRunner().invoke(
        app, ["warmup", str(saved / "model"), "--eagle3", str(saved / "head"), "--length", "8", "--device", "cpu"]
    )
    assert done.exit_code == 0, done.output
    assert "6 of 6 calls" in done.output  # three assistants, greedy and sampled
    assert "warmed up in" in done.output and "has no kernels to compile" in done.output


def test_warmup_says_what_is_wrong(saved):
    done = CliRunner().invoke(app, ["warmup", str(saved / "nothing")])
    assert done.exit_code == 1 and "could not load the model" in done.output
    assert CliRunner().invoke(app, ["warmup", str(saved / "model"), "--rows", "0"]).exit_code == 2


@pytest.mark.parametrize(
    ("gpus", "given", "backend"),
    [
        (0, [], "triton"),
        (0, ["--backend", "triton"], "triton"),
        (1, [], "auto"),
        (1, ["--backend", "triton", "--device", "cuda:0"], "triton"),
    ],
)
def test_tune_takes_triton_where_auto_would_not(gpus, given, backend, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    asked = []

    def patched(name, device, backend, **options):
        asked.append(backend)
        raise Unsupported("far enough")

    monkeypatch.setattr(cli_device.options, "patched_model", patched)
    done = CliRunner().invoke(app, ["tune", "--model", SMOLLM2, *given])
    assert done.exit_code == 1 and "far enough" in done.output
    assert asked == [backend]
    if not gpus:  # and without Triton's interpreter
        monkeypatch.setenv("TRITON_INTERPRET", "0")
        words = "on a CUDA device" if not given else "far enough"
        assert words in " ".join(CliRunner().invoke(app, ["tune", "--model", SMOLLM2, *given]).output.split())
