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


def rounded_lines(weight: Tensor, kind: Codes) -> tuple[Tensor, Tensor]:
    """Codes [M, K] of a weight's lines and their scales [M, 1] fp32."""
    dtype, largest = LARGEST[kind]
    wide = weight.float()
    scales = (wide.abs().amax(1, keepdim=True) / largest).clamp_(min=torch.finfo(torch.float32).tiny)
    scaled = (wide / scales).clamp_(-largest, largest)
    return (scaled.round_() if dtype is torch.int8 else scaled).to(dtype), scales


class RoundedLinear(nn.Module):
    """A linear layer whose weight [M, K] is codes of 8 bits with a scale for each line; its bias [M] stays as it was.

    `like` is an empty tensor on the layer's device and in its dtype.
    """

    codes: Tensor
    like: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, kind: Codes) -> None:
        super().__init__()
        codes = weight.new_empty(weight.shape, dtype=LARGEST[kind][0])
        scales = weight.new_empty(len(weight), 1, dtype=torch.float32)
        far = scales.new_zeros(())
        for part, some, scale in zip(*(each.split(LINES) for each in (weight, codes, scales)), strict=True):
            for held, made in zip((some, scale), rounded_lines(part, kind), strict=True):
                held.copy_(made)
            far += (some.float() * scale - part.float()).square_().sum()
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

    def put(self, places: Tensor, lines: Tensor) -> None:
        """Exchange the lines at places [N] for lines [N, K], rounded, in place. Waits for nothing."""
        codes, scales = rounded_lines(lines, self.kind)
        self.codes[places], self.scales[places] = codes.view(torch.uint8), scales

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., M]."""
        return reference.linear(x, self.weight, self.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RoundedLinear:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's own is untyped
        self.scales = self.scales.to(self.codes.device)  # in fp32, whatever the head is cast to
        return self
