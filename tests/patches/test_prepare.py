"""The time of a call before its prefill: one look at the model, which tells whether all is as it was found before."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from helpers.captured import stand_in
from helpers.generate import LENGTH, NEVER, prompts, shallow_model
from helpers.models import tiny_head
from torch import nn

import fastspec
from fastspec.patches import session as sessions
from fastspec.patches.call import generate as front
from fastspec.patches.hf import changes, modes
from fastspec.patches.session import session_of

OPTIONS: dict[str, Any] = {"max_new_tokens": LENGTH, "do_sample": False, "eos_token_id": NEVER}


def watched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the functions that read all of a model, or make its ops, as they are called from here on."""
    found: list[str] = []

    def watch(module: Any, name: str) -> None:
        run = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given: found.append(name) or run(*given))

    for module, name in ((changes, "weight_places"), (modes, "dtype_of"), (sessions, "counted")):
        watch(module, name)
    return found


def test_a_call_reads_a_model_anew_where_it_has_changed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    model, inputs = shallow_model(), prompts(7)
    fastspec.patch(model, eagle3=tiny_head(model))

    def run() -> None:
        expected = copy.deepcopy(model).generate(**inputs, **OPTIONS)
        assert model.generate(**inputs, **OPTIONS, assistant="eagle3").tolist() == expected.tolist()

    run()
    found = watched(monkeypatch)
    run()
    assert found == []
    layer = model.model.layers[1].mlp.up_proj
    layer.weight = nn.Parameter(layer.weight.detach() * 3)
    run()
    assert set(found) == {"weight_places", "dtype_of"}
    found.clear()
    model.to(torch.float64).to(torch.float32)
    run()
    assert "weight_places" in found
    found.clear()
    run()
    assert found == []


def test_weights_that_a_call_lays_together_do_not_cost_the_next_one_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    model, inputs = shallow_model(), prompts(7)
    fastspec.patch(model)
    session = session_of(model)
    assert session is not None
    for engines in (1, 2):
        for _ in range(3):
            model.generate(**inputs, **OPTIONS, assistant="autoregressive")
            assert len(session.engines.held) == engines
        model.to(torch.float64).to(torch.float32)  # each weight has a place of its own again


@pytest.mark.parametrize("assistant", ["autoregressive", "eagle3"])
def test_statistics_say_what_came_before_the_prefill(assistant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan_call = shallow_model(), front.plan_call
    fastspec.patch(model, eagle3=tiny_head(model))

    def slow(*given: Any) -> Any:
        time.sleep(0.1)
        return plan_call(*given)

    monkeypatch.setattr(front, "plan_call", slow)
    begun = time.perf_counter()
    model.generate(**prompts(7), **OPTIONS, assistant=assistant)
    took, report = time.perf_counter() - begun, fastspec.report(model)
    assert report.last.prepare_seconds >= 0.1 and report.last.prepare_seconds + report.last.seconds <= took
    assert f"prepare {report.last.prepare_seconds:.2f} s, prefill" in str(report)
