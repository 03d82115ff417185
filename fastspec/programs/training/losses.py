"""Losses of drafting heads, a number per row (one prediction). `tv`, `nla` and `hybrid`: LK losses, arXiv 2602.23881.

Letters: M rows, V_d draft vocabulary. p is the target's distribution, q the draft's, alpha = sum over v of min(p, q).
"""

from __future__ import annotations

import torch
from torch import Tensor

LOSSES = ("kl", "tv", "nla", "hybrid")
"""`kl` is the cross entropy against p over the draft vocabulary (their KL divergence but for p's entropy, which no head
changes), `tv` 1 - alpha, `nla` -log alpha, `hybrid` lambda * kl + (1 - lambda) * tv, lambda = exp(-3 alpha), not
differentiated."""
SMALLEST = 1e-6
"""Overlaps below it count as it under the logarithm of `nla`."""
HYBRID_FALL = 3.0


def row_losses(loss: str, logits: Tensor, probs: Tensor, inside: Tensor) -> Tensor:
    """The loss of each row [M] fp32, by its name in `LOSSES`.

    logits [M, V_d]; probs [M, V_d] the target's distribution, renormalised over the draft vocabulary, and inside [M]
    its share of the whole.
    """
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
