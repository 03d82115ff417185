"""One assisted call: what transformers prepared, as a Request, decoded and made into transformers' output."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessorList

from fastspec.errors import FastSpecError, Unsupported
from fastspec.generation.drafters.base import Decoding, check_rows
from fastspec.generation.engine.call import Request
from fastspec.generation.engine.rounds import decode
from fastspec.generation.layer_state import LayerCache
from fastspec.generation.ops import Ops
from fastspec.kernels.tuned_launches import installed, name_of
from fastspec.kernels.verification.reference import SamplingSettings
from fastspec.patches.assistants.registry import Continued
from fastspec.patches.assistants.speculative import MixedDecoding, warn_if_refused
from fastspec.patches.call.assembly import Assembly
from fastspec.patches.call.output import output_of
from fastspec.patches.call.processors import (
    Ending,
    PlainSteps,
    Streaming,
    are_known,
    make_processors,
    read_settings,
    unknown_types,
)
from fastspec.patches.call.prompts import (
    OwnPrefill,
    besides_tokens,
    compact,
    position_shift,
    real_tokens,
    refuse_dropped,
    refuse_holes,
    sees_ahead,
)
from fastspec.patches.call.ranks import Ranks
from fastspec.patches.call.refusals import refuse_prompts
from fastspec.patches.hf.cache import CACHE, given_cache
from fastspec.patches.hf.compat import (
    device_of,
    fill_cache,
    is_out_of_memory,
    keeps_all,
    kept_by,
    read_cache,
    text_length,
)
from fastspec.patches.hf.limits import check_padding, dropped_spans, layer_spans
from fastspec.patches.hf.modes import Mode
from fastspec.patches.hf.parallel import group_of
from fastspec.patches.hf.peft_models import virtual_tokens
from fastspec.patches.hf.seq2seq import read_source
from fastspec.patches.session import PatchSession


class Call:
    """One assisted call. The constructor raises Unsupported for impossible arguments; `run` decodes.

    `given` holds the user's own arguments by name, `mode` and `ops` say how the model runs in this turn, all else is
    what transformers made of the arguments.
    """

    def __init__(
        self,
        model: Any,
        session: PatchSession,
        decoding: Decoding | Continued,
        given: dict[str, Any],
        ids: Tensor,
        processors: LogitsProcessorList,
        criteria: Any,
        config: Any,
        model_kwargs: dict[str, Any],
        mode: Mode,
        ops: Ops,
    ) -> None:
        self.given = decoding if isinstance(decoding, Continued) else Continued(decoding)
        self.model, self.session, self.decoding, self.config, self.processors = (
            model,
            session,
            self.given.decoding,
            config,
            processors,
        )
        self.device = device_of(model)
        group = group_of(model)
        self.ranks = None if group is None else Ranks(group, self.device)
        """The processes that hold the model together."""
        self.ids, self.ops = ids.to(self.device), ops
        self.pad = int(pad) if (pad := getattr(config, "_pad_token_tensor", None)) is not None else 0
        self.streamer = given.get("streamer")  # a custom loop is not handed the streamer
        self.handed_in = given_cache(given) is not None  # the cache is the user's own, to be filled in place
        self.cache = model_kwargs.get(CACHE)
        self.past = read_cache(self.cache, model.config.get_text_config().num_hidden_layers)
        self.past_length = text_length(self.past)
        self.source = read_source(model, given, model_kwargs, ids.shape[0]) if model.config.is_encoder_decoder else None
        if self.source is None:
            self.keep = real_tokens(model, self.ids, given.get("attention_mask"), config, self.past_length)
        else:  # the mask is the source's
            self.keep = torch.ones_like(self.ids, dtype=torch.bool)
            self.decoding = self.decoding.reading(self.source)
        self.shift = None if self.source is not None else position_shift(model, self.ids, self.keep, model_kwargs)
        self.own = None if self.source is not None else self._own_prefill(model_kwargs, mode)
        self.virtual: list[LayerCache] | None = None
        self._put_virtual_tokens()
        refuse_prompts(model, self.ids, self.keep, self.past_length)
        self.criteria = criteria if self.ranks is None else self.ranks.agreed(criteria)
        self.ending = Ending(self.criteria, self.ids)
        self.steps = None if are_known(processors, criteria) else self._steps(ids, self.criteria)
        """Plain decoding's own steps, where processors or criteria may have a state: the call decodes in lockstep."""
        rows = self.given.rows
        self.rows = rows if rows is not None and rows < ids.shape[0] else None
        """Prompts that are decoded at a time, where these are fewer than all."""
        if rows is not None and self.handed_in:
            raise Unsupported(f"ContinuousBatch takes whole prompts, without {CACHE}: name its assistant itself")
        if self.rows is not None and self.steps is not None:
            raise Unsupported(
                f"ContinuousBatch decodes {self.rows} of {ids.shape[0]} prompts at a time, and "
                f"{unknown_types(processors, criteria)} may "
                "keep a state over the whole batch: name its assistant itself, or pass at most as many prompts as it "
                "has rows"
            )
        self._begin()

    def _steps(self, ids: Tensor, criteria: Any) -> PlainSteps:
        if isinstance(self.decoding, MixedDecoding) and not are_known(self.processors, ()):
            raise Unsupported(
                f"a mixture of two models' distributions takes no processors that may look at the tokens so far "
                f"({unknown_types(self.processors)}): leave them out, or decode the large model's own distribution"
            )
        on_round = callable(getattr(self.streamer, "on_round", None))  # ours: a round before its tokens
        return PlainSteps(ids, self.processors, criteria, self.config, None if on_round else self.streamer)

    def _own_prefill(self, model_kwargs: dict[str, Any], mode: Mode) -> OwnPrefill | None:
        """The model's own pass over a prompt with images and the like, and over any of a model that lets a prompt's
        tokens see others than those before them; None where there is nothing but tokens."""
        inputs = besides_tokens(model_kwargs)
        if not inputs and not sees_ahead(self.model, mode.adapter):
            return None
        if self.given.rows is not None:
            alone = f"prompts of tokens alone, without {', '.join(sorted(inputs))}"
            what = (
                alone
                if inputs
                else f"no {type(self.model).__name__}, whose tokens see more of a prompt than what is before them"
            )
            raise Unsupported(f"ContinuousBatch takes {what}: name its assistant itself")
        return OwnPrefill(self.model, self.config, self.ids, self.keep, model_kwargs)

    def _put_virtual_tokens(self) -> None:
        """Begin behind the virtual tokens of a prompt-learning adapter, as behind a cache of the user's own."""
        layers = self.model.config.get_text_config().num_hidden_layers
        virtual = None if self.source is not None else virtual_tokens(self.model, self.keep, layers)
        if virtual is None:
            return
        if self.past is not None or self.given.rows is not None:
            what = CACHE if self.past is not None else "ContinuousBatch"
            raise Unsupported(
                f"{what} cannot be combined with a prompt-learning adapter: its virtual tokens begin every prompt of "
                "a call"
            )
        self.past, self.past_length = virtual, text_length(virtual)
        self.keep = torch.cat((torch.ones_like(self.keep[:, :1]).expand(-1, self.past_length), self.keep), 1)
        self.virtual = virtual

    def _begin(self) -> None:
        """Make the request and the rounds. Raises Unsupported, and FastSpecError when memory has run out."""
        new = self.keep.shape[1] - self.past_length  # tokens of the prompt that the cache does not hold
        prompts, counts = compact(self.ids[:, -new:], self.keep[:, -new:])
        limit, steps, config = self.ending.limit, self.steps, self.config
        rows = prompts.shape[0] if self.rows is None else self.rows
        self.capacity = int(self.keep[:, : self.past_length].sum(1).max()) + prompts.shape[1] + limit
        dropped = dropped_spans(self.model, self.cache)
        if self.source is None:
            refuse_holes(
                self.model, self.keep, self.past_length if self.own is None else self.keep.shape[1], limit, dropped
            )
            if self.own is None:
                refuse_dropped(self.model, self.cache, self.past_length, config, dropped)
        for exact in (self.model, *((self.decoding.draft,) if isinstance(self.decoding, MixedDecoding) else ())):
            check_padding(exact, int((~self.keep).sum(1).max()), self.keep.shape[1] + limit)
        process_all, process_at = make_processors(self.processors, self.ids)
        if steps is not None:  # drafts are not drawn: they would take random numbers that plain decoding does not
            process_all, process_at = process_all if isinstance(self.decoding, MixedDecoding) else None, None
        self.streaming = Streaming(self.streamer, len(prompts), self.pad) if self.streamer is not None else None
        emits = self.streaming is not None and (steps is None or steps.streamer is None)
        wanted = bool(config.return_dict_in_generate) and steps is None
        self.request = Request(
            prompts,
            counts,
            list(self.ids),
            limit,
            self.ending.ends,
            process_at,
            context=self._context(),
            stop=self.ending.stop,
            emit=self.streaming.emit if self.streaming and emits else None,
            watch=self.streaming.watch if self.streaming else None,
            keep_scores=bool(wanted and config.output_scores),
            keep_logits=bool(wanted and config.output_logits),
            answers=self.given.answers,
            measure=self.given.measure,
            rows=self.rows,
            steps=steps,
            prefill=self.own,
        )
        assembly = Assembly(
            self.model,
            self.session,
            self.decoding,
            self.source,
            self.ops,
            rows=rows,
            capacity=self.capacity,
            ends=self.ending.ends,
            sample=bool(config.do_sample),
            process=process_all,
            processors=self.processors,
            settings=self._settings(self.request.keep_scores),
            answers=self.given.answers is not None,
            measures=self.given.measure,
            pad_token=None if steps is None else steps.pad_token,
            past=self.past,
            keep=self.keep[:, : self.past_length],
            shift=self.shift,
            bounded=self._is_bounded(),
            dropped=dropped,
            ranks=self.ranks,
            likeliest=not config.do_sample and process_all is None and not self.request.reads_logits,
        )
        if self.ranks is not None:
            self._agree(self.ranks)
        with self._memory(rows):
            self.decoding = assembly.size_trees(self.request)
            self.engine, self.key = assembly.engine()
        if self.rows is not None:
            check_rows(self.engine.drafter, self.decoding.name)
            self.request.entry = partial(assembly.entry, self.engine)

    def _agree(self, ranks: Ranks) -> None:
        """See to it that all processes run this call, and draw the same random numbers in it."""
        request, config = self.request, self.config
        kinds = [type(each).__name__ for each in (*self.processors, *self.ending.others)]
        asked = (
            request.keep_scores,
            request.keep_logits,
            request.measure,
            request.answers,
            request.rows,
            request.watch is None,
        )
        settings = (
            request.limit,
            sorted(request.ends),
            bool(config.do_sample),
            config.temperature,
            config.top_k,
            config.top_p,
            config.min_p,
        )
        tuned = sorted(
            map(repr, installed(name_of(self.device)).items())
        )  # what is whole in every process must round alike
        ranks.check_arguments(
            self.ids,
            self.keep,
            re.sub("0x[0-9a-f]+", "", repr(self.decoding)),
            kinds,
            asked,
            settings,
            self.session.profile is None,
            tuned,
        )
        if config.do_sample:
            ranks.share_random_numbers()

    def run(self) -> Any:
        """Decode, and return what `generate` returns."""
        engine = self.engine
        if (
            self.cache is not None and self.virtual is not None
        ):  # not before: a call that is refused must leave the cache as it was
            fill_cache(self.cache, 0, self.virtual)
        with self._memory(len(engine.state.running)):
            outcome = decode(engine, self.request, self.decoding.name)
        if self.ranks is not None:
            self.ranks.check_answers(outcome.tokens)
        self.session.calls.append(outcome.stats)
        if self.streaming is not None:
            self.streaming.end()  # who waits for it in another thread finds the call in the report
        if self.given.hear is not None:
            self.given.hear(outcome)
        self.session.warned = self.session.warned or warn_if_refused(self.decoding, outcome.stats)
        output = output_of(self, outcome, engine.target, self.request.counts)
        if self.key is not None:
            self.session.engines.put(self.key, engine)
        return output

    @contextmanager
    def _memory(self, rows: int) -> Iterator[None]:
        """Say of an error that memory has run out, and what would need less."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, FastSpecError) or not is_out_of_memory(error):
                raise
            raise FastSpecError(
                f"out of memory while decoding {rows} rows of up to {self.capacity} tokens on {self.device}: ask for "
                "fewer new tokens, "
                "a shorter prompt or a smaller batch"
            ) from error

    def _is_bounded(self) -> bool:
        """Whether nobody will see what a layer with a window has dropped: the cache that the call hands back keeps no
        more either."""
        if self.cache is None or not (self.handed_in or self.config.return_dict_in_generate):
            return True
        spans = layer_spans(self.model)
        return not any(
            spans[layer] is not None and keeps_all(self.cache, layer) for layer in set(kept_by(self.model.config))
        )

    def _context(self) -> tuple[Tensor, Tensor] | None:
        """What a drafter without a model reads before the first new token, where that is more than the prompt."""
        if self.source is not None:
            return None if self.decoding.reads_source else self.source.text(self.ids)
        return compact(self.ids, self.keep) if self.past_length and self.ids.shape == self.keep.shape else None

    def _settings(self, keep_scores: bool) -> SamplingSettings | None:
        """The settings that rounds draw under without processing scores, where the call samples and nobody asks for
        processed ones."""
        return read_settings(self.processors) if self.config.do_sample and not keep_scores else None
