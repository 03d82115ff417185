"""A cascade as open batches, one of each stage: prompts come as they come, and are sent on while others run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastspec.cascade.config import Cascade
from fastspec.cascade.decisions import Explanation, Visit
from fastspec.errors import FastSpecError, Unsupported
from fastspec.forks import at_fork
from fastspec.generation.drafters.retokenized import common_prefix
from fastspec.generation.stats import Stats
from fastspec.generation.verify import drawn_seed
from fastspec.patches.call.one_prompt import AnswerFuture, PreparedPrompt
from fastspec.patches.call.processors import RoundStreamer, StreamedRound
from fastspec.patches.call.ranks import refuse_beside
from fastspec.patches.call.refusals import setting
from fastspec.patches.cascade.loop import AdaptiveCascade, CascadeRow, left_out, put_answer
from fastspec.patches.cascade.settings import new_tokens, read_prompts, refuse, stage_options
from fastspec.patches.cascade.stages import StageModel
from fastspec.patches.continuous_batch import Continuous, open_batch
from fastspec.patches.hf.config_fields import position_limit
from fastspec.patches.hf.parallel import group_of
from fastspec.patches.open_ranks import OpenRanks, TurnOrder
from fastspec.patches.open_turns import BatchSettings
from fastspec.patches.warmup import WARM_LENGTH

TRIAL_PROMPT = 64
"""Tokens of the prompt that the stages' rates are measured after, where nothing says what they are."""
NEXT_SEED = 0x9E3779B97F4A7C15
"""Between the seeds of two stages: a later answer must not hang on the draws of the one that was not good enough."""
COUNTS = "joined", "reused", "rounds", "row_rounds", "emitted", "round_tokens", "accepted", "drafted"


class StageBatch(Continuous):
    """Open batch of a stage: a prompt may bring the answer of the stage before, and have its own measured."""

    verifies: ClassVar[bool] = True

    def ask(
        self,
        prompt: Sequence[int],
        handed: Sequence[int],
        measured: list[Tensor] | None,
        streamer: Any,
        seed: int,
        options: dict[str, Any],
    ) -> AnswerFuture:
        """The future of the answer to a prompt, which is `submit`'s."""
        row = torch.tensor([prompt], device="cpu")
        single = self.prompt(row, streamer, seed, options)
        single.handed = handed[: single.limit]
        single.measure(measured)
        return self.send(single, row, streamer, True, {"generation_config": None, **_unpadded(row, options)})

    def prompt(self, row: Tensor, streamer: Any, seed: int, options: dict[str, Any]) -> PreparedPrompt:
        """The prompt row [1, T] of a stage's arguments, prepared."""
        options = _unpadded(row, options)
        return self.prepared(row, options.pop("generation_config", None), streamer, seed, options)


def _unpadded(row: Tensor, options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "attention_mask": torch.ones_like(row)}


class StageRounds(RoundStreamer):
    """Streamer of a stage whose answer is shown when it is decided on: it keeps the rounds."""

    def __init__(self, trees: bool) -> None:
        self.trees = trees
        self.kept: list[StreamedRound] = []

    def put_round(self, round: StreamedRound) -> None:
        self.kept.append(round)


class CascadeFuture(AnswerFuture):
    """Future of a cascade's answer to a prompt. `explanation` says, once it is there, how it was made."""

    explanation: Explanation | None = None


@dataclass(slots=True)
class CascadeRequest:
    """A prompt on its way up, by `decides`, the cascade at its own price."""

    row: CascadeRow
    shown: Tensor
    decides: AdaptiveCascade
    streamer: Any
    seed: int
    future: CascadeFuture = field(default_factory=CascadeFuture)
    answer: AnswerFuture | None = None
    """That of the stage that it is at."""


@dataclass(slots=True)
class StageCall:
    """A request at a stage: its prompt there, and what the answer before came to in this stage's tokens."""

    index: int
    prompt: list[int]
    handed: list[int]
    measured: list[Tensor] | None
    rounds: StageRounds
    began: float = field(default_factory=time.perf_counter)


class ContinuousCascade:
    """Open batch of a patched model's cascade in adaptive mode, as `fastspec.continuous(model, "cascade")` makes it:
    every stage is an open batch of `rows` rows, with its assistant, on its device.

    An answer is that of `generate(assistant="cascade")` for the prompt alone, as `Continuous` has it. A streamer is
    given an answer when its stage has been decided on: a smaller stage's at once, the last one's token by token. A
    stage whose rows have no room for a prompt and its answer is left out.

    Of processes that hold the large model together the first decides, and has the whole stages. The others have the
    batches of cut stages, which take turns, and run them with it, as `fastspec.continuous` says.
    """

    def __init__(self, decides: AdaptiveCascade, settings: BatchSettings) -> None:
        self.decides, self.models, self.config = decides, decides.models, decides.config
        self.model, stages = self.models.large, self.models.stages
        if self.models.memory is not None:
            raise Unsupported(
                f"continuous: memory={self.config.memory} of a cascade keeps texts between calls of generate, and the "
                "rows of an open batch keep theirs by themselves (prefix_caching): leave memory out"
            )
        group = group_of(self.model)
        order = TurnOrder(held=True)
        ranks = self.ranks = None if group is None else OpenRanks(group, order)
        """The processes that hold the large model together."""
        if ranks is not None:
            refuse_beside(group, "continuous")
            ranks.check_opened(self.models.names, [stage.cut for stage in stages])
        for stage in stages[:-1]:
            stage.by_holders(partial(stage.check_shared, self.model), ranks)
        if self.config.thresholds is None:  # rates are measured before prompts come
            size = self.model.config.get_text_config().vocab_size
            trial = torch.randint(size, (TRIAL_PROMPT,), generator=torch.Generator().manual_seed(0), device="cpu")
            self.models.solver(self.config, trial.tolist(), ranks)
        self.batches: list[StageBatch] = []
        self._changed = threading.Condition()
        self._open: set[CascadeFuture] = set()
        self._closing = False

        def opened(stage: StageModel) -> None:
            bound = None if stage is stages[-1] else position_limit(stage.model.config)
            most = settings.max_length
            own = replace(settings, max_length=most if most is None or bound is None else min(most, bound))
            turns = order if stage.cut else None
            self.batches.append(open_batch(StageBatch, stage.model, stage.stage.assistant, own, turns))

        try:
            for stage in stages:
                stage.by_holders(partial(opened, stage), ranks)
        except BaseException as error:
            order.fail(error)
            for batch in self.batches:
                with suppress(FastSpecError):  # which a batch ends with in another process than the first
                    batch.close(cancel=ranks is None or ranks.leads)
            raise
        order.begin()
        self._deciding = ThreadPoolExecutor(1, "fastspec-cascade")
        at_fork(self)

    def forked(self) -> None:
        """Wait for no answer in a forked process, where every stage's batch is over."""
        self._changed, self._open = threading.Condition(), set()

    def submit(
        self,
        ids: Tensor,
        generation_config: Any = None,
        streamer: Any = None,
        *,
        seed: int | None = None,
        price: float | None = None,
        **options: Any,
    ) -> CascadeFuture:
        """Ask for the answer to one prompt, as `Continuous.submit` does -> its future; `price` is this prompt's own.

        Raises Unsupported for what a cascade or an open batch does not decode, too long a prompt, and a price beside
        thresholds; ValueError for settings that transformers refuses; FastSpecError where the batch is closed.
        """
        if self.ranks is not None:
            self.ranks.refuse_prompts()
        ids = ids[None] if ids.dim() == 1 else ids
        given = {"input_ids": ids, "generation_config": generation_config, "streamer": streamer, **options}
        given = {name: value for name, value in given.items() if value is not None}
        refuse(self.models.stages, given)
        if isinstance(streamer, RoundStreamer) and streamer.logprobs is not None:
            raise Unsupported("log-probabilities: the answer of a cascade may be any stage's, on other tokens")
        prompts, keep = read_prompts(self.model, given)
        if len(prompts) > 1:
            raise Unsupported(f"a prompt of an open batch is one row, and this call has {len(prompts)}")
        if price is not None and self.config.thresholds is not None:
            raise Unsupported(f"price={price}: this cascade decides by its thresholds, which no price changes")
        request = CascadeRequest(
            CascadeRow(0, prompts[0][keep[0]].tolist(), given, new_tokens(self.model, given, ids.shape[1])),
            prompts,
            replace(self.decides, config=self.config if price is None else replace(self.config, price=price)),
            streamer,
            drawn_seed() if seed is None and setting("do_sample", given, self.model.generation_config) else seed or 0,
        )
        # what the large model refuses is told now, and not when it is asked
        large = stage_options(self.models.stages[-1], given, request.row.limit)
        self.batches[-1].prompt(torch.tensor([request.row.ids], device="cpu"), None, request.seed, large)
        with self._changed:
            if self._closing:
                raise FastSpecError("this batch is closed: fastspec.continuous(model, ...) opens another")
            self._open.add(request.future)
        request.future.add_done_callback(partial(self._ended, request))
        try:
            self._ask(request, 0)
        except BaseException:
            request.future.cancel()
            raise
        return request.future

    def _ask(self, request: CascadeRequest, index: int) -> None:
        """Ask a stage, or the first one behind it with room, for its answer."""
        stages, row = self.models.stages, request.row
        last = index == len(stages) - 1
        stage, batch = stages[index], self.batches[index]
        prompt = stage.read_prompt(row.ids)
        if not last and not (prompt and len(prompt) + row.limit <= batch.max_length):
            self._visited(request, left_out(stage, index, row, prompt, f"its rows have room for {batch.max_length}"))
            self._ask(request, index + 1)
            return
        handed = request.decides.handed(row, index)
        trees = isinstance(request.streamer, RoundStreamer) and request.streamer.trees and not stage.rewrites
        call = StageCall(index, prompt, handed, None if last else [], StageRounds(trees))
        seed = (request.seed + index * NEXT_SEED + 2**63) % 2**64 - 2**63
        options = stage_options(stage, row.given, row.limit)
        streamer = request.streamer if last else call.rounds
        request.answer = batch.ask(prompt, handed, call.measured, streamer, seed, options)
        if request.future.cancelled():  # meanwhile, when nobody knew of this answer
            request.answer.cancel()
        request.answer.add_done_callback(partial(self._answered, request, call))

    def _answered(self, request: CascadeRequest, call: StageCall, answer: Future[Tensor]) -> None:
        """A stage is done: the last one's answer is the cascade's, others are decided on in a thread."""
        if call.measured is None or answer.cancelled() or answer.exception() is not None:
            self._take(request, call, answer)
        else:
            self._deciding.submit(self._take, request, call, answer)

    def _take(self, request: CascadeRequest, call: StageCall, answer: Future[Tensor]) -> None:
        try:
            if answer.cancelled():
                request.future.cancel()
            elif not request.future.cancelled():
                self._decide(request, call, answer.result())
        except BaseException as error:  # nobody else would tell who waits
            if request.future.set_running_or_notify_cancel():
                request.future.set_exception(error)

    def _decide(self, request: CascadeRequest, call: StageCall, answer: Tensor) -> None:
        """Take a stage's answer: it is the cascade's, or the next stage is asked."""
        row, decides = request.row, request.decides
        tokens, spent = answer[0, len(call.prompt) :].tolist(), 1000 * (time.perf_counter() - call.began)
        kept = common_prefix(tokens, call.handed)
        visit, ended = decides.take(row, call.index, tokens, kept, len(call.handed), spent)
        if call.measured is not None:
            told = decides.features(row, torch.cat(call.measured).cpu(), len(call.prompt), ended)
            visit, row.done = decides.judged(visit, row, told)
        self._visited(request, replace(visit, cost=self.models.cost(self.config, visit)))
        if call.measured is not None and not row.done:
            self._ask(request, call.index + 1)
            return
        final = decides.answer(row)
        if call.measured is not None:
            self._stream(request, final, call)
        future = request.future
        future.explanation = Explanation(tuple(row.visits))
        if self.config.explain:
            print(future.explanation)
        if future.set_running_or_notify_cancel():
            future.set_result(torch.cat((request.shown, request.shown.new_tensor([final])), 1))

    def _visited(self, request: CascadeRequest, visit: Visit) -> None:
        request.row.visits.append(visit)
        if isinstance(request.streamer, RoundStreamer):
            request.streamer.put_visit(visit)

    def _stream(self, request: CascadeRequest, answer: list[int], call: StageCall) -> None:
        """Hand the streamer an answer: as one round, or as its rounds where their trees are asked for and fit."""
        streamer, rounds = request.streamer, call.rounds.kept
        if isinstance(streamer, RoundStreamer):
            if not call.rounds.trees:
                accepted, drafted = (sum(getattr(each, name) for each in rounds) for name in ("accepted", "drafted"))
                cached = 0 if self.models.stages[call.index].rewrites else rounds[-1].cached  # of another prompt
                rounds = [StreamedRound(answer, min(accepted, len(answer)), drafted, cached=cached)]
            for round in rounds:
                streamer.put_round(round)
        elif streamer is not None:
            put_answer(streamer, request.shown, answer)

    def _ended(self, request: CascadeRequest, future: Future[Tensor]) -> None:
        """A request is over, or nobody waits for it any more."""
        if future.cancelled() and request.answer is not None:
            request.answer.cancel()
        with self._changed:
            self._open.discard(request.future)
            self._changed.notify_all()

    def warmup(self, length: int | None = WARM_LENGTH, told: Callable[[int, int], object] | None = None) -> float:
        """Warm up one stage after another, as `Continuous.warmup` does -> the seconds that it took."""
        return sum(batch.warmup(length, told) for batch in self.batches)

    @property
    def rewriting(self) -> tuple[str, ...]:
        """Names of the stages that read other tokens than the large model, or another prompt."""
        return tuple(stage.label for stage in self.models.stages if stage.rewrites)

    @property
    def max_length(self) -> int:
        """Tokens of a prompt and its answer at most, in the large model's rows."""
        return self.batches[-1].max_length

    @property
    def info(self) -> dict[str, str]:
        """Settings of the large model's batch, with the stages' names."""
        return {**self.batches[-1].info, "assistant": Cascade.name, "stages": ",".join(self.models.names)}

    @property
    def stats(self) -> Stats:
        """Counts of all stages' batches together."""
        held = [batch.stats for batch in self.batches]
        found = Stats(assistant=Cascade.name, rows=sum(each.rows for each in held))
        for name in COUNTS:
            setattr(found, name, sum(getattr(each, name) for each in held))
        return found

    @property
    def turns(self) -> int:
        """Turns of all stages' rounds that have ended."""
        return sum(batch.turns for batch in self.batches)

    @property
    def running(self) -> int:
        """Rows that hold a prompt, of all stages."""
        return sum(batch.running for batch in self.batches)

    @property
    def waiting(self) -> int:
        """Prompts that wait for a row of a stage, or for a decision."""
        return max(0, len(self._open) - self.running)

    @property
    def loads(self) -> dict[str, tuple[int, int]]:
        """Stage -> (rows that hold a prompt, prompts that wait for a row)."""
        whole = self.ranks is None or self.ranks.leads
        names = [stage.label for stage in self.models.stages if whole or stage.cut]
        return {name: (batch.running, batch.waiting) for name, batch in zip(names, self.batches, strict=True)}

    @property
    def alive(self) -> bool:
        """True where it takes prompts, and every stage does."""
        return not self._closing and all(batch.alive for batch in self.batches)

    def close(self, *, cancel: bool = False) -> None:
        """Take no more prompts, and return when all answers are there; with `cancel` the missing ones are cancelled. Of
        several processes the first closes the batch, as `Continuous` says."""
        with self._changed:
            self._closing = True
            left = list(self._open)
        for future in left if cancel else ():
            future.cancel()
        with self._changed:
            self._changed.wait_for(lambda: not self._open)
        with ExitStack() as ends:  # each is closed, whatever another ends with
            ends.callback(self._deciding.shutdown)
            for batch in reversed(self.batches):
                ends.callback(batch.close, cancel=cancel)

    def __enter__(self) -> ContinuousCascade:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close(cancel=kind is not None)
