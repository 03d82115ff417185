"""Optimal stopping: against every policy by brute force, and stages that never fall as the price rises, in exact
arithmetic.

Probabilities are multiples of 1/16, chances of 1/8, costs and prices whole numbers below 2^12, averages over 2, 4 or 8
items: every value below is a multiple of 2^-24 smaller than 2^20, which float64 holds exactly, so nothing is compared
with a tolerance.
"""

from __future__ import annotations

import math
import time
from itertools import pairwise, product

import pytest
import torch
from helpers.cascade import scored
from helpers.examples import examples
from hypothesis import given
from hypothesis import strategies as st

from fastspec.cascade.decisions import QualityTable, Rates, Scores, Solver, backward
from fastspec.errors import Unsupported

STRATEGIES = ((1.0, 1.6, 4.2, 8.8), (0.6, 0.7, 0.82, 0.92))


@st.composite
def chains(draw: st.DrawFn):
    """(quality, costs, transitions, price) of 2 to 4 stages with 1 to 3 states each; stage 0 starts in its first
    state."""
    sizes = [1, *draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))]
    quality = [torch.tensor([draw(st.integers(0, 16)) / 16 for _ in range(size)]).double() for size in sizes]
    costs = [torch.tensor([float(draw(st.integers(0, 40))) for _ in range(size)]).double() for size in sizes[:-1]]
    transitions = []
    for size, after in pairwise(sizes):
        cuts = [sorted(draw(st.lists(st.integers(0, 8), min_size=after - 1, max_size=after - 1))) for _ in range(size)]
        rows = [[b - a for a, b in zip([0, *row], [*row, 8], strict=True)] for row in cuts]
        transitions.append(torch.tensor(rows).double() / 8)
    return quality, costs, transitions, draw(st.integers(0, 300))


def solve_chain(quality, costs, transitions, price):
    """The optimal policy of a known Markov chain: (J_k [S_k], stop_k [S_k] bool) for every stage k; a tie stops."""
    losses = [price * (1 - each) for each in quality]
    values = backward(losses, costs, [matrix.mv for matrix in transitions])
    return values, [loss <= value for loss, value in zip(losses, values, strict=True)]


def loss_of_policy(policy, quality, costs, transitions, price) -> float:
    """The expected loss of stopping where policy[k][state] says so, by following every state forward from the first."""
    reached, loss = torch.ones(1).double(), 0.0
    for k, states in enumerate(quality):
        stops = torch.tensor(policy[k]) if k < len(policy) else torch.ones(len(states), dtype=torch.bool)
        loss += float((reached * stops * price * (1 - states)).sum())
        if k < len(policy):
            reached = reached * ~stops
            loss += float((reached * costs[k]).sum())
            reached = reached @ transitions[k]
    return loss


@examples(150)
@given(chains())
def test_no_policy_is_better_than_backward_induction(chain):
    quality, costs, transitions, price = chain
    values, stops = solve_chain(quality, costs, transitions, price)
    shapes = [list(product((False, True), repeat=len(each))) for each in quality[:-1]]
    best = min(loss_of_policy(policy, *chain) for policy in product(*shapes))
    assert float(values[0][0]) == best == loss_of_policy([each.tolist() for each in stops[:-1]], *chain)
    assert bool(stops[-1].all())


@examples(100)
@given(st.lists(st.tuples(st.integers(0, 16), st.integers(0, 40)), min_size=1, max_size=6), st.integers(0, 300))
def test_where_nothing_is_random_the_cheapest_sum_wins(stages, price):
    quality = [q / 16 for q, _ in stages]
    costs = [float(c) for _, c in stages]
    totals = [sum(costs[: k + 1]) + price * (1 - quality[k]) for k in range(len(stages))]
    one = torch.ones(1, 1).double()
    values, stops = solve_chain(
        [torch.tensor([q]).double() for q in quality],
        [torch.tensor([c]).double() for c in costs[1:]],
        [one] * (len(stages) - 1),
        price,
    )
    assert costs[0] + float(values[0]) == min(totals)
    assert next(k for k, stop in enumerate(stops) if bool(stop)) == totals.index(min(totals))


@pytest.mark.parametrize(
    ("price", "stage"), [(1, 0), (2, 0), (5, 0), (10, 0), (20, 1), (40, 2), (60, 2), (80, 2), (200, 3)]
)
def test_an_example_by_both_solvers(price, stage):
    costs, quality = STRATEGIES
    tensors = [[torch.tensor([each]).double() for each in row] for row in (quality, costs[1:])]
    _, stops = solve_chain(*tensors, [torch.ones(1, 1).double()] * 3, price)
    assert [bool(each) for each in stops].index(True) == stage
    table = alike([quality] * 9)
    solver = Solver(table, Rates((0.0,) * 4, (0.0,) * 4, costs))
    scores = [scored(quality[k:], (1.0,) * (3 - k)) for k in range(4)]
    assert stage_of(solver, scores, price) == stage


def alike(quality) -> QualityTable:
    """A table whose items know the qualities of all stages at every stage."""
    known = torch.tensor(quality).double()
    count, stages = known.shape
    points = tuple(torch.zeros(count, 2 * (stages - k) - 1) for k in range(stages))
    return QualityTable(
        tuple(known[:, k:] for k in range(stages)), points, torch.ones(count, stages), torch.zeros(count, stages)
    )


def stage_of(solver: Solver, scores, price: float) -> int:
    return next(k for k, each in enumerate(scores) if solver.decide(k, each, price).stop)


@st.composite
def settings_of(draw: st.DrawFn):
    """(solver, scores of some requests at every stage) with dyadic numbers."""
    stages, count, seed = draw(st.integers(2, 4)), draw(st.integers(9, 30)), draw(st.integers(0, 2**20))
    g = torch.Generator().manual_seed(seed)

    def number(*shape, most=16):
        return torch.randint(most + 1, shape, generator=g).double()

    left = range(stages, 0, -1)
    table = QualityTable(
        tuple(number(count, each) / 16 for each in left),
        tuple(number(count, 2 * each - 1, most=999) for each in left),
        number(count, stages, most=40),
        number(count, stages, most=9),
    )
    rates = [tuple(number(stages, most=3).tolist()) for _ in range(3)]
    solver = Solver(
        table, Rates(rates[0], (0.0, *rates[1][1:]), rates[2]), neighbours=draw(st.sampled_from([1, 2, 4, 8]))
    )
    requests = [
        [Scores(tuple((number(each) / 16).tolist()), tuple(number(2 * each - 1, most=999).tolist())) for each in left]
        for _ in range(8)
    ]
    return solver, requests, table


@examples(120)
@given(settings_of(), st.lists(st.integers(0, 2000), min_size=2, max_size=12))
def test_no_request_stops_earlier_at_a_higher_price(drawn, prices):
    solver, requests, _ = drawn
    for scores in requests:
        for k in range(solver.stages):  # at every stage, also those that the request would not have reached
            stops = [solver.decide(k, scores[k], price).stop for price in sorted(prices)]
            assert stops == sorted(stops, reverse=True)
        reached = [stage_of(solver, scores, price) for price in sorted(prices)]
        assert reached == sorted(reached)


@examples(60)
@given(settings_of(), st.integers(0, 300))
def test_decisions_are_the_recursion_written_out(drawn, price):
    solver, requests, table = drawn
    stages, count = solver.stages, len(table.fresh)
    spread = [each.std(0, correction=0).clamp(min=1e-6) for each in table.points]

    def near(k, at, itself=None):
        far = ((table.points[k] - at) / spread[k]).square().sum(1)
        order = [i for i in far.argsort().tolist() if i != itself]
        cut = float(far[order[solver.neighbours - 1]])
        ties = len(order) > solver.neighbours and float(far[order[solver.neighbours]]) - cut < 1e-9
        return None if ties else order[: solver.neighbours]

    def go_on(k, at, ahead, itself=None):
        """The value of going on from stage k, None where equally distant items make the neighbours a matter of
        order."""
        items = near(k, at, itself)
        if items is None:
            return None
        total = 0.0
        for i in items:
            later = (
                None if k == stages - 2 else go_on(k + 1, table.points[k + 1][i], float(table.quality[k + 1][i, 1]), i)
            )
            if k < stages - 2 and later is None:
                return None
            stop = price * (1 - float(table.quality[k + 1][i, 0])) if later is not None else 0.0
            total += float(solver._costs[i, k + 1]) + (0.0 if later is None else min(stop, later))
        return total / len(items) + (price * (1 - ahead) if k == stages - 2 else 0.0)

    assert count > solver.neighbours
    for scores in requests[:3]:
        for k, each in enumerate(scores[:-1]):
            expected = go_on(k, torch.tensor(each.point).double(), each.quality[1])
            found = solver.decide(k, each, price)
            assert found.stop_value == price * (1 - each.quality[0]) and found.stop == (
                found.stop_value <= found.go_on_value
            )
            assert expected is None or found.go_on_value == expected
        last = solver.decide(stages - 1, scores[-1], price)
        assert last.stop and last.go_on_value == math.inf


@examples(60)
@given(settings_of())
def test_a_price_of_nothing_stops_at_once(drawn):
    solver, requests, _ = drawn
    assert all(solver.decide(k, each, 0.0).stop for scores in requests for k, each in enumerate(scores))


@examples(60)
@given(st.lists(st.integers(0, 16), min_size=2, max_size=4), st.integers(2, 9))
def test_a_price_without_bound_goes_to_the_best_stage(sixteenths, count):
    quality = [each / 16 for each in sixteenths]
    stages = len(quality)
    solver = Solver(alike([quality] * count), Rates((1.0,) * stages, (0.0,) * stages, (7.0,) * stages))
    scores = [scored(tuple(quality[k:]), (1.0,) * (stages - k - 1)) for k in range(stages)]
    assert stage_of(solver, scores, 2.0**40) == quality.index(max(quality))  # the first of the best: going on costs
    assert stage_of(solver, scores, 1e-9) == 0


def test_costs_are_generated_verified_and_start():
    rates = Rates((1.0, 2.0, 4.0), (0.0, 0.5, 0.25), (3.0, 5.0, 7.0))
    fresh, kept = torch.tensor([[10, 6, 1]]), torch.tensor([[0, 4, 9]])
    assert rates.costs(fresh, kept).tolist() == [[10 + 3, 12 + 5 + 5, 4 + 2.5 + 7]]


def test_a_backward_pass_of_four_thousand_items_is_short_and_kept():
    g = torch.Generator().manual_seed(0)
    count, left = 4000, (3, 2, 1)
    table = QualityTable(
        tuple(torch.rand(count, each, generator=g) for each in left),
        tuple(torch.randn(count, 2 * each - 1, generator=g) for each in left),
        torch.rand(count, 3, generator=g) * 90,
        torch.zeros(count, 3),
    )
    solver = Solver(table, Rates((1.0, 2.0, 3.0), (0.0, 0.1, 0.1), (1.0, 1.0, 1.0)))
    scores = scored((0.5, 0.6, 0.7), (30.0, 30.0))
    times = []
    for price in range(1, 80):
        start = time.process_time()
        solver.decide(0, scores, float(price))
        times.append(time.process_time() - start)
    assert sorted(times)[40] < 0.1
    assert solver._values.cache_info().currsize == 64
    before = solver._values.cache_info().misses
    solver.decide(0, scores, 79.0)
    assert solver._values.cache_info().misses == before


def test_rates_that_do_not_fit_are_refused():
    one, zero = (1.0,), (0.0,)
    for bad in [
        ((1.0, -1.0), (0.0, 0.0), (1.0, 1.0)),
        (one, zero * 2, one),
        (one, one, one),
        ((math.nan,), zero, one),
        ((), (), ()),
    ]:
        with pytest.raises(Unsupported, match="Rates: "):
            Rates(*bad)
