"""Rows of an EAGLE drafter that go on in another of the same kind: separate kernels, and one launch for a draft
phase."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.head_variants import drawn, head_of
from torch import Tensor

import fastspec
from fastspec.generation.drafters.head_drafter import EagleDrafter
from fastspec.generation.heads.bound import BoundHead
from fastspec.generation.tree import TokenTree, Verdict
from fastspec.patches.assistants.fused import FusedDrafter
from fastspec.patches.backends import TORCH

SHAPE = fastspec.TreeShape(6, 2, 2)
LENGTH = 5
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a CUDA device")
KINDS = [EagleDrafter, pytest.param(FusedDrafter, marks=INTERPRETED)]


def begun(rows: int, kind: type[EagleDrafter], at: int = 0) -> EagleDrafter:
    """A drafter of `rows` rows after a round whose whole path was accepted; `at` says which texts."""
    head = head_of("plain")
    ops = TORCH if kind is EagleDrafter else replace(TORCH, name="triton")
    drafter = kind(BoundHead.of(head), SHAPE, rows=rows, capacity=40, ops=ops)
    ids, features = drawn(head, rows, LENGTH, at)
    drafter.begin(ids, torch.full((rows,), LENGTH), features, torch.full((rows,), 7 + at))
    tree = TokenTree.chain(torch.tensor([[7 + at, 8, 9]] * rows))
    told = drawn(head, rows, 3, at + 1)[1]
    verdict = Verdict(torch.tensor([[0, 1, 2, 2]] * rows), torch.full((rows,), 2), torch.full((rows,), 11))
    drafter.observe(tree, verdict, told, told, torch.ones(rows, dtype=torch.bool), LENGTH)
    return drafter


def state_of(drafter: EagleDrafter, row: int) -> list[Tensor]:
    """What the next tree of a row grows from."""
    length = int(drafter.state.lengths[row])
    caches = [cache[:, row, :, :length] for cache in (drafter.attention.k, drafter.attention.v)]
    return [torch.tensor(length), drafter.root[row], drafter.last[row], drafter.readout[row], *caches]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_no_pair_is_lost_where_a_row_moves(kind: Any) -> None:
    """Pairs of the last round, which one launch would feed along with the next tree, are fed before."""
    want = state_of(begun(2, EagleDrafter), 1)
    source, target = begun(2, kind), begun(3, kind, at=20)
    target.move_row(2, source, 1, LENGTH + 3)
    got = state_of(target, 2)
    assert int(got[0]) == LENGTH + 3
    for mine, theirs in zip(got, want, strict=True):  # pairs one by one or together: fp32 sums in another order
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
    if isinstance(target, FusedDrafter):
        assert target.pair_counts.tolist() == [3, 3, 0]


@INTERPRETED
@torch.no_grad()
def test_pairs_that_wait_are_fed_before_the_next_tree_and_forgotten_by_the_next_call() -> None:
    plain, fused = begun(2, EagleDrafter), begun(2, FusedDrafter)
    assert isinstance(fused, FusedDrafter) and fused.pair_counts.tolist() == [3, 3]
    wanted, tree = plain.propose(LENGTH + 3), fused.propose(LENGTH + 3)
    assert torch.equal(tree.tokens, wanted.tokens) and torch.equal(tree.parents, wanted.parents)
    for mine, theirs in ((fused.growth.scores, plain.growth.scores), (fused.last, plain.last)):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
    assert torch.equal(fused.growth.tokens, plain.growth.tokens) and torch.equal(
        fused.growth.parents, plain.growth.parents
    )
    assert fused.state.lengths.tolist() == plain.state.lengths.tolist() == [LENGTH + 3] * 2
    fused.open(40)
    assert fused.pair_counts.tolist() == [0, 0]
