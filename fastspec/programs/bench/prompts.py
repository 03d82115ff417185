"""Prompt files in Spec-Bench's form, as token ids, in batches of one category."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastspec.errors import Unsupported
from fastspec.programs.texts import encode, read_prompts

BUNDLED = Path(__file__).with_name("prompts.jsonl")
"""Eight prompts of six kinds, written for fastspec: what is asked where no prompts are given."""
Row = dict[str, Any]
Say = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One prompt as token ids, with the category that it is counted in."""

    category: str
    id: str
    ids: list[int]


def read_rows(path: str | Path) -> list[Row]:
    """Rows of a jsonl file in Spec-Bench's form: `turns`, of which the first is asked, or `prompt`; `category` (else
    the file's name) and `id` (else the line's number)."""
    stem = Path(path).stem
    return [
        {"category": str(row.get("category", stem)), "id": str(row.get("id", number)), "text": text}
        for number, row, text in read_prompts(path)
    ]


def rows_of(texts: Sequence[str]) -> list[Row]:
    """Rows of prompts that were given as texts, all of one category."""
    return [{"category": "prompt", "id": str(number), "text": text} for number, text in enumerate(texts, 1)]


def encode_rows(
    rows: list[Row], tokenizer: Any, model: Any, each: int | None, max_new_tokens: int, say: Say
) -> list[BenchPrompt]:
    """The first `each` prompts of every category that the model has positions for, by category."""
    from fastspec.patches.hf.config_fields import position_limit

    bound = position_limit(model.config)
    found: dict[str, list[BenchPrompt]] = {}
    left = 0
    for row in rows:
        group = found.setdefault(row["category"], [])
        if each is not None and len(group) >= each:
            continue
        ids = encode(tokenizer, row["text"])["input_ids"][0].tolist()
        most = max(len(ids), max_new_tokens) if model.config.is_encoder_decoder else len(ids) + max_new_tokens
        if ids and (bound is None or most <= bound):
            group.append(BenchPrompt(row["category"], row["id"], ids))
        else:
            left += 1
    no_room = f"empty or with no room for {max_new_tokens} new tokens in {bound} positions"
    if left:
        say(f"left out: {left} prompts, {no_room}")
    if not any(found.values()):
        raise Unsupported(f"no prompt is left: each is {no_room}")
    return [prompt for group in found.values() for prompt in group]


def make_batches(prompts: list[BenchPrompt], size: int) -> list[list[BenchPrompt]]:
    """At most `size` prompts of one category at a time."""
    groups: dict[str, list[BenchPrompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    return [group[start : start + size] for group in groups.values() for start in range(0, len(group), size)]
