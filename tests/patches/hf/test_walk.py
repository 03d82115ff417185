"""All modules of a model, walked quickly, and how often a call looks at its model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.captured import stand_in
from helpers.models import tiny_head, tiny_model
from torch import nn

import fastspec
from fastspec.patches.hf import changes, modes
from fastspec.patches.hf.compat import every_module
from fastspec.patches.hf.layer_weights import pack_model
from fastspec.patches.session import PatchSession
from fastspec.programs.bench.methods import twin


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_it_finds_what_torch_finds_in_its_order(family):
    model = tiny_model(family)
    assert every_module(model) == list(model.modules())


def test_modules_that_are_shared_missing_or_in_a_circle_are_found_once():
    shared = nn.Linear(2, 2)
    whole = nn.Module()
    whole.first, whole.second, whole.third = (
        nn.Sequential(shared),
        nn.Sequential(nn.Sequential(shared), nn.Identity()),
        None,
    )
    whole.register_module("nothing", None)
    whole.first.above = whole
    assert every_module(whole) == list(whole.modules())


@pytest.mark.parametrize("assistant", ["autoregressive", "eagle3"])
def test_a_call_asks_once_how_its_model_runs(monkeypatch, assistant):
    """Each look is a walk over all modules, on the host, while the device waits."""
    stand_in(monkeypatch)
    model = tiny_model("llama")
    fastspec.patch(model, eagle3=tiny_head(model))
    asked: dict[str, Any] = {
        "max_new_tokens": 4,
        "do_sample": False,
        "assistant": assistant,
        "attention_mask": torch.ones(1, 6, dtype=torch.long),
    }
    ids = torch.arange(1, 7)[None]
    for _ in range(3):  # captured
        model.generate(ids, **asked)
    looks: list[str] = []

    def counted(name: str, run: Any) -> Any:
        return lambda *args, **more: (looks.append(name), run(*args, **more))[1]

    monkeypatch.setattr(PatchSession, "mode", counted("mode", PatchSession.mode))
    for module in (changes, modes):
        monkeypatch.setattr(module, "mode_for", counted("anew", modes.mode_for))
    monkeypatch.setattr(PatchSession, "ops", counted("ops", PatchSession.ops))
    model.generate(ids, **asked)
    assert sorted(looks) == ["mode", "ops"]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_weights_are_laid_together_once_though_nothing_may_have_moved(monkeypatch, family):
    """A second model on weights that the first one's patch laid together, and one whose layers have nothing to lay,
    have none moved."""
    stand_in(monkeypatch)
    first = tiny_model(family)
    second = twin(first)
    asked: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "assistant": "autoregressive", "pad_token_id": 0}
    ids = torch.arange(1, 7)[None]
    packs: list[Any] = []

    def counted(model: Any, **more: Any) -> Any:
        packs.append(model)
        return pack_model(model, **more)

    monkeypatch.setattr("fastspec.patches.session.pack_model", counted)
    for model in (first, second):
        fastspec.patch(model)
        texts = {tuple(model.generate(ids, **asked)[0].tolist()) for _ in range(3)}
        assert len(texts) == 1 and packs.count(model) == 1
    second.to(torch.float64).to(torch.float32)  # new storages, of both
    second.generate(ids, **asked)
    second.generate(ids, **asked)
    assert packs.count(second) == (2 if family == "llama" else 1)
    fastspec.unpatch(second)
    fastspec.unpatch(first)
