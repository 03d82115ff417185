"""The front door: `model.generate(..., assistant=...)`, its call, and calls that are left to transformers."""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fastspec.errors import FastSpecError, Unsupported
from fastspec.generation.drafters.base import check_rows
from fastspec.generation.engine.rounds import decode
from fastspec.kernels.tuned_launches import installed, name_of
from fastspec.patches.assistants.registry import Continued, HeadDecoding, chosen, resolve
from fastspec.patches.assistants.speculative import warn_if_refused
from fastspec.patches.call.assembly import engine_of, entry, sized
from fastspec.patches.call.output import output_of
from fastspec.patches.call.plan import Plan, Prepared, custom_loop, plan_call
from fastspec.patches.call.processors import FILTERS
from fastspec.patches.call.ranks import Ranks, ranks_of, refuse_beside
from fastspec.patches.call.refusals import (
    refuse_arguments,
    refuse_ids,
    refuse_overrides,
    refuse_plain_padding,
    refuse_prepared,
)
from fastspec.patches.cascade.loop import AdaptiveCascade
from fastspec.patches.hf.cache import fill_cache
from fastspec.patches.hf.compat import (
    device_of,
    drop_capturing_hooks,
    in_step,
    is_out_of_memory,
    is_shared_out,
    own_stop_strings,
    plain_decoding,
)
from fastspec.patches.hf.parallel import group_of
from fastspec.patches.hf.seq2seq import refuse_seq2seq
from fastspec.patches.session import ABSENT, PatchSession, session_of


def generate(self: Any, *args: Any, assistant: Any = ABSENT, **kwargs: Any) -> Any:
    """transformers' `generate`, with `assistant=`: a name, a config object or an object with a `drafter` method.

    Everything else keeps its meaning. A call that names none has the one of its generation_config, of the model's, or
    of the patch, in this order; without any, and with None or "none", the original runs untouched. Raises Unsupported
    for what a named assistant cannot be combined with; where it is a default, the original runs and a warning says
    why.
    """
    begun = time.perf_counter()
    session = session_of(self)
    if session is None:  # someone kept this method from before `unpatch`
        if assistant is not ABSENT and assistant is not None:
            raise Unsupported(
                f"this {type(self).__name__} is not patched any more: fastspec.patch(model) comes before assistant="
            )
        return type(self).generate(self, *args, **kwargs)
    refuse_beside(group_of(self), "generate")
    original = session.original(self, "generate")
    given = _by_name(self, args, kwargs)
    named = assistant is not ABSENT
    if not named:
        assistant, named = chosen(given.get("generation_config"), self.generation_config, session.default)
    if assistant is None or assistant == "none" or (not named and given.get("custom_generate") is not None):
        refuse_plain_padding(self, given)
        return original(*args, **kwargs)
    session.unpack(self)
    shared = is_shared_out(self)
    if shared and given.get("synced_gpus") is False:  # the others need not call at all, so that they cannot be asked
        apart = Unsupported(
            "synced_gpus=False cannot be combined with an assistant on a model that FSDP shares out: leave it out"
        )
        _leave(self, given, session, named, apart)
        return original(*args, **kwargs)
    with SynchronizedCall(self) if shared else LocalCall() as step:
        try:
            decoding = _checked(self, session, assistant, given)
            step.check(decoding)
        except Unsupported as reason:
            step.agree(False)
            _leave(self, given, session, named, reason)
            return original(**{**given, "synced_gpus": in_step(self, given)}) if shared else original(*args, **kwargs)
        if isinstance(decoding, AdaptiveCascade):
            try:
                return decoding.generate(self, session, given, ranks_of(self))
            except Unsupported as reason:  # by a stage, when it is asked
                _leave(self, given, session, named, reason)
                return original(*args, **kwargs)
        with session.turn.taken(device_of(self)):
            run = partial(_decode, session, decoding, given, named, step, begun)
            try:
                return original(**{**own_stop_strings(self, given), "custom_generate": custom_loop(run)})
            finally:
                if not session.captured:
                    drop_capturing_hooks(self)  # a model that has them cannot be pickled


def _leave(model: Any, given: dict[str, Any], session: PatchSession, named: bool, reason: Unsupported) -> None:
    """Leave a call to transformers, with a warning. Raises the reason where the call `named` its assistant, and
    Unsupported for a call that transformers would decode wrongly."""
    if named:
        raise reason
    refuse_plain_padding(model, given)
    session.leave(reason)


def _decode(
    session: PatchSession,
    decoding: Any,
    given: dict[str, Any],
    named: bool,
    step: LocalCall,
    begun: float,
    model: Any,
    made: Prepared,
) -> Any:
    """Function that `generate` calls in place of its own loop, with what it has made of its arguments."""
    with torch.inference_mode(False), torch.no_grad():  # what one call makes is written to in others, of any mode
        # here and not before: a streamer was given the prompt, and a subclass may have prepared the model in its way
        mode = session.mode(model)
        ops = session.ops(model, mode)
        if session.pack(model, mode, ops):
            mode = session.mode(model)  # where the weights lie now is in the key of the call's engine
        session.tell_mode(mode)
        try:
            refuse_prepared(made.config, made.inputs, model.config.is_encoder_decoder)
            call = Call(plan_call(model, session, decoding, given, made, mode, ops), begun)
            refused = None
        except Unsupported as reason:
            refused = reason
        if step.agree(refused is None):
            return call.run()
    refused = refused or Unsupported(
        "another process, which holds a part of the model, cannot serve its part of the call"
    )
    _leave(model, given, session, named, refused)
    return plain_decoding(model, given, *made)


AGREED = "limit", "keep_scores", "keep_logits", "measure", "answers", "rows"
"""Fields of a request that processes must have alike."""


class Call:
    """A planned call, begun at a second of `time.perf_counter`, and its engine; `run` decodes. The constructor raises
    Unsupported where the drafter cannot serve it, and FastSpecError when memory has run out."""

    def __init__(self, plan: Plan, begun: float) -> None:
        self.begun = begun
        if plan.ranks is not None:
            _agree(plan, plan.ranks)
        with _memory(plan):
            self.plan = plan = sized(plan)
            self.engine, self.key = engine_of(plan)
        if plan.request.rows is not None:
            check_rows(self.engine.drafter, plan.decoding.name)
            self.plan = replace(plan, request=replace(plan.request, entry=partial(entry, plan, self.engine)))

    def run(self) -> Any:
        """Decode, and return what `generate` returns."""
        plan, engine = self.plan, self.engine
        session, text = plan.session, plan.text
        if text.cache is not None and text.virtual is not None:
            # not before: a call that is refused must leave the cache as it was
            fill_cache(text.cache, 0, text.virtual)
        with _memory(plan):
            prepared = time.perf_counter() - self.begun
            outcome = decode(engine, plan.request, plan.decoding.name)
        outcome.stats.prepare_seconds = prepared
        if plan.ranks is not None:
            plan.ranks.check_answers(outcome.tokens)
        session.calls.append(outcome.stats)
        if plan.streaming is not None:
            plan.streaming.streamer.end()  # who waits for it in another thread finds the call in the report
        if plan.asked is not None and plan.asked.hear is not None:
            plan.asked.hear(outcome)
        session.warned = session.warned or warn_if_refused(plan.decoding, outcome.stats)
        output = output_of(plan, outcome, engine.target)
        if self.key is not None:
            session.engines.held[self.key] = engine
        return output


def _agree(plan: Plan, ranks: Ranks) -> None:
    """See to it that all processes run this call, and draw the same random numbers in it."""
    request, config = plan.request, plan.config
    kinds = [type(each).__name__ for each in (*plan.processing.processors, *plan.criteria)]
    asked = [getattr(request, name) for name in AGREED], request.watch is None, sorted(request.ends)
    settings = plan.processing.sample, [getattr(config, name) for name in FILTERS]
    # what is whole in every process must round alike
    kernels = plan.ops.name, plan.ops.drafts_in
    tuned = sorted(map(repr, installed(name_of(plan.device)).items()))
    decoding, profiled = re.sub("0x[0-9a-f]+", "", repr(plan.decoding)), plan.session.profile is None
    ranks.check_arguments(plan.text.ids, plan.text.keep, decoding, kinds, asked, settings, profiled, kernels, tuned)
    if plan.processing.sample:
        ranks.share_random_numbers()


@contextmanager
def _memory(plan: Plan) -> Iterator[None]:
    """Say of an error that memory has run out, and what would need less."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, FastSpecError) or not is_out_of_memory(error):
            raise
        raise FastSpecError(
            f"out of memory while decoding {plan.request.width} rows of up to {plan.capacity} tokens on "
            f"{plan.device}: ask for fewer new tokens, a shorter prompt or a smaller batch"
        ) from error


class LocalCall:
    """Call of a model whose weights one process holds: it waits for nobody."""

    def __enter__(self) -> LocalCall:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def check(self, decoding: Any) -> None:
        """Raise Unsupported for a decoding that cannot run here."""

    def agree(self, able: bool) -> bool:
        """True where all processes are able to go on with an assistant."""
        return able


class SynchronizedCall(LocalCall):
    """Call that all processes of FSDP make, each on prompts of its own; one that fails still answers the others'
    passes.

    Passes of a call depend on its drafts. So every process says before each pass that it works, and an idle one
    (`agree`) answers each with a pass over a single token, until none works.

    A process waits when it knows whether it can serve the call, and in the end. Where one cannot, none does, and plain
    decoding keeps processes together in its own way.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.answering, self.agreed = model, False, False

    def __enter__(self) -> SynchronizedCall:
        self.hook: Any = self.model.register_forward_pre_hook(self._before_pass, prepend=True)
        return self

    def __exit__(self, *error: object) -> None:
        if self.hook is not None:
            self._wait(self.agreed)
            self._leave()

    def check(self, decoding: Any) -> None:
        """Raise Unsupported for what runs the model other than in whole passes, or needs weights between them."""
        inner, why = decoding.decoding if isinstance(decoding, Continued) else decoding, None
        if not any(isinstance(module, FSDPModule) for module in self.model.modules()):
            why = (
                "it is the first version of it, whose inner model does not gather its weights by itself: use "
                "fully_shard"
            )
        elif self.model.config.is_encoder_decoder:
            why = "an encoder-decoder model takes no assistant there"
        elif getattr(inner, "modules", None) is None:  # stages, each of which generates by itself
            why = "a cascade's stages are not run over several processes"
        elif any(is_shared_out(module) for module in inner.modules):
            why = "its draft model is shared out too, and its passes are not kept in step"
        elif isinstance(inner, HeadDecoding) and self._is_cut():
            why = (
                "a head reads its embeddings between two passes, where they are cut: call fully_shard(model, "
                "reshard_after_forward=False)"
            )
        if why is not None:
            raise Unsupported(
                f"several processes share out the weights of this {type(self.model).__name__} by FSDP, and {why}"
            )

    def _is_cut(self) -> bool:
        """True where embeddings or LM head are cut behind a pass."""
        self._pass()
        ends = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        return any(isinstance(getattr(end, "weight", None), DTensor) for end in ends)

    def agree(self, able: bool) -> bool:
        """Wait until no process works -> whether all are able to go on. Where they are not, this is over."""
        self.agreed = self._wait(able)
        if not self.agreed:
            self._leave()
        return self.agreed

    def _leave(self) -> None:
        self.hook.remove()
        self.hook = None

    def _before_pass(self, module: Any, args: Any) -> None:
        if not self.answering:
            self._say(works=True, able=True)

    def _wait(self, able: bool) -> bool:
        while True:
            works, all_able = self._say(works=False, able=able)
            if not works:
                return all_able
            self.answering = True
            try:
                self._pass()
            finally:
                self.answering = False

    @torch.no_grad()
    def _pass(self) -> None:
        self.model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device_of(self.model)), use_cache=False)

    def _say(self, *, works: bool, able: bool) -> tuple[bool, bool]:
        """Tell all processes -> whether any works, and whether all are able."""
        told = torch.tensor([works, not able], dtype=torch.int32, device=device_of(self.model))
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        any_works, any_unable = told.tolist()
        return bool(any_works), not any_unable


INSTEAD = (
    "it is transformers' own continuous batching. For many prompts with an assistant: model.generate(**inputs, "
    "assistant=fastspec.ContinuousBatch(...)), or fastspec.continuous(model, assistant, rows=...)"
)


_turned_off: ContextVar[bool] = ContextVar("_turned_off", default=False)
"""True where the call of `generate_batch` around says that it wants no assistant."""


def generate_batch(self: Any, *args: Any, assistant: Any = ABSENT, **kwargs: Any) -> Any:
    """transformers' continuous batching. Raises Unsupported for an assistant; None and "none" turn a default off."""
    if assistant not in (ABSENT, None, "none"):
        raise Unsupported(f"generate_batch takes no assistant=: {INSTEAD}")
    off = _turned_off.set(assistant is not ABSENT)
    try:
        return _original(self, "generate_batch")(*args, **kwargs)
    finally:
        _turned_off.reset(off)


def init_continuous_batching(self: Any, generation_config: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Begin transformers' batching. Raises Unsupported for the call's own assistant; leaves a default out."""
    session, own = session_of(self), self.generation_config
    call = None if generation_config is own else generation_config
    assistant, named = chosen(call, own, None if session is None else session.default)
    if session is not None and assistant not in (None, "none") and not _turned_off.get():
        if named:
            raise Unsupported(
                f"continuous batching takes no assistant, and its generation_config names {assistant!r}: {INSTEAD}"
            )
        session.leave(Unsupported(f"continuous batching takes no assistant: {INSTEAD}"))
    return _original(self, "init_continuous_batching")(generation_config, *args, **kwargs)


def _original(model: Any, name: str) -> Any:
    """A method of a model as it was before the patch; of one that is not patched any more, its class's."""
    session = session_of(model)
    return getattr(type(model), name).__get__(model) if session is None else session.original(model, name)


def _checked(model: Any, session: PatchSession, assistant: Any, given: dict[str, Any]) -> Any:
    """The decoding of a call. Raises Unsupported for what its arguments and the model's state rule out."""
    decoding = assistant if isinstance(assistant, AdaptiveCascade) else resolve(assistant, session.resources, model)
    refuse_overrides(model)
    session.turn.refuse_nested()
    refuse_ids(model, given)
    if isinstance(decoding, AdaptiveCascade):
        decoding.check(model, given, ranks_of(model))
        return decoding
    refuse_arguments(model, given)
    if model.config.is_encoder_decoder:
        refuse_seq2seq(model, decoding, given)
    return decoding


def _by_name(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a `generate` call by name, of the nearest class whose `generate` names its own."""
    methods = [vars(each)["generate"] for each in type(model).__mro__ if "generate" in vars(each)]
    signatures = [inspect.signature(method) for method in methods]
    kinds = [{parameter.kind: name for name, parameter in each.parameters.items()} for each in signatures]
    named = next(place for place, each in enumerate(kinds) if inspect.Parameter.VAR_POSITIONAL not in each)
    given = signatures[named].bind_partial(model, *args, **kwargs).arguments
    given.pop(next(iter(signatures[named].parameters)))  # the model itself
    more = given.pop(kinds[named].get(inspect.Parameter.VAR_KEYWORD, ""), {})
    return {**given, **more}
