"""Run transformers' own generation tests, those of its GenerationTesterMixin, on patched models:

    python tests/transformers_suite/run.py path/to/transformers --out results.jsonl

The path is that of a checkout of transformers, of the installed version, of which `tests/` and `src/` are read. It
takes `pip install parameterized httpx` besides fastspec, and where the checkout is of another version, stand-ins for
what its tests import and the installed one lacks: `tests/exporters`, `tests/distributed_testing_utils.py`, the mixins
for FSDP and pipelines, the package `datasets`, names that have changed since. The tests of every family run unpatched
and under each setting of `plugin.py`, with their inputs as they are, padded on the right, which an assistant leaves to
transformers, and with the padding on the left. Where a test passes unpatched and not patched, the exit status is 1.
Tests that compile the forward pass take minutes and are left out; `--compiled` runs these alone. Runs that the file of
results has already, and that are not made again, stay in it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers

FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "gemma2",
    "gemma3",
    "gemma4",
    "gpt_oss",
    "olmo3",
    "glm4_moe",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen2_5_vl",
    "qwen3_vl",
    "llava",
    "mistral3",
    "ministral",
    "cohere2",
    "exaone4",
    "smollm3",
    "phi3",
    "olmo_hybrid",
    "smolvlm",
    "gemma3n",
    "gemma4_unified",
)
SETTINGS = ("unpatched", "autoregressive", "nasd", "eagle3", "early_exit")
INPUTS = {"as they are": (), "padded on the left": ("--left-padding",)}
TESTS = Path(__file__).resolve().parent.parent


def run(checkout: Path, family: str, setting: str, options: tuple[str, ...], compiled: bool) -> dict[str, Any]:
    """The outcome of one family's tests under one setting, as `plugin.py` writes it."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "outcome.json"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "--noconftest",
            "-p",
            "no:cacheprovider",
            "-p",
            "transformers_suite.plugin",
            "-q",
            "--tb=short",
            "--disable-warnings",
            "-o",
            "log_cli=0",
            "-k",
            "compil" if compiled else "not compil",
            "--setting",
            setting,
            "--outcome",
            str(out),
            *options,
            f"tests/models/{family}/test_modeling_{family}.py",
        ]
        paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
        held = {"RUN_SLOW": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        done = subprocess.run(command, cwd=checkout, env=os.environ | held, capture_output=True, text=True)
        if not out.exists():
            raise SystemExit(
                f"{' '.join(command)} ended with {done.returncode} and no outcome:\n{done.stdout}\n{done.stderr}"
            )
        outcome = json.loads(out.read_text())
        if not outcome["tests"]:
            raise SystemExit(f"{' '.join(command)} ran no test:\n{done.stdout}\n{done.stderr}")
        return outcome


FOLDERS = re.compile(r"^\S*/(?=(?:transformers|torch|tests|fastspec)/)")
"""What an error's place begins with on one machine alone."""


def summary(outcome: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """A row of the results: counts, and the tests that do not pass as they do unpatched, with their errors."""
    tests, wanted = outcome["tests"], plain["tests"]
    lost = [name for name, result in wanted.items() if result == "passed" and tests.get(name) != "passed"]
    errors = {name: FOLDERS.sub("", error) for name, error in outcome["errors"].items()}
    broken = {name: errors.get(name, tests.get(name, "did not run")) for name in lost}
    row: dict[str, Any] = dict(Counter(tests.values())) | {"broken": broken}
    if outcome is plain:
        return row | {
            "failed tests": errors,
            "skipped tests": sorted(name for name in tests if tests[name] == "skipped"),
        }
    return row | {name: outcome[name] for name in ("counts", "left to transformers", "refused at patch")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS[1:], default=SETTINGS[1:])
    parser.add_argument("--inputs", nargs="+", choices=list(INPUTS), default=list(INPUTS))
    parser.add_argument("--compiled", action="store_true", help="those tests alone that compile the forward pass")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    tests = re.search(r"version=\"(.+?)\"", (asked.checkout / "setup.py").read_text())
    held = {"transformers": transformers.__version__, "torch": torch.__version__, "python": sys.version.split()[0]}
    versions = {"tests": tests and tests[1], **held}
    rows = [json.loads(line) for line in asked.out.read_text().splitlines()] if asked.out.exists() else []
    for family in asked.families:
        for inputs in asked.inputs:
            plain: dict[str, Any] = {}
            for setting in ("unpatched", *asked.settings):
                outcome = run(asked.checkout, family, setting, INPUTS[inputs], asked.compiled)
                plain = plain or outcome
                run_of = {"family": family, "inputs": inputs, "setting": setting, "compiled": asked.compiled}
                rows = [row for row in rows if any(row[name] != value for name, value in run_of.items())]
                rows.append({**run_of, "versions": versions, **summary(outcome, plain)})
                asked.out.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
                print(
                    {name: value for name, value in rows[-1].items() if isinstance(value, (str, int))},
                    *rows[-1]["broken"],
                    flush=True,
                )
    return int(any(row["broken"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
