"""How far a round drafts, and whether it does: the bounds of what earlier rounds say."""

from __future__ import annotations

import torch

from fastspec.generation.drafters.policy import (
    CREDIT,
    LONGEST_PAUSE,
    MOST_CREDIT,
    PROBES,
    Calibration,
    Credit,
    Length,
    pause_after,
)

CPU = torch.device("cpu")


def test_a_confidence_is_never_taken_for_more_than_it_says() -> None:
    trust, half = Calibration(CPU), torch.tensor(0.5)
    assert trust.weigh(half) == (0.5, 0.5)
    trust.hoped = 1.0
    trust.judge(torch.tensor(9.0))
    assert trust.weigh(half) == (0.5, 0.5)
    trust.hoped = 18.0
    trust.judge(torch.tensor(0.0))
    assert trust.hoped == 0.0 and trust.weigh(half) == (0.5, 0.25)  # 10 of 20


def test_gains_buy_no_more_than_the_most_credit() -> None:
    for gain, rounds in ((100.0, MOST_CREDIT), (0.0, CREDIT)):
        credit, tried = Credit(5, CPU), 0
        credit.judge(gain, 0.0)
        while credit.rest() == 0:
            credit.judge(0.0, 1.0)
            tried += 1
        assert tried == rounds
        assert credit.rest() == 0  # one round tries again, and has nothing to lose
        credit.judge(0.0, 1.0)
        assert credit.rest() == 5
    assert float(Credit(5, CPU, 7.0).left) == 7.0


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
