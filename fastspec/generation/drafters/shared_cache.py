"""Drafters that attend over their target's keys and values, and keep none of their own: Gemma 4's assistants.

A node of a tree is its token and the state that is fed back to it. All nodes of a round stand at the position of the
last emitted token, and see the committed text and no other node, so neither a prompt nor an accepted path is read.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastspec.default_trees import TreeShape
from fastspec.generation.decoder_layer import LayerParts, LayoutKey, Linear, Nodes, Norm, Rotary, one_by_one
from fastspec.generation.drafters.base import Drafter, Place, RootsOnly, Traits
from fastspec.generation.drafters.dynamic_tree import Expand, TreeGrowth, refuse_wide
from fastspec.generation.ops import Ops
from fastspec.generation.target import Target
from fastspec.generation.tree import TokenTree, Verdict


@dataclass(frozen=True, slots=True)
class SharedCacheProgram:
    """Passes of an assistant over the keys and values of one target."""

    embed: Callable[[Tensor], Tensor]
    """Tokens [B, N] -> the target's embeddings [B, N, Ht]."""
    enter: Linear
    """An embedding and a state of the target's side by side [..., 2 * Ht] -> [..., H]."""
    layers: Sequence[LayerParts]
    keys: tuple[LayoutKey, ...]
    """Layouts of what the layers see, each once."""
    norm: Norm
    leave: Linear
    """Map of what the LM head reads [..., H] -> the state that is fed back [..., Ht]."""
    expand: Expand
    tables: Callable[[int], Mapping[str | None, Rotary]]
    """The rotary tables of so many positions."""
    slots: Callable[[], int]
    """Slots of the target's buffers now, and of its positions."""
    positions: Callable[[], Tensor]
    """Positions [B] of the last emitted tokens."""

    def step(self, tokens: Tensor, hidden: Tensor, nodes: Nodes) -> tuple[Tensor, Tensor]:
        """Tokens [B, N], states hidden [B, N, Ht] -> states fed back [B, N, Ht], what the LM head reads [B, N, H]."""
        total = self.enter(torch.cat((self.embed(tokens).to(hidden.dtype), hidden), -1))
        change, total = one_by_one(self.layers, total, None, nodes, {})
        readout, _ = self.norm(total) if change is None else self.norm(change, total)
        return self.leave(readout), readout


class SharedCacheDrafter(Drafter):
    """Dynamic trees of one `shape`, drafted by the program that `program_of` makes for the call's target.

    A tree costs depth + 1 passes: the root is read too. More children of a node than the tree holds are not drafted.
    """

    traits = Traits(Place.DEVICE, reusable=True, reads_logits=False)
    observes_roots = True

    def __init__(
        self,
        program_of: Callable[[Target], SharedCacheProgram],
        shape: TreeShape,
        *,
        width: int,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
        ops: Ops,
    ) -> None:
        self.program_of, self.ops = program_of, ops
        self.root = torch.zeros(rows, dtype=torch.long, device=device)
        self.last = torch.zeros(rows, width, dtype=dtype, device=device)
        """The target's last hidden state [B, Ht] before the root."""
        self.heard = torch.zeros_like(self.root)
        """Pairs [B] that are kept of each row: none."""
        self.zeros: dict[int, Tensor] = {}
        self.no_words: dict[int, Tensor] = {}
        """By the number of nodes a pass reads: their depths [B, N], and what they see of one another [B, N, W]."""
        self._grows(shape)
        self.row = torch.arange(rows, device=device)
        self.target: Target
        self.program: SharedCacheProgram
        self.tables: Mapping[str | None, Rotary] = {}
        self.covered = 0
        """Positions that the tables hold."""

    def _grows(self, shape: TreeShape) -> None:
        """Draft trees of this shape."""
        shape = replace(shape, top_k=min(shape.top_k, shape.total_tokens - 1))
        refuse_wide(shape, self.ops)
        rows, device = len(self.root), self.root.device
        self.shape, self.nodes, self.max_path = shape, shape.total_tokens, shape.max_path
        self.growth = TreeGrowth(shape, rows=rows, device=device)
        for count in (1, shape.top_k):
            self.zeros[count] = torch.zeros(rows, count, dtype=torch.long, device=device)
            self.no_words[count] = torch.zeros(rows, count, (count + 63) // 64, dtype=torch.long, device=device)

    def sized(self, shape: TreeShape) -> Drafter:
        other = copy.copy(self)
        other.zeros, other.no_words = dict(self.zeros), dict(self.no_words)
        other._grows(shape)
        return other

    def resting(self, root: Tensor) -> RootsOnly:
        return RootsOnly(self, root)

    def bind(self, target: Target) -> None:
        self.target, self.program = target, self.program_of(target)
        self.covered = 0
        self.reserve(0)

    def open(self, capacity: int) -> None:
        """Begin another call of the same rows: nothing is kept of a text."""
        self.reserve(0)

    def reserve(self, committed: int) -> int:
        committed = self.target.reserve(committed)
        if self.covered != self.program.slots():
            self.covered = self.program.slots()
            self.tables = self.program.tables(self.covered)
        return committed

    def fits(self, committed: int) -> bool:
        return self.target.fits(committed)

    @property
    def buffers(self) -> Hashable:
        return self.covered

    def begin(self, ids: Tensor, counts: Tensor, features: Tensor, root: Tensor) -> None:
        """Take the feature of each row's last token; the prompt's keys and values are the target's."""
        self.root.copy_(root)
        self.last.copy_(features[self.row, (counts - 1).clamp(min=0)])

    def move_row(self, row: int, other: Drafter, source: int, count: int) -> None:
        assert isinstance(other, SharedCacheDrafter)
        self.root[row], self.last[row] = other.root[source], other.last[source]

    def observe(
        self, tree: TokenTree, verdict: Verdict, logits: Tensor, features: Tensor, active: Tensor, extent: int
    ) -> None:
        """Take the feature of the last accepted node; rows that are not active stay put."""
        path = verdict.path, verdict.accepted, verdict.bonus, active
        taken, counts, _ = self.ops.path_pairs(features, *path, self.root, self.heard)
        self.ops.keep_last(taken, taken, counts, self.last, self.last, self.heard, 0)

    def propose(self, extent: int) -> TokenTree:
        extent, ops, program = self.reserve(extent), self.ops, self.program
        hidden, readout = program.step(self.root[:, None], self.last[:, None], self._nodes(1, extent))
        nodes, words = self._nodes(self.shape.top_k, extent), self.growth.no_words

        def deeper(level: int, tokens: Tensor, index: Tensor) -> Tensor:
            nonlocal hidden, words
            chosen, states, words = ops.next_frontier(
                tokens.contiguous(), index.contiguous(), hidden, words, level * self.shape.top_k
            )
            hidden, below = program.step(chosen, states, nodes)
            return below

        grown = self.growth.grow(program.expand, readout, deeper, self.mark)
        return self.growth.tree(ops, grown, self.root, self.nodes, self.max_path)

    def _nodes(self, count: int, extent: int) -> Nodes:
        """The places of so many nodes a row, all of them the root's: each sees the committed text alone."""
        lengths, zeros, none = self.target.lengths, self.zeros[count], self.no_words[count]
        layouts: dict[LayoutKey, object] = {}
        for key in self.program.keys:
            cut = {} if key.span is None else {"span": key.span, "depths": zeros, "ring": key.ring}
            layouts[key] = self.ops.attention_layout(lengths, none, count, count, extent + count, key.group, **cut)
        positions = self.program.positions()[:, None].expand(-1, count).contiguous()
        return Nodes(self.tables, positions, {key.ring: zeros for key in self.program.keys}, layouts)
