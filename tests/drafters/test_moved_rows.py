"""Rows of an EAGLE drafter that go on in another: between one launch for a draft phase and separate kernels, either way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_dynamic_tree import drawn, head_of
from torch import Tensor

import fastspec
from fastspec.generation.drafters.eagle.dynamic import EagleDrafter
from fastspec.generation.heads.bound import BoundHead
from fastspec.generation.tree import TokenTree, Verdict
from fastspec.patches.backends import TORCH, triton_ops

SHAPE = fastspec.TreeShape(6, 2, 2)
LENGTH = 5


def begun(rows: int, fused: bool, at: int = 0) -> EagleDrafter:
    """A drafter of `rows` rows behind a round whose whole path was accepted; `at` says which texts."""
    head = head_of("plain")
    ops = replace(TORCH, fused=triton_ops().fused)
    drafter = EagleDrafter(BoundHead.of(head), SHAPE, rows=rows, capacity=40, ops=ops, fused=fused)
    assert drafter.fused == fused
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a CUDA device")
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("after", [False, True])
@torch.no_grad()
def test_no_pair_is_lost_where_a_row_moves(before: Any, after: Any) -> None:
    """Pairs of the last round, which one launch would feed along with the next tree, are fed before."""
    want = state_of(begun(2, False), 1)
    source, target = begun(2, before), begun(3, after, at=20)
    target.move_row(2, source, 1, LENGTH + 3)
    got = state_of(target, 2)
    assert int(got[0]) == LENGTH + 3
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)  # pairs one by one or together: fp32 sums in another order
    if target.phase is not None:
        assert target.phase.counts.tolist() == [3, 3, 0]
