"""A warm-up of an open batch with n-gram drafts: every size of their trees is captured, for every number of rows."""

from __future__ import annotations

import random
from typing import Any

import pytest
from helpers.captured import stand_in, what_no_graph_served
from helpers.devices import ON_CUDA
from helpers.open import GREEDY, alone, made, texts, told

import fastspec
from fastspec.generation.drafters import nasd
from fastspec.generation.drafters.ngram_rounds import RESTS, SEEN, TimedDrafts

PLACES = ["captured", pytest.param("cuda", marks=ON_CUDA)]


@pytest.mark.parametrize("place", PLACES)
def test_no_tree_of_n_grams_is_captured_after_a_warm_up(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever sizes and rounds without drafts follow one another, greedy and sampled, in rows that come and go."""
    if place == "captured":
        stand_in(monkeypatch)
        monkeypatch.setitem(nasd.COSTS, "cpu", nasd.COSTS["cuda"])  # so that rounds are chosen as on a GPU
    device = "cpu" if place == "captured" else "cuda"
    ran, sizes, numbers = what_no_graph_served(monkeypatch), set[int](), random.Random(0)
    plain, model = (each.to(device) for each in made("bigram"))
    with fastspec.continuous(model, "nasd", rows=3, max_length=200) as batch:
        batch.warmup(length=100)
        drafters = [rounds.engine.drafter for rounds in batch._widths.made.values()]
        assert len(drafters) == 3 and all(drafter.ruled for drafter in drafters)
        warm = {size for drafter in drafters for size in drafter.costs}
        ran.clear()

        def chosen(growths: Any, costs: dict[int, float], trust: float) -> int:
            size = numbers.choice([*costs])
            sizes.add(size)
            return size

        monkeypatch.setattr(nasd, "best_size", chosen)
        rests = TimedDrafts.rests
        monkeypatch.setattr(TimedDrafts, "rests", lambda *given: min(rests(*given), numbers.choice((0, RESTS, SEEN))))
        monkeypatch.setattr(TimedDrafts, "rests_on", lambda *given: numbers.random() < 0.5)
        for count, options in ((3, {}), (2, {}), (1, {}), (3, {"do_sample": True, "top_k": 4, "seed": 1})):
            ids = texts(*range(5, 5 + count))
            given: dict[str, Any] = {**GREEDY, **options}
            found = told([batch.submit(each, **given, max_new_tokens=60 + 9 * at) for at, each in enumerate(ids)])
            if not options:
                assert found == [alone(plain, each.to(device), 60 + 9 * at) for at, each in enumerate(ids)]
        assert not ran
    assert len(sizes) > 2 and sizes <= warm


def test_a_warm_up_that_fails_leaves_sizes_to_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)

    def tell(done: int, of: int) -> None:
        if done > 3:
            raise ArithmeticError("planted")

    with fastspec.continuous(made("bigram")[1], "nasd", rows=2, max_length=100) as batch:
        with pytest.raises(ArithmeticError, match="planted"):
            batch.warmup(40, tell)
        assert not batch._tries
