"""Sampled texts follow the processed distribution of the unpatched model, whatever the drafts say.

Every case compares 2,048 or 4,096 seeded texts of two or three tokens with their exact distribution by a chi-square
test. The seeds are fixed, so a case passes or fails for good; a correct sampler would fail a fresh seed with
probability 1e-4.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.models import tiny_head, tiny_model
from helpers.sampling import CASES, SIGNIFICANCE, distribution, p_value, padded, sample

import fastspec

TREE = fastspec.Eagle3(depth=2, top_k=3, total_tokens=10)


@pytest.fixture(scope="module")
def model() -> Any:
    """A patched model whose head is its own oracle often enough for drafts to be taken and to be refused."""
    model = tiny_model(seed=1, num_hidden_layers=6)
    return fastspec.patch(model, eagle3=tiny_head(model))


APART = "top-p", "min-p"
"""Parts of "all four", and enumerated in test_kernels_distribution.py: sampled in `make test-slow` alone."""


@pytest.mark.some("autoregressive", "eagle3-all four", "eagle3-history")
@pytest.mark.parametrize(
    ("assistant", "options"),
    [
        pytest.param(each, options, id=f"{each if each is not TREE else 'eagle3'}-{name}", marks=marks)
        for each in ("autoregressive", TREE)
        for name, options in CASES.items()
        for marks in [pytest.mark.slow if name in APART or (each is not TREE and name != "all four") else ()]
    ],
)
def test_the_distribution_of_short_texts(model, options, assistant):
    ids = torch.tensor([[17, 44, 61, 9]])
    length = 3 if "top_k" in options else 2
    expected = distribution(model, ids, options, length)
    merged: dict[tuple[int, ...], float] = {}
    for text, chance in expected.items():
        merged[padded(text)] = merged.get(padded(text), 0.0) + chance
    assert abs(sum(merged.values()) - 1) < 1e-9
    texts = sample(model, ids, options, assistant, length)
    assert p_value(merged, texts) > SIGNIFICANCE
    if assistant is TREE:
        call = fastspec.report(model).last
        assert 0 < call.accepted < call.row_rounds * 2  # some drafts are taken and some are not


def test_the_test_finds_a_wrong_temperature(model):
    ids, options = torch.tensor([[17, 44, 61, 9]]), CASES["all four"]
    texts = sample(model, ids, options, TREE, 1)
    assert p_value(distribution(model, ids, options, 1), texts) > SIGNIFICANCE
    assert p_value(distribution(model, ids, {**options, "temperature": 1.2}, 1), texts) < SIGNIFICANCE
