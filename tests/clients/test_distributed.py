"""The snippets of docs/guide/clients.md for several processes, in two over gloo: replicas generate by themselves,
sharded weights in step."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import torch
from helpers.clients import MARKS, QUESTIONS, asked
from helpers.page import shown
from helpers.sharded import sharded
from torch import multiprocessing

pytestmark = MARKS


def test_ddp(folder, smollm2, tokenizer, tmp_path):
    """The page's script under the page's command: two questions for the first process, one for the second."""
    script, model = shown("DistributedDataParallel"), smollm2[0]
    first, *_ = script.splitlines()
    command = shlex.split(first.removeprefix("# "))
    assert command[0] == "torchrun" and command[-3:] == ["answers.py", "CHECKPOINT", "QUESTION..."]
    (tmp_path / "answers.py").write_text(script, encoding="utf-8")
    questions = QUESTIONS[:3]
    command = [sys.executable, "-m", "torch.distributed.run", *command[1:-2], str(folder), *questions]
    root = str(Path(__file__).parents[2])
    launched = subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": root}, stdout=subprocess.PIPE, text=True
    )
    try:
        told, _ = launched.communicate(timeout=300)
    finally:
        launched.terminate()  # torchrun ends its processes with itself
        launched.wait()
    assert launched.returncode == 0
    for rank, calls in enumerate((2, 1)):
        answers = torch.load(tmp_path / f"answers{rank}.pt")
        assert list(answers) == list(questions[rank::2]) and len(answers) == calls
        for question, found in answers.items():
            expected = model.generate(**asked(tokenizer, question), max_new_tokens=24, do_sample=False)
            assert torch.equal(found, expected)
    reported = re.findall(r"eagle3: (\d) calls?, .* acceptance length ([\d.]+)[,;]", told)
    assert sorted(calls for calls, _ in reported) == ["1", "2"]
    assert min(float(length) for _, length in reported) > 1
    assert "left to transformers" not in told


def test_fsdp2(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.spawn(sharded, args=(port, tmp_path), nprocs=2)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert all(each["same"] and each["accepted"] > 2 and not each["left"] for each in found)
