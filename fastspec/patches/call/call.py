"""One assisted call: its plan given an engine, decoded, and made into transformers' output."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from fastspec.errors import FastSpecError
from fastspec.generation.drafters.base import check_rows
from fastspec.generation.engine.rounds import decode
from fastspec.kernels.tuned_launches import installed, name_of
from fastspec.patches.assistants.speculative import warn_if_refused
from fastspec.patches.call.assembly import engine_of, entry, sized
from fastspec.patches.call.output import output_of
from fastspec.patches.call.plan import Plan
from fastspec.patches.call.processors import FILTERS
from fastspec.patches.call.ranks import Ranks
from fastspec.patches.hf.cache import fill_cache
from fastspec.patches.hf.compat import is_out_of_memory

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
            plan.streaming.end()  # who waits for it in another thread finds the call in the report
        if plan.asked is not None and plan.asked.hear is not None:
            plan.asked.hear(outcome)
        session.warned = session.warned or warn_if_refused(plan.decoding, outcome.stats)
        output = output_of(plan, outcome, engine.target)
        if self.key is not None:
            session.engines.put(self.key, engine)
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
