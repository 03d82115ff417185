"""The size of a dynamic tree, measured: the number of nodes with the most expected tokens per millisecond.

expected(n) / (draft + verify(n)) is the rule by which DSpark sizes what is verified (arXiv 2607.05147; vLLM's adaptive
verification), at a fixed batch. The times are those of whole rounds, on the text of the call that asks first, through
the code that every round takes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fastspec.generation.engine.call import Request
from fastspec.generation.engine.engine import Engine
from fastspec.generation.engine.verifier import ChoiceRule
from fastspec.generation.ops import Ops
from fastspec.generation.stats import Clock, Profile, Stats
from fastspec.generation.verify import choose

WARM_UP = 2  # a captured round runs as it is, then is captured
TIMED = 5
COUNTED = 24
"""Rounds of the largest tree whose confidences are averaged, and held against what was accepted."""
PRIOR = 4.0
"""Rounds of a row that count besides as having accepted just what the head promised."""
MOST_POWER = 4.0
"""Confidences are raised to a power between its inverse and this."""


@dataclass(frozen=True, slots=True)
class TreeChoice:
    """Measurements by number of nodes, ascending, and the number chosen; `print` shows a table.

    `draft_ms` is what a round takes to draft and to observe, `verify_ms` all else of it, never more for fewer nodes.
    `expected` are the tokens of a round, bonus included, by the head's own confidences, raised to `power`, as
    `power_of` finds it.
    """

    sizes: tuple[int, ...]
    draft_ms: float
    verify_ms: tuple[float, ...]
    expected: tuple[float, ...]
    chosen: int
    power: float = 1.0

    def __str__(self) -> str:
        lines = [
            f"{self.chosen} nodes chosen; drafting {self.draft_ms:.3f} ms, confidences to the power of {self.power:.2f}"
        ]
        lines.append("nodes  verify ms  expected  tokens/ms")
        rates = tokens_per_ms(self.expected, self.draft_ms, self.verify_ms)
        for size, verify, tokens, rate in zip(self.sizes, self.verify_ms, self.expected, rates, strict=True):
            lines.append(f"{size:5} {verify:10.3f} {tokens:9.3f} {rate:10.4f}{'  <' if size == self.chosen else ''}")
        return "\n".join(lines)


def tokens_per_ms(expected: Sequence[float], draft_ms: float, verify_ms: Sequence[float]) -> list[float]:
    """Expected tokens over the time of a round, by size."""
    return [tokens / (draft_ms + verify) for tokens, verify in zip(expected, verify_ms, strict=True)]


def choose_size(expected: Sequence[float], draft_ms: float, verify_ms: Sequence[float]) -> int:
    """Index of the size with the most expected tokens per millisecond, the smallest of equals."""
    rates = tokens_per_ms(expected, draft_ms, verify_ms)
    return rates.index(max(rates))


def monotone(times: Sequence[float]) -> tuple[float, ...]:
    """Times by size, ascending, none above that of a larger size: fewer nodes never take more, and noise only ever adds
    time."""
    return tuple(accumulate(reversed(times), min))[::-1]


def expected_tokens(scores: Tensor, sizes: Sequence[int]) -> Tensor:
    """Candidates' cumulative log-probabilities [R, M] -> expected tokens [R, len(sizes)] of the trees that keep the n -
    1 best of them: a node is reached with the probability of its path, and the bonus token comes on top."""
    reached = scores.exp().sort(dim=1, descending=True).values.cumsum(1)
    return 1 + reached[:, [size - 2 for size in sizes]]


def power_of(scores: Tensor, nodes: int, accepted: int) -> float:
    """By which power of its candidates' probabilities a head promises what comes: scores [R, M] as above, of which the
    best `nodes` - 1 were judged in each of R rounds, and `accepted` drafts were accepted in all of them together.

    A head that is too sure of itself gets a power above 1, one that is too modest a power below, which raises the
    chance of a node the more the less likely the node is. One number is all that so few rounds can tell.
    """
    best = scores.double().sort(dim=1, descending=True).values[:, : nodes - 1]
    rounds = len(best)
    goal = (accepted + PRIOR * float(best.exp().sum()) / rounds) / (1 + PRIOR / rounds)
    low, high = 1 / MOST_POWER, MOST_POWER
    for _ in range(30):
        power = (low * high) ** 0.5
        low, high = (power, high) if float((power * best).exp().sum()) > goal else (low, power)
    return (low * high) ** 0.5


def choose_tree(fresh: Callable[[], tuple[Any, Any]], ops: Ops, request: Request, sizes: tuple[int, ...]) -> TreeChoice:
    """Measure greedy rounds of a call with trees of these sizes, ascending, and choose.

    `fresh` makes a target, in which what comes before the request's prompts is committed, and an `EagleDrafter` of the
    largest size; both are thrown away. Nothing is drawn at random, and nothing is emitted.
    """
    trial = _Trial(fresh, ops, request)
    drafting, verifying, expected, power = [], [], [1.0] * len(sizes), 1.0
    for size in sizes:
        largest = size == sizes[-1]
        times, scores, accepted = trial.run(size, max(COUNTED, WARM_UP + TIMED) if largest else WARM_UP + TIMED)
        spent = [
            sum(ms for name, ms in each.items() if name.startswith("draft") or name == "observe")
            for each in times[-TIMED:]
        ]
        drafting += spent
        verifying.append(
            statistics.median(sum(each.values()) - ms for each, ms in zip(times[-TIMED:], spent, strict=True))
        )
        if largest:
            power = power_of(scores, size, accepted)
            expected = expected_tokens(scores * power, sizes).mean(0).tolist()
    draft_ms, verify_ms = statistics.median(drafting), monotone(verifying)
    return TreeChoice(
        sizes, draft_ms, verify_ms, tuple(expected), sizes[choose_size(expected, draft_ms, verify_ms)], power
    )


class _Trial:
    """Rounds of one call from the end of its prompts on, begun anew for every size.

    Where layers have let go of what stood before a text's end, the prompts are read anew as well.
    """

    def __init__(self, fresh: Callable[[], tuple[Any, Any]], ops: Ops, request: Request) -> None:
        self.fresh, self.ops, self.request = fresh, ops, request
        self._read()

    def _read(self) -> None:
        self.target, self.drafter = self.fresh()
        logits, self.features = self.request.read(self.target)
        self.root = choose(logits[:, None], None, self.ops)[:, 0].clone()
        self.lengths = self.target.lengths.clone()

    def run(self, size: int, count: int) -> tuple[list[dict[str, float]], Tensor, int]:
        """Rounds of trees with this many nodes -> the times of their parts, and the candidates' scores [R, M] of every
        row in every round that it would come to in the call, and how many drafts were accepted in these."""
        if self.target.forgets:
            if not torch.equal(self.target.lengths, self.lengths):
                self._read()
        else:
            self.target.rewind(self.lengths)
        target, drafter, request = self.target, self.drafter, self.request
        drafter.open(target.state.limit)
        drafter.begin(request.prompts, request.counts, self.features, self.root)
        drafter.nodes = size
        rows, profile = request.prompts.shape[0], Profile()
        engine = Engine(target, drafter, self.ops, ChoiceRule(), rows=rows)
        engine.profile(Clock(profile, target.lengths.device))
        engine.begin(self.root)
        longest, stats = int(self.lengths.max()), Stats()
        live, left, scores, gained = list(range(rows)), [request.limit - 1] * rows, [], 0
        for _ in range(count):
            packed = engine.step(longest, stats)
            scores.append(drafter.growth.scores[live])
            longest += max(accepted for accepted, *_ in packed) + 1
            for row in live:
                gained += packed[row][0]
                left[row] -= packed[row][0] + 1
            live = [
                row for row in live if left[row] > 0 and request.ends.isdisjoint(packed[row][1 : packed[row][0] + 2])
            ]
        return profile.rounds, torch.cat(scores), gained
