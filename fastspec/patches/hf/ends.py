"""Ends of an answer: end tokens of generation configurations, and stopping criteria of stop strings."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers.generation.stopping_criteria import StopStringCriteria


def listed(tokens: Any) -> list[int]:
    """Tokens that a setting names, as a number, a list or a tensor; none for None."""
    return [] if tokens is None else torch.as_tensor(tokens, device="cpu").flatten().tolist()


def end_tokens(*configs: Any) -> frozenset[int]:
    """Those of the first configuration that names any."""
    return frozenset(listed(next((each.eos_token_id for each in configs if each.eos_token_id is not None), None)))


KEPT = 32
"""Sets of stop strings that are kept for a tokenizer: a table of some bytes for each token of its vocabulary."""

_made: WeakKeyDictionary[Any, OrderedDict[tuple[int, tuple[str, ...]], StopStringCriteria]] = WeakKeyDictionary()
_lock = threading.Lock()


def stop_criterion(tokenizer: Any, strings: str | list[str] | tuple[str, ...]) -> StopStringCriteria:
    """The criterion that ends an answer in which one of the strings has appeared; it keeps nothing of an answer.

    transformers keeps such tables too, up to 5.23 by the order of the vocabulary, which fast tokenizers shuffle: it
    made them again for each call, in 0.2 seconds for a string of one character and 49,000 tokens. Delete this when 5.24
    is the oldest version. Raises ValueError for a string that no tokens of the tokenizer make up.
    """
    key = _key(tokenizer, strings)
    with _lock:
        known = _made.setdefault(tokenizer, OrderedDict())
        if key in known:
            known.move_to_end(key)
            return known[key]
    made = StopStringCriteria(tokenizer, list(key[1]))
    keep_criterion(tokenizer, strings, made)
    return made


def keep_criterion(tokenizer: Any, strings: str | list[str] | tuple[str, ...], made: StopStringCriteria) -> None:
    """Let `stop_criterion` find what was made of the strings, here or in another process."""
    with _lock:
        known = _made.setdefault(tokenizer, OrderedDict())
        known[_key(tokenizer, strings)] = made
        known.move_to_end(_key(tokenizer, strings))
        while len(known) > KEPT:
            known.popitem(last=False)


def _key(tokenizer: Any, strings: str | list[str] | tuple[str, ...]) -> tuple[int, tuple[str, ...]]:
    return len(tokenizer), (strings,) if isinstance(strings, str) else tuple(strings)
