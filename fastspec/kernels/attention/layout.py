"""Layouts: what the queries of a pass may see of the cache, in the form that the attention kernels read: numbers on the
device, and no mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastspec.kernels.arguments import PACKED, expect
from fastspec.kernels.attention.reference import Span


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """Layout of what N queries of each row may see, made once per forward pass and shared by its layers. No mask is
    stored.

    `prefix` [B] int64; `words` [B, N, W] int64 or None for a chain; `extent` bounds prefix + tail; `depths` [B, N]
    int64 or None where node j is at depth j, and always None without a `span`. With a `ring` slot p stands in slot p %
    ring of the cache; 0: in slot p.
    """

    prefix: Tensor
    words: Tensor | None
    nodes: int
    tail: int
    extent: int
    group: int
    span: Span | None = None
    depths: Tensor | None = None
    ring: int = 0

    @property
    def chain(self) -> bool:
        """True where node n sees the first n + 1 slots of the tail."""
        return self.words is None or self.tail == 0

    def reach(self, extent: int) -> int:
        """The most slots that the queries of a row see between them, of so many."""
        return extent if self.span is None else min(extent, self.span.size - 1 + self.tail)


LEAST_RING = 128
"""Slots that a block of the kernels has at most."""


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
) -> TreeLayout:
    """Lay out tree attention as the reference does, for kernels that read prefixes, bits and positions instead of a
    mask.

    words and depths are contiguous in their last dimension, and no depth is negative. `extent` only chooses how many
    programs a launch has; what lies before the first position that a query sees is not read. Only a span can have a
    ring. Raises ValueError for what it does not accept.
    """
    expect("attention_layout", ("B",), torch.int64, prefix=prefix)
    expect("attention_layout", (len(prefix), nodes, "W"), torch.int64, PACKED, words=words)
    if words is not None and words.shape[2] * 64 < tail:
        raise ValueError(f"{words.shape[2]} words of 64 bits do not cover a tail of {tail} slots")
    if span is None:
        if ring is not None:
            raise ValueError(f"a ring of {ring} slots holds the end of a text, and without a span all of it is seen")
        return TreeLayout(prefix, words, nodes, tail, extent, group)
    if span.size < 1 or nodes != tail:
        raise ValueError(
            f"a span of {span.size} positions, {nodes} nodes and a tail of {tail} slots: accepted are at least 1 "
            "position, and with a span a tail of the nodes' slots"
        )
    expect("attention_layout", (len(prefix), nodes), torch.int64, PACKED, depths=depths)
    if ring is not None and ring < max(LEAST_RING, span.size - 1 + tail):
        need = f"a span of {span.size} positions and a tail of {tail} slots, or a block of {LEAST_RING}"
        raise ValueError(f"a ring of {ring} slots does not hold {need}")
    return TreeLayout(prefix, words, nodes, tail, extent, group, span, depths, ring or 0)
