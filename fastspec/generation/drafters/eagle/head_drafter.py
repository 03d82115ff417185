"""What all drafters with an EAGLE head have: an append-only cache of true features, fed as the target accepts tokens."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from fastspec.generation.capture import CapturedByShape, padded_width
from fastspec.generation.drafters.base import Drafter, Place, Traits
from fastspec.generation.drafters.eagle.cut import Cut
from fastspec.generation.drafters.eagle.program import HeadProgram
from fastspec.generation.heads.bound import BoundHead
from fastspec.generation.heads.lowered import follow
from fastspec.generation.layers.mixers import EVERYTHING, Nodes, Rotary
from fastspec.generation.ops import Ops
from fastspec.generation.prompt_parts import prompt_parts, widest_part
from fastspec.generation.state.attention import FullAttentionState
from fastspec.generation.state.sequence import SequenceState
from fastspec.generation.tree import TokenTree, Verdict


class HeadDrafter(Drafter):
    """Draft state of one generate call: `rows` sequences, `capacity` tokens each. All of it is changed in place, so that a
    captured round finds it again. What grows a tree from it is the subclass's `propose`.

    A pair (token t+1, feature t) enters the head's cache once, with the target's true feature; tree nodes are fed with the
    head's own states and live in the provisional tail, `grown` slots of it, from which nothing is kept.
    """

    traits = Traits(Place.DEVICE, reusable=True, reads_logits=False)

    def __init__(
        self, head: BoundHead, *, nodes: int, max_path: int, grown: int, rows: int, capacity: int, ops: Ops, cut: Cut | None = None
    ) -> None:  # fmt: skip
        config = head.config
        kv_heads = config.num_key_value_heads // (1 if cut is None else cut.group.size())
        weight = head.module.fc.weight
        self.attention = FullAttentionState(
            config.num_hidden_layers, rows, kv_heads, config.head_dim, dtype=weight.dtype, device=weight.device
        )
        self.state = SequenceState([self.attention], rows=rows, capacity=capacity, tail=max(grown, max_path), device=weight.device)
        self.head, self.ops, self.program = head, ops, HeadProgram(head, ops, self.attention, cut)
        self.nodes, self.max_path, self.grown = nodes, max_path, grown
        self.tables = self.program.tables(self.state.slots)
        self.last, self.readout = (torch.zeros(rows, config.hidden_size, dtype=weight.dtype, device=weight.device) for _ in range(2))
        self.root = torch.zeros(rows, dtype=torch.long, device=weight.device)
        self.widest = widest_part(rows, captures=ops.captures)
        # made once: what a round makes anew costs it a launch
        self.place = torch.arange(max(padded_width(self.widest), max_path), device=weight.device)
        self.group = config.num_attention_heads // config.num_key_value_heads
        self.chunks: CapturedByShape[None] | None = CapturedByShape() if ops.captures else None

    def open(self, capacity: int) -> None:
        """Begin another call of the same rows."""
        follow(self.head)
        self.state.open(capacity)

    def reserve(self, committed: int) -> int:
        """Make room for this many pairs; returns how many of them are in bounds."""
        committed = self.state.reserve(committed)
        if len(self.tables[0]) != self.state.slots:
            self.tables = self.program.tables(self.state.slots)
        return committed

    def fits(self, committed: int) -> bool:
        """Whether there is room for so many pairs already."""
        return self.state.fits(committed)

    @property
    def buffers(self) -> Hashable:
        """The size of the buffers, which are replaced when they grow."""
        return self.state.slots

    def begin(self, ids: Tensor, counts: Tensor, features: Tensor, root: Tensor) -> None:
        """Feed the prompt's pairs: ids [B, T], counts [B] real tokens, features [B, T, F], root [B] the first new token."""
        self.root.copy_(root)
        following = torch.cat((ids[:, 1:], root[:, None]), 1)
        following = following.scatter(1, (counts - 1).clamp(min=0)[:, None], root[:, None])
        self.reserve(ids.shape[1])
        if self.chunks is not None:
            self.state.reached = self.state.slots  # a captured part writes its padding too
        for start, width in prompt_parts(ids.shape[1], self.widest):
            part = slice(start, start + width)
            inputs = following[:, part], features[:, part], (counts - start).clamp(0, width)
            if self.chunks is None:
                self._extend(*inputs, start + width)
            else:
                self.chunks(self._extend, self.state.slots, padded_width(width), *inputs)

    def copy_row(self, row: int, other: Drafter, count: int) -> None:
        """Begin a row anew with the only row of another state, which has begun with `count` pairs."""
        self.move_row(row, other, 0, count)

    def move_row(self, row: int, other: Drafter, source: int, count: int) -> None:
        """Go on with a row of another state, which has `count` pairs."""
        assert isinstance(other, HeadDrafter)
        self.reserve(count)
        self.state.copy_row(row, other.state, count, source)
        for mine, theirs in ((self.root, other.root), (self.last, other.last), (self.readout, other.readout)):
            mine[row] = theirs[source]

    def observe(self, tree: TokenTree, verdict: Verdict, logits: Tensor, features: Tensor, active: Tensor, extent: int) -> None:
        """Feed the accepted path's pairs with the target's features [B, N, F]; rows that are not active stay put."""
        taken, counts, steps = self._pairs(features, verdict, active)
        self._extend(verdict.tokens(tree), taken, counts, self.reserve(extent) + self.max_path, steps)

    def _pairs(
        self, features: Tensor, verdict: Verdict, active: Tensor, out: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`Ops.path_pairs` of a verdict, whose bonus token becomes the root of the next tree."""
        path = verdict.path, verdict.accepted, verdict.bonus, active
        return self.ops.path_pairs(features, *path, self.root, self.state.lengths, out)

    def _extend(
        self, tokens: Tensor, features: Tensor, counts: Tensor, extent: int | None = None, steps: Tensor | None = None
    ) -> None:  # fmt: skip
        """Feed the first counts [B] pairs of each row, at slots `steps` [B, T]: those behind the committed ones."""
        width, slots = tokens.shape[1], self.state.slots
        if steps is None:
            steps = self.state.lengths[:, None] + self.place[:width]
        if width > self.state.tail:
            steps = steps.clamp(max=slots - 1)  # a padded chunk may reach behind the buffers: the last slot is never committed
        layout = self.ops.attention_layout(self.state.lengths, None, width, width, slots if extent is None else extent, self.group)
        x, residual = self.program.feed(tokens, self.program.fuse(features.to(self.last.dtype)))
        found = self._step(x, residual, steps, steps, layout)
        self.ops.keep_last(*found, counts, self.last, self.readout, self.state.lengths, self.state.bound)

    def _step(self, x: Tensor, residual: Tensor, positions: Tensor, slots: Tensor, layout: object) -> tuple[Tensor, Tensor]:
        return self.program.step(x, residual, Nodes({None: Rotary(*self.tables)}, positions, {None: slots}, {EVERYTHING: layout}))
