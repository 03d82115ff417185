"""The losses of drafting heads, against the same written token by token in plain Python."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.training import settings

from fastspec.programs.training.ttt import LOSSES, row_losses, summed_rows

SIZES = (5, 7)  # rows, draft vocabulary


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    raised = [math.exp(x - top) for x in logits]
    return [x / sum(raised) for x in raised]


def by_hand(loss: str, logits: list[float], probs: list[float], inside: float) -> float:
    """The loss of one row, in Python's own floats."""
    q = softmax(logits)
    p = [x * inside for x in probs]
    alpha = sum(min(a, b) for a, b in zip(p, q, strict=True))
    soft = -sum(a * math.log(b) for a, b in zip(probs, q, strict=True))
    share = math.exp(-3 * alpha)
    return {"kl": soft, "tv": 1 - alpha, "nla": -math.log(alpha), "hybrid": share * soft + (1 - share) * (1 - alpha)}[
        loss
    ]


def drawn(seed: int = 0) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(seed)
    logits, probs = 3 * torch.randn(*SIZES), (2 * torch.randn(*SIZES)).softmax(-1)
    return logits, probs, 0.5 + 0.5 * torch.rand(SIZES[0])


@pytest.mark.parametrize("name", LOSSES)
def test_rows_are_what_the_formulas_say(name: str) -> None:
    logits, probs, inside = drawn()
    wanted = [by_hand(name, *row) for row in zip(*(x.tolist() for x in (logits, probs, inside)), strict=True)]
    # fp32 sums of seven terms of at most 10: a few steps of 2^-23 each.
    torch.testing.assert_close(row_losses(name, logits, probs, inside), torch.tensor(wanted), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "hybrid"])
def test_gradients_are_the_slopes_of_the_formulas(name: str) -> None:
    """By central differences of the plain formulas; the hybrid's share is held still, so that its slope is none of a
    formula."""
    logits, probs, inside = drawn(1)
    logits = logits.double().requires_grad_()
    row_losses(name, logits, probs, inside).sum().backward()
    row, step = 2, 1e-4

    def value(place: int, change: float) -> float:
        moved = logits[row].detach().clone()
        moved[place] += change
        return by_hand(name, moved.tolist(), probs[row].tolist(), float(inside[row]))

    slopes = [(value(place, step) - value(place, -step)) / (2 * step) for place in range(SIZES[1])]
    # The rows are computed in fp32: a gradient of order 1 to within 1e-5, the differences to within step^2.
    torch.testing.assert_close(logits.grad[row], torch.tensor(slopes, dtype=torch.float64), rtol=1e-3, atol=1e-4)


def test_the_hybrid_moves_as_its_two_parts_with_the_share_held_still() -> None:
    logits, probs, inside = drawn(2)
    grads = {}
    for name in ("hybrid", "kl", "tv"):
        leaf = logits.clone().requires_grad_()
        rows = row_losses(name, leaf, probs, inside)
        grads[name] = torch.autograd.grad(rows.sum(), leaf)[0]
    share = (-3 * torch.minimum(probs * inside[:, None], logits.softmax(-1)).sum(-1)).exp()[:, None]
    torch.testing.assert_close(grads["hybrid"], share * grads["kl"] + (1 - share) * grads["tv"], rtol=1e-5, atol=1e-6)


def test_summed_rows_weigh_them() -> None:
    logits, probs, inside = drawn(3)
    weight = torch.tensor([1.0, 0.0, 2.0, 0.5, 0.0])
    for name in ("kl", "tv"):
        rows = row_losses(name, logits, probs, inside)
        torch.testing.assert_close(
            summed_rows(name, logits, probs, inside, weight), (rows * weight).sum(), rtol=1e-5, atol=1e-5
        )


def test_settings_that_a_kind_does_not_have_are_refused(tmp_path: Any) -> None:
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"kind": "medusa"}, r'accepted are "eagle3", "eagle" \(for eagle2 too\) and "mtp"'),
        ({"loss": "l2"}, "kl, tv, nla, hybrid"),
        ({"kind": "eagle"}, "leave out draft_vocab_size"),
        ({"decay": -1.0}, "decay is -1.0; it must be above 0"),
    )
    for changes, message in refused:
        with pytest.raises(ValueError, match=message):
            settings(tmp_path, **changes)
