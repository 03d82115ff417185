"""A linear layer in 8 bits, as heads are read with `patch(head_bits=8)`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fastspec.kernels.quantised import reference
from fastspec.kernels.quantised.reference import E4M3, INT8, Codes, StoredWeight

LINES = 4096
"""Lines of a weight that are rounded at a time."""
LARGEST = {INT8: (torch.int8, 127.0), E4M3: (torch.float8_e4m3fn, 448.0)}
"""Codes of 8 bits -> their dtype, and the largest number that they stand for."""


class RoundedLinear(nn.Module):
    """A linear layer whose weight [M, K] is codes of 8 bits with a scale for each line; its bias [M] stays as it was.

    `like` is an empty tensor on the layer's device and in its dtype.
    """

    codes: Tensor
    like: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, kind: Codes) -> None:
        super().__init__()
        dtype, largest = LARGEST[kind]
        codes = weight.new_empty(weight.shape, dtype=dtype)
        scales = weight.new_empty(len(weight), 1, dtype=torch.float32)
        far = scales.new_zeros(())
        for part, some, scale in zip(*(each.split(LINES) for each in (weight, codes, scales)), strict=True):
            wide = part.float()
            scale.copy_(wide.abs().amax(1, keepdim=True) / largest).clamp_(min=torch.finfo(torch.float32).tiny)
            scaled = (wide / scale).clamp_(-largest, largest)
            some.copy_(scaled.round_() if dtype is torch.int8 else scaled)
            far += (some.float() * scale - wide).square_().sum()
        self.kind, self.scales = kind, scales
        self.far = float(far)
        """The squared distance from its weight."""
        self.register_buffer("codes", codes.view(torch.uint8))
        self.register_buffer("like", weight.new_empty(0))
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    @classmethod
    def of(cls, layer: nn.Linear) -> RoundedLinear:
        """A layer in the codes that are nearest to its weight: int8, or e4m3 where values of a line are of unlike
        sizes, as those are that read several layers' states."""
        return min((cls(layer.weight.detach(), layer.bias, kind) for kind in LARGEST), key=lambda made: made.far)

    @property
    def weight(self) -> StoredWeight:
        """[M, K], as the kernels read it."""
        depth = self.codes.shape[1]
        return StoredWeight(self.codes, self.kind, self.scales, (1, depth), depth, None)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., M]."""
        return reference.linear(x, self.weight, self.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RoundedLinear:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's own is untyped
        self.scales = self.scales.to(self.codes.device)  # in fp32, whatever the head is cast to
        return self
