"""Run a model's code against an item's unit tests (HumanEval, arXiv 2107.03374; MBPP, arXiv 2108.07732), each in its own process.

The process has a time limit, a limit of memory, an empty working folder, no environment but PATH, no input, and its output is discarded.
That guards against accidents: endless loops, floods of memory or text, `sys.exit`. It is no sandbox against code that means harm, which
could read files and reach the network as the user can. So nothing runs without the caller's `allow_code_execution=True`.
"""

from __future__ import annotations

import ast
import builtins
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fastspec.errors import Unsupported

PASSED = 83
"""Exit status of a run whose tests all passed: not 0, which an answer that calls `sys.exit()` would give as well."""
FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*\1[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
STARTS = re.compile(r"^(?:def|async def|class|import|from|@)\b|^@", re.MULTILINE)
PYTHON = ("", "python", "python3", "py")

DRIVER = """\
import os, sys, types
parts, seconds, memory = {parts!r}, {seconds!r}, {memory!r}
try:
    import resource
except ImportError:
    pass
else:
    def limit(kind, most):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    limit(resource.RLIMIT_CPU, int(seconds) + 1)
    limit(resource.RLIMIT_FSIZE, 1 << 20)
    limit(resource.RLIMIT_CORE, 0)
    if sys.platform != "darwin":
        limit(resource.RLIMIT_AS, memory)
module = types.ModuleType("answer")
sys.modules["answer"] = module
leave = os._exit
for name, ways in parts:
    for place, source in enumerate(ways):
        try:
            code = compile(source, name, "exec")
        except (SyntaxError, ValueError):
            if place + 1 == len(ways):
                raise
        else:
            break
    exec(code, module.__dict__)
leave({passed})
"""


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
    """At most `seconds` (wall clock, and processor time by `RLIMIT_CPU`) and `memory` bytes of address space (by `RLIMIT_AS`, where the
    system has it) for one item."""

    seconds: float = 10.0
    memory: int = 2 << 30

    def __post_init__(self) -> None:
        if not self.seconds > 0 or not isinstance(self.memory, int) or self.memory < 1 << 26:
            raise Unsupported(f"Limits: seconds={self.seconds} must be positive and memory={self.memory} at least {1 << 26} bytes (64 MiB)")


def called(tests: str) -> str | None:
    """The function that tests of MBPP's kind call: the first called name that is no builtin; None where there is none."""
    try:
        tree = ast.parse(tests)
    except SyntaxError as error:
        raise Unsupported(f"these unit tests are no Python ({error}): {tests[:200]!r}") from error
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = [(name.lineno, name.col_offset, name.id) for name in calls if isinstance(name, ast.Name)]
    return next((name for _, _, name in sorted(names) if not hasattr(builtins, name)), None)


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


def program(tests: UnitTests, answer: str, limits: Limits) -> str:
    """The Python source that tries `answer`: it ends with status `PASSED` where every test passes, with another one otherwise."""
    codes = tuple(textwrap.dedent(code) for code in codes_of(answer, tests.entry_point))
    if not tests.context:
        parts = [("answer", codes)]
    elif tests.entry_point and not _defines(codes[0], tests.entry_point):
        # A body alone; the last form is a body whose first line lost its indentation with the white space around the answer.
        whole = tests.context.rstrip("\n") + "\n"
        parts = [("answer", (*(whole + textwrap.indent(code, "    ") for code in codes), whole + "    " + codes[0]))]
    else:
        parts = [("context", (tests.context,)), ("answer", codes)]
    parts += [("setup", (tests.setup,)), ("tests", (tests.tests,))]
    return DRIVER.format(parts=parts, seconds=float(limits.seconds), memory=limits.memory, passed=PASSED)


def passes(tests: UnitTests, answer: str, *, allow_code_execution: bool = False, limits: Limits = Limits()) -> bool:
    """Whether the code in `answer` passes `tests`. It runs a model's code: raises `Unsupported` without `allow_code_execution=True`."""
    _consent(allow_code_execution)
    with tempfile.TemporaryDirectory(prefix="fastspec-", ignore_cleanup_errors=True) as folder:
        path, inside = Path(folder, "program.py"), Path(folder, "empty")
        # Half a surrogate pair, which a model can write, is no UTF-8 and no Python.
        path.write_bytes(program(tests, answer, limits).encode("utf-8", "replace"))
        inside.mkdir()
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", str(path)],
            cwd=inside,
            env={"PATH": os.environ.get("PATH", os.defpath)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            _wait(process, limits.seconds)
        finally:
            _kill(process)
        return process.returncode == PASSED


def passes_all(
    items: Sequence[tuple[UnitTests, str]], *, allow_code_execution: bool = False, limits: Limits = Limits(), workers: int = 2
) -> list[bool]:  # fmt: skip
    """`passes` of every (tests, answer), `workers` processes at a time, in the order of `items`."""
    _consent(allow_code_execution)
    if workers < 1:
        raise Unsupported(f"workers={workers} must be at least 1: the number of processes that run at a time")
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda item: passes(*item, allow_code_execution=True, limits=limits), items))


def _consent(allow_code_execution: bool) -> None:
    if allow_code_execution is not True:
        raise Unsupported(
            "judging this answer means to run code that a model wrote, as your user and without a sandbox; pass allow_code_execution=True "
            "if you accept that (best in a container without network), or leave items with unit tests out"
        )


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait for the end, at most so long, and leave the ended process to be reaped: until then no other process can get its number."""
    end, pause = time.monotonic() + seconds, 0.001
    while time.monotonic() < end:
        if hasattr(os, "waitid"):
            ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        else:
            ended = process.poll() is not None
        if ended:
            return
        time.sleep(min(pause, max(0.0, end - time.monotonic())))
        pause = min(2 * pause, 0.05)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the process and all that it started and that stayed in its group."""
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()
