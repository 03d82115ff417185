"""Calibration against closed forms, brute force and integration."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st

from fastspec.cascade.calibration import (
    Calibrator,
    Posterior,
    beta_cdf,
    beta_quantile,
    expected_calibration_error,
    log_loss,
    pool_adjacent_violators,
    sigmoid,
)

SHAPES = st.floats(0.05, 300)
SHARES = st.floats(0.001, 0.999)


# The distribution function is a product of exp(lgamma ...), whose arguments stay below 6000 here, and of a fraction
# with rounding errors of a few units: relative errors of about 6000 x 2^-52 < 2e-12. Closed forms are compared within
# five times that.
@examples(200)
@given(SHARES, SHAPES)
def test_beta_functions_have_their_closed_forms(x, a):
    assert beta_cdf(x, a, 1.0) == pytest.approx(x**a, abs=1e-11)
    assert beta_cdf(x, 1.0, a) == pytest.approx(-math.expm1(a * math.log1p(-x)), abs=1e-11)
    assert beta_cdf(0.5, a, a) == pytest.approx(0.5, abs=1e-11)
    assert beta_cdf(x, 0.5, 0.5) == pytest.approx(2 / math.pi * math.asin(math.sqrt(x)), abs=1e-11)
    assert beta_quantile(x, a, 1.0) == pytest.approx(x ** (1 / a), abs=1e-10)
    assert beta_quantile(x, 1.0, a) == pytest.approx(-math.expm1(math.log1p(-x) / a), abs=1e-10)


@examples(100)
@given(st.integers(1, 40), st.integers(1, 40), SHARES)
def test_beta_function_of_whole_numbers_is_a_binomial_tail(a, b, x):
    n = a + b - 1
    tail = sum(math.comb(n, j) * x**j * (1 - x) ** (n - j) for j in range(a, n + 1))
    assert beta_cdf(x, float(a), float(b)) == pytest.approx(tail, abs=1e-11)


@examples(60)
@given(st.floats(1, 300), st.floats(1, 300), SHARES)
def test_beta_quantile_holds_its_share_by_integration(a, b, share):
    """The integral from 0 to the quantile over the whole one, by the midpoint rule on t = x**(1/4), whose integrand is
    smooth at 0."""
    x = beta_quantile(share, a, b)
    cells = 20_000

    def integral(low: float, high: float) -> float:
        t = (torch.arange(cells, dtype=torch.float64) + 0.5) / cells * (high - low) + low
        peak = ((a - 1) / (a + b - 2) if a + b > 2 else 0.5) or 1e-9
        top = (a - 1) * math.log(peak) + (b - 1) * math.log1p(-min(peak, 1 - 1e-9))
        values = ((4 * a - 1) * t.log() + (b - 1) * torch.log1p(-(t**4)) - top).exp()
        return float(values.sum()) * (high - low) / cells

    below, above = integral(0, x**0.25), integral(x**0.25, 1)
    # The midpoint rule errs by h^2 / 24 times the total variation of the slope; for these parameters that is below 1e-4
    # of the whole (near t = 1 the integrand of b < 2 is a root, which costs h^(b) more).
    assert below / (below + above) == pytest.approx(share, abs=2e-4)


@examples(200)
@given(SHARES, SHAPES, SHAPES)
def test_beta_quantile_is_the_inverse(share, a, b):
    x = beta_quantile(share, a, b)
    # The share is bracketed by points that are nearer to x than the tolerance of the inverse.
    assert beta_cdf(max(0.0, x - 1e-11), a, b) - 1e-11 <= share <= beta_cdf(min(1.0, x + 1e-11), a, b) + 1e-11
    assert beta_quantile(1 - share, b, a) == pytest.approx(1 - x, abs=1e-10)


@examples(200)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), min_size=1, max_size=9))
def test_pooled_values_are_the_isotonic_regression(pairs):
    """Against the min-max formula (Barlow et al., 1972): the largest over starts of the smallest over ends of the
    mean."""
    values, weights = [Fraction(v) for v, _ in pairs], [Fraction(w) for _, w in pairs]
    n = len(pairs)

    def mean(i, j):
        return sum(v * w for v, w in zip(values[i : j + 1], weights[i : j + 1], strict=True)) / sum(weights[i : j + 1])

    blocks = pool_adjacent_violators(values, weights)
    fitted = [value for value, _, size in blocks for _ in range(size)]
    assert fitted == [max(min(mean(i, j) for j in range(at, n)) for i in range(at + 1)) for at in range(n)]
    assert sum(weight for _, weight, _ in blocks) == sum(weights)


LOGITS = st.lists(st.tuples(st.floats(-8, 8), st.booleans()), min_size=10, max_size=60)


@examples(80)
@given(LOGITS)
def test_calibrators_never_fall_and_temperature_is_the_best(pairs):
    logits, labels = [z for z, _ in pairs], [float(y) for _, y in pairs]
    for calibrator in (
        Calibrator.scaled(logits, labels),
        Calibrator.isotonic(logits, labels),
        Calibrator.fit(logits, labels, [0, 1] * 5) if len(pairs) == 10 else Calibrator(),
    ):
        grid = [calibrator(z / 10) for z in range(-120, 121)]
        assert all(b - a >= -1e-15 for a, b in pairwise(grid)) and 0 <= grid[0] <= grid[-1] <= 1
    best = Calibrator.scaled(logits, labels).temperature

    def loss(temperature):
        return sum(
            math.log1p(math.exp(-abs(z / temperature))) + max(z / temperature, 0) - y * z / temperature
            for z, y in zip(logits, labels, strict=True)
        )

    # The loss is convex in the inverse temperature and the bisection ends within 2 ln(100) / 2^50 of its least point.
    assert all(
        loss(best) <= loss(t) + 1e-9
        for t in (0.01, 0.1, 0.5, 0.9 * best, 1.1 * best, 2.0, 10.0, 100.0)
        if 0.01 <= t <= 100
    )


def drawn_logits(seed: int, count: int, true, told):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=g).double() * 2
    labels = (torch.rand(count, generator=g) < torch.sigmoid(true(x))).double()
    return told(x).tolist(), labels.tolist(), torch.randint(5, (count,), generator=g).tolist()


def test_held_out_loss_chooses_temperature_or_isotonic():
    sharp = drawn_logits(0, 600, lambda x: x, lambda x: 4 * x)
    assert Calibrator.fit(*sharp).temperature == pytest.approx(4, rel=0.25) and not Calibrator.fit(*sharp).knots
    bent = drawn_logits(1, 8000, lambda x: 4 * torch.tanh(x) + 1.5, lambda x: x**3)
    assert Calibrator.fit(*bent).knots
    logits, labels, _ = drawn_logits(2, 4000, lambda x: 4 * torch.tanh(x) + 1.5, lambda x: x**3)
    calibrator = Calibrator.fit(*bent)
    before, after = [sigmoid(z) for z in logits], [calibrator(z) for z in logits]
    assert expected_calibration_error(after, labels) < 0.03 < 0.1 < expected_calibration_error(before, labels)
    assert log_loss(after, labels) < log_loss([min(max(each, 1e-9), 1 - 1e-9) for each in before], labels)


@examples(100)
@given(st.lists(st.tuples(st.integers(0, 64), st.booleans()), min_size=1, max_size=40), st.integers(1, 12))
def test_calibration_error_is_its_definition(pairs, bins):
    p, y = [Fraction(a, 64) for a, _ in pairs], [int(b) for _, b in pairs]
    total = Fraction(0)
    for b in range(bins):
        held = [
            i for i, each in enumerate(p) if Fraction(b, bins) < each <= Fraction(b + 1, bins) or (b == 0 and each == 0)
        ]
        total += abs(sum(y[i] - p[i] for i in held))
    numbers = [float(each) for each in p]
    found = expected_calibration_error(numbers, [float(each) for each in y], bins)
    # The bin of a probability that is a bin's edge may be decided by rounding, and only where `bins` is no power of
    # two.
    edge = any((each * bins).denominator == 1 for each in p) and bins & (bins - 1)
    assert edge or found == pytest.approx(float(total / len(p)), abs=1e-12)
    assert expected_calibration_error(numbers, numbers, bins) == 0
    whole = abs(sum(y) - sum(numbers)) / len(p)
    assert found >= whole - 1e-12 and expected_calibration_error(numbers, y, 1) == pytest.approx(whole, abs=1e-12)


def test_a_probability_on_an_edge_belongs_to_the_bin_below():
    assert expected_calibration_error([0.5, 0.25], [0.0, 1.0], 2) == 0.125
    assert expected_calibration_error([0.5, 0.75], [0.0, 1.0], 2) == 0.375


@examples(100)
@given(
    st.lists(st.tuples(st.integers(0, 1024), st.booleans()), min_size=1, max_size=60),
    st.integers(0, 1024),
    st.floats(0.02, 0.5),
)
def test_posterior_counts_its_own_bucket(pairs, at, risk):
    chances, labels = [a / 1024 for a, _ in pairs], [float(b) for _, b in pairs]
    posterior, q = Posterior.fit(chances, labels), at / 1024
    assert (
        sum(posterior.counts) == len(pairs)
        and posterior.a + posterior.b == pytest.approx(2)
        and min(posterior.a, posterior.b) > 0
    )
    assert posterior.a / 2 == pytest.approx((sum(labels) + 1) / (len(labels) + 2))
    edges = (-math.inf, *posterior.edges, math.inf)
    bucket = next(i for i in range(len(posterior.counts)) if edges[i] <= q < edges[i + 1])
    n = sum(edges[bucket] <= each < edges[bucket + 1] for each in chances)
    assert posterior.counts[bucket] == n
    assert posterior.mean(q) == pytest.approx((n * q + posterior.a) / (n + 2))
    lower = posterior.lower(q, risk)
    a, b = n * q + posterior.a, n * (1 - q) + posterior.b  # q is a multiple of 1/1024, so it is not rounded
    assert beta_cdf(max(0.0, lower - 1e-11), a, b) - 1e-11 <= risk <= beta_cdf(lower + 1e-11, a, b) + 1e-11
    assert posterior.lower(q, risk / 2) <= lower
