"""Processors, stopping criteria and streamers of transformers, as the loop wants them, and its own step."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation import logits_process as lp
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from fastspec.cascade.decisions import Visit
from fastspec.errors import NoDistribution, Unsupported
from fastspec.generation.drafters.base import Place, Process
from fastspec.generation.engine.verifier import ChoiceRule
from fastspec.generation.tree import DraftTree
from fastspec.generation.verify import RowProcessor, TokenLogprob
from fastspec.kernels.verification.reference import SamplingSettings
from fastspec.patches.call.grammar import Grammar, GrammarOfCall
from fastspec.patches.hf.ends import StopStrings
from fastspec.patches.session import plain_value

UNLIMITED = 2**62
"""Tokens of an answer that may be of any length."""
# Processors that map every row of scores on its own and never look at the tokens so far: safe to run on all nodes at
# once.
BLIND = (
    lp.TemperatureLogitsWarper,
    lp.TopKLogitsWarper,
    lp.TopPLogitsWarper,
    lp.MinPLogitsWarper,
    lp.TypicalLogitsWarper,
    lp.EpsilonLogitsWarper,
    lp.EtaLogitsWarper,
    lp.LogitNormalization,
    lp.InfNanRemoveLogitsProcessor,
    lp.SuppressTokensLogitsProcessor,
)


# Of these, one reads a number back from the device: it cannot be part of a captured round.
CAPTURABLE = tuple(kind for kind in BLIND if kind is not lp.EtaLogitsWarper)


class TokenPenalties(lp.LogitsProcessor):
    """OpenAI's penalties: the score of a token that came c times becomes s - frequency * c - presence * [c > 0]."""

    def __init__(self, frequency: float, presence: float, prompt_length: int) -> None:
        self.frequency, self.presence, self.prompt_length = frequency, presence, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [R, V] of texts [R, T]."""
        new = input_ids[:, self.prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(1, new, torch.ones_like(new, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)


# Processors that look at a row's own tokens and at nothing else: any rows may be handed to them together.
ROWWISE = (
    *BLIND,
    TokenPenalties,
    lp.RepetitionPenaltyLogitsProcessor,
    lp.NoRepeatNGramLogitsProcessor,
    lp.NoBadWordsLogitsProcessor,
    lp.SequenceBiasLogitsProcessor,
    lp.MinLengthLogitsProcessor,
    lp.MinNewTokensLengthLogitsProcessor,
    lp.ForcedBOSTokenLogitsProcessor,
    lp.ForcedEOSTokenLogitsProcessor,
    lp.SuppressTokensAtBeginLogitsProcessor,
    lp.ExponentialDecayLengthPenalty,
    Grammar,
    GrammarOfCall,
)


# Criteria that keep nothing between calls and judge each row by its own text, or all of them by the clock.
CRITERIA = (MaxLengthCriteria, EosTokenCriteria, StopStringCriteria, StopStrings, MaxTimeCriteria)


def of_rows(processor: Any, rows: list[int]) -> Any:
    """The processor for these rows: a repetition penalty knows each row's padding, a grammar where its answer is."""
    if isinstance(processor, GrammarOfCall):
        return processor.of_rows(rows)
    ignored = getattr(processor, "prompt_ignore_length", None)
    if not isinstance(ignored, Tensor):
        return processor
    twin = copy.copy(processor)
    twin.prompt_ignore_length = ignored[rows]
    return twin


LEAST_TEMPERATURE = 1e-30
"""A score of 10^8, divided by it, is still a number of fp32."""


def make_processors(
    processors: lp.LogitsProcessorList, ids: Tensor
) -> tuple[Callable[[Tensor], Tensor] | None, RowProcessor | None]:
    """Processors of known types over rows [R, V] at once where none looks at the history, else over rows with their
    prefixes; neither without any, or for another type. Raises Unsupported for a temperature that scores overflow by."""
    if temperature_of(processors) < LEAST_TEMPERATURE:
        raise Unsupported(
            f"temperature={temperature_of(processors)} is too near 0 to sample at: do_sample=False is greedy"
        )
    if not processors or not are_known(processors, ()):
        return None, None
    if all(type(p) in BLIND for p in processors):
        return _over_any(processors, ids[:1]), None
    return None, lambda rows, texts, scores: process_rows(processors, rows, texts, scores)


def _over_any(processors: lp.LogitsProcessorList, ids: Tensor) -> Callable[[Tensor], Tensor]:
    """Processors over scores [R, V] of any nodes; one that raises over NaN and +inf is not shown such drafts."""
    process = partial(processors, ids)

    def process_sound(scores: Tensor) -> Tensor:
        odd = scores.softmax(-1)[:, :1].isnan()
        return torch.where(odd, scores, process(scores.masked_fill(odd, 0.0)))

    return process_sound if any(type(each) is lp.EtaLogitsWarper for each in processors) else process


def process_rows(processors: Iterable[Any], rows: list[int], texts: Tensor, scores: Tensor) -> Tensor:
    """Scores [R, V] of these rows of the batch as known processors leave them; texts [R, T] are their tokens."""
    return lp.LogitsProcessorList(of_rows(p, rows) for p in processors)(texts, scores)


def are_known(processors: Iterable[Any], criteria: Iterable[Any]) -> bool:
    """True where all are transformers' own that keep nothing between calls and treat each row by itself; others are
    shown the calls of plain decoding (`fastspec.generation.verify`)."""
    return all(type(p) in ROWWISE for p in processors) and all(type(c) in CRITERIA for c in criteria)


def unknown_types(processors: Iterable[Any], criteria: Iterable[Any] = ()) -> str:
    """The types that `are_known` does not know, for a message."""
    kinds = [type(p) for p in processors if type(p) not in ROWWISE]
    kinds += [type(c) for c in criteria if type(c) not in CRITERIA]
    return ", ".join(dict.fromkeys(kind.__name__ for kind in kinds))


def grammars(processors: Iterable[Any]) -> str:
    """The grammars among processors, for a message; empty where there is none."""
    return ", ".join(type(p).__name__ for p in processors if isinstance(p, Grammar))


# Sampling settings by their attribute -> the warper, in transformers' order, with an attribute of the same name.
FILTERS = {
    "temperature": lp.TemperatureLogitsWarper,
    "top_k": lp.TopKLogitsWarper,
    "top_p": lp.TopPLogitsWarper,
    "min_p": lp.MinPLogitsWarper,
}


def read_settings(processors: lp.LogitsProcessorList) -> SamplingSettings | None:
    """Settings that processors come to: temperature, top-k, top-p and min-p in transformers' order, once each and in
    the usual form; None for anything else, or none."""
    names = [name for kind in map(type, processors) for name, warper in FILTERS.items() if kind is warper]
    plain = all(
        getattr(p, "filter_value", -torch.inf) == -torch.inf and getattr(p, "min_tokens_to_keep", 1) == 1
        for p in processors
    )
    if not names or not plain or len(names) != len(processors) or names != [name for name in FILTERS if name in names]:
        return None
    return SamplingSettings(**{name: getattr(p, name) for name, p in zip(names, processors, strict=True)})


def temperature_of(processors: Iterable[Any]) -> float:
    """The temperature that processors apply; 1 where none does."""
    return next((float(each.temperature) for each in processors if type(each) is lp.TemperatureLogitsWarper), 1.0)


@dataclass(frozen=True, slots=True)
class Processing:
    """Processors of a call, read once, in the form that rounds apply.

    `process` maps scores [R, V] of any nodes where no processor looks at the history, `process_at` those of some rows
    with their prefixes where one does. `settings` are all that processors do in a sampled call whose processed scores
    nobody asks for. A `grammar` before processors that look at no history is apart: it masks the logits of a whole
    tree.
    """

    processors: lp.LogitsProcessorList
    sample: bool = False
    settings: SamplingSettings | None = None
    process: Process | None = None
    process_at: RowProcessor | None = None
    grammar: GrammarOfCall | None = None

    @property
    def after_grammar(self) -> list[Any]:
        """The processors but for the grammar that comes first."""
        return self.processors[0 if self.grammar is None else 1 :]

    @property
    def temperature(self) -> float:
        """The temperature that they apply."""
        return temperature_of(self.processors)

    @property
    def drawn(self) -> Process | None:
        """The processors that drafts are drawn under."""
        return self.process if self.sample else None

    @property
    def rule(self) -> ChoiceRule:
        """The rule that rounds choose tokens by, on the host where a processor waits for the device."""
        waits = self.process is not None and not all(type(each) in CAPTURABLE for each in self.after_grammar)
        return ChoiceRule(self.sample, self.process, self.settings, Place.HOST if waits else Place.DEVICE)

    @property
    def signature(self) -> Hashable:
        """Kinds and settings of processors that captured rounds apply; None where these apply none."""
        if self.process is None:
            return None
        settings = [
            tuple((name, plain_value(value)) for name, value in sorted(vars(p).items())) for p in self.after_grammar
        ]
        return tuple(zip(map(type, self.after_grammar), settings, strict=True))


def read_processors(
    processors: lp.LogitsProcessorList, ids: Tensor, sample: bool, *, scored: bool = False
) -> Processing:
    """Processors of a call on prompts ids [B, T]; `scored` where processed scores are asked for. Raises Unsupported."""
    bound = lp.LogitsProcessorList(GrammarOfCall(p, ids) if type(p) is Grammar else p for p in processors)
    masks = bool(bound) and type(bound[0]) is GrammarOfCall and all(type(p) in BLIND for p in bound[1:])
    grammar, rest = (bound[0], lp.LogitsProcessorList(bound[1:])) if masks else (None, bound)
    process, process_at = make_processors(rest, ids)
    settings = read_settings(rest) if sample and not scored and grammar is None else None
    return Processing(bound, sample, settings, process, process_at, grammar)


def whole_limit(limit: float) -> int:
    """The whole number of tokens with which a limit is reached: 6 for 5.5, and for infinity more than any text has."""
    return math.ceil(limit) if math.isfinite(limit) else UNLIMITED


class Ending:
    """End of a row: length and end tokens, which the loop checks, and all other criteria, asked per token."""

    def __init__(self, criteria: Any, ids: Tensor) -> None:
        self.ids = ids
        limits = [c.max_length for c in criteria if type(c) is MaxLengthCriteria]
        self.limit = whole_limit(min(limits) - ids.shape[1]) if limits else UNLIMITED
        self.ends = frozenset(int(e) for c in criteria if type(c) is EosTokenCriteria for e in c.eos_token_id.flatten())
        self.others = [c for c in criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria)]
        self.stop = self._stop if self.others else None

    def _stop(self, row: int, answer: list[int]) -> bool:
        rows = self.ids.shape[0]
        ids = torch.cat((self.ids[row], self.ids.new_tensor(answer))).expand(rows, -1)
        verdicts = [c(ids, None) for c in self.others]  # all are asked: a criterion may count its calls
        return any(bool(torch.as_tensor(v, device="cpu").expand(rows)[row]) for v in verdicts)


class Streaming:
    """Feeds a streamer one column [B] of tokens at a time, as soon as every row has it; of one row, to a class with
    `put_tokens(tokens)`, a round's tokens as one list."""

    def __init__(self, streamer: Any, rows: int, pad: int) -> None:
        self.streamer, self.pad = streamer, pad
        self.emitted: list[list[int]] = [[] for _ in range(rows)]
        self.done = [False] * rows
        self.shown = 0
        self.watch = getattr(streamer, "on_tree", None) if rows == 1 else None
        """`on_tree(tree, verdict, logits)` of a streamer, called with each round's tree before its tokens."""
        # its class is asked: an object that answers to any name has none
        takes_lists = rows == 1 and hasattr(type(streamer), "put_tokens")
        self.put_tokens = streamer.put_tokens if takes_lists else None

    def emit(self, row: int, tokens: list[int], accepted: int, done: bool) -> None:
        """Take a round's tokens of a row; a streamer with `on_round(tokens, accepted)` gets the round first."""
        on_round = getattr(self.streamer, "on_round", None)
        if on_round is not None and len(self.emitted) == 1:
            on_round(tokens, accepted)
        if self.put_tokens is not None:
            self.put_tokens(tokens)
            return
        self.emitted[row] += tokens
        self.done[row] = done
        while True:
            there = [len(each) > self.shown for each in self.emitted]
            if not any(there) or not all(has or over for has, over in zip(there, self.done, strict=True)):
                return
            column = [each[self.shown] if has else self.pad for each, has in zip(self.emitted, there, strict=True)]
            self.streamer.put(torch.tensor(column, device="cpu"))
            self.shown += 1


class StreamedRound(NamedTuple):
    """Tokens that a round gave to one prompt, how many of its `drafted` ones are among them, and log-probabilities and
    draft tree where they are asked for, the latter but for a first token or without drafts. `cached` tokens of the
    prompt were not read."""

    tokens: list[int]
    accepted: int = 0
    drafted: int = 0
    logprobs: list[TokenLogprob] | None = None
    tree: DraftTree | None = None
    cached: int = 0


class RoundStreamer(ABC):
    """Streamer of one prompt of an open batch that takes rounds; with `logprobs` each token's log-probability under the
    model beside so many of the likeliest, and with `trees` the draft tree of each round."""

    logprobs: int | None = None
    trees: bool = False

    @abstractmethod
    def put_round(self, round: StreamedRound) -> None:
        """Take a round."""

    def put_visit(self, visit: Visit) -> None:  # noqa: B027
        """Take a stage's part in the answer, of a cascade."""

    def put(self, value: Tensor) -> None:  # noqa: B027
        """Take the prompt, which who asks has."""

    def end(self) -> None:  # noqa: B027
        """Take the end, which the answer's future tells."""


class PlainSteps:
    """Plain `generate`'s treatment of a step's logits, in its order: processors, choice, padding, criteria, streamer;
    its draws too, so that a seed gives its tokens. ids [B, T] are the prompts as `generate` has them, `scores` and
    `logits` a tensor [B, V] per step where the call asks for them."""

    def __init__(self, ids: Tensor, processors: Any, criteria: Any, config: Any, streamer: Any) -> None:
        self.ids, self.processors, self.criteria, self.streamer = ids, processors, criteria, streamer
        self.sample = bool(config.do_sample)
        wanted = bool(config.return_dict_in_generate)
        self.scores: tuple[Tensor, ...] | None = () if wanted and config.output_scores else None
        self.logits: tuple[Tensor, ...] | None = () if wanted and config.output_logits else None
        self.pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        """True where rows that have ended are padded; else they go on until all have ended, as in transformers."""
        pad = config._pad_token_tensor
        self.pad_token = 0 if pad is None else int(pad)
        self.unfinished = torch.ones(ids.shape[0], dtype=torch.long, device=ids.device)
        self.width = ids.shape[1]
        self.lengths: list[int | None] = [None] * ids.shape[0]
        self.over = False

    def __call__(self, logits: Tensor, scores: Tensor | None = None) -> list[int]:
        """The next token of every row; it is a `fastspec.generation.verify.Steps`."""
        # Processors write into these scores, some past torch and its strides: a copy, laid out as plain decoding's.
        raw = logits.to(dtype=torch.float32, device=self.ids.device).clone(memory_format=torch.contiguous_format)
        processed = (
            self.processors(self.ids, raw) if scores is None else scores.to(dtype=torch.float32, device=self.ids.device)
        )
        if self.scores is not None:
            self.scores += (processed,)
        if self.logits is not None:
            self.logits += (raw,)
        tokens = self._drawn(torch.softmax(processed, -1)) if self.sample else processed.argmax(-1)
        if self.pads:
            tokens = tokens * self.unfinished + self.pad_token * (1 - self.unfinished)
        self.ids = torch.cat((self.ids, tokens[:, None]), -1)
        self.unfinished = self.unfinished & ~self.criteria(self.ids, self.scores)
        going = self.unfinished.tolist()
        if self.streamer is not None:
            self.streamer.put(tokens.cpu())
        chosen = self.ids[:, -1].tolist()  # a criterion may have written there: the model reads it so
        self.over = not any(going)
        if self.pads:
            here = self.ids.shape[1] - self.width
            ended = zip(self.lengths, going, strict=True)
            self.lengths = [here if length is None and not on else length for length, on in ended]
        return chosen

    def _drawn(self, probs: Tensor) -> Tensor:
        """Tokens [B] of probabilities [B, V]. Raises NoDistribution where plain decoding's draw would fail."""
        for row, fails in enumerate(probs[:, 0].isnan().tolist()):  # then all of the row are
            if fails:
                raise NoDistribution.after(self.ids.shape[1] - self.width, row)
        return torch.multinomial(probs, num_samples=1)[:, 0]
