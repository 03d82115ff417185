"""Processes that are kept for many cases: a case that does not end well is told of, and ends them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from helpers import rank_pool, ranks_ended
from helpers.rank_pool import Failed, RankPool


def run(pool: RankPool, case: rank_pool.Case, kind: str = "") -> list[list[object]]:
    pool.begin(case, Path(), kind)
    return pool.finish()


@pytest.mark.parametrize(
    "how, told",
    [
        pytest.param("raises", ["ArithmeticError: planted"], marks=pytest.mark.slow),
        ("ends", ["process 1 of 2: it has ended, with 3"]),
        ("hangs", ["process 0 of 2: it did not answer in time, and stands at", "in parted", "1 of 2: it ran the case"]),
    ],
)
def test_a_case_that_does_not_end_well_ends_its_processes_alone(
    how: str, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = RankPool(2, "cpu")
    try:
        first, again = run(pool, ranks_ended.summed), run(pool, ranks_ended.summed)
        assert [total.item() for total, _ in first] == [1, 1]
        assert [each for _, each in first] == [each for _, each in again]
        monkeypatch.setattr(rank_pool, "LAG", 2.0)
        monkeypatch.setitem(rank_pool.LIMIT, "cpu", 4.0)
        began = time.monotonic()
        with pytest.raises(Failed) as found:
            run(pool, ranks_ended.parted, how)
        assert all(each in str(found.value) for each in told), found.value
        assert time.monotonic() - began < 60 and not pool.processes
        monkeypatch.undo()
        others = {each for _, each in run(pool, ranks_ended.summed)}
        assert not others & {each for _, each in first}
    finally:
        pool.close()
