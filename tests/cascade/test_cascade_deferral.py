"""The deferral rules against the same rules in plain Python, written from the paper's equations, and what holds of
every mixture."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from helpers.cascade import twin
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fastspec
from fastspec.cascade.config import RANGES, RULES
from fastspec.cascade.decisions import mixed
from fastspec.errors import Unsupported

CLOSE = 1e-12
"""Half a dozen float64 operations on numbers up to one, each rounded by 1.1e-16, with room for six tokens' sums."""


@st.composite
def distributions(draw: st.DrawFn, size: int) -> list[Fraction]:
    """Zeros, ties and certainties among them."""
    weights = draw(st.lists(st.integers(0, 12), min_size=size, max_size=size).filter(any))
    return [Fraction(weight, sum(weights)) for weight in weights]


@st.composite
def places(draw: st.DrawFn) -> tuple[list[Fraction], ...]:
    """p, q, p_raw, q_raw over one vocabulary."""
    size = draw(st.sampled_from([3, 2, 6, 1]))
    return tuple(draw(distributions(size)) for _ in range(4))


@st.composite
def settings_of(draw: st.DrawFn, rules: Sequence[str] = RULES) -> tuple[str, Fraction]:
    """A rule and an alpha inside its range."""
    rule = draw(st.sampled_from(rules))
    large, small = RANGES[rule] if rule != "opt" else (-2, 2)
    return rule, large + (small - large) * Fraction(draw(st.integers(1, 63)), 64)


def tensors(place: tuple[list[Fraction], ...]) -> list[Tensor]:
    return [torch.tensor([float(each) for each in distribution], dtype=torch.float64) for distribution in place]


def clear(rule: str, alpha: Fraction, place: tuple[list[Fraction], ...]) -> bool:
    """Whether no comparison is so narrow that float64 may decide it the other way."""
    p, q, p_raw, q_raw = place
    best, mine = max(p_raw), max(q_raw)
    further = sum(max(b - a, Fraction(0)) for a, b in zip(p, q, strict=True))
    gaps = {
        "chow": [mine - 1 + alpha],
        "diff": [mine - best + alpha],
        "opt": [mine - best + alpha * further],
        "token_v1": [each - best + alpha for each in q_raw],
        "token_v2": [each - best + alpha for each in p_raw],
        "token_v3": [each - (1 - alpha) * best for each in p_raw],
    }[rule]
    return all(abs(gap) > 1e-9 for gap in gaps)


@pytest.mark.parametrize("rule", RULES)
@given(st.data(), places())
@settings(deadline=None)  # torch's first call takes longer than the others
def test_every_rule_is_its_formula(rule, data, place):
    _, alpha = data.draw(settings_of([rule]))
    pi = mixed(rule, float(alpha), *tensors(place))
    assert pi.dtype == torch.float64
    assert abs(float(pi.sum()) - 1) < CLOSE and float(pi.min()) >= 0
    if clear(rule, alpha, place):
        want = torch.tensor([float(each) for each in twin(rule, alpha, *place)], dtype=torch.float64)
        torch.testing.assert_close(pi, want, rtol=0, atol=CLOSE)


@given(st.sampled_from(RULES), places())
def test_the_ends_are_one_model_alone(rule, place):
    p, q, p_raw, q_raw = tensors(place)
    large, small = RANGES[rule]
    for alpha in ("lossless", large):
        assert torch.equal(mixed(rule, alpha, p, q, p_raw, q_raw), p)
    assert torch.equal(mixed(rule, small, p, q, p_raw, q_raw), q)


@given(st.sampled_from(RULES), places())
def test_the_formula_has_these_ends_too_but_for_two(rule, place):
    p, q, _, q_raw = place
    large, small = RANGES[rule] if rule != "opt" else (-(10**9), 10**9)
    assert twin(rule, small, *place) == q
    assert rule == "token_v3" or (rule == "chow" and max(q_raw) == 1) or twin(rule, large, *place) == p


def test_two_formulas_at_zero_are_not_the_large_model():
    sure, half = [Fraction(1), Fraction(0)], [Fraction(1, 2), Fraction(1, 2)]
    assert twin("chow", 0, half, sure, half, sure) == sure != half
    skewed = [Fraction(3, 4), Fraction(1, 4)]
    assert twin("token_v3", 0, skewed, half, skewed, half) == [Fraction(7, 8), Fraction(1, 8)] != skewed


@given(places(), st.sampled_from(["chow", "diff", "opt"]), st.lists(st.integers(1, 63), min_size=2, max_size=2))
def test_a_larger_alpha_never_takes_a_token_back_from_the_small_model(place, rule, steps):
    large, small = RANGES[rule] if rule != "opt" else (-4.0, 4.0)
    low, high = (large + (small - large) * step / 64 for step in sorted(steps))
    p, q, p_raw, q_raw = tensors(place)
    if torch.equal(mixed(rule, low, p, q, p_raw, q_raw), q):
        assert torch.equal(mixed(rule, high, p, q, p_raw, q_raw), q)


@given(settings_of(), st.lists(st.tuples(*[distributions(3)] * 4), min_size=6, max_size=6))
def test_places_do_not_see_each_other(setting, batch):
    """[2, 3, V] at once, in float32, is every place by itself."""
    rule, alpha = setting
    stacked = [torch.stack([tensors(place)[part] for place in batch]).float().view(2, 3, 3) for part in range(4)]
    whole = mixed(rule, float(alpha), *stacked)
    assert whole.dtype == torch.float32 and whole.shape == (2, 3, 3)
    for row in range(2):
        for node in range(3):
            assert torch.equal(whole[row, node], mixed(rule, float(alpha), *(each[row, node] for each in stacked)))


@given(settings_of(), places(), st.data())
def test_one_hots_stay_one_hot(setting, place, data):
    """In greedy calls every rule picks one model's token."""
    size = len(place[0])
    one, other = (torch.eye(size, dtype=torch.float64)[data.draw(st.integers(0, size - 1))] for _ in range(2))
    pi = mixed(setting[0], float(setting[1]), one, other, *tensors(place)[2:])
    assert torch.equal(pi, one) or torch.equal(pi, other)


def test_what_is_no_rule_is_refused():
    with pytest.raises(Unsupported, match=r"rule='chows'; did you mean 'chow'\? accepted are 'chow'"):
        fastspec.Cascade(["small"], mode="token", rule="chows")
    with pytest.raises(Unsupported, match='a number and "lossless"'):
        fastspec.Cascade(["small"], mode="token", rule="chow", alpha="exact")
