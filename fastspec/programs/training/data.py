"""Training texts as flat token arrays, kept in files as they are made; the draft vocabulary; batches of like length."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastspec.errors import Unsupported
from fastspec.programs import texts as texts_of

BAND = 32
"""Width, in tokens, of the bands that texts of one length are sorted by."""
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Texts:
    """N conversations: `tokens` concatenated int32, `lengths` [N] int32, `answer`, True for the target's own tokens,
    and `greedy` [N], True where its answer is known to be greedy."""

    tokens: np.ndarray
    lengths: np.ndarray
    answer: np.ndarray
    greedy: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def offsets(self) -> np.ndarray:
        return np.concatenate(([0], np.cumsum(self.lengths, dtype=np.int64)))

    @classmethod
    def of(cls, pairs: Sequence[tuple[Sequence[int], Sequence[bool]]], greedy: np.ndarray | None = None) -> Texts:
        """From (tokens, answer mask) of each conversation; without `greedy` none is known to be."""
        lengths = np.array([len(t) for t, _ in pairs], dtype=np.int32)
        greedy = np.zeros(len(pairs), bool) if greedy is None else np.asarray(greedy, dtype=bool)
        if not len(lengths):
            return cls(np.zeros(0, np.int32), lengths, np.zeros(0, bool), greedy)
        tokens = np.concatenate([np.asarray(t, dtype=np.int32) for t, _ in pairs])
        return cls(tokens, lengths, np.concatenate([np.asarray(m, dtype=bool) for _, m in pairs]), greedy)

    @classmethod
    def join(cls, parts: Sequence[Texts]) -> Texts:
        if not parts:
            return cls.of([])
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__slots__))

    @classmethod
    def load(cls, path: str | Path) -> Texts:
        """Read what `save` wrote; in a file without `greedy` no answer is known to be."""
        with np.load(path) as z:
            tokens, lengths = z["tokens"].astype(np.int32), z["lengths"].astype(np.int32)
            greedy = z["greedy"].astype(bool) if "greedy" in z else np.zeros(len(lengths), bool)
            return cls(tokens, lengths, np.unpackbits(z["answer"], count=len(tokens)).astype(bool), greedy)

    def save(self, path: str | Path, **more: Any) -> None:
        """Write a compressed npz: tokens (uint16 where they fit), lengths, answer (bits), greedy, and `more`."""
        small = self.tokens.size == 0 or self.tokens.max() < 2**16
        more |= {"tokens": self.tokens.astype(np.uint16 if small else np.int32), "lengths": self.lengths}
        np.savez_compressed(path, answer=np.packbits(self.answer), greedy=self.greedy, **more)

    @property
    def answer_starts(self) -> np.ndarray:
        """Place of each conversation's first token by the target, [N] int64; its length where there is none."""
        places = np.append(np.flatnonzero(self.answer), len(self.answer))
        offsets = self.offsets
        return np.minimum(places[np.searchsorted(places, offsets[:-1])], offsets[1:]) - offsets[:-1]

    def text(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        start = int(self.lengths[:index].sum())
        return self.tokens[start : start + self.lengths[index]], self.answer[start : start + self.lengths[index]]

    def select(self, keep: np.ndarray) -> Texts:
        flat = np.repeat(keep, self.lengths)
        return Texts(self.tokens[flat], self.lengths[keep], self.answer[flat], self.greedy[keep])


def read_prompts(path: str | Path) -> list[Row]:
    """Rows of a jsonl file with `prompt` (text) or `turns` (of which the first is read), and perhaps `id`."""
    rows = [row for _, row, _ in texts_of.read_prompts(path)]
    return [{"id": str(number), **row} for number, row in enumerate(rows, 1)]


def encode_prompts(tokenizer: Any, rows: Sequence[Row]) -> list[list[int]]:
    """The first user turns through the chat template (plain text without one), up to where the answers start."""
    texts = [texts_of.first_turn(row) for row in rows]
    return [texts_of.encode(tokenizer, text)["input_ids"][0].tolist() for text in texts]


def join_answers(tokenizer: Any, prompts: Sequence[Row], path: str | Path) -> Texts:
    """Prompts and the target's answers to them. The npz holds `ids` (of the prompts), `lengths` and `tokens`
    (concatenated), and may hold `greedy` (bool)."""
    by_id = {row["id"]: row for row in prompts}
    with np.load(path) as z:
        names, lengths, tokens = z["ids"].tolist(), z["lengths"], z["tokens"].astype(np.int32)
        greedy = z.get("greedy")
    unknown = next((name for name in names if name not in by_id), None)
    if unknown is not None:
        raise Unsupported(f"{path} answers the prompt {unknown!r}, which is not among the prompts given")
    questions = encode_prompts(tokenizer, [by_id[name] for name in names])
    answers = np.split(tokens, np.cumsum(lengths, dtype=np.int64)[:-1]) if names else []
    pairs = [([*q, *a.tolist()], [False] * len(q) + [True] * len(a)) for q, a in zip(questions, answers, strict=True)]
    return Texts.of(pairs, greedy)


def draft_vocabulary(texts: Texts, size: int, vocab_size: int) -> tuple[Tensor, float]:
    """The `size` most frequent tokens of the answers, ascending [size] int64, filled up from the lowest ids, and the
    share of answer tokens they cover."""
    counts = np.bincount(texts.tokens[texts.answer], minlength=vocab_size)
    chosen = torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int64))
    return chosen, coverage_of(texts, chosen)


def coverage_of(texts: Texts, vocabulary: Tensor) -> float:
    """The share of the answers' tokens that a draft vocabulary holds."""
    answers = texts.tokens[texts.answer]
    return float(np.isin(answers, vocabulary.numpy()).mean()) if len(answers) else 0.0


@dataclass(frozen=True, slots=True)
class TextBatch:
    """ids [B, T] int64, right-padded with 0, and where [M], the flat positions b * T + u (u >= 1) that carry a loss:
    those where token u + 1 is of an answer. `texts` [B] are the rows' places in the texts. No position u < `first`
    carries a loss in any row."""

    ids: Tensor
    where: Tensor
    texts: np.ndarray
    first: int = 0

    def to(self, device: torch.device) -> TextBatch:
        """The batch on `device`; through pinned memory, so that the host does not wait for the device."""
        pinned = device.type == "cuda"
        ids, where = ((x.pin_memory() if pinned else x).to(device, non_blocking=pinned) for x in (self.ids, self.where))
        return TextBatch(ids, where, self.texts, self.first)


def plan_batches(
    lengths: np.ndarray, tokens: int, multiple: int, rng: np.random.Generator | None, starts: np.ndarray | None = None
) -> list[np.ndarray]:
    """Index groups of like length, each of at most `tokens` padded tokens; shuffled when `rng` is given. Texts of one
    padded length are sorted by bands of their `starts`, where these are given."""
    order = np.arange(len(lengths)) if rng is None else rng.permutation(len(lengths))
    padded = -(-lengths[order] // multiple) * multiple
    if starts is None:
        order = order[np.argsort(padded, kind="stable")]
    else:  # the bands are shifted anew in every plan: else the same texts would meet in every epoch
        shift = 0 if rng is None else int(rng.integers(BAND))
        order = order[np.lexsort(((starts[order] + shift) // BAND, padded))]
    groups, start = [], 0
    while start < len(order):
        end, width = start, 0
        while end < len(order):
            width = max(width, int(-(-lengths[order[end]] // multiple) * multiple))
            if end > start and width * (end + 1 - start) > tokens:
                break
            end += 1
        groups.append(order[start:end])
        start = end
    if rng is not None:
        rng.shuffle(groups)
    return groups


def batches(texts: Texts, groups: Sequence[np.ndarray], multiple: int) -> Iterator[TextBatch]:
    offsets = texts.offsets
    for group in groups:
        width = int(-(-texts.lengths[group].max() // multiple) * multiple)
        ids = np.zeros((len(group), width), dtype=np.int64)
        answer = np.zeros((len(group), width), dtype=bool)
        for row, index in enumerate(group):
            a, n = offsets[index], texts.lengths[index]
            ids[row, :n], answer[row, :n] = texts.tokens[a : a + n], texts.answer[a : a + n]
        judged = np.zeros_like(answer)
        judged[:, 1:-1] = answer[:, 2:]
        first = int(judged.any(0).argmax()) if judged.any() else 0
        yield TextBatch(torch.from_numpy(ids), torch.from_numpy(np.flatnonzero(judged)), texts=group, first=first)


def differing(kept: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Settings whose kept values differ from those of now, named with both; empty where none does."""
    other = [name for name in now if kept.get(name) != now[name]]
    return ", ".join(f"{name} {kept.get(name)!r} (now {now[name]!r})" for name in other)


MakeTexts = Callable[[], tuple[Texts, dict[str, Any]]]


class OutOfTime(Exception):
    """`TrainConfig.stop_after` has been reached; what was made is saved."""


@dataclass(slots=True)
class TimeLimit:
    """Counts `minutes` of wall-clock time from its making; 0 means no end."""

    minutes: float = 0.0
    began: float = field(default_factory=time.perf_counter)

    def left(self) -> float:
        return self.began + 60 * self.minutes - time.perf_counter() if self.minutes > 0 else float("inf")

    def need(self, seconds: float) -> None:
        """Raise `OutOfTime` where less is left; the first half of the time is open to work of any length."""
        if self.left() < min(max(0.0, seconds), 30 * self.minutes):
            raise OutOfTime


@dataclass(slots=True)
class Shards:
    """Numbered npz files of texts in one folder; each records the `seconds` that it took."""

    folder: Path
    clock: TimeLimit
    seconds: list[float] = field(default_factory=list)

    def path(self, number: int) -> Path:
        return self.folder / f"shard_{number:05d}.npz"

    def get(self, number: int, seed: Sequence[int], make: MakeTexts) -> tuple[Texts, dict[str, np.ndarray]]:
        """The texts of one shard and the arrays saved beside them: read, or made by `make` under `seed`. Raises
        `OutOfTime` rather than start a shard that would not be done in time, going by the slowest one so far."""
        path = self.path(number)
        if not path.exists():
            self.clock.need(max(self.seconds, default=0.0))
            began = time.perf_counter()
            torch.manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))
            texts, more = make()
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".part.npz")
            texts.save(part, seconds=time.perf_counter() - began, **more)
            part.replace(path)
        with np.load(path) as z:
            more = {name: z[name] for name in z if name not in Texts.__slots__}
        self.seconds.append(float(more.get("seconds", 0.0)))
        return Texts.load(path), more
