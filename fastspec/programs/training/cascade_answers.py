"""Answers that a cascade's predictor is trained on: every stage's to every item, verified by the next, and judged."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from hashlib import sha256
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from fastspec.cascade import records
from fastspec.cascade.predictor import LEAST_ITEMS
from fastspec.cascade.records import Record
from fastspec.errors import Unsupported
from fastspec.patches.cascade.loop import AdaptiveCascade, CascadeModels, StageAnswer
from fastspec.patches.cascade.settings import left_padded
from fastspec.patches.hf.changes import weights_digest
from fastspec.programs import texts
from fastspec.programs.compare import environment

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
    for number, row, prompt in islice(texts.read_prompts(path), most):
        if not prompt.strip():
            raise Unsupported(f"{path}, line {number}: the prompt is blank: nothing to ask")
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
            raise Unsupported(
                f"the id {item.name!r} is there twice, in {found[item.name]} and {item.set}: ids must be unique"
            )
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
    Answers have at most `new_tokens` tokens where an item sets no limit. `share` of the items, drawn by `seed` and
    their names, are for training. `tell` is given the number of items that are answered, and of all."""
    where, count, plain = place(models.large), 0, replace(models.config, explain=False)
    known = {stage.label: where | {"weights": weights_digest(stage.model)} for stage in models.stages}
    encoded = {item.name: encode(tokenizer, item) for item in items}
    asked = {item.name: _settings(item, encoded[item.name], new_tokens) for item in items}
    if Path(path).exists():
        check_answers(path, asked, known, seed=seed, share=share)
    with records.Writer(path) as writer:
        todo = [item for item in items if any((item.name, stage) not in writer.done for stage in models.names)]
        todo.sort(key=lambda item: (item.until, item.limit or new_tokens, len(encoded[item.name])))
        for (until, limit), group in groupby(todo, key=lambda item: (item.until, item.limit or new_tokens)):
            alike = list(group)
            for chosen in (alike[first : first + batch] for first in range(0, len(alike), batch)):
                heard: list[StageAnswer] = []
                # "autoregressive": the fastest in batches
                cascade = AdaptiveCascade(models, plain, on_answer=heard.append, assistant="autoregressive")
                ids, mask = left_padded([encoded[item.name] for item in chosen], 0, models.large.device)
                stops = {"stop_strings": list(until), "tokenizer": tokenizer} if until else {}
                models.large.generate(
                    ids, attention_mask=mask, assistant=cascade, max_new_tokens=limit, do_sample=False, **stops
                )
                for each in heard:
                    item, stage = chosen[each.row], models.stages[each.visit.stage]
                    if (item.name, stage.label) not in writer.done:
                        writer.add(_record(item, stage, each, seed, share, known[stage.label] | asked[item.name]))
                count += len(chosen)
                tell(count, len(todo))


def _settings(item: Item, prompt: Sequence[int], new_tokens: int) -> dict[str, str]:
    """Settings of an item that its answers depend on, as their records hold them among the `versions`."""
    digest = sha256(json.dumps([list(prompt), item.until]).encode()).hexdigest()
    return {"limit": str(item.limit or new_tokens), "prompt": digest[:16]}


def check_answers(
    path: str | Path,
    asked: Mapping[str, Mapping[str, str]],
    known: Mapping[str, Mapping[str, str]],
    *,
    seed: int,
    share: float,
) -> None:
    """Raise Unsupported, naming what differs, where a file's answers are not those that these stages would give.
    `asked` are the items' `versions` by name, `known` the stages' in their order."""
    places, differs = list(known), dict[str, str]()
    for record in records.read(path):
        item, stage = asked.get(record.item), known.get(record.stage)
        if item is None:
            differs.setdefault("items", f"{record.item!r}, which is not asked now")
        elif stage is None:
            differs.setdefault("stages", f"{record.stage!r}, which is none now")
        else:
            now, was = {**stage, **item, "seed": seed}, {**stage, **item, **record.versions, "seed": record.seed}
            for name, called, what in (
                ("weights", "models", f"stage {record.stage!r} had other weights"),
                ("dtype", "dtype", f"{was['dtype']}, and it is {now['dtype']} now"),
                ("limit", "limit", f"{was['limit']} new tokens, and it is {now['limit']} now"),
                ("prompt", "prompts", f"item {record.item!r} was asked in other words"),
                ("seed", "seed", f"{record.seed}, and it is {seed} now"),
            ):
                if was[name] != now[name]:
                    differs.setdefault(called, what)
            if places[record.index : record.index + 1] != [record.stage]:
                order = f"{record.stage!r} was stage {record.index}, and is stage {places.index(record.stage)} now"
                differs.setdefault("stages", order)
            if record.seed == seed and record.split != records.split(record.item, seed, share):
                differs.setdefault("share", f"item {record.item!r} was for {record.split}, and is not with {share}")
    if differs:
        told = "; ".join(f"{name}: {what}" for name, what in differs.items())
        raise Unsupported(
            f"{path} holds answers that were made otherwise ({told}): give all prompt files, tasks and settings that "
            "they were made with, or write to another file"
        )


def check_training(items: Sequence[Item], seed: int, share: float) -> None:
    count = sum(records.split(item.name, seed, share) == records.SPLITS[0] for item in items)
    if count < LEAST_ITEMS:
        raise Unsupported(
            f"{count} of {len(items)} items are for training (share={share}, seed={seed}), and at least {LEAST_ITEMS} "
            "are needed, some hundreds for a useful predictor: ask more, or raise --share"
        )


def place(model: Any) -> dict[str, str]:
    told = environment(model)
    return {name: str(told[name]) for name in ("device", "dtype", "torch", "transformers", "fastspec", "commit")}


def _record(
    item: Item, stage: Any, heard: StageAnswer, seed: int, share: float, known: Mapping[str, str]
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
        versions=dict(known),
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


CURRENCY = re.compile(r"[$\u00a3\u20ac\\]|(?<=\d),(?=\d{3}(?!\d))|\{,\}")
"""Signs that a number is read without: currencies, TeX's backslashes, commas between thousands."""
NUMBER = re.compile(r"(?<!\w)(?<!\d\.)[-\u2212]?(?:\d+(?:\.\d+)?|(?<!\.)\.\d+)(?:[eE][+-]?\d{1,3}(?!\d))?")
MARK = re.compile(r"####|boxed\{")
END = r"(?=[)\].,:;*\"'}]|[ \t]*$|[ \t]+(?:because|since|as)\b)(?=[^\w\n]*([^\n]*))"
"""Text after a letter that is an answer; the rest of its line is a group."""
STATED = re.compile(
    rf"(?i:\b(?:answer|option|choice|boxed)(?: is)?:?)[ \t]*(?i:option |choice )?[\s\"'(\[*{{$]*([A-Z]){END}",
    re.MULTILINE,
)
LEADS = re.compile(rf"^[\s\"'(\[*{{$]*([A-Za-z]){END}", re.MULTILINE)
ARTICLES = re.compile(r"\b(?:a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation + "\u2018\u2019\u201c\u201d\u2013\u2014\u2026")


@dataclass(frozen=True, slots=True)
class Given:
    """The right answer to an item. `kind` "number": `answers` holds one; "text": `answers` are the accepted ones;
    "choice": `answers` holds the letter of one of the texts `choices`."""

    kind: str
    answers: tuple[str, ...]
    choices: tuple[str, ...] = ()

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Given | None:
        """The right answer in a row of a prompts file or None: a number, a text, or a list of accepted texts; beside
        `choices` a letter, or a place from 0 on. Raises Unsupported for none of the choices."""
        answer = row.get("answer")
        if "choices" in row:
            answer, letters = row.get("answer_letter", answer), string.ascii_uppercase[: len(row["choices"])]
            if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(letters):
                answer = letters[answer]
            if not isinstance(answer, str) or len(answer) != 1 or answer not in letters:
                raise Unsupported(
                    f"item {row.get('id')!r}: `answer` must be a letter of the {len(letters)} `choices`, or a place"
                )
            return cls("choice", (answer,), tuple(map(str, row["choices"])))
        accepted = answer if isinstance(answer, (list, tuple)) else () if answer is None else (answer,)
        texts = tuple(str(each).strip() for each in accepted if str(each).strip())
        if len(texts) == 1 and (found := NUMBER.fullmatch(CURRENCY.sub("", texts[0].rstrip("%.")))):
            return cls("number", (found[0],))
        return cls("text", texts) if texts else None

    @property
    def way(self) -> str:
        return {"number": "the number", "text": "the text", "choice": "the letter"}[self.kind] + " in `answer`"

    def accepts(self, answer: str) -> bool:
        if self.kind == "number":
            value = number(answer)
            return value is not None and value == number(self.answers[0])
        if self.kind == "choice":
            return letter(answer, self.choices) == self.answers[0]
        return normalise(answer) in {normalise(each) for each in self.answers}


def number(text: str) -> Decimal | None:
    """The first number after the last "####" or "\\boxed{", else the last number; None where there is none."""
    plain = CURRENCY.sub("", text)
    marked = [found for mark in MARK.finditer(plain) if (found := NUMBER.search(plain, mark.end()))]
    every = marked or list(NUMBER.finditer(plain))
    return Decimal(every[-1][0].replace("\u2212", "-")) if every else None


def letter(text: str, choices: Sequence[str]) -> str | None:
    """The letter that an answer states ("the answer is B"), else that begins a line, else of the choice whose text it
    is. None where there is none or several: a letter beside the text of another choice is two."""
    letters = string.ascii_uppercase[: len(choices)]

    def written(part: str) -> set[str]:
        return {each for each, choice in zip(letters, choices, strict=True) if normalise(choice) == normalise(part)}

    for found in (STATED.findall(text), LEADS.findall(text), [("", text)]):
        said = {each.upper() for each, _ in found} & set(letters)
        said = said.union(*(written(rest) for _, rest in found if rest))
        if said:
            return said.pop() if len(said) == 1 else None
    return None


def normalise(text: str) -> str:
    """Lower case, without punctuation, articles and repeated white space (as SQuAD evaluates, arXiv 1606.05250)."""
    lowered = text.casefold()
    return " ".join(ARTICLES.sub(" ", lowered.translate(PUNCTUATION)).split()) or lowered.strip()


def read_right(path: str | Path, answers: Sequence[Record], source: str | Path) -> dict[tuple[str, str], float]:
    """(item, stage) -> how right its answer is in [0, 1], by JSON lines with `item`, `stage` and `right`, and perhaps
    the recorded `answer`; `answers` are the records of the file `source`. Raises Unsupported, naming the line, for one
    of no answer or of another, one that is there twice, and where an answer is not judged."""
    if not Path(path).exists():
        raise Unsupported(
            f"{path}: no such file. The {len(answers)} answers to judge are in {source}: write a line "
            '{"item": ..., "stage": ..., "right": true or false} for each, and run this command again'
        )
    known, found = {(record.item, record.stage): record for record in answers}, dict[tuple[str, str], float]()
    for place, row in texts.read_jsonl(path):
        item, stage, right = row.get("item"), row.get("stage"), row.get("right")
        where = f"{path}, line {place}: item {item!r} by stage {stage!r}"
        record = known.get((item, stage)) if isinstance(item, str) and isinstance(stage, str) else None
        if record is None:
            raise Unsupported(f"{where} is no answer of {source}")
        if row.get("answer", record.answer) != record.answer:
            raise Unsupported(f"{where}: another answer was judged than the one in {source}; judge that one")
        if not isinstance(right, (bool, int, float)) or not 0 <= right <= 1:
            raise Unsupported(f"{where}: right={right!r} must be true, false or a number in [0, 1]")
        if (record.item, record.stage) in found:
            raise Unsupported(f"{where} is judged twice; remove one line")
        found[record.item, record.stage] = float(right)
    missing = [pair for pair in known if pair not in found]
    if missing:
        raise Unsupported(
            f"{path}: {len(missing)} of {len(known)} answers of {source} are not judged, such as item "
            f"{missing[0][0]!r} by stage {missing[0][1]!r}"
        )
    return found
