"""Training that goes on from a head that exists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from helpers.models import tiny_head
from helpers.training import settings, small_target, small_texts
from transformers import LlamaForCausalLM

from fastspec.errors import Unsupported
from fastspec.programs.training.data import Texts
from fastspec.programs.training.heads import draft_vocabulary_of, opened
from fastspec.programs.training.trainer import Trainer

Material = tuple[LlamaForCausalLM, Texts, Texts]
KINDS: dict[str, dict[str, Any]] = {
    "eagle3": {"intermediate_size": 48, "draft_vocab_size": 90, "taps": (1, 2, 4)},
    "eagle": {"intermediate_size": 48},
}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    model = small_target()
    config = settings(tmp_path_factory.mktemp("texts"))
    return model, small_texts(model, 110, config), small_texts(model, 16, config)


@pytest.mark.some("eagle3")
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_from_a_head(material: Material, tmp_path: Path, kind: str) -> None:
    plain: dict[str, Any] = {"kind": kind, "draft_vocab_size": 0, "intermediate_size": 0}
    sizes = {**plain, **KINDS[kind]}
    first = Trainer(
        settings(tmp_path / "one", epochs=2.0, learning_rate=1e-2, **sizes), *material, Accelerator(cpu=True)
    )
    fresh = first.validate()
    first.run()
    trained = first.validate()
    assert (
        kind == "eagle" or sum(trained["accuracy"]) > sum(fresh["accuracy"]) + 0.1
    )  # the start of kind "eagle" is perfect here

    options = {**plain, "start_from": str(tmp_path / "one"), "epochs": 1.0}
    second = Trainer(settings(tmp_path / "two", **options), *material, Accelerator(cpu=True))
    assert second.head.config == first.head.config and torch.equal(second.vocabulary, first.vocabulary)
    assert second.coverage == pytest.approx(first.coverage)
    for name, value in first.head.state_dict().items():
        torch.testing.assert_close(
            second.head.state_dict()[name], value.bfloat16().float() if value.is_floating_point() else value
        )
    began = second.validate()
    assert began["accuracy"] == pytest.approx(trained["accuracy"], abs=0.03)  # its files are bf16
    second.run(limit=1e-9)
    moved = [not torch.equal(a, b) for a, b in zip(first.head.parameters(), second.head.parameters(), strict=True)]
    assert all(moved) and second.progress.step == 1
    third = Trainer(settings(tmp_path / "two", **options), *material, Accelerator(cpu=True))
    assert third.progress.step == 1  # taken up, not begun again
    torch.testing.assert_close(third.head.state_dict(), second.head.state_dict(), rtol=0, atol=0)
    assert "the weights of one" in (tmp_path / "two" / "README.md").read_text()

    with pytest.raises(Unsupported, match=r"other sizes than the run: intermediate_size 47 \(the head: 48\)"):
        Trainer(settings(tmp_path / "three", **{**options, "intermediate_size": 47}), *material, Accelerator(cpu=True))
    other = "eagle3" if kind != "eagle3" else "eagle"
    with pytest.raises(Unsupported, match=f"a head of kind '{kind}' and the run trains '{other}'"):
        Trainer(settings(tmp_path / "three", **{**options, "kind": other}), *material, Accelerator(cpu=True))
    with pytest.raises(Unsupported, match="start_from"):
        Trainer(
            settings(tmp_path / "two", **{**options, "start_from": "", **KINDS[kind]}), *material, Accelerator(cpu=True)
        )


def test_a_head_that_could_not_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One with norms that the original format does not have."""
    model = small_target()
    head = tiny_head(model, qk_norm=True)
    monkeypatch.setattr("fastspec.programs.training.heads.load_head", lambda source, target: head)
    with pytest.raises(Unsupported, match="cannot be trained on: the original formats hold one plain layer"):
        opened(settings(tmp_path, start_from="some/head"), model)


def test_the_vocabulary_of_a_head_is_the_targets_ids(material: Material) -> None:
    head = tiny_head(material[0], draft_vocab_size=20)
    assert torch.equal(draft_vocabulary_of(head), head.to_target(torch.arange(20)))
