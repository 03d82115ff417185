"""What the fast suite leaves to the slow one of a test's parameters holds no pair of values that the rest has not."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from helpers.pairwise import covering, left_out
from hypothesis import given
from hypothesis import strategies as st

CASES = st.integers(1, 5).flatmap(lambda columns: st.lists(st.tuples(*[st.integers(0, 3)] * columns), max_size=30))


@given(CASES, st.integers(1, 2))
def test_every_pair_of_values_stays(cases, together):
    """Or every value."""
    kept = covering(cases, together)
    assert kept == sorted(set(kept))
    if cases and len(cases[0]) <= together:
        assert kept == list(range(len(cases)))
    for columns in combinations(range(len(cases[0]) if cases else 0), together):
        assert {tuple(cases[place][at] for at in columns) for place in kept} == {
            tuple(case[at] for at in columns) for case in cases
        }


def test_a_product_of_many_axes_shrinks_to_little_more_than_its_two_longest():
    assert len(covering(list(product(range(4), range(4), range(2), range(2))))) <= 18


class Item:
    """A collected test, as far as the selection looks at it."""

    parent, originalname = "test_x.py", "test_x"

    def __init__(self, params, marks=()):
        self.callspec = type("CallSpec", (), {"params": params})
        self.marks = marks

    def iter_markers(self, name):
        return iter([pytest.mark.parametrize("a, b", []).mark])

    def get_closest_marker(self, name):
        return name if name in self.marks else None


def test_what_is_given_together_is_one_axis_and_a_fixture_another():
    """Three names, of which two come together: two axes, of which everything stays. A third fixture makes a third."""
    given = [(0, 5), (1, 5), (1, 6)]
    two = [Item({"a": a, "b": b, "pair": pair}) for (a, b), pair in product(given, "xy")]
    assert left_out(two) == []
    three = [
        Item({"a": a, "b": b, "pair": pair, "assistant": other}) for (a, b), pair, other in product(given, "xy", "uv")
    ]
    dropped = left_out(three)
    assert dropped and len(three) - len(dropped) >= 6
    assert left_out([Item(item.callspec.params, ["gpu"]) for item in three]) == []
    assert len(left_out([Item(item.callspec.params, ["each_value"]) for item in three])) == len(three) - 3
