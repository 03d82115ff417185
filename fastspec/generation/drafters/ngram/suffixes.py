"""A suffix automaton over everything seen: the longest match anywhere, and how often each token followed it.

The automaton (Blumer et al., 1985, built online, for several texts) has one state per set of strings that end at the same places, so it
holds every substring in at most twice as many states as tokens. Drafting from matches of any length, with continuations by frequency,
is what SuffixDecoding (arXiv 2411.04975) does with a suffix tree.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from fastspec.errors import Unsupported
from fastspec.generation.drafters.ngram.arrays import BITS, MOST, Edges, Tallies
from fastspec.generation.drafters.ngram.file import Columns, Damaged, pack_tallies, read_storage, unpack_tallies, write_storage


class Cursor(NamedTuple):
    """Where a text stands: `state` holds its longest known suffix of at most `max_match` tokens, which has `length` tokens;
    `last` is the state of the whole text, -1 behind a draft."""

    state: int
    length: int
    last: int


class SuffixStorage:
    """Counts of what followed each text of `min_match` to `max_match` tokens, wherever it was seen; the longest match answers.

    Held per state: the length of its longest string, its suffix link (the state of its longest suffix that ends at more places), its
    transitions, and the tally of what followed. State 0 is the empty text. A transition is an edge: `targets` has the state that it leads
    to, `newest` the last one of a state, and `older` the one that the same state got before it, 0 where there is none.
    """

    kind = "suffix"

    def __init__(self, min_match: int = 1, max_match: int = 32) -> None:
        for name, value in {"min_match": min_match, "max_match": max_match}.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise Unsupported(f"SuffixStorage: {name} must be a whole number of at least 1, not {value!r}")
        if max_match < min_match:
            raise Unsupported(f"SuffixStorage: max_match={max_match} is less than min_match={min_match}")
        self.min_match, self.max_match = min_match, max_match
        self.reset()

    def __repr__(self) -> str:
        return f"SuffixStorage(min_match={self.min_match}, max_match={self.max_match}): {len(self.lengths)} states"

    def reset(self) -> None:
        """Forget everything."""
        self.lengths, self.links, self.tallies = array("i"), array("i"), Tallies()
        self.edges, self.targets, self.newest, self.older = Edges(), array("i", [0]), array("i"), array("i", [0])
        self._state(0, -1)

    def start(self) -> Cursor:
        """The cursor of an empty text."""
        return Cursor(0, 0, 0)

    def feed(self, cursor: Cursor, token: int, fillers: Sequence[int] = ()) -> Cursor:
        """Count token and fillers after every suffix of the text at the cursor, and append token to the text."""
        counted = (*fillers, token)
        for state, _ in self._suffixes(cursor):
            self.tallies.count(state, counted)
        last = self._append(cursor.last, token)
        return self.step(cursor, token)._replace(last=last)

    def step(self, cursor: Cursor, token: int) -> Cursor:
        """The cursor behind token: the longest suffix of text and token that was seen."""
        state, length = self._place(cursor)
        while not (edge := self.edges.find(state, token)):
            if state == 0:
                return Cursor(0, 0, -1)
            state = self.links[state]
            length = self.lengths[state]
        state, length = self.targets[edge], min(length + 1, self.max_match)
        return Cursor(*self._place(Cursor(state, length, -1)), -1)

    def look(self, cursor: Cursor) -> tuple[int, list[tuple[int, int]]]:
        """The continuations of the longest match that has any."""
        for state, length in self._suffixes(cursor):
            if self.tallies.heads[state] >= 0:
                return length, self.tallies.ranked(state)
        return 0, []

    def _place(self, cursor: Cursor) -> tuple[int, int]:
        """State and length of a cursor's match; the state may have been split since, its shorter strings now up the links."""
        state, length = cursor.state, cursor.length
        while state and self.lengths[self.links[state]] >= length:
            state = self.links[state]
        return state, length

    def _suffixes(self, cursor: Cursor) -> Iterator[tuple[int, int]]:
        """States of the suffixes of a cursor's match, the longest first, with the length of the longest in each."""
        state, length = self._place(cursor)
        while length >= self.min_match:
            yield state, length
            state = self.links[state]
            length = self.lengths[state]

    def _append(self, last: int, token: int) -> int:
        """Append token to the text whose state is `last` -> the state of the longer text."""
        edge = self.edges.find(last, token)
        if edge:  # another text has been here
            return self._reached(last, token, edge)
        new = self._state(self.lengths[last] + 1, 0)
        state = last
        while state >= 0 and not (edge := self.edges.find(state, token)):
            self._move(state, token, new)
            state = self.links[state]
        if state >= 0:
            self.links[new] = self._reached(state, token, edge)
        return new

    def _reached(self, state: int, token: int, edge: int) -> int:
        """The state of the strings of `state` with token, to which the edge leads: that state, or one that is split from it."""
        known = self.targets[edge]
        if self.lengths[known] == self.lengths[state] + 1:
            return known
        shorter = self._state(self.lengths[state] + 1, self.links[known])
        for taken in self._moves(known):
            self._move(shorter, self.edges.ends(taken)[1], self.targets[taken])
        self.tallies.put(shorter, reversed(self.tallies.entries(known)))
        self.links[known] = shorter
        while state >= 0 and (edge := self.edges.find(state, token)) and self.targets[edge] == known:
            self.targets[edge] = shorter
            state = self.links[state]
        return shorter

    def _state(self, length: int, link: int) -> int:
        """A new state without transitions and counts."""
        self.lengths.append(length)
        self.links.append(link)
        self.newest.append(0)
        return self.tallies.append()

    def _move(self, state: int, token: int, target: int) -> None:
        """Lead from a state by a token, by which nothing leads yet, to another."""
        edge = self.edges.add(state, token)
        self.targets.append(target)
        self.older.append(self.newest[state])
        self.newest[state] = edge

    def _moves(self, state: int) -> Iterator[int]:
        """The edges of a state."""
        edge = self.newest[state]
        while edge:
            yield edge
            edge = self.older[edge]

    def save(self, path: str | Path) -> None:
        """Write to a safetensors file."""
        edges = [[*self.edges.ends(edge), self.targets[edge]] for edge in range(1, len(self.targets))]
        tallies = (self.tallies.entries(state)[::-1] for state in range(len(self.tallies)))
        states = [list(pair) for pair in zip(self.lengths, self.links, strict=True)]
        tensors: Columns = {"states": (states, 2), "edges": (edges, 3), **pack_tallies(tallies)}
        write_storage(path, self.kind, {"min_match": self.min_match, "max_match": self.max_match}, tensors)

    @classmethod
    def load(cls, path: str | Path) -> SuffixStorage:
        """Read what `save` wrote. Raises CheckpointError for a file that is missing, damaged, of another kind or a newer version."""
        with read_storage(path, cls.kind, ("min_match", "max_match"), {"states": 2, "edges": 2}) as (options, tensors):
            storage = cls(options["min_match"], options["max_match"])
            states, edges = tensors["states"].tolist(), tensors["edges"].tolist()
            if not states or states[0] != [0, -1]:
                raise Damaged("state 0 is not the empty text")
            lengths = [length for length, _ in states]
            for state, (length, link) in enumerate(states[1:], 1):
                if not 0 <= link < len(states) or not lengths[link] < length < MOST:  # so that every chain of links ends
                    raise Damaged(f"state {state} of length {length} links to {link}")
                storage._state(length, link)
            for state, token, target in edges:
                led = 0 <= state < len(states) and 0 <= target < len(states) and lengths[state] < lengths[target]
                if not led or not 0 <= token < 1 << BITS or storage.edges.find(state, token):
                    raise Damaged(f"state {state} leads by token {token} to {target}")
                storage._move(state, token, target)
            for state, tally in enumerate(unpack_tallies(tensors, len(states))):
                storage.tallies.put(state, tally)
        return storage
