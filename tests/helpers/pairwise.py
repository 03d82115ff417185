"""All-pairs testing: of a test with three and more axes of parameters, a selection that has every pair of their values;
of one marked `each_value`, whose axes do not meet in the code, one that has every value; of one marked `some`, the
cases that it names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any


def covering(cases: Sequence[Sequence[Hashable]], together: int = 2) -> list[int]:
    """Places of cases, ascending, among which is every combination of values in `together` columns that is among all;
    of no more columns than that all."""
    if not cases or len(cases[0]) <= together:
        return list(range(len(cases)))
    found = [set(combinations(enumerate(case), together)) for case in cases]
    left, chosen = set().union(*found), []
    while left:
        best = max(range(len(cases)), key=lambda place: len(found[place] & left))  # the first of the best
        chosen.append(best)
        left -= found[best]
    return sorted(chosen)


def left_out(items: Iterable[Any]) -> list[Any]:
    """The items of a collection that a selection of every test's parameters leaves to `make test-slow`."""
    tests: dict[Any, list[Any]] = defaultdict(list)
    dropped = []
    for item in items:
        if not hasattr(item, "callspec") or any(item.get_closest_marker(name) for name in ("slow", "gpu", "clients")):
            continue
        if (some := item.get_closest_marker("some")) and not any(named(item.callspec.id, case) for case in some.args):
            dropped.append(item)
        else:
            tests[item.parent, item.originalname].append(item)
    for found in tests.values():
        axes = [axis for axis in zip(*map(values, found), strict=True) if len(set(axis)) > 1]
        together = 1 if found[0].get_closest_marker("each_value") else 2
        kept = set(covering(list(zip(*axes, strict=True)), together))
        dropped += [item for place, item in enumerate(found) if axes and place not in kept]
    return dropped


def named(found: str, case: str) -> bool:
    """Whether an item's id is this case, has it among its parts, or an object of the class of this name."""
    return f"-{case}-" in f"-{found}-" or f"-{case}(" in f"-{found}"


def values(item: Any) -> list[tuple[str, ...]]:
    """What an item has of every axis: the parameters that one `parametrize` gives together, and those of each
    fixture."""
    together = [mark.args[0] if mark.args else mark.kwargs["argnames"] for mark in item.iter_markers("parametrize")]
    axes = [names.replace(" ", "").split(",") if isinstance(names, str) else list(names) for names in together]
    alone = [[name] for name in item.callspec.params if not any(name in names for names in axes)]
    return [tuple(repr(item.callspec.params[name]) for name in names) for names in axes + alone]
