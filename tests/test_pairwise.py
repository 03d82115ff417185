"""What the fast suite leaves to the slow one of a test's parameters holds no pair of values that the rest has not."""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations, product

import pytest
from helpers.pairwise import covering, left_out, named
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
        self.callspec = type("CallSpec", (), {"params": params, "id": "-".join(map(str, params.values()))})
        self.marks = marks

    def iter_markers(self, name):
        return iter([pytest.mark.parametrize("a, b", []).mark])

    def get_closest_marker(self, name):
        return next((mark for mark in self.marks if name in (mark, getattr(mark, "name", None))), None)


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
    some = [Item(item.callspec.params, [pytest.mark.some("1-5", "y").mark]) for item in three]
    assert all(
        named(item.callspec.id, "1-5") or named(item.callspec.id, "y") for item in set(some) - set(left_out(some))
    )


def test_a_case_is_named_by_its_id_a_part_of_it_or_the_class_of_one():
    found = "random-Eagle3(depth=4, top_k=3)-False"
    assert all(named(found, case) for case in (found, "random", "False", "Eagle3", "Eagle3(depth=4, top_k=3)-False"))
    assert not any(named(found, case) for case in ("rand", "Eagle", "True", "depth", "Eagle3(depth=4"))


def test_every_case_that_a_test_names_is_there(request):
    """Where the whole suite is collected."""
    config = request.config
    if config.args != config.getini("testpaths") or config.option.keyword:
        pytest.skip("some of the tests")
    ids, names = defaultdict(list), {}
    for item in request.session.items:
        if some := item.get_closest_marker("some"):
            ids[item.parent, item.originalname].append(item.callspec.id)
            names[item.parent, item.originalname] = some.args
    missing = [
        (test[1], case)
        for test, cases in names.items()
        for case in cases
        if not any(named(found, case) for found in ids[test])
    ]
    assert ids and not missing
