"""All-pairs testing: of a test with three and more axes of parameters, a selection that has every pair of their
values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any


def covering(cases: Sequence[Sequence[Hashable]]) -> list[int]:
    """Places of cases, ascending, among which is every pair of values in two columns that is among all; of fewer than
    three columns all."""
    if not cases or len(cases[0]) < 3:
        return list(range(len(cases)))
    pairs = [set(combinations(enumerate(case), 2)) for case in cases]
    left, chosen = set().union(*pairs), []
    while left:
        best = max(range(len(cases)), key=lambda place: len(pairs[place] & left))  # the first of the best
        chosen.append(best)
        left -= pairs[best]
    return sorted(chosen)


def left_out(items: Iterable[Any]) -> list[Any]:
    """The items of a collection that a selection of every test's parameters leaves to `make test-slow`."""
    tests: dict[Any, list[Any]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and not any(item.get_closest_marker(name) for name in ("slow", "gpu", "clients")):
            tests[item.parent, item.originalname].append(item)
    dropped = []
    for found in tests.values():
        axes = [axis for axis in zip(*map(values, found), strict=True) if len(set(axis)) > 1]
        kept = set(covering(list(zip(*axes, strict=True))))
        dropped += [item for place, item in enumerate(found) if axes and place not in kept]
    return dropped


def values(item: Any) -> list[tuple[str, ...]]:
    """What an item has of every axis: the parameters that one `parametrize` gives together, and those of each
    fixture."""
    together = [mark.args[0] if mark.args else mark.kwargs["argnames"] for mark in item.iter_markers("parametrize")]
    axes = [names.replace(" ", "").split(",") if isinstance(names, str) else list(names) for names in together]
    alone = [[name] for name in item.callspec.params if not any(name in names for names in axes)]
    return [tuple(repr(item.callspec.params[name]) for name in names) for names in axes + alone]
