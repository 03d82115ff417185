"""What followed what: storages of n-grams and of suffixes, from which drafts are read without a model.

NASD (github.com/romsto/Speculative-Decoding, n-gram assisted speculative decoding) counts, for every context, the tokens that
followed it, and the target's likeliest tokens after it besides; ANPD (Ou et al., NAACL 2024 industry track) is the same without
the latter. A storage is read and written on the host, a token at a time, through cursors: a cursor stands behind a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from fastspec.errors import Unsupported
from fastspec.generation.storage_file import Columns, Damaged, pack_tallies, read_storage, unpack_tallies, write_storage

WIDTH = 8
"""Continuations kept per context: a context such as a comma would else collect thousands, and drafting ranks them all."""
BITS = 24
"""Bits of a token in a packed context; vocabularies end far below 2**24 - 1."""

Tally = dict[int, int]
"""token -> count, the token that was counted last at the end."""


def count(tally: Tally, token: int, weight: int = 1) -> None:
    """Count a continuation. A new one in a full tally takes the place of the least counted, the oldest among equals."""
    before = tally.pop(token, 0)
    if not before and len(tally) == WIDTH:
        del tally[min(tally, key=tally.__getitem__)]  # the first of the least: the oldest
    tally[token] = before + weight


def ranked(tally: Tally) -> list[tuple[int, int]]:
    """(token, count) by falling count; among equals the one counted last comes first."""
    if len(tally) == 1:
        return list(tally.items())
    return sorted(tally.items(), key=lambda item: item[1])[::-1]


class Storage(Protocol):
    """What `Nasd(storage=...)` takes. Cursors are values: a storage may hold any number of texts at once.

    Not to be shared between threads: calls that run at the same time need one each.
    """

    def start(self) -> Any:
        """The cursor of an empty text."""

    def feed(self, cursor: Any, token: int, fillers: Sequence[int] = ()) -> Any:
        """Count token, and each of the fillers, after the text at the cursor -> the cursor behind token. The last of the
        fillers is taken to be the likeliest."""

    def step(self, cursor: Any, token: int) -> Any:
        """The cursor behind token, nothing being counted: what a draft does."""

    def look(self, cursor: Any) -> tuple[int, list[tuple[int, int]]]:
        """The length of the longest known context at the cursor and its continuations (token, count), the best first; (0, [])
        where none is known."""

    def reset(self) -> None:
        """Forget everything. Cursors made before must not be used again."""


class NgramStorage:
    """Counts of what followed each context of 1 to n - 1 tokens; the longest known context answers.

    With `back_off=False` contexts of n - 1 tokens alone are kept ("one level"). A context is a packed integer, its last token in
    the lowest bits, and the cursor is the packed last n - 1 tokens. Keeps the `WIDTH` best continuations of a context.

        storage = fastspec.NgramStorage(n=4)
        model.generate(**inputs, assistant=fastspec.Nasd(storage=storage))     # learns, and drafts from all earlier calls
        storage.save("words.safetensors"); storage = fastspec.NgramStorage.load("words.safetensors")
    """

    kind = "ngram"

    def __init__(self, n: int = 4, *, back_off: bool = True) -> None:
        if not isinstance(n, int) or isinstance(n, bool) or not 2 <= n <= 64:
            raise Unsupported(f"NgramStorage: n must be a whole number from 2 to 64, not {n!r}: a context has n - 1 tokens")
        self.n, self.back_off = n, back_off
        # (length, mask) of each context in a cursor, the longest first
        self._masks = [(k, (1 << BITS * k) - 1) for k in range(n - 1, 0 if back_off else n - 2, -1)]
        self._all = (1 << BITS * (n - 1)) - 1
        self.tallies: dict[int, Tally] = {}

    def __repr__(self) -> str:
        return f"NgramStorage(n={self.n}, back_off={self.back_off}): {len(self.tallies)} contexts"

    def start(self) -> int:
        """The cursor of an empty text."""
        return 0

    def step(self, cursor: int, token: int) -> int:
        """The cursor behind token."""
        return (cursor << BITS | token + 1) & self._all  # token + 1: a context of k tokens differs from all shorter ones

    def feed(self, cursor: int, token: int, fillers: Sequence[int] = ()) -> int:
        """Count token and fillers after every context at the cursor; at a text's start there are fewer of them."""
        for length, mask in self._masks:
            if cursor >> BITS * (length - 1):
                tally = self.tallies.setdefault(cursor & mask, {})
                for filler in fillers:
                    count(tally, filler)
                count(tally, token)
        return self.step(cursor, token)

    def look(self, cursor: int) -> tuple[int, list[tuple[int, int]]]:
        """The longest known context's continuations."""
        for length, mask in self._masks:
            tally = self.tallies.get(cursor & mask)
            if tally is not None and cursor >> BITS * (length - 1):
                return length, ranked(tally)
        return 0, []

    def reset(self) -> None:
        """Forget everything."""
        self.tallies.clear()

    def save(self, path: str | Path) -> None:
        """Write to a safetensors file."""
        contexts = [_unpack(context, self.n - 1) for context in self.tallies]
        tensors: Columns = {"contexts": (contexts, self.n - 1), **pack_tallies(self.tallies.values())}
        write_storage(path, self.kind, {"n": self.n, "back_off": int(self.back_off)}, tensors)

    @classmethod
    def load(cls, path: str | Path) -> NgramStorage:
        """Read what `save` wrote. Raises CheckpointError for a file that is missing, damaged, of another kind or a newer version."""
        with read_storage(path, cls.kind, ("n", "back_off"), {"contexts": 2}) as (options, tensors):
            storage = cls(options["n"], back_off=bool(options["back_off"]))
            contexts, lengths = tensors["contexts"].tolist(), {length for length, _ in storage._masks}
            tallies = unpack_tallies(tensors, len(contexts), WIDTH)
            for context, tally in zip(contexts, tallies, strict=True):
                tokens = [token for token in context if token >= 0]
                padded = [-1] * (storage.n - 1 - len(tokens)) + tokens
                if context != padded or len(tokens) not in lengths or max(tokens) >= (1 << BITS) - 1 or not tally:
                    raise Damaged(f"{context} with continuations {tally} is no context of n={storage.n}")
                packed = storage.start()
                for token in tokens:
                    packed = storage.step(packed, token)
                storage.tallies[packed] = tally
            if len(storage.tallies) != len(contexts):
                raise Damaged("a context occurs twice")
        return storage


def _unpack(context: int, width: int) -> list[int]:
    """A packed context as tokens, filled up with -1 on the left."""
    return [(context >> BITS * (width - 1 - i) & (1 << BITS) - 1) - 1 for i in range(width)]
