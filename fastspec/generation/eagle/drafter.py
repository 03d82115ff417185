"""Drafting with an EAGLE head: an append-only cache of true features, and a dynamic tree grown from it each round.

EAGLE-2 (arXiv 2406.16858, section 4) and EAGLE-3 (arXiv 2503.01840): `top_k` children of the root, then `depth` passes
that expand the `top_k` best nodes of the last level, then a re-ranking of all candidates by cumulative log-probability.
The static trees of EAGLE-1 are in `static.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastspec.config import TreeShape
from fastspec.generation.cache import TreeCache
from fastspec.generation.eagle.head import EagleHead
from fastspec.generation.eagle.program import HeadProgram
from fastspec.generation.protocols import Ops
from fastspec.generation.stack import Places
from fastspec.generation.tree import TokenTree, Verdict
from fastspec.kernels.reference import own_bits

PREFILL_CHUNK = 512


class HeadState:
    """Draft state of one generate call: `rows` sequences, `capacity` tokens each. All of it is changed in place, so that a
    captured round finds it again. What grows a tree from it is the subclass's `propose`.

    A pair (token t+1, feature t) enters the head's cache once, with the target's true feature; tree nodes are fed with the
    head's own states and live in the provisional tail, `grown` slots of it, from which nothing is kept.
    """

    static = True

    def __init__(self, head: EagleHead, *, nodes: int, max_path: int, grown: int, rows: int, capacity: int, ops: Ops) -> None:
        config = head.config
        weight = head.fc.weight
        self.head, self.ops, self.program = head, ops, HeadProgram(head, ops)
        self.nodes, self.max_path, self.grown = nodes, max_path, grown
        self.cache = TreeCache(
            config.num_hidden_layers, rows, config.num_key_value_heads, capacity, max(grown, max_path), config.head_dim,
            dtype=weight.dtype, device=weight.device,
        )  # fmt: skip
        self.tables = self.program.tables(self.cache.slots)
        self.last, self.readout = (torch.zeros(rows, config.hidden_size, dtype=weight.dtype, device=weight.device) for _ in range(2))
        self.root = torch.zeros(rows, dtype=torch.long, device=weight.device)
        self.group = config.num_attention_heads // config.num_key_value_heads
        self.mark: Callable[[str], None] = lambda name: None
        """Told when a level of the tree is drafted."""

    def open(self, capacity: int) -> None:
        """Begin another call of the same rows."""
        self.cache.open(capacity)

    def reserve(self, committed: int) -> int:
        """Make room for this many pairs; returns how many of them are in bounds."""
        committed = self.cache.reserve(committed)
        if len(self.tables[0]) != self.cache.slots:
            self.tables = self.program.tables(self.cache.slots)
        return committed

    def begin(self, ids: Tensor, counts: Tensor, features: Tensor, root: Tensor) -> None:
        """Feed the prompt's pairs: ids [B, T], counts [B] real tokens, features [B, T, F], root [B] the first new token."""
        self.root.copy_(root)
        following = torch.cat((ids[:, 1:], root[:, None]), 1)
        following = following.scatter(1, (counts - 1).clamp(min=0)[:, None], root[:, None])
        for start in range(0, ids.shape[1], PREFILL_CHUNK):
            part = slice(start, start + PREFILL_CHUNK)
            width = following[:, part].shape[1]
            self.reserve(start + width)
            self._extend(following[:, part], features[:, part], (counts - start).clamp(0, width), start + width)

    def observe(self, tree: TokenTree, verdict: Verdict, logits: Tensor, features: Tensor, active: Tensor, extent: int) -> None:
        """Feed the accepted path's pairs with the target's features [B, N, F]; rows that are not active stay put."""
        row = torch.arange(tree.tokens.shape[0], device=tree.tokens.device)[:, None]
        self.root.copy_(torch.where(active, verdict.bonus, self.root))
        counts = (verdict.accepted + 1) * active
        self._extend(verdict.tokens(tree), features[row, verdict.path], counts, self.reserve(extent) + self.max_path)

    def _extend(self, tokens: Tensor, features: Tensor, counts: Tensor, extent: int) -> None:
        width = tokens.shape[1]
        steps = self.cache.lengths[:, None] + torch.arange(width, device=tokens.device)
        layout = self.ops.attention_layout(self.cache.lengths, None, width, width, extent, self.group)
        found = self._step(tokens, self.program.fuse(features.to(self.last.dtype)), steps, steps, layout)
        row = torch.arange(tokens.shape[0], device=tokens.device)
        for kept, states in zip((self.last, self.readout), found, strict=True):
            kept.copy_(torch.where((counts > 0)[:, None], states[row, (counts - 1).clamp(min=0)], kept))
        self.cache.grow(counts)

    def _step(self, tokens: Tensor, hidden: Tensor, positions: Tensor, slots: Tensor, layout: object) -> tuple[Tensor, Tensor]:
        return self.program.step(tokens, hidden, self.cache, Places(*self.tables, positions, slots, layout))


class EagleDrafter(HeadState):
    """Dynamic trees of one `shape`, the drafter of EAGLE-2 and EAGLE-3."""

    def __init__(self, head: EagleHead, shape: TreeShape, *, rows: int, capacity: int, ops: Ops) -> None:
        grown = shape.depth * shape.top_k
        super().__init__(
            head, nodes=shape.total_tokens, max_path=shape.max_path, grown=grown, rows=rows, capacity=capacity, ops=ops
        )  # fmt: skip
        self.shape, device = shape, self.last.device
        k, index = shape.top_k, torch.arange(shape.candidates, device=device)
        self.flat_depths = torch.where(index < k, 1, 2 + (index - k).clamp(min=0) // k**2)
        self.bits = own_bits(max(1, grown), device)
        self.places = torch.arange(k, device=device)
        self.start = torch.zeros(rows, 1, dtype=torch.float32, device=device)

    def propose(self, extent: int) -> TokenTree:
        """Grow the next tree from the last true state; `extent` bounds the committed pairs of any row."""
        shape, ops, k = self.shape, self.ops, self.shape.top_k
        rows, lengths = self.root.shape[0], self.cache.lengths
        batch = torch.arange(rows, device=self.root.device)[:, None]
        scores, tokens, _, _ = self.program.expand(self.readout[:, None], self.start, k)
        hidden = self.last[:, None].repeat(1, k, 1)
        all_scores, all_tokens = [scores], [tokens]
        all_parents = [torch.full_like(tokens, -1)]
        self.mark("draft 0")
        frontier = self.places.expand(rows, -1)  # candidate ids of the nodes to expand
        words = torch.zeros(rows, k, self.bits.shape[1], dtype=torch.long, device=self.root.device)
        extent = self.reserve(extent) + self.grown
        for level in range(shape.depth):
            words = words | self.bits[level * k : (level + 1) * k]
            layout = ops.attention_layout(lengths, words, k, (level + 1) * k, extent, self.group)
            positions = (lengths + level)[:, None].expand(-1, k)
            hidden, readout = self._step(tokens, hidden, positions, lengths[:, None] + (level * k + self.places), layout)
            children, child_tokens, scores, best = self.program.expand(readout, scores, k)
            all_scores.append(children)
            all_tokens.append(child_tokens)
            all_parents.append(frontier.repeat_interleave(k, dim=1))
            frontier = k + level * k * k + best
            self.mark(f"draft {level + 1}")
            tokens, above = child_tokens.gather(1, best), best // k
            hidden, words = hidden[batch, above], words[batch, above]
        kept, parents, depths, ancestors = ops.tree_build(
            torch.cat(all_scores, 1), torch.cat(all_tokens, 1), torch.cat(all_parents, 1), self.flat_depths, self.root, self.nodes
        )
        return TokenTree(kept, parents, depths, ancestors, self.max_path)
