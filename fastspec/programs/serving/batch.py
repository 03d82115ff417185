"""What a server needs of the batch that decodes for it, be it in this process or in another."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from fastspec.errors import FastSpecError, Unsupported
from fastspec.generation.stats import Stats
from fastspec.patches.continuous import Continuous

REFUSALS = (Unsupported, ValueError, FastSpecError)
"""What a batch raises for a prompt that it does not take; FastSpecError where it takes none any more."""


class TokenReader(Protocol):
    """Who gets an answer's tokens."""

    def put(self, value: Tensor) -> None:
        """Take the prompt [1, T]."""

    def put_tokens(self, tokens: list[int]) -> None:
        """Take a round's tokens."""

    def end(self) -> None:
        """The answer is over."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A prompt that was handed to a batch."""

    taken: Future[None] = field(default_factory=Future)
    """Done when it is decided whether the batch decodes it; raises what refuses it."""
    answer: Future[Any] = field(default_factory=Future)
    """Done when the answer is over, whose tokens its reader has by then. To cancel it lets go of the prompt."""


class Served(Protocol):
    """A batch of prompts that come as they come."""

    @property
    def model(self) -> Any:
        """Something with the `config`, `generation_config` and `device` of what it decodes with."""

    @property
    def max_length(self) -> int:
        """Tokens of a prompt and its answer at most."""

    @property
    def stats(self) -> Stats:
        """Counts since it was opened."""

    @property
    def running(self) -> int:
        """Rows that hold a prompt."""

    @property
    def waiting(self) -> int:
        """Prompts that wait for a row."""

    @property
    def alive(self) -> bool:
        """Whether it takes prompts."""

    def send(self, ids: Tensor, mask: Tensor | None, config: Any, reader: TokenReader, seed: int | None) -> Sent:
        """Ask for the answer to one prompt, ids and mask [1, T], with a GenerationConfig of its own."""

    def know(self, strings: tuple[str, ...], criterion: Any) -> None:
        """What stop strings come to, before a prompt that has them is sent."""

    def close(self) -> None:
        """Let go of all prompts, and take no more."""


class Here:
    """An open batch of this process."""

    def __init__(self, batch: Continuous, tokenizer: Any) -> None:
        self.batch, self.tokenizer = batch, tokenizer
        self.model, self.max_length = batch.model, batch.max_length

    @property
    def stats(self) -> Stats:
        """See `Served`; a warm-up begins them anew."""
        return self.batch.stats

    @property
    def running(self) -> int:
        """See `Served`."""
        return self.batch.running

    @property
    def waiting(self) -> int:
        """See `Served`."""
        return self.batch.waiting

    @property
    def alive(self) -> bool:
        """See `Served`."""
        return self.batch.alive

    def send(self, ids: Tensor, mask: Tensor | None, config: Any, reader: TokenReader, seed: int | None) -> Sent:
        """See `Served`."""
        taken: Future[None] = Future()
        try:
            answer = self.batch.submit(ids, config, reader, seed=seed, tokenizer=self.tokenizer, attention_mask=mask)
        except REFUSALS as error:
            taken.set_exception(error)
            return Sent(taken)
        taken.set_result(None)
        return Sent(taken, answer)

    def know(self, strings: tuple[str, ...], criterion: Any) -> None:
        """See `Served`; who made it has kept it."""

    def close(self) -> None:
        """See `Served`."""
        self.batch.close(cancel=True)
