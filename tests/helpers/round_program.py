"""A target, a drafter and a clock that keep what a round program asks of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastspec.generation.drafters.base import Drafter, HostDrafter, Place, Traits
from fastspec.generation.engine.call import RoundState
from fastspec.generation.engine.round_program import RoundProgram, Scored, VerifiedTree
from fastspec.generation.tree import TokenTree, Verdict
from fastspec.patches.backends import TORCH

CPU, ROWS, NODES, VOCAB, WIDE = torch.device("cpu"), 2, 3, 7, 5


class Model:
    """A target that keeps its calls; `bound` is the room that it has, and `most` what `fits`."""

    def __init__(self, bound: int = 10**6, most: int = 10**6) -> None:
        self.bound, self.most, self.log = bound, most, []  # type: tuple[int, int, list[Any]]
        self.logits, self.features = torch.randn(ROWS, NODES, VOCAB), torch.randn(ROWS, NODES, WIDE)

    def reserve(self, committed: int) -> int:
        self.log.append(("reserve", committed))
        return min(committed, self.bound)

    def fits(self, committed: int) -> bool:
        return committed <= self.most

    def score(self, tree: TokenTree, extent: int) -> tuple[Tensor, Tensor]:
        self.log.append(("score", tree, extent))
        return self.logits, self.features

    def commit(self, verdict: Verdict, active: Tensor) -> None:
        self.log.append(("commit", verdict, active))


class Drafting(Drafter):
    """A drafter that proposes what it is given and keeps its calls."""

    nodes = max_path = NODES

    def __init__(self, tree: Any = None, place: Place = Place.HOST, most: int = 10**6) -> None:
        self.tree, self.traits, self.most, self.log = tree, Traits(place), most, []  # type: tuple[Any, Traits, int, list[Any]]

    def begin(self, ids: Tensor, counts: Tensor, features: Tensor, root: Tensor) -> None:
        """Asked by nobody here."""

    def reserve(self, committed: int) -> int:
        self.log.append(("reserve", committed))
        return committed

    def fits(self, committed: int) -> bool:
        return committed <= self.most

    def propose(self, extent: int) -> TokenTree:
        self.log.append(("propose", extent))
        self.mark("inside")
        return self.tree

    def observe(self, *given: Any) -> None:
        self.log.append(("observe", *given))


class Digesting(Drafting, HostDrafter):
    """The same of one that learns from a digest."""

    observe = HostDrafter.observe

    def digest(self, *given: Any) -> Tensor:
        self.log.append(("digest", *given))
        return torch.tensor([[70, 71, 72], [80, 81, 82]])

    def update(self, digest: list[list[int]], steps: int) -> None:
        self.log.append(("update", digest, steps))


class Ticking:
    """A clock that keeps what it is told."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def start(self) -> None:
        self.log.append("start")

    def open(self) -> None:
        self.log.append("open")

    def mark(self, name: str) -> None:
        self.log.append(name)


def state() -> RoundState:
    held = RoundState(ROWS, CPU)
    held.root.copy_(torch.tensor([4, 5]))
    return held


def chain(*roots: int) -> TokenTree:
    """Roots, and below each the same two drafts."""
    return TokenTree.chain(torch.tensor([[root, 2, 3] for root in roots]))


def made(target: Any = None, drafter: Any = None, **options: Any) -> RoundProgram:
    held: Any = Model() if target is None else target
    return RoundProgram(held, drafter, TORCH, state(), **options)


def judged(tree: TokenTree, model: Model, accepted: tuple[int, int] = (2, 0)) -> VerifiedTree:
    """One row takes both drafts, the other none."""
    verdict = Verdict(torch.tensor([[0, 1, 2], [0, 0, 0]]), torch.tensor(accepted), torch.tensor([6, 1]))
    return VerifiedTree(Scored(tree, model.logits, model.features), verdict, None)
