"""Answers of the target to the training prompts, by rounds without drafts, kept as shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import GenerationConfig

from fastspec.config import ContinuousBatch
from fastspec.patches.api import is_patched, patched
from fastspec.patches.hf.ends import end_tokens as ends_of
from fastspec.programs.texts import padded_inputs, until_end
from fastspec.programs.training.config import TrainConfig
from fastspec.programs.training.data import Row, Shards, Texts, TimeLimit, encode_prompts

ROWS = {"cuda": 128, "cpu": 16}
"""Rows that are decoded at a time, where their cache takes no more than a quarter of the free memory."""
A_CALL = 64
"""Prompts of a call for every row of it: at its end rows stand idle."""
TOP_K = 64
"""The likeliest tokens, which sampled answers are drawn from."""
_CHOSEN: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""Target that answers -> the rows that were chosen for it."""


def end_tokens(target: Any, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end an answer: those of the target's generation configuration, and the tokenizer's."""
    named = ends_of(target.generation_config) | (frozenset() if tokenizer is None else ends_of(tokenizer))
    return tuple(sorted(named))


def answer_prompts(
    target: Any,
    tokenizer: Any,
    rows: Sequence[Row],
    ends: Sequence[int],
    config: TrainConfig,
    folder: Path,
    clock: TimeLimit,
    *,
    greedy: bool = False,
    tell: Callable[[int, int], None] = lambda done, of: None,
) -> Texts:
    """The target's answers to `rows`, as texts; shards are kept in `folder` and not made twice.

    A share `config.sampled_share` is sampled (temperature, top-p), the rest greedy; with `greedy` all are. `tell` is
    given the rows that are answered, and how many they will be. Raises `OutOfTime` where `clock` ends.
    """
    shards, parts, share = Shards(folder, clock), [], 0.0 if greedy else config.sampled_share
    with ExitStack() as stack:

        def make(start: int, chosen: Sequence[Row]) -> tuple[Texts, dict[str, Any]]:
            stack.enter_context(answering(target, config.max_length))
            sampled = np.random.default_rng((config.seed, start)).random(len(chosen)) < share
            encoded = encode_prompts(tokenizer, chosen)
            done = lambda count: tell(start + count, len(rows))  # noqa: E731
            return answer(target, encoded, sampled, config, ends, tell=done), {}

        for number, start in enumerate(range(0, len(rows), config.shard_texts)):
            chosen = rows[start : start + config.shard_texts]
            parts.append(shards.get(number, (config.seed, start), partial(make, start, chosen))[0])
            tell(start + len(chosen), len(rows))
    return Texts.join(parts)


def answer(
    target: Any,
    prompts: Sequence[Sequence[int]],
    sampled: np.ndarray,
    config: TrainConfig,
    ends: Sequence[int],
    *,
    tell: Callable[[int], None] = lambda count: None,
) -> Texts:
    """Answer tokenised prompts, in their order; prompts longer than `config.max_length - new_tokens` get an empty
    answer.

    `sampled` [N] says which are sampled rather than greedy; an answer stops after one of `ends`, or at
    `config.new_tokens`. `tell` is given the number of prompts that are answered, after every call. Raises Unsupported
    for a target that cannot be patched, for which a head could not draft.
    """
    room = config.max_length - config.new_tokens
    order = sorted((i for i in range(len(prompts)) if 0 < len(prompts[i]) <= room), key=lambda i: -len(prompts[i]))
    answers: list[list[int]] = [[] for _ in prompts]
    answered = len(prompts) - len(order)
    with answering(target, config.max_length) as most:
        for draws in (False, True):
            left = [i for i in order if bool(sampled[i]) == draws]
            while left:
                group, left = left[: A_CALL * most], left[A_CALL * most :]
                found = _call(target, [prompts[i] for i in group], draws, config, ends, most)
                for index, tokens in zip(group, found, strict=True):
                    answers[index] = tokens
                answered += len(group)
                tell(answered)
    pairs = [([*p, *a], [False] * len(p) + [True] * len(a)) for p, a in zip(prompts, answers, strict=True)]
    return Texts.of(pairs, ~sampled)


@contextmanager
def answering(target: Any, longest: int) -> Iterator[int]:
    """Context manager that patches a target and sets its own generation config aside -> the rows that are decoded at a
    time, of texts of up to `longest` tokens. Inside another one it changes nothing: rounds are not captured anew."""
    own, target.generation_config = target.generation_config, GenerationConfig()
    patches, outermost = not is_patched(target), target not in _CHOSEN
    try:
        rows = _CHOSEN.setdefault(target, _rows(target, longest) if outermost else 0)
        with patched(target) if patches else nullcontext():
            yield rows
    finally:
        target.generation_config = own
        if outermost:
            _CHOSEN.pop(target, None)
        if patches and target.device.type == "cuda":
            torch.cuda.empty_cache()  # what rounds held is the trainer's now


@torch.no_grad()
def _call(
    target: Any, prompts: Sequence[Sequence[int]], draws: bool, config: TrainConfig, ends: Sequence[int], rows: int
) -> list[list[int]]:
    """The answers to prompts that are all sampled, or all greedy, the end token included where one was reached."""
    how: dict[str, Any] = {"temperature": config.temperature, "top_k": TOP_K, "top_p": config.top_p} if draws else {}
    asked = GenerationConfig(
        max_new_tokens=config.new_tokens, do_sample=draws, eos_token_id=list(ends) or None, pad_token_id=0, **how
    )
    inputs = padded_inputs(prompts, asked, target.device)
    out = target.generate(**inputs, generation_config=asked, assistant=ContinuousBatch("autoregressive", rows))
    return [until_end(tokens, ends) for tokens in out[:, inputs["input_ids"].shape[1] :].tolist()]


def _rows(target: Any, length: int) -> int:
    """Number of rows of so many tokens that are decoded at a time."""
    rows = ROWS.get(target.device.type, ROWS["cpu"])
    if target.device.type != "cuda":
        return rows
    c, device = target.config.get_text_config(), target.device
    heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
    width = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    row = 2 * c.num_hidden_layers * heads * width * target.dtype.itemsize * length
    return max(1, min(rows, int(free // 4 // row)))
