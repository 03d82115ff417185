"""A model and a tokenizer for tests of grammars."""

from __future__ import annotations

from typing import Any

import torch

from helpers.generate import bigram
from helpers.tokenizers import written

SIZE, END = 128, 5
TOKENIZER = written(SIZE)
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "maxLength": 6},
        "b": {"enum": ["ten", "true", 12]},
        "c": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "maxItems": 3},
    },
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}


def terse(seed: int = 0, **sizes: int) -> Any:
    """A bigram target that seldom says a blank, of which JSON may have many."""
    model = bigram(seed, vocab_size=SIZE, **{"num_hidden_layers": 3, **sizes})  # whose answers end
    with torch.no_grad():
        model.lm_head.weight[[token for token in range(SIZE) if " " in TOKENIZER.decode(token)]] = 0.0
    return model


def is_valid(found: Any) -> bool:
    """True where a value has the `SCHEMA`."""
    numbers = all(type(each) is int and 0 <= each <= 999 for each in found["c"])
    return list(found) == ["a", "b", "c"] and len(found["a"]) <= 6 and found["b"] in ("ten", "true", 12) and numbers
