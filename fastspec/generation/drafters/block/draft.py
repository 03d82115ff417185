"""Drafting with a block head in plain torch, for one text: a context cache that only appends, and one pass per block.

What the cache holds are keys and values of emitted tokens whose features exist; the block's own are thrown away after the pass, so
nothing is ever rolled back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fastspec.generation.drafters.block.head import BlockHead


@dataclass(frozen=True, slots=True)
class Block:
    """One drafted block: states [D, H] of its slots and their logits [D, V_d] by themselves."""

    states: Tensor
    unary: Tensor


class BlockDrafter:
    """One text's drafting state. Feed it the target's features in order, then draft behind any anchor that follows them."""

    def __init__(self, head: BlockHead) -> None:
        self.head = head
        self.length = 0
        self._cache: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def append(self, features: Tensor) -> None:
        """Take the features [T, F * H] of the next T emitted tokens."""
        positions = torch.arange(self.length, self.length + len(features), device=features.device)
        new = self.head.context_keys_values(self.head.context(features.to(self.head.fc.weight.dtype)), positions)
        old = self._cache or [(k[:0], v[:0]) for k, v in new]
        self._cache = [(torch.cat((k, more_k)), torch.cat((v, more_v))) for (k, v), (more_k, more_v) in zip(old, new, strict=True)]
        self.length += len(features)

    @torch.no_grad()
    def draft(self, anchor: int) -> Block:
        """Draft behind `anchor`, the last emitted token, whose own features do not exist yet."""
        if not self.length:
            raise RuntimeError("no context yet: call append(features) with those of the prompt first")
        device = self._cache[0][0].device
        states = self.head.states(torch.tensor([[anchor]], device=device), torch.tensor([[self.length]], device=device), self._attend)[0, 0]
        return Block(states, self.head.unary(states))

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Every row of the block sees the whole context and the whole block."""
        keys, values = self._cache[layer]
        groups = q.shape[-2] // k.shape[-2]
        keys, values = (
            torch.cat((old, new[0, 0])).repeat_interleave(groups, 1).transpose(0, 1) for old, new in ((keys, k), (values, v))
        )
        out = F.scaled_dot_product_attention(q[0, 0].transpose(0, 1)[None], keys[None], values[None])
        return out[0].transpose(0, 1)[None, None]
