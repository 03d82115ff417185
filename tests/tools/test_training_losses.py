"""The losses of drafting heads, against the same written token by token in plain Python."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers_training import settings

from fastspec.training.losses import LOSSES, Loss, row_losses, slot_weights, summed_rows

SIZES = (5, 7)  # rows, draft vocabulary


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    raised = [math.exp(x - top) for x in logits]
    return [x / sum(raised) for x in raised]


def by_hand(loss: Loss, logits: list[float], probs: list[float], inside: float, truth: int) -> tuple[float, float]:
    """(loss of one row, alpha), in Python's own floats."""
    q = softmax(logits)
    p = [x * inside for x in probs]
    alpha = sum(min(a, b) for a, b in zip(p, q, strict=True))
    soft = -sum(a * math.log(b) for a, b in zip(probs, q, strict=True))
    share = math.exp(-3 * alpha)
    terms = {
        "hard": -math.log(q[truth]), "soft": soft, "l1": sum(abs(a - b) for a, b in zip(p, q, strict=True)), "tv": 1 - alpha,
        "nla": -math.log(alpha), "hybrid": share * soft + (1 - share) * (1 - alpha),
    }  # fmt: skip
    return sum(getattr(loss, name) * value for name, value in terms.items()), alpha


def drawn(seed: int = 0) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(seed)
    logits, probs = 3 * torch.randn(*SIZES), (2 * torch.randn(*SIZES)).softmax(-1)
    return logits, probs, 0.5 + 0.5 * torch.rand(SIZES[0]), torch.randint(SIZES[1], SIZES[:1])


@pytest.mark.parametrize("name", LOSSES)
def test_rows_are_what_the_formulas_say(name: str) -> None:
    logits, probs, inside, truth = drawn()
    found, alpha = row_losses(LOSSES[name], logits, probs, inside, truth, overlap=True)
    wanted = [by_hand(LOSSES[name], *row) for row in zip(*(x.tolist() for x in (logits, probs, inside, truth)), strict=True)]
    # fp32 sums of seven terms of at most 10: a few steps of 2^-23 each.
    torch.testing.assert_close(found, torch.tensor([row for row, _ in wanted]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(alpha, torch.tensor([each for _, each in wanted]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if not loss.hybrid])
def test_gradients_are_the_slopes_of_the_formulas(name: str) -> None:
    """By central differences of the plain formulas; the hybrid's share is held still, so that its slope is none of a formula."""
    logits, probs, inside, truth = drawn(1)
    logits = logits.double().requires_grad_()
    row_losses(LOSSES[name], logits, probs, inside, truth)[0].sum().backward()
    row, step = 2, 1e-4

    def value(place: int, change: float) -> float:
        moved = logits[row].detach().clone()
        moved[place] += change
        return by_hand(LOSSES[name], moved.tolist(), probs[row].tolist(), float(inside[row]), int(truth[row]))[0]

    slopes = [(value(place, step) - value(place, -step)) / (2 * step) for place in range(SIZES[1])]
    # The rows are computed in fp32: a gradient of order 1 to within 1e-5, the differences to within step^2.
    torch.testing.assert_close(logits.grad[row], torch.tensor(slopes, dtype=torch.float64), rtol=1e-3, atol=1e-4)


def test_the_hybrid_moves_as_its_two_parts_with_the_share_held_still() -> None:
    logits, probs, inside, truth = drawn(2)
    grads = {}
    for name in ("hybrid", "kl", "tv"):
        leaf = logits.clone().requires_grad_()
        rows, alpha = row_losses(LOSSES[name], leaf, probs, inside, truth, overlap=True)
        grads[name] = torch.autograd.grad(rows.sum(), leaf)[0]
    share = (-3 * alpha.detach()).exp()[:, None]
    torch.testing.assert_close(grads["hybrid"], share * grads["kl"] + (1 - share) * grads["tv"], rtol=1e-5, atol=1e-6)


def test_summed_rows_weigh_them() -> None:
    logits, probs, inside, _ = drawn(3)
    weight = torch.tensor([1.0, 0.0, 2.0, 0.5, 0.0])
    for name in ("kl", "tv"):
        rows = row_losses(LOSSES[name], logits, probs, inside)[0]
        torch.testing.assert_close(summed_rows(LOSSES[name], logits, probs, inside, weight), (rows * weight).sum(), rtol=1e-5, atol=1e-5)


def test_slots_weigh_by_place_or_by_what_hangs_on_them() -> None:
    used = torch.tensor([[True, True, True, False], [True, False, True, True]])
    right = torch.tensor([[0.5, 0.2, 0.8, 0.9], [1.0, 0.0, 0.5, 0.25]])
    placed = slot_weights(LOSSES["ce"], 0.5, used, right)
    assert placed.tolist() == [[1.0, 0.5, 0.25, 0.0], [1.0, 0.0, 0.25, 0.125]]
    for row, (mask, chances) in enumerate(zip(used.tolist(), right.tolist(), strict=True)):
        reach, running = [], 1.0
        for known, chance in zip(mask, chances, strict=True):
            running *= 0.5 * chance + 0.5
            reach.append(running if known else 0.0)
        wanted = [sum(reach[k:]) if mask[k] else 0.0 for k in range(4)]
        assert slot_weights(LOSSES["dpace"], 0.5, used, right)[row].tolist() == pytest.approx(wanted, rel=1e-6)


def test_settings_that_a_kind_does_not_have_are_refused(tmp_path: Any) -> None:
    refused = [
        ({"kind": "medusa"}, "dflash2"), ({"kind": "eagle3", "loss": "ce"}, "kl, tv, nla, hybrid"),
        ({"kind": "dspark", "loss": "x"}, "ce\\+l1"),
        ({"kind": "eagle3", "layers": 2}, "block heads"), ({"kind": "dflash", "draft_vocab_size": 0, "rank": 8}, "no correction"),
        ({"kind": "dflash2"}, "whole vocabulary"), ({"kind": "dspark", "hidden_size": 8}, "target's width"), ({"decay": -1.0}, "decay"),
        ({"kind": "dspark", "anchors": 0}, "at least 1"), ({"kind": "dspark", "block_size": -1}, "0 \\(the default\\)"),
    ]  # fmt: skip
    for changes, message in refused:
        with pytest.raises(ValueError, match=message):
            settings(tmp_path, **changes)
    assert settings(tmp_path, kind="dspark").slot_decay == pytest.approx(math.exp(-0.25))
    assert settings(tmp_path, kind="dspark", block_size=16).slot_decay == pytest.approx(math.exp(-1 / 7))
    assert settings(tmp_path).slot_decay == 0.8 and settings(tmp_path, decay=0.5, kind="dspark").slot_decay == 0.5
