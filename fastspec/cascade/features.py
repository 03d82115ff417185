"""What a stage's finished answer says about itself: numbers from its tokens' log-probabilities, lengths and repetition."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fastspec.errors import Unsupported

QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9)
LAST = 32
"""Tokens at the answer's end over which the entropy is averaged a second time."""
GRAM = 4
NAMES: tuple[str, ...] = (
    *(f"log_probability_q{int(100 * q)}" for q in QUANTILES),
    *(f"gap_q{int(100 * q)}" for q in QUANTILES),
    "log_probability_mean",
    "entropy_mean",
    "entropy_last",
    "log_probability_first",
    "gap_first",
    "entropy_first",
    "log_prompt_tokens",
    "log_answer_tokens",
    "share_of_limit",
    "ended",
    "repetition",
    "stage",
)
"""The features in their order; a predictor holds for these names alone."""


def features(
    measures: Tensor, tokens: Sequence[int] | Tensor, *, prompt_tokens: int, limit: int, ended: bool, stage: int, stages: int
) -> Tensor:
    """The features `NAMES` of one answer -> [F] fp32 on the CPU.

    measures [T, 3] fp32 on the CPU: for each answer token its log-probability (untempered, nats), the gap between the two largest
    log-probabilities there, and the entropy of the distribution (nats). tokens: the T ids. `limit` is the number of tokens that the
    answer might have had, `ended` whether an end token closed it, `stage` of `stages` the model that gave it. Quantiles, linearly
    interpolated, follow Gupta et al., arXiv 2404.10136, who found that sums and means of log-probabilities favour a length.
    Plain Python is faster here than torch: a hundred numbers do not pay for the start of an operation.
    Raises `Unsupported` for an empty answer, sizes that do not agree, and numbers that are not finite.
    """
    ids: Sequence[int] = tokens.tolist() if isinstance(tokens, Tensor) else tokens
    count = len(ids)
    if measures.shape != (count, 3) or count < 1:
        raise Unsupported(f"features: measures {tuple(measures.shape)} must be [{max(count, 1)}, 3], a row for each of {count} tokens")
    if prompt_tokens < 0 or limit < 1 or not 0 <= stage < stages:
        raise Unsupported(f"features: prompt_tokens={prompt_tokens}, limit={limit}, stage={stage} of {stages}: out of range")
    chances, gaps, entropies = measures.t().tolist()
    sums = sum(chances), sum(gaps), sum(entropies)
    if not math.isfinite(sum(sums)):
        raise _not_finite(measures)
    last = entropies[-LAST:]
    return torch.tensor(
        [
            *_quantiles(sorted(chances)),
            *_quantiles(sorted(gaps)),
            sums[0] / count,
            sums[2] / count,
            sum(last) / len(last),
            chances[0],
            gaps[0],
            entropies[0],
            math.log1p(prompt_tokens),
            math.log(count),
            min(1.0, count / limit),
            float(ended),
            _repetition(ids),
            stage / max(1, stages - 1),
        ],
        dtype=torch.float32,
        device="cpu",
    )


def _quantiles(ordered: list[float]) -> list[float]:
    """Numbers in ascending order -> their `QUANTILES`, linear between neighbours, as torch.quantile has them."""
    last, found = len(ordered) - 1, []
    for q in QUANTILES:
        place = q * last
        low = int(place)
        value = ordered[low]
        found.append(value if low == last else value + (place - low) * (ordered[low + 1] - value))
    return found


def _repetition(ids: Sequence[int]) -> float:
    """The share of 4-grams that occurred before in the answer; 0 where it has none."""
    grams = len(ids) - GRAM + 1
    if grams < 1:
        return 0.0
    return 1 - len(set(zip(ids, ids[1:], ids[2:], ids[3:], strict=False))) / grams


def _not_finite(measures: Tensor) -> Unsupported:
    row, column = next(iter((~torch.isfinite(measures)).nonzero().tolist()), (0, 0))
    name = ("log-probability", "gap", "entropy")[column]
    return Unsupported(
        f"features: the {name} of answer token {row} is {float(measures[row, column])}, not a finite number; "
        "measure on the model's own logits, before processors that forbid tokens"
    )
