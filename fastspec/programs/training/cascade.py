"""Training and judging a cascade's predictor on what its stages answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastspec.cascade import evaluate, records
from fastspec.cascade.plot import STOPS
from fastspec.cascade.predictor import Predictor
from fastspec.cascade.stopping import Rates, Solver

Row = dict[str, Any]
PRICES = 41
ROUNDS = 20
"""Doublings in the search for the prices at which every item stops at stage 0, and none does before its best stage."""


def fit(
    path: str | Path, stages: Sequence[str], *, seed: int, rates: Rates | None = None, place: Mapping[str, str] | None = None
) -> Predictor:
    """A predictor from the training items of a file of labelled records, with what its stages cost and where."""
    table = records.table(records.read(path), stages).where(split="train")
    made = Predictor.fit(stages, table.features, table.labels, table.tokens + table.kept, table.kept, seed=seed)
    return replace(made, rates=rates, place=dict(place or {}))


@dataclass(frozen=True, slots=True)
class Held:
    """Held-out items with what the predictor says of them: by stage each item's `Scores`, and their `quality` [n, L - k]."""

    table: records.Table
    scores: tuple[tuple[Any, ...], ...]
    quality: tuple[Tensor, ...]


def held_out(predictor: Predictor, table: records.Table, risk: float | None = None) -> Held:
    """Score every item of a table at every stage."""
    scores = tuple(
        tuple(predictor.score(stage, row, risk) for row in features) for stage, features in enumerate(table.features)
    )  # fmt: skip
    return Held(table, scores, tuple(torch.tensor([each.quality for each in column], dtype=torch.float64) for column in scores))


def calibration_rows(held: Held, *, bins: int = 10, more: Mapping[str, Any]) -> list[Row]:
    """A reliability row for every set and every stage's probability of its own answer and of the later stages'."""
    rows = []
    for name in ("all", *sorted(set(held.table.sets))):
        chosen = [at for at, each in enumerate(held.table.sets) if name in ("all", each)]
        for stage, quality in enumerate(held.quality):
            for later in range(quality.shape[1]):
                said, about = held.table.stages[stage], held.table.stages[stage + later]
                rows.append(evaluate.reliability(
                    quality[chosen, later], held.table.labels[chosen, stage + later], set=name, stage=about, bins=bins, seen_at=said, **more
                ))  # fmt: skip
    return rows


def stops(solver: Solver, held: Held, price: float) -> Tensor:
    """The stage at which every item stops [n] int64."""
    last = len(held.scores) - 1
    found = [
        next((stage for stage in range(last) if solver.decide(stage, held.scores[stage][item], price).stop), last)
        for item in range(len(held.table.ids))
    ]
    return torch.tensor(found)


def prices_of(solver: Solver, held: Held, start: float, count: int = PRICES) -> list[float]:
    """Prices from one at which every item stops at stage 0 to one from which on nothing changes, in equal ratios; the search begins at
    `start`."""
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
    return [low * (high / low) ** (step / (count - 1)) for step in range(count)]


def frontier_rows(
    predictor: Predictor, table: records.Table, rates: Rates, *, seed: int, risk: float | None = None, more: Mapping[str, Any]
) -> list[Row]:  # fmt: skip
    """What `fastspec cascade evaluate` writes of held-out items, together and by set: see `fastspec.cascade.evaluate.summary`.

    Costs are `rates` applied to the tokens of each item. Random mixing is given twice: "all" and each set against sending a request to
    one of the models from scratch, and with `STOPS` added to the name against the same cascade with its stops drawn at random.
    """
    solver = Solver(predictor.table(risk), rates)
    held = held_out(predictor, table, risk)
    costs = rates.costs(table.tokens, table.kept)
    prices = prices_of(solver, held, float(costs.mean()))
    every = torch.stack([stops(solver, held, price) for price in prices])
    scratch = torch.stack([_from_scratch(rates, table, stage) for stage in range(len(table.stages))], 1)
    rows = []
    for name in ("all", *sorted(set(table.sets))):
        chosen = torch.tensor([at for at, each in enumerate(table.sets) if name in ("all", each)])
        for suffix, mixing in (("", scratch), (STOPS, costs.cumsum(1))):
            rows += evaluate.summary(
                table.labels[chosen], costs[chosen], prices, every[:, chosen], set=name + suffix, stages=table.stages,
                alone=mixing[chosen], seed=seed, more=more,
            )  # fmt: skip
    return rows


def _from_scratch(rates: Rates, table: records.Table, stage: int) -> Tensor:
    """Milliseconds [n] of a stage that answers by itself."""
    return rates.start_ms[stage] + rates.token_ms[stage] * (table.tokens + table.kept)[:, stage].double()
