"""Tokenizers of few tokens: two that cut the same letters in different ways, and one with a word per token."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

LETTERS = [chr(code) for code in range(33, 123)]


def tokenizer(letters: list[str], merges: list[tuple[str, str]]) -> Any:
    """One token a letter, and one for each merged pair."""
    pieces = [*letters, *("".join(pair) for pair in merges)]
    inner = Tokenizer(BPE({piece: index for index, piece in enumerate(pieces)}, merges))
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


TARGET = tokenizer(
    LETTERS, [("a", "b"), ("c", "d"), ("ab", "cd"), ("x", "y"), ("y", "z"), ("1", "2"), ("b", "c")]
)  # 97 tokens
DRAFT = tokenizer(LETTERS[::-1], [("b", "c"), ("a", "bc"), ("z", "z")])


def worded() -> PreTrainedTokenizerFast:
    """A word per token id; transformers needs one that stands for letters."""
    words = {"abcdef" if number == 4 else f"w{number}": number for number in range(128)}
    raw = Tokenizer(models.WordLevel(words, unk_token="w3"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="w3")
