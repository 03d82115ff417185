"""Ends of an answer: end tokens of generation configurations, and stopping criteria of stop strings."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import STOP_STRING_EMBEDDING_CACHE, StopStringCriteria


def listed(tokens: Any) -> list[int]:
    """Tokens that a setting names, as a number, a list or a tensor; none for None."""
    return [] if tokens is None else torch.as_tensor(tokens, device="cpu").flatten().tolist()


def end_tokens(*configs: Any) -> frozenset[int]:
    """Those of the first configuration that names any."""
    return frozenset(listed(next((each.eos_token_id for each in configs if each.eos_token_id is not None), None)))


KEPT = 32
"""Sets of stop strings that are kept for a tokenizer: a number for each token of its vocabulary, and a small table."""


class StopStrings(StopStringCriteria):
    """Criterion of stop strings whose table has a row for each kind of token, and not for each token: nearly all are
    in no string, and only their lengths differ. Transformers' own takes 75 MB for a string of 190 times one letter and
    49,000 tokens, and a process holds its interpreter for a second to send it to another."""

    embedding_vec: Tensor

    def __init__(self, tokenizer: Any, strings: list[str]) -> None:
        super().__init__(tokenizer, strings)
        STOP_STRING_EMBEDDING_CACHE.popitem()  # the newest, this whole table
        self.embedding_vec, self.rows = self.embedding_vec.unique(dim=0, return_inverse=True)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """True for each text whose last token ends one of the strings."""
        self.rows = self.rows.to(input_ids.device)
        ids = input_ids[:, -self.maximum_token_len :].clamp(max=len(self.rows) - 1)  # the last is for any other
        found: Tensor = super().__call__(self.rows[ids], scores, **kwargs)
        return found


_made: WeakKeyDictionary[Any, OrderedDict[tuple[int, tuple[str, ...]], StopStrings]] = WeakKeyDictionary()
_lock = threading.Lock()


def stop_criterion(tokenizer: Any, strings: str | list[str] | tuple[str, ...]) -> StopStrings:
    """The criterion that ends an answer in which one of the strings has appeared; it keeps nothing of an answer.

    To make it takes 0.2 seconds for a string of one character and 49,000 tokens. Raises ValueError for a string that no
    tokens of the tokenizer make up.
    """
    key = _key(tokenizer, strings)
    with _lock:
        known = _made.setdefault(tokenizer, OrderedDict())
        if key in known:
            known.move_to_end(key)
            return known[key]
    made = StopStrings(tokenizer, list(key[1]))
    keep_criterion(tokenizer, strings, made)
    return made


def keep_criterion(tokenizer: Any, strings: str | list[str] | tuple[str, ...], made: StopStrings) -> None:
    """Let `stop_criterion` find what was made of the strings, here or in another process."""
    with _lock:
        known = _made.setdefault(tokenizer, OrderedDict())
        known[_key(tokenizer, strings)] = made
        known.move_to_end(_key(tokenizer, strings))
        while len(known) > KEPT:
            known.popitem(last=False)


def _key(tokenizer: Any, strings: str | list[str] | tuple[str, ...]) -> tuple[int, tuple[str, ...]]:
    return len(tokenizer), (strings,) if isinstance(strings, str) else tuple(strings)
