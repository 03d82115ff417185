"""What a drafter needs of a tokenizer, transformers' own among them: texts to tokens and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """A tokenizer of transformers, or one that is called like it. It may lack the roles of tokens (`bos_token_id`, ...)."""

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> Mapping[str, Sequence[int]]:
        """The tokens of a text: "input_ids"."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        """The text of tokens."""

    def get_vocab(self) -> Mapping[str, int]:
        """Every token as the vocabulary writes it, and its id."""


def decoded(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of tokens, special ones included."""
    return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text, nothing added."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []
