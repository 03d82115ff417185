"""Texts that the target makes, by rounds without drafts, kept as shards: answers to the training prompts, and texts
made of others: cut answers continued in their place, greedy answers beside sampled ones, second turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import GenerationConfig

from fastspec.config import ContinuousBatch
from fastspec.devices import free_memory
from fastspec.errors import Unsupported
from fastspec.patches.api import is_patched, patched
from fastspec.patches.cascade.settings import left_padded
from fastspec.patches.hf.config_fields import layer_shapes
from fastspec.patches.hf.ends import end_tokens as ends_of
from fastspec.programs.texts import first_turn, until_end
from fastspec.programs.training.config import ENLARGEMENTS, TrainConfig
from fastspec.programs.training.data import Row, Shards, Texts, TimeLimit, encode_prompts

ROWS = {"cuda": 128, "cpu": 16}
"""Rows that are decoded at a time, where their cache takes no more than a quarter of the free memory."""
A_CALL = 64
"""Prompts of a call for every row of it: at its end rows stand idle."""
TOP_K = 64
"""The likeliest tokens, which sampled answers are drawn from."""
_CHOSEN: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""Target that answers -> the rows that were chosen for it."""
Pair = tuple[list[int], list[bool]]
MARK = "\u241e"
ROLES = ("user", "assistant", "user")


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
    """The target's answers to `rows`, as texts; shards are kept in `folder` and not made twice. A share
    `config.sampled_share` is sampled, the rest greedy; with `greedy` all are. `tell` is given the rows that are
    answered, and of how many. Raises `OutOfTime` where `clock` ends."""
    shards, parts, share = Shards(folder, clock), [], 0.0 if greedy else config.sampled_share
    with ExitStack() as stack:

        def make(start: int, chosen: Sequence[Row]) -> tuple[Texts, dict[str, Any]]:
            stack.enter_context(answering(target, config.max_length))
            sampled = np.random.default_rng((config.seed, start)).random(len(chosen)) < share
            encoded = encode_prompts(tokenizer, chosen)
            return answer(target, encoded, sampled, config, ends, tell=lambda count: tell(start + count, len(rows))), {}

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
    """Answer tokenised prompts, in their order; those longer than `config.max_length - new_tokens` get an empty answer.

    `sampled` [N] says which are sampled, not greedy; an answer stops after one of `ends`, or at `config.new_tokens`.
    `tell` is given the number of answered prompts after every call. Raises Unsupported for a target that cannot be
    patched.
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
    ids, mask = left_padded(prompts, asked.pad_token_id, target.device)
    assistant = ContinuousBatch("autoregressive", rows)
    out = target.generate(input_ids=ids, attention_mask=mask, generation_config=asked, assistant=assistant)
    return [until_end(tokens, ends) for tokens in out[:, ids.shape[1] :].tolist()]


def _rows(target: Any, length: int) -> int:
    """Number of rows of so many tokens that are decoded at a time."""
    rows = ROWS.get(target.device.type, ROWS["cpu"])
    if target.device.type != "cuda":
        return rows
    kept = sum(heads * (key + value) for heads, key, value in layer_shapes(target.config))
    share = free_memory(target.device) // 4
    return max(1, min(rows, share // (kept * target.dtype.itemsize * length)))


@dataclass(slots=True, kw_only=True)
class Enlarger:
    """Maker of the added texts; `rows` are the prompts that follow-up questions are taken from. Shards are kept in
    `config.output`/enlarge and not made twice. Of `config.enlarge_minutes` every kind may use an equal share and what
    the kinds before it left over, over all calls."""

    target: Any
    tokenizer: Any
    ends: Sequence[int]
    rows: Sequence[Row]
    config: TrainConfig
    clock: TimeLimit
    report: Callable[[dict[str, Any]], None]
    patches: ExitStack = field(default_factory=ExitStack, init=False)

    def run(self, texts: Texts) -> Texts:
        """`texts` and what the switches of `config` add to them; raises `OutOfTime` with the clock."""
        kinds = [kind for kind in ENLARGEMENTS if getattr(self.config, kind)]
        keep, parts, spent = np.ones(len(texts), dtype=bool), [], 0.0
        with ExitStack() as self.patches:
            for index, kind in enumerate(kinds):
                minutes = self.config.enlarge_minutes * (index + 1) / len(kinds)
                made, spent = self._kind(kind, texts, spent, 60 * minutes or float("inf"))
                for part, origin in made:
                    parts.append(part)
                    if kind != "second_answers":
                        keep[origin] = False
        return Texts.join([texts.select(keep), *parts])

    def _kind(
        self, kind: str, texts: Texts, spent: float, bound: float
    ) -> tuple[list[tuple[Texts, np.ndarray]], float]:
        """The shards of one kind, as (texts, places of the texts that they came from), and the seconds spent so far."""
        config, number = self.config, ENLARGEMENTS.index(kind)
        order = np.random.default_rng((config.seed, number)).permutation(candidates(kind, texts, self.ends))
        shards = Shards(Path(config.output) / "enlarge" / kind, self.clock)
        made, tokens = [], 0
        for block, start in enumerate(range(0, len(order), config.shard_texts)):
            expected = sum(shards.seconds) / max(1, block)
            if not shards.path(block).exists() and spent + expected / 2 >= bound:
                break
            chosen, seed = order[start : start + config.shard_texts], (config.seed, number, block)
            part, more = shards.get(block, seed, partial(self._shard, kind, texts, chosen, np.random.default_rng(seed)))
            spent += shards.seconds[-1]
            tokens += int(more["made"])
            made.append((part, more["origin"]))
        counts = {"of": len(order), "texts": sum(len(part) for part, _ in made), "new_tokens": tokens}
        self.report({"added": kind, **counts, "seconds": round(sum(shards.seconds), 1)})
        return made, spent

    def _shard(
        self, kind: str, texts: Texts, chosen: np.ndarray, rng: np.random.Generator
    ) -> tuple[Texts, dict[str, Any]]:
        """One shard of texts that the target went on with, their `origin`, and `made`, the number of new tokens."""
        self.patches.enter_context(answering(self.target, self.config.max_length))
        given, sampled = self._material(kind, [texts.text(i) for i in chosen], texts.greedy[chosen], rng)
        found = answer(self.target, [tokens for tokens, _ in given], sampled, self.config, self.ends)
        before = np.array([len(tokens) for tokens, _ in given])
        for start, (_, mask) in zip(found.offsets[:-1], given, strict=True):
            found.answer[start : start + len(mask)] |= np.asarray(mask, dtype=bool)
        longer = found.lengths > before
        return found.select(longer), {"origin": chosen[longer], "made": (found.lengths - before).sum()}

    def _material(
        self, kind: str, source: Sequence[tuple[np.ndarray, np.ndarray]], greedy: np.ndarray, rng: np.random.Generator
    ) -> tuple[list[Pair], np.ndarray]:
        """(tokens, answer mask) of each text that the target goes on from, and which answers are to be sampled."""
        pairs = [(tokens.tolist(), mask.tolist()) for tokens, mask in source]
        if kind == "continue_cut":
            return pairs, ~greedy
        if kind == "second_answers":
            starts = [mask.index(True) for _, mask in pairs]
            begun = [(tokens[:n], [False] * n) for (tokens, _), n in zip(pairs, starts, strict=True)]
            return begun, np.zeros(len(pairs), bool)
        joined, questions = [], rng.integers(0, len(self.rows), len(pairs))
        for (tokens, mask), number in zip(pairs, questions, strict=True):
            turn = follow_up(self.tokenizer, first_turn(self.rows[number]), self.ends)
            joined.append((tokens + turn, mask + [False] * len(turn)))
        return joined, rng.random(len(pairs)) < self.config.sampled_share


def candidates(kind: str, texts: Texts, ends: Sequence[int]) -> np.ndarray:
    """Indices of the texts that one kind of enlargement can go on from; a cut answer has no end token."""
    filled = texts.lengths > 0
    last = texts.offsets[1:][filled] - 1
    stops = np.zeros(len(texts), dtype=bool)
    stops[filled] = texts.answer[last]
    ended = stops.copy()
    ended[filled] &= np.isin(texts.tokens[last], list(ends))
    chosen = {"continue_cut": stops & ~ended, "second_answers": stops & ~texts.greedy, "follow_ups": ended}[kind]
    return np.flatnonzero(chosen)


def follow_up(tokenizer: Any, question: str, ends: Sequence[int]) -> list[int]:
    """The chat template's tokens between an answer's end token and the next answer, with `question` as the user's turn.
    Raises `Unsupported` without a template, and for one that does not close an answer with one of `ends`."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise Unsupported("follow_ups writes turns by the chat template, and this tokenizer has none: leave it out")
    talk = [{"role": role, "content": text} for role, text in zip(ROLES, (".", MARK, question), strict=True)]
    closing = tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False).partition(MARK)[2]
    ids = list(tokenizer(closing, add_special_tokens=False)["input_ids"])
    if not ids or ids[0] not in ends:
        raise Unsupported(
            f"the chat template puts {closing[:20]!r} after an answer, which is none of the target's end tokens "
            f"{list(ends)}: follow_ups cannot join turns, leave it out"
        )
    return ids[1:]
