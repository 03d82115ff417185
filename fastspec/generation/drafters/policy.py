"""How far a round drafts on the host, and whether it drafts at all: by measured times of rounds and by what became of
earlier drafts.

All of it is decided before the token in question is drawn, by rounds that are over and by drafts that stand already.
Whatever is decided so, a round emits what the target would: drafts that are judged follow the q that judges them, and a
round without any draws one token from the target's own distribution. A rule that looked at the token to come would
break that. `tests/drafters/test_chain_distribution.py` enumerates it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SMOLLM2_BYTES = 269_030_016
"""What a pass of SmolLM2-135M reads in bf16; a drafter that is not given a model takes it for this one."""


@dataclass(frozen=True, slots=True)
class Cost:
    """How long a round takes by the number of its nodes, in milliseconds: `host` for the host, the weights at
    `bytes_per_ms`, and `one` for what else a pass over one node takes. A pass over several nodes adds `several` once
    and `each` for every node; both are pairs (milliseconds, share of the time that reading the weights takes)."""

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
    """The host's milliseconds for encoding a round's text anew for a draft model, and its drafts for the target;
    estimated."""
    asynchronous: bool = False
    """Whether rounds without look-ups are asynchronous, and so do not wait for the host."""

    def of(self, nodes: int, weight_bytes: int) -> float:
        """Milliseconds of a round of so many nodes, of all rows together."""
        read = weight_bytes / self.bytes_per_ms
        one = self.host + self.one + read
        return (
            one
            if nodes == 1
            else one + self.several[0] + self.several[1] * read + nodes * (self.each[0] + self.each[1] * read)
        )

    def check(self, weight_bytes: int) -> float:
        """How much more a pass over several nodes costs than one over a single node, in such passes, without what every
        node adds."""
        read = weight_bytes / self.bytes_per_ms
        return (self.several[0] + self.several[1] * read) / (self.one + read)

    def look(self, weight_bytes: int) -> float:
        """How much more a round with a look-up costs than one without, in passes over a single node."""
        return self.host / (self.one + weight_bytes / self.bytes_per_ms) if self.asynchronous else 0.0


COSTS = {
    "cpu": Cost(16, 17e6, host=0.6, one=0.0, several=(0.0, 0.19), each=(0.0, 0.0075)),
    "cuda": Cost(
        32, 4.4e9, host=0.42, one=0.35, several=(0.35, 0.0), each=(0.0013, 0.0017), drafted=0.15, asynchronous=True
    ),
}
"""By device type. "cpu" is fitted to benchmarks/results/cpu_tree.jsonl, its host to the `draft` and `commit` of `nasd`
in bench_cpu.jsonl; "cuda" to the stacks of 1, 8, 16 and 61 nodes of three models in stack_steps_h200.jsonl, its host to
`draft` and `observe` in bench_steps_h200.jsonl. There 8 nodes of SmolLM2 take 1.8 times as long as one, 10 of a model
of 8 billion weights 1.06 times."""
LAYERS = 30
"""Layers of the models that `Cost.one` was measured on. It grows with the number of layers."""


PRIOR = 1.0
"""So many drafts count as promised and accepted before the first round: until there were more, a draft model's
confidence is believed."""
CREDIT, MOST_CREDIT = 2.0, 4.0
"""Target passes that drafts may lose before rounds go without them: at the start of a call, and after any gain."""
PROBES = 0.05
"""While drafts do not pay, what trying them again may cost, in target passes a round on average. It follows how many
rounds lie between two tries (`pause_after`)."""
LONGEST_PAUSE = 32
"""The most rounds between two tries, since a draft model has to read their tokens when it is tried again."""


def pause_after(price: float) -> int:
    """Rounds between two that try drafts of this price, in target passes, while they do not pay."""
    return min(LONGEST_PAUSE, math.ceil(price / PROBES))


@dataclass(frozen=True, slots=True)
class Length:
    """How far a round drafts: `most` tokens, or fewer where going on does not pay.

    A further token, accepted with probability S, is worth its cost c while S / c exceeds the tokens per cost so far, E
    / T = (1 + sum of S) / (1 + drafted * c), with one target pass as the unit. `cost` is c; 0 always drafts `most`
    tokens. S is the product of the draft model's highest probabilities so far, averaged over the rows that are still
    running, times the share of what such products promised before that was accepted: known before the token is drawn,
    as it must be where drafts are drawn. `check` is what a target pass over a root and its drafts costs more than one
    over the root. No clock is read, so the same seed gives the same output.
    """

    most: int
    cost: float = 0.0
    check: float = 0.0

    def goes_on(self, survival: float, expected: float, drafted: int) -> bool:
        """Whether to draft one more token after `drafted` ones that yield `expected` tokens, bonus counted."""
        return drafted < self.most and survival * (1 + drafted * self.cost) > self.cost * expected

    def price(self, drafted: int) -> float:
        """What a round of so many drafts costs more than one without, in target passes."""
        return self.check + drafted * self.cost if drafted else 0.0

    @property
    def pause(self) -> int:
        """Rounds without drafts before they are tried again, where they do not pay."""
        return pause_after(self.price(1)) if self.cost else 0

    @property
    def unread(self) -> int:
        """Tokens at the end of the text, the root counted, that a draft model with a cache of its own may have to read
        at once."""
        return 2 + self.pause

    @property
    def room(self) -> int:
        """Tokens that its cache needs room for beyond the text."""
        return self.most + self.unread


class Calibration:
    """Calibration of a draft model's confidence in one call: accepted over promised tokens a row and round so far, at
    most 1. It counts rounds that are over, so drafts stay functions of what came before them."""

    def __init__(self, device: torch.device) -> None:
        self.promised, self.delivered = PRIOR, torch.full((), PRIOR, device=device)
        self.hoped = 0.0
        """What this round's drafts promise."""

    def weigh(self, hope: Tensor) -> tuple[float, float]:
        """A confidence (a scalar) as it is, and times that share, in one read-back."""
        plain, delivered = torch.stack((hope, self.delivered)).tolist()
        return plain, plain * min(1.0, delivered / self.promised)

    def judge(self, gained: Tensor) -> None:
        """Count a round: `gained` (a scalar) drafts were accepted. Nothing is waited for."""
        self.promised += self.hoped
        self.delivered += gained
        self.hoped = 0.0


class Pace:
    """How far one round drafts, token by token: it is asked before a token is drawn and notified when it was. `rows`
    are still running."""

    def __init__(self, length: Length, calibration: Calibration, rows: Tensor | int) -> None:
        self.length, self.calibration, self.rows = length, calibration, rows
        self.drafted, self.expected = 0, 1.0
        self.hope, self.mean = 0.0, 1.0

    def allows(self, survival: Tensor) -> bool:
        """Whether one more token is drafted: `survival` [B] are the products of the highest probabilities so far, this
        token's included. One read-back where the length is adaptive."""
        if not self.length.cost:
            return True
        self.hope, self.mean = self.calibration.weigh(survival.sum() / self.rows)
        return not self.drafted or self._pays()

    def take(self) -> bool:
        """Count the token -> whether another may follow. Its chance is no higher than this one's, so its pass need not
        be run to know."""
        self.calibration.hoped += self.hope
        self.drafted, self.expected = self.drafted + 1, self.expected + self.mean
        return self.drafted < self.length.most and (not self.length.cost or self._pays())

    def _pays(self) -> bool:
        return self.length.goes_on(self.mean, self.expected, self.drafted)


class Credit:
    """Whether a round of a call drafts at all: while drafts have brought more than they cost, but for a credit.

    A round's drafts add what was accepted of them less their price. Where the credit is used up, `pause` rounds go
    without drafts (none: never), then one tries them again; it has no credit, so that it takes a gain to go on.
    Whatever the drafts are, a call loses no more than `granted` (None: CREDIT), once, and the price of a round's drafts
    every so many rounds; MOST_CREDIT bounds how long it takes to see that they got worse.
    """

    def __init__(self, pause: int, device: torch.device, granted: float | None = None) -> None:
        self.pause = pause
        self.left = torch.full((), CREDIT if granted is None else granted, device=device)
        self.due = False
        """Whether the next round tries drafts again, whatever is left."""

    def rest(self) -> int:
        """Rounds that go without drafts from here on; asked before every round that may have some. One read-back, none
        behind a pause."""
        if not self.pause or self.due or float(self.left) > 0:
            self.due = False
            return 0
        self.due = True
        return self.pause

    def judge(self, gained: Tensor | float, price: float) -> None:
        """Count a round with drafts of this price, in target passes: `gained` (a scalar) of them were accepted. Nothing
        is waited for."""
        self.left = (self.left + gained - price).clamp(0.0, MOST_CREDIT)


def mean_accepted(accepted: Tensor, active: Tensor) -> Tensor:
    """Drafts accepted [B] on average (a scalar) over the rows that were active [B]."""
    return (accepted * active).sum() / active.sum().clamp(min=1)
