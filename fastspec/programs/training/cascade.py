"""Training of a cascade's predictor, and its worth: quality against cost over the price of a bad answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastspec.cascade import records
from fastspec.cascade.calibration import expected_calibration_error
from fastspec.cascade.decisions import Rates, Scores, Solver
from fastspec.cascade.predictor import Predictor

Row = dict[str, Any]
PRICES = 41
"""Points of a frontier."""
ROUNDS = 20
"""Doublings in the search for the prices at which every item stops at stage 0, and none does before its best stage."""


def fit(
    path: str | Path,
    stages: Sequence[str],
    *,
    seed: int,
    rates: Rates | None = None,
    place: Mapping[str, str] | None = None,
) -> Predictor:
    """A predictor from the training items of a file of judged records, with its stages' rates and where they ran."""
    table = records.table(records.read(path), stages, "train")
    made = Predictor.fit(stages, table.features, table.labels, table.tokens + table.kept, table.kept, seed=seed)
    return replace(made, rates=rates, place=dict(place or {}))


@dataclass(frozen=True, slots=True)
class ScoredTable:
    """Table of held-out items with their scores: by stage each item's `Scores`, and their `quality` [n, L - k]."""

    table: records.Table
    scores: tuple[tuple[Scores, ...], ...]
    quality: tuple[Tensor, ...]


def held_out(predictor: Predictor, table: records.Table, risk: float | None = None) -> ScoredTable:
    """Score every item of a table at every stage."""
    features = enumerate(table.features)
    scores = tuple(tuple(predictor.score(stage, row, risk) for row in rows) for stage, rows in features)
    quality = [torch.tensor([each.quality for each in column], dtype=torch.float64) for column in scores]
    return ScoredTable(table, scores, tuple(quality))


def _sets(table: records.Table) -> Iterator[tuple[str, Tensor]]:
    """ "all" and every set by name, with the places of its items [n]."""
    for name in ("all", *sorted(set(table.sets))):
        yield name, torch.tensor([at for at, each in enumerate(table.sets) if name in ("all", each)])


def calibration_rows(held: ScoredTable, *, more: Mapping[str, Any]) -> list[Row]:
    """Calibration error of every stage's probabilities, for its own answer and for later stages', by set."""
    stages, rows = held.table.stages, []
    for name, chosen in _sets(held.table):
        for stage, quality in enumerate(held.quality):
            for later in range(quality.shape[1]):
                error = expected_calibration_error(quality[chosen, later], held.table.labels[chosen, stage + later])
                about = {"set": name, "seen_at": stages[stage], "stage": stages[stage + later]}
                rows.append({"kind": "calibration", **about, "items": len(chosen), "ece": error, **more})
    return rows


def stops(solver: Solver, held: ScoredTable, price: float) -> Tensor:
    last = len(held.scores) - 1

    def stop(item: int) -> int:
        decided = (solver.decide(stage, held.scores[stage][item], price).stop for stage in range(last))
        return next((stage for stage, stops in enumerate(decided) if stops), last)

    return torch.tensor([stop(item) for item in range(len(held.table.ids))])


def prices_of(solver: Solver, held: ScoredTable, start: float) -> list[float]:
    """Prices in equal ratios from one at which every item stops at stage 0 to one after which nothing changes."""
    low, high = start, 2 * start
    for _ in range(ROUNDS):
        if not bool(stops(solver, held, low).any()):
            break
        low /= 2
    final = stops(solver, held, high * 2.0**ROUNDS)
    for _ in range(ROUNDS):
        if torch.equal(stops(solver, held, high), final):
            break
        high *= 2
    return [low * (high / low) ** (step / (PRICES - 1)) for step in range(PRICES)]


def frontier_rows(
    predictor: Predictor, table: records.Table, rates: Rates, *, risk: float | None = None, more: Mapping[str, Any]
) -> list[Row]:
    """Quality against cost of held-out items, together and by set; costs are `rates` applied to the tokens of each.

    Rows have `kind` and `set`, and `more`. "stage": the mean `cost` (ms) and `quality` of a stage by itself.
    "frontier": a `point` for each `price`. "gain": the `mean_gain` over the range of costs. `stderr` is a standard
    error over items.
    """
    solver, held = Solver(predictor.table(risk), rates), held_out(predictor, table, risk)
    costs, tokens = rates.costs(table.tokens, table.kept), (table.tokens + table.kept).double()
    prices = prices_of(solver, held, float(costs.mean()))
    at_price = [stops(solver, held, price) for price in prices]
    scratch = torch.tensor(rates.start_ms) + torch.tensor(rates.token_ms) * tokens
    rows: list[Row] = []
    for name, chosen in _sets(table):
        labels, alone, run = table.labels[chosen], scratch[chosen], costs[chosen].cumsum(1)
        stop_at = zip(prices, at_price, strict=True)
        points = [{"price": price, **point(labels, run, alone, stop[chosen])} for price, stop in stop_at]
        mine: list[Row] = []
        for at, stage in enumerate(table.stages):
            cost = float(alone[:, at].mean())
            mine.append({"kind": "stage", "stage": stage, "index": at, "cost": cost, **_mean(labels[:, at])})
        mine += [{"kind": "frontier", **each} for each in points]
        mine.append({"kind": "gain", "mean_gain": mean_gain(points, labels, run, alone), "items": len(chosen)})
        rows += [{**row, "set": name, **more} for row in mine]
    return rows


def _mean(values: Tensor) -> dict[str, float]:
    return {"quality": float(values.mean()), "stderr": float(values.std(correction=0)) / len(values) ** 0.5}


def point(labels: Tensor, run: Tensor, alone: Tensor, stop: Tensor) -> Row:
    """Mean cost and quality of n items that stop at the stages `stop` [n], beside `mixing`: the quality of sending each
    item to the first or the last stage alone, at random, at the same mean cost.

    labels [n, L]; run [n, L] the cost of an item that stops at a stage, alone [n, L] that of the stage by itself, in
    ms. `gain_stderr` is that of the gain's linear approximation around the means.
    """
    quality, cost = (each.gather(1, stop[:, None])[:, 0] for each in (labels, run))
    rise, width = (each[:, -1] - each[:, 0] for each in (labels, alone))
    dearer = float(width.mean())
    share = (float(cost.mean()) - float(alone[:, 0].mean())) / dearer if dearer > 0 else 1.0
    inside = 0 < share < 1
    share = min(max(share, 0.0), 1.0)
    gain = quality - (labels[:, 0] + share * rise)
    spread = gain - (cost - alone[:, 0] - share * width) * rise.mean() / dearer if inside else gain
    return {
        "cost": float(cost.mean()),
        **_mean(quality),
        "stage": float(stop.double().mean()),
        "shares": (torch.bincount(stop, minlength=labels.shape[1]) / len(stop)).tolist(),
        "mixing": float((quality - gain).mean()),
        "gain": float(gain.mean()),
        "gain_stderr": _mean(spread)["stderr"],
        "inside": inside,
    }


def mean_gain(points: Sequence[Row], labels: Tensor, run: Tensor, alone: Tensor) -> float | None:
    """Quality less that of random mixing, averaged over the mean costs from the cascade's least to that of the last
    stage alone; None where there is no such range.

    The frontier runs straight from stage 0 answering everything through its points, and on at the last one's quality.
    """
    first, last = float(alone[:, 0].mean()), float(alone[:, -1].mean())
    best = {float(run[:, 0].mean()): float(labels[:, 0].mean())}
    for each in points:
        best[each["cost"]] = max(each["quality"], best.get(each["cost"], each["quality"]))
    costs, qualities = zip(*sorted(best.items()), strict=True)
    # straight between the knots: the trapezoids are exact
    knots = np.unique(np.clip([*costs, first, last], max(costs[0], first), last))
    if len(knots) < 2:
        return None
    mixed = np.interp(knots, [first, last], [float(labels[:, at].mean()) for at in (0, -1)])
    gains = np.interp(knots, costs, qualities) - mixed
    return float((np.diff(knots) * (gains[1:] + gains[:-1]) / 2).sum() / (knots[-1] - knots[0]))
