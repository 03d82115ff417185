"""A transformers model as a `Target`: one forward pass over tree nodes on a cache with a length per row."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from fastspec.errors import Unsupported
from fastspec.generation.capture import SPENT, CapturedByShape, padded_width
from fastspec.generation.decoder_layer import LayerParts, LayoutKey, Nodes, Rotary, is_plain, one_by_one
from fastspec.generation.layer_state import FullAttentionState
from fastspec.generation.ops import Ops
from fastspec.generation.sequence_state import SequenceState, SharedState
from fastspec.generation.target import Target, prompt_parts, widest_part
from fastspec.generation.tree import TokenTree, Verdict
from fastspec.generation.whole_layers import WholeLayers
from fastspec.kernels.attention.reference import AttentionLayout, Span
from fastspec.patches.hf.cache import SlotCache, cache_argument, sequence_state
from fastspec.patches.hf.compat import dtype_of, layer_inputs
from fastspec.patches.hf.config_fields import layer_count, layer_shapes, recurrent_layers, rope_bound
from fastspec.patches.hf.families import Adapter
from fastspec.patches.hf.layer_weights import reads_outliers, waits_for_host
from fastspec.patches.hf.layers import layer_parts, norm_of, rotary_kinds, rotary_tables, vocabulary_of
from fastspec.patches.hf.limits import check_length, dropped_spans, layer_spans, length_limits, position_rows
from fastspec.patches.hf.modes import decoder_of, is_watched, is_wrapped
from fastspec.patches.hf.parallel import embedding_of

SHIFT_ROOM = 1024
"""Positions behind the last slot that tables of a model with images have."""


def plain_layouts(nodes: Nodes) -> Mapping[LayoutKey, AttentionLayout]:
    """The layouts of a pass in generic mode, whose backend is plain torch: a model's own forward is given masks."""
    return cast(Mapping[LayoutKey, AttentionLayout], nodes.layouts)


def mask_of(layout: AttentionLayout, dtype: torch.dtype) -> Tensor:
    """The mask of a layout as a model's own forward adds it to scores: 0, or the lowest number of the dtype."""
    hidden = ~layout.visible
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, torch.finfo(dtype).min)


def _check_depth(model: Any, depth: int) -> None:
    """Raise Unsupported for a decoder of transformers' own with fewer layers than its configuration says, whose states
    would be handed back though they never run, or numbered otherwise, as after pruning: caches go by the numbers."""
    decoder = decoder_of(model)
    name = type(decoder).__name__
    if not type(decoder).__module__.startswith("transformers."):
        return
    stacks = [len(child) for child in decoder.children() if isinstance(child, nn.ModuleList)]
    numbers = {each.layer_idx for each in decoder.modules() if isinstance(getattr(each, "layer_idx", None), int)}
    there, wanted = max([*stacks, *(number + 1 for number in numbers)], default=0), set(range(depth))
    if stacks and there < depth:  # some layers keep two states
        raise Unsupported(
            f"{name} has {there} layers, and its configuration says {depth} "
            "(num_hidden_layers): let it say how many there are, or leave out assistant="
        )
    if numbers and (not wanted <= numbers or (model.config.is_encoder_decoder and wanted != numbers)):
        raise Unsupported(
            f"the layers of {name} are numbered {', '.join(map(str, sorted(numbers)))} (layer_idx), and its "
            f"configuration says that there are {depth} (num_hidden_layers): number them from 0 on, and let it say "
            "how many there are, or leave out assistant="
        )


class HFModel(Target):
    """The target of one generate call: `rows` sequences of at most `capacity` tokens, and `tail` nodes of a tree behind
    them. With an adapter the layers' modules are called in a plain loop, without one the model's forward as it is, with
    a 4-D mask and a cache that writes into the same buffers.

    `taps` are indices into transformers' hidden_states, the last one before the final norm if `before_norm`; () gives
    the last hidden state after it, None no features. With `drafts` texts may go past what the model reads exactly.
    Where it is `bounded`, layers keep no more of a text than the span that they see. With `likeliest` nobody reads more
    of the logits, see `Target.score`. `first` is that of `SequenceState`. `dropped` is what transformers' cache of the
    call leaves of layers that see the whole text (None: that of the model's own cache): a prompt's tokens see all of
    it, and nodes that span. `early` = (target, k) makes the target's first k layers, final norm and LM head a model on
    its cache.
    """

    def __init__(
        self,
        model: Any,
        adapter: Adapter | None,
        *,
        rows: int,
        capacity: int,
        tail: int,
        ops: Ops,
        taps: tuple[int, ...] | None = None,
        early: tuple[HFModel, int] | None = None,
        drafts: bool = False,
        bounded: bool = True,
        likeliest: bool = False,
        first: int | None = None,
        dropped: Sequence[Span | None] | None = None,
        before_norm: bool = False,
    ) -> None:
        self.depth = layer_count(model.config) if early is None else early[1]
        _check_depth(model, self.depth)
        self.before_norm = before_norm
        self.model, self.adapter, self.taps, self.ops, self.likeliest = model, adapter, taps, ops, likeliest
        self.last_position = rope_bound(model.config)
        self.rows = position_rows(model) if adapter is None else None
        self.spans = layer_spans(model)
        dropped = dropped_spans(model) if dropped is None else dropped
        self.limits = length_limits(model, generic=adapter is None, drafts=drafts)
        check_length(model, self.limits, capacity, tail)
        self.recurrent = recurrent_layers(model.config)
        windows = bounded and any(span is not None for span in self.spans)
        wide = ops.captures and adapter is not None  # a model's own forward may hold the scores of a whole part
        self.widest: int = widest_part(rows, captures=wide, windows=windows) if early is None else early[0].widest
        """Tokens of a prompt that are read at once."""
        self.state: SequenceState
        if early is None:
            self.state = sequence_state(
                model,
                self.spans,
                rows=rows,
                capacity=capacity,
                tail=tail,
                bounded=bounded,
                first=first,
                chunk=padded_width(self.widest) if ops.captures else self.widest,
            )
        else:
            self.state = SharedState(early[0].state, self.depth)
        heads, shapes = model.config.get_text_config().num_attention_heads, layer_shapes(model.config)
        self.layout_keys = [
            LayoutKey(
                self.spans[layer] or dropped[layer], state.ring, heads // shapes[layer][0] if adapter is not None else 1
            )
            if isinstance(state, FullAttentionState)
            else None
            for layer, (state, _) in enumerate(self.state.places)
        ]
        """What every layer sees, None for one with a recurrent state; masks are per query."""
        self.whole_prompts = {
            key for key, span in zip(self.layout_keys, dropped, strict=False) if span is not None and key is not None
        }
        """What layers see whose prompts are read whole, and nodes cut."""
        if adapter is None and self.whole_prompts and len(set(self.layout_keys)) > 1:
            raise Unsupported(
                f"the cache of {type(model).__name__} keeps windows of some layers (sliding_window, layer_types), and "
                "its forward makes one mask for all: set both to None, or leave out assistant="
            )
        self.shift: Tensor | None = None if early is None else early[0].shift
        if early is None and is_wrapped(model):
            self.shift = torch.zeros(rows, dtype=torch.long, device=self.state.lengths.device)
        """[B] what is added to the number of a token for its position, where images in front of it took more or fewer
        positions than tokens."""
        self.tables: dict[str | None, Rotary] = {}
        self.layers: list[LayerParts] = []
        self.captures = ops.captures and adapter is not None and self._can_capture(adapter)
        self.chunks: CapturedByShape[tuple[Tensor, Tensor]] | None = CapturedByShape() if self.captures else None
        self.taking = cache_argument(type(model).forward)
        if adapter is not None:
            self._take(adapter)

    def _can_capture(self, parts: Adapter) -> bool:
        layers = getattr(decoder_of(self.model), parts.layers)
        holders = [getattr(layer, parts.mlp) for layer in layers] + (list(layers) if parts.experts else [])
        waits = any(waits_for_host(parts, holder, self.model, self.ops) for holder in holders)
        return not waits and not any(is_watched(module) or reads_outliers(module) for module in self.model.modules())

    def _take(self, parts: Adapter) -> None:
        """Read the model's parts."""
        decoder, ops = decoder_of(self.model), self.ops
        layers = getattr(decoder, parts.layers)[: self.depth]
        kinds = rotary_kinds(parts, layers, self.model.config.get_text_config())
        self.kinds = tuple(dict.fromkeys(kinds))
        places, keys = self.state.places, self.layout_keys
        for layer, place, key, kind in zip(layers, places, keys, kinds, strict=False):
            self.layers.append(layer_parts(parts, layer, ops, *place, layout=key, rotary=kind))
        named = [getattr(self.model.config, name, None) for name in parts.hides] if self.shift is not None else []
        named = [token for token in named if token is not None]
        self.hidden_tokens = torch.tensor(named, device=self.lengths.device) if named else None
        self.whole = WholeLayers(self.layers, ops)
        self.norm = norm_of(getattr(decoder, parts.norm), ops, parts)
        self.vocabulary = vocabulary_of(self.model, parts, ops, likeliest=self.likeliest)
        self.embed = embedding_of(getattr(decoder, parts.embed), ops)

    def open(self, capacity: int) -> None:
        check_length(self.model, self.limits, capacity, self.state.tail)
        self.state.open(capacity)
        if self.shift is not None and not isinstance(self.state, SharedState):
            self.shift.zero_()

    def move(self, shift: Tensor) -> None:
        """Begin positions shift [B] further than tokens. Raises Unsupported beyond the tables of positions."""
        most = int(shift.max())
        if self.shift is None or most > SHIFT_ROOM:
            raise Unsupported(
                f"positions of this prompt are {most} further than it has tokens, which fastspec's tables have no room "
                f"for ({type(self.model).__name__}): it cannot be combined with assistant="
            )
        self.shift.copy_(shift)

    def _shifted(self, positions: Tensor) -> Tensor:
        if self.shift is None:
            return positions
        return (positions + self.shift[:, None]).clamp(0, None if self.rows is None else self.rows - 1)

    @property
    def lengths(self) -> Tensor:
        return self.state.lengths

    def prefill(self, ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        last: Tensor | None = None
        features = []
        start = self.state.lengths.clone()
        whole = self.chunks is not None and self.fits(self.state.limit)
        done = 0 if whole else int(start.max())  # the host would wait for what the device does before
        parts = list(prompt_parts(ids.shape[1], self.widest))
        many = len(parts) > 1
        self.reserve(done + ids.shape[1])  # at once: passes that were captured in smaller buffers are captured anew
        if self.chunks is not None:
            self.state.reached = self.state.slots  # a captured part writes its padding too
        for begin, width in parts:
            part = ids[:, begin : begin + width]
            want = counts - 1 - begin
            # what fills a shorter row up goes right behind its end: a ring holds no more
            base = start + counts.clamp(max=begin)
            inputs = part, base, want.clamp(0, width - 1), (want + 1).clamp(0, width)
            if self.chunks is None:
                logits, feats = self._chunk(*inputs, done + begin + width)
            else:
                logits, feats = self.chunks(self._chunk, self.state.slots, padded_width(width), *inputs)
                logits, feats = logits.clone(), feats[:, :width].clone() if many else feats[:, :width]
            last = logits if last is None else torch.where(((want >= 0) & (want < width))[:, None], logits, last)
            features.append(feats)
        self.state.lengths += counts
        assert last is not None
        return last, torch.cat(features, 1) if many else features[0]

    def _chunk(
        self, tokens: Tensor, base: Tensor, want: Tensor, counts: Tensor, extent: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Tokens [B, T], the first counts [B] real, from slot base [B] on -> logits of node want [B], features."""
        width = tokens.shape[1]
        steps = base[:, None] + torch.arange(width, device=tokens.device)
        extent = self.state.slots if extent is None else extent
        layouts = self._layouts(base, None, width, extent, whole=self.whole_prompts)
        row = torch.arange(tokens.shape[0], device=tokens.device)
        # A padded chunk may reach behind the buffers, those of rings too: the last slot is never committed.
        positions, slots = steps.clamp(max=self._positions() - 1), self._wrapped(steps.clamp(max=self.state.slots - 1))
        nodes = Nodes(self.tables, self._shifted(positions), slots, layouts, counts=counts)
        return self._forward(tokens, nodes, (row, want))

    def reserve(self, committed: int) -> int:
        committed = self.state.reserve(committed)
        count = self._positions() + (0 if self.shift is None else SHIFT_ROOM)
        if self.adapter is not None and (not self.tables or len(self.tables[self.kinds[0]].cos) < count):
            with SPENT.making():
                self.tables = rotary_tables(self.model, self.adapter, self.kinds, count)
        return committed

    def _positions(self) -> int:
        """Number of positions that are told apart; nodes past the length limit are never emitted."""
        last = self.rows if self.adapter is None else self.last_position
        return min(self.state.slots, self.state.slots if last is None else last)

    def score(self, tree: TokenTree, extent: int) -> tuple[Tensor, Tensor]:
        extent = self.reserve(extent)
        nodes, lengths = tree.tokens.shape[1], self.state.lengths
        layouts = self._layouts(lengths, tree.ancestors, nodes, extent + nodes, tree.depths)
        last, table = self._positions() - 1, self._table()
        positions, slots, embedded = self.ops.tree_input(tree.tokens, tree.depths, lengths, last, table)
        at = self._shifted(positions), self._wrapped(slots)
        return self._forward(
            tree.tokens, Nodes(self.tables, *at, layouts, tree.parents, tree.ancestors), None, embedded
        )

    def _wrapped(self, slots: Tensor) -> dict[int | None, Tensor]:
        """Slots [B, N] by how many a state goes round in."""
        rings = {None, *(key.ring for key in self.layout_keys if key is not None)}
        return {ring: slots if ring is None else slots % ring for ring in rings}

    def _layouts(
        self,
        prefix: Tensor,
        words: Tensor | None,
        nodes: int,
        extent: int,
        depths: Tensor | None = None,
        whole: Collection[LayoutKey] = (),
    ) -> dict[LayoutKey, object]:
        """Attention of nodes behind prefix [B], by what layers see; nothing is cut for those in `whole`."""
        made: dict[LayoutKey, object] = {}
        for key in dict.fromkeys(key for key in self.layout_keys if key is not None):
            if key.span is None or key in whole or extent <= key.span.size:
                uncut = LayoutKey(group=key.group)
                made[key] = made.get(uncut) or self.ops.attention_layout(prefix, words, nodes, nodes, extent, key.group)
                made.setdefault(uncut, made[key])
            else:
                cut = {"span": key.span, "depths": depths, "ring": key.ring}
                made[key] = self.ops.attention_layout(prefix, words, nodes, nodes, extent, key.group, **cut)
        return made

    def _table(self) -> Tensor | None:
        """The embedding's table [V, H] where a kernel may read it; None where the module is called."""
        if self.adapter is None:
            return None
        embed = getattr(decoder_of(self.model), self.adapter.embed)
        plain = is_plain(embed, nn.Embedding) and embed.max_norm is None and embed.weight.is_contiguous()
        return embed.weight.detach() if plain else None

    def _shown(self, tokens: Tensor) -> Tensor:
        """Tokens as the decoder gets to see them."""
        if self.hidden_tokens is None:
            return tokens
        pad = self.model.config.get_text_config().pad_token_id
        return torch.where(torch.isin(tokens, self.hidden_tokens), pad, tokens)

    def commit(self, verdict: Verdict, active: Tensor) -> None:
        self.state.commit(self.ops, verdict, active)

    def rewind(self, lengths: Tensor) -> None:
        """Forget committed tokens from lengths [B] on. Raises Unsupported where layers keep a recurrent state."""
        if not self.rewinds:
            raise Unsupported(
                f"{type(self.model).__name__} keeps a recurrent state, which cannot be taken back: it cannot draft"
            )
        self.state.lengths.copy_(lengths)

    @property
    def rewinds(self) -> bool:
        """True where a text can be made shorter again."""
        return not any(self.recurrent)

    def fits(self, committed: int) -> bool:
        return self.state.fits(committed)

    def bytes(self, committed: int) -> int:
        return self.state.bytes(committed)

    @property
    def bound(self) -> int:
        return self.state.bound

    @property
    def buffers(self) -> Hashable:
        return self.state.slots

    def reusable(self, row: int, known: int, most: int, reached: int) -> int:
        """Tokens of a row that another text can go on from: of a recurrent state all that it has, or none."""
        count = min(known, most) if self.rewinds else int(self.lengths[row])
        whole = self.whole_prompts or count > most
        return 0 if whole or not all(kind.holds(count, reached) for kind in self.state.kinds) else count

    def copy_row(self, row: int, other: Target, count: int, source: int = 0) -> None:
        assert isinstance(other, HFModel)
        self.reserve(count)
        self.state.copy_row(row, other.state, count, source)
        if self.shift is not None and other.shift is not None:
            self.shift[row] = other.shift[source]

    def _forward(
        self, tokens: Tensor, nodes: Nodes, pick: tuple[Tensor, Tensor] | None, embedded: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if self.adapter is None:
            return self._forward_generic(tokens, nodes, pick)
        if embedded is None:
            tokens = self._shown(tokens)
            embedded = self.embed(tokens)
        if self.adapter.embed_scale:
            embedded = embedded * getattr(decoder_of(self.model), self.adapter.embed_scale)
        return self._forward_adapted(embedded, layer_inputs(self.model, tokens, embedded), nodes, pick)

    def _forward_adapted(
        self, total: Tensor, own: Tensor | None, nodes: Nodes, pick: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        taps, width = self.taps or (), total.shape[-1]
        features = total.new_empty(*total.shape[:-1], len(taps) * width)
        parts = [features[..., place * width : (place + 1) * width] for place in range(len(taps))]
        # written there: joining them would be a launch
        kept = {tap: parts[taps.index(tap)] for tap in taps if tap < self.depth}
        change, total = self.whole(total, nodes, kept) or one_by_one(self.layers, total, own, nodes, kept)
        hidden, last = self.norm(total) if change is None else self.norm(change, total)
        kept[self.depth] = last if self.before_norm else hidden
        for tap, part in zip(taps, parts, strict=True):
            if kept[tap] is not part:
                part.copy_(kept[tap])
        logits = self.vocabulary(hidden if pick is None else hidden[pick])
        return logits, features if taps else self._features(kept, hidden)

    def _forward_generic(
        self, tokens: Tensor, nodes: Nodes, pick: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        layouts, dtype = plain_layouts(nodes), dtype_of(self.model)
        masks: dict[LayoutKey | None, Tensor] = {key: mask_of(layout, dtype) for key, layout in layouts.items()}
        extent = max(layout.extent for layout in layouts.values())
        # Models with layers of several kinds take a mask for each; the others take one.
        types, keys = getattr(self.model.config.get_text_config(), "layer_types", None) or (), self.layout_keys
        by_type = {kind: masks[key] for kind, key in zip(types, keys, strict=False)}
        mask = masks[keys[0]] if len(set(keys)) == 1 else by_type
        cache = SlotCache(self.state, self.ops, nodes.slots, extent)
        out = self.model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=nodes.positions,
            use_cache=True,
            output_hidden_states=self.taps is not None,
            return_dict=True,
            **{self.taking: cache},
        )
        given = () if self.taps is None else out.hidden_states
        states = {at: each.to(tokens.device) for at, each in enumerate(given)}
        logits = out.logits.to(tokens.device)  # of a model over several devices they come from the last
        return logits if pick is None else logits[pick], self._features(states, states.get(self.depth, logits))

    def _features(self, kept: dict[int, Tensor], last: Tensor) -> Tensor:
        if self.taps is None:
            return last[..., :0]
        return torch.cat([kept[tap] for tap in self.taps], -1) if self.taps else last
