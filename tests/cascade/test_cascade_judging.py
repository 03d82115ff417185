"""Answers matched with an item's own `answer`, or judged by a file; what was written says how it was judged."""

from __future__ import annotations

import json
import string
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from helpers.training import save_with_tokenizer, small_target
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fastspec.cascade import records
from fastspec.cascade.predictor import Predictor
from fastspec.cascade.records import NAMES
from fastspec.errors import Unsupported
from fastspec.programs.cli.app import app
from fastspec.programs.training.cascade_answers import (
    Given,
    check_items,
    judge,
    letter,
    normalise,
    number,
    read_items,
    read_right,
)

CHOICES = ("A comet.", "The Sun", "The Moon", "Mars")
FORMS = (
    "The answer is {}.",
    "{}",
    "We get 3 apples and 4,5 pears, so **{}**",
    "7 - 4 = 3\n#### {}",
    "x = $\\boxed{{{}}}$ of 12 cases",
    "#### {}\n\nSo there are 7 in 1 box.",
    "It costs {} dollars.",
    "{}%",
    "(12:30) -> {}!",
    "10.5 and then {}\n",
    "so...{}",
)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@given(
    value=st.decimals(min_value=-(10**9), max_value=10**9, allow_nan=False, places=2),
    commas=st.booleans(),
    sign=st.sampled_from(["", "$", "\\$", "€"]),
    form=st.sampled_from(FORMS),
)
@settings(deadline=None)
def test_a_number_is_found_in_every_form(value: Decimal, commas: bool, sign: str, form: str) -> None:
    digits = f"{abs(value):,}" if commas else f"{abs(value)}"
    written = form.format(("-" if value.is_signed() else "") + sign + digits)
    assert number(written) == value
    assert Given.of({"answer": float(value)}).accepts(written) and not Given.of({"answer": float(value) + 1}).accepts(
        written
    )


@given(st.text(alphabet="0123456789.,-+eE$%# \n\\boxed{}ab", max_size=30))
@settings(deadline=None)
def test_any_text_is_read_for_a_number(text: str) -> None:
    found = number(text)
    assert found is None or found.is_finite()


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("The answer is B.", "B"),
        ("B", "B"),
        ("(B)", "B"),
        ("b)", "B"),
        ("B. The Sun", "B"),
        ("the sun!", "B"),
        ("Answer: **C**", "C"),
        ("A. A comet.\nB. The Sun\n\nThe correct answer is: B. The Sun", "B"),
        ("B because it shines", "B"),
        ("Let me think.\n\nThe correct answer is:\n\nB. The Sun", "B"),
        ("so $\\boxed{D}$", "D"),
        ("option D", "D"),
        ("A planet is no star", None),
        ("A. The Moon", None),
        ("The answer is C. Mars", None),
        ("The answer is C. The Moon, since it is no star", "C"),
        ("A or B", None),
        ("A. A comet.\nB. The Sun", None),
        ("The answer is A. No, the answer is B.", None),
        ("E", None),
        ("Answer with the letter of the choice", None),
        ("", None),
    ],
)
def test_a_letter_is_read_where_there_is_one(text: str, chosen: str | None) -> None:
    assert letter(text, CHOICES) == chosen
    for right in "ABCD":
        assert Given.of({"choices": CHOICES, "answer": right}).accepts(text) == (right == chosen)


@given(st.integers(2, 8), st.data())
@settings(deadline=None)
def test_the_place_of_a_choice_is_its_letter(count: int, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, count - 1))
    choices = [f"thing {each}" for each in range(count)]
    by_place, by_letter = (Given.of({"choices": choices, "answer": each}) for each in (at, string.ascii_uppercase[at]))
    assert (
        by_place
        == by_letter
        == Given.of({"choices": choices, "answer": -1, "answer_letter": string.ascii_uppercase[at]})
    )
    assert (
        by_place is not None and by_place.accepts(choices[at]) and by_place.accepts(f"({string.ascii_uppercase[at]})")
    )


def test_texts_are_compared_without_case_punctuation_and_articles() -> None:
    given_ = Given.of({"answer": ["The Eiffel Tower", "Tour Eiffel"]})
    assert given_ is not None and given_.kind == "text"
    assert given_.accepts("an eiffel  tower.") and given_.accepts("Tour Eiffel!") and not given_.accepts("Eiffel")
    assert (
        normalise("The, a!") != ""
        and Given.of({"answer": "!"}).accepts("!")
        and not Given.of({"answer": "!"}).accepts("?")
    )


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"answer": 7}, "number"),
        ({"answer": " $1,234.50 "}, "number"),
        ({"answer": "50%"}, "number"),
        ({"answer": ["7"]}, "number"),
        ({"answer": ["7", "8"]}, "text"),
        ({"answer": "7 apples"}, "text"),
        ({"answer": True}, "text"),
        ({"answer": ""}, None),
        ({"answer": None}, None),
        ({"reference": "So it is 42.\n#### 42"}, None),
        ({}, None),
    ],
)
def test_the_kind_of_an_answer(row: dict[str, Any], kind: str | None) -> None:
    found = Given.of(row)
    assert (found and found.kind) == kind


@pytest.mark.parametrize("answer", ["E", "b", "", 4, -1, True, None, ["A"]])
def test_a_choice_that_is_none_is_refused(answer: Any) -> None:
    with pytest.raises(Unsupported, match="item 'x': `answer` must be a letter of the 4 `choices`"):
        Given.of({"id": "x", "choices": CHOICES, "answer": answer})


def test_items_that_nothing_can_judge_are_refused(tmp_path: Path) -> None:
    rows = [{"id": f"n-{at}", "prompt": "?", "answer": "7"} for at in range(2)]
    rows += [{"id": f"r-{at}", "turns": ["Write.", "More."], "reference": ["A poem."]} for at in range(3)]
    items = read_items(write(tmp_path / "bench.jsonl", rows))
    assert [item.prompt for item in items] == ["?"] * 2 + ["Write."] * 3
    with pytest.raises(Unsupported, match=r"3 of 5 items, such as 'r-0' of bench, have no `answer`.*--task.*--right"):
        check_items(items, right=False)
    check_items(items, right=True)
    check_items(read_items(tmp_path / "bench.jsonl", 2), right=False)


def record(item: str, index: int, answer: str, **more: Any) -> records.Record:
    stage, features = ("small", "large")[index], (0.0,) * len(NAMES)
    return records.Record(
        item, "bench", "train", stage, index, 3, answer, 4, 0, True, 1.0, 1.0, None, features, 0, **more
    )


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    """Two items by two stages; "a" by "small" is 7, the others 8."""
    with records.Writer(tmp_path / "answers.jsonl") as writer:
        for item in "ab":
            for index in range(2):
                writer.add(record(item, index, "7" if (item, index) == ("a", 0) else "8"))
    return tmp_path / "answers.jsonl"


def test_labels_are_made_anew_by_what_is_given_now(answers: Path, tmp_path: Path) -> None:
    items = read_items(write(tmp_path / "bench.jsonl", [{"id": item, "prompt": "?", "answer": "7"} for item in "ab"]))
    assert judge(answers, items) == {"bench": "the number in `answer`"}
    assert [each.label for each in records.read(answers)] == [1.0, 0.0, 0.0, 0.0]
    lines = [{"item": i, "stage": s, "right": s == "large"} for i in "ab" for s in ("small", "large")]
    lines[0] |= {"right": 0.25, "answer": "7"}
    assert judge(answers, items, right=write(tmp_path / "right.jsonl", lines)) == {"bench": "`right` in right.jsonl"}
    found = records.read(answers)
    assert [each.label for each in found] == [0.25, 1.0, 0.0, 1.0] and {each.judged for each in found} == {
        "`right` in right.jsonl"
    }
    with pytest.raises(Unsupported, match="answers to 1 items that were not asked now, such as 'b'"):
        judge(answers, items[:1])


GOOD = [{"item": i, "stage": s, "right": True} for i in "ab" for s in ("small", "large")]


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        (GOOD[:3], "1 of 4 answers of .*answers.jsonl are not judged, such as item 'b' by stage 'large'"),
        ([*GOOD, {"item": "c", "stage": "small", "right": True}], "line 5: item 'c' by stage 'small' is no answer of"),
        ([{**GOOD[0], "stage": "medium"}], "line 1: item 'a' by stage 'medium' is no answer of"),
        ([{"right": True}], "line 1: item None by stage None is no answer of"),
        ([{**GOOD[0], "item": ["a"]}], "line 1: .* is no answer of"),
        ([{**GOOD[0], "answer": "8"}], "line 1.*another answer was judged"),
        ([{**GOOD[0], "right": 2}], r"right=2 must be true, false or a number in \[0, 1\]"),
        ([{**GOOD[0], "right": "yes"}], "right='yes'"),
        ([{"item": "a", "stage": "small"}], "right=None"),
        ([*GOOD, GOOD[1]], "line 5: item 'a' by stage 'large' is judged twice"),
    ],
)
def test_judgements_that_do_not_belong_to_the_answers_are_refused(
    answers: Path, tmp_path: Path, rows: list[dict[str, Any]], match: str
) -> None:
    with pytest.raises(Unsupported, match=match):
        read_right(write(tmp_path / "right.jsonl", rows), records.read(answers), answers)


def test_a_judge_that_has_not_written_yet_is_told_what_to_write(answers: Path, tmp_path: Path) -> None:
    with pytest.raises(
        Unsupported, match=r'right.jsonl: no such file. The 4 answers .*answers.jsonl.*"right": true or false'
    ):
        read_right(tmp_path / "right.jsonl", records.read(answers), answers)


def test_train_and_evaluate_say_by_set_how_answers_were_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastspec.programs.cli.cascade.RATED", 2)
    for name in ("small", "large"):
        save_with_tokenizer(small_target(peak=0.3), tmp_path / name)
    words, prompts = [f"w{at}" for at in range(4, 20)], [f"w{5 + at} w6" for at in range(36)]
    first = write(
        tmp_path / "first.jsonl",
        [{"id": f"n-{at}", "prompt": each, "answer": words} for at, each in enumerate(prompts)],
    )
    second = write(
        tmp_path / "second.jsonl", [{"id": f"r-{at}", "turns": [each], "answer": 3} for at, each in enumerate(prompts)]
    )
    arguments = [
        *("cascade", "train", "--stage", f"small={tmp_path}/small", "--model", f"large={tmp_path}/large"),
        *("--prompts", str(first), "--prompts", str(second), "--out", f"{tmp_path}/p.safetensors"),
        *("--answers", f"{tmp_path}/answers.jsonl", "--max-new-tokens", "6", "--batch", "36"),
        *("--report", f"{tmp_path}/report.jsonl"),
    ]
    emitted = CliRunner().invoke(app, arguments)
    assert emitted.exit_code == 0, emitted.output
    lines = ["first: judged by the text in `answer`", "second: judged by the number in `answer`"]
    assert all(line in emitted.output for line in lines)
    told = "first: the text in `answer`; second: the number in `answer`"
    assert Predictor.load(tmp_path / "p.safetensors").place["judged"] == told
    files = ["--predictor", f"{tmp_path}/p.safetensors", "--answers", f"{tmp_path}/answers.jsonl"]
    found = CliRunner().invoke(app, ["cascade", "evaluate", *files, "--out", f"{tmp_path}/rows.jsonl"])
    assert found.exit_code == 0 and all(line in found.output for line in lines), found.output
    for name in ("report", "rows"):
        assert {json.loads(line)["judged"] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()} == {told}
