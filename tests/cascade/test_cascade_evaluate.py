"""Frontiers against brute force and by their properties; records written, read, cut short and made into tensors; the plot's rows."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from helpers_examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastspec.cascade.calibration import expected_calibration_error
from fastspec.cascade.evaluate import (
    Curve,
    Point,
    area,
    bootstrap,
    frontier,
    hull,
    line,
    oracle_curve,
    oracle_stops,
    reliability,
    rises,
    single_stages,
    summary,
)
from fastspec.cascade.records import Record, Records, Writer, read, rewrite, table
from fastspec.errors import CheckpointError, Unsupported

ROOT = Path(__file__).parents[2]
# Sums of at most some hundred float64 numbers below 1e4: an error of about n * eps * 1e4 < 1e-9.
NEAR = {"rtol": 0, "atol": 1e-9}


@st.composite
def cases(draw: st.DrawFn, binary: bool = False, items: int = 7, stages: int = 4) -> tuple[Tensor, Tensor]:
    """Labels and costs, with ties and free stages among them."""
    n, m = draw(st.integers(1, items)), draw(st.integers(1, stages))
    quality = st.integers(0, 1) if binary else st.integers(0, 8).map(lambda x: x / 8)
    labels = draw(st.lists(st.lists(quality, min_size=m, max_size=m), min_size=n, max_size=n))
    costs = draw(st.lists(st.lists(st.integers(0, 60).map(lambda x: x / 4), min_size=m, max_size=m), min_size=n, max_size=n))
    return torch.tensor(labels, dtype=torch.float64), torch.tensor(costs, dtype=torch.float64)


PRICES = st.lists(st.integers(0, 400).map(lambda x: x / 4), min_size=1, max_size=5, unique=True).map(sorted)


def drawn_stops(data: st.DataObject, labels: Tensor, prices: int) -> Tensor:
    n, m = labels.shape
    flat = data.draw(st.lists(st.integers(0, m - 1), min_size=n * prices, max_size=n * prices))
    return torch.tensor(flat).reshape(prices, n)


@given(cases(), PRICES, st.data())
@settings(deadline=None)
def test_points_are_means(case: tuple[Tensor, Tensor], prices: list[float], data: st.DataObject) -> None:
    labels, costs = case
    stops = drawn_stops(data, labels, len(prices))
    for point, price, stop in zip(frontier(labels, costs, prices, stops), prices, stops.tolist(), strict=True):
        n = len(stop)
        assert point.price == price and math.isclose(sum(point.shares), 1) and point.stage == pytest.approx(sum(stop) / n, abs=1e-12)
        assert point.cost == pytest.approx(sum(sum(costs[i, : k + 1].tolist()) for i, k in enumerate(stop)) / n, abs=1e-9)
        assert point.quality == pytest.approx(sum(labels[i, k].item() for i, k in enumerate(stop)) / n, abs=1e-9)
        assert list(point.shares) == [stop.count(k) / n for k in range(labels.shape[1])]


@given(cases(), PRICES, st.data())
@settings(deadline=None)
def test_oracle_is_above_any_policy(case: tuple[Tensor, Tensor], prices: list[float], data: st.DataObject) -> None:
    labels, costs = case
    mine = frontier(labels, costs, prices, drawn_stops(data, labels, len(prices)))
    best = frontier(labels, costs, prices, oracle_stops(labels, costs, prices))
    curve = oracle_curve(labels, costs)
    for price, one, two in zip(prices, mine, best, strict=True):
        assert price * (1 - two.quality) + two.cost <= price * (1 - one.quality) + one.cost + 1e-9
        for point in (one, two):
            # A difference in cost of rounding's size can cross a step of the curve that costs nothing.
            above = float(curve.at(torch.tensor([point.cost + 1e-9], dtype=torch.float64)))
            assert point.quality <= above + 1e-6 and point.quality <= float(labels.amax(1).mean()) + 1e-12
            assert point.cost >= float(costs[:, 0].mean()) - 1e-9
    assert rises(best)


@given(cases(items=4, stages=3))
@examples(60)
def test_oracle_curve_is_the_hull_of_all_policies(case: tuple[Tensor, Tensor]) -> None:
    labels, costs = case
    n, m = labels.shape
    total, every = costs.cumsum(1), torch.tensor(list(product(range(m), repeat=n)))
    rows = torch.arange(n)
    cost, quality = total[rows, every].mean(1), labels[rows, every].mean(1)
    curve = oracle_curve(labels, costs)
    slopes = curve.quality.diff() / curve.cost.diff()
    assert (curve.cost.diff() > 0).all() and (curve.quality.diff() > 0).all() and (slopes.diff() <= 1e-6 * slopes[:-1]).all()
    assert (quality <= curve.at(cost + 1e-9) + 1e-6).all()
    # Each corner is reached by a policy.
    for x, y in zip(curve.cost, curve.quality, strict=True):
        assert ((cost - x).abs() + (quality - y).abs()).min() < 1e-9


@given(cases(), PRICES)
@settings(deadline=None)
def test_a_policy_that_knows_the_labels_is_the_oracle(case: tuple[Tensor, Tensor], prices: list[float]) -> None:
    """Optimal stopping by backward induction with the labels as probabilities (all numbers are multiples of 1/32: exact)."""
    labels, costs = case
    n, m = labels.shape
    stops = torch.zeros(len(prices), n, dtype=torch.int64)
    for p, price in enumerate(prices):
        for i in range(n):
            values = [price * (1 - labels[i, m - 1].item())]
            for k in reversed(range(m - 1)):
                values.insert(0, min(price * (1 - labels[i, k].item()), costs[i, k + 1].item() + values[0]))
            while price * (1 - labels[i, stops[p, i]].item()) > values[stops[p, i]]:
                stops[p, i] += 1
    assert torch.equal(stops, oracle_stops(labels, costs, prices))


@st.composite
def curves(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    m = draw(st.integers(1, 5))
    numbers = st.lists(st.integers(0, 16), min_size=m, max_size=m)
    return torch.tensor(draw(numbers)).double(), torch.tensor(draw(numbers)).double() / 16


@given(curves(), st.lists(st.integers(0, 40).map(lambda x: x / 2), min_size=1, max_size=6))
@settings(deadline=None)
def test_hull_is_the_best_mixture(singles: tuple[Tensor, Tensor], at: list[float]) -> None:
    """Against all mixtures of two stages that cost at most so much: a linear program's optimum mixes at most two."""
    found = hull(torch.tensor(at, dtype=torch.float64), singles)
    points = list(zip(*(each.tolist() for each in singles), strict=True))
    for x, value in zip(at, found.tolist(), strict=True):
        limit, best = max(x, min(cost for cost, _ in points)), -1.0
        for (c0, q0), (c1, q1) in product(points, points):
            if c0 <= limit:
                share = 1.0 if c1 <= limit else (limit - c0) / (c1 - c0)
                best = max(best, q0, q0 + share * (q1 - q0))
        assert value == pytest.approx(best, abs=1e-12)
    if singles[0][0] == singles[0].min():
        assert (found >= line(torch.tensor(at, dtype=torch.float64), singles) - 1e-12).all()


@given(cases())
@settings(deadline=None)
def test_area_of_the_oracle_is_whole(case: tuple[Tensor, Tensor]) -> None:
    """Beside every price at which some item changes its stop the oracle's frontier has all corners of its curve, and nothing has more."""
    labels, costs = case
    total = costs.cumsum(1)
    rise = (labels[:, None, :] - labels[:, :, None]).flatten()
    turns = ((total[:, None, :] - total[:, :, None]).flatten() / rise)[rise > 0].clamp(min=0)
    # Turns are (k / 4) / (j / 8) with j <= 8: equal, or at least 2 / 64 apart, and at most 4 * 15 * 8; the last price is beyond them all.
    prices = torch.cat((turns - 1e-6, turns + 1e-6, torch.tensor([0.0, 1e4]))).clamp(min=0).unique().tolist()
    whole = area(labels, costs, oracle_stops(labels, costs, prices))
    last = area(labels, costs, torch.full((1, len(labels)), labels.shape[1] - 1))
    if whole.share is not None:
        assert whole.share == pytest.approx(1, abs=1e-6) or abs(whole.raw) < 1e-6
        assert last.raw <= whole.raw + 1e-9


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=2, max_size=8), st.integers(1, 9))
@settings(deadline=None)
def test_area_by_hand(pairs: list[tuple[int, int]], ratio: int) -> None:
    """Two stages at 1 and `ratio` ms each. Escalating none, one at a time: the raw area by fine summation."""
    labels = torch.tensor(pairs, dtype=torch.float64)
    n, costs = len(pairs), torch.tensor([[1.0, 1.0 + ratio]]).expand(len(pairs), 2)
    stops = (torch.arange(n)[None] < torch.arange(n + 1)[:, None]).long()
    found = area(labels, costs, stops)
    low, high, steps = 1.0, 1.0 + ratio, 4000
    at = low + (high - low) * (torch.arange(steps).double() + 0.5) / steps
    cost = 1 + torch.arange(n + 1).double() * (1 + ratio) / n
    quality = torch.stack([torch.where(stop.bool(), labels[:, 1], labels[:, 0]).mean() for stop in stops])
    mine = Curve(cost, quality).at(at)
    q0, q1 = labels.mean(0).tolist()
    mixed = q0 + max(q1 - q0, 0) * (at - low) / (high - low)
    # The midpoint rule is exact but in the cells with a corner: at most n of width ratio / steps, where the slopes differ by at most 1.
    assert found.raw == pytest.approx(float((mine - mixed).mean()) * (high - low), abs=n * (ratio / steps) ** 2 + 1e-9)
    assert found.mean == pytest.approx(found.raw / ratio)


def test_a_random_policy_lies_on_the_mixing_line_in_expectation() -> None:
    """The exact expectation over all random stops of few items, judged against a cascade that stops at random."""
    generator = torch.Generator().manual_seed(1)
    labels, costs = torch.rand(6, 2, generator=generator).double(), 10 * torch.rand(6, 2, generator=generator).double()
    singles = single_stages(labels, costs.cumsum(1))
    every = torch.tensor(list(product((0, 1), repeat=6)))
    points = frontier(labels, costs, [0.0] * len(every), every)
    for chance in (0.0, 0.3, 1.0):
        weights = torch.where(every == 1, chance, 1 - chance).double().prod(1)
        means = torch.tensor([(point.cost, point.quality) for point in points], dtype=torch.float64)
        cost, quality = weights @ means
        assert torch.allclose(line(cost[None], singles), quality, **NEAR)


def test_bootstrap_covers_and_repeats() -> None:
    """A known true gain lies in the 90 % interval about 90 times of 100, and all gains of a policy that is mixing are 0."""
    generator = torch.Generator().manual_seed(3)
    costs, hits = torch.tensor([[1.0, 1.0]]).expand(150, 2), 0
    for trial in range(100):
        hard = torch.rand(150, generator=generator) < 0.5
        labels = torch.stack((~hard, torch.rand(150, generator=generator) < 0.8), 1).double()
        alone = torch.tensor([[1.0, 2.0]]).expand(150, 2)
        gains = bootstrap(labels, costs, hard.long()[None], alone=alone, seed=trial, draws=300, confidence=0.9)
        # Half of the items go on: cost 1.5, quality 0.5 + 0.5 * 0.8 = 0.9; mixing gives (0.5 + 0.8) / 2 = 0.65.
        hits += int(gains.low[0] <= 0.25 <= gains.high[0])
        assert gains.low[0] <= gains.gain[0] <= gains.high[0]
    # Binomial(100, 0.9): outside 80 .. 98 with a probability below 0.3 %, and the seeds are fixed.
    assert 80 <= hits <= 98
    again = bootstrap(labels, costs, hard.long()[None], alone=alone, seed=trial, draws=300, confidence=0.9)
    assert torch.equal(again.low, gains.low) and torch.equal(again.high, gains.high)
    still = bootstrap(labels, costs, torch.zeros(1, 150, dtype=torch.int64), alone=alone)
    assert torch.allclose(torch.cat((still.gain, still.low, still.high)), torch.zeros(3, dtype=torch.float64), **NEAR)


def test_bootstrap_is_paired() -> None:
    """Items whose labels are the same at every stage gain nothing in any resample, however much the labels differ by item."""
    labels = torch.rand(40, 1, generator=torch.Generator().manual_seed(0)).double().expand(40, 3)
    costs = torch.ones(40, 3).double()
    stops = torch.stack((torch.zeros(40), torch.arange(40) % 3)).long()
    gains = bootstrap(labels, costs, stops, draws=200)
    assert gains.low.abs().max() < 1e-9 and gains.high.abs().max() < 1e-9


def test_rises() -> None:
    def points(*stages: float) -> list[Point]:
        return [Point(price, 0.0, 0.0, stage, ()) for price, stage in enumerate(stages)]

    assert rises(points(0, 0.5, 0.5, 1)) and rises(points(1)) and not rises(points(0, 0.5, 0.4))
    assert rises(points(0, 0.5, 1)[::-1]) and not rises(points(1, 0.5, 0)[::-1])


def test_summary_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    quality = torch.rand(60, 3, generator=generator).double()
    labels, costs = (torch.rand(60, 3, generator=generator) < quality).double(), torch.tensor([[1.0, 5, 30]]).expand(60, 3)
    prices = [0.0, 10.0, 100.0, 1e4]
    stops = oracle_stops(quality, costs, prices)
    rows = summary(labels, costs, prices, stops, set="s", stages=["a", "b", "c"], draws=50, more={"device": "cpu"})
    assert json.loads(json.dumps(rows, allow_nan=False)) == json.loads(json.dumps(rows)) and all(row["set"] == "s" for row in rows)
    kinds = [row["kind"] for row in rows]
    assert {kind: kinds.count(kind) for kind in kinds} == {"stage": 3, "frontier": 4, "oracle": 4, "oracle_curve": 1, "area": 1}
    found = [row for row in rows if row["kind"] == "frontier"]
    assert found[0]["gain"] == pytest.approx(0, abs=1e-12) and not found[0]["inside"] and found[1]["inside"]
    assert all(row["hull"] >= row["line"] - 1e-12 for row in found)
    assert all(row["gain"] == pytest.approx(row["quality"] - row["hull"], abs=1e-12) for row in found)
    assert rows[-1]["inside"] == sum(row["inside"] for row in found) and rows[-1]["device"] == "cpu"
    assert rows[-1]["inside_gaining"] == sum(row["inside"] and row["gain"] > 0 for row in found)


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 1)), min_size=1, max_size=30), st.integers(1, 12))
@settings(deadline=None)
def test_reliability_rows_carry_the_error(pairs: list[tuple[float, int]], bins: int) -> None:
    p, y = torch.tensor(pairs, dtype=torch.float64).T
    row = reliability(p, y, set="s", stage="a", bins=bins, seed=1)
    again = sum(c * abs(a - b) for a, b, c in zip(row["probability"], row["label"], row["count"], strict=True)) / len(pairs)
    assert row["ece"] == expected_calibration_error(p, y, bins) == pytest.approx(again, abs=1e-9)
    assert sum(row["count"]) == row["items"] == len(pairs) and row["seed"] == 1


Q, C, STAY = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 2.0]]), torch.zeros(1, 1, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: frontier(Q, C[:, :1], [1.0], STAY), "items, stages"), (lambda: frontier(Q * 2, C, [1.0], STAY), r"\[0, 1\]"),
        (lambda: frontier(Q, -C, [1.0], STAY), "not negative"), (lambda: frontier(Q, C, [1.0], STAY.float()), "int64"),
        (lambda: frontier(Q, C, [1.0], STAY + 2), "from 0 to 1"), (lambda: frontier(Q, C, [1.0, 2.0], STAY), "2 prices"),
        (lambda: frontier(Q, C, [math.inf], STAY), "inf"), (lambda: oracle_stops(Q, C, [-1.0]), "prices"),
        (lambda: oracle_stops(Q, C, []), "none is given"), (lambda: bootstrap(Q, C, STAY, draws=0), "draws"),
        (lambda: summary(Q, C, [1.0], STAY, set="s", stages=["a"]), "1 names"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(call, match: str) -> None:
    with pytest.raises(Unsupported, match=match):
        call()


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    labels, costs = torch.tensor([[0.0, 1], [1, 1], [0, 0], [1, 0]]), torch.tensor([[1.0, 4]]).expand(4, 2)
    prices = [0.0, 5.0, 50.0]
    rows = summary(labels, costs, prices, oracle_stops(labels, costs, prices), set="s", stages=["a", "b"], draws=20)
    rows.append(reliability(torch.tensor([0.2, 0.7, 0.1, 0.9]), labels[:, 0], set="s", stage="a"))
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    subprocess.run([sys.executable, ROOT / "benchmarks/plot_cascade.py", path], check=True)
    assert (tmp_path / "rows.png").read_bytes()[:4] == b"\x89PNG"


NAMES = ("one", "two")
WHOLE = Record("i", "set", "train", "small", 0, 5, "text", 3, 0, True, 1.0, 2.0, 1.0, (0.5, 1.0), 7, {"torch": "2"})
FLOATS = st.floats(0, 1e6, allow_nan=False)


@st.composite
def recordings(draw: st.DrawFn) -> list[Record]:
    """Records of several items and stages, in any order, some missing."""
    found = []
    for item in draw(st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=5, unique=True)):
        part, where = draw(st.sampled_from(["train", "held-out"])), draw(st.sampled_from("xy"))
        for index, stage in enumerate(("small", "large")):
            if draw(st.integers(0, 3)):
                features = (draw(st.floats(-9, 9, width=32)), draw(st.floats(-9, 9, width=32)))
                counts, label = [draw(st.integers(0, 99)) for _ in range(3)], draw(st.floats(0, 1))
                emitted = [counts[0], draw(st.text(max_size=9)), counts[1], index * counts[2], draw(st.booleans())]
                found.append(Record(item, where, part, stage, index, *emitted, draw(FLOATS), draw(FLOATS), label, features, 3))
    return draw(st.permutations(found))


@given(recordings(), st.data())
@examples(40)
def test_records_survive_the_file_and_a_cut(tmp_path_factory: pytest.TempPathFactory, records: list[Record], data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("records") / "r.jsonl"
    with Writer(path, NAMES) as writer:
        for record in records:
            writer.add(record)
    assert read(path) == Records(NAMES, tuple(records))
    whole = path.read_bytes()
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    with Writer(path, NAMES) as writer:
        assert len(writer.done) <= len(records)
        for record in records:
            if (record.item, record.stage) not in writer.done:
                writer.add(record)
    assert path.read_bytes() == whole
    changed = Records(NAMES, tuple(replace(record, label=0.25) for record in records))
    rewrite(path, changed)
    assert read(path) == changed and [each.name for each in path.parent.iterdir()] == ["r.jsonl"]


@given(recordings())
@settings(deadline=None)
def test_table_is_aligned(records: list[Record]) -> None:
    found = {(record.item, record.stage): record for record in records}
    ids = list(dict.fromkeys(record.item for record in records if all((record.item, stage) in found for stage in ("small", "large"))))
    if not ids:
        with pytest.raises(Unsupported, match="no item"):
            table(Records(NAMES, tuple(records)), ["small", "large"])
        return
    made = table(Records(NAMES, tuple(records)), ["small", "large"])
    assert list(made.ids) == ids and made.names == NAMES and made.labels.dtype == torch.float64 and made.tokens.dtype == torch.int64
    for part in [made, *(made.where(split=each) for each in set(made.splits)), *(made.where(set=each) for each in set(made.sets))]:
        for i, item in enumerate(part.ids):
            for k, stage in enumerate(part.stages):
                record = found[item, stage]
                assert (part.sets[i], part.splits[i]) == (record.set, record.split)
                assert part.features[k][i].tolist() == list(record.features)
                assert (part.labels[i, k], part.start_ms[i, k], part.decode_ms[i, k]) == (record.label, record.start_ms, record.decode_ms)
                assert (part.tokens[i, k], part.kept[i, k]) == (record.new_tokens, record.kept_tokens)
                assert part.prompt_tokens[i, k] == record.prompt_tokens
                assert bool(part.ended[i, k]) == record.ended
    assert sum(len(made.where(split=each).ids) for each in set(made.splits)) == len(ids)


@pytest.mark.parametrize(
    ("change", "match"),
    [({"split": "test"}, "split='test'"), ({"index": -1}, "index"), ({"kept_tokens": 1}, "take over"), ({"label": 1.5}, "label"),
     ({"label": math.nan}, "label"), ({"features": (1.0, math.inf)}, "inf"), ({"start_ms": -1.0}, "start_ms"), ({"item": ""}, "item"),
     ({"ended": 1}, "ended"), ({"seed": 0.5}, "seed"), ({"answer": None}, "answer"), ({"new_tokens": True}, "new_tokens")],
)  # fmt: skip
def test_records_that_cannot_be_are_refused(change: dict, match: str) -> None:
    with pytest.raises(Unsupported, match=match):
        replace(WHOLE, **change)


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with pytest.raises(CheckpointError, match="cannot be read"):
        read(path)
    with Writer(path, NAMES) as writer:
        writer.add(WHOLE)
        with pytest.raises(Unsupported, match="already"):
            writer.add(WHOLE)
        with pytest.raises(Unsupported, match="1 features"):
            writer.add(replace(WHOLE, item="j", features=(1.0,)))
    with pytest.raises(CheckpointError, match="other features"):
        Writer(path, ("one",))
    head, line_ = path.read_text().splitlines()
    for text, match in (
        ("", "empty"), ("{}\n", "header"), ("x\n", "line 1: no JSON"), (f"{head}\n{line_}\n{line_}\n", "line 3.*twice"),
        (f"{head}\n{{\n", "line 2: no JSON"), (f"{head}\n{{}}\n", "missing or unknown: answer"), (f"{head}\n[1]\n", "missing"),
        (f"{head}\n{line_.replace('[0.5, 1.0]', '[0.5]')}\n", "2 numbers"), (f"{head}\n{line_.replace('train', 'no')}\n", "line 2.*split"),
    ):  # fmt: skip
        path.write_text(text)
        with pytest.raises(CheckpointError, match=match):
            read(path)


def test_tables_that_do_not_fit_are_refused() -> None:
    large = replace(WHOLE, stage="large", index=1)
    for records, match in (
        ([WHOLE, replace(large, label=None)], "no label"), ([WHOLE, replace(large, set="other")], "'other'"), ([WHOLE], "no item"),
        ([WHOLE, replace(large, index=2)], "recorded as stage 2"), ([WHOLE, replace(large, split="held-out")], "held-out"),
    ):  # fmt: skip
        with pytest.raises(Unsupported, match=match):
            table(Records(NAMES, tuple(records)), ["small", "large"])
    with pytest.raises(Unsupported, match="each once"):
        table(Records(NAMES, (WHOLE,)), ["small", "small"])
    with pytest.raises(Unsupported, match="there are splits 'train'"):
        table(Records(NAMES, (WHOLE, large)), ["small", "large"]).where(split="held-out")
