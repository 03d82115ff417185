"""The sizes of rounds' trees by simulated costs and acceptance: the most expected tokens a millisecond, a bounded loss
where nothing is accepted, and a way back where drafts pay again."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from helpers.examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from fastspec import files
from fastspec.default_trees import BATCH_TREES, TREE_STEPS, TreeShape
from fastspec.generation.drafters.acceptance import SURE, SUREST, WIDTH, Acceptance, breadth
from fastspec.generation.drafters.base import Place
from fastspec.generation.drafters.tree_sizes import (
    BETTER,
    BETWEEN_CALLS,
    BLOCK,
    CREDIT,
    DOUBTED,
    ENOUGH,
    EVIDENCE,
    GRANTED,
    GRANTED_COLD,
    LONGEST_REST,
    MOST_EARNED,
    MOST_TRIES,
    PROVEN,
    SETTLED,
    SHARE,
    SLACK,
    UNSEEN,
    TreeChoice,
    TreeSizes,
    bucket,
    split,
)
from fastspec.patches.call import assembly

SHAPES = TREE_STEPS["cuda"]
COSTS = {
    "small, on a GPU": (0.456, 0.62, 0.78, 1.0, 1.1, 1.3),
    "8 billion weights, on a GPU": (4.0, 4.5, 4.8, 5.3, 5.5, 6.43),
    "small experts, on a GPU": (1.5, 2.3, 3.1, 4.6, 7.0, 13.0),
    "on a CPU": (20.0, 24.0, 30.0, 42.0, 60.0, 120.0),
}
"""Milliseconds of a round without drafts, and of one of each of SHAPES."""


def width_of(shape: TreeShape, growth: float = WIDTH) -> float:
    """Multiple of a chain's chances that a level of this tree has, as `Acceptance` counts them."""
    return 1 + growth * breadth(shape)


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


@pytest.mark.each_value  # times and acceptance meet in the test of calls
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
@examples(100)
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


@pytest.mark.each_value  # a good head and a bad one on each device
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
    sizes.acceptance.seen = [ENOUGH] * 5  # no size is tried for what may be learned
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


@pytest.mark.parametrize(("price", "told"), [(0.832, True), (4.0, False)])
def test_the_last_round_before_drafts_are_tried_again_is_told(price: float, told: bool) -> None:
    """Where they are affordable by then: within LONGEST_REST rounds."""
    sizes = paid(price)
    while sizes.size:
        assert not sizes.tries_next
        sizes.count(1, [0], None, 500, {1})
    for _ in range(sizes.due - 1):
        assert not sizes.tries_next
        sizes.count(0, [], None, 500, {1})
    assert sizes.tries_next == told
    sizes.count(0, [], None, 500, {1})
    assert (sizes.size == 1) == told and not sizes.tries_next


@pytest.mark.parametrize("rounds", [EVIDENCE - 1, EVIDENCE])
def test_the_first_size_is_judged_by_several_rounds(rounds: int) -> None:
    """Calls that end early add up."""
    sizes = paid(2.0)
    for _ in range(rounds):
        sizes.count(1, [0], None, 500, {1})
    sizes.begin()
    assert bool(sizes.size) == (rounds < EVIDENCE)


@pytest.mark.parametrize(
    ("ms", "known", "kept"), [(10.5, 10.125, False), (20.0, 12.5, True), (2.0, 2.0, True), (9.2, 9.8, False)]
)
def test_times_are_kept_once_they_changed_by_a_tenth(ms: float, known: float, kept: bool) -> None:
    """A block counts for a quarter, one that took much less is believed."""
    files: list[object] = []
    sizes = TreeSizes(SHAPES, SHAPES[-1], (1.0,) * 6, known={0: {1: 10.0, 60: 10.0}}, keep=files.append)
    for _ in range(BLOCK):
        sizes.count(5, [3], ms, 500, {5})
    sizes.end()
    assert sizes.known == {0: {1: 10.0, 60: pytest.approx(known)}} and bool(files) == kept


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


@pytest.mark.parametrize(("rounds", "known"), [(EVIDENCE, 4.0), (EVIDENCE - 1, 8.5)])
def test_processes_that_agree_believe_several_rounds_that_took_less(rounds: int, known: float) -> None:
    sizes = TreeSizes(SHAPES[-1:], SHAPES[-1], (1.0, 2.0), known={0: {1: 10.0, 60: 20.0}}, timed=False)
    sizes._use(0, rounds)
    for _ in range(rounds):
        sizes.count(0, [], 4.0, 500, {1})
    sizes.agree(lambda mine: mine)
    assert sizes.known == {0: {1: known, 60: 20.0}}


def test_rounds_that_the_host_decides_have_times_of_their_own() -> None:
    """Begun with those of the device's rounds with drafts, and so much more for all of them; texts of another length
    keep to their kind."""
    assert [bucket(length, Place.HOST) for length in (0, 1025, 65536)] == [-1, -2, -4]
    kinds = {bucket(length, place): (place, at) for place in Place for at, length in enumerate((9, 1025, 4097, 65536))}
    assert len(kinds) == 12 and all(split(kind)[0] is place for kind, (place, _) in kinds.items())
    sizes = chooser((1.0, 2.0, 3.0, 4.0, 5.0, 6.0), known={0: {1: 10.0, 60: 30.0}, 2: {1: 14.0, 60: 34.0}})
    sizes._use(5, 2)
    for _ in range(2):
        sizes.count(5, [3], 36.0, 500, {5}, 1.0, Place.HOST)
    assert sizes.known[-1] == {60: 36.0} and sizes.known[0] == {1: 10.0, 60: 30.0}
    sizes.count(0, [], None, 20000, {5}, 1.0, Place.HOST)
    assert sizes.ms(0) == pytest.approx(36 / 4.8) and sizes.length == -4
    sizes.count(0, [], None, 20000, {5})
    assert sizes.ms(0) == 14.0 and sizes.length == 3
    sizes._use(5, 3)
    sizes.left = 100.0
    for place, ms in ((Place.DEVICE, 80.0), (Place.HOST, 40.0), (Place.HOST, 40.0)):  # one sample alone says nothing
        sizes.count(5, [3], ms, 500, {5}, 1.0, place)
    assert sizes.known[0] == {1: 10.0, 60: 30.0} and sizes.known[-1][60] == pytest.approx(37.0)


def test_no_rounds_choose_but_those_that_the_host_corrects_where_that_is_asked_for() -> None:
    """Others have the first trees from the second round on, whatever they accept."""
    costs = COSTS["small, on a GPU"]
    known = {32: {1: costs[0], **{shape.total_tokens: cost for shape, cost in zip(SHAPES, costs[1:], strict=True)}}}
    sizes = chooser(costs, known=known, captures=True, fed=True)
    sizes.made, sizes.rounds = frozenset(range(6)), SETTLED
    for place in (Place.DEVICE, Place.FED, Place.HOST, Place.FED, Place.DEVICE):
        taken = list[int]()
        for _ in range(3):
            sizes.begin()
            for _ in range(128):
                taken.append(sizes.size)
                assert sizes.goes_on or place is Place.FED or len(taken) == 1
                sizes.count(sizes.size, [0] if sizes.size else [], costs[sizes.size], 500, range(6), 1.0, place)
        assert taken.count(0) > 350 if place is Place.FED else set(taken[1:]) == {5}
    assert set(sizes.known) == {32}


def test_a_round_that_is_expected_elsewhere_has_a_size_of_its_own_at_once() -> None:
    costs = COSTS["small, on a GPU"]
    sizes = chooser(costs, captures=True, fed=True)
    for _ in range(SETTLED):
        sizes.count(sizes.size, [0] if sizes.size else [], costs[sizes.size], 500, range(6), 1.0, Place.FED)
    assert sizes.size == 0
    for place, size in ((Place.DEVICE, 5), (Place.HOST, 5), (Place.FED, 0)):
        sizes.expect(500, place)
        assert sizes.size == size
    assert sizes.at(Place.FED) == [*range(6)] and sizes.at(Place.DEVICE) == sizes.at(Place.HOST) == [0, 5]
    assert chooser(costs).at(Place.HOST) == [*range(6)]


@pytest.mark.parametrize("place", [Place.FED, Place.HOST])
def test_what_a_round_without_drafts_takes_is_measured_at_every_place_of_its_verdict(place: Place) -> None:
    """Drafts that pay by the device's own rounds do not where trees take more and rounds without drafts do not."""
    costs = COSTS["small, on a GPU"]
    device = {1: costs[0], **{shape.total_tokens: cost for shape, cost in zip(SHAPES, costs[1:], strict=True)}}
    sizes = chooser(costs, known={0: device}, captures=True)
    sizes.made = frozenset(range(6))
    sizes.rounds = SETTLED
    for _ in range(4):
        sizes.begin()
        spent, plain, tokens = 0.0, 0, 0
        while tokens < 128:
            plain += not sizes.size
            accepted = [2] if sizes.size == 5 else [1] if sizes.size else []
            ms = costs[sizes.size] + (1.0 if sizes.size else 0.0)
            spent, tokens = spent + ms, tokens + 1 + sum(accepted)
            sizes.count(sizes.size, accepted, ms, 500, range(6), 1.0, place)
    assert spent < 1.03 * tokens * costs[0] and plain > 0.9 * tokens  # the last text
    assert sizes.known[bucket(500, place)][1] == pytest.approx(costs[0]) and sizes.known[0] == device


@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
def test_rounds_without_drafts_that_were_held_up_are_timed_again(costs) -> None:
    """Drafts seemed to pay beside them for ever."""
    text = Text(chooser(costs), costs)
    text.call(0.0, 256)
    for nodes in text.sizes.known[0]:
        text.sizes.known[0][nodes] = costs[0] * 4.0 if nodes == 1 else costs[1]  # one accepted draft seems to pay
    text.costs = tuple(3.5 * cost if size else cost for size, cost in enumerate(costs))
    for _ in range(4):
        text.call(0.6, 512)
    assert text.call(0.6, 1024) > 0.97


@pytest.mark.parametrize(
    ("accepted", "after"), [(1, [UNSEEN[0], 2 * UNSEEN[0], 4 * UNSEEN[0]]), (4, [UNSEEN[1], UNSEEN[1]])]
)
def test_rounds_with_drafts_before_some_without_are_timed_again(accepted: int, after: list[int]) -> None:
    """Twice as many each time, and the most where drafts bring much; texts that join cut none of these short."""
    sizes = paid(0.4)
    for count in after:
        drafts = plain = 0
        while sizes.size and drafts < 2 * UNSEEN[1]:
            sizes.count(1, [accepted], None, 5000, {1})
            drafts += 1
        while not sizes.size:
            sizes.join(1 / 32)
            sizes.count(0, [], None, 5000, {1})
            plain += 1
        assert count <= drafts <= count + BLOCK and plain == BLOCK


@pytest.mark.parametrize(("chance", "most"), [(0.45, 0.03), (2.0, 0.001)])
def test_rounds_without_drafts_are_few_where_drafts_pay(chance: float, most: float) -> None:
    """They are timed again, the less often the longer nothing has changed, and not where drafts pay twice."""
    costs = COSTS["8 billion weights, on a GPU"]
    text = Text(chooser(costs), costs)
    text.call(chance, 1024)
    found = list[int]()
    for _ in range(8):
        text.call(chance, 1024)
        found += text.history
    assert (chance > 1) == (0 not in found) and found.count(0) <= most * len(found)


def test_rows_that_take_no_drafts_lessen_what_they_are_worth() -> None:
    known = {0: {1: 10.0, **{shape.total_tokens: 16.0 for shape in SHAPES}}}
    for share, pays in ((1.0, True), (0.5, True), (0.1, False)):
        sizes = chooser((1.0,) * 6, known=known)
        for _ in range(6 * BLOCK):
            sizes.count(5, [3, 4], 16.0, 500, {5}, share)
        assert sizes.gain == pytest.approx(3.5 * share)
        tokens, promised = sizes.acceptance.expected()[-1], sizes.rates()[5]
        assert tokens > 3 and promised == pytest.approx((1 + share * (tokens - 1)) / 16.0)
        sizes.left = 100.0
        sizes._choose()
        assert (sizes.size > 0 and not sizes.probes) == pays == (max(sizes.rates()[1:]) > 1 / 10.0)


def test_a_warm_up_says_what_sizes_cost_and_nothing_of_texts() -> None:
    kept: list[object] = []
    sizes = chooser((1.0,) * 6, captures=True, keep=kept.append)
    assert sizes._is_cold() and sizes.left == GRANTED_COLD
    for size in range(6):
        for ms in (None, 90.0, 10.0 + size / 8, 10.0 + size / 8):
            sizes.try_out(size, ms, 500, range(size + 1))
    sizes.tried()
    sizes.begin()
    sizes.end()
    nodes = [1, *(shape.total_tokens for shape in SHAPES)]
    assert sizes.known == {0: {count: 10.0 + size / 8 for size, count in enumerate(nodes)}} and kept == [sizes.known]
    assert not sizes._is_cold() and sizes.left == pytest.approx(GRANTED)
    assert sizes.size == 5 and not any(sizes.acceptance.rounds)
    sizes.count(5, [0], 50.0, 500, range(6))
    assert not any(map(len, sizes.changes)), "the first round of a call follows none"


def test_a_text_that_joins_renews_the_share_of_its_row() -> None:
    """Of what drafts may lose, and of what was seen; rounds without drafts ask again what pays."""
    for share in (0.5, 0.25):
        sizes = paid(1.0)
        sizes.acceptance.count(0, [4] * 8)
        sizes.left = -1.0
        sizes._use(0, LONGEST_REST)
        sizes.join(share)
        assert sizes.left == pytest.approx(-1.0 + share * (GRANTED + 1.0)) and sizes.due == 1
        assert sizes.acceptance.rounds == [pytest.approx(8 * BETWEEN_CALLS**share)]
        sizes.left = MOST_EARNED
        sizes._use(1, BLOCK)
        sizes.join(share)
        assert sizes.left == pytest.approx(MOST_EARNED + share * (GRANTED - MOST_EARNED)) and sizes.due == BLOCK
    sizes.join(1.0)  # all that there is
    assert sizes.left == pytest.approx(GRANTED) and sizes.last is None and sizes.credit == CREDIT


def test_a_text_is_not_doubted_because_those_before_it_took_no_drafts() -> None:
    sizes = paid(1.0)
    for _ in range(BLOCK):
        sizes.count(sizes.size, [3], None, 500, range(6))
    assert sizes._trusts()
    sizes.count(0, [], None, 500, range(6), share=0.0)
    sizes.join(0.5)
    assert sizes.share == 0.5 and sizes._trusts()


def test_texts_whose_drafts_do_not_pay_save_for_those_that_come() -> None:
    """What they may lose is less, and what they do not is kept, up to what a text may lose at all."""
    sizes = paid(1.0)
    for number in range(4):
        for _ in range(2):
            sizes.count(1, [0], None, 500, {1})
        sizes.begin()
        assert sizes.paid == pytest.approx(0.75 * 0.5 ** (number + 1)) and sizes.net == 0.0
    assert not sizes._trusts() and sizes.credit == 0.0 and sizes.size == 0
    assert sizes.left == pytest.approx(DOUBTED * GRANTED)
    for _ in range(9):
        before = sizes.left
        sizes.begin()
        assert sizes.left == pytest.approx(min(before + DOUBTED * GRANTED, GRANTED + CREDIT))
    for _ in range(5):
        sizes.count(1, [1], 10.0, 500, {1})
        sizes.begin()
    assert sizes.paid > PROVEN and sizes._trusts() and sizes.credit == 1.25 * CREDIT


OPEN = (*TREE_STEPS["cuda"][:-1], BATCH_TREES["cuda"][0][1])
"""The sizes of eight rows, of which the last is the device's own."""
EIGHT = {"1.5 billion weights": (1.29, 1.5, 1.85, 2.37, 2.75, 3.7), "8 billion": (4.8, 5.3, 6.2, 7.9, 9.3, 12.6)}
PUBLISHED = 0.93, 0.80, 0.66, 0.58, 0.44, 0.39, 0.24
"""Chances that the first d drafts of a Qwen's MTP layer are right (SPEED-Bench, coding): of a chain, which a wider
tree's other nodes add nothing to."""


@pytest.mark.parametrize("law", ["chain", "width"])
@pytest.mark.parametrize("costs", EIGHT.values(), ids=EIGHT)
def test_eight_texts_at_a_time_take_the_size_that_pays(costs, law: str) -> None:
    """Whether wider trees accept more or not, and whatever was thought of it; as texts come and go."""
    draws = random.Random(1)

    def accepted(shape: TreeShape) -> int:
        levels = shape.max_path - 1
        if law == "chain":
            drawn = draws.random()
            return sum(drawn < chance for chance in PUBLISHED[:levels])
        found, passed = 0, 1 - math.exp(-1.1 * width_of(shape))
        while found < levels and draws.random() < passed:
            found += 1
        return found

    fixed = [
        (1 + sum(accepted(shape) for _ in range(4000)) / 4000) / cost
        for shape, cost in zip(OPEN, costs[1:], strict=True)
    ]
    best = max(fixed)
    sizes = TreeSizes(OPEN, OPEN[-1], costs, captures=True, switch=0.4)
    for size in range(6):
        for _ in range(4):
            sizes.try_out(size, costs[size], 500, range(6))
    sizes.tried()
    sizes.begin()
    tokens = spent = 0.0
    for number in range(400):
        if number % 4 == 0:
            sizes.join(1 / 8)
        size = sizes.size
        drafts = [accepted(OPEN[size - 1]) if size else 0 for _ in range(8)]
        ms = costs[size] * (1 + 0.02 * draws.gauss(0, 1))
        sizes.count(size, drafts, ms, 700, range(6))
        if number >= 80:
            tokens, spent = tokens + 1 + sum(drafts) / 8, spent + ms
    assert tokens / spent > (0.99 if law == "chain" else 0.95) * best  # sizes within BETTER of each other stay
    assert tokens / spent > fixed[-1]


def test_how_much_a_wider_tree_accepts_is_learned() -> None:
    """Where one size follows another, as often as it may be, within what it is to be trusted."""
    for growth in (0.0, 0.43, 0.9):
        acceptance, draws = Acceptance(SHAPES), random.Random(0)
        for _ in range(24):
            for size in (3, 2, 4):
                passed = 1 - math.exp(-0.9 * width_of(SHAPES[size], growth))
                for _ in range(8):
                    found = [0] * 8
                    for row in range(8):
                        while found[row] < SHAPES[size].max_path - 1 and draws.random() < passed:
                            found[row] += 1
                    acceptance.count(size, found)
                acceptance.learn()
                acceptance.fade(0.8)
        assert acceptance.growth == pytest.approx(growth, abs=0.15) and SURE < acceptance.sure <= SUREST
    before = acceptance.growth
    acceptance.part()
    acceptance.count(1, [0] * 64)
    acceptance.learn()
    assert acceptance.growth == before, "another text's rounds say nothing of it"


def test_a_size_that_may_pay_is_tried_and_then_known() -> None:
    """Where drafts have brought enough, and none that has to be captured."""
    costs = (10.0, 10.5, 11.0, 12.0, 13.0, 14.0)
    for left, made, tries in ((MOST_EARNED, range(6), True), (1.0, range(6), False), (MOST_EARNED, (0, 5), False)):
        sizes = TreeSizes(SHAPES, SHAPES[-1], costs, captures=True)
        sizes.drafted, sizes.rounds, sizes.made = EVIDENCE, SETTLED, frozenset(made)
        sizes.left = left
        near = [0.0, 0.0, 0.0, 0.0, 0.99, 1.0]
        assert [sizes._may_try(size, 1.0, near) for size in range(1, 6)] == [False, False, False, tries, left > 1]
        sizes.acceptance.seen[3] = ENOUGH
        assert not sizes._may_try(4, 1.0, near)


@pytest.mark.each_value  # rounds of any number of rows are chosen by the same times
@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
def test_texts_that_join_one_after_another_and_accept_nothing_lose_three_percent(costs, rows: int) -> None:
    """Texts of 128 tokens, of which one joins whenever one has ended, in rounds that a warm-up has measured; after
    texts like them, and after texts whose drafts were accepted."""
    for before in (0.0, 1.1):
        sizes = TreeSizes(SHAPES, SHAPES[-1], costs, captures=True, switch=0.4)
        text = Text(sizes, costs, leaves=0.4, enters=0.4)
        for size in range(6):
            for _ in range(4):
                sizes.try_out(size, costs[size], 500, range(6))
        sizes.tried()
        sizes.begin()
        spent = []
        for number in range(12):
            text.ms, first = 0.0, len(text.history)
            chance = before if number < 6 else 0.0
            for at in range(128):
                if at * rows % 128 < rows:
                    sizes.join(1 / rows)
                text.made = set(range(6))
                text.round(chance, rows)
            spent.append(text.ms / (len(text.history) - first) / costs[0])
        assert max(spent[8:]) < 1.035 and sum(spent[8:]) / 4 < 1.03


def test_what_was_measured_is_kept_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rounds" / "one.json"
    assert assembly.read_times(path) == {}
    assembly.keep_times(path, {0: {1: 1.5, 60: 2.5}, 2: {1: 3.0}})
    assert assembly.read_times(path) == {0: {1: 1.5, 60: 2.5}, 2: {1: 3.0}}
    files.write(path, {"round_ms": [1, 2]})
    with pytest.warns(RuntimeWarning, match="cannot be read and is ignored"):
        assert assembly.read_times(path) == {}


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
