"""Encoder-decoder models: what the encoder read, and the decoder as a `Target`. Its modules are called in a plain loop,
since its own forward derives positions from the length of its cache, one for all rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.masking_utils import create_bidirectional_mask

from fastspec.errors import Unsupported
from fastspec.generation.decoder_layer import FULL_LAYOUT, Nodes
from fastspec.generation.drafters.base import Decoding
from fastspec.generation.layer_state import LayerCache
from fastspec.generation.ops import Ops
from fastspec.generation.target import Source
from fastspec.patches.hf.cache import CACHE, SlotCache, cache_argument, fill_cache, given_cache
from fastspec.patches.hf.compat import device_of
from fastspec.patches.hf.config_fields import table_rows
from fastspec.patches.hf.families import SEQ2SEQ
from fastspec.patches.hf.model import HFModel, mask_of, plain_layouts


def refuse_seq2seq(model: Any, decoding: Any, given: dict[str, Any]) -> None:
    """Refuse, by name, what an encoder-decoder model cannot be asked for with an assistant."""
    if isinstance(decoding, Decoding) and decoding.taps is not None:
        raise Unsupported(
            f"assistant {decoding.name!r} drafts from hidden states, which fastspec reads from decoder-only models, "
            f'and {type(model).__name__} is an encoder-decoder model: use "nasd" or "speculative"'
        )
    if given_cache(given) is not None:
        raise Unsupported(f"{CACHE} cannot be combined with assistant= on an encoder-decoder model: leave it out")


def read_source(model: Any, given: dict[str, Any], prepared: dict[str, Any], rows: int) -> Source:
    """The source of a call of `rows` rows, from its own arguments and what transformers' `generate` made of them."""
    device = device_of(model)
    ids = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs")
    if ids is not None:
        tokens = ids.dim() == 2 and not ids.is_floating_point()
        ids = ids.to(device).repeat_interleave(rows // max(1, ids.shape[0]), 0) if tokens else None
    mask, parts = prepared.get("attention_mask"), (model.get_encoder(), model.get_decoder())
    encoder, decoder = (table_rows(part.get_input_embeddings(), part.config) for part in parts)
    shared = getattr(model.config, "share_encoder_decoder_embeddings", True) and encoder == decoder
    return Source(prepared["encoder_outputs"][0], None if mask is None else mask.to(device), ids, shared)


def encode(model: Any, source: Source) -> Source:
    """The source as a draft model's own encoder reads it; tokens without an embedding there are shown as another."""
    if source.ids is None:
        raise Unsupported(
            "the draft model of assistant 'speculative' reads the source itself: pass input_ids besides encoder_outputs"
        )
    encoder = model.get_encoder()
    known = source.ids.clamp(max=table_rows(encoder.get_input_embeddings(), encoder.config) - 1)
    return Source(encoder(input_ids=known, attention_mask=source.mask, return_dict=True)[0], source.mask, known)


class DecoderCache(SlotCache):
    """A SlotCache of a decoder whose positions were given: the length that its modules ask for decides nothing."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The attended slots, which the host knows."""
        return self.extent


class Seq2SeqModel(HFModel):
    """The decoder of an encoder-decoder model, after a source. The cache holds keys and values of self-attention; those
    of cross-attention are made by the first pass."""

    def __init__(
        self, model: Any, source: Source, *, rows: int, capacity: int, tail: int, ops: Ops, drafts: bool = False
    ) -> None:
        super().__init__(model, None, rows=rows, capacity=capacity, tail=tail, ops=ops, drafts=drafts)
        self.parts, self.source = SEQ2SEQ[model.config.model_type], source
        self.decoder = model.get_decoder()
        self.cross = DynamicCache()
        layers = self.decoder.block if self.parts.relative else self.decoder.layers
        self.taking = cache_argument(type(layers[0]).forward)

    def prefill(self, ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Append first tokens ids [B, T], counts [B] real -> last logits [B, V], no features."""
        padding = getattr(getattr(self.decoder, "embed_positions", None), "padding_idx", None)
        if self.parts.counted and ids.shape[1] > 1 and padding in ids.flatten().tolist():
            raise Unsupported(
                f"decoder_input_ids holds the padding token {padding}, which {type(self.model).__name__} gives no "
                "position"
            )
        return super().prefill(ids, counts)

    def export(self, cache: EncoderDecoderCache, made: list[LayerCache]) -> None:
        """Fill transformers' cache with what layers have `made` of the decoder's tokens, and of the source."""
        fill_cache(cache.self_attention_cache, 0, made)
        for layer, held in enumerate(self.cross.layers):
            cache.cross_attention_cache.update(held.keys, held.values, layer)
            cache.is_updated[layer] = True

    def _forward_generic(
        self, tokens: Tensor, nodes: Nodes, pick: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        hidden, layout = self._embed(tokens, nodes.positions), plain_layouts(nodes)[FULL_LAYOUT]
        states, mask = self.source.states, mask_of(layout, hidden.dtype)
        about = {"inputs_embeds": hidden, "attention_mask": self.source.mask, "encoder_hidden_states": states}
        cross = create_bidirectional_mask(config=self.decoder.config, **about)
        cache = EncoderDecoderCache(DecoderCache(self.state, self.ops, nodes.slots, layout.extent), self.cross)
        if self.parts.relative:
            bias, across = self._bias(nodes.positions, nodes.slots[None], layout.extent), None
            for block in self.decoder.block:
                hidden, bias, across = block(hidden, mask, bias, states, cross, across, **{self.taking: cache})[:3]
        else:
            for layer in self.decoder.layers:
                out = layer(hidden, mask, states, encoder_attention_mask=cross, use_cache=True, **{self.taking: cache})
                hidden = out[0] if isinstance(out, tuple) else out
        if self.parts.final:
            hidden = getattr(self.decoder, self.parts.final)(hidden)
        logits = self._head(hidden if pick is None else hidden[pick])
        return logits, hidden[..., :0]

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Embeddings [B, N, D] of tokens at positions, both [B, N]."""
        parts, decoder = self.parts, self.decoder
        hidden = decoder.embed_tokens(tokens)
        if parts.relative:
            return hidden
        if parts.scale:
            hidden = hidden * getattr(decoder, parts.scale)
        if parts.counted:
            table = decoder.embed_positions
            rows = torch.where(tokens == table.padding_idx, 0, positions + 1) + table.padding_idx
            places = table.weights[rows].to(hidden.dtype)
        else:
            places = decoder.embed_positions(tokens, 0, position_ids=positions.flatten()).view(hidden.shape)
        if not parts.embed_norm:
            return hidden + places
        norm = getattr(decoder, parts.embed_norm)
        return norm(hidden) + places if parts.norm_first else norm(hidden + places)

    def _bias(self, positions: Tensor, slots: Tensor, extent: int) -> Tensor:
        """Relative position bias [B, H, N, extent] of nodes at positions in slots, both [B, N]."""
        attention = self.decoder.block[0].layer[0].SelfAttention
        bias = attention.compute_bias(1, extent, device=positions.device, past_seen_tokens=extent - 1)
        table = bias[0, :, 0].flip(-1)  # by distance
        places = torch.arange(extent, device=positions.device).expand(len(slots), -1)
        keys = places.scatter(1, slots.clamp(max=extent - 1), positions)
        distance = (positions[:, :, None] - keys[:, None]).clamp(0, extent - 1)  # what is ahead of a node is masked
        return table[:, distance].transpose(0, 1)

    def _head(self, hidden: Tensor) -> Tensor:
        """Logits of the decoder's last hidden states."""
        model, scaled = self.model, self.parts.scaled_if
        if scaled and getattr(model.config, scaled):
            hidden = hidden * model.model_dim**-0.5
        logits = model.lm_head(hidden)
        bias = getattr(model, "final_logits_bias", None)
        return logits if bias is None else logits + bias.to(logits.device)
