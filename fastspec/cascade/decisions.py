"""Decisions of a cascade: stop or go on by backward induction over its stages, rules of deferral, explanations.

Narasimhan et al., "Faster Cascades via Speculative Decoding" (arXiv 2405.19261), equations 2, 5, 10, 13, 14 and 15.
Three rules take q or p as a whole, three take q on a set A of tokens and give the mass that q has outside it to p:

    rule       q where, or A
    chow       max q' >= 1 - alpha
    diff       max q' >= max p' - alpha
    opt        max q' >= max p' - alpha * D(p, q)   D: total variation, the share of drafts that p would refuse
    token_v1   A = {v: q'(v) >= max p' - alpha}
    token_v2   A = {v: p'(v) >= max p' - alpha}
    token_v3   A = {v: p'(v) >= (1 - alpha) max p'}

p' and q' are the models' own probabilities, p and q what the call's temperature and other processors make of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal

import torch
from torch import Tensor

from fastspec.cascade.config import RANGES
from fastspec.errors import Unsupported

Operator = Callable[[Tensor], Tensor]
"""Values [S'] of the states of the next stage -> their expectation [S] given each state of this one."""
PRICES_KEPT = 64
CHUNK = 512


@dataclass(frozen=True, slots=True)
class Scores:
    """A predictor's scores when stage k of L has answered.

    quality (L - k numbers): the probability that the answer of stage k, k + 1, ... L - 1 is acceptable. `point` (2 (L -
    k) - 1) is the request among the training items, free of calibration and risk: logits of quality, then logs of the
    new tokens of each later stage.
    """

    quality: tuple[float, ...]
    point: tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class QualityTable:
    """Scores of n training items by a predictor not trained on them, for stages 0 .. L - 1, on the CPU: quality[k]
    [n, L - k] and points[k] [n, 2 (L - k) - 1] of `Scores`; fresh [n, L], the tokens that each stage generated, and
    kept [n, L], those that it took over from the stage before."""

    quality: tuple[Tensor, ...]
    points: tuple[Tensor, ...]
    fresh: Tensor
    kept: Tensor


@dataclass(frozen=True, slots=True)
class Rates:
    """Milliseconds by stage: per generated token, per verified token of a handed answer (0 for stage 0), and for the
    prefill or the hand-over. Raises `Unsupported` for numbers below 0."""

    token_ms: tuple[float, ...]
    verify_ms: tuple[float, ...]
    start_ms: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("token_ms", "verify_ms", "start_ms"):
            values = getattr(self, name)
            if len(values) != len(self.token_ms) or not all(0 <= each < math.inf for each in values):
                raise Unsupported(
                    f"Rates: {name}={values} must be {len(self.token_ms)} numbers of at least 0, milliseconds by stage"
                )
        if not self.verify_ms or self.verify_ms[0] != 0:
            raise Unsupported(f"Rates: verify_ms={self.verify_ms} must begin with 0: stage 0 has no answer to verify")

    def costs(self, fresh: Tensor, kept: Tensor) -> Tensor:
        """Milliseconds [n, L] fp64 of each stage for fresh [n, L] generated and kept [n, L] taken-over tokens."""
        answers = (fresh + kept).double()
        handed = torch.cat((torch.zeros_like(answers[:, :1]), answers[:, :-1]), 1)
        times = self.token_ms, self.verify_ms, self.start_ms
        token, verify, start = (torch.tensor(each, dtype=torch.float64, device="cpu") for each in times)
        return fresh.double() * token + handed * verify + start


@dataclass(frozen=True, slots=True)
class Decision:
    """Verdict on stopping at this stage, and the expected losses of either in milliseconds, inf beyond the last."""

    stop: bool
    stop_value: float
    go_on_value: float


def backward(losses: Sequence[Tensor], costs: Sequence[Tensor], expect: Sequence[Operator]) -> list[Tensor]:
    """J_k = min{losses_k, costs_k + E[J_{k+1} | state]} [S_k] for every state of every stage; losses[k] [S_k]: price
    (1 - q_k); costs[k] [S_k]: the expected cost of stage k + 1 (L - 1 entries); expect[k] maps [S_{k+1}] to [S_k]."""
    values = [losses[-1]]
    for loss, cost, operator in zip(losses[-2::-1], costs[::-1], expect[::-1], strict=True):
        values.append(torch.minimum(loss, cost + operator(values[-1])))
    return values[::-1]


class Solver:
    """When to stop, for requests that resemble the training items of `table` on a machine with `rates`.

    J_k = min{price (1 - q_k), c_{k+1} + E[J_{k+1} | what is known at k]}, and stage k answers iff the first is at most
    the second. The expectation is the mean over the `neighbours` training items nearest in `Scores.point`, each
    coordinate in standard deviations; an item is not its own neighbour. Before the last stage, where J is linear in the
    probability, the predictor's own estimate stands for that mean: it is not coarsened by neighbours.

    No request stops earlier at a higher price: G(price) = c + E[J_{k+1}] is concave (J_{L-1} is linear in the price,
    minima and averages keep concavity) and G(0) >= 0, so G(s) >= (s / t) G(t) >= s (1 - q) where stage k stops at
    t >= s.
    """

    def __init__(self, table: QualityTable, rates: Rates, *, neighbours: int | None = None) -> None:
        """`neighbours` is less than the number n of items; None: sqrt(n)."""
        items, stages = table.fresh.shape
        self.neighbours = neighbours if neighbours is not None else min(items - 1, max(8, round(math.sqrt(items))))
        self.stages = stages
        self._quality = tuple(each.double() for each in table.quality)
        self._costs = rates.costs(table.fresh, table.kept)
        self._spread = [each.double().std(0, correction=0).clamp(min=1e-6) for each in table.points]
        self._points = [each.double() / spread for each, spread in zip(table.points, self._spread, strict=True)]
        self._squares = [each.square().sum(1) for each in self._points]
        # The backward pass visits the items at stages 1 .. L - 2 alone; stage 0's values are those of requests.
        self._near = {k: self._all_near(k) for k in range(1, stages - 1)}
        self._ahead = {k: self._costs[:, k + 1][near].mean(1) for k, near in self._near.items()}
        self._values = lru_cache(maxsize=PRICES_KEPT)(self._backward)

    def decide(self, stage: int, scores: Scores, price: float) -> Decision:
        """Stop or go on, for a request that `stage` has answered, at a price (ms) of a bad answer."""
        stop = price * (1 - scores.quality[0])
        if stage == self.stages - 1:
            return Decision(True, stop, math.inf)
        # squared distances, less what all items share
        at = torch.tensor(scores.point, dtype=torch.float64, device="cpu").div_(self._spread[stage])
        distances = torch.addmv(self._squares[stage], self._points[stage], at, alpha=-2)
        near = distances.topk(self.neighbours, largest=False, sorted=False).indices
        values = self._costs[:, stage + 1] if stage == self.stages - 2 else self._values(price)[stage + 1]
        go_on = float(values[near].mean())
        if stage == self.stages - 2:
            go_on += price * (1 - scores.quality[1])
        return Decision(stop <= go_on, stop, go_on)

    def _backward(self, price: float) -> dict[int, Tensor]:
        """For k = 1 .. L - 2: c_k + J_k of every item [n] fp64, its expected loss once stage k - 1 goes on."""
        inner = range(1, self.stages - 1)
        losses = [price * (1 - self._quality[k][:, 0]) for k in inner]
        losses.append(price * (1 - self._quality[self.stages - 2][:, 1]))
        means: list[Operator] = [partial(_mean, self._near[k]) for k in inner[:-1]]
        values = backward(losses, [self._ahead[k] for k in inner], [*means, lambda values: values])
        return {k: self._costs[:, k] + value for k, value in zip(inner, values[:-1], strict=True)}

    def _all_near(self, stage: int) -> Tensor:
        """Every item's nearest other items -> [n, neighbours]."""
        points, squares, found = self._points[stage], self._squares[stage], []
        for start in range(0, len(points), CHUNK):
            distances = torch.addmm(squares, points[start : start + CHUNK], points.T, alpha=-2)
            rows = torch.arange(len(distances), device="cpu")
            distances[rows, start + rows] = math.inf
            found.append(distances.topk(self.neighbours, 1, largest=False, sorted=False).indices)
        return torch.cat(found)


def _mean(near: Tensor, values: Tensor) -> Tensor:
    return values[near].mean(1)


def mixed(rule: str, alpha: float | str, p: Tensor, q: Tensor, p_raw: Tensor, q_raw: Tensor) -> Tensor:
    """The distribution pi that a rule decodes from -> [..., V], of the dtype of p.

    p (large) and q (small) [..., V] are probabilities after the call's processors, one-hot in greedy calls; p_raw and
    q_raw [..., V] those before them, which the rules look at. alpha="lossless" is p itself, as is the lower end of the
    rule's range (`RANGES`), though by their formula chow and token_v3 keep some of q there; the upper end is q.
    """
    if isinstance(alpha, str):
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


@dataclass(frozen=True, slots=True)
class Visit:
    """One stage's part in a request. `new_tokens` were generated, `kept_tokens` of `handed_tokens` taken over from the
    stage before. `quality` is the probability that its answer is acceptable, then those of the later stages;
    `stop_value` and `go_on_value` the expected losses in milliseconds, or the probability and its threshold. `cost` is
    that of these tokens by the cascade's rates, in milliseconds; `cut`: the answer ended at its limit."""

    stage: int
    name: str
    why: str
    new_tokens: int = 0
    kept_tokens: int = 0
    handed_tokens: int = 0
    milliseconds: float = 0.0
    quality: tuple[float, ...] = ()
    stop_value: float | None = None
    go_on_value: float | None = None
    cost: float | None = None
    cut: bool = False

    @property
    def outcome(self) -> Literal["answered", "sent_on", "left_out"]:
        said = self.why.partition(":")[0]
        return "left_out" if said == "left out" else "sent_on" if said == "went on" else "answered"


@dataclass(frozen=True, slots=True)
class Explanation:
    """The stages that a request went through, in order; `stage`, the last one, answered. `reused` are the tokens that
    stages took over from the ones before, `milliseconds` the time of all."""

    visits: tuple[Visit, ...]

    @property
    def stage(self) -> int:
        return self.visits[-1].stage

    @property
    def reused(self) -> int:
        return sum(visit.kept_tokens for visit in self.visits)

    @property
    def milliseconds(self) -> float:
        return sum(visit.milliseconds for visit in self.visits)

    def __str__(self) -> str:
        lines = []
        for visit in self.visits:
            parts = [f"{visit.new_tokens} new tokens"] if visit.new_tokens or visit.kept_tokens else []
            parts += [f"{visit.kept_tokens} of {visit.handed_tokens} taken over"] if visit.handed_tokens else []
            parts += [f"{visit.milliseconds:.0f} ms"] if visit.milliseconds else []
            parts += [f"P(acceptable) {' '.join(f'{each:.2f}' for each in visit.quality)}"] if visit.quality else []
            lines.append(f"stage {visit.stage}, {visit.name}: {', '.join([*parts, visit.why])}")
        return "\n".join(lines)
