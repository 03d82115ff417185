"""Launches that are the fastest by themselves, judged in calls: by a clock that knows how much each costs them."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.models import tiny_head, tiny_model

import fastspec
from fastspec.patches.session import session_of
from fastspec.patches.tuning.tune import NEW, call_times, harmless, in_rounds

ROW, OTHER_ROW, ROWS, GATE = ("linear", (1, 8)), ("linear", (1, 9)), ("linear", (16, 8)), ("gate_up", (1, 8))
FEW, TREE = ("few_attention", (torch.float16, 16)), ("tree_attention", (torch.float16, 16))
HALF = torch.float16


class Calls:
    """Two kinds of calls, of which launches in use take or save a share of the first one's time."""

    def __init__(self, **costs: float) -> None:
        self.costs, self.used, self.tried = costs, {}, []  # type: dict[str, float], Mapping[Any, Any], list[set[str]]

    def use(self, launches: Mapping[Any, Any]) -> None:
        self.used = launches
        self.tried.append(set(launches.values()))

    def times(self) -> list[float]:
        return [2.0 * (1 + sum(self.costs.get(name, 0.0) for name in self.used.values())), 5.0]


def judged(calls: Calls, found: dict[Any, str], late: Any = lambda: False) -> set[str]:
    return {found[key] for key in harmless(found, calls.use, calls.times, lambda value: value, late)}


def test_what_calls_are_slower_with_is_dropped():
    """A kind at once where it does no harm, else one by one; what makes no difference is kept, such as a length that
    these calls lack."""
    found = {ROW: "row", OTHER_ROW: "other", ROWS: "rows", GATE: "gate", FEW: "few", TREE: "tree"}
    calls = Calls(row=0.05, other=-0.02, rows=-0.03, few=0.04)
    assert judged(calls, found) == {"other", "rows", "gate", "tree"}
    assert (
        calls.tried[0] == set()
        and {"few"} in calls.tried
        and not [used for used in calls.tried if used >= {"row", "few"}]
    )
    assert judged(Calls(), found) == set(found.values())


def test_noise_is_no_harm_and_a_little_often_is():
    """What one kind gains another may not lose again."""
    found = {GATE: "gate", ROW: "row", ROWS: "rows"}
    assert judged(Calls(gate=0.004, row=0.001, rows=-0.1), found) == {"gate", "row", "rows"}
    assert judged(Calls(gate=-0.2, row=0.02, rows=0.002), found) == {"gate", "rows"}


def test_what_is_late_is_not_tried_one_by_one():
    found = {ROW: "row", OTHER_ROW: "other", ROWS: "rows"}
    assert judged(Calls(row=0.05), found, lambda: True) == {"rows"} and judged(Calls(row=0.05), found) == {
        "other",
        "rows",
    }


def test_the_first_process_s_clock_counts():
    calls = Calls(row=0.05)
    assert harmless(
        {ROW: "row"}, calls.use, calls.times, lambda value: 1.0 if isinstance(value, float) else value, lambda: False
    ) == {ROW}


@pytest.mark.parametrize(
    ("op", "about", "asked"),
    [
        ("linear", (5, 8, 8, HALF), True),
        ("few_attention", (1, 1, 4, 2, 16, 40, True, HALF), True),
        ("few_attention", (1, 3, 4, 2, 16, 40, False, HALF), True),
        ("tree_attention", (1, 60, 4, 2, 16, 40, False, HALF), True),
        ("tree_attention", (1, 60, 4, 2, 16, 40, True, HALF), False),
    ],
)
def test_prompts_alone_ask_for_parts_of_a_text(op, about, asked):
    assert in_rounds(op, about) is asked


def test_a_round_of_every_assistant_is_timed(monkeypatch):
    """Of as long texts as there is room for, and without a word from the caller's random numbers."""
    model = tiny_model(num_hidden_layers=1, max_position_embeddings=64)
    asked: list[Any] = []
    with fastspec.patched(model, eagle3=tiny_head(model)):
        session: Any = session_of(model)

        def timed(**given: Any) -> None:
            asked.append((given["assistant"], tuple(given["input_ids"].shape), given["input_ids"].sum().item()))
            session.calls.append(SimpleNamespace(seconds=3.0 + len(asked), phases={"prefill": 1.0}, rounds=2))

        monkeypatch.setitem(model.__dict__, "generate", timed)
        state = torch.get_rng_state()
        found = call_times(model, ["autoregressive", "eagle3"], [1, 2], 100)
        assert torch.equal(torch.get_rng_state(), state)
        monkeypatch.undo()
    assert [name for name, *_ in asked] == ["autoregressive"] * 10 + ["eagle3"] * 10
    assert {shape for _, shape, _ in asked} == {(1, 64 - NEW), (2, 64 - NEW)} and asked[0][2] == asked[10][2]
    assert found == [(2 + each) / 2 for each in (4, 9, 14, 19)]
