"""Prompt files: one reader of JSON lines, and the rows that a bench takes from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastspec.errors import Unsupported
from fastspec.programs.bench.methods import read_rows
from fastspec.programs.texts import read_jsonl
from fastspec.programs.training.cascade_answers import read_items
from fastspec.programs.training.data import read_prompts

TEXT = st.text(st.one_of(st.characters(exclude_categories=("Cs",)), st.sampled_from("\u2028\u2029\x85\n")), max_size=12)
BLANK = st.sampled_from(["", " ", "\t", "\r"])
ROWS = st.dictionaries(TEXT, st.one_of(TEXT, st.integers(), st.none(), st.lists(TEXT, max_size=2)), max_size=3)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """A file that every example writes anew."""
    return tmp_path_factory.mktemp("prompts") / "set.jsonl"


def written(path: Path, text: str) -> Path:
    path.write_bytes(text.encode("utf-8"))
    return path


@given(lines=st.lists(st.one_of(ROWS, BLANK), max_size=6), ascii_only=st.booleans())
def test_objects_come_back_with_their_line_numbers(path, lines, ascii_only) -> None:
    """With U+2028 and the like in the texts too, which are no ends of lines."""
    text = "\n".join(line if isinstance(line, str) else json.dumps(line, ensure_ascii=ascii_only) for line in lines)
    assert list(read_jsonl(written(path, text))) == [
        (n, line) for n, line in enumerate(lines, 1) if not isinstance(line, str)
    ]


@given(
    before=st.lists(st.one_of(ROWS.map(json.dumps), BLANK), max_size=3),
    wrong=st.sampled_from(["{", "[1]", "3", "null", '"a"', "{}{}"]),
)
def test_the_first_line_that_is_no_object_is_named(path, before, wrong) -> None:
    written(path, "\n".join([*before, wrong, "{"]))
    with pytest.raises(Unsupported, match=f"set.jsonl, line {len(before) + 1} is no JSON object"):
        list(read_jsonl(path))


def test_a_file_that_cannot_be_read_is_named(path) -> None:
    path.write_bytes(b'{"prompt": "\xff"}')
    for wrong, words in (
        (path, "set.jsonl.*utf-8"),
        (path.parent, "could not read"),
        (path.parent / "none", "none: no such file"),
    ):
        with pytest.raises(Unsupported, match=words):
            list(read_jsonl(wrong))


@given(
    text=TEXT,
    more=st.lists(TEXT, max_size=2),
    turns=st.booleans(),
    category=st.none() | TEXT,
    name=st.none() | st.integers(),
)
def test_the_first_turn_is_asked(path, text, more, turns, category, name) -> None:
    row = {"turns": [text, *more]} if turns else {"prompt": text}
    row |= {key: value for key, value in (("category", category), ("id", name)) if value is not None}
    wanted = {"category": "set" if category is None else category, "id": str(2 if name is None else name), "text": text}
    assert read_rows(written(path, "\n" + json.dumps(row))) == [wanted]


@pytest.mark.parametrize(
    "row", [{}, {"turns": []}, {"turns": "text"}, {"turns": 3}, {"turns": None}, {"prompt": 3}, {"turns": [None]}]
)
@pytest.mark.parametrize("read", [read_rows, read_prompts, read_items])
def test_a_row_that_asks_nothing_is_named(path, row, read) -> None:
    """Of a bench, a training and a cascade."""
    with pytest.raises(Unsupported, match="line 2: not a row"):
        read(written(path, "\n" + json.dumps(row)))
