"""What a cascade's predictor is trained on: every stage's answer to every item, each verified and continued by the next stage."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastspec.cascade import labels, records
from fastspec.cascade.features import NAMES
from fastspec.cascade.sandbox import sandbox
from fastspec.cascade.unit_tests import consent
from fastspec.errors import Unsupported
from fastspec.patches.cascade.loop import AdaptiveCascade, CascadeModels, Heard
from fastspec.patches.cascade.settings import left_padded
from fastspec.programs.bench.device import environment
from fastspec.programs.jsonl import read_jsonl


@dataclass(frozen=True, slots=True)
class Item:
    """A prompt, the set that it is from, and the key that its answers are judged by."""

    name: str
    set: str
    prompt: str
    key: labels.Key | None


def read_sets(paths: Sequence[str | Path], most: int | None = None, *, agreement: bool = False) -> list[Item]:
    """The items of several files, at most `most` of each; without `agreement` every one must have a key.

    Raises Unsupported where there is no item, where one has no key and agreement was not asked for, and where two have one id: answers are
    kept by it.
    """
    items: list[Item] = []
    for path in paths:
        read = read_items(path, most)
        if not agreement:
            _check_keys(path, read)
        items += read
    if not items:
        raise Unsupported(f"{', '.join(map(str, paths))}: no prompts in there")
    found: dict[str, str] = {}
    for item in items:
        if item.name in found:
            raise Unsupported(f"the id {item.name!r} is there twice, in {found[item.name]} and {item.set}: ids must be unique in all files")
        found[item.name] = item.set
    return items


def _check_keys(path: str | Path, items: Sequence[Item]) -> None:
    bare = [item.name for item in items if item.key is None]
    if bare:
        raise Unsupported(
            f"{path}: {len(bare)} of {len(items)} items, such as {bare[0]!r}, have no key that an answer can be judged by (a `reference` "
            f"in words is one good answer of many, and none). Keys are {labels.KEY_FIELDS}. To take what agrees with the last stage's "
            "answer for good instead, ask for it: --agreement, or read_sets(..., agreement=True)"
        )


def read_items(path: str | Path, most: int | None = None) -> list[Item]:
    """The items of a JSON-lines file, at most `most` of them; the file's name is their set's. Raises Unsupported for what is no item."""
    items, stem = [], Path(path).stem
    for number, row in read_jsonl(path):
        items.append(Item(str(row.get("id", f"{stem}-{number}")), stem, labels.prompt_of(row), labels.key_of(row)))
        if len(items) == most:
            break
    return items


def check_execution(items: Sequence[Item], allow_code_execution: bool) -> str | None:
    """What the code of models will run in, None where no item has unit tests. Raises Unsupported, before anything is computed, where some
    have and running code was not allowed, and where this system cannot run it."""
    sets = sorted({item.set for item in items if item.key is not None and item.key.tests is not None})
    if sets:
        try:
            consent(allow_code_execution)
        except Unsupported as error:
            raise Unsupported(f"{', '.join(sets)}: items with unit tests; {error}") from error
    return sandbox() if sets else None


def answer(
    models: CascadeModels, tokenizer: Any, items: Sequence[Item], path: str | Path, *, batch: int, new_tokens: int, seed: int, share: float,
    tell: Callable[[int, int], None] = lambda done, of: None,
) -> None:  # fmt: skip
    """Let every stage answer every item greedily, in batches, and write a record of each; what the file holds already is not done again.
    `tell` is given the items that are answered, and how many they will be.

    Items go through as chat turns of the large model's template. `share` of them, drawn by `seed` and the item's name, are for training.
    """
    known = place(models.large)
    with records.Writer(path, NAMES) as writer:
        todo = [item for item in items if any((item.name, stage) not in writer.done for stage in models.names)]
        encoded = [encode(tokenizer, item.prompt) for item in todo]
        order = sorted(range(len(todo)), key=lambda at: len(encoded[at]))
        for first in range(0, len(order), batch):
            chosen = order[first : first + batch]
            heard: list[Heard] = []
            plain = replace(models.config, explain=False)
            cascade = AdaptiveCascade(models, plain, hear=heard.append, assistant="autoregressive")  # in batches the fastest
            ids, mask = left_padded([encoded[at] for at in chosen], 0, models.large.device)
            models.large.generate(ids, attention_mask=mask, assistant=cascade, max_new_tokens=new_tokens, do_sample=False)
            for each in heard:
                item, stage = todo[chosen[each.row]], models.stages[each.visit.stage]
                if (item.name, stage.label) not in writer.done:
                    writer.add(_record(item, stage, each, seed, share, known))
            tell(min(first + batch, len(order)), len(order))


def place(model: Any) -> dict[str, str]:
    """The device, the dtype and the versions that a model runs with."""
    told = environment(model)
    return {name: str(told[name]) for name in ("device", "dtype", "torch", "transformers", "fastspec", "commit")}


def _record(item: Item, stage: Any, heard: Heard, seed: int, share: float, known: dict[str, str]) -> records.Record:
    visit, reader = heard.visit, stage.tokenizer or stage.large_tokenizer
    return records.Record(
        item=item.name, set=item.set, split=records.split(item.name, seed, share), stage=stage.label, index=visit.stage,
        prompt_tokens=heard.prompt_tokens, answer=reader.decode(heard.answer, skip_special_tokens=True), new_tokens=visit.new_tokens,
        kept_tokens=visit.kept_tokens, ended=heard.ended, start_ms=heard.start_ms, decode_ms=heard.decode_ms, label=None,
        features=tuple(heard.features.tolist()), seed=seed, versions=known,
    )  # fmt: skip


def judge(path: str | Path, items: Sequence[Item], *, threshold: float, allow_code_execution: bool) -> dict[str, str]:
    """Label the records of a file, and say by set how: by the items' keys, or where they have none by agreement (F1 of at least
    `threshold`) with the last stage's answer. Labels that were made in another way are made anew."""
    read = records.read(path)
    keys = {item.name: item.key for item in items}
    unknown = sorted({record.item for record in read.records} - set(keys))
    if unknown:
        raise Unsupported(f"{path} has {len(unknown)} items that the prompts do not have, such as {unknown[0]!r}: give all prompt files")
    last = max(read.records, key=lambda record: record.index)
    final = {record.item: record.answer for record in read.records if record.index == last.index}
    ways = {name: labels.judged_by(key, last.stage, threshold) for name, key in keys.items()}
    open_ = [
        record for record in read.records
        if (record.label is None or record.judged != ways[record.item]) and record.item in final
    ]  # fmt: skip
    found = labels.label_all(
        [keys[record.item] for record in open_], [record.answer for record in open_], last=[final[record.item] for record in open_],
        threshold=threshold, allow_code_execution=allow_code_execution, workers=os.cpu_count() or 2,
    )  # fmt: skip
    judged = {(record.item, record.stage): value for record, value in zip(open_, found, strict=True)}
    labelled = []
    for record in read.records:
        value = judged.get((record.item, record.stage))
        labelled.append(record if value is None else replace(record, label=value, judged=ways[record.item]))
    records.rewrite(path, records.Records(read.features, tuple(labelled)))
    return ways_by_set(labelled)


def ways_by_set(judged: Sequence[records.Record]) -> dict[str, str]:
    """Set -> how its items are judged: "a number", or where there are several ways each with its number of items."""
    counts: dict[str, dict[str, set[str]]] = {}
    for record in judged:
        if record.label is not None:
            counts.setdefault(record.set, {}).setdefault(record.judged or "not known", set()).add(record.item)
    return {
        name: next(iter(ways)) if len(ways) == 1 else ", ".join(f"{way}: {len(ids)} items" for way, ids in sorted(ways.items()))
        for name, ways in sorted(counts.items())
    }


def encode(tokenizer: Any, prompt: str) -> list[int]:
    """A prompt's tokens as the first turn of a chat, or as they are where the tokenizer has no template."""
    if tokenizer.chat_template is None:
        return list(tokenizer(prompt)["input_ids"])
    out = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True)
    return list(out["input_ids"])
