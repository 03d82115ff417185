"""What `fastspec.profile` takes down, and the trace that it writes."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from helpers.devices import CUDA
from helpers.generate import MAKERS, TREE, prompts

import fastspec
from fastspec.errors import Unsupported


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.2}], ids=["whole", "with history"])
def test_every_round_is_taken_down(device, options, tmp_path):
    target, head = MAKERS["bigram"]
    model = target().to(device)
    fastspec.patch(model, eagle3=head(model).to(device))
    inputs = {name: tensor.to(device) for name, tensor in prompts(4, 9).items()}
    call = {"do_sample": False, "max_new_tokens": 30, "assistant": TREE, **options}
    expected = model.generate(**inputs, **call).tolist()
    with fastspec.profile(model) as profile:
        assert model.generate(**inputs, **call).tolist() == expected
    last = fastspec.report(model).last
    assert len(profile.rounds) == last.rounds
    wanted = {*(f"draft {level}" for level in range(TREE.depth + 1)), "draft", "score", "commit", "observe", "host"}
    assert wanted <= set(profile.parts) and all(value >= 0 for each in profile.rounds for value in each.values())
    spent = sum(sum(each.values()) for each in profile.rounds) / 1e3
    assert 0 < spent <= last.seconds
    low, middle, high = profile.quantiles("score")
    assert 0 < low <= middle <= high and "score" in str(profile)
    profile.write_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert len(events) == sum(map(len, profile.rounds)) and all(a["ts"] <= b["ts"] for a, b in pairwise(events))
    before = len(profile.rounds)
    assert model.generate(**inputs, **call).tolist() == expected and len(profile.rounds) == before


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_drafter_on_the_host_is_taken_down(device):
    model = MAKERS["bigram"][0]().to(device)
    fastspec.patch(model)
    inputs = {name: tensor.to(device) for name, tensor in prompts(4, 9).items()}
    call = {"do_sample": False, "max_new_tokens": 40, "assistant": "nasd"}
    expected = model.generate(**inputs, **call).tolist()
    with fastspec.profile(model) as profile:
        assert model.generate(**inputs, **call).tolist() == expected
    assert len(profile.rounds) == fastspec.report(model).last.rounds
    assert {"draft", "score", "choose", "commit", "host"} <= set(profile.parts)
    assert all(value >= 0 for each in profile.rounds for value in each.values())


def test_an_unpatched_model_is_refused():
    with pytest.raises(Unsupported, match="not patched"), fastspec.profile(MAKERS["random"][0]()):
        pass


def test_an_empty_profile_says_so():
    assert "no rounds" in str(fastspec.Profile())
