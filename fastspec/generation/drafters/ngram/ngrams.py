"""What followed what: storages of n-grams and of suffixes, from which drafts are read without a model.

NASD (github.com/romsto/Speculative-Decoding, n-gram assisted speculative decoding) counts, for every context, the tokens that
followed it, and the target's likeliest tokens after it besides; ANPD (Ou et al., NAACL 2024 industry track) is the same without
the latter. A storage is read and written on the host, a token at a time, through cursors: a cursor stands behind a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from fastspec.errors import Unsupported
from fastspec.generation.drafters.ngram.arrays import BITS, Edges, Tallies
from fastspec.generation.drafters.ngram.file import Columns, Damaged, Entry, pack_tallies, read_storage, unpack_tallies, write_storage

Context = tuple[int, ...]
"""The last tokens of a text, the last one in front."""


Cursor: TypeAlias = Any
"""A place behind a text, of whatever kind a storage makes of it."""


class Storage(Protocol):
    """What `Nasd(storage=...)` takes. Cursors are values: a storage may hold any number of texts at once.

    Not to be shared between threads: calls that run at the same time need one each.
    """

    def start(self) -> Cursor:
        """The cursor of an empty text."""

    def feed(self, cursor: Cursor, token: int, fillers: Sequence[int] = ()) -> Cursor:
        """Count token, and each of the fillers, after the text at the cursor -> the cursor behind token. The last of the
        fillers is taken to be the likeliest."""

    def step(self, cursor: Cursor, token: int) -> Cursor:
        """The cursor behind token, nothing being counted: what a draft does."""

    def look(self, cursor: Cursor) -> tuple[int, list[tuple[int, int]]]:
        """The length of the longest known context at the cursor and its continuations (token, count), the best first; (0, [])
        where none is known."""

    def reset(self) -> None:
        """Forget everything. Cursors made before must not be used again."""


class NgramStorage:
    """Counts of what followed each context of 1 to n - 1 tokens; the longest known context answers.

    With `back_off=False` contexts of n - 1 tokens alone are kept ("one level"). Keeps the `arrays.WIDTH` best continuations of a context.
    The contexts are the nodes of a trie that is entered with the last token, so that a context lies behind all that are shorter: node 0
    is the empty one, and every other has the number of the edge to it.

        storage = fastspec.NgramStorage(n=4)
        model.generate(**inputs, assistant=fastspec.Nasd(storage=storage))     # learns, and drafts from all earlier calls
        storage.save("words.safetensors"); storage = fastspec.NgramStorage.load("words.safetensors")
    """

    kind = "ngram"

    def __init__(self, n: int = 4, *, back_off: bool = True) -> None:
        if not isinstance(n, int) or isinstance(n, bool) or not 2 <= n <= 64:
            raise Unsupported(f"NgramStorage: n must be a whole number from 2 to 64, not {n!r}: a context has n - 1 tokens")
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
        """The cursor behind token."""
        return (token, *cursor[: self.n - 2])

    def feed(self, cursor: Context, token: int, fillers: Sequence[int] = ()) -> Context:
        """Count token and fillers after every context at the cursor; at a text's start there are fewer of them."""
        if len(cursor) >= self._least:
            tallies, node, counted = self.tallies, 0, (*fillers, token)
            for length, known in enumerate(cursor, 1):
                node = self._node(node, known)
                if length >= self._least:
                    tallies.count(node, counted)
        return (token, *cursor[: self.n - 2])

    def look(self, cursor: Context) -> tuple[int, list[tuple[int, int]]]:
        """The longest known context's continuations."""
        find, node, length = self.edges.find, 0, 0
        for known in cursor:
            deeper = find(node, known)
            if not deeper:
                break
            node, length = deeper, length + 1
        return (length, self.tallies.ranked(node)) if length >= self._least else (0, [])

    def reset(self) -> None:
        """Forget everything."""
        self.edges, self.tallies = Edges(), Tallies()
        self.tallies.append()

    def save(self, path: str | Path) -> None:
        """Write to a safetensors file."""
        kept = [node for node, head in enumerate(self.tallies.heads) if head >= 0]
        tensors: Columns = {
            "contexts": ([self._tokens(node) for node in kept], self.n - 1),
            **pack_tallies(self.tallies.entries(node)[::-1] for node in kept),
        }
        write_storage(path, self.kind, {"n": self.n, "back_off": int(self.back_off)}, tensors)

    @classmethod
    def load(cls, path: str | Path) -> NgramStorage:
        """Read what `save` wrote. Raises CheckpointError for a file that is missing, damaged, of another kind or a newer version."""
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
