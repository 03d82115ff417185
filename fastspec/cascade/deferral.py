"""The deferral rules of speculative cascades: which mixture pi of a small model's distribution q and a large model's distribution p is
decoded.

Narasimhan et al., "Faster Cascades via Speculative Decoding" (arXiv 2405.19261), equations 2, 5, 10, 13, 14 and 15. Three rules take q or
p as a whole, three take q on a set A of tokens and give the mass that q has outside it to p:

    rule       q where, or A
    chow       max q' >= 1 - alpha
    diff       max q' >= max p' - alpha
    opt        max q' >= max p' - alpha * D(p, q)         D is the total variation distance: the share of drafts that p would refuse
    token_v1   A = {v: q'(v) >= max p' - alpha}
    token_v2   A = {v: p'(v) >= max p' - alpha}
    token_v3   A = {v: p'(v) >= (1 - alpha) max p'}

p' and q' are the models' own probabilities, p and q what the call's temperature and other processors make of them.
"""

from __future__ import annotations

from torch import Tensor

from fastspec.cascade.config import RANGES, RULES
from fastspec.errors import Unsupported


def mixed(rule: str, alpha: float | str, p: Tensor, q: Tensor, p_raw: Tensor, q_raw: Tensor) -> Tensor:
    """The distribution pi that a rule decodes from -> [..., V], of the dtype of p.

    p (large) and q (small) [..., V] are probabilities after the call's processors, one-hot in greedy calls; p_raw and q_raw [..., V] those
    before them, which the rules look at. alpha="lossless" is p itself, as is the lower end of the rule's range (`RANGES`), and the upper
    end is q: both are exact, though chow and token_v3 at 0 are not by their formula, which keeps q where it is sure, and q on p's best
    token. Raises Unsupported for an unknown rule.
    """
    if rule not in RULES:
        raise Unsupported(f"rule={rule!r}; accepted are {', '.join(map(repr, RULES))}")
    if isinstance(alpha, str):
        if alpha != "lossless":
            raise Unsupported(f'alpha={alpha!r}; accepted are a number and "lossless"')
        return p
    large, small = RANGES[rule]
    if alpha <= large:
        return p
    if alpha >= small:
        return q
    best = p_raw.amax(-1, keepdim=True)
    if rule.startswith("token"):
        judged = q_raw if rule == "token_v1" else p_raw
        kept = judged >= ((1 - alpha) * best if rule == "token_v3" else best - alpha)
        return q * kept + (q * ~kept).sum(-1, keepdim=True) * p
    sure = q_raw.amax(-1, keepdim=True)
    least = 1 - alpha if rule == "chow" else best - alpha if rule == "diff" else best - alpha * distance(p, q)
    return q.where(sure >= least, p)


def distance(p: Tensor, q: Tensor) -> Tensor:
    """Total variation distance of distributions [..., V] -> [..., 1]."""
    return (q - p).clamp(min=0).sum(-1, keepdim=True)
