"""Training texts as flat token arrays, the draft vocabulary, and batches of like length."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Texts:
    """Conversations: `tokens` concatenated, `lengths` of each, and `answer`, True where the target itself wrote the token."""

    tokens: np.ndarray
    lengths: np.ndarray
    answer: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def offsets(self) -> np.ndarray:
        return np.concatenate(([0], np.cumsum(self.lengths, dtype=np.int64)))

    @classmethod
    def of(cls, pairs: Sequence[tuple[Sequence[int], Sequence[bool]]]) -> Texts:
        """From (tokens, answer mask) of each conversation."""
        lengths = np.array([len(t) for t, _ in pairs], dtype=np.int32)
        if not len(lengths):
            return cls(np.zeros(0, np.int32), lengths, np.zeros(0, bool))
        tokens = np.concatenate([np.asarray(t, dtype=np.int32) for t, _ in pairs])
        return cls(tokens, lengths, np.concatenate([np.asarray(m, dtype=bool) for _, m in pairs]))

    @classmethod
    def join(cls, parts: Sequence[Texts]) -> Texts:
        """Several sets after one another."""
        fields = ("tokens", "lengths", "answer")
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in fields))

    @classmethod
    def load(cls, path: str | Path) -> Texts:
        """Read what `save` wrote."""
        with np.load(path) as z:
            tokens = z["tokens"].astype(np.int32)
            return cls(tokens, z["lengths"].astype(np.int32), np.unpackbits(z["answer"], count=len(tokens)).astype(bool))

    def save(self, path: str | Path) -> None:
        """Write a compressed npz: tokens (uint16 where they fit), lengths, answer (bits)."""
        small = self.tokens.size == 0 or self.tokens.max() < 2**16
        np.savez_compressed(
            path, tokens=self.tokens.astype(np.uint16 if small else np.int32), lengths=self.lengths, answer=np.packbits(self.answer)
        )

    def text(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, answer mask) of one conversation."""
        start = int(self.lengths[:index].sum())
        return self.tokens[start : start + self.lengths[index]], self.answer[start : start + self.lengths[index]]

    def select(self, keep: np.ndarray) -> Texts:
        """The conversations whose entry in `keep` (bool) is True."""
        flat = np.repeat(keep, self.lengths)
        return Texts(self.tokens[flat], self.lengths[keep], self.answer[flat])


def read_prompts(path: str | Path) -> list[Row]:
    """Rows of a jsonl file; each has `prompt` (text) or `turns` (list of user turns)."""
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").split("\n") if line.strip()]
    for number, row in enumerate(rows, 1):
        if "prompt" not in row and not row.get("turns"):
            raise ValueError(f'{path}, line {number}: the row has neither "prompt" nor "turns"')
        row.setdefault("id", str(number))
    return rows


def encode_prompt(tokenizer: Any, row: Row) -> list[int]:
    """The first user turn through the chat template (plain text where the tokenizer has none), up to where the answer starts."""
    text = row["prompt"] if "prompt" in row else row["turns"][0]
    if getattr(tokenizer, "chat_template", None) is None:
        return list(tokenizer(text)["input_ids"])
    chat = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False)
    return list(tokenizer(chat, add_special_tokens=False)["input_ids"])


def join_answers(tokenizer: Any, prompts: Sequence[Row], path: str | Path) -> Texts:
    """Prompts and the target's answers to them. The npz holds `ids` (of the prompts), `lengths` and `tokens` (concatenated)."""
    by_id = {row["id"]: row for row in prompts}
    with np.load(path) as z:
        ids, lengths, tokens = z["ids"], z["lengths"], z["tokens"].astype(np.int32)
    ends = np.cumsum(lengths, dtype=np.int64)
    pairs: list[tuple[Sequence[int], Sequence[bool]]] = []
    for name, length, end in zip(ids.tolist(), lengths.tolist(), ends.tolist(), strict=True):
        if name not in by_id:
            raise ValueError(f"{path} answers the prompt {name!r}, which is not among the prompts given")
        prompt = encode_prompt(tokenizer, by_id[name])
        pairs.append((prompt + tokens[end - length : end].tolist(), [False] * len(prompt) + [True] * length))
    return Texts.of(pairs)


def draft_vocabulary(texts: Texts, size: int, vocab_size: int) -> tuple[Tensor, float]:
    """The `size` most frequent tokens of the answers, ascending [size] int64, and the share of answer tokens they cover.

    Tokens that never occur fill up from the lowest ids, so that any size up to vocab_size works.
    """
    if not 0 < size <= vocab_size:
        raise ValueError(f"draft vocabulary of {size}; expected 1 to {vocab_size}, the target's vocabulary")
    counts = np.bincount(texts.tokens[texts.answer], minlength=vocab_size)
    chosen = np.sort(np.argsort(-counts, kind="stable")[:size])
    return torch.from_numpy(chosen.astype(np.int64)), float(counts[chosen].sum() / max(1, counts.sum()))


@dataclass(frozen=True, slots=True)
class Batch:
    """ids [B, T] int64, right-padded with 0, and where [M], the flat positions b * T + u (u >= 1) that carry a loss.

    Position u carries one when token u + 1 is of an answer: there the target's distribution is that of an answer.
    """

    ids: Tensor
    where: Tensor

    def to(self, device: torch.device) -> Batch:
        """The batch on `device`; through pinned memory, so that the host does not wait for the device."""
        if device.type != "cuda":
            return Batch(self.ids.to(device), self.where.to(device))
        ids, where = (x.pin_memory().to(device, non_blocking=True) for x in (self.ids, self.where))
        return Batch(ids, where)


def plan_batches(lengths: np.ndarray, tokens: int, multiple: int, rng: np.random.Generator | None) -> list[np.ndarray]:
    """Index groups of like length, each of at most `tokens` padded tokens; shuffled when `rng` is given."""
    order = np.arange(len(lengths)) if rng is None else rng.permutation(len(lengths))
    padded = -(-lengths[order] // multiple) * multiple
    order = order[np.argsort(padded, kind="stable")]
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


def batches(texts: Texts, groups: Sequence[np.ndarray], multiple: int) -> Iterator[Batch]:
    """The batches of a plan, one after another."""
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
        yield Batch(torch.from_numpy(ids), torch.from_numpy(np.flatnonzero(judged)))
