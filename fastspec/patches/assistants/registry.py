"""From `assistant=` to a decoding: names, config objects, or an object with a `drafter` method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import nn

from fastspec.cascade.config import Cascade
from fastspec.config import (
    Autoregressive,
    ContinuousBatch,
    Eagle1,
    Eagle2,
    Eagle3,
    Mtp,
    Nasd,
    Speculative,
)
from fastspec.default_trees import CPP_TREE
from fastspec.errors import CheckpointError, Unsupported, accepted
from fastspec.generation.drafters.base import Decoding, adopt_decoding, check_taps
from fastspec.generation.drafters.dynamic_tree import DynamicDecoding, SizedDecoding, trees_of
from fastspec.generation.drafters.head_drafter import EagleDrafter, StaticDrafter
from fastspec.generation.drafters.head_program import Cut, HeadProgram, cut_over
from fastspec.generation.drafters.nasd import NasdDecoding, check_tokens
from fastspec.generation.drafters.ngram_storage import NgramStorage
from fastspec.generation.engine.call import Outcome
from fastspec.generation.heads.bound import BoundHead, followed, lowered
from fastspec.generation.ops import Ops
from fastspec.patches.assistants.fused import fused_drafter
from fastspec.patches.assistants.gemma4_assistant import gemma4_decoding, is_assistant
from fastspec.patches.assistants.heads import parts_of
from fastspec.patches.assistants.mtp import load_mtp, save_with_mtp, tell_of_adapter
from fastspec.patches.assistants.smaller_heads import in_bits, ops_of, refuse_fused, with_vocabulary
from fastspec.patches.assistants.speculative import read_parameters, resolve_speculative, vocabulary
from fastspec.patches.backends import ngram_counter, ngram_grower
from fastspec.patches.call.refusals import refuse_heads, refuse_joining
from fastspec.patches.hf.compat import device_of, dtype_of
from fastspec.patches.hf.layers import product_of
from fastspec.patches.hf.parallel import embedding_of, group_of, parallel_style
from fastspec.patches.session import session_of


@dataclass(frozen=True, slots=True)
class Plain(Decoding):
    """Decoding without a drafter."""

    continuous: ClassVar[bool] = True
    name: str = "autoregressive"
    taps: None = None

    def drafter(self, **_: Any) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class HeadDecoding(SizedDecoding):
    """Decoding with a head, of which several processes may have a share each."""

    continuous: ClassVar[bool] = True
    head: BoundHead
    cut: Cut | None = None
    """Share that this process has of the head; None: all of it."""

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return (self.head.module,)


@dataclass(frozen=True, kw_only=True)
class EagleDecoding(HeadDecoding, DynamicDecoding):
    """Decoding with a head and a dynamic tree."""

    drafts: Callable[..., EagleDrafter] = EagleDrafter
    """Maker of the drafter of a call, from the arguments of `EagleDrafter`."""

    @property
    def taps(self) -> tuple[int, ...]:  # type: ignore[override]
        """The hidden states that the head reads."""
        return self.head.config.taps

    @property
    def before_norm(self) -> bool:
        return self.head.config.last_tap_before_norm

    def drafter(self, *, rows: int, capacity: int, device: Any, ops: Ops, process: Any) -> EagleDrafter:
        given, ops = ops, ops_of(self.head, ops)
        head = self.head if self.cut is not None else lowered(self.head, ops.drafts_in)
        drafter = self.drafts(head, self.tree(rows, ops), rows=rows, capacity=capacity, ops=ops, cut=self.cut)
        _borrow(drafter.program, given)
        return drafter


@dataclass(frozen=True, kw_only=True)
class StaticDecoding(HeadDecoding):
    """Decoding with an EAGLE-1 head and a static tree, or as much of it as pays."""

    config: Eagle1
    taps: tuple[int, ...] = ()

    def drafter(self, *, rows: int, capacity: int, device: Any, ops: Ops, process: Any) -> StaticDrafter:
        """The drafter of one call; it draws its drafts where the config asks for that and `process` allows it."""
        process, given, ops = process if self.config.drafts == "sampled" else None, ops, ops_of(self.head, ops)
        drafter = StaticDrafter(
            self.head, self.config.tree(), rows=rows, capacity=capacity, ops=ops, process=process, cut=self.cut
        )
        _borrow(drafter.program, given)
        return drafter


def _borrow(program: HeadProgram, ops: Ops) -> None:
    """Let a head read the target's embedding and its whole LM head as passes of the target do, whose `ops` these are:
    what each process holds a part of, and weights as stored where theirs are."""
    embedding, lm_head = program.binding.embedding, program.binding.lm_head
    if parallel_style(embedding) is not None:
        program.look_up = embedding_of(embedding, ops)
    if lm_head is not None and not program.config.target_rows:
        program.vocabulary = product_of((lm_head,), ops)


@dataclass(frozen=True, slots=True)
class Continued:
    """An assistant that goes on from given answers: they are verified as drafts first. `answers` holds a text per row,
    and `hear` is given the call's outcome, with the measures of every token where `measure` asks for them. `rows`
    prompts are decoded at a time, None: all of them."""

    decoding: Any
    answers: Sequence[Sequence[int]] | None = None
    hear: Callable[[Outcome], None] | None = None
    measure: bool = False
    rows: int | None = None


def chosen(call: Any, model: Any, default: Any) -> tuple[Any, bool]:
    """The assistant of a call that does not name one as an argument, and whether its own generation_config does: `call`
    is that config, `model` the model's, `default` the patch's assistant. Raises Unsupported for an object in a
    generation_config."""
    for config in (call, model):
        held = getattr(config, "assistant", None)
        if held is not None and not isinstance(held, (str, dict)):
            raise Unsupported(
                f"generation_config.assistant={held!r} would be lost when the generation_config is saved: use a name, "
                'or a dictionary such as {"name": "eagle3", "depth": 5}; an object goes to generate(assistant=...) or '
                "to fastspec.patch(model, assistant=...)"
            )
        if held is not None:
            return held, config is call
    return default, False


def read_config(fields: dict[str, Any]) -> Any:
    """The config object of a dictionary: its `name` says which, the rest are its settings. Raises Unsupported for what
    is none."""
    settings = dict(fields)
    name = settings.pop("name", None)
    if not isinstance(name, str) or name not in NAMES or NAMES[name] is Cascade:
        known = [repr(each) for each in NAMES if each != Cascade.name]
        raise Unsupported(f"assistant={fields!r} has the name {name!r}: {accepted(repr(name), known)}")
    try:
        return NAMES[name](
            **{key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
        )
    except TypeError as error:
        raise Unsupported(f"assistant={fields!r} does not fit fastspec.{NAMES[name].__name__}: {error}") from error


def resolve(assistant: Any, resources: dict[str, Any], model: Any) -> Any:
    """The decoding that an `assistant=` asks for. Raises Unsupported for an unknown name, a missing resource, and an
    object that lacks what a decoding must have."""
    if isinstance(assistant, dict):
        assistant = read_config(assistant)
    if isinstance(assistant, str):
        if assistant not in NAMES:
            raise Unsupported(
                f"assistant={assistant!r} is unknown: "
                f"{accepted(repr(assistant), map(repr, NAMES), ', or a config object')}"
            )
        assistant = _cascade(resources).config if assistant == Cascade.name else NAMES[assistant]()
    if isinstance(assistant, ContinuousBatch):
        decoding = resolve(assistant.assistant, resources, model)
        refuse_joining(decoding, model)
        return Continued(decoding, rows=assistant.rows)
    if isinstance(assistant, Continued):
        return replace(assistant, decoding=resolve(assistant.decoding, resources, model))
    if type(assistant) in RESOLVERS:
        return RESOLVERS[type(assistant)](assistant, resources, model)
    decoding = adopt_decoding(assistant)
    if decoding is not None:
        check_taps(decoding.taps, model.config.get_text_config().num_hidden_layers, decoding.name)
        return decoding
    if isinstance(assistant, nn.Module):
        raise Unsupported(
            f"assistant={type(assistant).__name__} is a module: fastspec.patch(model, speculative=draft_model) or "
            'fastspec.patch(model, eagle3=head) takes it, and the call names it, assistant="speculative" or "eagle3"'
        )
    raise Unsupported(
        f"assistant={assistant!r} is neither a name ({', '.join(map(repr, NAMES))}), nor a config such as "
        "fastspec.Eagle3(), nor an object with `name`, `taps` and `drafter` (fastspec.Decoding)"
    )


def _head(name: str, resources: dict[str, Any], model: Any, top_k: int) -> BoundHead:
    """The head of an EAGLE assistant, on the model's device and in its dtype. Raises Unsupported where there is
    none."""
    refuse_heads(name, model)
    head: BoundHead | None = resources.get(name)
    if head is None and name == Mtp.name:
        with _loading:
            head = resources.get(name)
            if head is None:
                session = session_of(model)
                try:
                    found = load_mtp(True, model)
                except CheckpointError as error:
                    raise Unsupported(f"assistant {name!r} has no head: {error}") from error
                head = resources[name] = (
                    found if session is None else in_bits(found, session.head_bits, name, model, session.backend)
                )
                if session is not None:
                    session.set(model, "save_pretrained", MethodType(save_with_mtp, model))
    if head is None:
        raise Unsupported(
            f"assistant {name!r} has no head: fastspec.patch(model, {name}=path_or_hub_id_or_head) supplies it"
        )
    parts = parts_of(model, layers=name == Mtp.name)
    tell_of_adapter(head, parts)
    fresh = followed(head, parts)
    if fresh is not head:
        resources.update({each: fresh for each, held in resources.items() if held is head})
        head = fresh
    _check_top_k(head, top_k)
    return head


_loading = Lock()
"""Of heads that calls load: several may be the first."""


def _check_top_k(head: BoundHead, top_k: int) -> None:
    if top_k > head.config.draft_vocab_size:
        raise Unsupported(
            f"top_k={top_k} children of a node exceed the head's draft vocabulary of {head.config.draft_vocab_size}"
        )


def _eagle(config: Eagle1, resources: dict[str, Any], model: Any) -> StaticDecoding:
    head = _head("eagle", resources, model, 1 + max(map(max, config.tree())))
    steps = (config, device_of(model).type) if config.is_default else None
    cut = cut_over(head.module, group_of(model))
    return StaticDecoding(name=config.name, config=config, head=head, cut=cut, device_steps=steps)


def _dynamic(config: Eagle2 | Eagle3 | Mtp, resources: dict[str, Any], model: Any) -> DynamicDecoding:
    if is_assistant(resources.get(config.name)):
        return gemma4_decoding(config, resources, model)
    fields, most = trees_of(config, device_of(model).type)
    head = _head(config.name, resources, model, most)
    if config.fused:
        refuse_fused(head)
    if isinstance(config, Mtp):
        head = with_vocabulary(head, config, model)
        _check_top_k(head, most)
    return EagleDecoding(
        **fields,
        cpp=CPP_TREE if fields["default"] and config.name == Eagle3.name else None,
        head=head,
        drafts=fused_drafter if config.fused else EagleDrafter,
        cut=None if config.fused else cut_over(head.module, group_of(model)),
    )


MEASURED_BYTES = 2**26
"""Weights of a model whose rounds are measured: with fewer they are as long as the host is busy."""
EXACT = "cpu", torch.float32
"""Where a tree of any size gives the same tokens, so that a clock may choose it."""


def _nasd(config: Nasd, resources: dict[str, Any], model: Any) -> NasdDecoding:
    size = vocabulary(model)
    check_tokens(config.storage, size)
    weight_bytes = sum(weight.nbytes for weight in read_parameters(model))
    session, alone = session_of(model), group_of(model) is None  # processes choose alike
    clocked = alone and weight_bytes >= MEASURED_BYTES and (device_of(model).type, dtype_of(model)) == EXACT
    measured = session.ngram_costs if session is not None and clocked else None
    counted = config.storage in ("ngram", "one_level") or isinstance(config.storage, NgramStorage)
    compiled = (ngram_counter(), ngram_grower()) if counted else (None, None)
    return NasdDecoding(config, weight_bytes, size, measured, *compiled)


def _cascade(resources: dict[str, Any]) -> Any:
    models = resources.get(Cascade.name)
    if models is None:
        raise Unsupported(
            "assistant 'cascade' has no stages: fastspec.patch(model, cascade=fastspec.Cascade(...)) supplies them"
        )
    return models


RESOLVERS: dict[Any, Callable[[Any, dict[str, Any], Any], Any]] = {
    Autoregressive: lambda config, resources, model: Plain(),
    Eagle1: _eagle,
    Eagle2: _dynamic,
    Eagle3: _dynamic,
    Mtp: _dynamic,
    Nasd: _nasd,
    Speculative: resolve_speculative,
    Cascade: lambda config, resources, model: _cascade(resources).decoding(config),
}
"""Config class -> (config, resources, model) -> Decoding."""
NAMES = {config.name: config for config in RESOLVERS}
"""Strings that `assistant=` takes; `NAMES[name]()` is the assistant with its defaults, but for the cascade, which
is the patch's."""
