"""The features of an answer: each against its definition, bad input, and the time that a whole decision takes."""

from __future__ import annotations

import math
import statistics
import time

import pytest
import torch
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st

from fastspec.cascade.decisions import Rates, Solver
from fastspec.cascade.predictor import Predictor
from fastspec.cascade.records import LAST, NAMES, QUANTILES, features
from fastspec.errors import Unsupported

STAGES = 3


def measured(count: int, seed: int) -> torch.Tensor:
    """Log-probabilities, gaps and entropies [count, 3] as a model might have them."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(count, 7, generator=generator)
    chances = logits.log_softmax(-1)
    top = chances.topk(2).values
    return torch.stack((chances[:, 0], top[:, 0] - top[:, 1], -(chances.exp() * chances).sum(-1)), 1)


def emitted(measures: torch.Tensor, tokens, **changes) -> dict[str, float]:
    given = {"prompt_tokens": 9, "limit": 500, "ended": True, "stage": 1, "stages": STAGES} | changes
    return dict(zip(NAMES, features(measures, tokens, **given).tolist(), strict=True))


@examples(60)
@given(st.integers(1, 130), st.integers(0, 2**16), st.integers(1, 6), st.booleans())
def test_every_feature_is_what_its_name_says(count, seed, vocabulary, ended):
    measures = measured(count, seed)
    tokens = torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(seed))
    found = emitted(measures, tokens, ended=ended)
    assert len(found) == len(NAMES) == len(set(NAMES))
    # Values below 40 in fp32 are rounded by at most 2^-19; the reference rounds a few times more.
    near = lambda value: pytest.approx(float(value), abs=2e-5)  # noqa: E731
    for q in QUANTILES:
        assert found[f"log_probability_q{int(100 * q)}"] == near(measures[:, 0].double().quantile(q))
        assert found[f"gap_q{int(100 * q)}"] == near(measures[:, 1].double().quantile(q))
    assert found["log_probability_mean"] == near(measures[:, 0].mean())
    assert found["entropy_mean"] == near(measures[:, 2].mean())
    assert found["entropy_last"] == near(measures[-LAST:, 2].mean())
    assert [found[name] for name in ("log_probability_first", "gap_first", "entropy_first")] == measures[0].tolist()
    assert found["log_prompt_tokens"] == near(math.log(10)) and found["log_answer_tokens"] == near(math.log(count))
    assert found["share_of_limit"] == near(count / 500) and found["ended"] == ended and found["stage"] == 0.5
    ids, before, again = tokens.tolist(), set(), 0
    for start in range(count - 3):
        gram = tuple(ids[start : start + 4])
        again += gram in before
        before.add(gram)
    assert found["repetition"] == near(again / max(1, count - 3))


def test_ids_may_be_a_list_and_order_matters_only_where_it_should():
    measures, ids = measured(65, 0), list(range(65))
    assert emitted(measures, ids) == emitted(measures, torch.tensor(ids))
    turned = emitted(measures.flip(0), ids)
    changed = {name for name, value in emitted(measures, ids).items() if abs(value - turned[name]) > 1e-5}
    assert changed <= {"entropy_last", "log_probability_first", "gap_first", "entropy_first"}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("column", [0, 1, 2])
def test_a_number_that_is_not_finite_is_refused(value, column):
    measures = measured(7, 0)
    measures[4, column] = value
    with pytest.raises(Unsupported, match=r"of answer token 4 is -?(nan|inf), not a finite number"):
        emitted(measures, range(7))


def test_features_score_and_decision_take_little_time():
    generator = torch.Generator().manual_seed(0)
    items, wide = 300, len(NAMES)
    given = [torch.randn(items, wide, generator=generator) for _ in range(STAGES)]
    labels = torch.randint(2, (items, STAGES), generator=generator).float()
    tokens = torch.randint(1, 90, (items, STAGES), generator=generator)
    predictor = Predictor.fit(["a", "b", "c"], given, labels, tokens, torch.zeros_like(tokens), seed=0)
    solver = Solver(predictor.table(), Rates((1.0, 2.0, 4.0), (0.0, 0.1, 0.2), (1.0, 1.0, 1.0)))
    measures, ids, times = measured(256, 0), list(range(256)), []
    for _ in range(300):
        start = time.process_time()
        vector = features(measures, ids, prompt_tokens=9, limit=256, ended=True, stage=0, stages=STAGES)
        solver.decide(0, predictor.score(0, vector), 100.0)
        times.append(time.process_time() - start)
    assert statistics.median(times) < 3e-3  # a tenth of it on an idle core; shared machines are slower
