"""A prompt is read whole, in parts that are no wider than asked for and are padded to no more than narrow ones would
be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastspec.generation.capture import NARROWEST, padded_width
from fastspec.generation.target import MOST, NARROW, WIDE, prompt_parts, widest_part


@given(length=st.integers(0, 9000), rows=st.integers(1, 3000), captures=st.booleans(), windows=st.booleans())
def test_parts_follow_each_other_to_the_end(length, rows, captures, windows):
    widest = widest_part(rows, captures=captures, windows=windows)
    parts = list(prompt_parts(length, widest))
    assert [begin for begin, _ in parts] == [sum(width for _, width in parts[:index]) for index in range(len(parts))]
    assert sum(width for _, width in parts) == length and all(0 < width <= widest for _, width in parts)
    narrow = min(NARROW, widest)
    padded = sum(padded_width(width) for _, width in parts)
    assert padded == sum(padded_width(min(narrow, length - begin)) for begin in range(0, length, narrow))
    assert len({padded_width(width) for _, width in parts if width >= narrow}) <= 3  # few graphs
    assert not captures or rows * widest <= MOST or widest == NARROWEST


@pytest.mark.parametrize(
    "rows, widest",
    [
        (1, WIDE),
        (2, WIDE // 2),
        (3, NARROW),
        (4, NARROW),
        (5, NARROW),
        (64, NARROW),
        (65, 256),
        (128, 256),
        (129, 128),
        (1024, 32),
        (2048, 32),
    ],
)
def test_many_rows_are_read_in_narrow_parts(rows, widest):
    assert widest_part(rows, captures=True) == widest
    assert widest_part(rows, captures=False) == NARROW
    assert widest_part(rows, captures=True, windows=True) == min(widest, NARROW)


@pytest.mark.parametrize(
    "length, parts",
    [
        (0, []),
        (1, [1]),
        (512, [512]),
        (513, [512, 1]),
        (1100, [1024, 76]),
        (1900, [1024, 512, 364]),
        (2048, [2048]),
        (5000, [2048, 2048, 512, 392]),
    ],
)
def test_parts_of_a_prompt_alone(length, parts):
    assert [width for _, width in prompt_parts(length, WIDE)] == parts
