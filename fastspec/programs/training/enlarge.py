"""Texts made of others, which continued ones replace: cut answers continued, greedy answers beside sampled ones, second
turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fastspec.errors import Unsupported
from fastspec.programs.texts import first_turn
from fastspec.programs.training.config import ENLARGEMENTS, TrainConfig
from fastspec.programs.training.data import Row, Shards, Texts, TimeLimit
from fastspec.programs.training.regenerate import answer, answering

Pair = tuple[list[int], list[bool]]
MARK = "\u241e"
ROLES = ("user", "assistant", "user")


@dataclass(slots=True, kw_only=True)
class Enlarger:
    """Maker of the added texts. `rows` are the prompts that follow-up questions are taken from, `ends` the target's end
    tokens.

    Shards are kept in `config.output`/enlarge and not made twice. Of `config.enlarge_minutes` every kind may use an
    equal share and what the kinds before it left over, over all calls.
    """

    target: Any
    tokenizer: Any
    ends: Sequence[int]
    rows: Sequence[Row]
    config: TrainConfig
    clock: TimeLimit
    report: Callable[[dict[str, Any]], None] | None = None
    patches: ExitStack = field(default_factory=ExitStack, init=False)

    def run(self, texts: Texts) -> Texts:
        """`texts` and what `config.continue_cut`, `second_answers` and `follow_ups` add to them; raises `OutOfTime`
        with the clock."""
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
        """The shards of one kind, as (texts, index of the text that each came from), and the seconds spent so far, at
        most `bound` give or take half a shard."""
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
        if self.report is not None:
            counts = {"of": len(order), "texts": sum(len(part) for part, _ in made), "new_tokens": tokens}
            self.report({"added": kind, **counts, "seconds": round(sum(shards.seconds), 1)})
        return made, spent

    def _shard(
        self, kind: str, texts: Texts, chosen: np.ndarray, rng: np.random.Generator
    ) -> tuple[Texts, dict[str, Any]]:
        """One shard of texts that the target went on with, and beside them `origin` and `made`, the number of new
        tokens."""
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
    """Indices of the texts that one kind of enlargement can go on from; an answer is cut when the text stops in it
    without an end token."""
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
        raise Unsupported(
            "follow_ups writes its turns with the tokenizer's chat template, and this tokenizer has none: leave it out"
        )
    talk = [{"role": role, "content": text} for role, text in zip(ROLES, (".", MARK, question), strict=True)]
    closing = tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False).partition(MARK)[2]
    ids = list(tokenizer(closing, add_special_tokens=False)["input_ids"])
    if not ids or ids[0] not in ends:
        raise Unsupported(
            f"the chat template puts {closing[:20]!r} after an answer, which is none of the target's end tokens "
            f"{list(ends)}: follow_ups cannot join turns, leave it out"
        )
    return ids[1:]
