"""Passes of a target over trees, captured by the trees' shapes where the target may be."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from fastspec.generation.capture import CapturedByShape
from fastspec.generation.target import Target
from fastspec.generation.tree import TokenTree


class TreeScores:
    """`Target.score` with room made for it. A captured result lies in memory that the next pass over a tree of that shape writes again."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.held: CapturedByShape[tuple[Tensor, Tensor]] = CapturedByShape()

    def __call__(self, tree: TokenTree, extent: int) -> tuple[Tensor, Tensor]:
        """Score every node of a tree -> logits [B, N, V], features [B, N, F]; see `Target.score`."""
        target, extent = self.target, self.target.reserve(extent)
        if not target.captures:
            return target.score(tree, extent)
        run = partial(_score, target, tree.max_path)
        return self.held(run, target.buffers, tree.tokens.shape[1], tree.tokens, tree.parents, tree.depths, tree.ancestors)


def _score(target: Target, max_path: int, tokens: Tensor, parents: Tensor, depths: Tensor, ancestors: Tensor) -> tuple[Tensor, Tensor]:
    return target.score(TokenTree(tokens, parents, depths, ancestors, max_path), target.bound)
