"""Run a model's code against an item's unit tests (HumanEval, arXiv 2107.03374; MBPP, arXiv 2108.07732), in processes of their own.

The tests run in one process and the answer in another (`trial`), in a sandbox where one works (`sandbox`), so that an answer cannot decide
its own verdict. Everywhere it has limits of time, memory, processes and file sizes, a folder of its own that is removed, no environment but
PATH, no input, and no output; and all that it started is ended with it. Nothing runs without the caller's `allow_code_execution=True`.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastspec.cascade.sandbox import command
from fastspec.cascade.sandbox import sandbox as choose_sandbox
from fastspec.cascade.trial import PASSED
from fastspec.errors import Unsupported

SCRIPT = Path(__file__).with_name("trial.py")
GRACE = 8.0
"""Seconds beyond an item's limit in which its processes are started and ended."""
FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*\1[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
STARTS = re.compile(r"^(?:def|async def|class|import|from|@)\b|^@", re.MULTILINE)
PYTHON = ("", "python", "python3", "py")

@dataclass(frozen=True, slots=True)
class UnitTests:
    """What an item's answer is tried with.

    `tests` is Python source that raises where the answer is wrong, `entry_point` the function that it calls (None: not known), `context`
    source that runs before the answer (HumanEval's prompt, whose imports and helpers the answer may use), `setup` source between the
    answer and the tests.
    """

    tests: str
    entry_point: str | None = None
    context: str = ""
    setup: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """At most `seconds` (wall clock, and processor time by `RLIMIT_CPU`), `memory` bytes of address space (by `RLIMIT_AS`, where the system
    has it) and `processes` more than the user has (by `RLIMIT_NPROC`, which does not hold for root) for one item."""

    seconds: float = 10.0
    memory: int = 2 << 30
    processes: int = 16

    def __post_init__(self) -> None:
        if not self.seconds > 0 or not isinstance(self.memory, int) or self.memory < 1 << 26:
            raise Unsupported(f"Limits: seconds={self.seconds} must be positive and memory={self.memory} at least {1 << 26} bytes (64 MiB)")
        if not isinstance(self.processes, int) or self.processes < 1:
            raise Unsupported(f"Limits: processes={self.processes} must be a whole number of at least 1")


def called(tests: str) -> str | None:
    """The function that tests of MBPP's kind call: the first called name, of those that are no builtins where there are any (one task of
    MBPP is to write a `sum`); None where nothing is called."""
    try:
        tree = ast.parse(tests)
    except SyntaxError as error:
        raise Unsupported(f"these unit tests are no Python ({error}): {tests[:200]!r}") from error
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = [(name.lineno, name.col_offset, name.id) for name in calls if isinstance(name, ast.Name)]
    called_ = [name for _, _, name in sorted(names)]
    return next((name for name in called_ if not hasattr(builtins, name)), called_[0] if called_ else None)


def codes_of(answer: str, entry_point: str | None = None) -> tuple[str, ...]:
    """The code in a model's answer: forms of it, of which the first that compiles counts.

    Of several fenced blocks the first that defines `entry_point`, else the first in Python, else the first; a block that was not closed
    reaches to the end. Without blocks: all of the answer, which may be the body of a function, or what follows from its first line that
    begins a definition or an import.
    """
    blocks = [(match[2].lower(), match[3]) for match in FENCE.finditer(answer)]
    if blocks:
        defining = [code for _, code in blocks if entry_point and _defines(code, entry_point)]
        python = [code for tag, code in blocks if tag in PYTHON]
        return ((defining or python or [blocks[0][1]])[0],)
    start = STARTS.search(answer)
    whole = answer.strip("\n")
    return (whole, answer[start.start() :]) if start else (whole,)


def _defines(code: str, name: str) -> bool:
    return re.search(rf"^\s*(?:(?:async\s+)?def\s+{re.escape(name)}\b|{re.escape(name)}\s*=[^=])", code, re.MULTILINE) is not None


def job_of(tests: UnitTests, answer: str, limits: Limits, kind: str) -> dict[str, Any]:
    """What `trial` needs to try an answer: the sources of the answer's process, `parts`, and those of the tests'."""
    codes = tuple(textwrap.dedent(code) for code in codes_of(answer, tests.entry_point))
    if not tests.context:
        parts = [codes]
    elif tests.entry_point and not _defines(codes[0], tests.entry_point):
        # A body alone; the last form is a body whose first line lost its indentation with the white space around the answer.
        whole = tests.context.rstrip("\n") + "\n"
        parts = [(*(whole + textwrap.indent(code, "    ") for code in codes), whole + "    " + codes[0])]
    else:
        parts = [(tests.context,), codes]
    context = [tests.context, tests.context.rstrip("\n") + "\n    pass\n"]  # a signature alone needs a body
    return {
        "parts": parts, "context": context, "tests": [tests.setup, tests.tests], "entry_point": tests.entry_point,
        "limits": {"seconds": float(limits.seconds), "memory": limits.memory, "processes": limits.processes + running()},
        "command": [*command(kind), sys.executable, "-I", "-B", "-c", SCRIPT.read_text("utf-8"), "answer"],
        "privileges": kind in ("bubblewrap", "nsjail"),  # which may be set-user-id programs
    }  # fmt: skip


def running() -> int:
    """Processes and threads of this user and of root, which RLIMIT_NPROC may count."""
    count = 0
    for folder in Path("/proc").glob("[0-9]*") if sys.platform == "linux" else ():
        with suppress(OSError):
            count += len(os.listdir(folder / "task")) if folder.stat().st_uid in (0, os.getuid()) else 0
    return count


def passes(
    tests: UnitTests, answer: str, *, allow_code_execution: bool = False, limits: Limits = Limits(), sandbox: str = "auto",
) -> bool:  # fmt: skip
    """Whether the code in `answer` passes `tests`. This runs code that a model wrote: raises `Unsupported` without
    `allow_code_execution=True`, on Windows, and for a `sandbox` that does not work on this machine ("auto" takes the best that does)."""
    consent(allow_code_execution)
    job = job_of(tests, answer, limits, choose_sandbox(sandbox))
    with tempfile.TemporaryDirectory(prefix="fastspec-", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", "-c", SCRIPT.read_text("utf-8"), "supervise"],
            cwd=folder,
            env={"PATH": os.environ.get("PATH", os.defpath)},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.communicate(json.dumps(job).encode(), timeout=limits.seconds + GRACE)
        except subprocess.TimeoutExpired:
            return False
        finally:
            _end(process)
        return process.returncode == PASSED


def passes_all(
    items: Sequence[tuple[UnitTests, str]], *, allow_code_execution: bool = False, limits: Limits = Limits(), workers: int = 2,
    sandbox: str = "auto",
) -> list[bool]:  # fmt: skip
    """`passes` of every (tests, answer), `workers` of them at a time, in the order of `items`."""
    consent(allow_code_execution)
    if workers < 1:
        raise Unsupported(f"workers={workers} must be at least 1: the number of answers that are tried at a time")
    kind = choose_sandbox(sandbox)
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda item: passes(*item, allow_code_execution=True, limits=limits, sandbox=kind), items))


def consent(allow_code_execution: bool) -> None:
    """Raise `Unsupported` where running code was not allowed, or cannot be done on this system."""
    if allow_code_execution is not True:
        raise Unsupported(
            "judging this answer means to run code that a model wrote; pass allow_code_execution=True (--allow-code-execution) if you "
            "accept that, best where bubblewrap is installed or in a container without network, or leave items with unit tests out"
        )
    if not hasattr(os, "fork"):
        raise Unsupported("the code of a model is run on systems with fork alone (Linux, macOS): leave items with unit tests out")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the supervisor: asked first, since it ends all that was started."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
