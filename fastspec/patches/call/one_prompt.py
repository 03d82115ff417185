"""One prompt as transformers' own `generate` prepares it for an open batch, and a cache of what it made of settings.

Preparing one takes `generate` milliseconds of Python, and a server hands over many a second, nearly all with known
settings. Kept is what depends on nothing of the prompt but the length: no processors but temperature, top-k, top-p,
min-p and a grammar, no criteria but length and end tokens. All else goes through `generate` each time.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import GenerationMixin
from transformers.generation import utils as plain
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from fastspec.errors import Unsupported
from fastspec.generation.engine.open_batch import Rule
from fastspec.generation.target import compact
from fastspec.generation.tree import DraftTree
from fastspec.generation.verify import drawn_seed, measure, top_logprobs
from fastspec.patches.call.grammar import Grammar, GrammarState
from fastspec.patches.call.plan import Prepared, custom_loop
from fastspec.patches.call.processors import (
    FILTERS,
    Ending,
    RoundStreamer,
    StreamedRound,
    Streaming,
    are_known,
    read_processors,
    read_settings,
    unknown_types,
)
from fastspec.patches.call.prompts import (
    besides_tokens,
    position_shift,
    real_tokens,
    refuse_dropped,
    refuse_holes,
    refuse_seen_padding,
)
from fastspec.patches.call.refusals import refuse_arguments, refuse_ids, refuse_prepared, refuse_prompts, setting
from fastspec.patches.hf.cache import CACHE, given_cache
from fastspec.patches.hf.compat import device_of, own_stop_strings
from fastspec.patches.hf.limits import dropped_spans, position_rows

KEPT = 16
GIVEN = frozenset({"input_ids", "generation_config", "attention_mask", "streamer", "tokenizer", "logits_processor"})
"""Arguments of `generate` that settings are kept beside; of processors a grammar is taken."""
SETTINGS = frozenset(name for name in vars(GenerationConfig()) if name[0] != "_")
"""Arguments that a generation_config has too."""
METHODS = {
    name: getattr(GenerationMixin, name)
    for name, value in vars(GenerationMixin).items()
    if name[0] == "_" and name[1] != "_" and isinstance(value, (FunctionType, staticmethod))
}
"""Methods that `generate` prepares a call by; with someone else's, or a family's own, nothing is kept."""


def _works_by(kind: Any) -> tuple[Any, Any]:
    return vars(kind).get("__init__"), vars(kind).get("__call__")


MADE_OF = {kind: _works_by(kind) for kind in (*FILTERS.values(), MaxLengthCriteria, EosTokenCriteria)}
"""The processors and criteria that are made of settings, which `generate` finds by their names, and how they work."""

REFUSED_PROCESSORS: dict[str, tuple[Any, str]] = {
    "encoder_no_repeat_ngram_size": (0, "EncoderNoRepeatNGramLogitsProcessor"),
    "encoder_repetition_penalty": (1.0, "EncoderRepetitionPenaltyLogitsProcessor"),
    "watermarking_config": (None, "WatermarkLogitsProcessor"),
    "top_h": (None, "TopHLogitsWarper"),
}
"""Settings -> the value that changes nothing, and the processor of any other."""


@dataclass(frozen=True, slots=True)
class PreparedSettings:
    """Settings as `generate` prepared them: end tokens, and the rule by which tokens are chosen, but for a prompt's
    seed and grammar; `positions` counts those of the model, None for any number."""

    asked: str
    ends: frozenset[int]
    rule: Rule
    positions: int | None


class SettingsCache:
    """Cache: a call's settings -> what `generate` made of them; the last KEPT ones."""

    def __init__(self) -> None:
        self.known: deque[PreparedSettings] = deque(maxlen=KEPT)

    def find(self, model: Any, original: Any, given: dict[str, Any]) -> PreparedSettings | None:
        """Settings of a call that are known, whose prompt is one row of tokens on the CPU without padding; or None."""
        ids: Any
        mask: Any
        ids, mask = given.get("input_ids"), given.get("attention_mask")
        tensors = (ids,) if mask is None else (ids, mask)
        if not all(isinstance(each, Tensor) and each.device.type == "cpu" for each in tensors):
            return None
        if ids.dtype != torch.long or ids.dim() != 2 or len(ids) != 1:
            return None
        if _may_be_padded(model, given) if mask is None else mask.shape != ids.shape or not mask.all():
            return None
        asked = settings_of(model, original, given)
        for each in tuple(self.known):
            if each.asked == asked and 0 < ids.shape[1] <= (each.positions or ids.shape[1]):
                return each
        return None

    def keep(self, settled: PreparedSettings) -> None:
        """Keep what was made of settings."""
        if all(each.asked != settled.asked for each in tuple(self.known)):
            self.known.appendleft(settled)


def settings_of(model: Any, original: Any, given: dict[str, Any]) -> str | None:
    """Key of a call's settings without the answer's length, as text; None for a call whose are not kept."""
    config, own = given.get("generation_config"), model.generation_config
    if any(type(each) is not GenerationConfig for each in (own, own if config is None else config)):
        return None
    if not given.keys() <= GIVEN | SETTINGS:
        return None
    processors = given.get("logits_processor") or ()
    if not isinstance(processors, (list, tuple)) or [type(each) for each in processors] not in ([], [Grammar]):
        return None
    most = _most_new(given)
    if type(most) is not int or most < 1 or not _is_transformers_own(model, original):
        return None
    named = {name: given[name] for name in sorted(given.keys() & SETTINGS)}
    mine, named = (
        {name: value for name, value in each.items() if name != "max_new_tokens"}
        for each in ({} if config is None else vars(config), named)
    )
    asked = config is None, mine, named, vars(own), len(processors)
    return repr(asked) if _is_text(asked) else None


def _most_new(given: dict[str, Any]) -> Any:
    """The number of new tokens that a call asks for, at the most; None where it does not say."""
    config = given.get("generation_config")
    return given.get("max_new_tokens", None if config is None else config.max_new_tokens)


def _may_be_padded(model: Any, given: dict[str, Any]) -> bool:
    """True where a prompt without a mask has tokens that stand for padding."""
    pads = [setting("pad_token_id", each, model.generation_config) for each in ({}, given)]
    return any(type(pad) is not int or bool((given["input_ids"] == pad).any()) for pad in pads if pad is not None)


def _is_transformers_own(model: Any, original: Any) -> bool:
    """True where nobody else has a part in preparing a call."""
    kind, own = type(model), vars(model)
    return (
        getattr(original, "__func__", None) is GenerationMixin.generate
        and all(getattr(kind, name, None) is value and name not in own for name, value in METHODS.items())
        and all(getattr(plain, kind.__name__, None) is kind and _works_by(kind) == how for kind, how in MADE_OF.items())
    )


def _is_text(value: Any) -> bool:
    """True where a value is wholly told by its text: not so a tensor, nor an object of someone's."""
    if type(value) in (dict, list, tuple):
        return all(map(_is_text, value.values() if type(value) is dict else value))
    return value is None or type(value) in (bool, int, float, str)


def settles(processors: LogitsProcessorList, criteria: Iterable[Any]) -> bool:
    """True where nothing of what `generate` made is the prompt's own but the length and a grammar's state."""
    rest = LogitsProcessorList(processors[1:] if processors and type(processors[0]) is Grammar else processors)
    lengths = (MaxLengthCriteria, EosTokenCriteria)
    return (not rest or read_settings(rest) is not None) and all(type(each) in lengths for each in criteria)


log = logging.getLogger("fastspec")


class AnswerFuture(Future[Tensor]):
    """Future of the answer to a prompt: what `generate` returns, [1, T + new tokens] int64. `cached_tokens` of the
    prompt were not read, since a row had read them for another; `gone` is `cancelled()` without a lock, for every
    round."""

    cached_tokens = 0
    gone = False

    def cancel(self) -> bool:
        """Let the prompt go, unless it has ended."""
        self.gone = super().cancel()
        return self.gone


class PreparedPrompt:
    """A prompt with its settings, and the `future` of its answer: a `fastspec.generation.engine.open_batch.Prompt`.

    `shown` [1, T] is the prompt with padding, `ids` without; `ending` has criteria besides length and end tokens.
    """

    def __init__(
        self,
        shown: Tensor,
        ids: Tensor,
        limit: int,
        ends: frozenset[int],
        rule: Rule,
        streamer: Any,
        ending: Ending | None = None,
    ) -> None:
        self.shown, self.ids, self.limit, self.ends, self.rule = shown, ids, limit, ends, rule
        self.text = ids[0].cpu()
        self.rounds = streamer if isinstance(streamer, RoundStreamer) else None
        self.streaming = Streaming(streamer, 1, 0) if streamer is not None and self.rounds is None else None
        self._observed: tuple[int, Tensor | None, DraftTree | None] = (0, None, None)
        self.future = AnswerFuture()
        self.number = 0
        """That by which other processes know it."""
        self.is_cancelled = False
        """True where it is to leave its row or the queue: nobody waits for the answer, or the streamer failed."""
        self.failed: BaseException | None = None
        """Error of its streamer."""
        self.handed: Sequence[int] = ()
        self.measured: list[Tensor] | None = None
        """Takes the `fastspec.generation.verify.measure` of every round's tokens, where it is asked for."""
        self.keeps_logits = self.rounds is not None and self.rounds.logprobs is not None
        """True where the streamer asks for log-probabilities, or somebody for measures."""
        self.stop: Callable[[list[int]], bool] | None = None
        """Criteria besides length and end tokens."""
        if ending is not None and ending.stop is not None:
            self.stop = partial(ending.stop, 0)
        self.keeps_tree = self.rounds is not None and self.rounds.trees
        """True where the streamer asks for draft trees."""

    def move(self, device: torch.device) -> None:
        """Bring the prompt to where it is read."""
        self.shown, self.ids = self.shown.to(device), self.ids.to(device)

    def reuse(self, count: int) -> None:
        """So many tokens of the prompt are not read."""
        self.future.cached_tokens = count

    def measure(self, measured: list[Tensor] | None) -> None:
        """Let the measures of all tokens be taken, where they are asked for."""
        self.measured = measured
        self.keeps_logits = self.keeps_logits or measured is not None

    def observe(self, drafted: int, logits: Tensor | None, tree: DraftTree | None) -> None:
        """Keep what the streamer is told with the round's tokens."""
        self._observed = drafted, logits, tree

    def emit(self, tokens: list[int], accepted: int, done: bool) -> None:
        """Hand a round's tokens to the streamer. What it raises ends the prompt between two turns: other processes may
        run the same rounds, and this one alone has the streamer."""
        drafted, logits, tree = self._observed
        if self.measured is not None:
            assert logits is not None
            chosen = torch.tensor(tokens, dtype=torch.long, device=logits.device)
            self.measured.append(measure(logits[: len(tokens)], chosen))
        if self.failed is not None:
            return
        count = None if self.rounds is None else self.rounds.logprobs
        found = None if logits is None or count is None else top_logprobs(logits, tokens, count)
        try:
            if self.rounds is not None:
                self.rounds.put_round(StreamedRound(tokens, accepted, drafted, found, tree, self.future.cached_tokens))
            elif self.streaming is not None:
                self.streaming.emit(0, tokens, accepted, done)
        except BaseException as error:  # SystemExit, too, which would end the thread and nobody's waiting
            self.failed = error

    def finish(self, tokens: list[int], error: BaseException | None) -> None:
        """Tell the streamer, and who waits for the answer; of a cancelled prompt the streamer alone."""
        cancelled = not self.future.set_running_or_notify_cancel()  # and cannot be any more
        error = self.failed or error
        try:
            if self.streaming is not None and (cancelled or error is None):
                self.streaming.streamer.end()
        except BaseException as raised:
            if cancelled:
                log.exception("the streamer of a cancelled prompt raised an error at its end")
            error = raised
        if cancelled:
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(torch.cat((self.shown, self.shown.new_tensor([tokens])), 1))

    def let_go(self) -> bool:
        """Let it leave where its future was cancelled or its streamer failed -> True where that is new."""
        new = not self.is_cancelled and (self.failed is not None or self.future.gone)
        self.is_cancelled = self.is_cancelled or new
        return new


def _made(
    streamer: Any, seed: int | None, keep: Tensor, made: Prepared, agreed: Callable[[Any], Any] | None
) -> PreparedPrompt:
    """A prompt of what `generate` has prepared."""
    ids, processors, criteria, config, _ = made
    if len(ids) != 1:
        raise Unsupported(f"a prompt of an open batch is one row, and this call has {len(ids)}: submit them one by one")
    if config.return_dict_in_generate:
        raise Unsupported(
            "return_dict_in_generate=True: an open batch answers with tokens alone; ask generate for the rest"
        )
    if not are_known(processors, criteria):
        raise Unsupported(
            f"an open batch has prompts of many calls, and {unknown_types(processors, criteria)} may keep a state over "
            "a whole call: ask generate for this one"
        )
    ending, sample = Ending(criteria if agreed is None else agreed(criteria), ids), bool(config.do_sample)
    read = read_processors(processors, ids, sample)
    history = None if read.process_at is None else ids[0]
    constraint = None if read.grammar is None else read.grammar.state(0)
    rule = Rule(sample, _seed(sample, seed), read.settings, read.process, read.process_at, history, constraint)
    return PreparedPrompt(ids, compact(ids, keep)[0], ending.limit, ending.ends, rule, streamer, ending)


def _refuse_processors(model: Any, given: dict[str, Any]) -> None:
    """Refuse settings before transformers makes their processors, one of which copies the prompt many times."""
    own = model.generation_config
    for name, (neutral, processor) in REFUSED_PROCESSORS.items():
        value = setting(name, given, own)
        warps = name != "top_h" or setting("do_sample", given, own)  # a greedy call makes no warper
        if value is not None and value != neutral and warps:
            raise Unsupported(f"{name}={str(value)[:80]}: an open batch does not take {processor}: ask generate")


def _seed(sample: bool, seed: int | None) -> int:
    return (drawn_seed() if seed is None else seed) if sample else 0


def _again(settled: PreparedSettings, given: dict[str, Any], seed: int | None) -> PreparedPrompt:
    """A prompt whose settings were prepared before."""
    # the caller's own may change while the prompt waits
    ids, streamer = given["input_ids"].clone(), given.get("streamer")
    if streamer is not None:
        streamer.put(ids)  # as generate does
    grammars = given.get("logits_processor") or ()
    constraint = GrammarState(grammars[0]) if grammars else None
    rule = replace(settled.rule, seed=_seed(settled.rule.sample, seed), constraint=constraint)
    return PreparedPrompt(ids, ids, _most_new(given), settled.ends, rule, streamer)


def _check_tokens(model: Any, ids: Tensor) -> None:
    """Raise ValueError for tokens without an embedding, where that is known: on CUDA these end the whole process."""
    size = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if size is None or not ids.numel():
        return
    least, most = ids.aminmax()
    if least < 0 or most >= size:
        raise ValueError(
            f"the prompt has tokens from {int(least)} to {int(most)}, and the model those from 0 to {size - 1}"
        )


def prepare(
    model: Any,
    original: Callable[..., Any],
    given: dict[str, Any],
    seed: int | None,
    known: SettingsCache | None = None,
    agreed: Callable[[Any], Any] | None = None,
) -> PreparedPrompt:
    """A prompt from the arguments of `generate` by name; `original`, the model's own, prepares it and does not decode.
    Where its settings are `known` the prompt stays where it is, and is to be moved. `agreed` is `Ranks.agreed`.

    Raises Unsupported for what an open batch does not decode, and ValueError as transformers does, and for tokens that
    the model has not.
    """
    refuse_ids(model, given)
    settled = None if known is None else known.find(model, original, given)
    if settled is not None:
        _check_tokens(model, given["input_ids"])
        return _again(settled, given, seed)
    asked = None if known is None else settings_of(model, original, given)
    device = device_of(model)
    given = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in given.items()}
    if given_cache(given) is not None:
        raise Unsupported(f"an open batch takes whole prompts, without {CACHE}")
    if given.get("assistant") is not None:
        raise Unsupported(
            "assistant= belongs to fastspec.continuous: all prompts of an open batch are decoded with the same one"
        )
    refuse_arguments(model, given)
    _refuse_processors(model, given)
    told, mask = given.get("streamer"), given.get("attention_mask")  # a custom loop is not handed the streamer

    def read(model: Any, made: Prepared) -> PreparedPrompt:
        refuse_prepared(made.config, made.inputs)
        inputs = besides_tokens(made.inputs)
        if inputs:
            raise Unsupported(
                f"an open batch takes prompts of tokens alone, without {', '.join(sorted(inputs))}: ask generate"
            )
        made = made._replace(ids=made.ids.to(device, copy=True))
        ids, config = made.ids, made.config
        keep = real_tokens(model, ids, mask, config, 0)
        refuse_prompts(model, ids, keep, 0)
        _check_tokens(model, ids[keep])
        shift = position_shift(model, ids, keep, made.inputs)
        if shift is not None and bool(shift.any()):
            raise Unsupported(
                f"{type(model).__name__} does not count positions from 0, as an open batch does: ask generate"
            )
        single = _made(told, seed, keep, made, agreed)
        dropped = dropped_spans(model)
        refuse_holes(model, keep, 0, single.limit, dropped)
        refuse_seen_padding(model, keep, 0, None, config)
        refuse_dropped(model, None, 0, config, dropped)
        fits = _most_new(given) == single.limit
        if known is not None and asked is not None and fits and settles(made.processors, made.criteria):
            rule = replace(single.rule, constraint=None)
            known.keep(PreparedSettings(asked, single.ends, rule, position_rows(model)))
        return single

    single = original(**{**own_stop_strings(model, given), "custom_generate": custom_loop(read)})
    assert isinstance(single, PreparedPrompt)
    return single
