"""Training-time test: the head is unrolled on its own outputs for several steps, as it will run when it drafts
(EAGLE-3, section 3.2; for EAGLE-1/2 heads HASS, arXiv 2408.15766).

Row t of step 0 is the pair (token t + 1, true features of t). At step i the same row takes token t + 1 + i and the
head's own state, and must predict what the target predicts at position t + 1 + i; what it attends to is in
`unrolled.py`. Rows of the prompt matter in step 0 alone, as keys: later steps leave out those that lie before every
judged position of the batch.

Letters: B rows, T positions, H widths, M positions with a loss, V_d draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastspec.generation.heads.module import EagleHead, Halves, Layer, MtpHead
from fastspec.programs.training.unrolled import EAGER, Diagonals, UnrolledAttention

FEATURE_LOSS = 0.1
"""Weight of the feature loss of an EAGLE-1/2 head beside its cross entropy. EAGLE-1 trains one step with weights of 1
and 0.1 instead."""


@dataclass(slots=True, kw_only=True)
class Teacher:
    """The target's features and distributions of one batch, for the M positions with a loss.

    features [B, T, taps * H_t], or [B, T, H_t] after the final norm where the head has no taps; where [M] flat
    positions b * T + u, u >= 1; probs [M, V_d] the target's distribution over the draft vocabulary, renormalised, and
    inside [M] fp32 the share of the whole that it had; best [M] the target's most likely token (any of the vocabulary),
    as a draft id or -1 when it is outside.
    """

    features: Tensor
    where: Tensor
    probs: Tensor
    inside: Tensor
    best: Tensor


class TrainingTimeTest(nn.Module):
    """Head with its unrolled loss, as one module so that data-parallel wrappers see one forward. To `loss`, a name of
    `LOSSES`, EAGLE-1/2 heads add FEATURE_LOSS times the distance from the features that their states stand for."""

    def __init__(
        self, head: EagleHead | MtpHead, steps: int, decay: float, *, loss: str = "kl", compile: bool = False
    ) -> None:
        super().__init__()
        self.head = head
        self.steps = steps
        self.decay = decay
        rows = partial(summed_rows, loss)
        self.loss = torch.compile(rows, dynamic=True) if compile else rows
        self.halves: Halves | None = (over_texts(Layer.before), over_texts(Layer.after)) if compile else None
        self.diagonals = Diagonals(*map(over_rows, EAGER)) if compile else EAGER

    def forward(self, ids: Tensor, teacher: Teacher, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """ids [B, T], right-padded -> the loss; losses of each step [steps]; whether the head's likeliest token is the
        target's, at each step and loss position [steps, M] (False where the row would start before the text).

        No position before `first` carries a loss in any row: later steps leave out the rows before it."""
        size = ids.shape[1]
        positions = torch.arange(size, device=ids.device).expand_as(ids)
        start, place, row = 0, teacher.where % size, teacher.where // size
        weight = (teacher.best >= 0).float()
        attend = UnrolledAttention(self.diagonals)
        hidden = self.head.fuse(teacher.features)
        goal = teacher.features.flatten(0, 1)[teacher.where] if self.head.config.kind == "eagle" else None
        total, losses, hits = hidden.new_zeros((), dtype=torch.float32), [], []
        following = torch.cat((ids, ids.new_zeros(ids.shape[0], self.steps)), 1)
        for step in range(self.steps):
            if step == 1:
                start = max(0, first - self.steps)
                hidden, positions = hidden[:, start:], positions[:, start:]
            hidden = self.head.step(
                following[:, start + step + 1 : step + 1 + size], hidden, positions + step, attend, self.halves
            )
            inside = place > step
            states = hidden.flatten(0, 1)[(row * (size - start) + place - start - 1 - step).clamp(min=0)]
            logits = self.head.logits(states)
            used = weight * inside
            loss = self.loss(logits, teacher.probs, teacher.inside, used) / used.sum().clamp(min=1)
            if goal is not None:
                apart = F.smooth_l1_loss(states.float(), goal.float(), reduction="none").mean(-1)
                loss = loss + FEATURE_LOSS * (apart * used).sum() / used.sum().clamp(min=1)
            total = total + self.decay**step * loss
            losses.append(loss.detach())
            with torch.no_grad():
                hits.append((logits.argmax(-1) == teacher.best) & inside)
        return total, torch.stack(losses), torch.stack(hits)


def chain_lengths(hits: Tensor, where: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Acceptance of a chain from every drafting position, teacher-forced: (counts [steps] of positions whose first i +
    1 drafts all hit, number of positions). hits [steps, M] as `TrainingTimeTest` returns them; shape (B, T). The i-th
    draft from row t is judged at position t + 1 + i; past the answer's end it counts as missed."""
    rows = where - 1
    alive = torch.ones_like(rows, dtype=torch.bool)
    counts = []
    for step in range(hits.shape[0]):
        dense = torch.zeros(shape[0] * shape[1] + hits.shape[0] + 1, dtype=torch.bool, device=hits.device)
        dense[where] = hits[step]
        alive = alive & dense[rows + 1 + step] & ((rows % shape[1]) + 1 + step < shape[1])
        counts.append(alive.sum())
    return torch.stack(counts), torch.tensor(rows.numel(), device=hits.device)


def over_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, compiled for any dimension 0 of its arguments' tensors, alone or in sequences."""
    run = torch.compile(function)

    def call(*arguments: Any) -> Any:
        for each in arguments:
            for x in each if isinstance(each, Sequence) else (each,):
                if isinstance(x, Tensor):
                    torch._dynamo.maybe_mark_dynamic(x, 0)
        return run(*arguments)

    return call


def over_texts(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of a module and of tensors [B, T, ...], which treats positions alike, compiled over the B * T."""
    run = over_rows(function)

    def call(module: Any, *tensors: Tensor) -> Any:
        shape = tensors[0].shape[:2]
        found = run(module, *(x.flatten(0, 1) for x in tensors))
        return found.unflatten(0, shape) if isinstance(found, Tensor) else tuple(x.unflatten(0, shape) for x in found)

    return call


LOSSES = ("kl", "tv", "nla", "hybrid")
"""Losses of drafting heads, a number per row (one prediction): `kl` is the cross entropy against p over the draft
vocabulary (their KL divergence but for p's entropy, which no head changes), `tv` 1 - alpha, `nla` -log alpha, `hybrid`
lambda * kl + (1 - lambda) * tv, lambda = exp(-3 alpha), not differentiated (LK losses, arXiv 2602.23881). p is the
target's distribution, q the draft's, alpha = sum over v of min(p, q)."""
SMALLEST = 1e-6
"""Overlaps below it count as it under the logarithm of `nla`."""
HYBRID_FALL = 3.0


def row_losses(loss: str, logits: Tensor, probs: Tensor, inside: Tensor) -> Tensor:
    """The loss of each row [M] fp32, by its name in `LOSSES`; logits [M, V_d], probs and inside as in `Teacher`."""
    wide = logits.float()
    whole = wide.logsumexp(-1)
    if loss == "kl":
        return whole - (wide * probs).sum(-1)
    alpha = torch.minimum(probs.float() * inside.float()[:, None], (wide - whole[:, None]).exp()).sum(-1)
    if loss == "tv":
        return 1 - alpha
    if loss == "nla":
        return -alpha.clamp_min(SMALLEST).log()
    share = (-HYBRID_FALL * alpha.detach()).exp()
    return share * (whole - (wide * probs).sum(-1)) + (1 - share) * (1 - alpha)


def summed_rows(loss: str, logits: Tensor, probs: Tensor, inside: Tensor, weight: Tensor) -> Tensor:
    """Sum over rows of weight [M] * loss."""
    return (row_losses(loss, logits, probs, inside) * weight).sum()
