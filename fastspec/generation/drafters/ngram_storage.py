"""Storages of n-grams: counts of the tokens that followed a context, by context or in a suffix automaton.

A storage is read and written on the host, a token at a time, through cursors: a cursor stands after a text.

The automaton (Blumer et al., 1985, built online, for several texts) has one state per set of strings that end at the
same places, so it holds every substring in at most twice as many states as tokens. SuffixDecoding (arXiv 2411.04975)
drafts from matches of any length with a suffix tree.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fastspec.errors import Unsupported, check_whole
from fastspec.forks import at_fork
from fastspec.generation.drafters.ngram_arrays import (
    BITS,
    MOST,
    WIDTH,
    Damaged,
    Edges,
    Entry,
    Tallies,
    pack_tallies,
    packed,
    read_storage,
    unpack_tallies,
    write_storage,
)

Context = tuple[int, ...]
"""The last tokens of a text, the last one in front."""
AT_ONCE = 1024
"""Tokens that are counted by one call of a counter, for which arrays get room."""


class Growing:
    """Turn of the thread that counts or looks up in C++: several may share a storage, whose arrays lie elsewhere once
    they have grown."""

    def __init__(self) -> None:
        self.forked()
        at_fork(self)

    def forked(self) -> None:
        self.lock = threading.Lock()


GROWING = Growing()


def _address(values: array[Any]) -> int:
    return values.buffer_info()[0]


class NgramStorage:
    """Counts of what followed each context of 1 to n - 1 tokens; the longest known context answers.

    With `back_off=False` contexts of n - 1 tokens alone are kept ("one level"). Keeps the `WIDTH` best continuations of
    a context. The contexts are the nodes of a trie that is entered with the last token: node 0 is the empty one, and
    every other has the number of the edge to it.

        storage = fastspec.NgramStorage(n=4)
        model.generate(**inputs, assistant=fastspec.Nasd(storage=storage))  # learns, and drafts from all earlier calls
        storage.save("words.safetensors"); storage = fastspec.NgramStorage.load("words.safetensors")
    """

    kind = "ngram"

    def __init__(self, n: int = 4, *, back_off: bool = True) -> None:
        if not isinstance(n, int) or isinstance(n, bool) or not 2 <= n <= 64:
            raise Unsupported(
                f"NgramStorage: n must be a whole number from 2 to 64, not {n!r}: a context has n - 1 tokens"
            )
        self.n, self.back_off = n, back_off
        self._least = 1 if back_off else n - 1
        self.reset()

    def __repr__(self) -> str:
        contexts = sum(head >= 0 for head in self.tallies.heads)
        return f"NgramStorage(n={self.n}, back_off={self.back_off}): {contexts} contexts"

    def start(self) -> Context:
        """The cursor of an empty text."""
        return ()

    def step(self, cursor: Context, token: int) -> Context:
        """The cursor after token."""
        return (token, *cursor[: self.n - 2])

    def feed(self, cursor: Context, token: int, fillers: Sequence[int] = ()) -> Context:
        """Count token and fillers after every context at the cursor; at a text's start there are fewer of them."""
        if len(cursor) >= self._least:
            add, count, heads = self.edges.add, self.tallies.count, self.tallies.heads
            node, counted = 0, (*fillers, token)
            with GROWING.lock:
                for length, known in enumerate(cursor, 1):
                    node = add(node, known)
                    while node >= len(heads):  # an interrupt may have come before the last one's
                        heads.append(-1)
                    if length >= self._least:
                        count(node, counted)
        return (token, *cursor[: self.n - 2])

    def feed_all(
        self, cursor: Context, steps: Sequence[tuple[int, Sequence[int]]], counter: Callable[..., None]
    ) -> Context:
        """`feed` of each (token, fillers), by `counter`, the function of fastspec/kernels/native/ngrams.cpp."""
        edges, tallies, most = self.edges, self.tallies, self.n - 1
        context, known = array("i", cursor) + array("i", bytes(4 * (most - len(cursor)))), len(cursor)
        for start in range(0, len(steps), AT_ONCE):
            some = steps[start : start + AT_ONCE]
            counted = array("i", [token for last, fillers in some for token in (*fillers, last)])
            sizes = array("i", [1 + len(fillers) for _, fillers in some])
            grown = edges.keys, tallies.heads, tallies.tokens, tallies.counts, tallies.later
            with GROWING.lock:
                tallies.heads.extend([-1] * (len(edges.keys) - len(tallies.heads)))  # as in `feed`
                used = array("q", [len(edges.keys), len(tallies.heads), len(tallies.later)])
                try:
                    edges.reserve(most * len(some))
                    for each, room in zip(grown, (len(some), len(some), *[len(counted)] * 3), strict=True):
                        each.frombytes(bytes(each.itemsize * most * room))
                    held = (each.buffer_info()[0] for each in (edges.keys, edges.slots))
                    tables = (each.buffer_info()[0] for each in grown[1:])
                    counter(
                        counted.buffer_info()[0],
                        sizes.buffer_info()[0],
                        len(some),
                        context.buffer_info()[0],
                        known,
                        most,
                        self._least,
                        *held,
                        edges.mask,
                        *tables,
                        WIDTH,
                        used.buffer_info()[0],
                    )
                finally:  # of an interrupt too, which comes behind the call
                    for each, end in zip(grown, (*used[:2], *[used[2]] * 3), strict=True):
                        del each[end:]
            known = min(most, known + len(some))
        return tuple(context[:known])

    def look(self, cursor: Context) -> tuple[int, list[tuple[int, int]]]:
        """The longest known context's continuations."""
        find, node, length = self.edges.find, 0, 0
        for known in cursor:
            deeper = find(node, known)
            if not deeper:
                break
            node, length = deeper, length + 1
        return (length, self.tallies.ranked(node)) if length >= self._least else (0, [])

    def tree(
        self,
        grower: Callable[..., int],
        cursor: Context,
        root: int,
        gamma: int,
        nodes: int,
        ends: Collection[int],
        guess: bool,
        least: float,
        doubts: Sequence[float],
    ) -> tuple[list[int], list[int], list[float]]:
        """Tokens, parents and chances of the tree that `grow` of nasd.py makes of `look` and `step`, by `grower`, the
        function of fastspec/kernels/native/ngrams.cpp."""
        edges, tallies = self.edges, self.tallies
        context, over, doubted = array("i", cursor), array("q", ends), array("d", doubts)
        tokens, parents = (array("i", bytes(4 * nodes)) for _ in range(2))
        chances = array("d", bytes(8 * nodes))
        with GROWING.lock:  # arrays move where they grow
            count = grower(
                _address(context),
                len(context),
                self.n - 1,
                self._least,
                root,
                _address(edges.keys),
                _address(edges.slots),
                edges.mask,
                _address(tallies.heads),
                _address(tallies.tokens),
                _address(tallies.counts),
                _address(tallies.later),
                len(tallies),
                gamma,
                nodes,
                _address(over),
                len(over),
                guess,
                least,
                _address(doubted),
                _address(tokens),
                _address(parents),
                _address(chances),
            )
        return tokens[:count].tolist(), parents[:count].tolist(), chances[:count].tolist()

    def reset(self) -> None:
        """Forget everything. Cursors made before must not be used again."""
        self.edges, self.tallies = Edges(), Tallies()
        self.tallies.append()

    def save(self, path: str | Path) -> None:
        """Write to a safetensors file."""
        with GROWING.lock:
            kept = [node for node, head in enumerate(self.tallies.heads) if head >= 0]
            contexts = packed([self._tokens(node) for node in kept]).view(-1, self.n - 1)
            tallies = pack_tallies(self.tallies.entries(node)[::-1] for node in kept)
        options = {"n": self.n, "back_off": int(self.back_off)}
        write_storage(path, self.kind, options, {"contexts": contexts, **tallies})

    @classmethod
    def load(cls, path: str | Path) -> NgramStorage:
        """Read what `save` wrote. Raises CheckpointError for a missing, damaged, other or newer file."""
        with read_storage(path, cls.kind, ("n", "back_off"), {"contexts": 2}) as (options, tensors):
            storage = cls(options["n"], back_off=bool(options["back_off"]))
            contexts = tensors["contexts"].tolist()
            for context, tally in zip(contexts, unpack_tallies(tensors, len(contexts)), strict=True):
                storage._take(context, tally)
            if storage.back_off and -1 in storage.tallies.heads[1:]:
                raise Damaged("a context is there without a shorter one that it ends with")
        return storage

    def _take(self, context: list[int], tally: list[Entry]) -> None:
        """Add a context of a file, its tokens filled up with -1 on the left. Raises Damaged."""
        tokens = [token for token in context if token >= 0]
        padded = [-1] * (self.n - 1 - len(tokens)) + tokens
        if context != padded or len(tokens) < self._least or max(tokens) >= 1 << BITS or not tally:
            raise Damaged(f"{context} with continuations {tally} is no context of n={self.n}")
        node = 0
        for token in reversed(tokens):
            node = self._node(node, token)
        if self.tallies.heads[node] >= 0:
            raise Damaged(f"the context {context} occurs twice")
        self.tallies.put(node, tally)

    def _node(self, node: int, token: int) -> int:
        """The context of one token more, which is made where there is none."""
        longer = self.edges.add(node, token)
        return self.tallies.append() if longer == len(self.tallies) else longer

    def _tokens(self, node: int) -> list[int]:
        """A context's tokens, the last one at the end, filled up with -1 on the left."""
        tokens = []
        while node:
            node, token = self.edges.ends(node)
            tokens.append(token)
        return [-1] * (self.n - 1 - len(tokens)) + tokens


class SuffixCursor(NamedTuple):
    """Place of a text: `state` holds its longest known suffix of at most `max_match` tokens, of `length` tokens; `last`
    is the state of the whole text, -1 after a draft."""

    state: int
    length: int
    last: int


class SuffixStorage:
    """Counts of what followed each text of `min_match` to `max_match` tokens, wherever it was seen; the longest match
    answers.

    Held per state: the length of its longest string, its suffix link (the state of its longest suffix that ends at more
    places), its transitions, and the tally of what followed. State 0 is the empty text. A transition is an edge:
    `targets` has the state that it leads to, `newest` the last one of a state, and `older` the one that the same state
    got before it, 0 where there is none.
    """

    kind = "suffix"

    def __init__(self, min_match: int = 1, max_match: int = 32) -> None:
        check_whole("SuffixStorage", 1, min_match=min_match, max_match=max_match)
        if max_match < min_match:
            raise Unsupported(f"SuffixStorage: max_match={max_match} is less than min_match={min_match}")
        self.min_match, self.max_match = min_match, max_match
        self.reset()

    def __repr__(self) -> str:
        return f"SuffixStorage(min_match={self.min_match}, max_match={self.max_match}): {len(self.lengths)} states"

    def reset(self) -> None:
        """Forget everything. Cursors made before must not be used again."""
        self.lengths, self.links, self.tallies = array("i"), array("i"), Tallies()
        self.edges, self.targets, self.newest, self.older = Edges(), array("i", [0]), array("i"), array("i", [0])
        self._state(0, -1)

    def start(self) -> SuffixCursor:
        """The cursor of an empty text."""
        return SuffixCursor(0, 0, 0)

    def feed(self, cursor: SuffixCursor, token: int, fillers: Sequence[int] = ()) -> SuffixCursor:
        """Count token and fillers after every suffix of the text at the cursor, and append token to the text."""
        counted = (*fillers, token)
        for state, _ in self._suffixes(cursor):
            self.tallies.count(state, counted)
        last = self._append(cursor.last, token)
        return self.step(cursor, token)._replace(last=last)

    def step(self, cursor: SuffixCursor, token: int) -> SuffixCursor:
        """The cursor after token: the longest suffix of text and token that was seen."""
        state, length = self._place(cursor)
        while not (edge := self.edges.find(state, token)):
            if state == 0:
                return SuffixCursor(0, 0, -1)
            state = self.links[state]
            length = self.lengths[state]
        state, length = self.targets[edge], min(length + 1, self.max_match)
        return SuffixCursor(*self._place(SuffixCursor(state, length, -1)), -1)

    def look(self, cursor: SuffixCursor) -> tuple[int, list[tuple[int, int]]]:
        """The continuations of the longest match that has any."""
        for state, length in self._suffixes(cursor):
            if self.tallies.heads[state] >= 0:
                return length, self.tallies.ranked(state)
        return 0, []

    def _place(self, cursor: SuffixCursor) -> tuple[int, int]:
        """State and length of a cursor's match, whose state may have been split since."""
        state, length = cursor.state, cursor.length
        while state and self.lengths[self.links[state]] >= length:
            state = self.links[state]
        return state, length

    def _suffixes(self, cursor: SuffixCursor) -> Iterator[tuple[int, int]]:
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
        """The state of the strings of `state` with token: the one that the edge leads to, or one split from it."""
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
        states = packed(list(zip(self.lengths, self.links, strict=True))).view(-1, 2)
        tensors = {"states": states, "edges": packed(edges).view(-1, 3), **pack_tallies(tallies)}
        write_storage(path, self.kind, {"min_match": self.min_match, "max_match": self.max_match}, tensors)

    @classmethod
    def load(cls, path: str | Path) -> SuffixStorage:
        """Read what `save` wrote. Raises CheckpointError for a missing, damaged, other or newer file."""
        with read_storage(path, cls.kind, ("min_match", "max_match"), {"states": 2, "edges": 2}) as (options, tensors):
            storage = cls(options["min_match"], options["max_match"])
            states, edges = tensors["states"].tolist(), tensors["edges"].tolist()
            if not states or states[0] != [0, -1]:
                raise Damaged("state 0 is not the empty text")
            lengths = [length for length, _ in states]
            for state, (length, link) in enumerate(states[1:], 1):
                if not 0 <= link < len(states) or not lengths[link] < length < MOST:  # every chain of links ends
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
