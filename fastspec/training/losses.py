"""Losses of drafting heads as rows of data: how much of each term a name stands for, and how slots of a block are weighed.

Letters: M rows (a row is one prediction), V_d draft vocabulary. p is the target's distribution, q the draft's.

Sources: LK losses, arXiv 2602.23881; D-PACE as in SpecForge and speculators; DSpark, arXiv 2607.05147.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST = 1e-6
"""Overlaps below it count as it under the logarithm of `nla`."""
HYBRID_FALL = 3.0
"""The hybrid's share of cross entropy is exp(-3 alpha), alpha being the overlap."""
DPACE_ALPHA = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Weights of the terms of one prediction, alpha = sum over v of min(p, q):

    `hard` cross entropy against the text's token; `soft` cross entropy against p over the draft vocabulary (its KL divergence but for
    p's entropy, which no head changes); `l1` sum |p - q|; `tv` 1 - alpha; `nla` -log alpha; `hybrid` lambda * soft + (1 - lambda) * tv,
    lambda = exp(-3 alpha), not differentiated. `dpace` weighs a slot of a block by the tokens expected to hang on it instead of by its
    place.
    """

    hard: float = 0.0
    soft: float = 0.0
    l1: float = 0.0
    tv: float = 0.0
    nla: float = 0.0
    hybrid: float = 0.0
    dpace: bool = False

    @property
    def overlaps(self) -> bool:
        """Whether a term needs alpha."""
        return bool(self.tv or self.nla or self.hybrid)

    @property
    def compares(self) -> bool:
        """Whether a term needs p."""
        return bool(self.overlaps or self.soft or self.l1)


LOSSES = {
    "ce": Loss(hard=1.0),
    "kl": Loss(soft=1.0),
    "ce+l1": Loss(hard=0.1, l1=0.9),
    "kl+l1": Loss(soft=0.3, l1=0.7),
    "tv": Loss(tv=1.0),
    "nla": Loss(nla=1.0),
    "hybrid": Loss(hybrid=1.0),
    "dpace": Loss(hard=1.0, dpace=True),
}
DEFAULT = {"eagle3": "kl", "eagle": "kl", "dspark": "ce+l1", "dflash": "ce", "dflash2": "ce"}
"""Kind of head -> what it was published with."""
SOFT_ONLY = ("kl", "tv", "nla", "hybrid")
"""Losses that need no token of the text; EAGLE heads are trained with these."""


def soft_cross_entropy(logits: Tensor, probs: Tensor, weight: Tensor) -> Tensor:
    """Sum over rows of weight * cross entropy of softmax(logits) against probs; logits and probs [M, V_d], weight [M]."""
    wide = logits.float()
    return ((wide.logsumexp(-1) - (wide * probs).sum(-1)) * weight).sum()


def row_losses(
    loss: Loss, logits: Tensor, probs: Tensor, inside: Tensor, truth: Tensor | None = None, *, overlap: bool = False
) -> tuple[Tensor, Tensor]:
    """(the loss of each row [M] fp32, alpha [M] fp32, which is zero where neither the loss nor `overlap` asks for it).

    logits [M, V_d]; probs [M, V_d] the target's distribution, renormalised over the draft vocabulary, and inside [M] its share of the
    whole, neither looked at where neither the loss `compares` nor `overlap` is asked for; truth [M] draft ids of the text's tokens, for
    `hard`.
    """
    wide = logits.float()
    whole = wide.logsumexp(-1)
    alpha = total = torch.zeros_like(whole)
    if loss.overlaps or loss.l1 or overlap:
        q = (wide - whole[:, None]).exp()
        p = probs.float() * inside.float()[:, None]
    if loss.overlaps or overlap:
        alpha = torch.minimum(p, q).sum(-1)
    if loss.hard:
        if truth is None:
            raise ValueError("this loss compares with the text's tokens: give their draft ids as `truth`")
        total = total + loss.hard * (whole - wide.gather(-1, truth[:, None]).squeeze(-1))
    if loss.soft or loss.hybrid:
        soft = whole - (wide * probs).sum(-1)
        total = total + loss.soft * soft
    if loss.l1:
        total = total + loss.l1 * (p - q).abs().sum(-1)
    if loss.tv:
        total = total + loss.tv * (1 - alpha)
    if loss.nla:
        total = total - loss.nla * alpha.clamp_min(SMALLEST).log()
    if loss.hybrid:
        share = (-HYBRID_FALL * alpha.detach()).exp()
        total = total + loss.hybrid * (share * soft + (1 - share) * (1 - alpha))
    return total, alpha


def summed_rows(loss: Loss, logits: Tensor, probs: Tensor, inside: Tensor, weight: Tensor) -> Tensor:
    """Sum over rows of weight * loss, for losses that need no token of the text."""
    if loss == LOSSES["kl"]:
        return soft_cross_entropy(logits, probs, weight)
    return (row_losses(loss, logits, probs, inside)[0] * weight).sum()


def slot_weights(loss: Loss, decay: float, used: Tensor, right: Tensor) -> Tensor:
    """Weights [..., D] fp32 of a block's slots: decay^k, or D-PACE's sum over j >= k of the product over i <= j of (1 - a) p_i + a.

    used [..., D] bool, slots with a loss; right [..., D] the draft's probability of the text's token.
    """
    slots = torch.arange(used.shape[-1], device=used.device)
    if not loss.dpace:
        return used * decay**slots.float()
    reach = ((1 - DPACE_ALPHA) * right.detach().float() + DPACE_ALPHA).cumprod(-1) * used
    return used * reach.flip(-1).cumsum(-1).flip(-1)
