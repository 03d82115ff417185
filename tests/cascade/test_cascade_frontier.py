"""Quality against cost: points and gains against their definitions, by hand and by random policies; files that were
saved before."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fastspec
from fastspec.cascade import records
from fastspec.cascade.decisions import Rates, Solver
from fastspec.cascade.predictor import Predictor
from fastspec.programs.training.cascade import (
    calibration_rows,
    frontier_rows,
    held_out,
    mean_gain,
    point,
    prices_of,
    stops,
)

SAVED = Path(__file__).with_name("saved")


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Labels, costs of the cascade, costs alone, and where items stop."""
    n, m = draw(st.integers(1, 7)), draw(st.integers(2, 4))

    def drawn(most: int, parts: int) -> Tensor:
        rows = st.lists(st.lists(st.integers(0, most), min_size=m, max_size=m), min_size=n, max_size=n)
        return torch.tensor(draw(rows), dtype=torch.float64) / parts

    stop = torch.tensor(draw(st.lists(st.integers(0, m - 1), min_size=n, max_size=n)))
    return drawn(8, 8), drawn(60, 4).cumsum(1), drawn(60, 4), stop


@given(cases())
@settings(deadline=None)
def test_a_point_is_a_mean_beside_the_mixture_of_the_same_cost(case: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    labels, run, alone, stop = case
    n, found = len(labels), point(*case)
    assert found["cost"] == pytest.approx(sum(float(run[i, k]) for i, k in enumerate(stop)) / n, abs=1e-9)
    assert found["quality"] == pytest.approx(sum(float(labels[i, k]) for i, k in enumerate(stop)) / n, abs=1e-9)
    assert found["shares"] == pytest.approx([stop.tolist().count(k) / n for k in range(labels.shape[1])])
    assert found["stage"] == pytest.approx(sum(stop.tolist()) / n)
    (cheap, dear), (low, high) = (each.mean(0)[[0, -1]].tolist() for each in (alone, labels))
    assert found["gain"] == pytest.approx(found["quality"] - found["mixing"], abs=1e-9)
    if found["inside"]:  # the mixture costs what the cascade costs
        share = (found["mixing"] - low) / (high - low) if high != low else None
        assert share is None or share * dear + (1 - share) * cheap == pytest.approx(
            found["cost"], abs=1e-6 / abs(high - low)
        )
        assert cheap < found["cost"] < dear
    else:
        assert found["mixing"] == pytest.approx(low if found["cost"] <= cheap < dear else high, abs=1e-9)
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_a_random_policy_gains_nothing_over_the_mixture() -> None:
    """The exact mean over all stops of few items at random, of a cascade whose stages cost alone what they cost in
    it."""
    generator = torch.Generator().manual_seed(1)
    labels, run = torch.rand(6, 2, generator=generator).double(), torch.tensor([[1.0, 4.0]]).double().expand(6, 2)
    every = torch.tensor([[number >> bit & 1 for bit in range(6)] for number in range(64)])
    gains = torch.tensor([point(labels, run, run, stop)["gain"] for stop in every], dtype=torch.float64)
    for chance in (0.0, 0.3, 1.0):
        weights = torch.where(every == 1, chance, 1 - chance).double().prod(1)
        assert float(weights @ gains) == pytest.approx(0, abs=1e-12)


def test_the_gain_s_standard_error_is_that_of_drawn_items() -> None:
    """Its square against the variance of the gain over 600 draws of 400 items, whose costs and labels hang together."""
    generator = torch.Generator().manual_seed(0)
    gains, errors = [], []
    for _ in range(600):
        hard = torch.rand(400, generator=generator)
        labels = (torch.rand(400, 2, generator=generator) > torch.stack((hard, hard / 2), 1)).double()
        alone = torch.stack((1 + hard, 4 + 3 * hard), 1).double()
        found = point(labels, alone.cumsum(1), alone, (hard > 0.6).long())
        gains.append(found["gain"])
        errors.append(found["gain_stderr"])
    spread = float(torch.tensor(gains, dtype=torch.float64).std())
    # The standard deviation of 600 draws is off by 3 % (1 / sqrt(1200)); the seed is fixed.
    assert sum(errors) / len(errors) == pytest.approx(spread, rel=0.09)


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=2, max_size=8), st.integers(1, 9))
@settings(deadline=None)
def test_the_mean_gain_is_an_area_by_its_width(pairs: list[tuple[int, int]], ratio: int) -> None:
    """Two stages at 1 and 1 + `ratio` ms. Items go on one at a time: the area by fine summation."""
    labels, n = torch.tensor(pairs, dtype=torch.float64), len(pairs)
    alone = torch.tensor([[1.0, 1.0 + ratio]]).double().expand(n, 2)
    points = [point(labels, alone.cumsum(1), alone, (torch.arange(n) < count).long()) for count in range(n + 1)]
    found = mean_gain(points, labels, alone.cumsum(1), alone)
    assert mean_gain(points, labels, alone.cumsum(1), alone.flip(1)) is None  # the last stage is the cheapest
    total, steps = 0.0, 2000
    q0, q1 = labels.mean(0).tolist()
    for step in range(steps):
        cost = 1 + ratio * (step + 0.5) / steps
        place = (cost - 1) * n / (1 + ratio)  # in points
        left = min(int(place), n - 1)
        reached = points[left]["quality"] + (place - left) * (points[left + 1]["quality"] - points[left]["quality"])
        total += reached - (q0 + (q1 - q0) * (cost - 1) / ratio)
    # The midpoint rule is exact but in the cells with a corner, at most n of them.
    assert found == pytest.approx(total / steps, abs=n / steps**2 * 4 * (1 + ratio) + 1e-9)


def test_files_that_were_saved_before_load_as_they_did() -> None:
    """A predictor, records and a cascade that the code of c0f133b wrote, and what its predictor said."""
    predictor = Predictor.load(SAVED / "predictor.safetensors")
    assert predictor.stages == ("small", "large") and predictor.rates == Rates((1.0, 4.0), (0.0, 0.5), (2.0, 6.0))
    assert predictor.place == {"device": "a device", "judged": "set: a number"}
    features = torch.linspace(-1, 1, len(predictor.names))
    said = [predictor.score(stage, features, risk) for stage in range(2) for risk in (None, 0.1)]
    expected = json.loads((SAVED / "scores.json").read_text())
    for score, (quality, _, at) in zip(said, expected, strict=True):
        for values, then in ((score.quality, quality), (score.point, at)):
            assert values == pytest.approx(then, rel=1e-5)  # sums in another order on another processor
    read = records.read(SAVED / "answers.jsonl")
    assert len(read) == 48 and read[0].answer == "It is 0." and {each.judged for each in read} == {"a number"}
    cascade = fastspec.Cascade.from_yaml(SAVED / "cascade.yaml")
    assert (cascade.stages[0].label, cascade.label, cascade.price, cascade.risk) == ("small", "large", 500.0, 0.1)
    assert Path(cascade.predictor).name == "predictor.safetensors"


def test_rows_of_a_saved_cascade() -> None:
    predictor = Predictor.load(SAVED / "predictor.safetensors")
    table = records.table(records.read(SAVED / "answers.jsonl"), predictor.stages, "held-out")
    assert predictor.rates is not None
    rows = frontier_rows(predictor, table, predictor.rates, more={"device": "cpu"})
    assert all(row["device"] == "cpu" and row["set"] in ("all", "numbers") for row in rows)
    json.dumps(rows, allow_nan=False)
    points = [row for row in rows if row["kind"] == "frontier" and row["set"] == "all"]
    assert [row["price"] for row in points] == sorted(row["price"] for row in points) and len(points) == 41
    assert points[0]["stage"] == 0 and all(a["stage"] <= b["stage"] for a, b in pairwise(points))
    singles = [row for row in rows if row["kind"] == "stage" and row["set"] == "all"]
    for at, row in enumerate(singles):
        right = table.labels[:, at].tolist()
        mean = sum(right) / len(right)
        assert row["quality"] == pytest.approx(mean)
        assert row["stderr"] == pytest.approx(math.sqrt(mean * (1 - mean) / len(right)))
    assert sum(row["kind"] == "gain" for row in rows) == 2
    held = held_out(predictor, table)
    found = calibration_rows(held, more={})
    assert [(row["seen_at"], row["stage"]) for row in found[:3]] == [
        ("small", "small"),
        ("small", "large"),
        ("large", "large"),
    ]
    assert all(0 <= row["ece"] <= 1 and row["items"] == len(table.ids) for row in found)
    solver = Solver(predictor.table(), predictor.rates)
    assert not stops(solver, held, prices_of(solver, held, 100.0)[0]).any()
