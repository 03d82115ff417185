"""The state of Gated DeltaNet layers: a matrix per head, and the last inputs of a convolution."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastspec.generation.ops import Ops
from fastspec.generation.state.base import Held, LayerState, Moves


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Key and value heads, their sizes, and the width of the convolution."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    width: int

    @property
    def channels(self) -> int:
        """Queries, keys and values side by side."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size


class DeltaState(LayerState):
    """States `s` [L, B, Hv, Dk, Dv] fp32 and the convolution's last inputs `held` [L, B, K, C] of the committed text, whatever its length.

    Beside them what a pass leaves of its N nodes, for `commit`: the convolution's `inputs` and outputs `mixed` [L, B, N, C], and the
    updates `u` [L, B, N, Hv, Dv] and summed gates `g` [L, B, N, Hv], fp32. A text cannot be made shorter again.
    """

    def __init__(self, layers: int, rows: int, nodes: int, shape: DeltaShape, *, dtype: torch.dtype, device: torch.device) -> None:
        self.layers, heads, size = layers, shape.value_heads, shape.value_size
        self.s = torch.zeros((layers, rows, heads, shape.key_size, size), dtype=torch.float32, device=device)
        self.held = torch.zeros((layers, rows, shape.width, shape.channels), dtype=dtype, device=device)
        self.inputs = torch.zeros((layers, rows, nodes, shape.channels), dtype=dtype, device=device)
        self.mixed = torch.zeros_like(self.inputs)
        self.u = torch.zeros((layers, rows, nodes, heads, size), dtype=torch.float32, device=device)
        self.g = torch.zeros((layers, rows, nodes, heads), dtype=torch.float32, device=device)

    @property
    def device(self) -> torch.device:
        """See `LayerState`."""
        return self.s.device

    def bytes(self, slots: int) -> int:
        """Memory of the buffers, the same for texts of any length."""
        return sum(each.numel() * each.element_size() for each in (self.s, self.held, self.inputs, self.mixed, self.u, self.g))

    def resize(self, slots: int) -> None:
        """Nothing grows."""

    def clear(self, reached: int) -> None:
        """Begin with an empty text."""
        self.s.zero_()
        self.held.zero_()

    def commit(self, ops: Ops, moves: Moves) -> None:
        """Take the accepted paths in."""
        verdict = moves.verdict
        ops.delta_commit(self.s, self.held, self.inputs, self.mixed, self.u, self.g, verdict.path, verdict.accepted, moves.active)

    def copy_row(self, row: int, other: LayerState, count: int, source: int, reached: int) -> None:
        """Begin a row anew."""
        assert isinstance(other, DeltaState)
        self.s[:, row] = other.s[:, source]
        self.held[:, row] = other.held[:, source]

    def load(self, layer: int, held: Held, order: Tensor, counts: Tensor) -> None:
        """Take the inputs [B, C, K] of a convolution and a state [B, Hv, Dk, Dv], which stand behind all of the text."""
        inputs, state = held
        self.held[layer] = inputs.transpose(1, 2)
        self.s[layer] = state

    def export(self, layer: int, slots: Tensor, real: Tensor, lengths: Tensor) -> Held:
        """The inputs and the state of one layer, behind all of a row's committed tokens: none of an earlier place are kept."""
        return self.held[layer].transpose(1, 2).contiguous(), self.s[layer].clone()
