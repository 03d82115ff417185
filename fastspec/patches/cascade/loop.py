"""The assistant `cascade`: in adaptive mode, stage after stage verifies the answer before, answers, and is judged."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from fastspec.cascade.config import Cascade
from fastspec.cascade.decisions import Explanation, Rates, Solver, Visit
from fastspec.cascade.memory import CacheManager, MemoryStats
from fastspec.cascade.predictor import Predictor
from fastspec.cascade.records import features
from fastspec.devices import device_name
from fastspec.errors import Unsupported
from fastspec.generation.engine.call import Outcome
from fastspec.generation.stats import Stats
from fastspec.patches.assistants.registry import Continued
from fastspec.patches.assistants.speculative import MixedDecoding, StagedDecoding
from fastspec.patches.call.prompts import refuse_holes
from fastspec.patches.call.ranks import Ranks
from fastspec.patches.call.refusals import setting
from fastspec.patches.cascade.settings import (
    ends_of,
    left_padded,
    new_tokens,
    pad_of,
    read_prompts,
    refuse,
    stage_options,
)
from fastspec.patches.cascade.stages import (
    Patching,
    StageModel,
    check_kept,
    check_room,
    hand_over,
    keep_past,
    measure_rates,
    past_of,
    stage_models,
)
from fastspec.patches.hf.cache import CACHE, kept_cache
from fastspec.patches.hf.changes import fingerprint
from fastspec.patches.hf.compat import device_of
from fastspec.patches.hf.config_fields import position_limit
from fastspec.patches.hf.limits import dropped_spans

DECIDING = ("mode", "price", "risk", "thresholds", "costs")
"""Fields of a cascade by which a call goes on or stops, alike in all processes."""
PATCHED = ("stages", "tokenizer", "label", "assistant", "memory", "host_memory")
"""Fields of a cascade that a patch fixes; the rest may be another in every call."""


@dataclass(frozen=True, slots=True)
class StageAnswer:
    """One stage's answer to row `row` of a call: visit, tokens, the prompt's length, whether it reached an end token,
    features, and milliseconds a row before the first new token and after it."""

    row: int
    visit: Visit
    answer: list[int]
    prompt_tokens: int
    ended: bool
    features: Tensor
    start_ms: float
    decode_ms: float


@dataclass(slots=True)
class CascadeRow:
    """A request on its way up: row `number` of a call with the arguments `given`, of up to `limit` new tokens."""

    number: int
    ids: list[int]
    given: dict[str, Any]
    limit: int
    visits: list[Visit] = field(default_factory=list)
    answer: list[int] | None = None
    giver: int = 0
    done: bool = False


class CascadeModels:
    """The stages of a patched model's cascade, the model itself last, and what is kept between calls."""

    def __init__(self, config: Cascade, large: Any, patching: Patching) -> None:
        self.config, self.large = config, large
        self.stages = stage_models(config, large, patching)
        self.memory = None if config.memory is None else CacheManager(config.memory, host_budget=config.host_memory)
        for stage in self.stages if self.memory is not None else ():
            if stage.loaded:
                check_kept(stage.held)
        self.predictors: dict[Any, Predictor] = {}
        self.solvers: dict[Any, Solver] = {}
        self.rates: dict[Any, Rates] = {}
        if config.mode == "adaptive":
            self.predictor(config)

    def __deepcopy__(self, memo: dict[int, Any]) -> CascadeModels:
        twin = copy.copy(self)  # the copy of the large model is not finished yet
        twin.large, twin.memory = memo.get(id(self.large), self.large), copy.deepcopy(self.memory)
        twin.stages = [copy.copy(stage) for stage in self.stages]
        for stage in twin.stages:
            stage.patched = False  # the one that patched it takes the patch off
        twin.stages[-1].held = twin.large
        return twin

    @property
    def names(self) -> tuple[str, ...]:
        """The stages' names, the large model's last."""
        return tuple(stage.label for stage in self.stages)

    def predictor(self, config: Cascade) -> Predictor:
        """The predictor of a configuration. Raises CheckpointError for one that was trained for other stages."""
        given = config.predictor
        if isinstance(given, Predictor):
            given.check(self.names)
            return given
        if given not in self.predictors:
            held = Predictor.load(given)
            held.check(self.names)
            self.predictors[given] = held
        return self.predictors[given]

    def solver(self, config: Cascade, prompt: Sequence[int], ranks: Ranks | None = None) -> Solver:
        """The solver for a configuration. Without costs of its own the predictor's count, on such a device, else they
        are measured once, on this prompt, by all of `ranks`, the first of which decides."""
        predictor = self.predictor(config)
        if config.costs is None and None not in self.rates:
            known = predictor.rates if predictor.place.get("device") == device_name(device_of(self.large)) else None
            rates = known or measure_rates(self.stages, [prompt], ranks=ranks)
            self.rates[None] = rates if ranks is None else ranks.first_value(rates)
        if config.costs is not None:
            zeros = (0.0,) * len(config.costs)
            self.rates[config.costs] = Rates(tuple(config.costs), zeros, zeros)
        key = predictor, config.costs, config.risk  # a predictor is compared by identity
        if key not in self.solvers:
            self.solvers[key] = Solver(predictor.table(config.risk), self.rates[config.costs])
        return self.solvers[key]

    def cost(self, config: Cascade, visit: Visit) -> float | None:
        """Milliseconds that a visit's tokens cost by the rates that a configuration decides by; None without any."""
        rates = self.rates.get(config.costs)
        if rates is None:
            return None
        times = rates.token_ms, rates.verify_ms, rates.start_ms
        token, verify, start = (each[visit.stage] for each in times)
        return visit.new_tokens * token + visit.handed_tokens * verify + start

    def decoding(self, config: Cascade) -> Any:
        """The decoding of a call. Raises Unsupported for a configuration of other stages."""
        if [stage.model for stage in config.stages] != [stage.stage.model for stage in self.stages[:-1]]:
            raise Unsupported(
                f"the cascade of this call has the stages {[stage.label for stage in config.stages]} and the model was "
                f"patched with {list(self.names[:-1])}: dataclasses.replace(cascade, price=...) keeps them"
            )
        other = [name for name in PATCHED if getattr(config, name) != getattr(self.config, name)]
        if other:
            raise Unsupported(
                f"the cascade of this call differs in {', '.join(other)} from the one that the model was patched with: "
                "dataclasses.replace(cascade, price=...) keeps them; to change them, fastspec.unpatch(model) and "
                "patch it anew"
            )
        if config.mode == "adaptive":
            return AdaptiveCascade(self, config)
        drafts = [stage.model for stage in self.stages[:-1]]
        for stage in self.stages[:-1]:
            stage.check_shared(self.large)
            if stage.rewrites:
                raise Unsupported(
                    f"mode={config.mode!r} goes token by token, and the stage {stage.label!r} has other tokens or "
                    "another prompt: use mode='adaptive'"
                )
            place, wanted = device_of(stage.model), device_of(self.large)
            if place != wanted:
                raise Unsupported(
                    f"mode={config.mode!r}: the stage {stage.label!r} is on {place} and the large model on {wanted}"
                )
        if config.mode == "token" and config.alpha != "lossless":
            return MixedDecoding(config, drafts[0], self.large)
        return StagedDecoding(config, tuple(drafts), self.large)

    @property
    def memory_stats(self) -> MemoryStats | None:
        """Counts of keeping keys and values between calls; None where nothing is kept."""
        return None if self.memory is None else self.memory.stats

    def close(self) -> None:
        """Unpatch the stages and free what is kept."""
        for stage in self.stages[:-1]:
            stage.close()
        if self.memory is not None:
            self.memory.clear()


@dataclass(frozen=True, slots=True, eq=False)
class AdaptiveCascade:
    """The cascade of one call. With `on_answer` every row goes through every stage, and it is given each answer;
    `assistant` replaces the stages' own."""

    models: CascadeModels
    config: Cascade
    name: str = "cascade"
    on_answer: Callable[[StageAnswer], None] | None = None
    assistant: Any = None

    def check(self, large: Any, given: dict[str, Any], ranks: Ranks | None = None) -> None:
        """Raise Unsupported, in all of `ranks`, for arguments that a cascade cannot honour, before a stage runs."""
        if ranks is not None and self.models.memory is not None:
            raise Unsupported(
                f"Cascade(memory=...) keeps keys and values of models that one process holds, and {ranks.group.size()} "
                f"hold this {type(large).__name__}: keep nothing between calls (memory=None)"
            )
        ids, keep = read_prompts(large, given)
        streamed = given.get("streamer") is not None
        if ranks is not None:  # before anything that one process alone could refuse
            ranks.check_arguments(ids, keep, *(getattr(self.config, name) for name in DECIDING))
            streamed = ranks.any(streamed)
        refuse(self.models.stages, given)
        refuse_holes(large, keep, 0, new_tokens(large, given, ids.shape[1]), dropped_spans(large))
        if streamed and len(ids) > 1:
            raise Unsupported("a streamer takes one row: leave streamer out, or pass a batch of 1")

    def generate(self, large: Any, session: Any, given: dict[str, Any], ranks: Ranks | None = None) -> Any:
        """Answer every row of a `generate` call with these arguments, by name. Of `ranks` the first decides and runs
        whole stages; the others run cut ones with it."""
        began = time.perf_counter()
        ids, keep = read_prompts(large, given)
        streamer = given.get("streamer")
        prompts = [row[mask].tolist() for row, mask in zip(ids, keep, strict=True)]
        limit = new_tokens(large, given, ids.shape[1])
        run = partial(self._run, given, limit)
        if ranks is None:
            answers, told = self._answers(prompts, given, limit, run)
        else:
            if self.config.thresholds is None and self.on_answer is None:
                self.models.solver(self.config, prompts[0], ranks)  # whose rates are measured by all
            stages = self.models.stages
            answers, told = ranks.led(
                lambda joint: self._answers(
                    prompts, given, limit, lambda index, *more: (joint if stages[index].cut else run)(index, *more)
                ),
                run,
            )
        stats = Stats(assistant=self.name, rows=len(answers), emitted=sum(map(len, answers)))
        stats.seconds = time.perf_counter() - began
        stats.explanations = told
        session.calls.append(stats)
        if self.config.explain:
            print("\n".join(map(str, stats.explanations)))
        return self._output(ids, answers, large, given, stats, streamer)

    def _answers(
        self, prompts: list[list[int]], given: dict[str, Any], limit: int, run: Callable[..., Outcome]
    ) -> tuple[list[list[int]], tuple[Explanation, ...]]:
        """Answers in the large model's tokens, and how they were made; `run(index, prompts, handed)` runs a stage."""
        pending = rows = [CascadeRow(number, prompt, given, limit) for number, prompt in enumerate(prompts)]
        for index in range(len(self.models.stages)):
            if pending:
                pending = self._visit(index, pending, run)
        told = tuple(Explanation(tuple(row.visits)) for row in rows)
        return [self.answer(row) for row in rows], told

    def _visit(self, index: int, rows: list[CascadeRow], run: Callable[..., Outcome]) -> list[CascadeRow]:
        """Let a stage answer the rows -> those that go on to the next."""
        stage, last = self.models.stages[index], index == len(self.models.stages) - 1
        bound = position_limit(stage.model.config)
        asked: list[tuple[CascadeRow, list[int], list[int]]] = []  # row, prompt, answer that was handed over
        for row in rows:
            prompt = stage.read_prompt(row.ids)
            if last or (prompt and (bound is None or len(prompt) + row.limit <= bound)):
                asked.append((row, prompt, self.handed(row, index)))
            else:
                row.visits.append(left_out(stage, index, row, prompt, f"its positions end at {bound}"))
        if asked:
            self._ask(index, asked, run)
        return [] if last else [row for row in rows if not row.done]

    def _ask(
        self, index: int, asked: list[tuple[CascadeRow, list[int], list[int]]], run: Callable[..., Outcome]
    ) -> None:
        """Let a stage answer rows that fit, and judge its answers."""
        handed = [answer for _, _, answer in asked]
        began = time.perf_counter()
        prompts = [prompt for _, prompt, _ in asked]
        outcome = run(index, prompts, handed if any(handed) else None)
        share = 1000 * (time.perf_counter() - began) / len(asked)
        kept = outcome.kept or [0] * len(asked)
        last = index == len(self.models.stages) - 1
        for at, (row, prompt, _) in enumerate(asked):
            answer = outcome.tokens[at]
            visit, ended = self.take(row, index, answer, kept[at], len(handed[at]), share)
            if not last or self.on_answer is not None:
                told = self.features(row, outcome.measures[at], len(prompt), ended)
                if self.on_answer is not None:
                    visit = replace(visit, why="heard")
                    times = _times(outcome.stats, len(asked))
                    self.on_answer(StageAnswer(row.number, visit, answer, len(prompt), ended, told, *times))
                else:
                    visit, row.done = self.judged(visit, row, told)
            row.visits.append(replace(visit, cost=self.models.cost(self.config, visit)))

    def take(
        self, row: CascadeRow, index: int, answer: list[int], kept: int, handed: int, milliseconds: float
    ) -> tuple[Visit, bool]:
        """Give a row a stage's answer, `kept` of `handed` tokens taken over -> visit, and True at an end token."""
        stage = self.models.stages[index]
        row.answer, row.giver = answer, index
        ended = answer[-1] in stage.ends(ends_of(stage, row.given))
        counts, cut = (len(answer) - kept, kept, handed), len(answer) >= row.limit and not ended
        visit = Visit(index, stage.label, "answered: it is the last", *counts, milliseconds=milliseconds, cut=cut)
        return visit, ended

    def features(self, row: CascadeRow, measures: Tensor, prompt_tokens: int, ended: bool) -> Tensor:
        """Features [F] of the answer that a row has."""
        assert row.answer is not None
        stage, stages = row.giver, len(self.models.stages)
        about = {"prompt_tokens": prompt_tokens, "limit": row.limit, "stage": stage, "stages": stages}
        return features(measures, row.answer, ended=ended, **about)

    def handed(self, row: CascadeRow, index: int) -> list[int]:
        """The answer that a row has already, in a stage's tokens."""
        if row.answer is None:
            return []
        giver, taker = self.models.stages[row.giver], self.models.stages[index]
        ends = taker.ends(ends_of(taker, row.given))
        return hand_over(row.answer, giver, taker, giver.ends(ends_of(giver, row.given)), ends[0] if ends else None)

    def _run(
        self, given: dict[str, Any], limit: int, index: int, prompts: list[list[int]], handed: list[list[int]] | None
    ) -> Outcome:
        """One stage's `generate` for these prompts, after what was handed over."""
        stage, memory = self.models.stages[index], self.models.memory
        options, heard = stage_options(stage, given, limit), []  # type: dict[str, Any], list[Outcome]
        ids, mask = left_padded(prompts, pad_of(stage, given), device_of(stage.model))
        judged = index < len(self.models.stages) - 1 or self.on_answer is not None
        assistant = Continued(self.assistant or stage.stage.assistant, handed, heard.append, measure=judged)
        if memory is None or len(prompts) > 1:
            stage.model.generate(ids, attention_mask=mask, assistant=assistant, **options)
        else:
            check_room(memory, stage.model, ids.shape[1] + limit)
            memory.renew(index, fingerprint(stage.model))
            past = past_of(memory, index, stage.model, ids)
            out = stage.model.generate(
                ids, attention_mask=mask, return_dict_in_generate=True, assistant=assistant, **{CACHE: past}, **options
            )
            keep_past(memory, index, out.sequences, kept_cache(out))
        return heard[0]

    def judged(self, visit: Visit, row: CascadeRow, told: Tensor) -> tuple[Visit, bool]:
        """Stop or go on, by an answer's features: the visit with the decision and why, and whether it stops."""
        models, config, index = self.models, self.config, visit.stage
        scores = models.predictor(config).score(index, told, config.risk)
        if config.thresholds is not None:
            values = scores.quality[0], config.thresholds[index]
            stop = values[0] >= values[1]
            why = f"its probability {values[0]:.3f} {'reaches' if stop else 'is below'} the threshold {values[1]:g}"
        else:
            decision = models.solver(config, row.ids).decide(index, scores, config.price)
            stop, values = decision.stop, (decision.stop_value, decision.go_on_value)
            why = f"stopping is expected to cost {values[0]:.1f} ms, going on {values[1]:.1f} ms"
        why = f"{'answered' if stop else 'went on'}: {why}"
        return replace(visit, why=why, quality=scores.quality, stop_value=values[0], go_on_value=values[1]), stop

    def answer(self, row: CascadeRow) -> list[int]:
        """The answer of a row that is done, in the large model's tokens."""
        last = len(self.models.stages) - 1
        assert row.answer is not None
        return row.answer if row.giver == last else self.handed(row, last)

    def _output(
        self, ids: Tensor, answers: list[list[int]], large: Any, given: dict[str, Any], stats: Stats, streamer: Any
    ) -> Any:
        pad = pad_of(self.models.stages[-1], given)
        longest = max(map(len, answers))
        new = torch.tensor([answer + [pad] * (longest - len(answer)) for answer in answers], device=ids.device)
        if streamer is not None:  # the prompt too is put now, when no stage can refuse the call any more
            put_answer(streamer, ids, answers[0])
        sequences = torch.cat((ids, new), 1)
        if not setting("return_dict_in_generate", given, large.generation_config):
            return sequences
        out = GenerateDecoderOnlyOutput(sequences=sequences)
        out.fastspec = stats
        return out


def left_out(stage: StageModel, index: int, row: CascadeRow, prompt: Sequence[int], bound: str) -> Visit:
    """The visit to a stage that has no tokens for a prompt, or no room for it and its answer."""
    told = f"and {row.limit} of an answer, and {bound}" if prompt else "of this stage"
    return Visit(index, stage.label, f"left out: the prompt has {len(prompt) or 'no'} tokens {told}")


def put_answer(streamer: Any, ids: Tensor, answer: Sequence[int]) -> None:
    """Hand a streamer a prompt [1, T] and its whole answer, token by token."""
    streamer.put(ids.cpu())
    for token in answer:
        streamer.put(torch.tensor([token], device="cpu"))
    streamer.end()


def _times(stats: Stats, rows: int) -> tuple[float, float]:
    """Milliseconds a row before and after the first new token that is not taken over."""
    start = stats.phases.get("prefill", 0.0) + stats.phases.get("verify", 0.0)
    return 1000 * start / rows, 1000 * max(stats.seconds - start, 0.0) / rows
