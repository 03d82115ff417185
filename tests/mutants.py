"""Mutation testing: changes one line at a time and counts what the tests notice, each by the tests that run it.

`make mutants` draws `count` mutants of the modules that `mutants.toml` names, with a fixed seed. Which tests run which
lines is recorded once (`.mutants/lines/`, by test file, anew where the file or a module that it ran has changed). Each
mutant is tried in a copy of the tree, by tests that name what it changes and by the quickest of every test file.
Results go to `.mutants/results.jsonl` as they come: a run that was stopped goes on where it was, and a verdict stands
until the mutant's function or the test that killed it changes. `mutants.md` says how all ended; `mutants.toml` why
those that live do.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from helpers.mutant_tests import Ran, chosen
from helpers.mutants import Mutant, drawn

LIST = Path(__file__).with_suffix(".toml")
HELD = Path(".mutants")
"""What a run keeps, in the folder that it runs in."""
PROCESSES = 2
SLOWER, START = 6.0, 240.0
"""A mutant's tests may take this much longer than they took, and these seconds: other work may share the machine, and
what a file's tests share is counted for the first of them alone."""
KILLED, SHARE = ("failed", "timeout"), 0.9
OUTCOMES = {0: "lived", 1: "failed", 2: "failed", 5: "untested"}
"""By pytest's exit status; a module that cannot be imported interrupts it."""
NOT_FOUND, CONFTEST = 4, "ImportError while loading conftest"
"""pytest's status where it finds no such test, or cannot import what a conftest.py imports, which it says."""
PRELOAD = ["hypothesis", "pytest", "torch", "transformers", "transformers.models.llama.modeling_llama"]
PYTEST = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", "--hypothesis-profile=mutants"]


@dataclass(slots=True)
class Result:
    """What became of a mutant, under this `source` of its function and these `tests`."""

    key: str
    outcome: str
    seconds: float
    source: str
    tests: str
    count: int
    by: str = ""
    """The test file that killed it, "" where it is not known, and a digest of the file."""
    by_text: str = ""


@dataclass(slots=True)
class Listed:
    """`mutants.toml`: what is drawn, and why mutants live."""

    seed: int
    count: int
    modules: list[str]
    always: list[str] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)


def listing() -> Listed:
    """What `mutants.toml` says."""
    import tomllib

    return Listed(**tomllib.loads(LIST.read_text()))


def digest(*texts: str) -> str:
    """A short name of some texts."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def sources_of(patterns: Iterable[str], root: Path) -> dict[str, str]:
    """The modules that patterns under `fastspec/` name, with their texts. Raises ValueError for a pattern that names
    none."""
    found: dict[str, str] = {}
    for pattern in patterns:
        here = sorted((root / "fastspec").glob(pattern))
        if not here:
            raise ValueError(f"mutants.toml: modules has {pattern!r}, which is no file under fastspec/")
        found |= {
            str(path.relative_to(root / "fastspec")): path.read_text() for path in here if path.name != "__init__.py"
        }
    return dict(sorted(found.items()))


def source_of(mutant: Mutant, sources: Mapping[str, str]) -> str:
    """The text of a mutant's function, or of its module where it stands in none."""
    return "\n".join(sources[mutant.module].splitlines()[mutant.body[0] - 1 : mutant.body[1]])


def read(path: Path) -> dict[str, Result]:
    """The last result of every mutant; a line that a stopped run left unfinished counts for none."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            result = Result(**json.loads(line))
        except ValueError:
            continue
        found[result.key] = result
    return found


def asked_by(tests: Sequence[str], texts: Mapping[str, str]) -> str:
    """A digest of tests and of their files."""
    return digest(*tests, *(texts.get(file, "") for file in sorted({name.partition("::")[0] for name in tests})))


def is_valid(result: Result | None, source: str, tests: Sequence[str], texts: Mapping[str, str]) -> bool:
    """Whether a result still holds: a mutant that was killed is tried again where its function or the test file that
    killed it changed, one that lived where it is asked by other tests, and one whose tests could not be run always."""
    if result is None or result.source != source or result.outcome.startswith("error"):
        return False
    if result.outcome in KILLED:
        return result.by_text == digest(texts.get(result.by, ""))
    return result.tests == asked_by(tests, texts)


def verdict(code: int | None, said: str) -> tuple[str, str]:
    """(outcome, test file that failed) by pytest's exit status, None where it took too long, and what it printed."""
    if code is None:
        return "timeout", ""
    broken = code < 0 or (code == NOT_FOUND and CONFTEST in said)
    outcome = OUTCOMES.get(code, "failed" if broken else f"error {code}")
    by = re.search(r"^(?:FAILED|ERROR) ([^\s:]+)", said, re.MULTILINE)
    return outcome, by[1] if by is not None and outcome == "failed" else ""


def run_all(
    jobs: Sequence[tuple[Mutant, list[str], str]],
    path: Path,
    attempt: Callable[[Mutant, list[str]], tuple[str, str]],
    texts: Mapping[str, str],
    processes: int = PROCESSES,
) -> dict[str, Result]:
    """Try those mutants whose results in `path` do not hold, (mutant, tests, digest of its function) each, and append
    theirs -> all. An attempt gives the outcome and the test file that killed it; `texts` are those of test files."""
    found = read(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    left = [job for job in jobs if not is_valid(found.get(job[0].key), job[2], job[1], texts)]

    def one(job: tuple[Mutant, list[str], str]) -> Result:
        mutant, tests, source = job
        began = time.perf_counter()
        outcome, by = attempt(mutant, tests) if tests else ("untested", "")
        seconds = round(time.perf_counter() - began, 1)
        by_text = digest(texts.get(by, ""))
        return Result(mutant.key, outcome, seconds, source, asked_by(tests, texts), len(tests), by, by_text)

    with ThreadPoolExecutor(processes) as pool, path.open("a") as out:
        for done, finished in enumerate(as_completed([pool.submit(one, job) for job in left]), 1):
            result = finished.result()
            found[result.key] = result
            print(json.dumps(asdict(result)), file=out, flush=True)
            print(f"[{done}/{len(left)}] {result.outcome:8} {result.seconds:5.1f} s  {result.key}", flush=True)
    return {job[0].key: found[job[0].key] for job in jobs}


def page(listed: Listed, mutants: Sequence[Mutant], results: Mapping[str, Result]) -> Iterator[str]:
    """The lines of `mutants.md`."""
    tried = [mutant for mutant in mutants if mutant.key in results]
    killed = [mutant for mutant in tried if results[mutant.key].outcome in KILLED]
    yield from (
        "# Mutants",
        "",
        f"`make mutants` draws {len(mutants)} changes of single places and writes this page.",
        "",
    )
    yield (
        f"{len(tried)} of them were tried so far, {len(killed)} of these killed: "
        f"{len(killed) / max(1, len(tried)):.1%}."
    )
    yield from ("", "| modules | drawn | tried | killed |", "|---|---|---|---|")
    for folder in sorted({str(Path(mutant.module).parent) for mutant in mutants}):
        here = [sum(str(Path(mutant.module).parent) == folder for mutant in each) for each in (mutants, tried, killed)]
        yield f"| {folder} | {' | '.join(map(str, here))} |"
    yield from ("", "## Lived", "")
    for mutant in tried:
        result = results[mutant.key]
        if result.outcome not in KILLED:
            said = listed.reasons.get(mutant.key, "no reason is given")
            yield f"- {said} ({result.outcome}, {result.count} tests)\n  `{mutant.key}`"


def faults(listed: Listed, mutants: Sequence[Mutant], results: Mapping[str, Result]) -> list[str]:
    """What is to be mended: survivors without a reason, reasons of mutants that are killed, and too small a share of
    killed ones."""
    tried = [mutant.key for mutant in mutants if mutant.key in results]
    killed = {key for key in tried if results[key].outcome in KILLED}
    found = [f"lived without a reason: {key}" for key in tried if key not in killed and key not in listed.reasons]
    found += [f"has a reason, and is killed: {key}" for key in killed if key in listed.reasons]
    if len(killed) < SHARE * len(tried):
        found.append(f"{len(killed)} of {len(tried)} are killed, fewer than {SHARE:.0%}")
    return found


# What runs in a process of its own


def enter(tree: str, log: str) -> None:
    """Stand in a copy of the tree, ahead of any that is installed, in a process group that can be ended as a whole."""
    os.setsid()
    os.chdir(tree)
    os.environ["PYTHONPATH"] = tree
    sys.path[:] = [
        tree,
        f"{tree}/tests",
        *(each for each in sys.path if each not in ("", tree) and not each.endswith("/tests")),
    ]
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1), os.dup2(out, 2)


def ask(tree: str, log: str, tests: list[str]) -> None:
    """Run tests, and end with pytest's exit status."""
    import pytest

    enter(tree, log)
    code = int(pytest.main([*PYTEST, *tests]))
    sys.stdout.flush()
    os._exit(code)


SHARED = "*"
"""What tests of a file share: lines of fixtures that are made once, and of processes that the tests start."""
COVERED = """[run]
data_file = {folder}/lines
parallel = true
sigterm = true
concurrency = thread, multiprocessing
include = {include}
"""


class Recorder:
    """A pytest plugin that tells coverage which test runs, and notes what each took."""

    def __init__(self, coverage: Any) -> None:
        self.coverage = coverage
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: set[str] = set()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self.test = nodeid
        self.coverage.switch_context(nodeid)

    def pytest_fixture_setup(self, fixturedef: Any) -> None:
        """A fixture of it is made."""
        self.coverage.switch_context(self.test if fixturedef.scope == "function" else SHARED)

    def pytest_runtest_call(self) -> None:
        """All are made."""
        self.coverage.switch_context(self.test)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A part of it is over."""
        self.seconds[report.nodeid] += report.duration
        if not report.passed:
            self.failed.add(report.nodeid)


def record(tree: str, log: str, test: str, modules: list[str], out: str) -> None:
    """Run a test file under coverage, and write which lines of the modules each of its passing tests runs, those that
    they share included."""
    enter(tree, log)
    import coverage
    import pytest

    folder, root = Path(f"{tree}.lines"), Path(tree) / "fastspec"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    settings = folder / "settings"
    settings.write_text(COVERED.format(folder=folder, include=",".join(str(root / module) for module in modules)))
    cover = coverage.Coverage(data_file=None, config_file=str(settings))
    cover.start()
    recorder = Recorder(cover)
    pytest.main([*PYTEST[1:], test], plugins=[recorder])
    cover.stop()
    lines = defaultdict[str, dict[str, int]](lambda: defaultdict(int))

    def add(data: Any, shared: bool) -> None:
        for path in data.measured_files():
            for line, names in data.contexts_by_lineno(path).items():
                for name in [SHARED] if shared else names:
                    lines[name][str(Path(path).relative_to(root))] |= 1 << line

    add(cover.get_data(), shared=False)
    for path in folder.glob("lines.*"):
        data = coverage.CoverageData(str(path))
        with suppress(coverage.exceptions.DataError):  # of a process that was killed while it wrote
            data.read()
            add(data, shared=True)
    rows = {
        name: {
            "seconds": round(seconds, 3),
            "lines": {
                module: hex(lines[name].get(module, 0) | lines[SHARED].get(module, 0))
                for module in {**lines[name], **lines[SHARED]}
            },
        }
        for name, seconds in recorder.seconds.items()
        if name not in recorder.failed
    }
    Path(out).write_text(json.dumps(rows))
    sys.stdout.flush()
    os._exit(0)


class Runner:
    """Copies of the tree, one for each process at a time, and processes that have imported what takes long."""

    def __init__(self, root: Path, held: Path, processes: int) -> None:
        self.root, self.held = root, held
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOAD)
        self.folder = Path(tempfile.mkdtemp(prefix="fastspec-mutants-"))
        self.trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=root, check=True, capture_output=True, text=True
        )
        for number in range(processes):
            tree = self.folder / str(number)
            for name in listed.stdout.splitlines():
                if (root / name).is_file():
                    (tree / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(root / name, tree / name)
            self.trees.put(tree)

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def in_process(self, target: Callable[..., None], tree: Path, limit: float, *given: Any) -> int | None:
        """Run a function in a process -> its exit status; None of one that took longer than `limit` seconds. None of
        its own processes is left."""
        process = self.context.Process(target=target, args=(str(tree), f"{tree}.log", *given))
        process.start()
        process.join(limit)
        code = process.exitcode
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
        return code

    def attempt(self, mutant: Mutant, tests: list[str], limit: float) -> tuple[str, str]:
        """What tests say of a mutant, and the file of the one that fails."""
        tree = self.trees.get()
        path, source = tree / "fastspec" / mutant.module, (self.root / "fastspec" / mutant.module).read_text()
        try:
            path.write_text(mutant.applied(source))
            code = self.in_process(ask, tree, limit, tests)
            if code == NOT_FOUND:  # a test's file cannot be collected, or its cases have other names
                code = self.in_process(ask, tree, limit, sorted({name.partition("::")[0] for name in tests}))
            said = Path(f"{tree}.log").read_text(errors="replace")
        finally:
            path.write_text(source)
            self.trees.put(tree)
        return verdict(code, said)

    def record(self, test: str, modules: list[str]) -> dict[str, Any] | None:
        """What a test file runs, see `record`; None where it takes too long or ends its process."""
        tree = self.trees.get()
        out = Path(f"{tree}.json")
        out.unlink(missing_ok=True)
        try:
            self.in_process(record, tree, 900, test, modules, str(out))
            rows: dict[str, Any] | None = json.loads(out.read_text()) if out.exists() else None
        finally:
            self.trees.put(tree)
        return rows


def line_map(runner: Runner, sources: Mapping[str, str], files: Sequence[Path], processes: int) -> dict[str, Ran]:
    """What every test runs, from what is kept, and recorded where that does not hold any more."""
    folder = runner.held / "lines"
    folder.mkdir(parents=True, exist_ok=True)
    marks = {module: digest(text) for module, text in sources.items()}

    def one(path: Path) -> dict[str, Any]:
        name = str(path.relative_to(runner.root))
        kept, own = folder / f"{name.replace('/', '.')}.json", digest(path.read_text())
        if kept.exists():
            held = json.loads(kept.read_text())
            if held["own"] == own and all(marks.get(module) == mark for module, mark in held["sources"].items()):
                return dict(held["tests"])
        began = time.perf_counter()
        rows = runner.record(name, list(sources))
        if rows is None:
            print(f"not recorded: {name}, which takes too long or ends its process", flush=True)
            return {}
        used = {module for row in rows.values() for module in row["lines"]}
        kept.write_text(
            json.dumps({"own": own, "sources": {module: marks[module] for module in sorted(used)}, "tests": rows})
        )
        print(f"recorded {name}: {len(rows)} tests, {time.perf_counter() - began:.0f} s", flush=True)
        return rows

    with ThreadPoolExecutor(processes) as pool:
        found = [item for rows in pool.map(one, files) for item in rows.items()]
    return {
        name: Ran(row["seconds"], {module: int(bits, 16) for module, bits in row["lines"].items()})
        for name, row in found
    }


def main() -> int:
    """Try the drawn mutants, write the page, and say what is to be mended; 1 where there is any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", help="parts of the names of modules whose mutants are tried, all by default"
    )
    parser.add_argument("--most", type=int, help="mutants that are tried in this run at most")
    parser.add_argument(
        "--tests",
        nargs="+",
        default=["**/test_*.py"],
        help="patterns of test files under tests/, where some are enough",
    )
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--seconds", type=float, default=START, help="more for each mutant than its tests took")
    asked = parser.parse_args()
    # Triton is imported before conftest.py is read: by the processes that the others are forked from
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    listed, root = listing(), Path.cwd()
    sources = sources_of(listed.modules, root)
    mutants = drawn(sources, listed.count, listed.seed)
    files = sorted(
        {path for pattern in asked.tests for path in (root / "tests").glob(pattern) if "clients" not in path.parts}
    )
    kept = root / HELD / "results.jsonl"
    with Runner(root, root / HELD, asked.processes) as runner:
        tests = line_map(runner, sources, files, asked.processes)
        wanted = [each for each in mutants if not asked.names or any(part in each.module for part in asked.names)]
        marks = {each.key: digest(source_of(each, sources)) for each in mutants}
        texts = {str(path.relative_to(root)): path.read_text() for path in files}
        jobs = [
            (mutant, [*listed.always, *chosen(mutant, tests, sources, texts)], marks[mutant.key]) for mutant in wanted
        ]
        held = read(kept)
        left = [job for job in jobs if not is_valid(held.get(job[0].key), job[2], job[1], texts)]
        limits = {
            job[0].key: asked.seconds + SLOWER * sum(tests[name].seconds for name in job[1] if name in tests)
            for job in left
        }
        run_all(
            left[: asked.most],
            kept,
            lambda mutant, names: runner.attempt(mutant, names, limits[mutant.key]),
            texts,
            asked.processes,
        )
    held = read(kept)
    results = {key: held[key] for key, mark in marks.items() if key in held and held[key].source == mark}
    text = "\n".join(page(listed, mutants, results)) + "\n"
    LIST.with_suffix(".md").write_text(text)
    wrong = faults(listed, mutants, results)
    print(text, *wrong, sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
