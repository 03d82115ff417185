"""All benchmarks: their names, what they import, their options, and the smallest runs of those without a test."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.bench import BENCHMARKS, benchmark
from transformers.utils import import_utils

SHARED = ("common",)
SCRIPTS = sorted(path.stem for path in BENCHMARKS.glob("*.py") if path.stem not in SHARED)
NEEDS = {"drafter": "triton", "plot": "matplotlib", "serving": "openai"}
"""Script -> what it needs that not every environment of the tests has."""
REFUSED = {
    "open_batch": "",
    "serving": "--model m --prompts p.jsonl",
    "versions": "--code one=.",
    "acceptance": "--prompts p.jsonl --temperature 0.6",
}
"""Script -> arguments that it refuses before it loads anything."""
SMALL = {"parallel": "--shapes tiny --prefix 9 --tokens 4 --draft-vocab 64 --dtype float32 --processes 1"}
"""Script -> arguments of its smallest run on the CPU, where no other test runs it."""


@pytest.fixture
def load(on_cpu: None) -> Any:
    def found(name: str) -> Any:
        pytest.importorskip(NEEDS.get(name, "torch"))
        return benchmark(name)

    return found


def test_benchmarks_and_their_results_stay_small() -> None:
    """Scripts whose question is answered, and rows that newer ones replace, leave."""
    lines = sum(path.read_text(encoding="utf-8").count("\n") for path in BENCHMARKS.rglob("*.py"))
    size = sum(path.stat().st_size for path in (BENCHMARKS / "results").rglob("*") if path.is_file())
    assert lines < 3_600 and size < 1_500_000


def test_no_file_takes_the_name_of_a_package_that_transformers_looks_for_or_of_pythons_own() -> None:
    names = {path.stem for path in BENCHMARKS.glob("*.py")}
    looked_for = {
        name.removeprefix("is_").removesuffix("_available")
        for name in vars(import_utils)
        if name.endswith("_available")
    }
    assert "kernels" in looked_for
    assert not names & (looked_for | set(sys.stdlib_module_names))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_has_the_options_that_its_docstring_shows(name: str, load: Any, capsys: pytest.CaptureFixture) -> None:
    script = load(name)
    with pytest.raises(SystemExit) as ended:
        script.main(["--help"])
    assert not ended.value.code
    usage, _, _ = capsys.readouterr().out.partition("\n\n")
    commands = re.findall(
        rf"benchmarks/{name}\.py (.*)", ast.get_docstring(ast.parse(Path(script.__file__).read_text()))
    )
    shown = {option for line in commands for option in re.findall(r"(?<!\S)--[a-z-]+", line.split('"')[0])}
    assert commands and shown <= set(re.findall(r"--[a-z-]+", usage)) and "--out" in usage


@pytest.mark.parametrize(("name", "arguments"), REFUSED.items())
def test_a_script_refuses_before_it_loads_a_model(name: str, arguments: str, load: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        load(name).main(arguments.split())
    assert ended.value.code == 2


@pytest.mark.parametrize(("name", "arguments"), SMALL.items())
def test_the_smallest_run_of_a_script_writes_rows(
    name: str, arguments: str, load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for key, value in one.items():
        monkeypatch.setenv(key, value)
    load(name).main([*arguments.split(), "--out", str(tmp_path / "rows.jsonl")])
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    assert all(row["device"] for row in rows)
    assert {row["what"] for row in rows} == {"sum", "gather", "round"}
