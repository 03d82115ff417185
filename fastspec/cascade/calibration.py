"""Calibration of a predictor's logits: temperature, isotonic regression, and a Beta posterior for few data."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

SHARPEST = 100.0
"""Temperatures lie between 1 / SHARPEST and SHARPEST."""
PRIOR = 2.0
"""Items that the Beta prior counts for."""
STEPS = 1024
"""Lower quantiles are taken at a probability rounded down to a multiple of 1 / STEPS, so that they can be cached."""


def sigmoid(logit: float) -> float:
    """1 / (1 + exp(-logit)), for any finite logit."""
    if logit < 0:
        return math.exp(max(logit, -700.0)) / (1 + math.exp(max(logit, -700.0)))
    return 1 / (1 + math.exp(-logit))


def logit(probability: float) -> float:
    """ln(p / (1 - p)); a probability of 0 or 1 counts as one that differs from it by 1e-12."""
    held = min(max(probability, 1e-12), 1 - 1e-12)
    return math.log(held / (1 - held))


def log_loss(probabilities: Sequence[float], labels: Sequence[float]) -> float:
    """Mean cross entropy (nats) of labels in [0, 1] under probabilities strictly between 0 and 1."""
    total = sum(y * math.log(p) + (1 - y) * math.log1p(-p) for p, y in zip(probabilities, labels, strict=True))
    return -total / len(labels)


def expected_calibration_error(
    probabilities: Tensor | Sequence[float], labels: Tensor | Sequence[float], bins: int = 10
) -> float:
    """Sum over bins of share of the items x |mean label - mean probability| (Naeini et al., AAAI 2015), of
    probabilities [n] and labels [n] in [0, 1]; bins are ((b - 1) / bins, b / bins]."""
    p, y = (torch.as_tensor(each, dtype=torch.float64, device="cpu") for each in (probabilities, labels))
    bucket = ((p * bins).ceil().long() - 1).clamp(0, bins - 1)
    sums = torch.zeros(bins, dtype=torch.float64, device="cpu").index_add(0, bucket, y - p).tolist()
    return sum(map(abs, sums)) / len(p)


def pool_adjacent_violators(values: Sequence[float], weights: Sequence[float]) -> list[tuple[float, float, int]]:
    """The non-decreasing sequence nearest to `values` in weighted squares, as blocks (value, weight, items)."""
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        size = 1
        while blocks and blocks[-1][0] >= value:
            before, mass, items = blocks.pop()
            value, weight, size = (value * weight + before * mass) / (weight + mass), weight + mass, size + items
        blocks.append((value, weight, size))
    return blocks


@dataclass(frozen=True, slots=True)
class Calibrator:
    """A non-decreasing map from a logit to a probability: sigmoid(logit / temperature); or, with `knots`, the sigmoid
    of the straight lines through (knot, value), constant beyond the ends."""

    temperature: float = 1.0
    knots: tuple[float, ...] = ()
    values: tuple[float, ...] = ()

    def __call__(self, logit: float) -> float:
        if not self.knots:
            return sigmoid(logit / self.temperature)
        at = bisect_right(self.knots, logit)
        if at == 0 or at == len(self.knots):
            return sigmoid(self.values[min(at, len(self.knots) - 1)])
        low, high = self.knots[at - 1 : at + 1]
        below, above = self.values[at - 1 : at + 1]
        return sigmoid(below + (above - below) * (logit - low) / (high - low))

    @classmethod
    def scaled(cls, logits: Sequence[float], labels: Sequence[float]) -> Calibrator:
        """The temperature of least cross entropy (Guo et al., ICML 2017), by bisection of its derivative."""
        z, y = (torch.tensor(each, dtype=torch.float64, device="cpu") for each in (logits, labels))
        low, high = -math.log(SHARPEST), math.log(SHARPEST)
        for _ in range(50):
            middle = (low + high) / 2
            rising = float((z * (torch.sigmoid(z * math.exp(middle)) - y)).sum()) > 0
            low, high = (low, middle) if rising else (middle, high)
        return cls(math.exp(-(low + high) / 2))

    @classmethod
    def isotonic(cls, logits: Sequence[float], labels: Sequence[float]) -> Calibrator:
        """Isotonic regression (Zadrozny and Elkan, KDD 2002): constant on each block, from its first to its last logit.
        Block means are held within 1 / (n + 2) of 0 and 1, nearer than which n items prove none."""
        tied: dict[float, list[float]] = {}
        for z, y in sorted(zip(logits, labels, strict=True)):
            tied.setdefault(z, []).append(y)
        xs, ys = list(tied), list(tied.values())
        blocks = pool_adjacent_violators([sum(each) / len(each) for each in ys], [float(len(each)) for each in ys])
        least, start, knots, values = 1 / (len(logits) + 2), 0, [], []
        for value, _, size in blocks:
            ends = sorted({xs[start], xs[start + size - 1]})
            knots += ends
            values += [logit(min(max(value, least), 1 - least))] * len(ends)
            start += size
        return cls(1.0, tuple(knots), tuple(values))

    @classmethod
    def fit(cls, logits: Sequence[float], labels: Sequence[float], folds: Sequence[int]) -> Calibrator:
        """Temperature or isotonic regression, whichever has the lower log-loss on the held-out folds [n], fitted on all
        items: their logits [n], of a model that was not trained on them, and labels [n] in [0, 1]."""
        losses = []
        for make in (cls.scaled, cls.isotonic):
            loss = 0.0
            for fold in sorted(set(folds)):
                rest = [i for i, each in enumerate(folds) if each != fold]
                held = [i for i, each in enumerate(folds) if each == fold]
                fitted = make([logits[i] for i in rest], [labels[i] for i in rest])
                clipped = [min(max(fitted(logits[i]), 1e-12), 1 - 1e-12) for i in held]
                loss += len(held) * log_loss(clipped, [labels[i] for i in held])
            losses.append(loss)
        return (cls.scaled if losses[0] <= losses[1] else cls.isotonic)(logits, labels)


@dataclass(frozen=True, slots=True)
class Posterior:
    """Posterior Beta(n q + a, n (1 - q) + b) of a calibrated probability q, by the count n of its bucket. `edges`
    [B - 1] part the probabilities into buckets of about equal mass, of `counts` [B] items. The prior Beta(a, b),
    a + b = 2, has its mean at the stage's rate of good answers."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    a: float
    b: float

    @classmethod
    def fit(cls, probabilities: Sequence[float], labels: Sequence[float], buckets: int = 10) -> Posterior:
        """From calibrated probabilities and labels of n >= 1 items; the rate is (sum of labels + 1) / (n + 2)."""
        ordered, n = sorted(probabilities), len(probabilities)
        edges = sorted({ordered[n * i // buckets] for i in range(1, buckets)} - {ordered[0]})
        counts = [0] * (len(edges) + 1)
        for each in probabilities:
            counts[bisect_right(edges, each)] += 1
        rate = (sum(labels) + 1) / (n + 2)
        return cls(tuple(edges), tuple(counts), PRIOR * rate, PRIOR * (1 - rate))

    def mean(self, probability: float) -> float:
        """(n q + a) / (n + a + b)."""
        n = self.counts[bisect_right(self.edges, probability)]
        return (n * probability + self.a) / (n + self.a + self.b)

    def lower(self, probability: float, risk: float) -> float:
        """The quantile `risk` of the posterior, of q rounded down to a multiple of 1 / 1024."""
        n = self.counts[bisect_right(self.edges, probability)]
        held = math.floor(probability * STEPS) / STEPS
        return beta_quantile(risk, n * held + self.a, n * (1 - held) + self.b)


def beta_cdf(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b), a, b > 0 (DLMF 8.17.22, Lentz)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast below this point; above it the other tail has it below
        return 1 - beta_cdf(1 - x, b, a)
    front = math.exp(_log_density(x, a, b)) * x * (1 - x) / a
    tiny = 1e-300
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1) or tiny)
    value = d
    for m in range(1, 100_000):
        before = value
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d, c = 1 / (1 + term * d or tiny), 1 + term / c or tiny
            value *= c * d
        if abs(value - before) <= 1e-16 * abs(value):
            break
    return front * value


def _log_density(x: float, a: float, b: float) -> float:
    return (a - 1) * math.log(x) + (b - 1) * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)


@lru_cache(maxsize=65536)
def beta_quantile(share: float, a: float, b: float) -> float:
    """The x with I_x(a, b) = share, 0 < share < 1, to about 1e-12: Newton's steps, else bisection."""
    low, high, x, moved = 0.0, 1.0, a / (a + b), 1.0
    while high - low > 1e-13 and moved > 1e-14:
        excess = beta_cdf(x, a, b) - share
        if excess == 0:
            return x
        low, high = (x, high) if excess < 0 else (low, x)
        density = math.exp(_log_density(x, a, b))
        after = x - excess / density if density > 0 else high
        if not low < after < high or abs(after - x) > moved / 2:
            after = (low + high) / 2
        moved, x = abs(after - x), after
    return x
