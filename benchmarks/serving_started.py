"""Servers that a benchmark starts itself, all at once, and ends behind itself; `{port}`, `{model}`, `{head}` in a command are filled in."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fastspec.models import load_model
from fastspec.patches.assistants.heads import find_head
from fastspec.programs.bench.run import saved

DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
LOOK = 0.25
"""Seconds between looks at a server that is not ready."""
GRACE = 20.0
"""Seconds that a server has to end."""


@dataclass(frozen=True, slots=True)
class Started:
    """A server that answers: its address, and the seconds from its start until it said so, others starting beside it; None where it ran."""

    url: str
    ready_s: float | None = None


@contextlib.contextmanager
def started(commands: Sequence[str], model: str, patience: float) -> Iterator[dict[str, Started]]:
    """name -> server, of commands "NAME=COMMAND"; the model is written out in bf16 where there is CUDA. Raises `SystemExit` with what
    a server wrote last where it ends, or is not ready in time."""
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        filled = {"{port}": "", "{model}": "", "{head}": ""}
        if any("{model}" in command for command in commands):
            filled["{model}"] = stack.enter_context(saved(model, *load_model(model, dtype=DTYPE)))
        if any("{head}" in command for command in commands):
            filled["{head}"] = str(find_head(model))
        begun, running = time.monotonic(), {}
        for port, (name, command) in zip(free_ports(len(commands)), (text.split("=", 1) for text in commands), strict=True):
            filled["{port}"] = str(port)
            words = shlex.split(command)
            for mark, value in filled.items():
                words = [word.replace(mark, value) for word in words]
            log = stack.enter_context((logs / f"{len(running)}.log").open("wb"))
            process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            stack.callback(end, process)
            running[name] = process, f"http://127.0.0.1:{port}", Path(log.name)
        found: dict[str, Started] = {}
        while len(found) < len(running):
            for name, (process, address, log_path) in running.items():
                if name not in found and is_ready(address):
                    found[name] = Started(f"{address}/v1", round(time.monotonic() - begun, 1))
                elif name not in found and (process.poll() is not None or time.monotonic() - begun > patience):
                    why = f"was not ready within {patience:g} s" if process.poll() is None else f"ended with status {process.returncode}"
                    raise SystemExit(f"{name} {why}:\n{log_path.read_text(errors='replace')[-2000:]}")
            time.sleep(LOOK)
        yield found


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that nothing listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def is_ready(address: str) -> bool:
    """Whether `/health` says so."""
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask a server to end, and all that it started; and end what does not."""
    for sign, seconds in ((signal.SIGTERM, GRACE), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
