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


def worded(size: int = 128) -> PreTrainedTokenizerFast:
    """A word per token id; transformers needs one that stands for letters."""
    words = {"abcdef" if number == 4 else f"w{number}": number for number in range(size)}
    raw = Tokenizer(models.WordLevel(words, unk_token="w3"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="w3")


def written(size: int = 128) -> PreTrainedTokenizerFast:
    """A token for each printable character of ASCII, and for pairs that JSON is full of, in bytes as grammars read
    them; the first six are marks, of which 0 pads and 5 ends a text."""
    marks = ["<pad>", "<start>", "<user>", "<bot>", "<none>", "<end>"]
    letters = ["Ġ" if code == 32 else chr(code) for code in range(32, 127)]
    merges = [
        ("{", '"'),
        ('"', ":"),
        ('"', ","),
        ('"', "}"),
        (":", "Ġ"),
        ("t", "r"),
        ("u", "e"),
        ("tr", "ue"),
        ("1", "2"),
    ]
    pieces = [*marks, *letters, *("".join(pair) for pair in merges)]
    unsaid = [f"<{number}>" for number in range(len(pieces), size)]
    raw = Tokenizer(BPE({piece: number for number, piece in enumerate([*pieces, *unsaid])}, merges))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    raw.add_special_tokens([*marks, *unsaid])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", pad_token="<pad>")
