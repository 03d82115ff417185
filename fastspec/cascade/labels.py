"""Is an answer acceptable? By the item's key where it has one, else, where the caller asks for it, by agreement with the last stage's.

Items are rows (dictionaries) of Spec-Bench's manner: `id`, `category`, `prompt` or `turns`, and of `reference`, `answer`, `choices`,
`answer_letter`, `test`, `entry_point`, `test_list`, `source` those that the set has.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from fastspec.cascade.unit_tests import Limits, UnitTests, called, passes_all
from fastspec.errors import Unsupported

KINDS = ("number", "choice", "text", "code")
METRICS = ("f1", "rouge_l")
LETTERS = string.ascii_uppercase

NUMBER = re.compile(
    r"(?<![A-Za-z0-9_])(?P<sign>[-\u2212])?(?:\\?[$\u00a3\u20ac] ?)?"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<!\.)\.[0-9]+)(?P<exponent>[eE][+-]?[0-9]{1,3}(?![0-9]))?"
)
BOXED = re.compile(r"\\boxed\s*\{")
HASHES = re.compile(rf"^[ \t]*####[ \t]*(?P<value>{NUMBER.pattern})[ \t]*%?\.?[ \t]*$", re.MULTILINE)
STATED = re.compile(
    r"\b(?:answer|option|choice|letter)\s*(?:(?:is|would be|should be)\b\s*:?|[:=])\s*(?:(?:option|choice|letter)\b)?", re.IGNORECASE
)
LETTER = re.compile(
    r"[\s\"'(\[{$]*(?P<letter>[A-Za-z])(?![\w'\u2019-])(?P<marks>[)\]}\"'.:;,]*)(?P<dash>[ \t]+[\u2013\u2014-](?=\s))?"
    r"[ \t]*(?P<rest>[^\n]*)"
)
ANOTHER = re.compile(r"(?:(?:or|and)\s+|[/&]\s*)\(?([A-Z])(?![\w'\u2019-])")
LISTED = re.compile(r"\(?([A-Z])\)?\s*(?:,|\band\b|\bor\b|\.?\s*$)")
REASON = re.compile(r"(?:because|since|as|for|which|due)\b|[$.\s]*$")
NAMED = re.compile(r"(?:\b(?:[Oo]ption|[Cc]hoice|[Ll]etter)\s+\(?([A-Z])(?![\w'\u2019-]))|\(([A-Z])\)")
NEGATED = re.compile(r"\b(?:not|no|cannot|never|except|neither|incorrect|wrong|false)\b|n['\u2019]t\b", re.IGNORECASE)
ARTICLES = re.compile(r"\b(?:a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation + "\u2018\u2019\u201c\u201d\u2013\u2014\u2026")


@dataclass(frozen=True, slots=True)
class Key:
    """What an item's answer is judged by.

    `kind` "number": `answers` holds one decimal number. "choice": `answers` holds the letter of the right one of `choices`. "text":
    `answers` are the accepted references. "code": `tests` are the unit tests.
    """

    kind: str
    answers: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    tests: UnitTests | None = None


KEY_FIELDS = (
    "`answer`: a number, a text or a list of accepted texts; `reference` that ends with '#### 42'; `choices` with `answer_letter`, or with "
    "`answer` from 0 on; `test` with `entry_point`, or `test_list`: unit tests in Python"
)
"""The fields of a row that answers can be judged by, for people."""


def judged_by(key: Key | None, last: str, threshold: float) -> str:
    """What the answers to an item are judged by, for people and for what is written: its key's kind, or the agreement with the answer of
    the stage `last`, whose own answers are then right by definition."""
    if key is None:
        return f"agreement with {last} (F1 of at least {threshold:g})"
    return {"number": "a number", "choice": "a choice", "text": "a reference text", "code": "unit tests"}[key.kind]


def key_of(row: Mapping[str, Any], kind: str | None = None) -> Key | None:
    """The key of an item; None where the row has none.

    "code" where there is `test` with `entry_point` (HumanEval) or `test_list` (MBPP), "choice" where there are `choices`, "number" where
    `answer` is one or `reference` ends with "#### 42" (GSM8K), "text" for any other `answer` (a text, or a list of accepted texts). A
    `reference` alone is mostly one good answer of many, and no key; kind="text" makes it one. Of a row of several turns, the first
    turn's reference counts. Raises `Unsupported` for a row whose parts contradict each other, or that has no key of the given `kind`.
    """
    if kind not in (None, *KINDS):
        raise Unsupported(f"kind={kind!r}; accepted are {', '.join(map(repr, KINDS))}")
    key = _text(row) if kind == "text" else _key(row)
    if kind is not None and (key is None or key.kind != kind):
        raise Unsupported(f"item {row.get('id')!r} has no key of kind {kind!r}; its row has {', '.join(row)}")
    return key


def _key(row: Mapping[str, Any]) -> Key | None:
    if "test_list" in row or "test" in row:
        return Key("code", tests=_tests(row))
    if "choices" in row:
        choices = tuple(str(each) for each in row["choices"])
        letter = row.get("answer_letter")
        if letter is None and isinstance(row.get("answer"), int) and 0 <= row["answer"] < len(choices):
            letter = LETTERS[row["answer"]]
        if letter is None or letter not in LETTERS[: len(choices)] or len(letter) != 1:
            raise Unsupported(f"item {row.get('id')!r}: its {len(choices)} choices need an answer_letter, or an answer from 0 on")
        return Key("choice", (letter,), choices)
    answer = row.get("answer")
    if isinstance(answer, (str, int, float)) and not isinstance(answer, bool):
        found = NUMBER.fullmatch(str(answer).strip().rstrip("%").rstrip("."))
        if found:
            return Key("number", (str(_decimal(found)),))
    if answer is not None:
        return _text(row)
    worked = re.search(r"####([^\n]*)\s*\Z", _first(row.get("reference")))
    value = number(worked[0]) if worked else None
    return None if value is None else Key("number", (str(value),))


def _first(reference: Any) -> str:
    """The first turn's reference."""
    if isinstance(reference, (list, tuple)):
        reference = reference[0] if reference else ""
    return reference if isinstance(reference, str) else ""


def _text(row: Mapping[str, Any]) -> Key | None:
    if row.get("answer") is None:
        references: Any = [_first(row.get("reference"))]
    else:
        references = row["answer"] if isinstance(row["answer"], (list, tuple)) else [row["answer"]]
    texts = tuple(str(each) for each in references if str(each).strip())
    return Key("text", texts) if texts else None


def _tests(row: Mapping[str, Any]) -> UnitTests:
    if "test_list" in row:
        tests = "\n".join(row["test_list"])
        return UnitTests(tests, called(tests), setup=row.get("test_setup_code", ""))
    if "entry_point" not in row:
        raise Unsupported(f"item {row.get('id')!r} has a test and no entry_point: the name of the function that is tested")
    return UnitTests(f"{row['test']}\ncheck({row['entry_point']})\n", row["entry_point"], context=_question(row))


def prompt_of(row: Mapping[str, Any], kind: str | None = None) -> str:
    """The user's turn for an item, such that an answer can be judged by `key_of(row, kind)`. The wording is part of recorded data.

    number: the question, and "Think step by step and end with "The answer is N." where N is a number." choice: the question, the
    choices as "A. text" on lines of their own, and "Answer with the letter of the correct choice." text: the question, and "Answer in as
    few words as possible." code: the signature with its description (HumanEval) or the task with its tests (MBPP), to be answered
    in one Python code block. An item without a key: its (first) turn as it is.
    """
    key = key_of(row, kind)
    question = _question(row)
    if key is None:
        return question
    if key.kind == "number":
        return f'{question.strip()}\n\nThink step by step and end with "The answer is N." where N is a number.'
    if key.kind == "text":
        return f"{question.strip()}\n\nAnswer in as few words as possible."
    if key.kind == "choice":
        asked = re.sub(r"\AQuestion:\s*", "", str(row.get("question", question))).strip()
        lettered = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, key.choices, strict=False)]
        if not all(line in asked for line in lettered):
            asked = "\n".join([asked, *lettered])
        return re.sub(r"\s*Answer:\Z", "", asked) + "\n\nAnswer with the letter of the correct choice."
    if "test_list" in row:
        tests = "\n".join(row["test_list"])
        task = str(row.get("text") or question.replace(tests, "").replace("Your code should pass these tests:", "")).strip()
        return f"{task}\nYour code should pass these tests:\n\n{tests}\n\nAnswer with the function in one Python code block."
    code = question.strip("\n")
    return f"Complete this Python function. Answer with the whole function in one Python code block.\n\n```python\n{code}\n```"


def _question(row: Mapping[str, Any]) -> str:
    """The prompt, or the first of several turns."""
    turns = row.get("turns") or [row.get("prompt")]
    if not isinstance(turns[0], str) or not turns[0].strip():
        raise Unsupported(f"item {row.get('id')!r} has neither a prompt nor turns: nothing to ask")
    return str(turns[0])


def label(
    key: Key | None, answer: str, *, last: str | None = None, metric: str = "f1", threshold: float | None = None,
    allow_code_execution: bool = False, limits: Limits = Limits(),  # noqa: B008 - frozen
) -> float:  # fmt: skip
    """1.0 where `answer` is acceptable, else 0.0.

    Without a key, an answer is acceptable where its `agreement` with the `last` stage's answer reaches `threshold`. A key of kind "code"
    runs the model's code: `allow_code_execution=True` says that the caller accepts that, `limits` bounds it. Raises `Unsupported` where a
    part that is needed is missing.
    """
    lasts = None if last is None else [last]
    return label_all(
        [key], [answer], last=lasts, metric=metric, threshold=threshold, allow_code_execution=allow_code_execution, limits=limits, workers=1
    )[0]


def label_all(
    keys: Sequence[Key | None], answers: Sequence[str], *, last: Sequence[str] | None = None, metric: str = "f1",
    threshold: float | None = None, allow_code_execution: bool = False, limits: Limits = Limits(), workers: int = 2,  # noqa: B008 - frozen
) -> list[float]:  # fmt: skip
    """`label` of each answer; `last` are the last stage's answers to the same items. Unit tests run in `workers` processes at a time."""
    if len(keys) != len(answers) or (last is not None and len(last) != len(keys)):
        raise Unsupported(f"{len(keys)} keys, {len(answers)} answers and {None if last is None else len(last)} last answers do not match")
    found: list[float | None] = [None] * len(keys)
    trials: list[tuple[int, UnitTests]] = []
    for place, (key, answer) in enumerate(zip(keys, answers, strict=True)):
        if key is not None and key.tests is not None:
            trials.append((place, key.tests))
        elif key is not None:
            found[place] = float(accepts(key, answer))
        elif last is None or threshold is None:
            raise Unsupported("an item without a key is labelled by agreement: pass last=, the last stage's answer, and threshold=")
        else:
            found[place] = float(agreement(answer, last[place], metric) >= threshold)
    if trials:
        tried = [(tests, answers[place]) for place, tests in trials]
        passed = passes_all(tried, allow_code_execution=allow_code_execution, limits=limits, workers=workers)
        for (place, _), fine in zip(trials, passed, strict=True):
            found[place] = float(fine)
    return [each for each in found if each is not None]


def accepts(key: Key, answer: str) -> bool:
    """Whether `answer` is right by a key of kind "number", "choice" or "text", none of which runs anything."""
    if key.kind == "number":
        value = number(answer)
        return value is not None and value == Decimal(key.answers[0])
    if key.kind == "choice":
        return chosen(answer, key.choices) == key.answers[0]
    if key.kind == "text":
        return normalise(answer) in {normalise(each) for each in key.answers}
    raise Unsupported(f"a key of kind {key.kind!r} is judged by `label`, which asks for consent to run code")


def number(answer: str) -> Decimal | None:
    """The number that an answer gives: of a line "#### 42" or a \\boxed{42} the last one, else the last number of the text.

    Commas between thousands, currency signs and per cent signs are dropped; "5." is 5. None where there is no number.
    """
    text = answer.replace("{,}", ",").replace("\\,", ",").replace("\\!", "")
    marked = [(mark.start(), NUMBER.match(mark["value"])) for mark in HASHES.finditer(text)]
    marked += [(mark.start(), _last(NUMBER, _braced(text[mark.end() :]))) for mark in BOXED.finditer(text)]
    found = max(((place, each) for place, each in marked if each), default=(0, _last(NUMBER, text)), key=lambda x: x[0])[1]
    return _decimal(found) if found else None


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = None
    for each in pattern.finditer(text):
        found = each
    return found


def _braced(text: str) -> str:
    """`text` up to the brace that closes the one before it."""
    depth = 1
    for place, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return text[:place]
    return text


def _decimal(found: re.Match[str]) -> Decimal:
    return Decimal(("-" if found["sign"] else "") + found["digits"].replace(",", "") + (found["exponent"] or ""))


def chosen(answer: str, choices: Sequence[str]) -> str | None:
    """The letter that an answer to a multiple-choice question chooses; None where it chooses none or is ambiguous.

    In this order: what "the answer is ..." and its like say; the letter at the start of the first or the last line ("B", "(B)", "B. text");
    the only letter named as "option B" or "(B)"; the text of exactly one choice. A letter beside the text of another choice, and several
    letters, are ambiguous. The article "a" is no letter.
    """
    text = re.sub(r"\\(?:boxed|text|mathrm|mathbf)\s*(?=\{)|\*\*|__|`", "", answer).strip()
    stated = [text[match.end() :].lstrip("*_ ") for match in STATED.finditer(text)]
    said = set().union(*(_letters(each, choices) or _written(each.strip().split("\n")[0], choices) for each in stated))
    if said:
        return said.pop() if len(said) == 1 else None
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    starts = [_letters(line, choices) for line in lines]
    if lines and (starts[0] or starts[-1]):
        said = set().union(*starts)
        return said.pop() if len(said) == 1 else None
    said = {found for match in NAMED.finditer(text) if (found := match[1] or match[2]) in LETTERS[: len(choices)]}
    if said:
        return said.pop() if len(said) == 1 and not NEGATED.search(text) else None
    said = _written(text, choices)
    return said.pop() if len(said) == 1 else None


def _letters(text: str, choices: Sequence[str]) -> set[str]:
    """The choices that a text begins with: none, one, or several where it contradicts itself or lists letters."""
    whole = _plain(text.split("\n")[0])
    same = {letter for letter, choice in zip(LETTERS, choices, strict=False) if _plain(choice) == whole}
    if same and not (len(whole) == 1 and whole.isalpha()):
        return same
    found = LETTER.match(text)
    if not found or found["letter"].upper() not in LETTERS[: len(choices)]:
        return set()
    letter, marks, rest = found["letter"].upper(), found["marks"], found["rest"]
    # Without a mark, "B because" and "B or C" begin with a letter, and "A planet" does not.
    goes_on = found["letter"].isupper() and (REASON.match(rest) or ANOTHER.match(rest))
    if rest and not (marks or found["dash"] or goes_on):
        return set()
    said = {letter}
    other = ANOTHER.match(rest) or (LISTED.match(rest) if "," in marks else None)
    said |= {other[1]} & set(LETTERS[: len(choices)]) if other else set()
    same = {other for other, choice in zip(LETTERS, choices, strict=False) if rest and _plain(choice) == _plain(rest)}
    return said if letter in same else said | same


def _written(text: str, choices: Sequence[str]) -> set[str]:
    """The choices whose text stands in `text` as whole words, the longest first; none where the rest negates."""
    plain, found = _plain(text), set[str]()
    pairs = [(_plain(choice), letter) for letter, choice in zip(LETTERS, choices, strict=False)]
    for choice, letter in sorted(pairs, key=lambda pair: -len(pair[0])):
        pattern = rf"(?<![\w.-]){re.escape(choice)}(?!\w|[.,]\d)"
        # The same text twice among the choices is found for both, and so ambiguous.
        if choice and (re.search(pattern, plain) or any(_plain(choices[LETTERS.index(each)]) == choice for each in found)):
            found.add(letter)
            plain = re.sub(pattern, " | ", plain)
    return set() if NEGATED.search(plain) else found


def _plain(text: str) -> str:
    """Case, white space and what surrounds a text dropped; signs within it kept, since choices may be formulas."""
    return " ".join(text.casefold().split()).strip(" \"'*`.;:,")


def normalise(text: str) -> str:
    """Lower case, without punctuation, articles and repeated white space (SQuAD's evaluation script, arXiv 1606.05250)."""
    lowered = text.casefold()
    return " ".join(ARTICLES.sub(" ", lowered.translate(PUNCTUATION)).split()) or lowered.strip()


def agreement(answer: str, last: str, metric: str = "f1") -> float:
    """How much two answers agree, in [0, 1]; the order of the two does not matter.

    "f1": F1 of the words after `normalise`, as bags (SQuAD's). "rouge_l": F1 of the longest common subsequence of the words (ROUGE-L,
    Lin 2004, beta = 1). 1.0 where neither has words.
    """
    if metric not in METRICS:
        raise Unsupported(f"metric={metric!r}; accepted are {', '.join(map(repr, METRICS))}")
    one, two = (normalise(text).split() if metric == "f1" else re.findall(r"\w+", text.casefold()) for text in (answer, last))
    if not one and not two:
        return 1.0
    common = (Counter(one) & Counter(two)).total() if metric == "f1" else _subsequence(one, two)
    return 2 * common / (len(one) + len(two))


def _subsequence(one: Sequence[str], two: Sequence[str]) -> int:
    """The length of the longest common subsequence."""
    row = [0] * (len(two) + 1)
    for word in one:
        before = 0
        for place, other in enumerate(two, 1):
            before, row[place] = row[place], before + 1 if word == other else max(row[place], row[place - 1])
    return row[-1]
