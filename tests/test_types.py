"""Types of the public names, as a type checker reads a user's script: what it refuses, and what it knows of results."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import fastspec
from fastspec.config import BACKENDS, AssistantName

CONFIG = """
[mypy]
strict = true
[mypy-accelerate.*,huggingface_hub.*,numpy.*,safetensors.*,torch.*,transformers.*,triton.*]
follow_imports = skip
"""
SCRIPT = """
import fastspec

class Net:
    pass

class Own:
    name = "own"
    taps = None
    def drafter(self, **_: object) -> "Own":
        return self

class Words:
    def start(self) -> int: return 0
    def step(self, cursor: int, token: int) -> int: return 0
    def feed(self, cursor: int, token: int, fillers: object = ()) -> int: return 0
    def look(self, cursor: int) -> tuple[int, list[tuple[int, int]]]: return 0, []

model = Net()
reveal_type(fastspec.patch(model, assistant="eagle3", backend="torch"))
reveal_type(fastspec.unpatch(model))
with fastspec.patched(model, assistant="nasd") as inside:
    reveal_type(inside)
fastspec.patch(model, assistant=fastspec.Eagle3(depth=3))
fastspec.patch(model, assistant={"name": "eagle3"})
fastspec.patch(model, assistant=Own())
fastspec.patch(model, assistant=fastspec.Nasd(storage=Words()))
fastspec.continuous(model, assistant="mtp")
fastspec.patch(model, assistant="eagel3")  # wrong: "eagel3"
fastspec.patch(model, backend="tritn")  # wrong: "tritn"
fastspec.patch(model, eagel3="head")  # wrong: eagle3
fastspec.patch(model, assistant=3)  # wrong: 3
fastspec.continuous(model, assistant="eagel3")  # wrong: "eagel3"
fastspec.ContinuousBatch("eagel3")  # wrong: "eagel3"
fastspec.Nasd(storage="ngam")  # wrong: "ngam"
fastspec.Nasd(storage=Own())  # wrong: Storage
fastspec.Eagle1(drafts="random")  # wrong: "random"
with fastspec.patched(model, eagel3="head"):  # wrong: eagle3
    pass
"""


def test_a_type_checker_catches_a_mistyped_name_and_keeps_the_models_type(tmp_path: Path) -> None:
    (tmp_path / "mypy.ini").write_text(CONFIG)
    lines = f"{SCRIPT}reveal_type([{', '.join(f'fastspec.{name}' for name in fastspec.__all__)}])\n".splitlines()
    (tmp_path / "script.py").write_text("\n".join(lines) + "\n")
    options = ["--config-file", "mypy.ini", "--cache-dir", "cache", "--follow-imports", "silent", "--no-pretty"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(Path(fastspec.__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    told = [line.removeprefix("script.py:").split(": ", 2) for line in done.stdout.splitlines() if ".py:" in line]
    errors = {int(at): text.replace("'", '"') for at, kind, text in told if kind == "error"}
    wanted = {at: line.split("# wrong: ")[1] for at, line in enumerate(lines, 1) if "# wrong: " in line}
    assert errors.keys() == wanted.keys(), done.stdout + done.stderr
    assert all(wanted[at] in errors[at] for at in wanted), done.stdout
    assert [text for _, kind, text in told if kind == "note" and "script.Net" in text] == [
        'Revealed type is "script.Net"'
    ] * 3


def test_the_names_of_types_are_those_that_are_accepted() -> None:
    from fastspec.patches.assistants.registry import NAMES

    assert set(get_args(AssistantName)) == set(NAMES)
    assert len(BACKENDS) == 4 and {"torch", "auto"} < set(BACKENDS)
