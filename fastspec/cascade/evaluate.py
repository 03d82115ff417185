"""Quality against cost: a cascade's frontier over the price of a bad answer, beside single stages, random mixing and the oracle.

n items, L stages, P prices. `labels` [n, L] say how good each stage's answer is, in [0, 1]; `costs` [n, L] what running each stage takes
in ms, after those before it: an item that stops at stage k costs its costs[:k + 1]. `stops` [P, n] are the stages at which items stop.
Everything is float64 on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fastspec.cascade.calibration import expected_calibration_error
from fastspec.errors import Unsupported

KNOTS = 65
"""Points at which the oracle's curve is written to a row."""


@dataclass(frozen=True, slots=True)
class Point:
    """The means over items at one price (ms a bad answer): cost in ms, quality in [0, 1], the stage that answers; each stage's share."""

    price: float
    cost: float
    quality: float
    stage: float
    shares: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Curve:
    """Quality as a function of cost: straight lines between (cost, quality), both [m], in the order of their cost. Constant beyond
    the ends."""

    cost: Tensor
    quality: Tensor

    def at(self, cost: Tensor) -> Tensor:
        """The quality at each cost [...]."""
        if len(self.cost) == 1:
            return self.quality.expand(cost.shape)
        right = torch.searchsorted(self.cost, cost.contiguous()).clamp(1, len(self.cost) - 1)
        low, high = self.cost[right - 1], self.cost[right]
        share = ((cost - low) / (high - low)).clamp(0, 1)
        return torch.lerp(self.quality[right - 1], self.quality[right], share)


@dataclass(frozen=True, slots=True)
class Area:
    """What a frontier gains over random mixing, integrated over the cost from stage 0's, the least that a cascade costs, to that of the
    dearest single stage.

    `raw` in quality x ms; `mean` is raw by the width of that range, a quality; `share` is raw by what the oracle gains, None where the
    oracle gains nothing.
    """

    raw: float
    mean: float
    share: float | None


@dataclass(frozen=True, slots=True)
class Gains:
    """Quality less that of random mixing at the same cost, at each price: of all items, and the bounds of its confidence interval."""

    gain: Tensor
    low: Tensor
    high: Tensor


def checked(labels: Tensor, costs: Tensor, stops: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`labels` and `costs` as float64 on the CPU. Raises `Unsupported` for shapes that do not agree and values that cannot be."""
    labels, costs = labels.detach().cpu().double(), costs.detach().cpu().double()
    if labels.dim() != 2 or labels.shape != costs.shape or not labels.numel():
        raise Unsupported(f"labels {list(labels.shape)} and costs {list(costs.shape)} must both be [items, stages], neither of them 0")
    if not ((labels >= 0) & (labels <= 1)).all():
        raise Unsupported("labels must lie in [0, 1]: how good each stage's answer is")
    if not ((costs >= 0) & costs.isfinite()).all():
        raise Unsupported("costs must be finite milliseconds, not negative")
    if stops is not None:
        if stops.dim() != 2 or stops.shape[1] != len(labels) or not len(stops) or stops.dtype != torch.int64:
            raise Unsupported(f"stops {list(stops.shape)}, {stops.dtype} must be [prices, {len(labels)} items], int64")
        if not ((stops >= 0) & (stops < labels.shape[1])).all():
            raise Unsupported(f"stops must be stages from 0 to {labels.shape[1] - 1}")
    return labels, costs


def _check_prices(prices: Sequence[float]) -> None:
    wrong = [price for price in prices if not 0 <= price < math.inf]
    if wrong or not len(prices):
        raise Unsupported(f"prices must be finite numbers of at least 0, ms a bad answer: {wrong[0] if wrong else 'none is given'}")


def reached(labels: Tensor, costs: Tensor, stops: Tensor) -> tuple[Tensor, Tensor]:
    """What each item costs and how good its answer is at each price -> two [P, n]."""
    places = stops.cpu().T
    return costs.cumsum(1).gather(1, places).T, labels.gather(1, places).T


def frontier(labels: Tensor, costs: Tensor, prices: Sequence[float], stops: Tensor) -> list[Point]:
    """A point for each of `prices`, in their order, from where each item stops at it."""
    labels, costs = checked(labels, costs, stops)
    _check_prices(prices)
    if len(prices) != len(stops):
        raise Unsupported(f"{len(prices)} prices and stops for {len(stops)} do not match")
    cost, quality = reached(labels, costs, stops)
    points = []
    for place, price in enumerate(prices):
        counts = torch.bincount(stops[place].cpu(), minlength=labels.shape[1]).double() / len(labels)
        stage = float(stops[place].double().mean())
        points.append(Point(float(price), float(cost[place].mean()), float(quality[place].mean()), stage, tuple(counts.tolist())))
    return points


def rises(points: Sequence[Point]) -> bool:
    """Whether the mean stage never falls as the price rises."""
    ordered = sorted(points, key=lambda point: point.price)
    # Means of whole numbers over the same n differ by 1 / n or not at all; their rounding is far below that.
    return all(before.stage <= after.stage + 1e-9 for before, after in pairwise(ordered))


def line(cost: Tensor, singles: tuple[Tensor, Tensor]) -> Tensor:
    """Quality of choosing at random between stage 0 and the last, at mean costs [...]; beyond the two, that of the nearer one.

    `singles` are the mean cost and the mean quality of each stage alone, both [..., L]; leading dimensions go with those of `cost`
    [..., P].
    """
    costs, qualities = (each[..., (0, -1)] for each in singles)
    low, high = costs[..., :1], costs[..., 1:]
    share = torch.where(high == low, 0.0, (cost - low) / torch.where(high == low, 1.0, high - low)).clamp(0, 1)
    return qualities[..., :1] + share * (qualities[..., 1:] - qualities[..., :1])


def hull(cost: Tensor, singles: tuple[Tensor, Tensor]) -> Tensor:
    """Quality of the best random choice among single stages that costs at most `cost` [..., P] on average: their upper concave hull.

    The best choice mixes two stages, or takes one; all pairs are tried. Never falls with the cost; below the cheapest stage's cost it is
    the quality of that stage. Arguments as for `line`.
    """
    costs, qualities = singles
    cost = torch.maximum(cost, costs.amin(-1, keepdim=True))
    affordable = costs[..., None, :] <= cost[..., None]
    best = torch.where(affordable, qualities[..., None, :], -torch.inf).amax(-1)
    for i in range(costs.shape[-1]):
        for j in range(costs.shape[-1]):
            low, high = costs[..., i, None], costs[..., j, None]
            between = (low <= cost) & (cost < high)
            share = (cost - low) / torch.where(high > low, high - low, 1.0)
            mixed = qualities[..., i, None] + share * (qualities[..., j, None] - qualities[..., i, None])
            best = torch.maximum(best, torch.where(between, mixed, -torch.inf))
    return best


def oracle_stops(labels: Tensor, costs: Tensor, prices: Sequence[float]) -> Tensor:
    """The stop of least price (1 - label) + cost of each item, for one who knows both -> [P, n] int64; the earliest of equals."""
    labels, costs = checked(labels, costs)
    _check_prices(prices)
    total = costs.cumsum(1)
    return torch.stack([(price * (1 - labels) + total).argmin(1) for price in prices])


def oracle_curve(labels: Tensor, costs: Tensor) -> Curve:
    """The highest mean quality for every mean cost, for one who knows labels and costs and may choose at random: concave.

    Each item's stops have an upper concave hull; the steps of all hulls, the steepest first, make the curve, from stopping every item at
    stage 0 to giving each the best answer that it has.
    """
    labels, costs = checked(labels, costs)
    steps: list[tuple[float, float]] = []
    for totals, quality in zip(costs.cumsum(1).tolist(), labels.tolist(), strict=True):
        at, stages = 0, range(len(totals))
        while better := [k for k in stages[at + 1 :] if quality[k] > quality[at]]:
            rise = max(better, key=lambda k: ((quality[k] - quality[at]) / max(totals[k] - totals[at], 1e-12), k))
            steps.append((totals[rise] - totals[at], quality[rise] - quality[at]))
            at = rise
    steps.sort(key=lambda step: -step[1] / max(step[0], 1e-12))
    taken = torch.tensor([(0.0, 0.0), *steps], dtype=torch.float64, device="cpu") / len(labels)
    cost, quality_ = (taken.cumsum(0) + torch.stack((costs[:, 0].mean(), labels[:, 0].mean()))).T
    return _curve(cost, quality_)


def _curve(cost: Tensor, quality: Tensor) -> Curve:
    """The points in the order of their cost; of several at one cost the best."""
    best: dict[float, float] = {}
    for x, y in zip(cost.tolist(), quality.tolist(), strict=True):
        best[x] = max(y, best.get(x, y))
    x, y = torch.tensor(sorted(best.items()), dtype=torch.float64, device="cpu").T
    return Curve(x.contiguous(), y.contiguous())


def single_stages(labels: Tensor, alone: Tensor) -> tuple[Tensor, Tensor]:
    """The mean cost and the mean quality of each stage answering everything by itself, [L] each; `alone` [n, L] is its cost in ms."""
    labels, alone = checked(labels, alone)
    return alone.mean(0), labels.mean(0)


def area(labels: Tensor, costs: Tensor, stops: Tensor, *, alone: Tensor | None = None) -> Area:
    """What the frontier gains over random mixing (`hull`), beside what the oracle gains.

    The frontier is drawn from stage 0 answering everything (price 0) through its points in the order of their cost, and on at the last
    one's quality: prices that end too low lose area. `alone` [n, L]: see `summary`.
    """
    labels, costs = checked(labels, costs, stops)
    singles = single_stages(labels, costs if alone is None else alone)
    cost, quality = (each.mean(1) for each in reached(labels, costs, stops))
    mine = _curve(torch.cat((costs[:, 0].mean()[None], cost)), torch.cat((labels[:, 0].mean()[None], quality)))
    best = oracle_curve(labels, costs)
    low, high = torch.maximum(singles[0].amin(), costs[:, 0].mean()), singles[0].amax()
    if low >= high:
        return Area(0.0, 0.0, None)
    knots = torch.cat((mine.cost, best.cost, singles[0])).clamp(low, high).unique()
    # All three are straight between the knots, so the trapezoids are exact.
    mixed = hull(knots, singles)
    raw, most = (float(torch.trapezoid(curve.at(knots) - mixed, knots)) for curve in (mine, best))
    return Area(raw, raw / float(high - low), raw / most if most > 0 else None)


def bootstrap(
    labels: Tensor, costs: Tensor, stops: Tensor, *, alone: Tensor | None = None, seed: int = 0, draws: int = 2000, confidence: float = 0.95
) -> Gains:
    """The gain over random mixing (`hull`) at each price, with percentile intervals of a bootstrap over items -> [P] each.

    Paired: in each of `draws` resamples of the items, drawn by `seed`, the cascade and the single stages are judged on the same ones.
    """
    labels, costs = checked(labels, costs, stops)
    alone = costs if alone is None else checked(labels, alone)[1]
    if draws < 1 or not 0 < confidence < 1:
        raise Unsupported(f"draws={draws} must be at least 1 and confidence={confidence} lie between 0 and 1")
    items, (cost, quality) = len(labels), reached(labels, costs, stops)
    values = torch.cat((cost.T, quality.T, alone, labels), 1)
    sizes = [len(stops), len(stops), labels.shape[1], labels.shape[1]]

    def gain(means: Tensor) -> Tensor:
        reached_cost, reached_quality, single_cost, single_quality = means.split(sizes, -1)
        return reached_quality - hull(reached_cost, (single_cost, single_quality))

    generator, found = torch.Generator().manual_seed(seed), []
    for _ in range(draws):
        drawn = torch.randint(items, (items,), generator=generator, device="cpu")
        weights = torch.bincount(drawn, minlength=items).double() / items
        found.append(weights @ values)
    tail = torch.tensor([(1 - confidence) / 2, (1 + confidence) / 2], dtype=torch.float64, device="cpu")
    low, high = torch.quantile(gain(torch.stack(found)), tail, dim=0)
    return Gains(gain(values.mean(0)), low, high)


def summary(
    labels: Tensor, costs: Tensor, prices: Sequence[float], stops: Tensor, *, set: str, stages: Sequence[str], alone: Tensor | None = None,
    seed: int = 0, draws: int = 2000, confidence: float = 0.95, more: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """The rows of a JSON-lines file that say all this of one `set` of items; `benchmarks/plot_cascade.py` draws them.

    `alone` [n, L] is what each stage costs by itself, without the others: random mixing sends each item to one of the models. By default
    `costs`, right where a stage starts from scratch; where it takes over what an earlier one wrote that is too cheap, and the comparison
    errs against the cascade. With alone=costs.cumsum(1), random mixing is the cascade itself that stops at random, which is weaker.

    Rows have `kind` and `set`, and `more` (versions, seeds, device): "stage" a single stage; "frontier" a `Point` with the quality of
    random mixing at its cost (`line`, `hull`), its `gain` over the hull with `gain_low` and `gain_high`, and `inside`: whether its cost
    lies strictly between that of the cheapest single stage and that of the dearest; "oracle" a `Point` of the oracle; "oracle_curve"
    its curve as two lists; "area" an `Area`, with whether the mean stage never falls as the price rises (`rises`), and how many of the
    points inside gain.
    """
    labels, costs = checked(labels, costs, stops)
    if len(stages) != labels.shape[1]:
        raise Unsupported(f"{len(stages)} names ({', '.join(stages)}) for {labels.shape[1]} stages")
    alone = costs if alone is None else checked(labels, alone)[1]
    singles = single_stages(labels, alone)
    points = frontier(labels, costs, prices, stops)
    gains = bootstrap(labels, costs, stops, alone=alone, seed=seed, draws=draws, confidence=confidence)
    reached_cost = torch.tensor([point.cost for point in points], dtype=torch.float64, device="cpu")
    # Costs that agree up to the rounding of their sums are equal.
    slack = 1e-9 * float(singles[0].amax())
    inside = (reached_cost > singles[0].amin() + slack) & (reached_cost < singles[0].amax() - slack)
    columns = {"line": line(reached_cost, singles), "hull": hull(reached_cost, singles)}
    columns |= {"gain": gains.gain, "gain_low": gains.low, "gain_high": gains.high}
    rows: list[dict[str, Any]] = [
        {"kind": "stage", "stage": name, "index": index, "cost": float(singles[0][index]), "quality": float(singles[1][index])}
        for index, name in enumerate(stages)
    ]
    for place, point in enumerate(points):
        compared = {name: float(column[place]) for name, column in columns.items()}
        rows.append({"kind": "frontier", **asdict(point), **compared, "inside": bool(inside[place])})
    oracle = oracle_stops(labels, costs, prices)
    rows += [{"kind": "oracle", **asdict(point)} for point in frontier(labels, costs, prices, oracle)]
    curve = oracle_curve(labels, costs)
    at = torch.linspace(float(curve.cost[0]), float(curve.cost[-1]), KNOTS, dtype=torch.float64, device="cpu")
    rows.append({"kind": "oracle_curve", "cost": at.tolist(), "quality": curve.at(at).tolist()})
    counts = {"inside": int(inside.sum()), "inside_gaining": int((inside & (gains.gain > 0)).sum())}
    settings = {"items": len(labels), "seed": seed, "draws": draws, "confidence": confidence}
    rows.append({"kind": "area", **asdict(area(labels, costs, stops, alone=alone)), "rises": rises(points), **counts, **settings})
    return [{**row, "set": set, **(more or {})} for row in rows]


def reliability(probabilities: Tensor, labels: Tensor, *, set: str, stage: str, bins: int = 10, **more: Any) -> dict[str, Any]:
    """The row of a reliability diagram: `probability` and `label`, the means of each bin that holds items, their `count`, and the `ece`.

    probabilities [n] and labels [n] in [0, 1]; the bins are those of `expected_calibration_error`, whose value `ece` is.
    """
    error = expected_calibration_error(probabilities, labels, bins)
    p, y = probabilities.detach().cpu().double(), labels.detach().cpu().double()
    bucket = ((p * bins).ceil().long() - 1).clamp(0, bins - 1)
    columns: dict[str, list[float]] = {"probability": [], "label": [], "count": []}
    for each in bucket.unique().tolist():
        held = bucket == each
        for name, value in (("probability", p[held].mean()), ("label", y[held].mean()), ("count", held.sum())):
            columns[name].append(value.item())
    return {"kind": "reliability", "stage": stage, "ece": error, "bins": bins, **columns, "items": len(p), "set": set, **more}
