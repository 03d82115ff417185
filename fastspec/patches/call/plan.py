"""Plan of one assisted call: what transformers prepared, read by the engine, the rounds and the output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessorList

from fastspec.errors import Unsupported
from fastspec.generation.drafters.base import Decoding
from fastspec.generation.engine.call import Request
from fastspec.generation.layer_state import LayerCache
from fastspec.generation.ops import Ops
from fastspec.generation.target import Source, compact
from fastspec.kernels.attention.reference import Span
from fastspec.patches.assistants.registry import Continued
from fastspec.patches.assistants.speculative import MixedDecoding
from fastspec.patches.call.processors import (
    Ending,
    PlainSteps,
    Processing,
    Streaming,
    are_known,
    grammars,
    read_processors,
    unknown_types,
)
from fastspec.patches.call.prompts import (
    OwnPrefill,
    besides_tokens,
    position_shift,
    real_tokens,
    refuse_dropped,
    refuse_holes,
    refuse_seen_padding,
    sees_ahead,
    virtual_tokens,
)
from fastspec.patches.call.ranks import Ranks, ranks_of
from fastspec.patches.call.refusals import refuse_cache, refuse_prompts, refuse_shown_padding
from fastspec.patches.hf.cache import CACHE, given_cache, keeps_all, read_cache, text_length
from fastspec.patches.hf.compat import device_of
from fastspec.patches.hf.config_fields import kept_by
from fastspec.patches.hf.limits import check_padding, dropped_spans, layer_spans
from fastspec.patches.hf.modes import Mode
from fastspec.patches.hf.seq2seq import read_source
from fastspec.patches.session import PatchSession


@dataclass(frozen=True, slots=True)
class Text:
    """Text that a call begins with: ids [B, T], and keep [B, past + T] bool, False for padding, behind `past_length`
    tokens of a cache.

    `past` are keys and values [B, Hkv, T, D] of each layer, `virtual` the same where a prompt-learning adapter brings
    them; `own` is the model's own pass over prompts of more than tokens, `source` what an encoder has read. Positions
    begin shift [B] further than tokens are counted. `cache` is transformers' own of the call, to be filled where the
    caller `handed_in` one or asks for it.
    """

    ids: Tensor
    keep: Tensor
    past_length: int = 0
    past: list[LayerCache] | None = None
    virtual: list[LayerCache] | None = None
    shift: Tensor | None = None
    own: OwnPrefill | None = None
    source: Source | None = None
    cache: Any = None
    handed_in: bool = False

    @property
    def past_keep(self) -> Tensor:
        """Mask of the past's real tokens [B, past] bool."""
        return self.keep[:, : self.past_length]

    @property
    def new_keep(self) -> Tensor:
        """Mask of the real tokens that the cache does not hold, [B, new] bool."""
        return self.keep[:, self.past_length :]

    def context(self, decoding: Decoding) -> tuple[Tensor, Tensor] | None:
        """Tokens that a drafter without a model reads first, where they are more than the prompt."""
        if self.source is not None:
            return None if decoding.reads_source else self.source.text(self.ids)
        return compact(self.ids, self.keep) if self.past_length and self.ids.shape == self.keep.shape else None


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings of one call, or of an open batch's rounds, which have those with a default.

    `request` is what the rounds read of it, `capacity` the tokens that a row has at most. Where it is `bounded`, layers
    keep no more of a text than they can see again; `dropped` is what transformers' cache of the call leaves of layers
    that see the whole text, see `HFModel`.
    """

    model: Any
    session: PatchSession
    decoding: Decoding
    ops: Ops
    text: Text
    request: Request
    capacity: int
    processing: Processing
    config: Any = None
    """The call's generation_config."""
    asked: Continued | None = None
    """The assistant as the call names it."""
    pad: int = 0
    steps: PlainSteps | None = None
    """Plain decoding's own steps, where processors or criteria may have a state: the call decodes in lockstep."""
    streaming: Streaming | None = None
    ranks: Ranks | None = None
    """The processes that hold the model together."""
    criteria: Sequence[Any] = ()
    """Criteria besides length and end tokens."""
    bounded: bool = True
    dropped: tuple[Span | None, ...] | None = None
    likeliest: bool = False
    """True where the call reads no more of the target's logits than which tokens they make the likeliest."""
    follows_load: bool = False
    """True where the number of rows follows the load, and with it roundings."""

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return device_of(self.model)


class Prepared(NamedTuple):
    """Arguments of a custom loop, which transformers' `generate` has made of a call's own."""

    ids: Tensor
    processors: LogitsProcessorList
    criteria: Any
    config: Any
    inputs: dict[str, Any]


def custom_loop(run: Callable[[Any, Prepared], Any]) -> Callable[..., Any]:
    """Value of `custom_generate` by which `generate` hands `run` the model and what it has prepared, not a streamer."""

    def loop(
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: Any,
        generation_config: Any,
        streamer: Any = None,
        **inputs: Any,
    ) -> Any:
        return run(model, Prepared(input_ids, logits_processor, stopping_criteria, generation_config, inputs))

    return loop


def plan_call(
    model: Any,
    session: PatchSession,
    assistant: Decoding | Continued,
    given: dict[str, Any],
    made: Prepared,
    mode: Mode,
    ops: Ops,
) -> Plan:
    """The plan of a call, `given` by the user's arguments. Raises Unsupported for what cannot be combined."""
    ids, processors, criteria, config, _ = made
    asked = assistant if isinstance(assistant, Continued) else Continued(assistant)
    ranks, text = ranks_of(model), _read_text(model, given, made, asked.rows is not None, mode)
    decoding: Decoding = asked.decoding if text.source is None else asked.decoding.reading(text.source)
    shown = text.keep.cpu()  # once: each look at the device's own would wait for it
    refuse_prompts(model, text.ids, shown, text.past_length)
    known = are_known(processors, criteria)
    _refuse_combinations(asked, decoding, text, made, known)
    agreed = criteria if ranks is None else ranks.agreed(criteria)
    ending, streamer = Ending(agreed, text.ids), given.get("streamer")
    limit, rows = ending.limit, asked.rows if asked.rows is not None and asked.rows < len(ids) else None
    new = shown[:, text.past_length :]
    prompts, counts = compact(text.ids[:, -new.shape[1] :], new)
    dropped = dropped_spans(model, text.cache)
    _refuse_padding(model, text, shown, config, limit, dropped, decoding)
    on_round = callable(getattr(streamer, "on_round", None))  # ours: a round before its tokens
    told = None if on_round else streamer
    steps = None if known else PlainSteps(ids, processors, agreed, config, told)
    wanted = bool(config.return_dict_in_generate) and steps is None
    scored = bool(wanted and config.output_scores)
    processing = read_processors(processors, text.ids, bool(config.do_sample), scored=scored)
    if steps is not None:  # which apply them; drafts are not drawn, but a mixture processes both distributions
        process = processing.process if isinstance(decoding, MixedDecoding) else None
        processing = replace(processing, process=process, process_at=None)
    pad = int(padding) if (padding := getattr(config, "_pad_token_tensor", None)) is not None else 0
    streaming = Streaming(streamer, len(prompts), pad) if streamer is not None else None
    emits = streaming is not None and (steps is None or steps.streamer is None)
    request = Request(
        prompts,
        counts,
        list(text.ids),
        limit,
        ending.ends,
        processing.process_at,
        context=text.context(decoding),
        stop=ending.stop,
        emit=streaming.emit if streaming and emits else None,
        watch=streaming.watch if streaming else None,
        keep_scores=scored,
        keep_logits=bool(wanted and config.output_logits),
        answers=asked.answers,
        measure=asked.measure,
        rows=rows,
        steps=steps,
        constraint_of=None if processing.grammar is None else processing.grammar.state,
        prefill=text.own,
    )
    return Plan(
        model,
        session,
        decoding,
        ops,
        text,
        request,
        capacity=int(shown[:, : text.past_length].sum(1).max()) + prompts.shape[1] + limit,
        processing=processing,
        config=config,
        asked=asked,
        pad=pad,
        steps=steps,
        streaming=streaming,
        ranks=ranks,
        criteria=ending.others,
        bounded=_is_bounded(model, text, config),
        dropped=dropped,
        likeliest=not config.do_sample and processing.process is None and not request.reads_logits,
    )


def _refuse_combinations(asked: Continued, decoding: Decoding, text: Text, made: Prepared, known: bool) -> None:
    """Raise Unsupported for processors beside a mixture, and for what prompts in turns cannot be combined with; `known`
    says whether processors and criteria are."""
    held = unknown_types(made.processors) or grammars(made.processors)
    if isinstance(decoding, MixedDecoding) and held:
        raise Unsupported(
            f"a mixture of two models' distributions takes no processors that may look at the tokens so far "
            f"({held}): leave them out, or decode the large model's own distribution"
        )
    if asked.rows is not None and text.handed_in:
        raise Unsupported(f"ContinuousBatch takes whole prompts, without {CACHE}: name its assistant itself")
    if asked.rows is not None and asked.rows < len(made.ids) and not known:
        raise Unsupported(
            f"ContinuousBatch decodes {asked.rows} of {len(made.ids)} prompts at a time, and "
            f"{unknown_types(made.processors, made.criteria)} may keep a state over the whole batch: name its "
            "assistant itself, or pass at most as many prompts as it has rows"
        )


def _read_text(model: Any, given: dict[str, Any], made: Prepared, continuous: bool, mode: Mode) -> Text:
    ids, config, model_kwargs = made.ids.to(device_of(model)), made.config, made.inputs
    cache, layers = model_kwargs.get(CACHE), model.config.get_text_config().num_hidden_layers
    handed_in = given_cache(given) is not None  # the cache is the user's own, to be filled in place
    if handed_in and not model.config.is_encoder_decoder:
        refuse_cache(model, cache, len(ids))
    past = read_cache(cache, layers)
    length = text_length(past)
    if model.config.is_encoder_decoder:  # the mask is the source's
        keep, source = torch.ones_like(ids, dtype=torch.bool), read_source(model, given, model_kwargs, len(ids))
        return Text(ids, keep, length, past, source=source, cache=cache, handed_in=handed_in)
    keep = real_tokens(model, ids, given.get("attention_mask"), config, length)
    if handed_in and length and keep.shape[1] > length:
        refuse_shown_padding(cache, keep)
    shift = position_shift(model, ids, keep, model_kwargs)
    inputs, own = besides_tokens(model_kwargs), None
    if inputs or sees_ahead(model, mode.adapter):
        if continuous:
            alone = f"prompts of tokens alone, without {', '.join(sorted(inputs))}"
            ahead = f"no {type(model).__name__}, whose tokens see more of a prompt than what is before them"
            raise Unsupported(f"ContinuousBatch takes {alone if inputs else ahead}: name its assistant itself")
        own = OwnPrefill(model, config, ids, keep, model_kwargs)
    virtual = virtual_tokens(model, keep, layers)
    if virtual is not None:  # as behind a cache of the user's own
        if past is not None or continuous:
            raise Unsupported(
                f"{CACHE if past is not None else 'ContinuousBatch'} cannot be combined with a prompt-learning "
                "adapter: its virtual tokens begin every prompt of a call"
            )
        past, length = virtual, text_length(virtual)
        keep = torch.cat((torch.ones_like(keep[:, :1]).expand(-1, length), keep), 1)
    return Text(ids, keep, length, past, virtual, shift, own, None, cache, handed_in)


def _refuse_padding(
    model: Any, text: Text, keep: Tensor, config: Any, limit: int, dropped: tuple[Span | None, ...], decoding: Decoding
) -> None:
    """Raise Unsupported for padding that changes what plain decoding sees; `keep` is on the host."""
    if text.source is None:
        past = text.past_length if text.own is None else keep.shape[1]
        refuse_holes(model, keep, past, limit, dropped)
        if text.own is None:
            refuse_seen_padding(model, keep, past, text.past, config)
            refuse_dropped(model, text.cache, text.past_length, config, dropped)
    for exact in (model, *((decoding.draft,) if isinstance(decoding, MixedDecoding) else ())):
        check_padding(exact, int((~keep).sum(1).max()), keep.shape[1] + limit)


def _is_bounded(model: Any, text: Text, config: Any) -> bool:
    """True where nobody sees what windows have dropped: the cache that is handed back keeps no more either."""
    if text.cache is None or not (text.handed_in or config.return_dict_in_generate):
        return True
    spans = layer_spans(model)
    return not any(spans[layer] is not None and keeps_all(text.cache, layer) for layer in set(kept_by(model.config)))
