"""What runs transformers' own tests on patched models tells an assisted call that is wrong from one that is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.generate import prompts
from helpers.models import tiny_model
from transformers_suite import plugin
from transformers_suite.run import summary

from fastspec.patches.hf.cache import kept_cache

OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
FULL = {**OPTIONS, "output_scores": True, "output_logits": True}


@pytest.fixture
def suite(tmp_path: Path) -> plugin.Suite:
    return plugin.Suite("nasd", tmp_path / "outcome.json", left_padding=False)


@pytest.fixture
def model(suite):
    made = tiny_model(num_hidden_layers=6)
    assert suite.patch(made)
    return made


def test_calls_are_compared_and_counted(suite, model):
    model.generate(**prompts(5, 3), **FULL)
    model.generate(**prompts(5, 3), **FULL | {"do_sample": True})
    with pytest.warns(UserWarning, match="default assistant"):
        model.generate(**prompts(5, 3), **FULL, output_hidden_states=True)
    suite.pytest_runtest_teardown()
    counts = suite.counts
    assert (
        counts["as asked, equal"]
        == counts["as asked, of equal shapes"]
        == counts["without what is not served, equal"]
        == 1
    )
    assert counts["assisted calls"] == 3 and counts["emitted"] == 3 * 2 * 8 and sum(suite.left.values()) == 1


def planted(part: str) -> Any:
    """Plain decoding with one value of its output moved."""

    def generate(*args: Any, **kwargs: Any) -> Any:
        output = plain(*args, **kwargs)
        if part == "sequences":
            output.sequences[-1, -1] += 1
        elif part == "cache":
            kept_cache(output).layers[2].values[1, 0, -1, 0] += 1e-3
        elif part == "missing":
            output.logits = None
        elif part == "length":
            output.scores = output.scores[:-1]
        else:
            output[part][2][0, 7] += 1e-3
        return output

    plain = plugin.PLAIN
    return generate


@pytest.mark.parametrize("part", ["sequences", "scores", "logits", "cache", "missing", "length"])
def test_a_difference_is_found(monkeypatch, model, part):
    monkeypatch.setattr(plugin, "PLAIN", planted(part))
    with pytest.raises(AssertionError, match="fastspec"):
        model.generate(**prompts(5, 3), **FULL)


def test_random_numbers_are_those_of_the_call_itself(model):
    """The second call of a comparison leaves the generator as the first did."""
    states = []
    for call in (model.generate, lambda **kwargs: plugin.served(model, **kwargs)):
        torch.manual_seed(0)
        call(**prompts(5), **OPTIONS | {"do_sample": True})
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_a_test_that_passes_unpatched_alone_is_broken():
    plain = {"tests": {"test_a": "passed", "test_b": "failed", "test_c": "passed"}, "errors": {"test_b": "skew"}}
    ours = {"tests": {"test_a": "failed", "test_b": "failed"}, "errors": {"test_a": "wrong", "test_b": "skew"}}
    row = summary(ours | {"counts": {}, "left to transformers": {}, "refused at patch": {}}, plain)
    assert row["broken"] == {"test_a": "wrong", "test_c": "did not run"} and row["failed"] == 2
    assert not summary(plain, plain)["broken"]
