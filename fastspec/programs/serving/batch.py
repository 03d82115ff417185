"""Interface that a server needs of the batch that decodes for it, be it in this process or in another."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessorList

import fastspec
from fastspec.cascade.decisions import Visit
from fastspec.errors import Unsupported
from fastspec.generation.stats import Stats
from fastspec.patches.api import PromptBatch
from fastspec.patches.call.processors import RoundStreamer, StreamedRound, TokenPenalties
from fastspec.patches.cascade.open_batch import ContinuousCascade
from fastspec.patches.hf.ends import end_tokens
from fastspec.patches.scoring import text_logprobs

StageLoads = dict[str, tuple[int, int]]
"""Stage -> (rows that hold a prompt, prompts that wait for a row); empty without a cascade."""
PutRound = Callable[[StreamedRound | Visit], None]
"""Takes a round of one answer, or a stage's part in it, or the part of a text that a pass scored."""


@dataclass(frozen=True, slots=True)
class BatchPrompt:
    """A prompt's tokens, and how its answer is chosen: a GenerationConfig, a seed, OpenAI's penalties. With `logprobs`
    each token comes with its log-probability and so many of the likeliest tokens, with `trees` each round with its
    draft tree; without `drafts` it is decoded a token a round. `price` is that of a cascade. A `whole` answer is not
    streamed: its rounds come gathered after the first."""

    ids: Sequence[int]
    config: Any
    seed: int | None = None
    frequency: float = 0.0
    presence: float = 0.0
    logprobs: int | None = None
    trees: bool = False
    drafts: bool = True
    price: float | None = None
    whole: bool = False


def read_tokens(batch: PromptBatch, tokenizer: Any) -> None:
    """Let llguidance read the tokenizer before requests come: meanwhile no thread runs, for seconds where there are
    100,000 tokens. What it cannot read is refused with the first grammar; a cascade takes none."""
    if isinstance(batch, ContinuousCascade):
        return
    with suppress(Unsupported):
        fastspec.Grammar(tokenizer, choice=["a"], end_tokens=sorted(end_tokens(batch.model.generation_config)))


@lru_cache(32)
def _grammar(tokenizer: Any, structure: str, ends: tuple[int, ...]) -> Any:
    return fastspec.Grammar(tokenizer, **json.loads(structure), end_tokens=ends)


GATHERED = 32
"""Tokens of a whole answer that are handed on at a time."""


class TokenStreamer(RoundStreamer):
    """Streamer of an open batch that hands on rounds: of a `whole` answer the first, then several together."""

    def __init__(self, told: PutRound, logprobs: int | None, trees: bool, whole: bool = False) -> None:
        self.told, self.logprobs, self.trees, self.whole = told, logprobs, trees, whole
        self.begun, self.gathered = False, StreamedRound([])

    def put_round(self, round: StreamedRound) -> None:
        if not (self.whole and self.begun):
            self.begun = True
            self.told(round)
            return
        held = self.gathered
        held.tokens.extend(round.tokens)
        scored = None if round.logprobs is None else [*(held.logprobs or ()), *round.logprobs]
        self.gathered = StreamedRound(
            held.tokens,
            held.accepted + round.accepted,
            held.drafted + round.drafted,
            scored,
            cached=round.cached,
        )
        if len(held.tokens) >= GATHERED:
            self.flush()

    def put_visit(self, visit: Visit) -> None:
        self.flush()
        self.told(visit)

    def flush(self) -> None:
        if self.gathered.tokens:
            gathered, self.gathered = self.gathered, StreamedRound([])
            self.told(gathered)


def _refuse_penalties(batch: ContinuousCascade, prompt: BatchPrompt) -> None:
    """Raise Unsupported for penalties of tokens that a stage of a cascade counts otherwise."""
    named = {"frequency_penalty": prompt.frequency, "presence_penalty": prompt.presence}
    given = ", ".join(name for name, value in named.items() if value)
    if given and batch.rewriting:
        raise Unsupported(
            f"{given} is not accepted: it counts the large model's tokens, and the stage {batch.rewriting[0]!r} has "
            "others or another prompt"
        )


def submit(batch: PromptBatch, tokenizer: Any, prompt: BatchPrompt, put_round: PutRound) -> Future[Tensor]:
    row, config = torch.from_numpy(np.array(prompt.ids, np.int64))[None], prompt.config
    options: dict[str, Any] = {"seed": prompt.seed, "tokenizer": tokenizer, "attention_mask": torch.ones_like(row)}
    processors = LogitsProcessorList()
    if prompt.frequency or prompt.presence:
        processors.append(TokenPenalties(prompt.frequency, prompt.presence, len(prompt.ids)))
    structure = vars(config).get("structure")
    if structure is not None:
        ends = tuple(sorted(end_tokens(config, batch.model.generation_config)))
        processors.append(_grammar(tokenizer, json.dumps(structure), ends))
    if processors:
        options["logits_processor"] = processors
    streamer = TokenStreamer(put_round, prompt.logprobs, prompt.trees, prompt.whole)
    if isinstance(batch, ContinuousCascade):
        _refuse_penalties(batch, prompt)
        options["price"] = prompt.price
    else:
        options["drafts"] = prompt.drafts
    answer: Future[Tensor] = batch.submit(row, config, streamer, **options)
    answer.add_done_callback(lambda done: streamer.flush())
    return answer


@dataclass(frozen=True, slots=True)
class Sent:
    """A prompt that was handed to a batch."""

    taken: Future[None] = field(default_factory=Future)
    """Done when it is decided whether the batch decodes it; raises what refuses it."""
    answer: Future[Any] = field(default_factory=Future)
    """Done when the answer is over, whose tokens were handed on by then. To cancel it lets go of the prompt."""


def settle(future: Future[Any], error: BaseException | None) -> None:
    """End a future, with or without an error; not one that has ended already, or was cancelled."""
    with suppress(InvalidStateError, RuntimeError):  # of another thread that settles it meanwhile
        if future.done() or not future.set_running_or_notify_cancel():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)


class TextScorer:
    """Thread that scores one text after another, between the rounds of an open batch."""

    def __init__(self, batch: PromptBatch) -> None:
        self.batch, self.threads = batch, ThreadPoolExecutor(1, "fastspec-scores")
        self.passes = 0
        """Passes over texts that have ended."""
        self.held: set[Future[None]] = set()
        """Of texts that are not scored yet."""

    def score(self, ids: Sequence[int], count: int, put_round: PutRound) -> Future[None]:
        """The future of when all parts of a text were handed on, each token with the `count` likeliest in its place."""
        scored: Future[None] = Future()
        self.held.add(scored)
        scored.add_done_callback(self.held.discard)
        self.threads.submit(self._score, scored, ids, count, put_round)
        return scored

    def _score(self, scored: Future[None], ids: Sequence[int], count: int, put_round: PutRound) -> None:
        failed: BaseException | None = None
        try:
            for part in text_logprobs(self.batch.model, ids, count):
                if scored.cancelled():
                    return
                put_round(StreamedRound([each.token for each in part], logprobs=part))
                self.passes += 1
        except BaseException as error:  # nobody else would tell who waits
            failed = error
        settle(scored, failed)

    def close(self) -> None:
        for scored in list(self.held):
            scored.cancel()
        self.threads.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class BatchState:
    """State of a batch: rows that hold a prompt, whether it takes prompts, turns and passes over scored texts that have
    ended, counts since it was opened (a warm-up begins them anew), loads of a cascade's stages."""

    running: int = 0
    alive: bool = True
    turns: int = 0
    stats: Stats = field(default_factory=Stats)
    loads: StageLoads = field(default_factory=dict)


COUNTS = "assistant", "rows", "reused", "rounds", "row_rounds", "round_tokens", "drafted", "accepted"
"""Counts that a server shows."""


class Served(ABC):
    """A batch of prompts that come as they come: `model` has the `config` and `generation_config` of what it decodes
    with, `max_length` is of a prompt and its answer, `info` names assistant, kernels, device, dtype, rows, lengths."""

    model: Any
    max_length: int
    info: dict[str, str]
    running = property(lambda self: self.state.running)
    alive = property(lambda self: self.state.alive)
    turns = property(lambda self: self.state.turns)
    stats = property(lambda self: self.state.stats)
    loads = property(lambda self: self.state.loads)

    @property
    @abstractmethod
    def state(self) -> BatchState:
        """Its state now, or when it was last told."""

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Prompts that wait for a row, and texts that are to be scored."""

    @abstractmethod
    def send(self, prompt: BatchPrompt, put_round: PutRound) -> Sent:
        """Ask for the answer to one prompt; `put_round` takes its rounds."""

    @abstractmethod
    def score(self, ids: Sequence[int], count: int, put_round: PutRound) -> Sent:
        """Ask for the log-probabilities of a text's tokens from the second on, each with the `count` likeliest."""

    @abstractmethod
    def know(self, strings: tuple[str, ...], criterion: Any) -> None:
        """Let the batch know of stop strings, before a prompt that has them is sent."""

    @abstractmethod
    def close(self) -> None:
        """Let go of all prompts, and take no more."""


class Here(Served):
    """An open batch of this process, as a server uses it."""

    def __init__(self, batch: PromptBatch, tokenizer: Any) -> None:
        self.batch, self.tokenizer = batch, tokenizer
        self.model, self.max_length, self.info = batch.model, batch.max_length, batch.info
        self.scorer = TextScorer(batch)

    waiting = property(lambda self: self.batch.waiting + len(self.scorer.held))

    @property
    def state(self) -> BatchState:
        batch = self.batch
        stats = Stats(**{name: getattr(batch.stats, name) for name in COUNTS})
        loads = batch.loads if isinstance(batch, ContinuousCascade) else {}
        return BatchState(batch.running, batch.alive, batch.turns + self.scorer.passes, stats, loads)

    def send(self, prompt: BatchPrompt, put_round: PutRound) -> Sent:
        """Submit the prompt, which takes or refuses it at once."""
        failed: Exception | None = None
        try:
            sent = Sent(answer=submit(self.batch, self.tokenizer, prompt, put_round))
        except Exception as error:  # `taken` raises it
            sent, failed = Sent(), error
        settle(sent.taken, failed)
        return sent

    def score(self, ids: Sequence[int], count: int, put_round: PutRound) -> Sent:
        sent = Sent(answer=self.scorer.score(ids, count, put_round))
        sent.taken.set_result(None)
        return sent

    def know(self, strings: tuple[str, ...], criterion: Any) -> None:
        """Nothing: who made it has kept it."""

    def close(self) -> None:
        self.scorer.close()
        self.batch.close(cancel=True)
