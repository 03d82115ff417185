"""Drafters with an EAGLE head: its cache of true features, and the static and dynamic trees that are grown from it.

EAGLE (arXiv 2401.15077, section 4): nodes are fixed by their child ranks. A level costs one pass of the head over those
of its nodes that have children; the root's children come from the pass that fed the last accepted tokens.

EAGLE-2 (arXiv 2406.16858, section 4) and EAGLE-3 (arXiv 2503.01840) grow the trees of `dynamic_tree.py`; the root's
children come from that pass too.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastspec.config import Ranks, part_of
from fastspec.default_trees import TreeShape
from fastspec.generation.capture import CapturedByShape, padded_width
from fastspec.generation.decoder_layer import FULL_LAYOUT, LayoutKey, Nodes, Rotary
from fastspec.generation.drafters.base import Drafter, Place, Process, RootsOnly, Traits, Unread
from fastspec.generation.drafters.dynamic_tree import TreeGrowth, refuse_wide
from fastspec.generation.drafters.head_program import Cut, program_of
from fastspec.generation.heads.bound import ONCE, BoundHead, follow
from fastspec.generation.layer_state import FullAttentionState
from fastspec.generation.ops import Ops
from fastspec.generation.sequence_state import SequenceState
from fastspec.generation.target import prompt_parts, widest_part
from fastspec.generation.tree import TokenTree, Verdict
from fastspec.kernels.drafting.reference import own_bits

SKIMMED = 512
"""Tokens of all rows from which on a prompt's keys and values are written alone, and the last pairs read after them:
an estimate, since the weights are read twice then."""
BACKLOG = 1024
"""Tokens of all rows whose features wait for a head in rounds without drafts."""
UNREAD = 4096
"""Tokens of prompts of all rows, padding counted, whose features wait for one that rests: 100 MB where it reads three
states of 4,096 numbers in 16 bits."""


class HeadDrafter(Drafter):
    """Draft state of one generate call: `rows` sequences, `capacity` tokens each, all changed in place.

    A pair (token t+1, feature t) enters the head's cache once, with the target's true feature; tree nodes are fed with
    the head's own states and live in the provisional tail, `grown` slots of it, from which nothing is kept.
    """

    traits = Traits(Place.DEVICE, reusable=True, reads_logits=False)
    observes_roots = True

    def __init__(
        self,
        head: BoundHead,
        nodes: int,
        max_path: int,
        grown: int,
        *,
        rows: int,
        capacity: int,
        ops: Ops,
        cut: Cut | None = None,
    ) -> None:
        config = head.config
        kv_heads = config.num_key_value_heads // (1 if cut is None else cut.group.size())
        weight = head.module.like
        self.attention = FullAttentionState(
            config.num_hidden_layers, rows, kv_heads, config.head_dim, dtype=weight.dtype, device=weight.device
        )
        self.state = SequenceState(
            [self.attention], rows=rows, capacity=capacity, tail=max(grown, max_path), device=weight.device
        )
        self.head, self.ops, self.program = head, ops, program_of(head, ops, self.attention, cut)
        self.nodes, self.max_path, self.grown = nodes, max_path, grown
        self.tables = self.program.tables(self.state.slots)
        self.last, self.readout = (
            torch.zeros(rows, config.hidden_size, dtype=weight.dtype, device=weight.device) for _ in range(2)
        )
        self.root = torch.zeros(rows, dtype=torch.long, device=weight.device)
        self.widest = widest_part(rows, captures=ops.captures)
        # made once: what a round makes anew costs it a launch
        self.place = torch.arange(max(padded_width(self.widest), max_path), device=weight.device)
        self.group = config.num_attention_heads // config.num_key_value_heads
        self.chunks: CapturedByShape[None] | None = CapturedByShape() if ops.captures else None
        self.resumed = 0
        """Pairs that were there before the prompt's own."""

    def open(self, capacity: int) -> None:
        follow(self.head)
        self.state.open(capacity)
        self.resumed = 0

    def reserve(self, committed: int) -> int:
        committed = self.state.reserve(committed)
        if len(self.tables[0]) != self.state.slots:
            self.tables = self.program.tables(self.state.slots)
        return committed

    def fits(self, committed: int) -> bool:
        return self.state.fits(committed)

    def bytes(self, committed: int) -> int:
        return self.state.bytes(committed)

    @property
    def buffers(self) -> Hashable:
        return self.state.slots

    def begin(self, ids: Tensor, counts: Tensor, features: Tensor, root: Tensor) -> None:
        """Feed the prompt's pairs of ids [B, T], counts [B] real tokens, with features [B, T, F]; root [B] follows."""
        before, self.resumed = self.resumed, 0
        self.root.copy_(root)
        self.head.hear(ids, counts)
        following = torch.cat((ids[:, 1:], root[:, None]), 1)
        following = following.scatter(1, (counts - 1).clamp(min=0)[:, None], root[:, None])
        self.reserve(before + ids.shape[1])
        self._read_pairs(following, features, counts, before)

    def _read_pairs(self, tokens: Tensor, features: Tensor, counts: Tensor, before: int) -> None:
        """Feed pairs of tokens [B, T] and features [B, T, F], counts [B] of them, after `before` pairs at most."""
        if self.chunks is not None:
            self.state.reached = self.state.slots  # a captured part writes its padding too
        for start, width in prompt_parts(tokens.shape[1], self.widest):
            part = slice(start, start + width)
            inputs = tokens[:, part], features[:, part], (counts - start).clamp(0, width)
            if self.chunks is None:
                self._feed(*inputs, min(before + start + width, self.state.slots))
            else:
                self.chunks(self._feed, self.state.slots, padded_width(width), *inputs)

    def resting(self, root: Tensor) -> RestingDrafter:
        return RestingDrafter(self, root)

    def take_pairs(self, tokens: Tensor, features: Tensor, counts: Tensor, root: Tensor) -> None:
        """Feed the pairs of rounds without drafts: of tokens [B, T] and features [B, T, F] the first counts [B]; root
        [B] follows. Waits for nothing where passes are captured."""
        if self.head.derived.vocabulary is not None:
            self.head.derived.vocabulary.count(tokens, counts)
        before = 0 if self.chunks is not None else int(self.state.lengths.max())
        self.reserve(before + tokens.shape[1])
        self._read_pairs(tokens, features, counts, before)
        self.root.copy_(root)

    def resume(self, other: Drafter, source: int, count: int) -> None:
        self.move_row(0, other, source, count)
        self.resumed = count

    def move_row(self, row: int, other: Drafter, source: int, count: int) -> None:
        assert isinstance(other, HeadDrafter)
        self.reserve(count)
        self.state.copy_row(row, other.state, count, source)
        for mine, theirs in ((self.root, other.root), (self.last, other.last), (self.readout, other.readout)):
            mine[row] = theirs[source]

    def observe(
        self, tree: TokenTree, verdict: Verdict, logits: Tensor, features: Tensor, active: Tensor, extent: int
    ) -> None:
        """Feed the accepted path's pairs with the target's features [B, N, F]; rows that are not active stay put."""
        tokens, vocabulary = verdict.tokens(tree), self.head.derived.vocabulary
        heard = None if vocabulary is None else (tokens, vocabulary.counts, ONCE)
        taken, counts, steps = self._pairs(features, verdict, active, heard=heard)
        self._extend(tokens, taken, counts, self.reserve(extent) + self.max_path, steps)

    def _pairs(
        self,
        features: Tensor,
        verdict: Verdict,
        active: Tensor,
        out: tuple[Tensor, Tensor] | None = None,
        heard: tuple[Tensor, Tensor, int] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`Ops.path_pairs` of a verdict, whose bonus token becomes the root of the next tree."""
        path = verdict.path, verdict.accepted, verdict.bonus, active
        return self.ops.path_pairs(features, *path, self.root, self.state.lengths, out, heard)

    def _feed(self, tokens: Tensor, features: Tensor, counts: Tensor, extent: int | None = None) -> None:
        """`_extend` of a text that is drafted for after its last pair alone: of the others a head of one layer writes
        keys and values and nothing else."""
        mixer = self.program.writes
        if mixer is None or tokens.numel() < SKIMMED:
            self._extend(tokens, features, counts, extent)
            return
        x, _ = self.program.feed(tokens, self.program.fuse(features.to(self.last.dtype)))
        steps = self._steps(tokens.shape[1])
        mixer.write(x, self._nodes(steps, steps, {}))
        others = (counts - 1).clamp(min=0)
        self.state.grow(others)
        row = torch.arange(len(others), device=others.device)
        self._extend(tokens[row, others][:, None], features[row, others][:, None], counts.clamp(max=1), extent)

    def _extend(
        self, tokens: Tensor, features: Tensor, counts: Tensor, extent: int | None = None, steps: Tensor | None = None
    ) -> None:
        """Feed the first counts [B] pairs of each row, at slots `steps` [B, T]: those after the committed ones."""
        found = self._read(tokens, features, extent, steps)
        self.ops.keep_last(*found, counts, self.last, self.readout, self.state.lengths, self.state.bound)

    def _read(
        self, tokens: Tensor, features: Tensor, extent: int | None, steps: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        width, slots = tokens.shape[1], self.state.slots
        steps = self._steps(width) if steps is None else steps
        layout = self.ops.attention_layout(
            self.state.lengths, None, width, width, slots if extent is None else extent, self.group
        )
        x, residual = self.program.feed(tokens, self.program.fuse(features.to(self.last.dtype)))
        return self._step(x, residual, steps, steps, layout)

    def _steps(self, width: int) -> Tensor:
        """The next slots [B, T] of every row."""
        steps = self.state.lengths[:, None] + self.place[:width]
        # a padded chunk may reach beyond the buffers: the last slot is never committed
        return steps.clamp(max=self.state.slots - 1) if width > self.state.tail else steps

    def readouts(self, tokens: Tensor, features: Tensor) -> Tensor:
        """States that the LM head reads after each of the pairs of a text, [B, T, H]; none of them is kept."""
        return self._read(tokens, features, self.reserve(tokens.shape[1]), None)[1]

    def _step(
        self, x: Tensor, residual: Tensor, positions: Tensor, slots: Tensor, layout: object
    ) -> tuple[Tensor, Tensor]:
        return self.program.step(x, residual, self._nodes(positions, slots, {FULL_LAYOUT: layout}))

    def _nodes(self, positions: Tensor, slots: Tensor, layouts: Mapping[LayoutKey, object]) -> Nodes:
        return Nodes({None: Rotary(*self.tables)}, positions, {None: slots}, layouts)


class RestingDrafter(RootsOnly):
    """A head's drafter in rounds without drafts, on the roots root [B] of all rounds: it keeps the pairs of up to
    `backlog` of them on the device, for the head to read in one pass, and before that the prompts that it took."""

    drafter: HeadDrafter
    buffers = None

    def __init__(self, drafter: HeadDrafter, root: Tensor) -> None:
        super().__init__(drafter, root)
        config, rows = drafter.head.config, len(root)
        width = len(config.taps) * config.target_hidden_size if config.kind == "eagle3" else config.hidden_size
        self.backlog = min(self.backlog, max(16, BACKLOG // rows))
        self.features = drafter.last.new_zeros(rows, self.backlog, width)
        """Features [B, n, F] of the last token before each of the rounds."""
        self.tokens = root.new_zeros(rows, self.backlog)
        """Tokens [B, n] that the rounds emitted."""
        self.counts = root.new_zeros(rows)
        """Pairs [B] that are kept of each row."""

    def takes(self, tokens: int) -> bool:
        return sum(each.ids.numel() for each in self.unread) + tokens <= UNREAD

    def observe(
        self, tree: TokenTree, verdict: Verdict, logits: Tensor, features: Tensor, active: Tensor, extent: int
    ) -> None:
        self.drafter.ops.keep_pair(features, verdict.bonus, active, self.counts, self.features, self.tokens)

    def hand_over(self, rounds: int) -> None:
        while self.unread:
            self._begin(self.unread.pop(0))
        if rounds > 0:
            self.drafter.take_pairs(self.tokens[:, :rounds], self.features[:, :rounds], self.counts, self.root)
            self.counts.zero_()

    def _begin(self, unread: Unread) -> None:
        """Let the rows that took prompts begin with them, or refuse these. Another prompt may be on its way in their
        reader."""
        reader = unread.reader
        assert isinstance(reader, HeadDrafter)
        reader.open(reader.state.limit)
        try:
            reader.begin(unread.ids, unread.counts, unread.features, unread.root)
            for row, (source, count) in unread.rows.items():
                self.drafter.move_row(row, reader, source, count)
        except Exception as error:
            for row in unread.rows:
                unread.refuse(row, error)
        reader.open(reader.state.limit)

    def forget(self, row: int | None = None) -> None:
        rows = slice(None) if row is None else slice(row, row + 1)
        vocabulary = self.drafter.head.derived.vocabulary
        dropped = [each for each in self.unread if row is None or each.rows.keys() == {row}]
        self.unread = [each for each in self.unread if each not in dropped]
        for each in self.unread:
            each.rows = {held: source for held, source in each.rows.items() if held != row}
        if vocabulary is not None:
            for each in dropped:
                vocabulary.count(each.ids, each.counts)
            vocabulary.count(self.tokens[rows], self.counts[rows])
        self.counts[rows].zero_()


@dataclass(frozen=True, slots=True)
class Level:
    """One pass over the n nodes of a level that have children, of each of which the `count` c likeliest (or first
    drawn) tokens are taken: `children` [m] picks the next level's m nodes from the n * c. Of those, `fed` [n'] have
    children themselves, below the nodes `above` [n'] of this pass; they take the tail's slots from `start` on and see
    `words` [n', W]."""

    count: int
    children: Tensor
    fed: Tensor
    above: Tensor
    start: int
    words: Tensor


def lay_out(paths: tuple[Ranks, ...], *, drawn: bool, device: torch.device) -> tuple[list[Level], list[int]]:
    """The levels of a tree, and the parent of every node (the root is node 0), from its paths, breadth first. Where
    children are drawn, gaps between ranks close."""
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
    """Draw `count` tokens one after another without replacement: probs [..., V] fp32, noise [..., V] independent
    Exp(1).

    The tokens come in the order in which exponential clocks of rates `probs` ring. Returns ids [..., count] and q [...,
    count, V], the distribution of each draw: `probs` without the earlier draws, renormalised. Where fewer than `count`
    tokens have a probability, the rest of q is zeros and the rest of ids were not drawn.
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

    The child of rank r is its parent's r-th likeliest token. With `process`, children are drawn without replacement
    from the head's distribution, processed so.
    """

    def __init__(
        self,
        head: BoundHead,
        paths: tuple[Ranks, ...],
        *,
        rows: int,
        capacity: int,
        ops: Ops,
        process: Process | None = None,
        cut: Cut | None = None,
    ) -> None:
        levels, parents = lay_out(paths, drawn=process is not None, device=head.module.like.device)
        self.paths, self.process, self.traits = paths, process, replace(self.traits, draws=process is not None)
        sizes = len(parents), len(levels) + 1, sum(len(level.fed) for level in levels)
        super().__init__(head, *sizes, rows=rows, capacity=capacity, ops=ops, cut=cut)
        self._grows(levels, parents)

    def _grows(self, levels: list[Level], parents: list[int]) -> None:
        """Draft trees of these levels, and of nodes with these parents."""
        self.levels, self.nodes, self.max_path = levels, len(parents), len(levels) + 1
        self.grown = sum(len(level.fed) for level in levels)
        above = torch.tensor([parents], device=self.root.device).expand(len(self.root), -1).contiguous()
        self.tree = TokenTree.from_parents(torch.zeros_like(above), above)

    def sized(self, shape: TreeShape) -> Drafter:
        other = copy.copy(self)
        part = part_of(self.paths, shape.total_tokens)
        other._grows(*lay_out(part, drawn=self.process is not None, device=self.root.device))
        return other

    def propose(self, extent: int) -> TokenTree:
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
            layout = self.ops.attention_layout(
                self.state.lengths, words, width, level.start + width, extent, self.group
            )
            positions = (self.state.lengths + depth)[:, None].expand(-1, width)
            slots = self.state.lengths[:, None] + steps
            x, residual = self.program.feed(below[:, level.fed], hidden[:, level.above])
            hidden, readout = self._step(x, residual, positions, slots, layout)
        drawn = torch.cat((torch.zeros_like(q[0][:, :1]), *q), 1) if q else None
        tree = self.tree
        return TokenTree(torch.cat(tokens, 1), tree.parents, tree.depths, tree.ancestors, self.max_path, drawn)

    def _children(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor | None]:
        """Logits [B, n, V] -> ids [B, n, count] by rank and, where they are drawn, q [B, n, count, V]."""
        if self.process is None:
            return self.ops.topk_logprobs(logits, count)[1], None
        scores = self.process(logits.flatten(0, 1).float()).view(logits.shape)
        probs = torch.softmax(scores, -1)
        return draw_distinct(probs, torch.empty_like(probs).exponential_(), count)


class EagleDrafter(HeadDrafter):
    """Dynamic trees of one `shape`, the drafter of EAGLE-2 and EAGLE-3."""

    def __init__(
        self, head: BoundHead, shape: TreeShape, *, rows: int, capacity: int, ops: Ops, cut: Cut | None = None
    ) -> None:
        refuse_wide(shape, ops)
        sizes = shape.total_tokens, shape.max_path, shape.depth * shape.top_k
        super().__init__(head, *sizes, rows=rows, capacity=capacity, ops=ops, cut=cut)
        self._grows(shape)

    def _grows(self, shape: TreeShape) -> None:
        """Draft trees of this shape."""
        rows, device = len(self.root), self.root.device
        self.shape, self.nodes, self.max_path = shape, shape.total_tokens, shape.max_path
        self.grown = shape.depth * shape.top_k
        self.growth = TreeGrowth(shape, rows=rows, device=device)
        # of the nodes that the passes feed, in their order
        self.fed_depths = (torch.arange(self.grown, device=device) // shape.top_k).expand(rows, -1)

    def sized(self, shape: TreeShape) -> Drafter:
        assert max(shape.depth * shape.top_k, shape.max_path) <= self.state.tail
        other = copy.copy(self)
        other._grows(shape)
        return other

    def propose(self, extent: int) -> TokenTree:
        grown = self._grow(self.reserve(extent) + self.grown)
        return self.growth.tree(self.ops, grown, self.root, self.nodes, self.max_path)

    def _grow(self, extent: int) -> tuple[Tensor, Tensor, Tensor]:
        """The candidates of `TreeGrowth.grow`."""
        shape, ops, k = self.shape, self.ops, self.shape.top_k
        lengths, fed = self.state.lengths, self.fed_depths
        places = ops.tree_input(fed, fed, lengths, self.state.slots - 1, None)[:2]  # without a table no tokens are read
        positions, slots = (x.unflatten(1, (shape.depth, k)).unbind(1) for x in places)  # depth times [B, k]
        hidden, words = self.last[:, None], self.growth.no_words

        def deeper(level: int, tokens: Tensor, index: Tensor) -> Tensor:
            nonlocal hidden, words
            x, residual, words = self.program.feed_frontier(tokens, index, hidden, words, level * k)
            layout = ops.attention_layout(lengths, words, k, (level + 1) * k, extent, self.group)
            hidden, readout = self._step(x, residual, positions[level], slots[level], layout)
            return readout

        return self.growth.grow(self.program.expand, self.readout[:, None], deeper, self.mark)
