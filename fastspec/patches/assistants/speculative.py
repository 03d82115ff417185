"""Decodings with other models: a draft model, the target's own first layers, mixtures, and chains of models."""

from __future__ import annotations

import warnings
from collections.abc import Sized
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

from torch import nn
from transformers import PreTrainedModel

from fastspec.cascade.config import Cascade
from fastspec.cascade.decisions import mixed
from fastspec.config import Speculative
from fastspec.errors import Unsupported
from fastspec.generation.drafters.base import Decoding
from fastspec.generation.drafters.chain import ChainDrafter, MixedDrafter
from fastspec.generation.drafters.policy import LAYERS, Cost, Length, cost_on
from fastspec.generation.drafters.retokenized import SharedDrafter, TextDrafter, room_for, shared_tokens
from fastspec.generation.drafters.staged import StagedDrafter, room
from fastspec.generation.ops import Ops
from fastspec.generation.stats import Stats
from fastspec.generation.target import Source, Target
from fastspec.patches.assistants.gemma4_assistant import is_assistant
from fastspec.patches.hf.compat import device_of, dtype_of, every_module, unpack_weights
from fastspec.patches.hf.config_fields import recurrent_layers, table_rows
from fastspec.patches.hf.ends import listed
from fastspec.patches.hf.factory import language_model
from fastspec.patches.hf.model import HFModel
from fastspec.patches.hf.modes import adapter_for, check_supported
from fastspec.patches.hf.seq2seq import encode

PADDING = 1024
"""Two vocabularies whose sizes differ by no more count as one, padded differently, as Qwen's are."""

ROLES = ("bos_token_id", "eos_token_id", "pad_token_id")
MANY_ROUNDS, SELDOM = 32, 0.05
"""Rounds with drafts, and the share of them with an accepted one, under which a call warns: by chance one call in a
thousand, of a draft model that is right about every fourth token."""


@dataclass(frozen=True, slots=True)
class SpeculativeDecoding(Decoding):
    """Decoding with drafts of `draft`; the target itself where `config.early_exit` is set."""

    continuous: ClassVar[bool] = True
    config: Speculative
    target: Any
    draft: Any
    name: str = "speculative"
    taps: None = None
    source: Source | None = None
    """What the target reads, where the models have an encoder; the draft model reads it with its own."""
    reads_source: ClassVar[bool] = True

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return (self.draft,)

    def reading(self, source: Source) -> SpeculativeDecoding:
        return replace(self, source=source)

    def drafter(self, *, rows: int, capacity: int, device: Any, ops: Ops, process: Any) -> ChainDrafter:
        """The drafter of one call; with early exit it takes its cache from the target later, in `bind`."""
        config, layers = self.config, self.config.early_exit
        more = check_cost(self.target, device, rows)
        length = _length(config, draft_cost(self.draft, self.target, device, layers), more)
        model: Any = None
        if layers is None:
            source = None if self.source is None else encode(self.draft, self.source)
            model = language_model(
                self.draft, source, rows=rows, capacity=capacity + length.room, tail=length.unread, ops=ops, drafts=True
            )
        early = None if layers is None else partial(self._early, layers)
        vocabs = {"vocab": vocabulary(self.target), "draft_vocab": vocabulary(self.draft)}
        return ChainDrafter(model, length, branches=config.branches, ops=ops, process=process, early=early, **vocabs)

    def _early(self, layers: int, target: Target) -> HFModel:
        """The target's own first layers, as a model that drafts on its cache."""
        assert isinstance(target, HFModel)
        limit, ops = target.state.limit, target.ops
        return HFModel(self.target, target.adapter, rows=0, capacity=limit, tail=0, ops=ops, early=(target, layers))


@dataclass(frozen=True, slots=True)
class TextDecoding(Decoding):
    """Decoding with drafts of a model that has another tokenizer."""

    config: Speculative
    target: Any
    pair: Pair
    name: str = "speculative"
    taps: None = None

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return (self.pair.model,)

    def drafter(self, *, rows: int, capacity: int, device: Any, ops: Ops, process: Any) -> TextDrafter | SharedDrafter:
        """The drafter of a call, and of later ones of its kind: drafts are drawn from the shared tokens, if any, under
        `process`, and are texts without, since a call without processors may sample too."""
        draft, config = self.pair.model, self.config
        times = cost_on(device)
        more = check_cost(self.target, device, rows) + times.reread / pass_ms(times, self.target)
        length = _length(config, draft_cost(draft, self.target, device), more)
        room = room_for(capacity, length)
        model = language_model(draft, None, rows=rows, capacity=room, tail=2, ops=ops, drafts=True)
        texts: dict[str, Any] = {
            "room": room,
            "tokenizer": self.pair.tokenizer,
            "draft_tokenizer": self.pair.draft_tokenizer,
            "vocab": vocabulary(self.target),
            "draft_vocab": vocabulary(draft),
            "device": device,
        }
        if process is None or not self.pair.shared:
            return TextDrafter(model, length, **texts)  # greedy calls need not compare vocabularies
        return SharedDrafter(model, length, self.pair.shared, ops=ops, process=process, **texts)


@dataclass(frozen=True)
class Pair:
    """A draft model, its tokenizer and the target's, where they differ."""

    model: Any
    draft_tokenizer: Any
    tokenizer: Any

    @cached_property
    def shared(self) -> list[tuple[int, int]]:
        """Their shared tokens, found once."""
        return shared_tokens(self.tokenizer, self.draft_tokenizer)


def _length(config: Speculative, cost: float, check: float) -> Length:
    """Length of the chains of a config: as many drafts as pay, or `gamma`."""
    return Length(config.most, cost, check) if config.gamma is None else Length(config.gamma)


def check_cost(model: Any, device: Any, rows: int) -> float:
    """Cost of a pass over drafts beyond one over a token, in such passes; 0 in a batch, which has several anyway."""
    return cost_on(device).check(sum(weight.nbytes for weight in read_parameters(model))) if rows == 1 else 0.0


def draft_cost(draft: Any, target: Any, device: Any, layers: int | None = None) -> float:
    """Cost of a token of a draft model, or of its first `layers`, in passes of the target: weights, layers and host."""
    times = cost_on(device)
    return (times.drafted + pass_ms(times, draft, layers)) / pass_ms(times, target)


def pass_ms(times: Cost, model: Any, layers: int | None = None) -> float:
    """Milliseconds of a pass over one node of a model, or of its first `layers` and its LM head."""
    whole, read = model.config.get_text_config().num_hidden_layers, read_weights(model)
    if layers is not None:
        head = vocabulary(model) * model.config.get_text_config().hidden_size
        read = head + (read - head) * layers / whole
    return times.one * (layers or whole) / LAYERS + read * dtype_of(model).itemsize / times.bytes_per_ms


def vocabulary(model: Any) -> int:
    """Rows of a model's LM head."""
    return table_rows(model.get_output_embeddings(), model.config)


def read_parameters(model: Any) -> list[nn.Parameter]:
    """Parameters that a pass reads: no embedding that is not the LM head, no encoder, all of a mixture's experts."""
    decoder = model.get_decoder() if model.config.is_encoder_decoder else model
    embedding, head = decoder.get_input_embeddings(), model.get_output_embeddings()
    parts = [part for part in (decoder, head) if part is not None]
    modules = [module for part in parts for module in every_module(part)]
    whole = {id(p): p for module in modules for p in module._parameters.values() if p is not None}
    if head is None:  # a class of another's, which may tie it to the embedding
        return list(whole.values())
    looked_up = {id(p) for p in embedding.parameters()} - {id(p) for p in head.parameters()}
    return [p for name, p in whole.items() if name not in looked_up]


def read_weights(model: Any) -> int:
    """Number of weights that one pass reads."""
    return sum(p.numel() for p in read_parameters(model))


def check_draft(draft: Any, target: Any) -> Any:
    """The draft model, or the Pair of one with two tokenizers; warns where it is no smaller, or special tokens differ.

    Raises Unsupported for a model that cannot be decoded with, vocabularies that are not one, and another device.
    """
    draft = _pair(draft) if isinstance(draft, tuple) else draft
    model = draft.model if isinstance(draft, Pair) else draft
    _refuse_draft(model, target)
    if isinstance(draft, Pair):
        _refuse_tokenizers(draft, target)
    elif abs(vocabulary(model) - vocabulary(target)) > PADDING:
        raise Unsupported(
            f"the draft model has a vocabulary of {vocabulary(model)} tokens and the target one of "
            f"{vocabulary(target)}: give both tokenizers with speculative=(draft_model, draft_tokenizer, tokenizer) "
            f"(sizes of one vocabulary differ by {PADDING} at most, for padding)"
        )
    _same_device(model, target)
    own, others = read_weights(model), read_weights(target)
    if own >= others:
        warnings.warn(
            f"the draft model reads {own / 1e6:.1f} M weights a token and the target {others / 1e6:.1f} M: "
            "drafting will not pay",
            stacklevel=3,
        )
    if not isinstance(draft, Pair):
        _compare_tokens(model, target)
    return draft


def _pair(given: tuple[Any, ...]) -> Pair:
    """The pair of a tuple that a user gave."""
    if len(given) != 3 or not all(callable(getattr(each, "decode", None)) for each in given[1:]):
        names = ", ".join(type(part).__name__ for part in given)
        raise Unsupported(
            "speculative=(draft_model, draft_tokenizer, tokenizer) takes the draft model, its tokenizer and the "
            f"target's tokenizer, not ({names})"
        )
    return Pair(*given)


def _refuse_draft(model: Any, target: Any) -> None:
    """Refuse what is no draft model of a target."""
    if not isinstance(model, PreTrainedModel):
        given = repr(model) if isinstance(model, (str, Path)) else f"a {type(model).__name__}"
        raise Unsupported(
            "speculative= takes a transformers model, or (draft_model, draft_tokenizer, tokenizer) where the "
            f"tokenizers differ, not {given}: load one with AutoModelForCausalLM.from_pretrained(...)"
        )
    if is_assistant(model):
        raise Unsupported(
            f"{type(model).__name__} is no draft model of its own: it reads the keys and values of its target: "
            'fastspec.patch(model, mtp=assistant) takes it, and generate(assistant="mtp") drafts with it'
        )
    check_supported(model)
    if any(recurrent_layers(model.config)):
        raise Unsupported(
            f"the draft model {type(model).__name__} keeps a recurrent state, which cannot be taken back when a draft "
            "of its own is rejected: give one with attention in every layer"
        )
    if model.config.is_encoder_decoder != target.config.is_encoder_decoder:
        kinds = ["a decoder-only", "an encoder-decoder"]
        raise Unsupported(
            f"the draft model is {kinds[model.config.is_encoder_decoder]} model and the target "
            f"{kinds[target.config.is_encoder_decoder]} one: a draft model reads what the target reads, so both must "
            "be of one kind"
        )
    if model is target:
        raise Unsupported(
            "speculative=model is the target itself: fastspec.Speculative(early_exit=k) drafts with its first k layers"
        )


def _refuse_tokenizers(pair: Pair, target: Any) -> None:
    """Refuse a pair for an encoder-decoder model, and tokenizers that are another model's."""
    if target.config.is_encoder_decoder:
        raise Unsupported(
            "a draft model with another tokenizer drafts for decoder-only models: an encoder-decoder model's shares "
            "its own"
        )
    for name, tokenizer, model in (
        ("draft_tokenizer", pair.draft_tokenizer, pair.model),
        ("tokenizer", pair.tokenizer, target),
    ):
        size = vocabulary(model)
        if isinstance(tokenizer, Sized) and len(tokenizer) - size > PADDING:
            raise Unsupported(
                f"{name} has {len(tokenizer)} tokens and its model {size}: it is another model's; "
                "speculative=(draft_model, draft_tokenizer, tokenizer) takes the target's last"
            )


def _compare_tokens(draft: Any, target: Any) -> None:
    """Warn where two models that are to share a tokenizer have no token in common for one role."""
    named = [(role, _ids(draft, role), _ids(target, role)) for role in ROLES]
    apart = [
        f"{role} {sorted(own)} and {sorted(other)}" for role, own, other in named if own and other and not own & other
    ]
    if apart:
        differences = "; ".join(apart)
        warnings.warn(
            f"the draft model and the target differ in special tokens ({differences}): if their tokenizers differ, "
            "drafts will not be accepted; give both with speculative=(draft_model, draft_tokenizer, tokenizer)",
            stacklevel=4,
        )


def _ids(model: Any, role: str) -> set[int]:
    """Tokens that a model's configuration and generation configuration name as its `role`."""
    configs = model.config.get_text_config(), model.generation_config
    return {token for config in configs for token in listed(getattr(config, role, None))}


def warn_if_refused(decoding: Any, stats: Stats) -> bool:
    """Warn of a draft model of whose drafts almost none were accepted in many rounds of a call -> whether it did."""
    if not isinstance(decoding, SpeculativeDecoding) or decoding.draft is decoding.target:
        return False
    accepted = sum(stats.lengths[1:])
    if stats.draft_rounds < MANY_ROUNDS or accepted >= SELDOM * stats.draft_rounds:
        return False
    warnings.warn(
        f"drafts of the draft model were accepted in {accepted} of {stats.draft_rounds} rounds: it predicts little "
        "of the target, or has another tokenizer; then give both with speculative=(draft_model, draft_tokenizer, "
        "tokenizer)",
        stacklevel=2,
    )
    return True


def _same_device(draft: Any, target: Any) -> None:
    place, wanted = device_of(draft), device_of(target)
    if place != wanted:
        raise Unsupported(f"the draft model is on {place} and the target on {wanted}: move one of them with .to(...)")


def resolve_speculative(
    config: Speculative, resources: dict[str, Any], target: Any
) -> SpeculativeDecoding | TextDecoding:
    """The decoding of a config. Raises Unsupported without a draft model, and for an early exit that cannot be."""
    if config.early_exit is None:
        draft = resources.get("speculative")
        if draft is None:
            raise Unsupported(
                "assistant 'speculative' has no draft model: fastspec.patch(model, speculative=draft_model) supplies "
                "it, or fastspec.Speculative(early_exit=k) drafts with the target's first k layers"
            )
        drafts = draft.model if isinstance(draft, Pair) else draft
        _same_device(drafts, target)
        unpack_weights(drafts)
        if not isinstance(draft, Pair):
            return SpeculativeDecoding(config, target, draft)
        if config.branches > 1:
            raise Unsupported(f"branches={config.branches}: drafts of a model with another tokenizer are chains")
        return TextDecoding(config, target, draft)
    layers = target.config.get_text_config().num_hidden_layers
    if config.early_exit >= layers:
        raise Unsupported(f"early_exit={config.early_exit}: the target has {layers} layers, so at most {layers - 1}")
    if any(recurrent_layers(target.config)):
        name = type(target).__name__
        raise Unsupported(
            f"early_exit: {name} keeps a recurrent state, which cannot be taken back when a draft of its own is "
            "rejected"
        )
    if adapter_for(target) is None:
        raise Unsupported(f"early_exit needs a model with an adapter, and {type(target).__name__} runs in generic mode")
    return SpeculativeDecoding(config, target, target)


@dataclass(frozen=True, slots=True)
class MixedDecoding(Decoding):
    """Decoding by a deferral rule's mixture of the target's distribution and the draft model's."""

    continuous: ClassVar[bool] = True
    config: Cascade
    draft: Any
    target: Any
    name: str = "cascade"
    taps: None = None

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return (self.draft,)

    def drafter(self, *, rows: int, capacity: int, device: Any, ops: Ops, process: Any) -> MixedDrafter:
        config, more = self.config, self.config.gamma + 2
        model = language_model(self.draft, None, rows=rows, capacity=capacity + more, tail=2, ops=ops)
        blend = partial(mixed, config.rule, config.alpha)
        return MixedDrafter(
            model, config.gamma, blend, vocab=vocabulary(self.target), draft_vocab=vocabulary(self.draft), ops=ops
        )


@dataclass(frozen=True, slots=True)
class StagedDecoding(Decoding):
    """Decoding with drafts of a chain of models, the smallest first: the target's distribution exactly."""

    continuous: ClassVar[bool] = True
    config: Cascade
    drafts: tuple[Any, ...]
    target: Any
    name: str = "cascade"
    taps: None = None

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return self.drafts

    def drafter(self, *, rows: int, capacity: int, device: Any, ops: Ops, process: Any) -> StagedDrafter:
        gamma = self.config.gamma
        more, tail = room(len(self.drafts), gamma)
        size: dict[str, Any] = {"rows": rows, "capacity": capacity + more, "tail": tail}
        models = [language_model(draft, None, **size, ops=ops, drafts=True) for draft in self.drafts]
        vocabs = [vocabulary(draft) for draft in self.drafts]
        return StagedDrafter(models, gamma, vocab=vocabulary(self.target), vocabs=vocabs, ops=ops, process=process)
