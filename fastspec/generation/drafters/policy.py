"""Draft lengths of rounds, by measured times of rounds and the acceptance of earlier drafts.

All of it is decided before the token in question is drawn, by rounds that are over and drafts that stand already: a
rule that looked at the token to come would change the distribution. `tests/drafters/test_chain_distribution.py`
enumerates it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass
from statistics import median_low

import torch
from torch import Tensor

SMOLLM2_BYTES = 269_030_016
"""Bytes that a pass of SmolLM2-135M reads in bf16, for a drafter that is not given a model."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds of a round by its nodes: `host` for the host, the weights at `bytes_per_ms`, and `one` for what else
    a pass over one node takes. A pass over several nodes adds `several` once and `each` for every node; both are pairs
    (milliseconds, share of the time that reading the weights takes)."""

    nodes: int
    """The largest tree."""
    bytes_per_ms: float
    host: float
    one: float
    several: tuple[float, float]
    each: tuple[float, float]
    drafted: float = 0.0
    """The host's milliseconds for each token that a draft model writes; estimated."""
    reread: float = 1.5
    """The host's milliseconds for encoding a round's text anew for a draft model, and its drafts back; estimated."""
    asynchronous: bool = False
    """True where rounds without look-ups are asynchronous, and so do not wait for the host."""
    wait: float = 0.0
    """The host's milliseconds for a round that waits for a look-up in vain; estimated."""
    row: float = 0.0
    """The host's milliseconds for looking up what one row knows, beside those of the first."""
    node: float = 0.0
    """The host's milliseconds for drafting a node."""
    count: float = 0.0
    """The host's milliseconds for counting a token."""

    def of(self, nodes: int, weight_bytes: int, rows: int = 1) -> float:
        """Milliseconds of a round of so many nodes, of all rows together."""
        read = weight_bytes / self.bytes_per_ms
        one = self.host + self.row * (rows - 1) + self.one + read
        several = self.several[0] + self.several[1] * read + nodes * (self.each[0] + self.each[1] * read)
        return one if nodes == 1 else one + several

    def check(self, weight_bytes: int) -> float:
        """Passes over a single node that one over several nodes costs more, without the share of each."""
        read = weight_bytes / self.bytes_per_ms
        return (self.several[0] + self.several[1] * read) / (self.one + read)

    def look(self, weight_bytes: int, rows: int = 1) -> float:
        """Cost of a look-up in vain for all rows, in passes over a single node."""
        spent = self.row * (rows - 1) + (self.wait if self.asynchronous else 0.0)
        return spent / (self.one + weight_bytes / self.bytes_per_ms)


FORGOTTEN, RENEWED = 0.01, 0.25
"""Share of a measurement that every round of another size forgets, so that it is tried again; the last one's weight."""


class MeasuredCosts:
    """Costs of rounds by their nodes: those of a prior, times what each size was measured to take more than one node
    did. Sizes are tried from the smallest on: the first that was not costs as much more as the one before, and larger
    ones are not to be had. For calls whose tokens no size changes, since it follows a clock then."""

    def __init__(self, prior: dict[int, float]) -> None:
        self.prior, self.one = prior, 0.0
        self.more = {min(prior): 1.0}

    def take(self, nodes: int, ms: float) -> None:
        """A round of so many nodes took `ms` milliseconds."""
        spent = ms / self.prior[nodes]
        if nodes == min(self.prior):
            self.one += (spent - self.one) * (RENEWED if self.one else 1.0)
        elif self.one:
            before = self.more.get(nodes, spent / self.one)
            self.more[nodes] = before + (spent / self.one - before) * 2 * RENEWED
        for size in self.more:
            if size != nodes:
                self.more[size] += (1.0 - self.more[size]) * FORGOTTEN

    def costs(self) -> dict[int, float]:
        """Costs of rounds by their nodes."""
        found, more = {}, 1.0
        for size in sorted(self.prior):
            more = self.more.get(size, more)
            found[size] = self.prior[size] * more
            if size not in self.more:
                break
        return found


LEAST_TIMES, LAST_TIMES = 5, 9
"""Rounds of a kind before their time is known, and those whose median it is, the lower one of an even number."""


class RoundTimes:
    """Milliseconds from the tokens of one round to those of the next, as the host has them: what a round costs with all
    that is done between two, which rounds in flight hide. Kinds of rounds are numbers of the caller's."""

    def __init__(self) -> None:
        self.spent: dict[int, deque[float]] = {}
        self.ended: float | None = None
        """Second in which the tokens of the last round came; None where other work has come since."""
        self.came: float | None = None
        """The same of a round that is taken later."""

    def come(self) -> None:
        """The tokens of a round have come, which is taken later."""
        self.came = time.perf_counter()

    def take(self, kind: int | None, rounds: int = 1) -> float | None:
        """The tokens of a round, or of so many, have come; None: of one whose time says nothing of others -> the
        milliseconds of one, None where other work came before it."""
        now = time.perf_counter() if self.came is None else self.came
        spent = None if self.ended is None else 1e3 * (now - self.ended) / rounds
        if spent is not None and kind is not None:
            self.spent.setdefault(kind, deque(maxlen=LAST_TIMES)).append(spent)
        self.ended, self.came = now, None
        return spent

    def leave(self) -> None:
        """Other work comes before the next round."""
        self.ended = self.came = None

    def forget(self, kind: int) -> None:
        """Rounds of a kind take another time by now."""
        self.spent.pop(kind, None)

    def ms(self, kind: int, least: int = LEAST_TIMES) -> float | None:
        """Milliseconds of a round of this kind, of two the shorter one's; None where fewer than `least` have run."""
        spent = self.spent.get(kind, ())
        return median_low(spent) if len(spent) >= least else None


COSTS = {
    "cpu": Cost(16, 17e6, host=0.6, one=0.0, several=(0.0, 0.19), each=(0.0, 0.0075)),
    "cuda": Cost(
        nodes=32,
        bytes_per_ms=4.4e9,
        host=0.42,
        one=0.35,
        several=(0.35, 0.0),
        each=(0.0013, 0.0017),
        drafted=0.15,
        asynchronous=True,
        wait=0.45,
        row=0.06,
        node=0.004,
        count=0.008,
    ),
}
"""By device type. "cpu" is fitted to cpu_tree.jsonl (commit `c0f133b`), its host to the `draft` and `commit` of `nasd`
in bench_cpu.jsonl; "cuda" to the stacks of 1, 8, 16 and 61 nodes of three models in stack_steps_h200.jsonl, its host to
`draft` and `observe` in bench_steps_h200.jsonl (both of that commit). `wait`, `row`, `node` and `count`, which grows
beside a server's other threads, are estimates: no row of a GPU holds them. On the H200 8 nodes of SmolLM2 take 1.8
times as long as one, 10 of a model of 8 billion weights 1.06 times."""


def cost_on(device: torch.device | str) -> Cost:
    """Costs of rounds on a device, those of CUDA on a kind that was not measured."""
    return COSTS.get(torch.device(device).type, COSTS["cuda"])


LAYERS = 30
"""Layers of the models that `Cost.one` was measured on. It grows with the number of layers."""


PRIOR = 1.0
"""Drafts that count as promised and accepted before the first round."""
BUDGET, LARGEST_BUDGET = 2.0, 4.0
"""Target passes that drafts may lose before rounds go without them: at the start of a call, and after any gain."""
PROBES = 0.05
"""Target passes a round, on average, that trying drafts again may cost while they do not pay."""
LONGEST_PAUSE = 32
"""The most rounds between two tries, since a draft model has to read their tokens when it is tried again."""


def pause_after(price: float) -> int:
    """Rounds between two that try drafts of this price, in target passes, while they do not pay."""
    return min(LONGEST_PAUSE, math.ceil(price / PROBES))


@dataclass(frozen=True, slots=True)
class Length:
    """The most tokens that a round drafts, and the costs that decide on fewer.

    A further token, accepted with probability S, is worth its cost c while S / c exceeds the tokens per cost so far, E
    / T = (1 + sum of S) / (1 + drafted * c), with one target pass as the unit. `cost` is c; 0 always drafts `most`
    tokens. `check` is what a target pass over a root and its drafts costs more than one over the root.
    """

    most: int
    cost: float = 0.0
    check: float = 0.0

    def goes_on(self, survival: float, expected: float, drafted: int) -> bool:
        """True where one more token pays after `drafted` ones that yield `expected` tokens, bonus counted."""
        return drafted < self.most and survival * (1 + drafted * self.cost) > self.cost * expected

    def price(self, drafted: int) -> float:
        """Target passes that a round of so many drafts costs more than one without."""
        return self.check + drafted * self.cost if drafted else 0.0

    @property
    def pause(self) -> int:
        """Rounds without drafts before they are tried again, where they do not pay."""
        return pause_after(self.price(1)) if self.cost else 0

    @property
    def unread(self) -> int:
        """Tokens at the text's end, root counted, that a draft model's own cache may have to read at once."""
        return 2 + self.pause

    @property
    def room(self) -> int:
        """Tokens beyond the text that a draft model's own cache needs room for."""
        return self.most + self.unread


class DraftBudget:
    """Target passes that the drafts of a call may still lose; without any, rounds go without drafts.

    A round's drafts add what was accepted of them less their price. Where the budget is used up, `rounds` rounds go
    without drafts (none: never), then one tries them again, and it takes a gain to go on. So a call loses no more than
    `granted`, once, and the price of a round's drafts every so many rounds; LARGEST_BUDGET bounds how long it takes to
    see that they got worse.
    """

    def __init__(self, rounds: int, device: torch.device, granted: float) -> None:
        self.rounds, self.left = rounds, torch.full((), granted, device=device)
        self.due = False
        """True where the next round tries drafts again, whatever is left."""

    def pause(self) -> int:
        """Rounds that go without drafts from here on; asked before every round that may have some. One read-back."""
        self.due = self.rounds > 0 and not self.due and float(self.left) <= 0
        return self.rounds if self.due else 0

    def judge(self, gained: Tensor | float, price: float) -> None:
        """Count a round whose drafts cost `price` target passes and brought `gained` tokens (a scalar), unread."""
        self.left = (self.left + gained - price).clamp(0.0, LARGEST_BUDGET)


class AdaptiveLength:
    """Draft length of the rounds of one call: asked before a token is drawn, notified when it was.

    A token's chance is the product of the draft model's highest probabilities so far, averaged over the running rows,
    times the share of what such products promised before that was accepted. That is known before the token is drawn,
    as it must be where drafts are drawn. No clock is read, so the same seed gives the same output.
    """

    def __init__(self, length: Length, device: torch.device) -> None:
        self.length, self.budget = length, DraftBudget(length.pause, device, BUDGET)
        self.promised, self.delivered = PRIOR, torch.full((), PRIOR, device=device)
        self.begin(1)

    def begin(self, rows: Tensor | int) -> None:
        """Begin a round, in which so many rows are running."""
        self.rows, self.drafted, self.expected = rows, 0, 1.0
        self.confidence, self.chance, self.hoped = 0.0, 1.0, 0.0
        self.survival: Tensor | float = 1.0
        """[B] the products of the highest probabilities so far."""

    def allows(self, probs: Tensor, part: Tensor) -> bool:
        """True where one more token is drafted, of probs [B, V], of which a part [B] counts: none in rows without
        drafts. Asked before the draw: a token must not decide on its own being drafted. One read-back where the length
        is adaptive."""
        if not self.length.cost:
            return True
        self.survival = self.survival * probs.amax(-1) * part
        self.confidence, delivered = torch.stack((self.survival.sum() / self.rows, self.delivered)).tolist()
        self.chance = self.confidence * min(1.0, delivered / self.promised)
        return not self.drafted or self._pays()

    def take(self) -> bool:
        """Count the token -> whether another may follow. Its chance is no higher than this one's."""
        self.hoped += self.confidence
        self.drafted, self.expected = self.drafted + 1, self.expected + self.chance
        return self.drafted < self.length.most and (not self.length.cost or self._pays())

    def judge(self, accepted: Tensor, active: Tensor) -> None:
        """Count the round by the drafts that the active rows accepted [B], unread."""
        if self.length.cost:
            gained = (accepted * active).sum() / active.sum().clamp(min=1)
            self.promised, self.delivered, self.hoped = self.promised + self.hoped, self.delivered + gained, 0.0
            self.budget.judge(gained, self.length.price(self.drafted))

    def _pays(self) -> bool:
        return self.length.goes_on(self.chance, self.expected, self.drafted)
