"""EAGLE-1's drafting: a static tree, the same in every round, on the cache of true features of `head_drafter.py`.

EAGLE (arXiv 2401.15077, section 4). Which nodes the tree has is fixed by their child ranks; only their tokens
change. A level costs one pass of the head over just those of its nodes that have children; the root's children come from the
pass that fed the last accepted tokens. Every index is laid out once, when the drafter is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastspec.generation.drafters.eagle.cut import Cut
from fastspec.generation.drafters.eagle.head_drafter import HeadDrafter
from fastspec.generation.heads.bound import BoundHead
from fastspec.generation.ops import Ops
from fastspec.generation.tree import TokenTree
from fastspec.kernels.drafting.reference import own_bits

Process = Callable[[Tensor], Tensor]
Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Level:
    """One pass over the n nodes of a level that have children, and what becomes of their c likeliest (or first drawn) tokens.

    `count` is c; `children` [m] picks the next level's m nodes from the n * c tokens. Of those, `fed` [n'] have children
    themselves, below the nodes `above` [n'] of this pass; they take the tail's slots from `start` on and see `words` [n', W].
    """

    count: int
    children: Tensor
    fed: Tensor
    above: Tensor
    start: int
    words: Tensor


def lay_out(paths: tuple[Ranks, ...], *, drawn: bool, device: torch.device) -> tuple[list[Level], list[int]]:
    """The levels of a tree, and the parent of every node (the root is node 0), from its paths in breadth-first order.

    Where the children are drawn, a child's place among its siblings is the order of the draw: gaps between ranks close.
    """
    nodes: list[Ranks] = [(), *paths]
    at = {path: index for index, path in enumerate(nodes)}
    inner = {path[:-1] for path in paths}
    rank: dict[Ranks, int] = {}
    for path in paths:
        siblings = [other for other in paths if other[:-1] == path[:-1]]
        rank[path] = siblings.index(path) if drawn else path[-1]
    fed = [path for path in paths if path in inner]
    bits = own_bits(max(1, len(fed)), device)
    levels: list[Level] = []
    here, start = nodes[:1], 0
    for depth in range(1, len(paths[-1]) + 1):
        below = [path for path in paths if len(path) == depth]
        count = 1 + max(rank[path] for path in below)
        onward = [path for path in below if path in inner]
        index = [
            [here.index(path[:-1]) * count + rank[path] for path in below],
            [below.index(path) for path in onward],
            [here.index(path[:-1]) for path in onward],
        ]
        children, places, above = (torch.tensor(each, dtype=torch.long, device=device) for each in index)
        seen = [bits[[fed.index(path[:end]) for end in range(1, depth + 1)]].sum(0) for path in onward]
        words = torch.stack(seen) if seen else bits[:0]
        levels.append(Level(count, children, places, above, start, words))
        start, here = start + len(onward), onward
    return levels, [0, *(at[path[:-1]] for path in paths)]


def draw_distinct(probs: Tensor, noise: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Draw `count` tokens one after another without replacement: probs [..., V] fp32, noise [..., V] independent Exp(1).

    The tokens come in the order in which exponential clocks of rates `probs` ring, which is that of such draws. Returns ids
    [..., count] and q [..., count, V], the distribution of each draw: `probs` without the earlier draws, renormalised. Where
    fewer than `count` tokens have a probability, the rest of q is zeros and the rest of ids names tokens that nobody drew.
    """
    ids = torch.topk(probs / noise.clamp(min=torch.finfo(noise.dtype).tiny), count, dim=-1).indices
    left, q = probs, []
    for place in range(count):
        total = left.sum(-1, keepdim=True)
        q.append(torch.where(total > 0, left / total, 0.0))
        left = left.scatter(-1, ids[..., place : place + 1], 0.0)
    return ids, torch.stack(q, -2)


class StaticDrafter(HeadDrafter):
    """Static trees of nodes `paths` (breadth first, without the root), the drafter of EAGLE-1.

    The child of rank r is its parent's r-th likeliest token. With `process`, which maps logits [R, V] to the scores that the
    target samples from, the children are drawn without replacement from the head's distribution under them instead.
    """

    def __init__(
        self, head: BoundHead, paths: tuple[Ranks, ...], *, rows: int, capacity: int, ops: Ops, process: Process | None = None,
        cut: Cut | None = None,
    ) -> None:  # fmt: skip
        device = head.module.fc.weight.device
        self.levels, parents = lay_out(paths, drawn=process is not None, device=device)
        self.process, self.traits = process, replace(self.traits, draws=process is not None)
        super().__init__(
            head, nodes=len(parents), max_path=len(self.levels) + 1, grown=sum(len(level.fed) for level in self.levels),
            rows=rows, capacity=capacity, ops=ops, cut=cut,
        )  # fmt: skip
        above = torch.tensor([parents], device=device).expand(rows, -1).contiguous()
        self.tree = TokenTree.from_parents(torch.zeros_like(above), above)

    def propose(self, extent: int) -> TokenTree:
        """The next tree's tokens; `extent` bounds the committed pairs of any row."""
        extent = self.reserve(extent) + self.grown
        tokens, q = [self.root[:, None]], []
        hidden, readout = self.last[:, None], self.readout[:, None]
        for depth, level in enumerate(self.levels):
            logits = self.program.logits(readout)
            ids, chances = self._children(logits, level.count)
            below = self.program.head.to_target(ids).flatten(1)[:, level.children]
            tokens.append(below)
            if chances is not None:
                q.append(chances.flatten(1, 2)[:, level.children])
            width = level.fed.shape[0]
            if width == 0:
                continue
            steps = level.start + torch.arange(width, device=below.device)
            words = level.words.expand(below.shape[0], -1, -1)
            layout = self.ops.attention_layout(self.state.lengths, words, width, level.start + width, extent, self.group)
            positions = (self.state.lengths + depth)[:, None].expand(-1, width)
            slots = self.state.lengths[:, None] + steps
            x, residual = self.program.feed(below[:, level.fed], hidden[:, level.above])
            hidden, readout = self._step(x, residual, positions, slots, layout)
        drawn = torch.cat((torch.zeros_like(q[0][:, :1]), *q), 1) if q else None
        tree = self.tree
        return TokenTree(torch.cat(tokens, 1), tree.parents, tree.depths, tree.ancestors, self.max_path, drawn)

    def _children(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor | None]:
        """Logits [B, n, V] -> ids [B, n, count] in the order of their ranks and, where they are drawn, q [B, n, count, V]."""
        if self.process is None:
            return self.ops.topk_logprobs(logits, count)[1], None
        scores = self.process(logits.flatten(0, 1).float()).view(logits.shape)
        probs = torch.softmax(scores, -1)
        return draw_distinct(probs, torch.empty_like(probs).exponential_(), count)
