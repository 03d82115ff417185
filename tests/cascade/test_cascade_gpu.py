"""A cascade on CUDA: its modes say there what they say on the CPU, stages may lie on the CPU, and what cannot be is
refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.cascade import Told, cascaded, stages, with_saved_stage
from helpers.devices import ON_CUDA
from helpers.generate import prompts
from helpers.models import tiny_model
from helpers.tokenizers import TARGET

import fastspec
from fastspec.cascade.predictor import Predictor
from fastspec.errors import Unsupported
from fastspec.patches.session import session_of

pytestmark = ON_CUDA
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
DEVICE = "cuda"
GREEDY = {"do_sample": False, "max_new_tokens": 40}
LENGTHS = ((9,), (3, 12), (7, 7, 2))


def moved(*lengths: int) -> dict[str, torch.Tensor]:
    return {name: each.to(DEVICE) for name, each in prompts(*lengths).items()}


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "lossless"},
        {"mode": "lossless", "gamma": 2},
        {"mode": "token"},
        {"mode": "token", "rule": "token_v2", "alpha": 0.3},
        {"mode": "token", "rule": "chow", "alpha": 0.3, "gamma": 3},
        {"mode": "token", "rule": "token_v2", "alpha": 1.0},
    ],
    ids=str,
)
def test_the_modes_within_a_call_say_what_they_say_on_the_cpu(settings, monkeypatch):
    """A lossless one what the large model says alone. The models' passes come from graphs, by the shape of the tree;
    `replays` of a call, which counts whole rounds, does not count those."""
    below = 1 if settings["mode"] == "token" else 2
    here = stages(1 + below)
    there = [copy.deepcopy(model).to(DEVICE) for model in here]
    plain = copy.deepcopy(there[-1])
    first, second = cascaded(here, **settings), cascaded(there, **settings)
    replayed: list[int] = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: replayed.append(1) or replay(graph))
    for lengths in LENGTHS:
        for _ in range(2):
            emitted = second.generate(**moved(*lengths), **GREEDY, assistant="cascade")
        assert emitted.tolist() == first.generate(**prompts(*lengths), **GREEDY, assistant="cascade").tolist()
        if settings["mode"] == "lossless" or "alpha" not in settings:
            assert emitted.tolist() == plain.generate(**moved(*lengths), **GREEDY).tolist()
    last = fastspec.report(second).last
    assert last.drafted > 0 and last.replays == 0 and len(replayed) > last.rounds


@pytest.mark.parametrize("stage_on", ["cpu", DEVICE, pytest.param("cuda:1", marks=TWO_GPUS)])
def test_stages_of_the_adaptive_mode_lie_where_they_are(stage_on, monkeypatch):
    """Each row is answered as by its stage alone, wherever that is; on the way to the large model its answer is read
    again there."""
    small, large = stages(2)
    small, large = small.to(stage_on), large.to(DEVICE)
    alone = [copy.deepcopy(small), copy.deepcopy(large)]
    model = cascaded([small, large], thresholds=[0.5])
    for reached in (0, 1):
        told = Told([(1.0 if reached == 0 else 0.0, 0.5)])
        monkeypatch.setattr(Predictor, "score", lambda *args, told=told: told(*args))
        for lengths in ((9,), (5,)):
            told.asked.clear()
            emitted = model.generate(**moved(*lengths), **GREEDY, eos_token_id=1000, assistant="cascade")
            place = next(alone[reached].parameters()).device
            inputs = {name: each.to(place) for name, each in prompts(*lengths).items()}
            assert emitted.device.type == DEVICE
            assert emitted.tolist() == alone[reached].generate(**inputs, **GREEDY, eos_token_id=1000).tolist()
            assert [visit.stage for visit in fastspec.report(model).last.explanations[0].visits] == list(
                range(reached + 1)
            )


@pytest.mark.parametrize("stage_on", ["cpu", pytest.param("cuda:1", marks=TWO_GPUS)])
@pytest.mark.parametrize("mode", ["token", "lossless"])
def test_a_stage_elsewhere_is_refused_by_name_within_a_call(mode, stage_on):
    small, large = stages(2)
    model = cascaded([small.to(stage_on), large.to(DEVICE)], mode=mode)
    with pytest.raises(Unsupported, match=rf"the stage 'medium' is on {stage_on} and the large model on cuda:0"):
        model.generate(**moved(5), **GREEDY, assistant="cascade")


def moved_stages() -> list[Any]:
    return [model.to(DEVICE) for model in stages(3)]


def test_token_mode_refuses_a_second_stage_by_name():
    with pytest.raises(Unsupported, match="mode='token' mixes two models: give one stage, not 2"):
        cascaded(moved_stages(), mode="token")


@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
@pytest.mark.parametrize("device", [DEVICE, pytest.param("cuda:1", marks=TWO_GPUS)])
def test_quantised_stages_lie_beside_the_large_model(tmp_path, quantization, device):
    pytest.importorskip("bitsandbytes")
    large = tiny_model(seed=2, num_hidden_layers=3, vocab_size=len(TARGET)).to(device)
    with_saved_stage(large, tmp_path, TARGET, quantization=quantization, dtype="float32")
    ids = torch.tensor([[5, 6, 7, 8]], device=device)
    out = large.generate(ids, **GREEDY, assistant="cascade", eos_token_id=None)
    held = session_of(large).resources["cascade"].stages[0].model
    weight = held.model.layers[0].mlp.up_proj.weight
    assert type(weight).__module__.startswith("bitsandbytes") and weight.device == next(large.parameters()).device
    assert out.tolist() == held.generate(ids, **GREEDY, eos_token_id=None).tolist()
