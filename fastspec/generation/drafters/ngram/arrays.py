"""Flat arrays that the storages of `nasd` are made of: what leads where, and what was counted where.

A context takes some 16 bytes and the half-filled slots, and 12 for each token counted after it; a dictionary alone takes 184 and more.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from operator import itemgetter

import torch

WIDTH = 8
"""Continuations kept per context: a context such as a comma would else collect thousands, and drafting ranks them all."""
BITS = 24
"""Bits of a token; vocabularies end far below 2**24."""
MOST = 2**30
"""Counts that a file may bring: in 32 bits there is room for as many more."""
MIX = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio: multiplied by it, neighbouring keys come to lie far apart (Knuth, volume 3, 6.4)."""
WRAPPED = MIX - (1 << 64)
"""The same in torch's signed 64 bits."""

_times = itemgetter(1)


class Edges:
    """(node, token) -> the number of that edge: 1, 2, ... in the order they were added. Numbers of nodes are the caller's.

    `keys` holds node << BITS | token by number, `slots` the numbers by hash with linear probing, 0 where a slot is free; at most half
    of the slots are taken.
    """

    __slots__ = ("keys", "mask", "slots")

    def __init__(self) -> None:
        self.keys = array("q", [0])  # none has number 0
        self.slots, self.mask = array("i", bytes(4 * 64)), 63

    def __len__(self) -> int:
        """The edges there are."""
        return len(self.keys) - 1

    def find(self, node: int, token: int) -> int:
        """The number of an edge, 0 where there is none."""
        keys, slots, mask = self.keys, self.slots, self.mask
        key = node << BITS | token
        slot = key * MIX >> 32 & mask
        while number := slots[slot]:
            if keys[number] == key:
                return number
            slot = slot + 1 & mask
        return 0

    def add(self, node: int, token: int) -> int:
        """The number of an edge, which is made where there is none. The search is that of `find`, written out: the slot is wanted too."""
        keys, slots, mask = self.keys, self.slots, self.mask
        key = node << BITS | token
        slot = key * MIX >> 32 & mask
        while number := slots[slot]:
            if keys[number] == key:
                return number
            slot = slot + 1 & mask
        number = slots[slot] = len(keys)
        keys.append(key)
        if 2 * number > mask:
            self._enlarge()
        return number

    def ends(self, number: int) -> tuple[int, int]:
        """(node, token) of an edge."""
        return self.keys[number] >> BITS, self.keys[number] & (1 << BITS) - 1

    def _enlarge(self) -> None:
        """Twice the slots. All keys at once: one of those that want a slot gets it, the others go on to their next."""
        self.slots = array("i", bytes(8 * len(self.slots)))
        self.mask = len(self.slots) - 1
        slots = torch.frombuffer(self.slots, dtype=torch.int32)
        wanted = (torch.frombuffer(self.keys, dtype=torch.int64)[1:] * WRAPPED >> 32) & self.mask
        left = torch.arange(1, len(self.keys), dtype=torch.int32, device="cpu")
        while left.numel():
            free = slots[wanted] == 0
            slots[wanted[free]] = left[free]
            lost = slots[wanted] != left
            left, wanted = left[lost], wanted[lost] + 1 & self.mask


class Tallies:
    """Tokens that were counted after each context; contexts are numbered 0, 1, ... as `append` made them.

    A tally is a chain of entries, the token that was counted last in front: `heads` has the first entry of a context, `later` the next
    one of an entry, -1 where there is none.
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
            self.heads[context] = self._entry(token, times, self.heads[context])

    def count(self, context: int, counted: Sequence[int]) -> None:
        """Count tokens, one after the other. A new one in a full tally takes the place of the least counted, the oldest among equals."""
        heads, tokens, counts, later = self.heads, self.tokens, self.counts, self.later
        for token in counted:
            first = at = heads[context]
            before, size = -1, 0
            while at >= 0 and tokens[at] != token:
                before, at, size = at, later[at], size + 1
            if at < 0 and size < WIDTH:
                heads[context] = self._entry(token, 1, first)
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

    def _entry(self, token: int, times: int, later: int) -> int:
        self.tokens.append(token)
        self.counts.append(times)
        self.later.append(later)
        return len(self.tokens) - 1

    def _least(self, first: int) -> tuple[int, int]:
        """(the entry before it, the last entry with the least count) of the chain from first."""
        counts, later = self.counts, self.later
        ahead, least, before, at = -1, first, first, later[first]
        while at >= 0:
            if counts[at] <= counts[least]:
                ahead, least = before, at
            before, at = at, later[at]
        return ahead, least
