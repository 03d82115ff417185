"""One prompt by itself, as transformers' own `generate` prepares it: what an open batch decodes, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessorList

from fastspec.errors import Unsupported
from fastspec.generation.engine.open_batch import Rule
from fastspec.generation.random_numbers import drawn_seed
from fastspec.patches.call.inputs import besides_tokens, position_shift
from fastspec.patches.call.processors import Ending, Streaming, are_known, make_processors, read_settings, unknown_types
from fastspec.patches.call.prompts import compact, real_tokens
from fastspec.patches.call.refusals import refuse_arguments, refuse_prepared, refuse_prompts
from fastspec.patches.hf.cache_names import CACHE, given_cache
from fastspec.patches.hf.compat import device_of, own_stop_strings


class Single:
    """A prompt with its settings, and the `future` of its answer: what `generate` returns for it, [1, T + new tokens] int64.

    See `fastspec.generation.engine.open_batch.Prompt`.
    """

    def __init__(
        self, streamer: Any, seed: int | None, ids: Tensor, keep: Tensor, processors: LogitsProcessorList, criteria: Any, config: Any
    ) -> None:  # fmt: skip
        self.shown = ids
        """The prompt as it was given, padding included."""
        if len(ids) != 1:
            raise Unsupported(f"a prompt of an open batch is one row, and this call has {len(ids)}: submit them one by one")
        if config.return_dict_in_generate:
            raise Unsupported("return_dict_in_generate=True: an open batch answers with tokens alone; ask generate for the rest")
        if not are_known(processors, criteria):
            raise Unsupported(
                f"an open batch has prompts of many calls, and {unknown_types(processors, criteria)} may keep a state over a whole call: "
                "ask generate for this one"
            )
        self.ids, _ = compact(self.shown, keep)
        self.ending = Ending(criteria, self.shown)
        self.limit, self.ends = self.ending.limit, self.ending.ends
        self.rule = _rule(processors, self.shown, bool(config.do_sample), seed)
        self.streaming = Streaming(streamer, 1, 0) if streamer is not None else None
        self.future: Future[Tensor] = Future()

    @property
    def stop(self) -> Callable[[list[int]], bool] | None:
        """Whether criteria besides length and end tokens end the answer."""
        return None if self.ending.stop is None else self._stop

    def _stop(self, answer: list[int]) -> bool:
        return self.ending.stop is not None and self.ending.stop(0, answer)

    def emit(self, tokens: list[int], accepted: int, done: bool) -> None:
        """Hand a round's tokens to the streamer."""
        if self.streaming is not None:
            self.streaming.emit(0, tokens, accepted, done)

    def finish(self, tokens: list[int], error: Exception | None) -> None:
        """Tell the streamer and whoever waits for the answer; neither where it was cancelled."""
        if self.future.cancelled():
            self.future.set_running_or_notify_cancel()
            return
        if error is None and self.streaming is not None:
            try:
                self.streaming.end()
            except Exception as raised:
                error = raised
        if not self.future.set_running_or_notify_cancel():
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(torch.cat((self.shown, self.shown.new_tensor([tokens])), 1))

    @property
    def is_cancelled(self) -> bool:
        """Whether the future was cancelled."""
        return self.future.cancelled()


def _rule(processors: LogitsProcessorList, ids: Tensor, sample: bool, seed: int | None) -> Rule:
    process, process_at = make_processors(processors, ids)
    seed = (drawn_seed() if seed is None else seed) if sample else 0
    return Rule(sample, seed, read_settings(processors) if sample else None, process, process_at, ids[0])


def prepare(model: Any, original: Callable[..., Any], given: dict[str, Any], seed: int | None) -> Single:
    """A prompt from the arguments of `generate` by name, `original` being the model's own, which prepares it and does not decode.

    Raises Unsupported for what an open batch does not decode, and ValueError as transformers does.
    """
    if given_cache(given) is not None:
        raise Unsupported(f"an open batch takes whole prompts, without {CACHE}")
    if given.get("assistant") is not None:
        raise Unsupported("assistant= belongs to fastspec.continuous: all prompts of an open batch are decoded with the same one")
    refuse_arguments(model, given)
    told, mask = given.get("streamer"), given.get("attention_mask")  # a custom loop is not handed the streamer

    def custom(
        model: Any, input_ids: Tensor, logits_processor: LogitsProcessorList, stopping_criteria: Any, generation_config: Any,
        streamer: Any = None, **model_kwargs: Any,
    ) -> Single:  # fmt: skip
        refuse_prepared(generation_config, model_kwargs)
        inputs = besides_tokens(model_kwargs)
        if inputs:
            raise Unsupported(f"an open batch takes prompts of tokens alone, without {', '.join(sorted(inputs))}: ask generate")
        ids = input_ids.to(device_of(model))
        keep = real_tokens(model, ids, mask, generation_config, 0)
        refuse_prompts(model, ids, keep, 0)
        shift = position_shift(model, ids, keep, model_kwargs)
        if shift is not None and bool(shift.any()):
            raise Unsupported(f"{type(model).__name__} does not count positions from 0, as an open batch does: ask generate")
        return Single(told, seed, ids, keep, logits_processor, stopping_criteria, generation_config)

    made = original(**{**own_stop_strings(model, given), "custom_generate": custom})
    assert isinstance(made, Single)
    return made
