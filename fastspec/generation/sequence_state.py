"""State of a model's texts: a length per row, the layers' states, and room for a tree after the committed tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastspec.devices import memory_of
from fastspec.errors import FastSpecError, Unsupported
from fastspec.generation.layer_state import FirstLayers, FullAttentionState, LayerState, Moves
from fastspec.generation.ops import Ops
from fastspec.generation.tree import Verdict
from fastspec.kernels.cache.reference import grow


def _too_large(tokens: int, rows: int, need: int, device: torch.device) -> str:
    return (
        f"out of memory: a KV cache of {tokens} tokens for {rows} rows needs {need / 2**30:.2f} GiB on {device}. "
        "Ask for fewer new tokens (max_new_tokens), a shorter prompt or a smaller batch."
    )


FIRST_SLOTS = 1024
WIDE_STEP = 16384
"""On CUDA long buffers grow by so many slots, and shorter ones to the next power of two."""


class SequenceState:
    """The states `kinds` of a model's layers, one for all layers of a kind, and `lengths` [B] int64.

    `order` gives the kind, and the layer of it, that every layer of the model reads; layers may share one. None: there
    is one kind, and every layer has its own. Slots below a row's length hold its committed tokens, `capacity` of them
    at most; the `tail` slots after it are provisional, written by every pass and moved or forgotten by `commit`. The
    buffers start with `first` slots (None: FIRST_SLOTS) and double when `reserve` asks for more. Raises FastSpecError,
    with the size, when memory cannot hold the capacity.
    """

    def __init__(
        self,
        kinds: Sequence[LayerState],
        *,
        rows: int,
        capacity: int,
        tail: int,
        device: torch.device,
        order: Sequence[tuple[int, int]] | None = None,
        first: int | None = None,
    ) -> None:
        self.kinds, self.tail, self.slots, self.first = tuple(kinds), tail, 0, first or FIRST_SLOTS
        order = [(0, layer) for layer in range(kinds[0].layers)] if order is None else order
        self.places: list[tuple[LayerState, int]] = [(self.kinds[kind], layer) for kind, layer in order]
        """The state of every layer of the model, and the layer's number in it."""
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.reached = 0
        """No row has written a slot from here on since the call began; passes that pad what they write set it."""
        self.open(capacity)

    @property
    def owned(self) -> list[tuple[LayerState, int]]:
        """The places of the layers that keep something of their own."""
        return list(dict.fromkeys(self.places))

    def open(self, capacity: int) -> None:
        """Begin a call of at most `capacity` tokens a row on the buffers that are there, with every row empty. Raises
        Unsupported where so many are more than the device's memory holds."""
        self.limit = capacity
        for device in dict.fromkeys(kind.device for kind in self.kinds):
            need = sum(kind.bytes(capacity + self.tail) for kind in self.kinds if kind.device == device)
            memory = memory_of(str(device))
            if memory is not None and need > memory:  # the system may grant it, and kill the process later
                raise Unsupported(_too_large(capacity, len(self.lengths), need, device))
        self.lengths.zero_()
        for kind in self.kinds:
            kind.clear(self.reached)
        self.reserve(min(capacity, self.first))
        self.reached = 0

    @property
    def bound(self) -> int:
        """Committed tokens per row that the buffers have room for now."""
        return self.slots - self.tail

    def fits(self, committed: int) -> bool:
        """True where the buffers have room for so many committed tokens a row, or for all that the call may reach."""
        return min(committed, self.limit) <= self.bound

    def bytes(self, committed: int) -> int:
        """Memory of the buffers that `reserve` makes where there are none."""
        return sum(kind.bytes(self._wanted(min(committed, self.limit)) + self.tail) for kind in self.kinds)

    def reserve(self, committed: int) -> int:
        """Make room for this many committed tokens per row, the capacity at most, and the tail -> those in bounds."""
        if not self.fits(committed):
            wanted = self._wanted(min(committed, self.limit)) + self.tail
            try:
                for kind in self.kinds:
                    kind.resize(wanted)
            except (MemoryError, RuntimeError) as error:
                need = sum(kind.bytes(wanted) for kind in self.kinds)
                raise FastSpecError(_too_large(wanted, len(self.lengths), need, self.lengths.device)) from error
            self.slots = wanted
        found = min(committed, self.bound)
        self.reached = max(self.reached, found + self.tail)
        return found

    def _wanted(self, committed: int) -> int:
        """Committed tokens to make room for: twice those there are, the capacity at most; on CUDA a round number, so
        that calls of any length share graphs."""
        if self.lengths.is_cuda:
            return max(self.first, min(1 << (committed - 1).bit_length(), -(-committed // WIDE_STEP) * WIDE_STEP))
        return min(max(committed, 2 * self.bound), self.limit)

    def commit(self, ops: Ops, verdict: Verdict, active: Tensor) -> None:
        """Move the accepted path of every row to the end of its tokens; lengths grow where active [B] is true."""
        sources, targets = ops.commit_slots(self.lengths, verdict.path, verdict.accepted, active, self.bound)
        moves = Moves(verdict, active, sources, targets)
        for kind in self.kinds:
            kind.commit(ops, moves.on(kind.device))

    def copy_row(self, row: int, other: SequenceState, count: int, source: int = 0) -> None:
        """Begin a row anew with the `count` committed tokens of row `source` of another state, which fit."""
        reached = self.reached if self.lengths.is_cuda else min(self.reached, int(self.lengths[row]) + self.tail)
        for mine, theirs in zip(self.kinds, other.kinds, strict=True):
            mine.copy_row(row, theirs, count, source, reached)
        self.lengths[row] = count

    def grow(self, counts: Tensor) -> None:
        """Count the next counts [B] slots of every row as committed, within the bound: a row whose last round went
        beyond it has ended, and trees are still written after it."""
        grow(self.lengths, counts, self.bound)


class SharedState(SequenceState):
    """The first layers of another state, with lengths of their own, in which a model's own early layers draft: they
    write into its provisional tail, which the next pass over all layers writes anew."""

    def __init__(self, whole: SequenceState, depth: int) -> None:
        self.whole, self.tail, self.lengths = whole, whole.tail, whole.lengths.clone()
        of = [kind for kind, _ in dict.fromkeys(whole.places[:depth])]
        first = {
            kind: FirstLayers(kind, of.count(kind))
            for kind in dict.fromkeys(of)
            if isinstance(kind, FullAttentionState)
        }
        if len(first) < len(set(of)):
            raise TypeError("only layers that keep keys and values can be shared: other states cannot be taken back")
        self.kinds = tuple(first.values())
        self.places = [
            (first[kind], index) for kind, index in whole.places[:depth] if isinstance(kind, FullAttentionState)
        ]

    @property
    def slots(self) -> int:  # type: ignore[override]
        return self.whole.slots

    @property
    def limit(self) -> int:  # type: ignore[override]
        return self.whole.limit

    def bytes(self, committed: int) -> int:
        """None: the buffers are the other's."""
        return 0

    def reserve(self, committed: int) -> int:
        return self.whole.reserve(committed)
