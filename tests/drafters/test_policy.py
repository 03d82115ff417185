"""How far a round drafts, and whether it does: the bounds of what earlier rounds say."""

from __future__ import annotations

import torch

from fastspec.generation.drafters.policy import (
    BUDGET,
    LARGEST_BUDGET,
    LONGEST_PAUSE,
    PROBES,
    AdaptiveLength,
    DraftBudget,
    Length,
    pause_after,
)

CPU = torch.device("cpu")


def test_a_confidence_is_never_taken_for_more_than_it_says() -> None:
    adaptive, half, running = AdaptiveLength(Length(9, 0.1), CPU), torch.tensor([[0.5, 0.2]]), torch.tensor([True])

    def weighed() -> tuple[float, float]:
        adaptive.begin(1)
        adaptive.allows(half, running)
        return adaptive.confidence, adaptive.chance

    assert weighed() == (0.5, 0.5)
    adaptive.hoped = 1.0
    adaptive.judge(torch.tensor([9]), running)
    assert weighed() == (0.5, 0.5)
    adaptive.hoped = 18.0
    adaptive.judge(torch.tensor([0]), running)
    assert adaptive.hoped == 0.0 and weighed() == (0.5, 0.25)  # 10 of 20


def test_gains_buy_no_more_than_the_largest_budget() -> None:
    for gain, rounds in ((100.0, LARGEST_BUDGET), (0.0, BUDGET)):
        budget, tried = DraftBudget(5, CPU, BUDGET), 0
        budget.judge(gain, 0.0)
        while budget.pause() == 0:
            budget.judge(0.0, 1.0)
            tried += 1
        assert tried == rounds
        assert budget.pause() == 0  # one round tries again, and has nothing to lose
        budget.judge(0.0, 1.0)
        assert budget.pause() == 5
    assert float(DraftBudget(5, CPU, 7.0).left) == 7.0


def test_pauses_cost_no_more_than_probes_may() -> None:
    assert (
        pause_after(0.0) == 0
        and pause_after(PROBES) == 1
        and pause_after(PROBES * 1.5) == 2
        and pause_after(99.0) == LONGEST_PAUSE
    )
    length = Length(3, 0.1, 0.2)
    assert length.price(0) == 0.0 and abs(length.price(2) - 0.4) < 1e-9 and Length(3, check=9.0).pause == 0
    assert length.goes_on(0.5, 1.0, 2) and not length.goes_on(0.5, 1.0, 3) and not length.goes_on(0.1, 1.0, 0)
