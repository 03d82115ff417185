"""The decoding loop enumerated: every random decision is scripted and every script is run, so that the distribution of
the first tokens is a sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from fastspec.generation.engine.call import Request, RoundState
from fastspec.generation.engine.engine import Engine
from fastspec.generation.engine.rounds import decode
from fastspec.generation.engine.verifier import ChoiceRule
from fastspec.generation.target import Target
from fastspec.generation.tree import TokenTree, Verdict
from fastspec.patches.backends import TORCH

Text = tuple[int, ...]
PROMPT = (1, 0)
CLOSE = 1e-5
"""A text's chance is a sum of products of at most 40 fp32 chances, and each is off by a few roundings of 6e-8: 40 * 4 *
6e-8."""
PROCESSES: list[Callable[[Tensor], Tensor] | None] = [
    None,
    lambda scores: scores / 0.6,
    lambda scores: (scores * 0.7).masked_fill(scores < scores.amax(-1, keepdim=True) - 1.2, -torch.inf),
]


class Tables(Target):
    """A model of `vocab` tokens with scores of its own after every text, and a cache of tokens that is read as it
    stands."""

    lengths: Any = None

    def __init__(self, seed: int, name: str, rows: int, vocab: int, rooms: int = 40) -> None:
        self.seed, self.name, self.vocab = seed, name, vocab
        self.cells = torch.full((rows, rooms), -1)
        self.lengths = torch.zeros(rows, dtype=torch.long)
        self.known: dict[Text, list[float]] = {}

    def after(self, text: Text) -> list[float]:
        if text not in self.known:
            random = Random(f"{self.seed} {self.name} {text}")
            scores = [random.uniform(-1.5, 1.5) if random.random() < 0.85 else -torch.inf for _ in range(self.vocab)]
            scores[random.randrange(self.vocab)] = random.uniform(-1.5, 1.5)
            self.known[text] = scores
        return self.known[text]

    def prefill(self, ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        self.cells[:, : ids.shape[1]], self.lengths = ids, counts.clone()
        texts = [tuple(text[:n]) for text, n in zip(ids.tolist(), counts.tolist(), strict=True)]
        return torch.tensor([self.after(text) for text in texts]), ids[..., None][..., :0]

    def score(self, tree: TokenTree, extent: int) -> tuple[Tensor, Tensor]:
        rows, nodes = tree.tokens.shape
        self.cells.scatter_(1, self.lengths[:, None] + torch.arange(nodes), tree.tokens)
        cells, lengths, tokens, parents = (
            self.cells.tolist(),
            self.lengths.tolist(),
            tree.tokens.tolist(),
            tree.parents.tolist(),
        )
        assert int(self.lengths.max()) <= extent
        out = []
        for row in range(rows):
            texts = [(*cells[row][: lengths[row]], tokens[row][0])]
            for node in range(1, nodes):
                texts.append((*texts[parents[row][node]], tokens[row][node]))
            out.append([self.after(text) for text in texts])
        return torch.tensor(out), tree.tokens[..., None][..., :0]

    def commit(self, verdict: Verdict, active: Tensor) -> None:
        base = self.lengths[:, None]
        self.cells.scatter_(1, base + torch.arange(verdict.path.shape[1]), self.cells.gather(1, base + verdict.path))
        self.lengths = self.lengths + (verdict.accepted + 1) * active

    def rewind(self, lengths: Tensor) -> None:
        assert bool((lengths <= self.lengths).all())
        self.lengths = lengths.clone()

    def open(self, capacity: int) -> None:
        raise AssertionError("no second call here")


class Scripts:
    """The random decisions of one batch: the row's script first, then the first that is possible, with the others noted
    down.

    Rows from `scripted` on are not enumerated: their decisions are drawn by a generator of their own.
    """

    def __init__(self, scripts: list[list[int]], companions: int = 0) -> None:
        self.scripts, self.taken, self.weights = scripts, [[] for _ in scripts], [1.0] * len(scripts)  # type: ignore[var-annotated]
        self.others: list[list[int]] = []
        self.companions = [Random(row) for row in range(companions)]
        self.state: RoundState

    @property
    def rows(self) -> int:
        return len(self.scripts) + len(self.companions)

    def decide(self, row: int, chances: list[float]) -> int:
        if row >= len(self.scripts):
            return self.companions[row - len(self.scripts)].choices(range(len(chances)), chances)[0]
        options = [option for option, chance in enumerate(chances) if chance > 0]
        script, taken = self.scripts[row], self.taken[row]
        if len(taken) < len(script):
            option = script[len(taken)]
        else:
            option = options[0]
            self.others += [[*taken, other] for other in options[1:]]
        taken.append(option)
        self.weights[row] *= chances[option]
        return option

    def pick(self, scores: Tensor, uniform: Any) -> Tensor:
        """In place of `Ops.pick`."""
        if uniform is None:
            return scores.argmax(-1)
        chances = torch.softmax(scores.double(), -1).flatten(0, -2).tolist()
        picked = [self.decide(row, each) if self.state.running[row] else 0 for row, each in enumerate(chances)]
        return torch.tensor(picked).view(scores.shape[:-1])

    @contextmanager
    def playing(self) -> Iterator[None]:
        """With `torch.rand` giving coins that ask the scripts when they are compared."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "rand", lambda *shape, device=None: Coins(self))
            yield


class Coins:
    """Uniforms of the nodes of a chain: uniform * q < p is an acceptance with chance p / q, asked for where the walk
    comes by."""

    def __init__(self, scripts: Scripts) -> None:
        self.scripts, self.going, self.q = scripts, [True] * scripts.rows, torch.zeros(0)

    def __getitem__(self, key: Any) -> Coins:
        return self

    def __mul__(self, q: Tensor) -> Coins:
        self.q = q
        return self

    def __lt__(self, p: Tensor) -> Tensor:
        for row, (a, b) in enumerate(zip(p.double().tolist(), self.q.double().tolist(), strict=True)):
            chance = min(1.0, a / b) if b else 0.0
            asked = self.going[row] and self.scripts.state.running[row]
            self.going[row] = bool(asked and self.scripts.decide(row, [1 - chance, chance]))
        return torch.tensor(self.going)


Make = Callable[[int, Any], tuple[Any, Any]]
"""(rows, ops) -> (target, drafter)."""


def enumerated(make: Make, process: Any, limit: int, together: int = 10**6, companions: int = 0) -> dict[Text, float]:
    """The distribution of the first `limit` tokens of the loop, `together` scripts in a batch."""
    distribution: dict[Text, float] = {}
    waiting: list[list[int]] = [[]]
    while waiting:
        batch, waiting = waiting[:together], waiting[together:]
        scripts = Scripts(batch, companions)
        ops = replace(TORCH, pick=scripts.pick)
        target, drafter = make(scripts.rows, ops)
        engine = Engine(target, drafter, ops, ChoiceRule(sample=True, process=process), rows=scripts.rows)
        scripts.state = engine.state
        with scripts.playing():
            outcome = decode(engine, request(scripts.rows, limit), "enumerated")
        for text, weight in zip(outcome.tokens, scripts.weights, strict=False):
            distribution[tuple(text)] = distribution.get(tuple(text), 0.0) + weight
        waiting += scripts.others
    return distribution


def request(rows: int, limit: int, **options: Any) -> Request:
    ids = torch.tensor([PROMPT]).expand(rows, -1)
    return Request(ids, torch.full((rows,), len(PROMPT)), list(ids), limit, frozenset(), None, **options)


def closed(vocab: int, limit: int, after: Callable[[Text], list[float]]) -> dict[Text, float]:
    """The distribution of texts whose next token has the distribution after(prompt and text so far)."""
    distribution = {}
    for text in product(range(vocab), repeat=limit):
        distribution[text] = 1.0
        for place, token in enumerate(text):
            distribution[text] *= after((*PROMPT, *text[:place]))[token]
    return distribution


def agree(found: dict[Text, float], want: dict[Text, float]) -> bool:
    return all(abs(found.get(text, 0.0) - want.get(text, 0.0)) < CLOSE for text in {*found, *want})


def distribution_of(model: Tables, text: Text, process: Any = None) -> list[float]:
    scores = torch.tensor([model.after(text)])
    return torch.softmax(scores if process is None else process(scores), -1)[0].double().tolist()


# The mixture
