"""Answers that a cascade's predictor is trained on: every stage's to every item, verified by the next stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from fastspec.cascade import records
from fastspec.errors import Unsupported
from fastspec.patches.cascade.loop import AdaptiveCascade, CascadeModels, StageAnswer
from fastspec.patches.cascade.settings import left_padded
from fastspec.programs import texts
from fastspec.programs.bench.device import environment
from fastspec.programs.training.cascade_judging import Given, read_right

Judged = Mapping[tuple[str, str], tuple[float, str]]
"""(item, stage) -> how right its answer is in [0, 1], and how it was judged."""


@dataclass(frozen=True, slots=True)
class Item:
    """Prompt of a set, with the right answer where the set gives one. An answer ends before the first of `until`, and
    has at most `limit` tokens. `task`: one of lm-eval asks it, chat template included, and judges the answers."""

    name: str
    set: str
    prompt: str
    given: Given | None = None
    until: tuple[str, ...] = ()
    limit: int | None = None
    task: bool = False


def read_items(path: str | Path, most: int | None = None) -> list[Item]:
    """The items of a JSON-lines file, at most `most`; the file's name is their set's. A line holds a `prompt`, or
    `turns`, of which the first is asked. Raises Unsupported for a line that is no item."""
    items, stem = [], Path(path).stem
    for number, row in islice(texts.read_jsonl(path), most):
        prompt, name = (row.get("turns") or [row.get("prompt")])[0], row.get("id")
        if not isinstance(prompt, str) or not prompt.strip():
            raise Unsupported(f"{path}, line {number}: item {name!r} has neither a prompt nor turns: nothing to ask")
        items.append(Item(str(row.get("id", f"{stem}-{number}")), stem, prompt, Given.of(row)))
    return items


def check_items(items: Sequence[Item], *, right: bool) -> None:
    """Raise Unsupported where there is no item, where two have one id, and, unless answers are judged by a file
    (`right`), where an item of a file has no `answer`."""
    if not items:
        raise Unsupported("no items to answer: --prompts FILE or --task NAME")
    found: dict[str, str] = {}
    for item in items:
        if item.name in found:
            sets = f"{found[item.name]} and {item.set}"
            raise Unsupported(f"the id {item.name!r} is there twice, in {sets}: ids must be unique")
        found[item.name] = item.set
    bare = [item for item in items if item.given is None and not item.task]
    if bare and not right:
        raise Unsupported(
            f"{len(bare)} of {len(items)} items, such as {bare[0].name!r} of {bare[0].set}, have no `answer` to match "
            "(a `reference` is one good answer of many): give one, let a task of lm-eval judge (--task), or a judge "
            "of yours (--right)"
        )


def answer(
    models: CascadeModels,
    tokenizer: Any,
    items: Sequence[Item],
    path: str | Path,
    *,
    batch: int,
    new_tokens: int,
    seed: int,
    share: float,
    tell: Callable[[int, int], None] = lambda done, of: None,
) -> None:
    """Let every stage answer every item greedily, in batches, and write a record of each that the file does not hold.
    `tell` is given the number of items that are answered, and of all.

    Answers have at most `new_tokens` tokens where an item sets no limit. `share` of the items, drawn by `seed` and
    their names, are for training.
    """
    known, count, plain = place(models.large), 0, replace(models.config, explain=False)
    with records.Writer(path) as writer:
        todo = [item for item in items if any((item.name, stage) not in writer.done for stage in models.names)]
        encoded = {item.name: encode(tokenizer, item) for item in todo}
        todo.sort(key=lambda item: (item.until, item.limit or new_tokens, len(encoded[item.name])))
        for (until, limit), group in groupby(todo, key=lambda item: (item.until, item.limit or new_tokens)):
            alike = list(group)
            for chosen in (alike[first : first + batch] for first in range(0, len(alike), batch)):
                heard: list[StageAnswer] = []
                # "autoregressive": the fastest in batches
                cascade = AdaptiveCascade(models, plain, on_answer=heard.append, assistant="autoregressive")
                ids, mask = left_padded([encoded[item.name] for item in chosen], 0, models.large.device)
                stops = {"stop_strings": list(until), "tokenizer": tokenizer} if until else {}
                options = {"assistant": cascade, "max_new_tokens": limit, "do_sample": False, **stops}
                models.large.generate(ids, attention_mask=mask, **options)
                for each in heard:
                    item, stage = chosen[each.row], models.stages[each.visit.stage]
                    if (item.name, stage.label) not in writer.done:
                        writer.add(_record(item, stage, each, seed, share, known))
                count += len(chosen)
                tell(count, len(todo))


def place(model: Any) -> dict[str, str]:
    """The device, the dtype and the versions that a model runs with."""
    told = environment(model)
    return {name: str(told[name]) for name in ("device", "dtype", "torch", "transformers", "fastspec", "commit")}


def _record(
    item: Item, stage: Any, heard: StageAnswer, seed: int, share: float, known: dict[str, str]
) -> records.Record:
    visit, reader = heard.visit, stage.tokenizer or stage.large_tokenizer
    text = reader.decode(heard.answer, skip_special_tokens=True)
    for stop in item.until:
        text = text.split(stop)[0]
    return records.Record(
        item=item.name,
        set=item.set,
        split=records.split(item.name, seed, share),
        stage=stage.label,
        index=visit.stage,
        prompt_tokens=heard.prompt_tokens,
        answer=text,
        new_tokens=visit.new_tokens,
        kept_tokens=visit.kept_tokens,
        ended=heard.ended,
        start_ms=heard.start_ms,
        decode_ms=heard.decode_ms,
        label=None,
        features=tuple(heard.features.tolist()),
        seed=seed,
        versions=known,
    )


def judge(
    path: str | Path,
    items: Sequence[Item],
    *,
    right: str | Path | None = None,
    score: Callable[[Sequence[records.Record]], Judged] | None = None,
) -> dict[str, str]:
    """Label the records of a file by the file `right`, or by the items' own answers and, for those of tasks, by
    `score`; returns set -> how. Raises Unsupported for records of other items."""
    read = records.read(path)
    known = {item.name: item for item in items}
    unknown = sorted({record.item for record in read} - set(known))
    if unknown:
        raise Unsupported(
            f"{path} has answers to {len(unknown)} items that were not asked now, such as {unknown[0]!r}: give all "
            "prompt files and tasks, or write to another file"
        )
    found: dict[tuple[str, str], tuple[float, str]] = {}
    if right is not None:
        judged = read_right(right, read, path)
        found = {pair: (value, f"`right` in {Path(right).name}") for pair, value in judged.items()}
    else:
        for record in read:
            given = known[record.item].given
            if given is not None:
                found[record.item, record.stage] = float(given.accepts(record.answer)), given.way
        asked = [record for record in read if known[record.item].task]
        if score is not None and asked:
            found.update(score(asked))
    labelled = []
    for record in read:
        label, way = found[record.item, record.stage]
        labelled.append(replace(record, label=label, judged=way))
    records.rewrite(path, labelled)
    return ways_by_set(labelled)


def ways_by_set(judged: Sequence[records.Record]) -> dict[str, str]:
    """Set -> how its answers were judged, "not known" in older files."""
    ways: dict[str, set[str]] = {}
    for record in judged:
        ways.setdefault(record.set, set()).add(record.judged or "not known")
    return {name: ", ".join(sorted(found)) for name, found in sorted(ways.items())}


def encode(tokenizer: Any, item: Item) -> list[int]:
    """Token ids of a prompt as the first turn of a chat; a task has applied the template to its own prompts."""
    if item.task and tokenizer.chat_template is not None:
        return list(tokenizer(item.prompt, add_special_tokens=False)["input_ids"])
    return texts.encode(tokenizer, item.prompt)["input_ids"][0].tolist()
