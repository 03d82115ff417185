"""Attention over a cache in plain torch: what the kernels beside it compute, and their specification.
Letters are those of `fastspec.kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Span:
    """Positions that a layer's queries see beside the text's order: those fewer than `size` before their own (a
    sliding window), or with `chunk` those of their own chunk of `size` positions. A node of a tree stands at its depth
    behind the prefix, wherever its slot is."""

    size: int
    chunk: bool = False

    def sees(self, queries: Tensor, keys: Tensor) -> Tensor:
        """True where queries at these positions see keys at these, both int64 and broadcast -> bool."""
        return queries // self.size == keys // self.size if self.chunk else queries - keys < self.size


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """Layout of what N queries of each row may see, made once per forward pass and shared by its layers.

    `visible` [B, 1, N, E] bool over the first E cache slots; `stacked` [B, 1, group * N, E] is the same, once for each
    of the query heads that share a key head. `extent` is E.
    """

    visible: Tensor
    stacked: Tensor
    extent: int


def attention_layout(
    prefix: Tensor,
    words: Tensor | None,
    nodes: int,
    tail: int,
    extent: int,
    group: int = 1,
    *,
    span: Span | None = None,
    depths: Tensor | None = None,
    ring: int | None = None,
) -> AttentionLayout:
    """Lay out tree attention: prefix [B] int64 slots are seen by all, then `tail` slots by ancestor bits.

    Bit j of words [B, N, W] int64 says whether the node sees tail slot j; words=None means a chain (slot j is seen by
    nodes j, j+1, ...). Slots from `extent` on are not read; the caller keeps prefix + tail <= extent. `group` is the
    number of query heads per key head. A `span` cuts what is seen by positions: that of a prefix slot is its number,
    that of tail slot j, which is node j, prefix + depths[b, j] (int64 [B, N], None for a chain, where it is j). With a
    `ring` slot p stands in slot p % ring of the cache, and what lies further back has been written over: the ring holds
    the span and the tail.
    """
    slot = torch.arange(extent if ring is None else min(extent, ring), device=prefix.device)
    if ring is not None:
        last = prefix[:, None] + tail - 1
        slot = last - (last - slot) % ring  # the slot of the text that stands there
    rel = slot - prefix[:, None]  # [B, E], negative in the prefix
    in_tail = (rel >= 0) & (rel < tail)
    if words is None:
        seen = rel[:, None, :] <= torch.arange(nodes, device=prefix.device)[None, :, None]
    else:
        where = rel.clamp(0, 64 * words.shape[2] - 1)[:, None, :].expand(-1, nodes, -1)
        seen = (words.gather(2, where >> 6) >> (where & 63)) & 1 == 1
    visible = (((rel < 0) & (slot >= 0))[:, None, :] | (in_tail[:, None, :] & seen))[:, None]
    if span is not None:
        depth = torch.arange(nodes, device=prefix.device).expand(len(prefix), -1) if depths is None else depths
        keys = torch.where(rel < 0, slot, prefix[:, None] + depth.gather(1, rel.clamp(0, nodes - 1)))
        visible = visible & span.sees((prefix[:, None] + depth)[:, :, None], keys[:, None, :])[:, None]
    stacked = visible.expand(-1, group, -1, -1).flatten(1, 2)[:, None]
    return AttentionLayout(visible, stacked, visible.shape[-1])


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: AttentionLayout,
    scale: float,
    *,
    sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Attention of q [B, N, Hq, D] over cached k, v [B, Hkv, C, D] under a layout made for Hq / Hkv -> [B, N, Hq, D].

    `sinks` [Hq] floats are logits that join the sum of a head's weights beside the scores, once for every query, and
    bring no value (gpt-oss). With a `cap` the scaled scores s become cap * tanh(s / cap) before any is masked (Gemma
    2). With either the softmax is taken in fp32 at least, and the weights are rounded to the dtype before they meet the
    values. Grouped query heads are stacked as rows, so no key or value is repeated. On the CPU no query reads a slot
    that it does not see, whatever stands there; elsewhere NaN and infinity in the first E slots of a row reach all of
    its queries.
    """
    batch, nodes, heads, size = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    rows = q.unflatten(2, (kv_heads, group)).permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, group * nodes, size)
    keys, values = k[:, :, : layout.extent], v[:, :, : layout.extent]
    if sinks is None and cap is None:
        out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=layout.stacked, scale=scale)
    else:
        out = _weights(rows, keys, layout.stacked, scale, sinks, cap).to(v.dtype) @ values
    if _is_spoiled(out):  # 0 * NaN is NaN: where a value is none, a weight of 0 does not hide it
        weights, odd = _weights(rows, keys, layout.stacked, scale, sinks, cap).to(v.dtype), ~values.isfinite()
        hidden = layout.stacked.float() @ odd.float() == 0
        out = torch.where(hidden, weights @ values.masked_fill(odd, 0), out)
    return out.view(batch, kv_heads, group, nodes, size).permute(0, 3, 1, 2, 4).reshape(batch, nodes, heads, size)


def _is_spoiled(out: Tensor) -> bool:
    """True where a result on the CPU holds NaN. Elsewhere a look waits for the device; a fake tensor has no values."""
    return type(out) is Tensor and out.is_cpu and bool(out.sum().isnan())


def _weights(
    rows: Tensor, keys: Tensor, visible: Tensor, scale: float, sinks: Tensor | None, cap: float | None
) -> Tensor:
    """The weights [B, Hkv, R, E] of keys for stacked queries rows [B, Hkv, R, D]: zero where nothing is visible."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    scores = rows.to(wide) @ keys.to(wide).transpose(2, 3) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        groups = (
            sinks.to(wide)
            .view(1, keys.shape[1], -1, 1)
            .repeat_interleave(rows.shape[2] * keys.shape[1] // len(sinks), 2)
        )
        scores = torch.cat((scores, groups.expand(len(rows), -1, -1, -1)), 3)
    return scores.softmax(3)[..., : keys.shape[2]].masked_fill(~visible, 0.0)
