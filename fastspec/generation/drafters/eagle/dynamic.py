"""Drafting with an EAGLE head: an append-only cache of true features, and a dynamic tree grown from it each round.

EAGLE-2 (arXiv 2406.16858, section 4) and EAGLE-3 (arXiv 2503.01840): `top_k` children of the root, then `depth` passes
that expand the `top_k` best nodes of the last level, then a re-ranking of all candidates by cumulative log-probability.
The static trees of EAGLE-1 are in `static.py`.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import pairwise, zip_longest

import torch
from torch import Tensor

from fastspec.config import TreeShape
from fastspec.generation.capture import CapturedByShape, padded_width
from fastspec.generation.drafters.base import Drafter, Place, Traits
from fastspec.generation.drafters.eagle.head import EagleHead
from fastspec.generation.drafters.eagle.program import HeadProgram
from fastspec.generation.layers.mixers import Nodes
from fastspec.generation.ops import Ops
from fastspec.generation.state.attention import FullAttentionState
from fastspec.generation.state.sequence import SequenceState
from fastspec.generation.tree import TokenTree, Verdict
from fastspec.kernels.reference import Candidates

PREFILL_CHUNK = 512
FUSED_TOP_K = 16
"""Children of a node that the draft phase in one launch expands at most."""


class HeadState(Drafter):
    """Draft state of one generate call: `rows` sequences, `capacity` tokens each. All of it is changed in place, so that a
    captured round finds it again. What grows a tree from it is the subclass's `propose`.

    A pair (token t+1, feature t) enters the head's cache once, with the target's true feature; tree nodes are fed with the
    head's own states and live in the provisional tail, `grown` slots of it, from which nothing is kept.
    """

    traits = Traits(Place.DEVICE, reusable=True)

    def __init__(self, head: EagleHead, *, nodes: int, max_path: int, grown: int, rows: int, capacity: int, ops: Ops) -> None:
        config = head.config
        weight = head.fc.weight
        self.attention = FullAttentionState(
            config.num_hidden_layers, rows, config.num_key_value_heads, config.head_dim, dtype=weight.dtype, device=weight.device
        )
        self.state = SequenceState([self.attention], rows=rows, capacity=capacity, tail=max(grown, max_path), device=weight.device)
        self.head, self.ops, self.program = head, ops, HeadProgram(head, ops, self.attention)
        self.nodes, self.max_path, self.grown = nodes, max_path, grown
        self.tables = self.program.tables(self.state.slots)
        self.last, self.readout = (torch.zeros(rows, config.hidden_size, dtype=weight.dtype, device=weight.device) for _ in range(2))
        self.root = torch.zeros(rows, dtype=torch.long, device=weight.device)
        # made once: what a round makes anew costs it a launch
        self.place = torch.arange(max(padded_width(PREFILL_CHUNK), max_path), device=weight.device)
        self.group = config.num_attention_heads // config.num_key_value_heads
        self.chunks: CapturedByShape[None] | None = CapturedByShape() if ops.captures else None

    def open(self, capacity: int) -> None:
        """Begin another call of the same rows."""
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
        for start in range(0, ids.shape[1], PREFILL_CHUNK):
            part = slice(start, start + PREFILL_CHUNK)
            width = following[:, part].shape[1]
            self.reserve(start + width)
            inputs = following[:, part], features[:, part], (counts - start).clamp(0, width)
            if self.chunks is None:
                self._extend(*inputs, start + width)
            else:
                self.chunks(self._extend, self.state.slots, padded_width(width), *inputs)

    def copy_row(self, row: int, other: Drafter, count: int) -> None:
        """Begin a row anew with the only row of another state, which has begun with `count` pairs."""
        assert isinstance(other, HeadState)
        self.reserve(count)
        self.state.copy_row(row, other.state, count)
        for mine, theirs in ((self.root, other.root), (self.last, other.last), (self.readout, other.readout)):
            mine[row] = theirs[0]

    def observe(self, tree: TokenTree, verdict: Verdict, logits: Tensor, features: Tensor, active: Tensor, extent: int) -> None:
        """Feed the accepted path's pairs with the target's features [B, N, F]; rows that are not active stay put."""
        taken, counts, steps = self._pairs(features, verdict, active)
        self._extend(verdict.tokens(tree), taken, counts, self.reserve(extent) + self.max_path, steps)

    def _pairs(
        self, features: Tensor, verdict: Verdict, active: Tensor, out: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`Ops.path_pairs` of a verdict, whose bonus token becomes the root of the next tree."""
        said = verdict.path, verdict.accepted, verdict.bonus, active
        return self.ops.path_pairs(features, *said, self.root, self.state.lengths, out)

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
        return self.program.step(x, residual, Nodes(*self.tables, positions, slots, layout))


class EagleDrafter(HeadState):
    """Dynamic trees of one `shape`, the drafter of EAGLE-2 and EAGLE-3; `fused` drafts in one launch where the backend can."""

    def __init__(self, head: EagleHead, shape: TreeShape, *, rows: int, capacity: int, ops: Ops, fused: bool = False) -> None:
        grown = shape.depth * shape.top_k
        super().__init__(
            head, nodes=shape.total_tokens, max_path=shape.max_path, grown=grown, rows=rows, capacity=capacity, ops=ops
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
        self.phase = FusedPhase.of(self) if fused else None

    def open(self, capacity: int) -> None:
        """Begin another call of the same rows."""
        super().open(capacity)
        if self.phase is not None:
            self.phase.counts.zero_()

    def copy_row(self, row: int, other: Drafter, count: int) -> None:
        """Begin a row anew, see `HeadState.copy_row`: it has no pairs that wait for the next launch."""
        super().copy_row(row, other, count)
        if self.phase is not None:
            self.phase.counts[row] = 0

    @property
    def fused(self) -> bool:
        """Whether a draft phase is one launch."""
        return self.phase is not None

    def observe(self, tree: TokenTree, verdict: Verdict, logits: Tensor, features: Tensor, active: Tensor, extent: int) -> None:
        """Feed the accepted path's pairs, or keep them for the launch that drafts the next tree."""
        if self.phase is None:
            super().observe(tree, verdict, logits, features, active, extent)
        else:
            self.phase.tokens.copy_(verdict.tokens(tree))
            self._pairs(features, verdict, active, (self.phase.features, self.phase.counts))

    def propose(self, extent: int) -> TokenTree:
        """Grow the next tree from the last true state; `extent` bounds the committed pairs of any row."""
        extent = self.reserve(extent) + self.grown
        self.scores, tokens, parents = self._grow(extent) if self.phase is None else self.phase.run(self)
        kept, above, depths, ancestors = self.ops.tree_build(self.scores, tokens, parents, self.flat_depths, self.root, self.nodes)
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


class FusedPhase:
    """The draft phase as one launch: it feeds the pairs that the last round accepted, and grows the tree."""

    def __init__(self, drafter: EagleDrafter) -> None:
        kernel, program, shape = drafter.ops.fused, drafter.program, drafter.shape
        rows, width = drafter.root.shape[0], program.head.fc.in_features
        self.kernel = kernel
        packed = program.packed()
        assert packed is not None
        self.weights = kernel.draft_weights(program.head, *packed)
        self.space = kernel.draft_space(self.weights, rows=rows, pairs=shape.max_path, top_k=shape.top_k, depth=shape.depth)
        device = drafter.root.device
        self.tokens = torch.zeros(rows, shape.max_path, dtype=torch.long, device=device)
        self.features = torch.zeros(rows, shape.max_path, width, dtype=drafter.last.dtype, device=device)
        self.counts = torch.zeros(rows, dtype=torch.long, device=device)

    @classmethod
    def of(cls, drafter: EagleDrafter) -> FusedPhase | None:
        """The phase of a drafter whose head, weights and backend allow it."""
        kernel, program = drafter.ops.fused, drafter.program
        fits = kernel is not None and drafter.shape.top_k <= FUSED_TOP_K and kernel.supports(program.config)
        plain = type(program.head.__dict__["_embed_tokens"]) is torch.nn.Embedding
        return cls(drafter) if fits and plain and program.packed() is not None else None

    def run(self, drafter: EagleDrafter) -> tuple[Tensor, Tensor, Tensor]:
        """Candidates, as `EagleDrafter._grow`."""
        state, k, v = drafter.state, drafter.attention.k[0], drafter.attention.v[0]
        return self.kernel.draft(
            self.weights, self.space, self.tokens, self.features, self.counts, drafter.last, drafter.readout, k, v,
            state.lengths, *drafter.tables, state.bound,
        )  # fmt: skip
