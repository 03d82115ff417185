"""README is short, each of its numbers is that of committed rows, and its picture is drawn from them."""

from __future__ import annotations

import importlib
import json
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sweep
import sweep_page
from helpers.pages import FENCE, ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "results"
WORDS = 700
NAMES = (
    "Qwen2.5-Coder-1.5B-Instruct",
    "smollm2-135m-instruct",
    "SmolLM2",
    "GSM8K",
    "EAGLE-3",
    "eagle3",
    "eagle2",
    "H100",
    "H200",
    "fp32",
    "bf16",
    "x86-64",
    "Apache-2.0",
    "compute capability 8.0",
    "A100",
    "RTX 30",
    "http://127.0.0.1:8000",
    "4-bit",
)
"""Digits that measure nothing."""


@pytest.fixture(scope="module")
def picture() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("front_picture")
    sys.modules.pop("front_picture", None)


def rows(file: str, **wanted: Any) -> list[dict[str, Any]]:
    """The rows of a file in benchmarks/results that have these values."""
    found = map(json.loads, (RESULTS / file).read_text(encoding="utf-8").splitlines())
    return [row for row in found if all(row.get(name) == value for name, value in wanted.items())]


def size(file: str) -> tuple[str, str]:
    """How many prompts a run had, and how long its answers were at most."""
    plain = rows(file, batch=1, method="transformers")
    (longest,) = {row["max_new_tokens"] for row in plain}
    return f"{len(plain)} prompts", f"{longest} tokens"


def equal(**wanted: Any) -> str:
    (found,) = {
        (row["equal"], row["answers"])
        for row in rows("exact_h100.jsonl", assistant="eagle3", prompts="mt_bench", batch=1, **wanted)
    }
    return "{} of {}".format(*found)


def all_equal() -> str:
    """Answers of SmolLM2 in exact batches of 8 that are those of `autoregressive`, of how many."""
    wanted = {"assistant": "eagle3", "batch": 8, "exact": True, "model": "smollm2-135m-instruct"}
    found = rows("exact_h200.jsonl", **wanted)
    return f"{sum(row['equal'] for row in found)} of {sum(row['answers'] for row in found)}"


def median(file: str, method: str) -> float:
    return statistics.median(row["tokens_per_second"] for row in rows(file, method=method))


def minor(version: str) -> str:
    """A version without its last number."""
    return version.rpartition(".")[0]


def measured_with(*files: str) -> set[str]:
    """The minor versions of transformers that the rows of these files name."""
    return {minor(row["transformers"]) for file in files for row in rows(file, batch=1)}


def claims(picture: Any) -> list[tuple[str, str]]:
    """The phrases of README that have numbers, as rows say them, each with the file of its rows; "" for versions."""
    real, beside, cpu = picture.PANELS
    gpu, plain, cores = (
        {name: picture.number(speed) for name, speed in each.speeds().items()} for each in picture.PANELS
    )
    faster = beside.speeds()["autoregressive"] / beside.speeds()["static-compile"]
    again = real.speeds()["eagle3"] / real.speeds()["autoregressive"]
    versions, swept = sweep_page.read(sweep.RESULTS)
    found = sweep_page.counts(swept)
    (texts,) = {row["texts"] for row in rows("distribution_h200.jsonl")}
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (python,) = re.findall(r'requires-python = ">=([\d.]+)"', project)
    (torch,) = re.findall(r'"torch>=([\d.]+)"', project)
    ((oldest, beyond),) = re.findall(r'"transformers>=([\d.]+),<5\.(\d+)"', project)
    release = minor(versions["transformers"])
    (older,), (newer,) = measured_with(real.rows), measured_with(beside.rows, cpu.rows)
    return [
        (
            f"H100: generate {gpu['transformers']}, no drafts {gpu['autoregressive']}, n-grams {gpu['nasd']}, "
            f"EAGLE-3 head {gpu['eagle3']}",
            real.rows,
        ),
        (
            f"H200: generate {plain['transformers']}, static cache, compiled {plain['static-compile']}, "
            f"no drafts {plain['autoregressive']}, n-grams {plain['nasd']}",
            beside.rows,
        ),
        (
            f"Two CPU cores: generate {cores['transformers']}, static cache, compiled {cores['static-compile']}, "
            f"no drafts {cores['autoregressive']}, speculative {cores['speculative']}",
            cpu.rows,
        ),
        (f"a head's drafts make the model {again:.1f} times as fast as no drafts", real.rows),
        (f"{faster:.1f} times as fast as transformers' static cache", beside.rows),
        *((each, real.rows) for each in size(real.rows)),
        (size(beside.rows)[0].replace(" ", " such "), beside.rows),
        *((each, cpu.rows) for each in size(cpu.rows)),
        (f"Python {python} and torch {torch}, or newer, and transformers {oldest} to 5.{int(beyond) - 1}", ""),
        (f"transformers {older}, else {newer}", real.rows),
        (f"of transformers {release}", sweep.RESULTS.name),
        (f"{found['adapter'] + found['generic']} gave equal tokens", sweep.RESULTS.name),
        (f"{found['refused']} are refused by name, {found['wrong'] or 'none'} differed", sweep.RESULTS.name),
        (f"{found['untried']} were not tried", sweep.RESULTS.name),
        (f"{equal(exact=True)} on an H100, {equal(exact=False)} without", "exact_h100.jsonl"),
        (f"SmolLM2's {all_equal()} with eagle3 on an H200", "exact_h200.jsonl"),
        (f"prompt lookup: {picture.number(median(beside.rows, 'prompt-lookup'))}", beside.rows),
        (f"assisted generation: {picture.number(median(cpu.rows, 'assisted'))}", cpu.rows),
        (f"{texts:,} texts", "distribution_h200.jsonl"),
    ]


def paragraphs() -> list[str]:
    """README's paragraphs and items without blocks of code; a picture is of the paragraph after it."""
    return re.split(r"(?<!</picture>)\n(?:\n|(?=- ))", FENCE.sub("", README))


def prose(text: str) -> str:
    """A text in one line: alternative texts of pictures and words of links, no code, targets and tags."""
    text = re.sub(r'<img alt="([^"]*)"[^>]*>', r"\1", text)
    text = re.sub(r"<[^>]*>", "", text)
    text = re.sub(r"\]\([^)]*\)", "", text).replace("[", "").replace("`", "")
    return re.sub(r"\s+", " ", text)


def test_readme_takes_ninety_seconds() -> None:
    assert len(README.split()) < WORDS
    (code,) = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    (table,) = re.findall(r"^\|---.*\n((?:\|.*\n)+)", README, re.MULTILINE)
    assert len([line for line in code.splitlines() if line]) == 10 and table.count("\n") == 4


def test_each_number_is_that_of_its_rows_and_has_them_beside_it(picture: Any) -> None:
    """Each number is a claim, beside a link to the file of its rows, or part of a name."""
    text = prose(FENCE.sub("", README))
    for claim, file in claims(picture):
        beside = [each for each in paragraphs() if claim in prose(each)]
        assert beside and (not file or any(f"(benchmarks/results/{file})" in each for each in beside)), claim
        text = text.replace(claim, "")
    for name in NAMES:
        text = text.replace(name, "")
    assert not re.findall(r"\S*\d\S*", text)


def test_the_picture_is_of_the_rows_as_they_are(picture: Any) -> None:
    for theme in picture.THEMES:
        drawn = (picture.PICTURES / f"speed_{theme}.svg").read_text(encoding="utf-8")
        assert picture.digest() in drawn, "run python benchmarks/front_picture.py"


def test_the_picture_is_drawn_again(picture: Any, tmp_path: Path) -> None:
    picture.main(["--out", str(tmp_path)])
    assert {path.name for path in tmp_path.iterdir()} == {"speed_light.svg", "speed_dark.svg"}
    assert all(picture.digest() in path.read_text(encoding="utf-8") for path in tmp_path.iterdir())
