"""The core of the tests with the newest transformers of the package index: `make newest`.

    python .ci/newest.py --out newest.xml [arguments of pytest]

The environment is one of its own, into which `make newest` has installed that release, whatever the range of
pyproject.toml says. What broke is told by its cause: each error once, with the number of tests that end in it and one
of them. The exit status is pytest's.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import defaultdict
from importlib.metadata import requires, version
from pathlib import Path
from xml.etree import ElementTree

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
CORE = (
    "tests/patches/hf",
    "tests/patches/call",
    "tests/engine/test_one_way.py",
    "tests/engine/test_round_in_plain_torch.py",
)
"""What reads transformers: its models, its `generate`, its caches and processors."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="pytest's report, in JUnit's form")
    args, more = parser.parse_known_args()
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", f"--junitxml={args.out}", *(more or CORE)], cwd=ROOT)
    print("\n".join(told(args.out)))
    raise SystemExit(done.returncode)


def told(report: Path) -> list[str]:
    """Lines that say what broke, the commonest cause first."""
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    causes: dict[str, list[str]] = defaultdict(list)
    for case in cases:
        for kind in ("failure", "error"):
            if (found := case.find(kind)) is not None:
                first = (found.get("message") or "").strip().splitlines() or [kind]
                causes[first[0][:200]].append(f"{case.get('classname')}::{case.get('name')}")
    skipped, broken = sum(case.find("skipped") is not None for case in cases), sum(map(len, causes.values()))
    lines = [f"transformers {version('transformers')} ({within()}): {broken} of {len(cases) - skipped} tests fail"]
    for cause, tests in sorted(causes.items(), key=lambda pair: -len(pair[1])):
        lines.append(f"{len(tests):5} {cause}\n      {tests[0]}")
    return lines


def within() -> str:
    """Whether fastspec's range accepts the transformers that is installed."""
    wanted = next(
        each for each in map(Requirement, requires("fastspec-transformers") or ()) if each.name == "transformers"
    )
    return f"{'within' if version('transformers') in wanted.specifier else 'beyond'} {wanted.specifier}"


if __name__ == "__main__":
    main()
