"""Judging of answers: by matching an item's own `answer`, or by another judge's file."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from fastspec.cascade.records import Record
from fastspec.errors import Unsupported
from fastspec.programs.texts import read_jsonl

CURRENCY = re.compile(r"[$\u00a3\u20ac\\]|(?<=\d),(?=\d{3}(?!\d))|\{,\}")
"""Signs that a number is read without: currencies, TeX's backslashes, commas between thousands."""
NUMBER = re.compile(r"(?<!\w)(?<!\d\.)[-\u2212]?(?:\d+(?:\.\d+)?|(?<!\.)\.\d+)(?:[eE][+-]?\d{1,3}(?!\d))?")
MARK = re.compile(r"####|boxed\{")
END = r"(?=[)\].,:;*\"'}]|[ \t]*$|[ \t]+(?:because|since|as)\b)(?=[^\w\n]*([^\n]*))"
"""What follows a letter that is an answer; the rest of its line is a group."""
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
        """How answers are judged, for people."""
        return {"number": "the number", "text": "the text", "choice": "the letter"}[self.kind] + " in `answer`"

    def accepts(self, answer: str) -> bool:
        """Whether an answer is right."""
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
    """Lower case, without punctuation, articles and repeated white space (SQuAD's evaluation script, arXiv
    1606.05250)."""
    lowered = text.casefold()
    return " ".join(ARTICLES.sub(" ", lowered.translate(PUNCTUATION)).split()) or lowered.strip()


def read_right(path: str | Path, answers: Sequence[Record], source: str | Path) -> dict[tuple[str, str], float]:
    """(item, stage) -> how right its answer is in [0, 1], by JSON lines with `item`, `stage` and `right`.

    `answers` are the records of the file `source`. A line may hold the recorded `answer` too. Raises Unsupported,
    naming the line, for one of no answer or of another, one that is there twice, and where an answer is not judged.
    """
    if not Path(path).exists():
        raise Unsupported(
            f"{path}: no such file. The {len(answers)} answers to judge are in {source}: write a line "
            '{"item": ..., "stage": ..., "right": true or false} for each, and run this command again'
        )
    known, found = {(record.item, record.stage): record for record in answers}, dict[tuple[str, str], float]()
    for place, row in read_jsonl(path):
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
        such = f"such as item {missing[0][0]!r} by stage {missing[0][1]!r}"
        raise Unsupported(f"{path}: {len(missing)} of {len(known)} answers of {source} are not judged, {such}")
    return found
