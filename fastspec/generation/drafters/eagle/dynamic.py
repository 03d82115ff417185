"""Dynamic trees of an EAGLE head, grown anew each round.

EAGLE-2 (arXiv 2406.16858, section 4) and EAGLE-3 (arXiv 2503.01840): `top_k` children of the root, then `depth` passes
that expand the `top_k` best nodes of the last level, then a re-ranking of all candidates by cumulative log-probability.
The static trees of EAGLE-1 are in `static.py`.
"""

from __future__ import annotations

from itertools import pairwise, zip_longest

import torch
from torch import Tensor

from fastspec.config import TreeShape
from fastspec.errors import Unsupported
from fastspec.generation.drafters.eagle.cut import Cut
from fastspec.generation.drafters.eagle.head_drafter import HeadDrafter
from fastspec.generation.heads.bound import BoundHead
from fastspec.generation.ops import Ops
from fastspec.generation.tree import TokenTree
from fastspec.kernels.drafting.reference import Candidates


def refuse_wide(shape: TreeShape, ops: Ops) -> None:
    """Raise Unsupported for a tree that the backend's kernels cannot grow: no other backend's run in their place."""
    if ops.most_children is not None and shape.top_k > ops.most_children:
        told = f"top_k={shape.top_k}, and its kernels draft at most {ops.most_children} children of a node"
    elif ops.most_candidates is not None and shape.candidates > ops.most_candidates:
        told = (
            f"depth={shape.depth} and top_k={shape.top_k}, which grow {shape.candidates} candidates (top_k + depth * top_k ** 2), and "
            f"its kernels rank at most {ops.most_candidates}"
        )
    else:
        return
    raise Unsupported(f'backend {ops.name!r} was given a tree of {told}: ask for a smaller tree, or patch with backend="torch"')


class EagleDrafter(HeadDrafter):
    """Dynamic trees of one `shape`, the drafter of EAGLE-2 and EAGLE-3."""

    def __init__(
        self, head: BoundHead, shape: TreeShape, *, rows: int, capacity: int, ops: Ops, cut: Cut | None = None
    ) -> None:  # fmt: skip
        refuse_wide(shape, ops)
        grown = shape.depth * shape.top_k
        super().__init__(
            head, nodes=shape.total_tokens, max_path=shape.max_path, grown=grown, rows=rows, capacity=capacity, ops=ops, cut=cut
        )  # fmt: skip
        self.shape, device = shape, self.last.device
        k, index = shape.top_k, torch.arange(shape.candidates, device=device)
        self.flat_depths = torch.where(index < k, 1, 2 + (index - k).clamp(min=0) // k**2)
        self.fed_depths = (torch.arange(grown, device=device) // k).expand(rows, -1)  # of the nodes that the passes feed, in their order
        self.tokens = torch.zeros(rows, shape.candidates, dtype=torch.long, device=device)
        self.parents = torch.full((rows, shape.candidates), -1, device=device)
        """The candidate above each of the last tree's candidates [B, M], -1 for the root."""
        self.start = torch.zeros(rows, 1, dtype=torch.float32, device=device)
        self.no_words = torch.zeros(rows, 1, (max(1, grown) + 63) // 64, dtype=torch.long, device=device)
        self.scores = torch.zeros(rows, shape.candidates, dtype=torch.float32, device=device)
        """Of the last tree's candidates [B, M] fp32: cumulative log-probabilities, in order of growth."""
        edges = [0, k, *(k + passes * k * k for passes in range(1, shape.depth + 1))]  # k at the first level, k * k at the others
        levels = [slice(*edge) for edge in pairwise(edges)]
        self.levels = [
            Candidates(self.scores[:, at], self.tokens[:, at], None if below is None else self.parents[:, below], at.start)
            for at, below in zip_longest(levels, levels[1:])
        ]

    def propose(self, extent: int) -> TokenTree:
        """Grow the next tree from the last true state; `extent` bounds the committed pairs of any row."""
        extent = self.reserve(extent) + self.grown
        kept, above, depths, ancestors = self.ops.tree_build(*self._grow(extent), self.flat_depths, self.root, self.nodes)
        return TokenTree(kept, above, depths, ancestors, self.max_path)

    def _grow(self, extent: int) -> tuple[Tensor, Tensor, Tensor]:
        """Candidates in order of growth, pass by pass: scores [B, M] fp32, tokens [B, M], parents [B, M] (candidates; the root: -1)."""
        shape, ops, k = self.shape, self.ops, self.shape.top_k
        lengths = self.state.lengths
        fed = self.fed_depths
        places = ops.tree_input(fed, fed, lengths, self.state.slots - 1, None)[:2]  # without a table no tokens are read
        positions, slots = (x.unflatten(1, (shape.depth, k)).unbind(1) for x in places)  # depth times [B, k]
        _, tokens, scores, index = self.program.expand(self.readout[:, None], self.start, k, self.levels[0])
        hidden, words = self.last[:, None], self.no_words
        self.mark("draft 0")
        for level in range(shape.depth):
            x, residual, words = self.program.feed_frontier(tokens, index, hidden, words, level * k)
            layout = ops.attention_layout(lengths, words, k, (level + 1) * k, extent, self.group)
            hidden, readout = self._step(x, residual, positions[level], slots[level], layout)
            _, tokens, scores, index = self.program.expand(readout, scores, k, self.levels[level + 1])
            self.mark(f"draft {level + 1}")
        return self.scores, self.tokens, self.parents
