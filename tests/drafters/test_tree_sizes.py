"""The sizes of rounds' trees by simulated costs and acceptance: the most expected tokens a millisecond, a bounded loss
where nothing is accepted, and a way back where drafts pay again."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastspec import files
from fastspec.default_trees import TREE_STEPS, TreeShape
from fastspec.generation.drafters.tree_sizes import (
    BETTER,
    BLOCK,
    CREDIT,
    EVIDENCE,
    GRANTED,
    GRANTED_COLD,
    MOST_TRIES,
    SETTLED,
    SHARE,
    SLACK,
    Acceptance,
    TreeChoice,
    TreeSizes,
    bucket,
    width_of,
)
from fastspec.patches.tuning import round_times

SHAPES = TREE_STEPS["cuda"]
COSTS = {
    "small, on a GPU": (0.456, 0.62, 0.78, 1.0, 1.1, 1.3),
    "8 billion weights, on a GPU": (4.0, 4.5, 4.8, 5.3, 5.5, 6.43),
    "small experts, on a GPU": (1.5, 2.3, 3.1, 4.6, 7.0, 13.0),
    "on a CPU": (20.0, 24.0, 30.0, 42.0, 60.0, 120.0),
}
"""Milliseconds of a round without drafts, and of one of each of SHAPES."""


def chooser(costs: tuple[float, ...], **more: object) -> TreeSizes:
    """A chooser whose prior thinks drafts cheaper than they are."""
    prior = [costs[0], *(0.8 * cost for cost in costs[1:])]
    return TreeSizes(SHAPES, SHAPES[-1], prior, **more)  # type: ignore[arg-type]


class Text:
    """Rounds of a text whose drafts are accepted with `chance`, c of `Acceptance`, at a cost for each size, with some
    `noise`, and for a change of size: `leaves` from rounds with drafts, `enters` from rounds without."""

    def __init__(
        self,
        sizes: TreeSizes,
        costs: tuple[float, ...],
        seed: int = 0,
        noise: float = 0.02,
        leaves: float = 0.0,
        enters: float = 0.0,
    ) -> None:
        self.sizes, self.costs, self.random = sizes, costs, random.Random(seed)
        self.noise, self.leaves, self.enters = noise, leaves, enters
        self.made: set[int] = set()
        self.tokens, self.ms, self.length = 0, 0.0, 500
        self.history: list[int] = []
        self.in_flight = False

    def round(self, chance: float, rows: int = 1) -> None:
        size = self.history[-1] if self.in_flight else self.sizes.size
        accepted, former = [0] * rows, self.history[-1:] or [size]
        stays = size == self.sizes.size and self.sizes.goes_on
        self.in_flight = self.sizes.captures and stays  # launched before this one is read
        self.made.add(size)
        self.history.append(size)
        if size:
            shape = SHAPES[size - 1]
            for row in range(rows):
                while accepted[row] < shape.max_path - 1 and self.random.random() < 1 - math.exp(
                    -chance * width_of(shape)
                ):
                    accepted[row] += 1
        spent = self.costs[size] * (1 + self.noise * self.random.gauss(0, 1))
        if former != [size]:
            spent += self.leaves if former[0] else self.enters
        self.ms, self.tokens = self.ms + spent, self.tokens + 1 + accepted[0]
        self.sizes.count(size, accepted, spent, self.length, self.made)

    def call(self, chance: float, tokens: int) -> float:
        """A whole call -> its tokens a millisecond, in those of plain decoding."""
        self.sizes.begin()
        self.tokens, self.ms, self.history, self.in_flight = 0, 0.0, [], False
        while self.tokens < tokens:
            self.round(chance)
        return self.tokens / self.ms * self.costs[0]


@pytest.mark.parametrize("before", [0.0, 1.1])
@pytest.mark.parametrize("switch", [0.0, 0.4])
@pytest.mark.parametrize("tokens", [128, 1024])
@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
def test_a_text_of_which_nothing_is_accepted_costs_three_percent_at_most(
    costs, tokens: int, switch: float, before: float
) -> None:
    """After calls like it, and after calls whose drafts were accepted; changes cost more than was thought, too."""
    for seed, more in enumerate((0.5, 1.0, 2.0)):
        sizes = chooser(costs, captures=switch > 0, switch=switch)
        text = Text(sizes, costs, seed, leaves=more * switch, enters=2 * more * switch)
        while sizes.rounds < 2 * SETTLED:
            text.call(before, 128)
        rates = []
        for _ in range(5):
            text.call(before, 128)
            rates.append(text.call(0.0, tokens))
        assert min(rates) > 0.965 and sum(rates) / len(rates) > (0.97 if tokens < 1024 else 0.985)
        assert 0 in text.history
    assert tokens < 1024 or set(text.history) != {0}  # drafts are tried again


DEAR = st.floats(0.01, 4.0)


@given(
    st.lists(DEAR, min_size=5, max_size=5).map(sorted),
    st.floats(0.6, 1.4),
    st.tuples(st.floats(0.0, 2.5), st.floats(0.3, 2.0)),
    st.booleans(),
    st.sampled_from((0.0, 0.4, 1.1)),
)
@settings(deadline=None, max_examples=60)
def test_whatever_rounds_cost_nothing_accepted_costs_three_percent(
    prices, wrong: float, change: tuple[float, float], captures: bool, before: float
) -> None:
    """Prices of every size and of changes, in plain rounds, and how wrong the prior is about both."""
    costs, (spent, told) = (1.0, *(1 + price for price in prices)), change if captures else (0.0, 1.0)
    sizes = TreeSizes(
        SHAPES, SHAPES[-1], [1.0, *(wrong * cost for cost in costs[1:])], captures=captures, switch=told * spent
    )
    text = Text(sizes, costs, noise=0.0, leaves=0.6 * spent, enters=1.4 * spent)
    while sizes.rounds < 3 * SETTLED:
        text.call(before, 128)
    rates = [text.call(0.0, 128) for _ in range(4)]
    assert min(rates) > 0.96 and sum(rates[1:]) / 3 > 0.969  # 4 passes of 128
    assert text.call(0.0, 1024) > 0.98


@pytest.mark.parametrize("switch", [0.0, 0.4])
@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
def test_acceptance_that_comes_back_is_found(costs, switch: float) -> None:
    """Within what the prices of a try add up to, at the share of a budget that pays it: some tries, each of which a
    text like this accepts with three chances in four."""
    found = []
    for seed in range(7):
        text = Text(chooser(costs, captures=switch > 0, switch=switch), costs, seed, leaves=switch, enters=switch)
        while text.sizes.rounds < SETTLED:
            text.call(0.0, 1024)
        before = text.tokens
        while 0 in text.history[-12:] and text.tokens < before + 4000:
            text.round(1.5)
        found.append(text.tokens - before)
    a_try = (MOST_TRIES * (costs[1] - costs[0]) + 2 * switch) / costs[0] / SHARE
    assert sorted(found)[3] < 80 + 1.5 * a_try and max(found) < 120 + 4 * a_try


@pytest.mark.parametrize("chance", [0.2, 0.45, 0.7, 1.1])
@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
def test_calls_come_near_the_best_fixed_size(costs, chance: float) -> None:
    text = Text(chooser(costs), costs)
    found = [text.call(chance, 1024) for _ in range(8)][2:]
    best = 1.0
    for shape, cost in zip(SHAPES, costs[1:], strict=True):
        passed = 1 - math.exp(-chance * width_of(shape))
        best = max(best, sum(passed**depth for depth in range(shape.max_path)) / cost * costs[0])
    assert sum(found) / len(found) > 0.92 * best


@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
def test_drafts_come_back_where_they_pay_again(costs) -> None:
    text = Text(chooser(costs), costs)
    text.call(0.0, 1024)
    assert text.history[-50:].count(0) > 40
    for _ in range(600):
        text.round(1.6)
    assert 0 not in text.history[-100:]
    for _ in range(600):
        text.round(0.0)
    assert text.history[-100:].count(0) > 90


COUNTS = st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(0, 8), min_size=1, max_size=9)), max_size=30)


@given(st.lists(st.floats(0.1, 50.0), min_size=6, max_size=6), COUNTS, st.integers(0, 5), st.booleans())
@settings(deadline=None)
def test_no_size_promises_more_than_the_chosen_one(costs, rounds, former: int, captures: bool) -> None:
    """Whatever rounds cost and accepted, where nothing else has a say: the budget is ample, and all sizes are made."""
    known = {0: {1: costs[0], **{shape.total_tokens: cost for shape, cost in zip(SHAPES, costs[1:], strict=True)}}}
    sizes = chooser((1.0,) * 6, known=known, captures=captures)
    for size, accepted in rounds:
        sizes.acceptance.count(size, [min(drafts, SHAPES[size].max_path - 1) for drafts in accepted])
    sizes.left, sizes.drafted, sizes.rounds, sizes.made = 1e9, EVIDENCE, SETTLED, frozenset(range(6))
    sizes._use(former, BLOCK)
    sizes._choose(begins=former == 0)
    rates = sizes.rates()
    assert rates == [tokens / cost for tokens, cost in zip((1.0, *sizes.acceptance.expected()), costs, strict=True)]
    best = max(rates)
    assert rates[sizes.size] == best or (sizes.size == former > 0 and rates[former] * BETTER >= best and former)
    assert sizes.size > 0 or rates[0] == best


def test_a_cold_call_takes_one_size_and_a_second_one_where_it_pays() -> None:
    costs = COSTS["8 billion weights, on a GPU"]
    text = Text(chooser(costs, captures=True), costs)
    for _ in range(60):
        text.round(1.1)
    assert set(text.history) == {5}  # and no round to learn what others cost
    text = Text(chooser(costs, captures=True), costs)
    while 0 not in text.history:
        text.round(0.0)
    assert GRANTED_COLD / (costs[5] / costs[0] - 1) - BLOCK < len(text.history)
    assert len(set(text.history)) <= 6


def test_dear_trees_are_not_begun_with() -> None:
    """Where the first size costs more than a text of which nothing is accepted may lose."""
    costs = COSTS["small experts, on a GPU"]
    sizes = chooser(costs)
    assert sizes.price(5) > sizes.left and 0 < sizes.size < 4


def paid(times: float) -> TreeSizes:
    """A chooser of trees of one size, a round of which is known to cost so many target passes more than one without
    drafts."""
    return TreeSizes(SHAPES[-1:], SHAPES[-1], (1.0, 1.0 + times), known={0: {1: 10.0, 60: 10.0 * (1 + times)}})


@pytest.mark.parametrize(("accepted", "rounds"), [((), 2), ((1, 0), 3), ((0, 2), 4), ((0, 1), 3)])
def test_a_size_goes_on_while_it_may_lose_another_round_or_brings_what_it_costs(accepted, rounds: int) -> None:
    """A round costs one target pass more than without drafts: it may cost all that is left, and the credit."""
    sizes, taken = paid(1.0), 0
    while sizes.size and taken < BLOCK:
        sizes.count(1, [accepted[taken] if taken < len(accepted) else 0], None, 500, {1})
        taken += 1
    assert taken == rounds


def test_the_budget_pays_what_was_measured() -> None:
    """A round's own time, as far as nothing else can have held it up; what is known of its size where there is none."""
    for ms, cost in ((None, 1.0), (25.0, 1.5), (12.0, 0.2), (9.0, 0.0), (900.0, 1.0 + SLACK)):
        sizes = paid(1.0)
        sizes.count(1, [0], ms, 500, {1})
        assert sizes.left == pytest.approx(GRANTED + SHARE - cost)
        sizes.count(0, [], 900.0, 500, {1})  # the change to rounds without drafts
        assert sizes.left == pytest.approx(GRANTED + 2 * SHARE - cost - SLACK)
        sizes.count(0, [], 900.0, 500, {1})  # whose time is no draft's
        assert sizes.left == pytest.approx(GRANTED + 3 * SHARE - cost - SLACK)


def test_a_change_costs_what_the_last_ones_did() -> None:
    """From rounds with drafts and from those without apart, and in no process whose clock nobody else has."""
    for timed in (True, False):
        sizes = TreeSizes(SHAPES[-1:], SHAPES[-1], (1.0, 2.0), known={0: {1: 10.0, 60: 20.0}}, switch=3.0, timed=timed)
        assert sizes.change(0) == sizes.change(1) == pytest.approx(0.3)
        for _ in range(3):
            for size, ms in ((1, 26.0), (0, 12.0)):
                sizes.count(size, [0] if size else [], ms, 500, {1})
        wanted = (0.6, 0.2) if timed else (0.3, 0.3)
        assert (sizes.change(0), sizes.change(1)) == pytest.approx(wanted)


def test_only_the_first_drafts_of_a_call_are_given_credit() -> None:
    sizes = paid(1.0)
    sizes._use(1, BLOCK)
    assert sizes.credit == CREDIT and sizes._affords(1)
    sizes._use(0, EVIDENCE)
    sizes._use(1, BLOCK)
    sizes.left = 0.9
    assert sizes.credit == 0 and not sizes._affords(1)
    sizes.begin()
    assert sizes.credit == CREDIT


@pytest.mark.parametrize("rounds", [EVIDENCE - 1, EVIDENCE])
def test_the_first_size_is_judged_by_several_rounds(rounds: int) -> None:
    """Calls that end early add up."""
    sizes = paid(2.0)
    for _ in range(rounds):
        sizes.count(1, [0], None, 500, {1})
    sizes.begin()
    assert bool(sizes.size) == (rounds < EVIDENCE)


@pytest.mark.parametrize(("ms", "kept"), [(10.5, False), (20.0, True), (2.0, True)])
def test_times_are_kept_once_they_changed_by_a_tenth(ms: float, kept: bool) -> None:
    """A block counts for a quarter."""
    files: list[object] = []
    sizes = TreeSizes(SHAPES, SHAPES[-1], (1.0,) * 6, known={0: {1: 10.0, 60: 10.0}}, keep=files.append)
    for _ in range(BLOCK):
        sizes.count(5, [3], ms, 500, {5})
    sizes.end()
    assert sizes.known == {0: {1: 10.0, 60: 10.0 + (ms - 10.0) / 4}} and bool(files) == kept


def test_other_sizes_say_what_one_would_accept() -> None:
    """Counts of a chain foretell those of a tree of the same law, and the other way round."""
    for seen in range(5):
        acceptance, chance, draws = Acceptance(SHAPES), 0.8, random.Random(0)
        levels, passed = SHAPES[seen].max_path - 1, 1 - math.exp(-chance * width_of(SHAPES[seen]))
        for _ in range(6000):
            accepted = 0
            while accepted < levels and draws.random() < passed:
                accepted += 1
            acceptance.count(seen, [accepted])
        for shape, told in zip(SHAPES, acceptance.expected(), strict=True):
            passed = 1 - math.exp(-chance * width_of(shape))
            wanted = sum(passed**depth for depth in range(shape.max_path))
            assert told == pytest.approx(wanted, rel=0.1)
        acceptance.fade(0.0)
        assert acceptance.rounds == [0.0] * 5 and acceptance.expected() == Acceptance(SHAPES).expected()


def test_a_size_s_own_rounds_count_more_than_what_others_say() -> None:
    acceptance = Acceptance(SHAPES)
    acceptance.count(0, [0] * 100)
    acceptance.count(4, [8] * 400)
    assert acceptance.expected()[0] < 1.3 and acceptance.expected()[4] > 8


def test_what_rounds_take_is_known_by_length_and_by_size() -> None:
    assert [bucket(length) for length in (0, 1, 1024, 1025, 4096, 4097, 16384, 65536)] == [0, 0, 0, 1, 1, 2, 2, 3]
    sizes = chooser((1.0, 2.0, 3.0, 4.0, 5.0, 6.0), known={0: {1: 10.0, 60: 30.0}})
    assert sizes.ms(0) == 10.0 and sizes.ms(5) == 30.0
    assert sizes.ms(1) == pytest.approx(16.0) and sizes.ms(4) == pytest.approx(25.0)  # by the nearest that is known
    assert sizes.price(5) == pytest.approx(2.0)
    sizes._use(5, 2)
    for _ in range(2):
        sizes.count(5, [3], 36.0, 5000, {5})  # longer texts: every size takes so much longer
    assert sizes.known[2] == {1: 16.0, 60: 36.0} and sizes.known[0] == {1: 10.0, 60: 30.0}


def test_without_a_clock_a_call_uses_what_earlier_ones_took() -> None:
    """As processes do that hold a model together, with the first one's times."""
    kept: list[object] = []
    sizes = chooser((1.0, 2.0, 3.0, 4.0, 5.0, 6.0), timed=False, keep=kept.append)
    before = [sizes.ms(size) for size in range(6)]
    text = Text(sizes, (7.0,) * 6)
    text.call(1.6, 400)
    assert [sizes.ms(size) for size in range(6)] == before and not sizes.known and sizes.pending
    sizes.end()
    assert not kept
    sizes.agree(lambda mine: {0: dict.fromkeys(mine[0], 5.0)})
    assert len(sizes.known[0]) > 1 and set(sizes.known[0].values()) == {5.0} and sizes.ms(0) == 5.0
    sizes.end()
    assert kept == [sizes.known]


def test_what_was_measured_is_kept_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rounds" / "one.json"
    assert round_times.read_times(path) == {}
    round_times.keep_times(path, {0: {1: 1.5, 60: 2.5}, 2: {1: 3.0}})
    assert round_times.read_times(path) == {0: {1: 1.5, 60: 2.5}, 2: {1: 3.0}}
    files.write(path, {"round_ms": [1, 2]})
    with pytest.warns(RuntimeWarning, match="damaged and is ignored"):
        assert round_times.read_times(path) == {}


def test_a_choice_prints_a_table() -> None:
    table = TreeChoice((1, 4), (3.0, 3.5), (True, False), (1.0, 2.25), 4)
    assert [line.split() for line in str(table).split("\n")] == [
        ["4", "nodes", "chosen"],
        ["nodes", "round", "ms", "expected", "tokens/ms"],
        ["1", "3.000", "1.000", "0.3333"],
        ["4", "3.500~", "2.250", "0.6429", "<"],
    ]


def test_a_shape_with_fewer_nodes_grows_no_further_than_these_reach() -> None:
    assert TreeShape(60, 7, 10).limited(2) == TreeShape(2, 0, 1)
    assert TreeShape(60, 7, 10).limited(4) == TreeShape(4, 2, 3) and TreeShape(8, 5, 2).limited(4) == TreeShape(4, 2, 2)
