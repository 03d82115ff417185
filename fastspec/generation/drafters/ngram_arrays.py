"""Arrays and files of n-gram storages: some 16 bytes a context and 12 a counted token, where a dictionary takes 184."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from operator import itemgetter
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fastspec.errors import CheckpointError, Unsupported

WIDTH = 8
"""Continuations kept per context; a comma would else collect thousands."""
BITS = 24
"""Bits of a token; vocabularies end far below 2**24."""
MOST = 2**30
"""Counts that a file may bring: in 32 bits there is room for as many more."""
GOLDEN = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio, for multiplicative hashing (Knuth, volume 3, 6.4)."""
WRAPPED = GOLDEN - (1 << 64)
"""The same in signed 64 bits."""

_times = itemgetter(1)


FEWEST = 1024
"""Slots of an empty table: with fewer, the first hundred tokens of a text would take twice the time."""


class Edges:
    """(node, token) -> the number of that edge: 1, 2, ... in the order they were added. Numbers of nodes are the
    caller's.

    `keys` holds node << BITS | token by number, `slots` the numbers by hash with linear probing, 0 where a slot is
    free; at most half of the slots are taken.
    """

    __slots__ = ("keys", "mask", "slots")

    def __init__(self) -> None:
        self.keys = array("q", [0])  # none has number 0
        self.slots, self.mask = array("i", bytes(4 * FEWEST)), FEWEST - 1

    def __len__(self) -> int:
        """The edges there are."""
        return len(self.keys) - 1

    def find(self, node: int, token: int) -> int:
        """The number of an edge, 0 where there is none."""
        keys, slots, mask = self.keys, self.slots, self.mask
        key = node << BITS | token
        slot = key * GOLDEN >> 32 & mask
        while number := slots[slot]:
            if keys[number] == key:
                return number
            slot = slot + 1 & mask
        return 0

    def add(self, node: int, token: int) -> int:
        """The number of an edge, which is made where there is none. The search of `find`, which keeps its slot."""
        keys, slots, mask = self.keys, self.slots, self.mask
        key = node << BITS | token
        slot = key * GOLDEN >> 32 & mask
        while number := slots[slot]:
            if keys[number] == key:
                return number
            slot = slot + 1 & mask
        slots[slot] = number = len(keys)
        keys.append(key)
        if 2 * number > mask:
            self._enlarge()
        return number

    def reserve(self, more: int) -> None:
        """Make slots for so many edges more."""
        while 2 * (len(self.keys) + more) > self.mask:
            self._enlarge()

    def ends(self, number: int) -> tuple[int, int]:
        """(node, token) of an edge."""
        return self.keys[number] >> BITS, self.keys[number] & (1 << BITS) - 1

    def _enlarge(self) -> None:
        """Four times the slots. All keys at once: one of those that want a slot gets it, the others go on to their
        next. In numpy, which wakes no other thread while rounds wait (`fastspec.generation.constraint.allow_all`)."""
        self.slots = array("i", bytes(16 * len(self.slots)))
        self.mask = len(self.slots) - 1
        if len(self.keys) == 1:
            return
        slots = torch.frombuffer(self.slots, dtype=torch.int32).numpy()
        wanted = (torch.frombuffer(self.keys, dtype=torch.int64).numpy()[1:] * WRAPPED >> 32) & self.mask
        left = torch.frombuffer(array("i", range(1, len(self.keys))), dtype=torch.int32).numpy()
        while left.size:
            free = slots[wanted] == 0
            slots[wanted[free]] = left[free]
            lost = slots[wanted] != left
            left, wanted = left[lost], wanted[lost] + 1 & self.mask


class Tallies:
    """Tokens that were counted after each context; contexts are numbered 0, 1, ... as `append` made them.

    A tally is a chain of entries, the last counted token in front: `heads` has the first entry of a context, `later`
    the next one of an entry, -1 where there is none.
    """

    __slots__ = ("counts", "heads", "later", "tokens")

    def __init__(self) -> None:
        self.heads, self.tokens, self.counts, self.later = array("i"), array("i"), array("i"), array("i")

    def __len__(self) -> int:
        """The contexts there are, those with nothing counted included."""
        return len(self.heads)

    def append(self) -> int:
        """A new context after which nothing was counted -> its number."""
        self.heads.append(-1)
        return len(self.heads) - 1

    def put(self, context: int, entries: Iterable[tuple[int, int]]) -> None:
        """Give a context that has none these entries (token, count), the token counted last at the end."""
        for token, times in entries:
            self.tokens.append(token)
            self.counts.append(times)
            self.later.append(self.heads[context])
            self.heads[context] = len(self.later) - 1

    def count(self, context: int, counted: Sequence[int]) -> None:
        """Count tokens, one after the other. A new one in a full tally replaces the least counted, oldest one."""
        heads, tokens, counts, later = self.heads, self.tokens, self.counts, self.later
        for token in counted:
            first = at = heads[context]
            if first >= 0 and tokens[first] == token:
                counts[first] += 1
                continue
            before, size = -1, 0
            while at >= 0 and tokens[at] != token:
                before, at, size = at, later[at], size + 1
            if at < 0 and size < WIDTH:
                tokens.append(token)
                counts.append(1)
                later.append(first)
                heads[context] = len(later) - 1  # of a whole entry, whenever an interrupt comes
                continue
            if at < 0:
                before, at = self._least(first)
                tokens[at], counts[at] = token, 0
            counts[at] += 1
            if before >= 0:
                later[before], later[at], heads[context] = later[at], first, at

    def largest(self) -> int:
        """The largest token that was counted, -1 where none was."""
        return int(torch.frombuffer(self.tokens, dtype=torch.int32).max()) if self.tokens else -1

    def entries(self, context: int) -> list[tuple[int, int]]:
        """(token, count), the token counted last in front."""
        tokens, counts, later = self.tokens, self.counts, self.later
        found, at = [], self.heads[context]
        while at >= 0:
            found.append((tokens[at], counts[at]))
            at = later[at]
        return found

    def ranked(self, context: int) -> list[tuple[int, int]]:
        """(token, count) by falling count; among equals the one counted last comes first."""
        found = self.entries(context)
        if len(found) > 1:
            found.sort(key=_times, reverse=True)  # reversed, a sort keeps the order of equals too
        return found

    def _least(self, first: int) -> tuple[int, int]:
        """(the entry before it, the last entry with the least count) of the chain from first."""
        counts, later = self.counts, self.later
        ahead, least, before, at = -1, first, first, later[first]
        while at >= 0:
            if counts[at] <= counts[least]:
                ahead, least = before, at
            before, at = at, later[at]
        return ahead, least


VERSION = 1
Entry = tuple[int, int]
"""A token, and how often it was counted."""
TALLIES = {"sizes": 1, "tokens": 1, "counts": 1}


class Damaged(Exception):
    """A file contradicts itself; becomes a CheckpointError that names the file."""


def packed(values: Sequence[int | Sequence[int]]) -> Tensor:
    """Whole numbers, or rows of them, as a file holds them."""
    return torch.tensor(values, dtype=torch.long, device="cpu")


def pack_tallies(tallies: Iterable[list[Entry]]) -> dict[str, Tensor]:
    """Tallies as three flat lists: the size of each, then tokens and counts of all, in their order."""
    kept = list(tallies)
    return {
        "sizes": packed([len(tally) for tally in kept]),
        "tokens": packed([token for tally in kept for token, _ in tally]),
        "counts": packed([times for tally in kept for _, times in tally]),
    }


def unpack_tallies(tensors: dict[str, Tensor], expected: int) -> list[list[Entry]]:
    """The inverse of `pack_tallies`, for `expected` tallies. Raises Damaged."""
    sizes, tokens, counts = (tensors[name].tolist() for name in TALLIES)
    if len(sizes) != expected or len(tokens) != len(counts) or sum(sizes) != len(tokens):
        raise Damaged(
            f"{len(sizes)} tallies of {sum(sizes)}, {expected} contexts, {len(tokens)} tokens, {len(counts)} counts"
        )
    if min(sizes, default=0) < 0 or max(sizes, default=0) > WIDTH:
        raise Damaged(f"a tally with more than {WIDTH} continuations")
    if not all(0 <= token < 1 << BITS for token in tokens) or not all(0 < times <= MOST for times in counts):
        raise Damaged(f"a token that is negative or has more than {BITS} bits, or a count below 1 or above {MOST}")
    pairs = iter(zip(tokens, counts, strict=True))
    tallies = [list(islice(pairs, size)) for size in sizes]
    if any(len({token for token, _ in tally}) != len(tally) for tally in tallies):
        raise Damaged("a continuation occurs twice")
    return tallies


def write_storage(path: str | Path, kind: str, options: dict[str, int], tensors: dict[str, Tensor]) -> None:
    """Write a storage's tensors. Raises CheckpointError when the file cannot be written."""
    header = {"format": "fastspec-storage", "version": str(VERSION), "kind": kind}
    header |= {name: str(value) for name, value in options.items()}
    try:
        save_file(tensors, str(path), metadata=header)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: the storage could not be written: {error}") from error


@contextmanager
def read_storage(
    path: str | Path, kind: str, options: tuple[str, ...], shapes: dict[str, int]
) -> Iterator[tuple[dict[str, int], dict[str, Tensor]]]:
    """(options, tensors) of a file, for a block that checks and takes them; `shapes` gives a tensor's dimensions. All
    errors, the block's too, become a CheckpointError that names the file."""
    try:
        with safe_open(str(path), framework="pt") as file:
            header = file.metadata() or {}
            _check_header(header, kind)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        values = {name: int(header[name]) for name in options}
        for name, dims in (shapes | TALLIES).items():
            if tensors[name].dim() != dims or tensors[name].dtype != torch.long:
                raise Damaged(f"{name} has shape {tuple(tensors[name].shape)} and dtype {tensors[name].dtype}")
        yield values, tensors
    except (OSError, SafetensorError, Damaged, Unsupported, KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: no readable storage of kind {kind!r}: {error}") from error


def _check_header(header: dict[str, str], kind: str) -> None:
    if header.get("format") != "fastspec-storage":
        raise Damaged("it was not written by a fastspec storage")
    if header.get("version") != str(VERSION):
        raise Damaged(f"its version is {header.get('version')!r}; this fastspec reads version {VERSION}")
    if header.get("kind") != kind:
        raise Damaged(f"it holds a storage of kind {header.get('kind')!r}: load it with that class")
