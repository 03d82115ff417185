"""Rounds of n-gram drafts where the host's work is dear: which are plain, when tokens are counted, which trees are
captured, and costs that were measured."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from time import sleep
from typing import Any

import pytest
import torch
from helpers import open as opened
from helpers.captured import stand_in
from helpers.generate import bigram, same, stats
from helpers.models import tiny_model

import fastspec
from fastspec.generation.drafters import nasd, ngram_rounds, policy
from fastspec.generation.drafters.base import Place
from fastspec.generation.drafters.nasd import NasdDecoding, NasdDrafter, grow, spread, storage_of
from fastspec.generation.drafters.ngram_rounds import TimedDrafts
from fastspec.generation.drafters.policy import COSTS, SMOLLM2_BYTES, MeasuredCosts
from fastspec.generation.drafters.recurrence import STREAKS
from fastspec.generation.engine import batching, engine, schedule
from fastspec.generation.engine.engine import Engine
from fastspec.generation.engine.round_program import RoundProgram
from fastspec.generation.engine.schedule import GraphFromScore, WholeGraph
from fastspec.patches.backends import ngram_counter
from fastspec.patches.hf.model import HFModel
from fastspec.patches.session import PatchSession, session_of

BYTES = 3_087_428_608
NEVER = 1000


@pytest.fixture
def dear(monkeypatch):
    """Look-ups cost what they do on a GPU."""
    monkeypatch.setitem(nasd.COSTS, "cpu", COSTS["cuda"])


def drafter_of(rows: int, prompt: list[int], config: fastspec.Nasd | None = None) -> NasdDrafter:
    """A drafter whose rows have begun with this prompt and its last token."""
    config = config or fastspec.Nasd()
    drafter = NasdDrafter(config, [storage_of(config) for _ in range(rows)], torch.device("cpu"), BYTES)
    ids = torch.tensor([prompt[:-1]] * rows)
    drafter.begin(ids, torch.full((rows,), len(prompt) - 1), torch.empty(0), torch.full((rows,), prompt[-1]))
    return drafter


def told(drafter: NasdDrafter, token: int) -> None:
    """A round without drafts has emitted this token in all rows."""
    rows = len(drafter.roots)
    drafter.work()
    drafter.catch_up(torch.full((rows, 1), token), [1] * rows)


def backlog(drafter: NasdDrafter) -> int:
    return sum(map(len, drafter.unread))


# which rounds are plain


@pytest.mark.parametrize("rows", [1, 8, 65])
def test_where_nothing_repeats_no_tree_is_proposed_and_nothing_looked_up(dear, monkeypatch, rows):
    """Each token of a few rows is looked at, once."""
    looks = 0

    def look(self, cursor, found=fastspec.NgramStorage.look):
        nonlocal looks
        looks += 1
        return found(self, cursor)

    monkeypatch.setattr(fastspec.NgramStorage, "look", look)
    drafter, rests, waits = drafter_of(rows, [1, 2, 3]), 0, 0
    for token in range(4, 260):
        if rests == 1:
            rests += drafter.rests_on()
        if not rests:
            rests, waits = drafter.pause(), waits + 1
        assert rests > 0
        rests -= 1
        told(drafter, token)
    assert waits == 1 and looks <= min(rows, ngram_rounds.watched(rows)) * 256


def test_a_text_that_repeats_itself_is_drafted_soon(dear):
    drafter = drafter_of(4, [5, 6, 7, 8, 9] * 4)
    assert drafter.pause() == 2  # its tokens are counted meanwhile
    told(drafter, 5)
    told(drafter, 6)
    assert drafter.pause() == 0
    tree = drafter.propose(0)
    assert tree.tokens.shape[1] == drafter.size > 4 and tree.tokens[:, 1].tolist() == [7] * 4
    assert drafter.growths is not None
    drafter.update([[1, 0, 7, 7, 7, 7]] * 4, 1)
    assert drafter.growths is None and drafter.roots == [7] * 4


@pytest.mark.parametrize("rows", [8, 16, 40])
def test_rows_that_go_on_last_are_drafted_for_whichever_they_are(dear, rows):
    """Of many rows some are watched; those that have ended leave others to be."""
    drafter, text, going = drafter_of(rows, [5, 6, 7, 8, 9] * 12), cycle([5, 6, 7, 8, 9]), [0] * (rows - 1) + [1]
    drafter.ends_at_once, drafter.active = True, [*map(bool, going)]
    drafter.rule.begin_call()
    drafter.rule.left = ngram_rounds.SAVED
    rests = 0
    for _ in range(60):
        rests = rests + (rests == 1 and drafter.rests_on()) if rests else drafter.pause()
        if not rests:
            break
        rests -= 1
        drafter.work()
        drafter.catch_up(torch.full((rows, 1), next(text)), going)
    assert not rests and drafter.size > 1


def test_drafts_of_rows_that_are_ahead_bring_the_end_of_a_call_no_nearer(dear):
    """Where another prompt takes a row that has ended they do."""
    for ends_at_once in (True, False):
        drafter = drafter_of(2, [5, 6, 7, 8, 9] * 4)
        drafter.ends_at_once, drafter.size = ends_at_once, 32
        assert drafter.counting == [True, True]
        drafter.update([[1, 5, *[0] * 24], [1, 0, *[0] * 24]], 6)
        assert drafter.counting == [not ends_at_once, True]
        left = drafter.rule.left
        drafter.update([[1, 5, *[0] * 24], [1, 0, *[0] * 24]], 6)
        assert (drafter.rule.left > left) != ends_at_once
        drafter.update([[1, 0, *[0] * 24], [0, 0, *[0] * 24]], 6)
        assert drafter.counting == [True, False]


@pytest.mark.parametrize("ends_at_once", [False, True])
def test_a_call_drafts_where_all_of_its_last_rows_go_on_as_before(dear, ends_at_once):
    """A round saves a call what its last row is further by; in an open batch every row's drafts save something."""
    drafter = drafter_of(2, [5, 6, 7, 8, 9] * 4)
    drafter.ends_at_once, rule = ends_at_once, drafter.rule
    if ends_at_once:
        rule.begin_call()
    told(drafter, 5)
    told(drafter, 6)
    assert not drafter.rests_on()
    drafter.size, left = 4, rule.left
    saved = 1 if ends_at_once else 2 * rule.recurrence.counted_share([0, 1])
    drafter.update([[1, 3, 7, 8, 9, 5], [1, 1, 7, 8, 0, 0]], 4)
    assert rule.left == pytest.approx(min(ngram_rounds.SAVED, left + saved - rule.prices[4]))
    rule.recurrence.guesses[1] = None  # nothing is known of what this row goes on with
    assert (rule.pays(drafter.counting) <= 1) == ends_at_once


@pytest.mark.parametrize("rows", [1, 3])
def test_a_captured_round_without_drafts_is_that_of_plain_decoding(dear, monkeypatch, rows):
    """Most of these are asynchronous, and no graph is captured for a tree of a root alone."""
    stand_in(monkeypatch)
    monkeypatch.setattr(batching, "ASYNCHRONOUS_AFTER", 0)
    launched, heard = [], []
    launch, catch_up = WholeGraph.launch, NasdDrafter.catch_up
    monkeypatch.setattr(WholeGraph, "launch", lambda *given: (launched.append(True), launch(*given))[1])
    monkeypatch.setattr(
        NasdDrafter, "catch_up", lambda self, ids, counts: (heard.append(ids.shape), catch_up(self, ids, counts))[1]
    )
    plain, model = tiny_model(seed=3), fastspec.patch(tiny_model(seed=3))
    ids = torch.randperm(90)[: 6 * rows].view(rows, 6)
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    same((plain, model), "nasd", inputs, max_new_tokens=60, eos_token_id=NEVER)
    (engine,) = session_of(model).engines.held.values()
    captured = [
        shapes[0][1]
        for schedule in engine.schedules.values()
        if isinstance(schedule, GraphFromScore)
        for graph in schedule.graphs.values()
        for shapes in graph.held
    ]
    assert 1 not in captured and len(captured) <= 3
    assert set(heard) == {(rows, 1)}  # each while the next round may be in flight
    assert len(launched) > len(heard) / 2 > 10


# when tokens are counted


def test_prompts_are_counted_while_passes_run_and_nothing_is_drafted_before(dear):
    text = [*range(3, 903), 3, 4, 5]
    drafter = drafter_of(8, text)
    assert drafter.quota is not None and backlog(drafter) == 8 * len(text)
    assert not any(len(storage.edges) for storage in drafter.storages)
    rests, left = drafter.pause(), backlog(drafter)
    assert rests == ngram_rounds.RESTS and left // drafter.quota > 8
    for token in range(6, 6 + rests):
        told(drafter, token)
        assert left - drafter.quota == backlog(drafter) - 8  # as many as a pass lets the host
        left = backlog(drafter)
    rests = 0
    while rests := rests + drafter.rests_on() if rests == 1 else rests or drafter.pause():
        token, rests = token + 1, rests - 1
        told(drafter, token)
        assert token < 200
    assert drafter.propose(0).tokens[:4, 1].tolist() == [token + 1] * 4


def test_the_shortest_backlog_is_counted_first(dear):
    drafter = drafter_of(2, [1, 2, 3])
    drafter.unread[0].extend([(token, ()) for token in range(4, 2000)])
    drafter.work()
    assert not drafter.unread[1] and len(drafter.unread[0]) == 1996 + 3 + 3 - drafter.quota


def test_drafts_go_on_from_tokens_that_are_not_counted_yet(dear):
    drafter = drafter_of(1, [5, 6, 7, 8, 9] * 4)
    drafter.work()
    drafter.update([[1, 1, 0, 0, 0, 5, 0, 0, 0, 6]], 2)
    assert [token for token, _ in drafter.unread[0]] == [5, 6]
    assert drafter.pause() == 0 and drafter.propose(0).tokens[0, :3].tolist() == [6, 7, 8]


def known(drafter: NasdDrafter, row: int = 0) -> set[tuple[int, ...]]:
    """Contexts of a row with what was counted after them."""
    storage = drafter.storages[row]
    assert isinstance(storage, fastspec.NgramStorage)
    tallies = storage.tallies
    return {(*storage._tokens(node), *sorted(tallies.entries(node))) for node in range(len(tallies)) if node}


@pytest.mark.parametrize("storage", ["ngram", "one_level", "suffix"])
@pytest.mark.parametrize("counted", [0, 60, 120, 1000])
@pytest.mark.parametrize("beyond", [1, 9, nasd.BEYOND])
def test_the_next_turn_goes_on_with_what_was_counted(dear, storage, counted, beyond):
    """Of a conversation's last turn, whether that was counted to its end or not; the row itself goes on as before."""
    config = fastspec.Nasd(storage=storage)
    text, more = [*range(3, 90), 3, 4, 5, *range(90, 90 + nasd.BEYOND)], [3, 4, 7, 8, 3, 4]
    row = drafter_of(1, text, config)
    row.quota = counted
    row.work()
    before, left = repr(row.storages[0]), len(row.unread[0])
    count = len(text) - beyond
    twin = drafter_of(1, [5, 5, 5], config)
    twin.join(0, torch.tensor([*text, *more[:-1]]), more[-1], (row, 0, count))
    assert twin.heard == [len(text) + len(more)] and len(twin.unread[0]) <= left + beyond + len(more)
    twin.work(all_of_it=True)
    cold = drafter_of(1, [*text, *more], config)
    cold.work(all_of_it=True)
    cursors = [each.storages[0].step(each.storages[0].start(), 4) for each in (twin, cold)]
    found, wanted = (each.storages[0].look(cursor) for each, cursor in zip((twin, cold), cursors, strict=True))
    assert found == wanted
    if storage == "ngram" and beyond <= left:
        assert known(twin) == known(cold)
    assert (repr(row.storages[0]), len(row.unread[0])) == (before, left) and row.heard == [len(text)]


def test_counts_of_another_text_and_of_a_storage_that_all_rows_have_are_not_taken_over(dear):
    """A text of which more than an answer's end is left may be somebody else's; so it is of a row that goes on."""
    row, config = drafter_of(1, [*range(3, 90)]), fastspec.Nasd(storage=fastspec.NgramStorage(4))
    text = torch.arange(3, 100)
    for count in (87 - nasd.BEYOND - 1, 88):
        twin = drafter_of(1, [5, 5, 5])
        twin.join(0, text, 100, (row, 0, count))
        assert [token for token, _ in twin.unread[0]] == [*range(3, 101)] and len(twin.storages[0].edges) == 0
    shared = [drafter_of(1, [*range(3, 91)], config) for _ in range(2)]
    shared[1].join(0, text, 100, (shared[0], 0, 87))
    assert len(shared[1].unread[0]) == 98 and shared[1].storages[0] is config.storage


@pytest.mark.parametrize("copied", [False, True])
def test_a_row_that_joins_waits_for_the_next_launch_with_its_text(dear, copied):
    """Its root is known at once, as rounds with drafts need it, and all else as if it had begun so."""
    text = [3, 4, 5] * 30
    drafter = drafter_of(2, text)
    drafter.work(all_of_it=True)
    storage = drafter.storages[1]
    prompt = [*text, 7, 8, 9] if copied else [6, 7, 8] * 20
    drafter.join(1, torch.tensor(prompt[:-1]), prompt[-1], (drafter, 1, len(text) - 1) if copied else None)
    assert drafter.roots[1] == prompt[-1] and drafter.storages[1] is storage and not drafter._knows(1)
    assert drafter.propose(100).tokens[:, 0].tolist() == [5, prompt[-1]]
    drafter.work()
    assert not drafter.arrived and drafter.heard == [len(text), len(prompt)]
    drafter.work(all_of_it=True)
    cold = drafter_of(2, prompt)
    cold.work(all_of_it=True)
    assert drafter.cursors[1] == cold.cursors[1]
    assert drafter.storages[1] is storage if copied else known(drafter, 1) == known(cold, 1)


def test_after_a_round_with_drafts_few_tokens_are_counted_where_a_row_has_joined(dear):
    """The next round may draft by them; after rounds without drafts they wait until a counter has enough of them."""
    drafter = drafter_of(2, [3, 4, 5] * 9)
    drafter.counter = ngram_counter()
    drafter.work(all_of_it=True)
    for drafts in (False, True):
        drafter.catch_up(torch.tensor([[3], [4]]), [1, 1])
        drafter.join(1, torch.tensor([6, 7]), 8)
        if drafts:
            drafter.propose(100)
        drafter.work()
        assert bool(drafter.unread[0]) != drafts


def test_tokens_of_a_row_that_has_joined_come_behind_its_text(dear):
    """Whoever hears of them first, and where another prompt took the row at once."""
    drafter = drafter_of(2, [3, 4, 5] * 9)
    drafter.join(1, torch.tensor([6, 7]), 8)
    drafter.join(1, torch.tensor([16, 17]), 18)
    drafter.catch_up(torch.tensor([[9], [19]]), [1, 1])
    assert [token for token, _ in drafter.unread[1]] == [16, 17, 18, 19]
    drafter.join(0, torch.tensor([6, 7]), 8, (drafter, 1, 3))
    drafter.join(1, torch.tensor([26, 27]), 28)
    drafter.update([[1, 0, 9], [1, 0, 29]], 1)
    assert [[token for token, _ in unread] for unread in drafter.unread] == [[16, 17, 18, 8, 9], [26, 27, 28, 29]]
    other = drafter_of(1, [5, 5])
    drafter.join(1, torch.tensor([36, 37]), 38)
    other.move_row(0, drafter, 1, 2)
    assert [token for token, _ in other.unread[0]] == [36, 37, 38] and other.roots == [38]
    drafter.join(1, torch.tensor([46, 47]), 48)
    held = drafter.held()
    drafter.join(1, torch.tensor([56, 57]), 58)
    drafter.work()
    other.join(0, torch.tensor([46, 47, 48]), 49, (held, 1, 2))
    assert [token for token, _ in other.unread[0]] == [46, 47, 48, 49]


def state_of(part: Any) -> Any:
    """All that a drafter and its parts hold."""
    if isinstance(part, (dict, list, tuple, deque)):
        items = part.items() if isinstance(part, dict) else part
        return [state_of(each) for each in items]
    if type(part).__module__.startswith("fastspec."):
        names = [*getattr(part, "__slots__", ()), *getattr(part, "__dict__", ())]
        return type(part).__name__, {name: state_of(getattr(part, name)) for name in names}
    return part


@pytest.mark.parametrize("rows", [1, 7])
def test_a_drafter_that_is_opened_again_is_as_a_new_one(dear, rows):
    """But for a storage that calls share."""
    text, config = [3, 4, 5] * 30, fastspec.Nasd()
    drafter = drafter_of(rows, text)
    before = state_of(drafter)
    for number in range(40):
        if not drafter.pause():
            drafter.propose(100)
            drafter.update([[1, 1, 4, 5]] * rows, 2)
        told(drafter, 3 + number % 3)
    drafter.come()
    drafter.hosted, drafter.listens = True, False
    assert state_of(drafter) != before
    drafter.open(100)
    assert state_of(drafter) == state_of(
        NasdDrafter(config, [storage_of(config) for _ in range(rows)], torch.device("cpu"), BYTES)
    )
    shared = fastspec.Nasd(storage=fastspec.NgramStorage(4))
    kept = drafter_of(1, text, shared)
    kept.open(100)
    assert kept.storages == [shared.storage]


@pytest.mark.parametrize("captures", [True, False])
def test_a_storage_that_is_kept_has_counted_all_of_a_call(dear, monkeypatch, captures):
    if captures:
        stand_in(monkeypatch)
    monkeypatch.setattr(ngram_rounds, "LENT", ngram_rounds.OWED)  # the smallest models' drafts are dear
    model, ids = fastspec.patch(bigram()), torch.arange(3, 40)[None]
    storage, expected = fastspec.NgramStorage(4), fastspec.NgramStorage(4)
    out = model.generate(
        ids,
        max_new_tokens=80,
        do_sample=False,
        eos_token_id=NEVER,
        assistant=fastspec.Nasd(storage=storage, top_k_filler=1),
    )
    cursor = expected.start()
    for token in out[0].tolist():
        cursor = expected.feed(cursor, token)
    for node in range(len(expected.tallies)):  # a last round may go beyond the limit
        counted = dict(storage.tallies.entries(node))
        assert all(counted[token] >= times for token, times in expected.tallies.entries(node))
    assert stats(model).accepted > 9


# which trees


def test_sizes_whose_rounds_cost_much_the_same_share_a_graph():
    assert spread({1: 1.0, 4: 1.5, 8: 1.51, 16: 1.52, 32: 1.6}) == [1, 32]
    assert spread({1: 1.0, 4: 1.1, 8: 1.2, 16: 2.0, 32: 4.0}) == [1, 8, 16, 32]
    assert spread({1: 1.0, 2: 1.0}) == [1, 2]
    assert spread({6: 1.0}) == [6]


def test_drafts_that_are_not_worth_the_host_s_time_are_not_made():
    storage = fastspec.NgramStorage(3)
    cursor = storage.start()
    for token in [1, 2, 3, 4, 1, 2, 3, 5, 1, 2]:
        cursor = storage.feed(cursor, token)
    given: dict[str, Any] = {"gamma": 8, "nodes": 16, "ends": frozenset()}
    whole = grow(storage, cursor, 2, **given)
    part = grow(storage, cursor, 2, **given, least=0.3)
    count = len(part.tokens)
    assert 1 < count < len(whole.tokens) and part.tokens == whole.tokens[:count]
    assert part.chances[-1] >= 0.3 > whole.chances[count]


def test_costs_follow_what_rounds_took_and_come_back():
    costs = MeasuredCosts({1: 1.0, 4: 1.2, 8: 1.3})
    costs.take(4, 90.0)  # says nothing before a round of one node
    assert costs.costs() == {1: 1.0, 4: 1.2}
    costs.take(1, 30.0)
    costs.take(4, 72.0)
    assert costs.costs() == {1: 1.0, 4: pytest.approx(2.4), 8: pytest.approx(2.6)}
    for _ in range(8):
        costs.take(1, 30.0)
        costs.take(8, 90.0)
    assert costs.costs()[8] == pytest.approx(3.0, rel=0.01)
    for _ in range(300):
        costs.take(1, 30.0)
    assert costs.costs()[8] < 1.45


def test_trees_that_take_longer_than_they_save_are_left(monkeypatch):
    """By the clock, of a model that is large enough: a tree's round takes 10 passes here, and brings 8 tokens."""
    measured: dict[tuple[int, int], MeasuredCosts] = {}
    clock = iter(range(10**6))
    monkeypatch.setattr(nasd.time, "perf_counter", lambda: next(clock))
    config, sizes = fastspec.Nasd(top_k_filler=1), []
    for _ in range(2):
        drafter = NasdDrafter(config, [storage_of(config)], torch.device("cpu"), measured=measured)
        drafter.begin(torch.tensor([[1, 2]]), torch.tensor([2]), torch.empty(0), torch.tensor([3]))
        for number in range(60):
            drafter.propose(0)
            sizes.append(drafter.size)
            for _ in range(9 * (drafter.size > 1)):
                next(clock)
            drafter.update([[1, 0, 4 + number if number < 4 else 5 + number % 3]], 1)
    assert sizes[:4] == [1] * 4 and 0 < sum(size > 1 for size in sizes[:60]) < 20
    assert sum(size > 1 for size in sizes[60:]) < 5 and list(measured) == [(1, 16)]


def test_models_that_the_host_is_slower_than_are_not_measured():
    from fastspec.patches.assistants import registry

    model = fastspec.patch(tiny_model())
    assert registry.resolve("nasd", {}, model).measured is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "MEASURED_BYTES", 1)
        assert registry.resolve("nasd", {}, model).measured is session_of(model).ngram_costs
        assert registry.resolve("nasd", {}, model.bfloat16()).measured is None


# what rounds cost


class Host:
    """A clock that only the simulated rounds move."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds


def slowdown(
    drafter: NasdDrafter, host: Host, accepted: Sequence[int], rounds: int = 2000, stalls: Sequence[float] = ()
) -> float:
    """Time of rounds that accept so many drafts in turn, over that of plain rounds with as many tokens. A plain round
    takes 1.5 ms where it is in flight early and 2.3 where it waits for a look-up, one with drafts 3.9, the first ones
    so many seconds more."""
    pattern, following, held = cycle(accepted), cycle(range(3, 11)), iter(stalls)
    began, tokens, rests = host.seconds, 0, 0
    rows = len(drafter.roots)
    for _ in range(rounds):
        waits = not rests
        if rests == 1:
            rests += drafter.rests_on()
        if waits:
            rests = drafter.pause()
        if rests:
            rests -= 1
            host.seconds += 0.0023 if waits else 0.0015
            told(drafter, next(following))
            tokens += 1
        else:
            tree = drafter.propose(0)
            drafter.work()
            gained = min(next(pattern), tree.max_path - 1)
            host.seconds += 0.0039 + next(held, 0.0)
            drafter.update([[1, gained, *(next(following) for _ in range(gained + 1))]] * rows, gained + 1)
            tokens += gained + 1
    return (host.seconds - began) / (0.0015 * tokens)


@pytest.mark.parametrize("timed", [False, True])
def test_drafts_of_timed_rounds_cost_little_where_the_host_makes_them_dear(dear, monkeypatch, timed):
    """Eight rows of the 1.5B model, whose drafts pay by the estimate and not by the clock."""
    host = Host()
    monkeypatch.setattr(policy, "time", host)
    drafter = drafter_of(8, [*range(3, 11)] * 8)
    drafter.timed = timed
    assert (slowdown(drafter, host, (1, 2, 1, 2, 1)) < 1.03) == timed


def test_drafts_of_timed_rounds_go_on_where_they_pay(dear, monkeypatch):
    host = Host()
    monkeypatch.setattr(policy, "time", host)
    drafter = drafter_of(8, [*range(3, 11)] * 8)
    drafter.timed = True
    assert slowdown(drafter, host, (4, 6, 5)) < 0.6
    assert drafter.rule.price(drafter.size) == pytest.approx(1.6, rel=0.02) != drafter.rule.prices[drafter.size]
    drafter.interrupt()  # a prompt joins, in some time
    drafter.move_row(0, drafter_of(8, [3, 4]), 0, 1)
    host.seconds += 9.0
    drafter.catch_up(torch.full((8, 1), 3), [1] * 8)
    assert max(map(max, drafter.rule.times.spent.values())) < 4


@pytest.mark.parametrize(
    ("stalls", "times"),
    [((3.0,), 4), ((0.0, 3.0), 4), pytest.param((0.2,) * 12, 20, marks=pytest.mark.slow)],
)
def test_rounds_that_something_held_up_are_timed_again(dear, monkeypatch, stalls, times):
    """One of the first two, or all for a while: drafts that pay are made once it is over."""
    host = Host()
    monkeypatch.setattr(policy, "time", host)
    drafter = drafter_of(8, [*range(3, 11)] * 8)
    drafter.timed = True
    slowdown(drafter, host, (4, 6, 5), times * ngram_rounds.STALE, stalls)
    assert slowdown(drafter, host, (4, 6, 5), 200) < 0.6


@pytest.mark.each_value
@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("failed", [1, 3])
def test_drafts_that_failed_once_are_made_again_where_the_text_repeats_itself(dear, monkeypatch, failed, timed):
    host = Host()
    monkeypatch.setattr(policy, "time", host)
    drafter = drafter_of(8, [*range(3, 11)] * 8)
    drafter.timed = timed
    slowdown(drafter, host, (*[0] * failed, *[6] * 2000))
    assert slowdown(drafter, host, (6,), 200) < 0.6


@pytest.mark.parametrize(
    ("going", "hosted", "call", "least"),
    [
        (8, False, False, 1.0),
        (9, False, False, 1.5),
        (32, False, False, 1.5),
        (8, True, False, 1.5),
        (32, True, True, 1.0),
    ],
)
def test_many_rows_of_an_open_batch_draft_where_drafts_promise_more_than_rounds_cost(
    monkeypatch, going, hosted, call, least
):
    """So do rows whose tokens the host chooses, however many."""
    rule = TimedDrafts({1: 1.0, 8: 1.1}, {1: 0.0, 8: 0.1}, 0.1, 0.1, 64, 7)
    rule.hosted, on = hosted, [row < going for row in range(64)]
    if call:
        rule.begin_call()
    rule.unseen = 1  # no rounds run for their time
    for promised in (0.95 * least, 1.05 * least):
        monkeypatch.setattr(rule, "pays", lambda rows, following=False, promised=promised: promised)
        rule.promise = promised
        assert (rule.rests(on, True) == 0) == (promised > least)
        enough = max(rule.begins, 1.1 * least) / least * promised
        monkeypatch.setattr(rule, "pays", lambda rows, following=False, enough=enough: enough)
        rule.promise = enough
        assert (rule.rests_on(on) == 0) == (promised > least)


@pytest.mark.parametrize(("rows", "watched"), [(2, 2), (6, 3), (8, 4), (16, 8), (64, 8)])
def test_some_rows_are_watched_and_others_where_none_of_these_goes_on(rows, watched):
    rule = TimedDrafts({1: 1.0, 8: 1.1}, {1: 0.0, 8: 0.1}, 0.1, 0.1, 2 * rows, 7)
    rule.watched = [*range(0, 2 * rows, 2)]
    rule.pays([row % 2 > 0 for row in range(2 * rows)])
    assert len(rule.watched) == watched and all(row % 2 for row in rule.watched)
    assert len(TimedDrafts({1: 1.0}, {1: 0.0}, 0.1, 0.1, rows, 7).watched) == watched


def test_what_drafts_promise_to_many_rows_is_averaged(monkeypatch):
    """Rows that stand for all have much to come now and then; a few rows take that at once."""
    rule = TimedDrafts({1: 1.0, 8: 1.1}, {1: 0.0, 8: 0.1}, 0.1, 0.1, 32, 7)
    promised = cycle([1.0, 3.0, 1.0, 1.0])
    monkeypatch.setattr(rule, "pays", lambda rows, following=False: next(promised))
    begun = {9: 0, 8: 0}
    for going in begun:
        for _ in range(400):
            rule.ran(1, False, rounds=4)
            begun[going] += rule.rests_on([row < going for row in range(32)]) == 0
    assert begun == {9: 0, 8: 100}
    rule.promise, rule.asked = 1.0, 10_000  # as while nothing was left to lose
    monkeypatch.setattr(rule, "pays", lambda rows, following=False: 3.0)
    assert rule.rests_on([True] * 32)
    monkeypatch.setattr(rule, "pays", lambda rows, following=False: 2.0)
    rounds = 0
    while rule.rests_on([True] * 32):
        rule.ran(1, False, rounds=4)
        rounds += 4
    assert 8 < rounds < 3 * ngram_rounds.PROMISED


def drafted(drafter: NasdDrafter, host: Host, texts: Sequence[Sequence[int]]) -> list[int]:
    """Rounds before which a drafter would draft, where rows go through these texts in plain ones."""
    found, rests = [], 0
    for number, tokens in enumerate(zip(*texts, strict=True)):
        if rests == 1:
            rests += drafter.rests_on()
        if not rests and not (rests := drafter.pause()):
            found.append(number)
            rests = 1
        rests -= 1
        host.seconds += 0.0015
        drafter.work()
        drafter.catch_up(torch.tensor(tokens)[:, None], [1] * len(tokens))
    return found


def test_timed_rounds_draft_where_the_rows_go_on_as_before(dear, monkeypatch):
    """All of them: where one does, or none, nothing is looked up, and all rounds are plain ones in flight."""
    host, looks = Host(), []
    monkeypatch.setattr(policy, "time", host)
    look_up = NasdDrafter._look_up
    monkeypatch.setattr(NasdDrafter, "_look_up", lambda self: (looks.append(True), look_up(self))[1])
    repeats, new = [3 + number % 8 for number in range(400)], [*range(20, 420)]
    for texts in ([repeats] + [new] * 7, [new] * 8):
        drafter = drafter_of(8, [1, 2])
        drafter.timed = True
        assert not drafted(drafter, host, texts) and not looks
    for rows in (1, 8, 40):
        drafter = drafter_of(rows, [1, 2])
        drafter.timed = True
        found = drafted(drafter, host, [repeats] * rows)
        assert found and found[0] < (80 if rows <= ngram_rounds.FEW else 300) and found[-1] == 399


def test_rounds_whose_tokens_the_host_chooses_have_times_of_their_own(dear):
    drafter = drafter_of(8, [3, 4, 5])
    size = max(drafter.costs)
    for kind, spent in {1: 1.5, size: 3.9, ~1: 2.5, ~size: 10.0}.items():
        drafter.rule.times.spent[kind] = policy.deque([spent] * 5)
    assert drafter.rule.price(size) == pytest.approx(1.6)
    drafter.rule.hosted = True
    assert drafter.rule.price(size) == pytest.approx(3.0)


def test_what_a_capture_takes_is_no_time_of_a_round(dear, monkeypatch):
    host = Host()
    monkeypatch.setattr(policy, "time", host)
    drafter = drafter_of(1, [1, 2])
    drafter.timed = True
    drafted(drafter, host, [[*range(3, 20)]])
    spent = len(drafter.rule.times.spent[1])
    monkeypatch.setattr(ngram_rounds.SPENT, "captures", ngram_rounds.SPENT.captures + 1.0)
    told(drafter, 30)
    assert len(drafter.rule.times.spent[1]) == spent < ngram_rounds.SEEN + 10
    told(drafter, 31)
    assert max(drafter.rule.times.spent[1]) < 1.6


def test_an_open_batch_that_does_not_draft_has_the_rounds_of_plain_decoding_in_flight(dear, monkeypatch):
    stand_in(monkeypatch)
    monkeypatch.setattr(ngram_rounds.TimedDrafts, "pays", lambda self, going, following=False: 0.0)
    launched, launch = [], WholeGraph.launch
    monkeypatch.setattr(WholeGraph, "launch", lambda *given: (launched.append(True), launch(*given))[1])
    plain, model = tiny_model(seed=3), fastspec.patch(tiny_model(seed=3))
    ids = torch.tensor([[5, 6, 7, 8] * 4])
    asked = {"max_new_tokens": 120, "do_sample": False, "eos_token_id": NEVER, "pad_token_id": 0}
    with fastspec.continuous(model, "nasd", rows=2) as batch:
        futures = [batch.submit(ids, **asked) for _ in range(2)]
        wanted = plain.generate(ids, attention_mask=torch.ones_like(ids), **asked)
        assert all(future.result().equal(wanted) for future in futures)
    assert not batch.stats.drafted and len(launched) > 0.8 * batch.stats.rounds


def test_the_end_of_an_answer_is_counted_where_the_storage_is_shared(dear):
    """It is shorter than what a counter is asked for, and another prompt takes its row."""
    storage = fastspec.NgramStorage(3)
    drafter = drafter_of(1, [*range(3, 11)] * 2, fastspec.Nasd(storage=storage))
    drafter.counter = ngram_counter()
    drafter.work()
    for token in (30, 31, 32):
        told(drafter, token)
    drafter.move_row(0, drafter_of(1, [3, 4]), 0, 1)
    assert storage.look((31, 30)) == (2, [(32, 1)])


def test_parts_of_a_prompt_that_are_read_between_rounds_are_no_time_of_theirs(dear, monkeypatch):
    stand_in(monkeypatch)
    host, prefill = Host(), HFModel.prefill
    monkeypatch.setattr(policy, "time", host)
    monkeypatch.setattr(policy, "LAST_TIMES", 1000)
    monkeypatch.setattr(ngram_rounds.TimedDrafts, "pays", lambda self, going, following=False: 0.0)

    def slow(*given: Any) -> Any:
        host.seconds += 9.0
        return prefill(*given)

    model = fastspec.patch(tiny_model(seed=3))
    asked = {"do_sample": False, "eos_token_id": NEVER, "pad_token_id": 0}
    with fastspec.continuous(model, "nasd", rows=2, prefill_chunk=16, max_length=400) as batch:
        first = batch.submit(torch.tensor([[5, 6, 7, 8] * 4]), max_new_tokens=300, **asked)
        while batch.turns < 40:
            sleep(0.001)
        monkeypatch.setattr(HFModel, "prefill", slow)
        batch.submit(torch.arange(3, 83)[None].repeat(1, 2), max_new_tokens=4, **asked).result()
        first.result()
        times = [rounds.engine.drafter.rule.times.spent for rounds in batch._widths.made.values()]
    assert host.seconds >= 90 and any(times) and max(max(each) for spent in times for each in spent.values()) < 1


@pytest.mark.parametrize("narrows", [True, False])
def test_rounds_are_timed_where_roundings_follow_the_load(dear, monkeypatch, narrows):
    stand_in(monkeypatch)
    plain, model = tiny_model(seed=3), fastspec.patch(tiny_model(seed=3))
    with fastspec.continuous(model, "nasd", rows=2, narrows=narrows) as batch:
        ids = torch.tensor([[5, 6, 7, 8] * 4])
        asked = {"max_new_tokens": 80, "do_sample": False, "eos_token_id": NEVER, "pad_token_id": 0}
        futures = [batch.submit(ids, **asked) for _ in range(2)]
        wanted = plain.generate(ids, attention_mask=torch.ones_like(ids), **asked)
        assert all(future.result().equal(wanted) for future in futures)
        drafter = batch._widths.current.engine.drafter
        assert drafter.timed == narrows and bool(drafter.rule.times.spent) == narrows


@pytest.mark.parametrize(("exact", "sample"), [(True, False), (True, True), (False, False)])
def test_a_clock_decides_in_calls_where_no_size_changes_a_bit(monkeypatch, exact, sample):
    """Drafts of rows count by those that are behind where no prompt waits for a row."""
    ops = PatchSession.ops
    monkeypatch.setattr(PatchSession, "ops", lambda *given: replace(ops(*given), exact=exact))
    made, drafter = [], NasdDecoding.drafter
    monkeypatch.setattr(NasdDecoding, "drafter", lambda *one, **more: made.append(drafter(*one, **more)) or made[-1])
    model = fastspec.patch(tiny_model(seed=3))
    ids = torch.tensor([[5, 6, 7, 8] * 4] * 3)
    for assistant, at_once in (("nasd", True), (fastspec.ContinuousBatch("nasd", rows=2), False)):
        made.clear()
        model.generate(ids, do_sample=sample, max_new_tokens=4, pad_token_id=0, assistant=assistant)
        assert {(each.timed, each.ends_at_once) for each in made} == {(exact and not sample, at_once)}


def test_rounds_that_are_heard_of_behind_the_next_launch_take_as_long_as_they_did(dear, monkeypatch):
    """Of a call that asks for scores, whose rounds are read one by one, and whose rests are short: a millisecond to
    launch each, and one until its tokens come."""
    stand_in(monkeypatch)
    host, ops, made, drafter = Host(), PatchSession.ops, [], NasdDecoding.drafter
    monkeypatch.setattr(policy, "time", host)
    monkeypatch.setattr(PatchSession, "ops", lambda *given: replace(ops(*given), exact=True))
    monkeypatch.setattr(NasdDecoding, "drafter", lambda *one, **more: made.append(drafter(*one, **more)) or made[-1])
    monkeypatch.setattr(ngram_rounds.TimedDrafts, "pays", lambda self, going, following=False: 99.0 * following)
    for name, before in (("open", True), ("meanwhile", False)):
        former = getattr(RoundProgram, name)

        def slow(*given: Any, former: Any = former, before: bool = before) -> Any:
            host.seconds += 0.001 * before
            found = former(*given)
            host.seconds += 0.001 * (not before)
            return found

        monkeypatch.setattr(RoundProgram, name, slow)
    model, ids = fastspec.patch(tiny_model(seed=3)), torch.tensor([[5, 6, 7, 8] * 4])
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": NEVER, "return_dict_in_generate": True}
    model.generate(ids, attention_mask=torch.ones_like(ids), assistant="nasd", output_scores=True, **options)
    assert [*made[0].rule.times.spent[1]] == pytest.approx([2.0] * policy.LAST_TIMES)


def test_a_rest_that_the_host_had_a_part_in_is_timed_as_such(dear, monkeypatch):
    """Of an open batch whose last prompt with a grammar ends in the middle of it."""
    stand_in(monkeypatch)
    found, place_of, places, ran = [], engine.place_of, cycle([Place.HOST] * 30 + [Place.DEVICE] * 9), TimedDrafts.ran
    monkeypatch.setattr(
        engine, "place_of", lambda *given: found.append(next(places)) or (place_of(*given), found[-1])[1]
    )
    monkeypatch.setattr(TimedDrafts, "pays", lambda self, going, following=False: 0.0)
    told = list[bool]()

    def noted(self: Any, kind: int, hosted: bool, gained: float = 0.0, rounds: int = 1) -> None:
        told.extend([hosted] * rounds)
        ran(self, kind, hosted, gained, rounds)

    monkeypatch.setattr(TimedDrafts, "ran", noted)
    model, ids = fastspec.patch(tiny_model(seed=3)), torch.tensor([[5, 6, 7, 8] * 4] * 8)
    options = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": NEVER, "pad_token_id": 0}
    model.generate(ids, attention_mask=torch.ones_like(ids), assistant="nasd", **options)
    assert told == [place is Place.HOST for place in found] and found.count(Place.HOST) > 30


def test_a_rest_is_heard_of_at_its_end_where_the_host_chooses_tokens_of_many_rows(dear):
    """Else the host's work for n-grams would hold up the device after every round; and in open batches of many rows,
    whose answers it hands on."""
    most = ngram_rounds.LONGEST
    for rows, hosted, expected in ((8, True, most), (3, True, 8), (1, True, 1), (8, False, 3), (40, False, most)):
        drafter = drafter_of(rows, [1, 2, 3])
        drafter.hosted = hosted
        drafter.pause()
        told(drafter, 4)
        assert drafter.rests_on() == expected and drafter.listens == (expected == 1)
        drafter.rule.hosted, drafter.active = True, [row == 0 for row in range(rows)]
        assert drafter.rests_on() == 1 and drafter.listens  # one row goes on


@pytest.mark.parametrize("quick", [True, False])
def test_tokens_of_rows_that_stand_for_others_are_counted_while_no_drafts_are_near(dear, quick):
    """The others' are before any are looked up."""
    drafter = drafter_of(32, [1, 2, 3])
    drafter.quick = quick  # as where a counter counts; Python counts those of all rows at any time
    drafter.pause()
    drafter.work(all_of_it=True)
    for token in range(100, 140):
        told(drafter, token)
        drafter.rests_on()
        drafter.work()
    watched = {*drafter.rule.watched}
    assert not drafter.listens and len(watched) == ngram_rounds.WATCHED[1]
    left = {row: len(unread) for row, unread in enumerate(drafter.unread)}
    assert all((left[row] < 8) == (row in watched or not quick) for row in left)
    drafter.pause()
    while not drafter.counted:
        drafter.work()
    assert max(map(len, drafter.unread)) < 8


@pytest.mark.parametrize("rows", [8, 32, 40])
def test_a_rest_ends_once_the_tokens_of_most_rows_are_counted(dear, rows):
    """Few of many rows are counted in it: with drafts for these alone the budget was spent before others had some."""
    drafter, rests, quiet = drafter_of(rows, [1, 2, 3]), 0, 0
    for token in [*range(10, 2000), *[*range(3000, 3023)] * 60]:
        if rests == 1:
            rests += drafter.rests_on()
        if not rests:
            rests = drafter.pause()
        if not rests:
            break
        rests -= 1
        quiet += not drafter.listens
        told(drafter, token)
    assert not rests and quiet
    assert sum(map(drafter._knows, range(rows))) >= 7 / 8 * rows


def test_rounds_without_drafts_that_it_was_not_asked_for_are_counted(dear):
    """As those of an open batch are while no row takes drafts."""
    drafter = drafter_of(2, [3, 4, 5])
    for token in range(6, 106):
        told(drafter, token)
    assert backlog(drafter) == 2 and not any(drafter.fresh[0][1:])


def test_rows_that_a_pass_leaves_no_time_for_are_counted_in_the_next(dear):
    drafter, drafter.counter = drafter_of(2, [*range(3, 103)]), ngram_counter()
    drafter.unread[1].popleft()
    drafter.quota = 100 + nasd.BATCHED // 2
    for left in (100, 0):
        drafter.work()
        assert backlog(drafter) == left


def test_tokens_of_a_rest_are_held_against_the_storage_before_they_are_counted(dear, monkeypatch):
    """The last ones: those before say nothing of how the text goes on."""
    drafter, more = drafter_of(1, [5, 6, 7, 8, 9] * 4), [5, 6, 7, 8, 9] * 4
    told(drafter, 5)
    drafter.rests_on()
    drafter.work()
    drafter.catch_up(torch.tensor([more[1:]]), [19])
    assert drafter.fresh[0] == more[1:] and len(drafter.unread[0]) == 19 and drafter.roots == [9]
    seen, hear = sum(drafter.rule.recurrence.seen), drafter.rule.hear

    def heard(*given: Any) -> bool:
        assert len(drafter.unread[0]) == 19  # a guess from its own count would say nothing
        return hear(*given)

    monkeypatch.setattr(drafter.rule, "hear", heard)
    drafter.work()
    assert not drafter.unread[0] and not drafter.fresh[0]
    assert sum(drafter.rule.recurrence.seen) == seen + STREAKS
    assert drafter.rule.recurrence.streaks == [STREAKS - 1]
    assert not drafter.rests_on()
    assert drafter.pause() == 0 and drafter.propose(0).tokens[0, :3].tolist() == [9, 5, 6]


def test_rounds_that_were_heard_of_together_have_one_time(dear, monkeypatch):
    host = Host()
    monkeypatch.setattr(policy, "time", host)
    rule = drafter_of(8, [3, 4, 5]).rule
    rule.timed, left = True, rule.left
    rule.ran(1, True)
    host.seconds += 0.018
    rule.ran(1, True, rounds=12)
    assert [*rule.times.spent[~1]] == [pytest.approx(1.5)] and rule.idle == 13
    assert rule.left == pytest.approx(left + 13 * ngram_rounds.SHARE[0])
    rule.times.spent[8] = policy.deque([9.0])
    rule.ran(1, True, rounds=2 * ngram_rounds.STALE)
    assert 8 not in rule.times.spent


def test_a_call_makes_no_drafts_that_it_could_not_pay_for(dear):
    """Where all of its rows copy, 32 rows pay for a round with drafts once rounds without have brought it back; an open
    batch goes on, and takes them at once."""
    for ends_at_once in (False, True):
        drafter = drafter_of(32, [5, 6, 7, 8, 9] * 4)
        rule, drafter.ends_at_once = drafter.rule, ends_at_once
        if ends_at_once:
            rule.begin_call()
        for token in [5, 6, 7, 8, 9] * 2:
            told(drafter, token)
            drafter.rests_on()
        assert (rule.pays(drafter.counting) > 1) != ends_at_once
        rule.left = ngram_rounds.SAVED
        assert rule.pays(drafter.counting) > 1


@pytest.mark.parametrize("weight_bytes", [SMOLLM2_BYTES, BYTES])
def test_one_row_may_try_a_round_with_drafts_whatever_it_costs(dear, weight_bytes):
    config = fastspec.Nasd()
    rule = NasdDrafter(config, [storage_of(config)], torch.device("cpu"), weight_bytes).rule
    rule.begin_call()
    assert min(rule.prices[size] for size in rule.sizes) < rule.left + rule.lent
    for _ in range(2):
        rule.ran(rule.sizes[0], False)
    assert rule.left < 0


@pytest.mark.parametrize("hosted", [False, True])
def test_tokens_are_counted_while_rounds_without_drafts_run(dear, monkeypatch, hosted):
    """Of plain decoding's own rounds, whether the host has a part in their tokens or not."""
    stand_in(monkeypatch)
    monkeypatch.setattr(ngram_rounds.TimedDrafts, "pays", lambda self, going, following=False: 0.0)
    worked, work = [], NasdDrafter.work
    monkeypatch.setattr(NasdDrafter, "work", lambda self, **more: (worked.append(1), work(self, **more))[1])
    plain, model = tiny_model(seed=3), fastspec.patch(tiny_model(seed=3))
    inputs: dict[str, Any] = {"input_ids": torch.tensor([[5, 6, 7, 8] * 4])}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    more = {"repetition_penalty": 1.1} if hosted else {}
    same((plain, model), "nasd", inputs, max_new_tokens=30, eos_token_id=NEVER, **more)
    assert len(worked) >= stats(model).rounds


def test_what_is_heard_of_a_calls_first_rounds_does_not_hold_up_the_next(dear, monkeypatch):
    """They are read one by one."""
    stand_in(monkeypatch)
    done = list[str]()
    steps = {Engine: ("_step",), RoundProgram: ("meanwhile",), NasdDrafter: ("catch_up", "rests_on", "pause")}
    for owner, names in steps.items():
        for name in names:
            former = getattr(owner, name)

            def told(*given: Any, name: str = name, former: Any = former, **more: Any) -> Any:
                done.append(name)
                return former(*given, **more)

            monkeypatch.setattr(owner, name, told)
    model, ids = fastspec.patch(tiny_model(seed=3)), torch.tensor([[5, 6, 7, 8] * 4])
    with monkeypatch.context() as never:
        never.setattr(ngram_rounds.TimedDrafts, "pays", lambda self, going, following=False: 0.0)
        options = {"assistant": "nasd", "max_new_tokens": 30, "do_sample": False, "eos_token_id": NEVER}
        model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    first = " ".join(done).split("_step")[: batching.ASYNCHRONOUS_AFTER]
    assert [each.split() for each in first] == [
        ["pause"],
        ["meanwhile"],
        *[["meanwhile", "catch_up", "rests_on"]] * (batching.ASYNCHRONOUS_AFTER - 2),
    ]


def test_a_prompt_that_joins_leaves_the_device_to_its_round_before_n_grams_take_it_in(dear, monkeypatch):
    """Between its pass and the launch of the next round nothing of its text is counted, looked up or read back."""
    stand_in(monkeypatch)
    events: list[str] = []

    def noted(owner: Any, name: str, said: str, least: int = 0) -> None:
        former = getattr(owner, name)

        def note(*given: Any, **more: Any) -> Any:
            if not least or len(given[2]) > least:
                events.append(said)
            return former(*given, **more)

        monkeypatch.setattr(owner, name, note)

    noted(HFModel, "prefill", "read")
    noted(schedule, "_run", "launch")
    noted(NasdDrafter, "_hear", "take in", least=4)
    plain, model = opened.made()
    prompts = opened.texts(9, 30, 14, 50, 70, 20, 11)
    with fastspec.continuous(model, "nasd", rows=2, max_length=128) as batch:
        events.clear()
        futures = [batch.submit(ids, max_new_tokens=24, **opened.GREEDY) for ids in prompts]
        assert opened.told(futures) == [opened.alone(plain, ids, 24) for ids in prompts]
    reads = [place for place, event in enumerate(events) if event == "read"]
    assert len(reads) > 2 and events.count("take in") >= len(prompts)
    for place in reads:
        assert next(event for event in events[place:] if event != "read") == "launch"
