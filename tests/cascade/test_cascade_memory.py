"""Keys and values kept between calls, held to a plain model of what should be there, and to what is allocated at every
copy."""

from __future__ import annotations

import copy
import threading
import time
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.examples import examples
from helpers.threads import in_threads
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from fastspec.cascade import memory
from fastspec.cascade.memory import CacheManager, MemoryStats
from fastspec.errors import Unsupported

AWAY = torch.device("meta")
COPY = torch.ops.aten._to_copy.default


class Away(torch.Tensor):
    """A tensor of another device than the CPU, as torch sees it; its values lie in `inner`."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=AWAY,
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        to = options.pop("device", None) or AWAY
        out = func(*tree_map(inside, args), **options)
        return Away(out) if to == AWAY else out


def inside(value: Any) -> Any:
    return value.inner if isinstance(value, Away) else value


class Watch(TorchDispatchMode):
    """Notes after every copy which of the copied storages are alive, and where."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[StorageWeakRef, str, int]] = []
        self.peaks: list[list[tuple[int, str, int]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is not COPY:
            return func(*args, **kwargs)
        if kwargs.get("device") == AWAY and not isinstance(args[0], Away):
            del kwargs["device"]
            out = Away(func(*args, **kwargs))
        else:
            out = func(*args, **kwargs)
        storage = inside(out).untyped_storage()
        self.copies.append((StorageWeakRef(storage), "away" if isinstance(out, Away) else "host", storage.nbytes()))
        self.peaks.append(self.alive())
        return out

    def alive(self) -> list[tuple[int, str, int]]:
        self.copies = [each for each in self.copies if not each[0].expired()]
        return [(ref.cdata, place, size) for ref, place, size in self.copies]


def storages(layers: Any) -> set[int]:
    return {StorageWeakRef(inside(each).untyped_storage()).cdata for pair in layers for each in pair}


@dataclass(eq=False)
class Held:
    stage: int
    text: tuple[int, ...]
    layers: list[tuple[torch.Tensor, torch.Tensor]]  # the values
    size: int
    time: int
    moved: bool = False


class Model:
    """The specification: entries with the time of their last use."""

    def __init__(self, budget: int, host: int, least: int) -> None:
        self.budget, self.host, self.least = budget, host, least
        self.entries: list[Held] = []
        self.lost: list[tuple[int, tuple[int, ...]]] = []
        self.clock = self.hits = self.moves = self.recomputes = self.drops = 0

    def there(self, moved: bool) -> list[Held]:
        return sorted((each for each in self.entries if each.moved == moved), key=lambda each: each.time)

    def bytes(self, moved: bool) -> int:
        return sum(each.size for each in self.there(moved))

    def drop(self, entry: Held) -> None:
        self.entries.remove(entry)
        self.lost = [*self.lost, (entry.stage, entry.text)][-memory.DROPPED :]
        self.drops += 1

    def keep(self, new: Held) -> None:
        self.clock += 1
        new.time = self.clock
        covered = {(new.stage, new.text[:count]) for count in range(len(new.text) + 1)}
        self.entries = [each for each in self.entries if (each.stage, each.text) not in covered]
        self.lost = [each for each in self.lost if each not in covered]
        while self.bytes(False) + new.size > self.budget:
            oldest = self.there(False)[0]
            before = [each for each in self.there(True) if each.time < oldest.time]
            enough = [
                count
                for count in range(len(before) + 1)
                if self.bytes(True) - sum(each.size for each in before[:count]) + oldest.size <= self.host
            ]
            if not enough:
                self.drop(oldest)
                continue
            for each in before[: enough[0]]:
                self.drop(each)
            oldest.moved = True
            self.moves += 1
        self.entries.append(new)

    def use(self, wanted: tuple[int, ...], text: tuple[int, ...]) -> int:
        counts = [
            count for count in range(self.least, len(wanted)) if wanted[:count] == text[:count] and count <= len(text)
        ]
        return max(counts, default=0)

    def find(self, stage: int, wanted: tuple[int, ...]) -> tuple[Held | None, int]:
        self.clock += 1
        uses = {each: self.use(wanted, each.text) for each in self.entries if each.stage == stage}
        length = max(uses.values(), default=0)
        self.recomputes += any(which == stage and self.use(wanted, text) > length for which, text in self.lost)
        if not length:
            return None, 0
        best = max((each for each, use in uses.items() if use == length), key=lambda each: (not each.moved, each.time))
        best.time = self.clock
        self.hits += 1
        if best.moved:
            out = []
            while self.bytes(False) + best.size - sum(each.size for each in out) > self.budget:
                out.append(self.there(False)[len(out)])
            if self.bytes(True) + sum(each.size for each in out) <= self.host:
                for each in (best, *out):
                    each.moved = not each.moved
                self.moves += 1 + len(out)
        return best, length


GEOMETRY = [(1, 2, 1, 3, torch.bfloat16), (2, 1, 1, 1, torch.float32), (1, 2, 1, 2, torch.float32)]
"""Layers, heads, sizes of a key and a value, and dtype of each stage: 16, 16 and 24 bytes a token: some entries fill a
budget exactly."""
tokens = st.lists(st.integers(0, 2), max_size=6)


class Keeping(RuleBasedStateMachine):
    @initialize(
        budget=st.integers(4, 40),
        host=st.one_of(st.just(0), st.integers(4, 80)),
        least=st.integers(1, 3),
        away=st.sampled_from([True, True, False]),
        short=st.integers(0, 1),
    )
    def start(self, budget: int, host: int, least: int, away: bool, short: int) -> None:
        self.bound = mock.patch.object(memory, "DROPPED", 3)
        self.bound.start()
        budget, host = 8 * budget - short, 8 * host - short * (host > 0)
        self.manager, self.model = CacheManager(budget, host_budget=host, least=least), Model(budget, host, least)
        self.watch, self.away, self.seed = Watch(), away, 0
        self.texts: list[tuple[int, ...]] = [()]

    def teardown(self) -> None:
        if hasattr(self, "bound"):
            self.bound.stop()

    def text(self, known: int, cut: int, more: list[int]) -> tuple[int, ...]:
        text = (*self.texts[-1 - known % len(self.texts)][:cut], *more)
        self.texts.append(text)
        return text

    def check_peaks(self, given: set[int]) -> None:
        """At no copy were there more bytes than the budgets, but for what was given to the caller."""
        budget, host = self.manager.budget, self.manager.host_budget
        for peak in self.watch.peaks:
            sizes = {
                place: sum(size for key, where, size in peak if where == place and key not in given)
                for place in ("away", "host")
            }
            if self.away:
                assert sizes["away"] <= budget and sizes["host"] <= host
            else:
                assert sizes["host"] <= budget + host
        self.watch.peaks.clear()

    @rule(
        stage=st.integers(0, 2), known=st.integers(0, 5), cut=st.integers(0, 12), more=tokens, spare=st.integers(0, 3)
    )
    def keep(self, stage: int, known: int, cut: int, more: list[int], spare: int) -> None:
        text = self.text(known, cut, more)
        layers, heads, k, v, dtype = GEOMETRY[stage]
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        values, handed, buffers = [], [], []
        for _ in range(layers):
            pair = [
                torch.randn(1, len(text) + spare, heads, size, generator=generator).to(dtype).requires_grad_()
                for size in (k, v)
            ]
            views = [(Away(each) if self.away else each)[:, : len(text)].transpose(1, 2) for each in pair]
            values.append(tuple(each[:, : len(text)].detach().transpose(1, 2).clone() for each in pair))
            handed.append(tuple(views))
            buffers += pair
        size = len(text) * layers * heads * (k + v) * dtype.itemsize
        if size > self.model.budget:
            with pytest.raises(Unsupported, match=rf"{size} bytes.*{self.model.budget} bytes"), self.watch:
                self.manager.keep(stage, text, handed)
        else:
            with self.watch:
                self.manager.keep(stage, text, handed)
            if len(text) >= self.model.least:
                self.model.keep(Held(stage, text, values, size, 0))
        self.check_peaks(set())
        with torch.no_grad():
            for each in buffers:
                each.fill_(torch.nan)

    @rule(stage=st.integers(0, 2), known=st.integers(0, 5), cut=st.integers(0, 12), more=tokens)
    def find(self, stage: int, known: int, cut: int, more: list[int]) -> None:
        text = self.text(known, cut, more)
        with self.watch:
            found = self.manager.find(stage, text)
        entry, length = self.model.find(stage, text)
        self.check_peaks(set() if found is None else storages(found))
        assert (found is None) == (entry is None)
        if found is None or entry is None:
            return
        for got, expected in zip(found, entry.layers, strict=True):
            for one, value in zip(got, expected, strict=True):
                assert isinstance(one, Away) == self.away and not one.requires_grad and one.is_contiguous()
                assert inside(one).dtype == value.dtype and torch.equal(inside(one), value[:, :, :length])
                inside(one).fill_(torch.nan)  # the caller's own

    @rule(index=st.integers(0, 20), cut=st.integers(2, 12), more=tokens)
    def find_what_is_kept(self, index: int, cut: int, more: list[int]) -> None:
        if self.model.entries:
            entry = self.model.entries[index % len(self.model.entries)]
            self.texts.append(entry.text)
            self.find(entry.stage, 0, cut, [*more, 0])

    @rule(index=st.integers(0, 20), cut=st.integers(2, 6), more=tokens)
    def keep_beside_what_is_kept(self, index: int, cut: int, more: list[int]) -> None:
        if self.model.entries:
            entry = self.model.entries[index % len(self.model.entries)]
            self.texts.append(entry.text)
            self.keep(entry.stage, 0, cut, more, 1)

    @rule(really=st.integers(0, 4))
    def clear(self, really: int) -> None:
        if really == 0:
            self.manager.clear()
            self.model.entries, self.model.lost = [], []

    @invariant()
    def the_bytes_and_counts_are_those_of_the_model(self) -> None:
        if not hasattr(self, "model"):
            return
        manager, model = self.manager, self.model
        used, moved = model.bytes(False), model.bytes(True)
        assert (manager.held(moved=False), manager.held(moved=True)) == (used, moved)
        assert used <= manager.budget and moved <= manager.host_budget
        alive = {
            place: sum(size for _, where, size in self.watch.alive() if where == place) for place in ("away", "host")
        }
        assert alive == ({"away": used, "host": moved} if self.away else {"away": 0, "host": used + moved})
        assert manager.stats == MemoryStats(model.hits, model.moves, model.recomputes, model.drops)


TestKeeping = Keeping.TestCase
TestKeeping.settings = examples(150, stateful_step_count=50)


def entry(count: int, value: float = 0.0, layers: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of 8 bytes a token and layer."""
    return [(torch.full((1, 1, count, 1), value), torch.full((1, 1, count, 1), -value)) for _ in range(layers)]


def test_an_entry_larger_than_the_budget_is_refused_and_nothing_else_changes() -> None:
    manager = CacheManager(160, host_budget=10_000)
    manager.keep(0, range(20), entry(20))
    with pytest.raises(
        Unsupported, match=r"21 tokens of stage 0 take 168 bytes.* 160 bytes: allow at least 168.*memory=None"
    ):
        manager.keep(0, range(21), entry(21))
    assert manager.held(moved=False) == 160 and manager.stats == MemoryStats()
    found = manager.find(0, range(21))
    assert found is not None and found[0][0].shape == (1, 1, 20, 1)


def test_what_was_dropped_is_remembered_within_a_bound_and_forgotten_by_clear() -> None:
    manager = CacheManager(160)
    for first in range(memory.DROPPED + 2):
        manager.keep(0, [first] * 20, entry(20))
    assert manager.stats.drops == memory.DROPPED + 1
    for first in range(memory.DROPPED + 1):
        assert manager.find(0, [first] * 21) is None
    assert manager.stats.recomputes == memory.DROPPED  # the first one dropped is forgotten
    manager.clear()
    assert manager.held(moved=False) == 0 and manager.find(0, [memory.DROPPED] * 21) is None
    assert manager.stats.recomputes == memory.DROPPED and manager.stats.hits == 0


def test_a_text_that_was_dropped_and_kept_again_is_remembered_once() -> None:
    manager = CacheManager(160)
    manager.keep(0, [9] * 20, entry(20))
    for turn in range(2 * memory.DROPPED + 1):
        manager.keep(0, [turn % 2] * 20, entry(20))
    assert manager.find(0, [9] * 21) is None and manager.stats.recomputes == 1


def test_what_comes_back_makes_no_more_leave_than_it_needs() -> None:
    manager = CacheManager(480, host_budget=480)
    for first, count in enumerate((20, 20, 20, 40)):
        manager.keep(
            0, [first] * count, entry(count)
        )  # the first three fill the budget, and the last takes the place of two
    assert (manager.held(moved=False), manager.held(moved=True), manager.stats.moves) == (480, 320, 2)
    manager.find(0, [2] * 20)
    manager.find(0, [0] * 20)  # the last one would have to leave, which is larger than what is free of the CPU's memory
    assert (manager.held(moved=False), manager.held(moved=True), manager.stats.moves) == (480, 320, 2)
    manager.find(0, [3] * 20)
    manager.find(0, [0] * 20)  # now in place of one of its own size
    assert (manager.held(moved=False), manager.held(moved=True), manager.stats.moves) == (480, 320, 4)


def test_sixteen_tokens_are_the_least_by_default() -> None:
    manager = CacheManager(1000)
    manager.keep(0, range(15), entry(15))
    assert manager.held(moved=False) == 0
    manager.keep(0, range(40), entry(40))
    assert manager.find(0, range(16)) is None  # the last token has to be fed
    assert manager.find(0, range(17)) is not None
    assert manager.find(1, range(17)) is None


def test_a_deep_copy_starts_empty() -> None:
    manager = CacheManager(1000, host_budget=500, least=7)
    manager.keep(0, range(20), entry(20))
    twin = copy.deepcopy(manager)
    assert (twin.budget, twin.host_budget, twin.least, twin.held(moved=False), twin.stats) == (
        1000,
        500,
        7,
        0,
        MemoryStats(),
    )
    twin.keep(0, range(30), entry(30))
    assert (manager.held(moved=False), twin.held(moved=False)) == (160, 240)


def test_what_is_kept_in_inference_mode_can_be_written_into_outside() -> None:
    manager = CacheManager(1000)
    with torch.inference_mode():
        manager.keep(0, range(20), entry(20, 3.0))
    found = manager.find(0, range(20))
    assert found is not None
    found[0][0].mul_(2)
    again = manager.find(0, range(20))
    assert again is not None and again[0][0].flatten().tolist() == [3.0] * 19


def test_of_equal_entries_the_one_that_need_not_be_moved_is_given() -> None:
    manager = CacheManager(160, host_budget=160)
    for first in (0, 1):
        manager.keep(0, [*range(16), *[first] * 4], entry(20, float(first)))
    manager.find(0, [*range(16), *[0] * 5])  # stays in the CPU's memory, where there is no room for the other one
    assert manager.stats.moves == 1
    found = manager.find(0, range(17))
    assert found is not None and float(found[0][0][0, 0, 0, 0]) == 1.0


def test_threads_take_turns() -> None:
    """Every thread reads what belongs to its own texts, and no two copy at a time; 12 of 24 texts fit."""
    manager = CacheManager(8 * 160, host_budget=4 * 160)
    inside_now: list[int] = []
    real = memory._copy

    def slowly(*args: Any) -> torch.Tensor:
        inside_now.append(threading.get_ident())
        time.sleep(2e-4)  # lets the others run
        out = real(*args)
        assert set(inside_now) == {threading.get_ident()}, "two threads copied at once"
        inside_now.remove(threading.get_ident())
        return out

    def work(place: int) -> None:
        for turn in range(60):
            value, other = place * 6 + turn % 6, place * 6 + turn * 5 % 6
            manager.keep(place, [value] * 20, entry(20, float(value)))
            found = manager.find(place, [other] * 20)
            assert found is None or set(found[0][0].flatten().tolist()) == {float(other)}

    with mock.patch.object(memory, "_copy", slowly):
        in_threads(work, 4)
    assert manager.held(moved=False) <= manager.budget and manager.held(moved=True) <= manager.host_budget
