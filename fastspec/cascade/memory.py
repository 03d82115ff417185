"""Keys and values kept between calls: on the stages' devices within a budget, then in the CPU's memory."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from fastspec.errors import Unsupported
from fastspec.generation.drafters.retokenized import common_prefix

DROPPED = 64
"""The number of dropped entries whose tokens are remembered."""
HOST = torch.device("cpu")

Layers = list[tuple[Tensor, Tensor]]
"""Keys and values [1, Hkv, T, D] per layer."""


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Counts since a manager was made: `hits`, finds that gave a prefix; `moves` of an entry to the CPU's memory or
    back; `recomputes`, finds for which a dropped entry had held a longer prefix; `drops` for want of room."""

    hits: int = 0
    moves: int = 0
    recomputes: int = 0
    drops: int = 0


@dataclass(slots=True, eq=False)
class _Entry:
    """One stage's keys and values of one text; `homes` are the devices that its layers came from."""

    stage: int
    tokens: array[int]
    layers: Layers
    homes: list[torch.device]
    size: int
    moved: bool = False


class CacheManager:
    """Keys and values of stages by their tokens, at most `budget` bytes on all devices together and `host_budget` bytes
    in the CPU's memory.

    Entries are copies. Where a new one needs room, the least recently used ones are moved to the CPU's memory, in place
    of those used even earlier, or dropped. Prefixes of fewer than `least` tokens are neither kept nor found. Calls from
    several threads take turns. A deep copy starts empty.
    """

    def __init__(self, budget: int, *, host_budget: int = 0, least: int = 16) -> None:
        self.budget, self.host_budget, self.least = budget, host_budget, least
        self._lock = Lock()
        self._entries: list[_Entry] = []  # the least recently used first
        self._dropped: deque[tuple[int, array[int]]] = deque(maxlen=DROPPED)
        self._stats = MemoryStats()
        self._models: dict[int, Hashable] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> CacheManager:
        return CacheManager(self.budget, host_budget=self.host_budget, least=self.least)

    @property
    def stats(self) -> MemoryStats:
        return self._stats

    def renew(self, stage: int, model: Hashable) -> None:
        """Name the stage's model, by a value that is equal for equal models, and drop entries of another."""
        with self._lock:
            if self._models.get(stage, model) != model:
                self._entries = [each for each in self._entries if each.stage != stage]
                self._dropped = deque((each for each in self._dropped if each[0] != stage), maxlen=DROPPED)
            self._models[stage] = model

    def keep(self, stage: int, tokens: Sequence[int], layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy a stage's keys and values [1, Hkv, T, D] per layer of these T tokens, in place of entries of their
        prefixes. Raises `Unsupported`, and keeps all, for an entry that exceeds the budget."""
        held = array("q", tokens)
        size = sum(each.numel() * each.element_size() for pair in layers for each in pair)
        if size > self.budget:
            raise Unsupported(
                f"the keys and values of {len(held)} tokens of stage {stage} take {size} bytes, and the budget is "
                f"{self.budget} bytes: allow at least {size} (Cascade: memory={size}), or keep nothing (memory=None)"
            )
        if len(held) < self.least:
            return
        with self._lock:
            self._entries = [each for each in self._entries if each.stage != stage or not _starts(held, each.tokens)]
            remembered = ((which, lost) for which, lost in self._dropped if which != stage or not _starts(held, lost))
            self._dropped = deque(remembered, maxlen=DROPPED)
            self._make_room(size)
            homes = [keys.device for keys, _ in layers]
            self._entries.append(_Entry(stage, held, _copies(layers, homes, len(held)), homes, size))

    def find(self, stage: int, tokens: Sequence[int]) -> Layers | None:
        """The longest kept prefix of these tokens, as copies [1, Hkv, P, D] per layer on the stage's device, or None.
        P lies in `least` .. len(tokens) - 1: the last token has to be fed for its logits. An entry in the CPU's memory
        is moved back where room can be made without dropping anything."""
        wanted = array("q", tokens)
        with self._lock:
            length, best = 0, None
            for each in self._entries:
                use = self._use(wanted, each.tokens) if each.stage == stage else 0
                # of equal ones, one that need not be moved, then the most recently used
                if use and (best is None or (use, not each.moved) >= (length, not best.moved)):
                    length, best = use, each
            if max((self._use(wanted, lost) for which, lost in self._dropped if which == stage), default=0) > length:
                self._count("recomputes")
            if best is None:
                return None
            self._entries.remove(best)
            self._entries.append(best)
            if best.moved:
                self._move_back(best)
            found = _copies(best.layers, best.homes, length)
            self._count("hits")
            return found

    def clear(self) -> None:
        """Free everything and forget what was dropped; the counts go on."""
        with self._lock:
            self._entries.clear()
            self._dropped.clear()

    def held(self, *, moved: bool) -> int:
        """Bytes kept on the stages' devices, or `moved` to the CPU's memory."""
        return sum(each.size for each in self._entries if each.moved is moved)

    def _use(self, wanted: array[int], tokens: array[int]) -> int:
        """Tokens of an entry that would be of use, 0 if too few."""
        use = min(common_prefix(wanted, tokens), len(wanted) - 1)
        return use if use >= self.least else 0

    def _make_room(self, size: int) -> None:
        for each in [each for each in self._entries if not each.moved]:
            if self.held(moved=False) + size <= self.budget:
                return
            self._move_out(each)

    def _move_out(self, entry: _Entry) -> None:
        """Move an entry to the CPU's memory, in place of some that were used before it, or drop it."""
        free = self.host_budget - self.held(moved=True)
        leaving = []
        for older in self._entries[: self._entries.index(entry)]:
            if older.moved and free < entry.size:
                leaving.append(older)
                free += older.size
        if free < entry.size:
            self._drop(entry)
            return
        for older in leaving:
            self._drop(older)
        self._move(entry, moved=True)

    def _move_back(self, entry: _Entry) -> None:
        """Move an entry back to its device, if those that have to leave it fit into the CPU's free memory."""
        excess = self.held(moved=False) + entry.size - self.budget
        leaving = []
        for each in self._entries:
            if not each.moved and excess > 0:
                leaving.append(each)
                excess -= each.size
        if sum(each.size for each in leaving) > self.host_budget - self.held(moved=True):
            return
        for each in leaving:
            self._move(each, moved=True)
        self._move(entry, moved=False)

    def _move(self, entry: _Entry, *, moved: bool) -> None:
        pairs = zip(entry.layers, [HOST if moved else home for home in entry.homes], strict=True)
        entry.layers = [(keys.to(place), values.to(place)) for (keys, values), place in pairs]
        entry.moved = moved
        self._count("moves")

    def _drop(self, entry: _Entry) -> None:
        self._entries.remove(entry)
        entry.layers.clear()  # a caller up the stack may still hold the entry
        self._dropped.append((entry.stage, entry.tokens))
        self._count("drops")

    def _count(self, name: str) -> None:
        self._stats = replace(self._stats, **{name: getattr(self._stats, name) + 1})


def _copies(layers: Iterable[tuple[Tensor, Tensor]], places: list[torch.device], length: int) -> Layers:
    """The first tokens of every layer, copied to a place for each layer."""
    pairs = zip(layers, places, strict=True)
    return [(_copy(keys[:, :, :length], place), _copy(values[:, :, :length], place)) for (keys, values), place in pairs]


def _copy(tensor: Tensor, place: torch.device) -> Tensor:
    """A copy with a storage of exactly its own size."""
    return tensor.detach().to(place, copy=True, memory_format=torch.contiguous_format)


def _starts(tokens: array[int], prefix: array[int]) -> bool:
    return tokens[: len(prefix)] == prefix
