"""What a server needs of the batch that decodes for it, be it in this process or in another."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

import fastspec
from fastspec.errors import FastSpecError, Unsupported
from fastspec.generation.stats import Stats
from fastspec.patches.continuous import Continuous
from fastspec.patches.hf.ends import end_tokens

REFUSALS = (Unsupported, ValueError, FastSpecError)
"""What a batch raises for a prompt that it does not take; FastSpecError where it takes none any more."""
PutTokens = Callable[[list[int]], None]
"""Takes a round's tokens of one answer."""


@dataclass(frozen=True, slots=True)
class TokenStreamer:
    """Streamer of an open batch that hands on a round's tokens and nothing else."""

    put_tokens: PutTokens

    def put(self, value: Tensor) -> None:
        """The prompt, which who asks has."""

    def end(self) -> None:
        """The end, which the answer's future tells."""


def read_tokens(batch: Continuous, tokenizer: Any) -> None:
    """Let llguidance read the tokenizer before requests come: meanwhile no thread runs, for seconds where there are
    100,000 tokens. What it cannot read is refused with the first grammar."""
    with suppress(Unsupported):
        fastspec.Grammar(tokenizer, choice=["a"], end_tokens=sorted(end_tokens(batch.model.generation_config)))


@lru_cache(32)
def _grammar(tokenizer: Any, structure: str, ends: tuple[int, ...]) -> Any:
    """The grammar of a structure, which many requests have."""
    return fastspec.Grammar(tokenizer, **json.loads(structure), end_tokens=ends)


def submit(
    batch: Continuous, tokenizer: Any, ids: list[int], config: Any, put_tokens: PutTokens, seed: int | None
) -> Future[Tensor]:
    """Hand a prompt to an open batch of this process."""
    row = torch.tensor([ids], device="cpu")
    options: dict[str, Any] = {"seed": seed, "tokenizer": tokenizer, "attention_mask": torch.ones_like(row)}
    structure = vars(config).get("structure")
    if structure is not None:
        ends = tuple(sorted(end_tokens(config, batch.model.generation_config)))
        options["logits_processor"] = [_grammar(tokenizer, json.dumps(structure), ends)]
    return batch.submit(row, config, TokenStreamer(put_tokens), **options)


@dataclass(frozen=True, slots=True)
class Sent:
    """A prompt that was handed to a batch."""

    taken: Future[None] = field(default_factory=Future)
    """Done when it is decided whether the batch decodes it; raises what refuses it."""
    answer: Future[Any] = field(default_factory=Future)
    """Done when the answer is over, whose tokens were handed on by then. To cancel it lets go of the prompt."""


class Served(Protocol):
    """A batch of prompts that come as they come."""

    @property
    def model(self) -> Any:
        """Something with the `config` and `generation_config` of what it decodes with."""

    @property
    def max_length(self) -> int:
        """Tokens of a prompt and its answer at most."""

    @property
    def stats(self) -> Stats:
        """Counts since it was opened; a warm-up begins them anew."""

    @property
    def turns(self) -> int:
        """Turns of the rounds that have ended."""

    @property
    def running(self) -> int:
        """Rows that hold a prompt."""

    @property
    def waiting(self) -> int:
        """Prompts that wait for a row."""

    @property
    def alive(self) -> bool:
        """True where it takes prompts."""

    def send(self, ids: list[int], config: Any, put_tokens: PutTokens, seed: int | None) -> Sent:
        """Ask for the answer to one prompt with a GenerationConfig of its own; `put_tokens` takes its tokens."""

    def know(self, strings: tuple[str, ...], criterion: Any) -> None:
        """What stop strings come to, before a prompt that has them is sent."""

    def close(self) -> None:
        """Let go of all prompts, and take no more."""


class Here:
    """An open batch of this process, as a server uses it."""

    def __init__(self, batch: Continuous, tokenizer: Any) -> None:
        self.batch, self.tokenizer = batch, tokenizer
        self.model, self.max_length = batch.model, batch.max_length

    stats = property(lambda self: self.batch.stats)
    turns = property(lambda self: self.batch.turns)
    running = property(lambda self: self.batch.running)
    waiting = property(lambda self: self.batch.waiting)
    alive = property(lambda self: self.batch.alive)

    def send(self, ids: list[int], config: Any, put_tokens: PutTokens, seed: int | None) -> Sent:
        """Submit the prompt, which takes or refuses it at once."""
        taken: Future[None] = Future()
        try:
            answer = submit(self.batch, self.tokenizer, ids, config, put_tokens, seed)
        except REFUSALS as error:
            taken.set_exception(error)
            return Sent(taken)
        taken.set_result(None)
        return Sent(taken, answer)

    def know(self, strings: tuple[str, ...], criterion: Any) -> None:
        """Nothing: who made it has kept it."""

    def close(self) -> None:
        """Cancel the prompts, and end the batch's thread."""
        self.batch.close(cancel=True)
