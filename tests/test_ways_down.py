"""Ways of a head's path, a call's ids and its processors through the packages: into one above at most once, and back
into a module that they had left at most four times.

A value has come to a module where a call has it, or a list with it, as an argument.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
from helpers.generate import prompts
from helpers.heads import save_eagle3
from helpers.models import tiny_head, tiny_model
from torch import Tensor
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

import fastspec

ROOT = Path(fastspec.__file__).parent
FLOORS = "kernels", "generation", "cascade", "patches", "programs"


def way(run: Callable[[], Any], carried: Callable[[Any], bool]) -> list[Path]:
    """The modules of the library that a run's value goes through, in their order."""
    found: list[Path] = []

    def watch(frame: Any, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT) and any(map(carried, frame.f_locals.values())):
            found.append(path.relative_to(ROOT))

    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(None)
    return [path for path, _ in groupby(found)]


@pytest.fixture
def model(tmp_path: Path) -> Any:
    target = tiny_model("llama")
    save_eagle3(tiny_head(target), tmp_path / "head", (0, 1, 2))
    fastspec.patch(target, eagle3=tmp_path / "head")
    return target


def way_of_path(model: Any, folder: Path) -> list[Path]:
    fastspec.unpatch(model)
    path = folder / "head"
    return way(
        lambda: fastspec.patch(model, eagle3=path), lambda it: isinstance(it, Path | str) and str(path) in str(it)
    )


def way_of_ids(model: Any, folder: Path) -> list[Path]:
    inputs = prompts(4, 9)
    start = inputs["input_ids"].data_ptr()
    return way(
        lambda: model.generate(**inputs, max_new_tokens=12, do_sample=False, assistant="eagle3"),
        lambda it: isinstance(it, Tensor) and it.data_ptr() == start,
    )


def way_of_processor(model: Any, folder: Path) -> list[Path]:
    one = RepetitionPenaltyLogitsProcessor(1.3)
    inputs = {**prompts(4, 9), "max_new_tokens": 12, "do_sample": True, "logits_processor": LogitsProcessorList([one])}
    return way(
        lambda: model.generate(**inputs, assistant="eagle3"),
        lambda it: it is one or (isinstance(it, list | tuple) and any(each is one for each in it)),
    )


@pytest.mark.parametrize("ways", [way_of_path, way_of_ids, way_of_processor], ids=["path", "ids", "processor"])
def test_a_value_goes_up_once_and_back_four_times_at_the_most(model: Any, tmp_path: Path, ways: Any) -> None:
    modules = ways(model, tmp_path)
    floors = [FLOORS.index(path.parts[0]) for path in modules if path.parts[0] in FLOORS]
    assert len(set(modules)) > 1, modules
    assert sum(upper > lower for lower, upper in pairwise(floors)) <= 1, modules
    assert len(modules) - len(set(modules)) <= 4, modules
