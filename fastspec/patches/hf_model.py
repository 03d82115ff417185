"""A transformers model as a `LanguageModel`: one forward pass over tree nodes on a cache with a length per row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastspec.errors import Unsupported
from fastspec.generation.cache import LayerView, TreeCache
from fastspec.generation.protocols import Ops
from fastspec.generation.tree import TokenTree, Verdict
from fastspec.patches.adapters import Adapter, is_foreign
from fastspec.patches.compat import cache_geometry, rope_bound

PREFILL_CHUNK = 512


class HFModel:
    """The target of one generate call: `rows` sequences of at most `capacity` tokens, and `tail` nodes of a tree behind them.

    `taps` are indices into transformers' hidden_states; () gives the last hidden state after the final norm; None leaves
    the features empty. With an adapter the layers' own modules are called in a plain loop; without one the model's forward
    runs as it is, with a 4-D mask and a cache that writes into the same buffers.

    `early` = (target, k) makes the target's own first k layers, its final norm and its LM head a model on the target's cache.
    """

    def __init__(
        self, model: Any, adapter: Adapter | None, *, rows: int, capacity: int, tail: int, taps: tuple[int, ...] | None, ops: Ops,
        early: tuple[HFModel, int] | None = None,
    ) -> None:  # fmt: skip
        self.model, self.adapter, self.taps, self.ops = model, adapter, taps, ops
        bound = rope_bound(model.config)
        if bound is not None and capacity > bound:
            raise Unsupported(
                f"the call may reach {capacity} tokens, and past {bound} this model's rotary frequencies depend on the length of the text "
                f"({model.config.get_text_config().rope_parameters['rope_type']}): ask for at most {bound}, prompt included"
            )
        layers, kv_heads, size = cache_geometry(model.config)
        self.cache: TreeCache
        if early is None:
            self.depth = layers
            self.cache = TreeCache(layers, rows, kv_heads, capacity, tail, size, dtype=model.dtype, device=model.device)
        else:
            self.depth = early[1]
            self.cache = LayerView(early[0].cache, self.depth)
        heads = model.config.get_text_config().num_attention_heads
        self.group = heads // kv_heads if adapter is not None else 1  # transformers' own attention takes a mask per query

    @property
    def lengths(self) -> Tensor:
        """[B] int64 committed tokens of each row."""
        return self.cache.lengths

    def prefill(self, ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Append ids [B, T], the first counts [B] of each row real, in chunks -> last logits [B, V], features [B, T, F]."""
        row = torch.arange(ids.shape[0], device=ids.device)
        last: Tensor | None = None
        features = []
        start = self.cache.lengths.clone()
        done = int(start.max())
        for begin in range(0, ids.shape[1], PREFILL_CHUNK):
            part = ids[:, begin : begin + PREFILL_CHUNK]
            width = part.shape[1]
            steps = start[:, None] + begin + torch.arange(width, device=ids.device)
            self.cache.reserve(done + begin + width)
            layout = self.ops.attention_layout(start + begin, None, width, width, done + begin + width, self.group)
            want = counts - 1 - begin
            inside = (want >= 0) & (want < width)
            logits, feats = self._forward(part, steps, steps, layout, (row, want.clamp(0, width - 1)))
            last = logits if last is None else torch.where(inside[:, None], logits, last)
            features.append(feats)
        self.cache.lengths += counts
        assert last is not None
        return last, torch.cat(features, 1)

    def score(self, tree: TokenTree, extent: int) -> tuple[Tensor, Tensor]:
        """Score every node of a tree -> logits [B, N, V], features [B, N, F]."""
        nodes = tree.tokens.shape[1]
        base = self.cache.lengths[:, None]
        slots = base + torch.arange(nodes, device=base.device)
        layout = self.ops.attention_layout(
            self.cache.lengths, tree.ancestors, nodes, nodes, self.cache.reserve(extent) + nodes, self.group
        )
        # Nodes past the length limit are never emitted, and a position table may end there.
        positions = (base + tree.depths).clamp(max=self.cache.limit - 1)
        logits, features = self._forward(tree.tokens, positions, slots, layout, None)
        return logits, features

    def commit(self, verdict: Verdict, active: Tensor) -> None:
        """Keep the accepted path of the active rows."""
        self.cache.commit(self.ops, verdict, active)

    def rewind(self, lengths: Tensor) -> None:
        """Forget every row's committed tokens from lengths [B] on."""
        self.cache.lengths.copy_(lengths)

    def _forward(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, layout: Any, pick: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        if self.adapter is None:
            return self._forward_generic(tokens, positions, slots, layout, pick)
        return self._forward_adapted(self.adapter, tokens, positions, slots, layout, pick)

    def _forward_adapted(
        self, parts: Adapter, tokens: Tensor, positions: Tensor, slots: Tensor, layout: Any, pick: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        decoder = getattr(self.model, parts.decoder)
        hidden = getattr(decoder, parts.embed)(tokens)
        cos, sin = getattr(decoder, parts.rotary)(hidden, positions)
        kept = {}
        for index, layer in enumerate(getattr(decoder, parts.layers)[: self.depth]):
            if self.taps and index in self.taps:
                kept[index] = hidden
            hidden = hidden + self._attention(parts, layer, index, getattr(layer, parts.input_norm)(hidden), cos, sin, slots, layout)
            hidden = hidden + self._mlp(parts, getattr(layer, parts.mlp), getattr(layer, parts.mlp_norm)(hidden))
        hidden = getattr(decoder, parts.norm)(hidden)
        kept[self.depth] = hidden
        logits = self._linear(getattr(self.model, parts.lm_head), hidden if pick is None else hidden[pick])
        return logits, self._features(kept, hidden)

    def _attention(
        self, parts: Adapter, layer: nn.Module, index: int, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, layout: Any
    ) -> Tensor:
        attn: Any = getattr(layer, parts.attention)
        q, k, v = (self._linear(proj, x).unflatten(-1, (-1, attn.head_dim)) for proj in (attn.q_proj, attn.k_proj, attn.v_proj))
        if parts.qk_norm:
            q, k = attn.q_norm(q), attn.k_norm(k)
        q, k = self.ops.rope(q, cos, sin), self.ops.rope(k, cos, sin)
        self.cache.write(self.ops, index, k, v, slots)
        return self._linear(attn.o_proj, self.cache.attend(self.ops, index, q, layout, attn.scaling).flatten(-2))

    def _mlp(self, parts: Adapter, mlp: Any, x: Tensor) -> Tensor:
        if parts.gated_mlp and hasattr(mlp, "gate_proj") and not is_foreign(mlp):
            return self._linear(mlp.down_proj, mlp.act_fn(self._linear(mlp.gate_proj, x)) * self._linear(mlp.up_proj, x))
        mixed = mlp(x)
        return mixed[0] if isinstance(mixed, tuple) else mixed

    def _linear(self, module: nn.Module, x: Tensor) -> Tensor:
        """A plain linear layer through the backend; one that is quantised, hooked or replaced keeps its own forward."""
        if type(module) is nn.Linear and not is_foreign(module):
            return self.ops.linear(x, module.weight, module.bias)
        return module(x)

    def _forward_generic(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, layout: Any, pick: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        from fastspec.patches.cache import SlotCache

        hidden_low = torch.finfo(self.model.dtype).min
        mask = torch.zeros(layout.visible.shape, dtype=self.model.dtype, device=tokens.device).masked_fill_(~layout.visible, hidden_low)
        out = self.model(
            input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=True,
            past_key_values=SlotCache(self.cache, self.ops, slots, layout.extent), output_hidden_states=self.taps is not None,
            return_dict=True,
        )  # fmt: skip
        states = dict(enumerate(out.hidden_states)) if self.taps is not None else {}
        return out.logits if pick is None else out.logits[pick], self._features(states, states.get(self.depth, out.logits))

    def _features(self, kept: dict[int, Tensor], last: Tensor) -> Tensor:
        if self.taps is None:
            return last[..., :0]
        return torch.cat([kept[tap] for tap in self.taps], -1) if self.taps else last
