"""A cascade as a YAML file: written, read as the same, and used from Python as docs/guide/cascade.md prints it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.cascade import trained
from helpers.models import tiny_model

import fastspec
from fastspec.errors import Unsupported

STAGE = fastspec.Stage(
    "org/small", "org/small", "small", assistant="eagle3", resources={"eagle3": "org/head"}, dtype="float32"
)
WRITTEN = (
    fastspec.Cascade(
        [STAGE, "org/medium"],
        predictor="p.safetensors",
        price=500,
        costs=[1, 2.5, 4],
        tokenizer="org/large",
        label="large",
    ),
    fastspec.Cascade(
        [STAGE],
        predictor=Path("p.safetensors"),
        thresholds=[0.5],
        risk=0.1,
        memory=1 << 20,
        host_memory=5,
        explain=True,
    ),
    fastspec.Cascade(["org/small"], mode="token", rule="opt", alpha=float("-inf"), gamma=3),
    fastspec.Cascade(["org/small"], mode="lossless"),
)


@pytest.mark.parametrize("cascade", WRITTEN, ids=lambda cascade: cascade.mode)
def test_what_is_written_is_read_as_the_same(cascade: fastspec.Cascade, tmp_path: Path) -> None:
    cascade.to_yaml(tmp_path / "a.yaml")
    found = fastspec.Cascade.from_yaml(tmp_path / "a.yaml")
    assert found == fastspec.Cascade(**{**values(cascade), "predictor": cascade.predictor and str(cascade.predictor)})
    assert "gamma" not in (tmp_path / "a.yaml").read_text() or cascade.gamma != 5  # defaults are left out


def values(cascade: fastspec.Cascade) -> dict[str, Any]:
    return {name: getattr(cascade, name) for name in cascade.__slots__}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: fastspec.Cascade([tiny_model()], mode="lossless"), "stage 0: model holds a LlamaForCausalLM"),
        (lambda: fastspec.Cascade(["a"], predictor=trained(("a", "b"))), "Cascade: predictor holds a Predictor"),
        (
            lambda: fastspec.Cascade(["a"], mode="lossless", assistant=fastspec.Nasd(gamma=4)),
            "Cascade: assistant holds a Nasd",
        ),
        (lambda: fastspec.Cascade([fastspec.Stage("a", prompt=str.upper)], mode="lossless"), "stage 0: prompt holds a"),
    ],
)
def test_what_no_file_can_hold_is_refused_and_nothing_is_written(make: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=words):
        make().to_yaml(tmp_path / "a.yaml")
    assert not (tmp_path / "a.yaml").exists()


def test_the_papers_name_of_the_trade_off_is_answered_with_ours(tmp_path: Path) -> None:
    path = tmp_path / "cascade.yaml"
    path.write_text("stages: [{model: a}]\nlambda: 0.5\n")
    with pytest.raises(Unsupported, match=r"unknown key lambda.*`price`, what a bad answer costs"):
        fastspec.Cascade.from_yaml(path)
