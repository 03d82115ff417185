"""Tokens of conversations, which come again and again with another turn behind them."""

from __future__ import annotations

import hashlib
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

SHORT = 2048
"""Characters of a text that is tokenized whole: that takes a millisecond."""
MOST = 1 << 22
"""Tokens that are kept."""
NESTED = 40
"""Groups in each other of a pattern."""


def _any_of(words: Iterable[str], depth: int = 0) -> str:
    """A pattern of words, the longest at a place, which begin alike in one branch: tokenizers may have thousands."""
    ends: dict[str, list[str]] = {}
    for word in words:
        ends.setdefault(word[:1], []).append(word[1:])
    if depth == NESTED:
        return f"(?:{'|'.join(map(re.escape, sorted(words, key=len, reverse=True)))})"
    may_end = ends.pop("", None) is not None
    branches = [re.escape(head) + _any_of(more, depth + 1) for head, more in ends.items()]
    return f"(?:{'|'.join(branches)})" + "?" * may_end if branches else ""


class TokenizedTexts:
    """Tokens of texts up to their last special token, by what they begin with.

    A tokenizer of the tokenizers library first divides a text at its added tokens, and what lies before one tells
    nothing of what comes after it: so the tokens of a text are those of its beginning, and of the rest from a special
    token on. Only tokens divide it that take no blanks beside them and are looked for in the text as it is.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.values() if getattr(tokenizer, "is_fast", False) else ()
        own = {str(each): each for each in added if not each.normalized and str(each)}
        self.pattern = re.compile(_any_of(own) if own else r"(?!)")
        """The tokens that a text is divided at first, the longest one at a place."""
        self.words = {name for name, each in own.items() if each.single_word}
        """Those that are tokens where no word goes on before and behind them."""
        spelt = bool(getattr(tokenizer, "split_special_tokens", False))
        self.divide = {
            name
            for name, each in own.items()
            if not (each.lstrip or each.rstrip or each.single_word or (each.special and spelt))
        }
        self.known: OrderedDict[bytes, array[int]] = OrderedDict()
        """Digest of a text's beginning -> its tokens; those that were used last come last."""
        self.count, self.lock = 0, threading.Lock()

    def ids(self, text: str) -> array[int]:
        """The tokens of a text, without what the tokenizer adds before and behind texts. Raises what it raises."""
        if len(text) < SHORT:
            return array("i", self._whole(text))
        begins = self._beginnings(text)
        known, at = self._longest(begins)
        found = known + array("i", self._whole(text[at:]))
        if begins and begins[-1][0] > at:
            self._keep(*begins[-1], found, text)
        return found

    def _whole(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    def _beginnings(self, text: str) -> list[tuple[int, bytes]]:
        """Places where a text may be divided, each with the digest of the text before it."""
        digest, last, found = hashlib.blake2b(digest_size=16), 0, list[tuple[int, bytes]]()
        hangs = 0  # the end of a word, which is a token by what follows it
        for match in self.pattern.finditer(text):
            if match[0] in self.divide and match.start() != hangs:
                digest.update(text[last : match.start()].encode("utf-8", "surrogatepass"))
                last = match.start()
                found.append((last, digest.digest()))
            if match[0] in self.words:
                hangs = match.end()
        return found

    def _longest(self, begins: list[tuple[int, bytes]]) -> tuple[array[int], int]:
        """The tokens of the longest beginning that is known, and where it ends."""
        with self.lock:
            for at, digest in reversed(begins):
                if (known := self.known.get(digest)) is not None:
                    self.known.move_to_end(digest)
                    return known, at
        return array("i"), 0

    def _keep(self, at: int, digest: bytes, ids: array[int], text: str) -> None:
        """Keep the tokens of a text up to the last place where it may be divided."""
        begin = ids[: len(ids) - len(self._whole(text[at:]))]
        with self.lock:
            if digest not in self.known:
                self.known[digest] = begin
                self.count += len(begin)
            while self.count > MOST:
                self.count -= len(self.known.popitem(last=False)[1])
