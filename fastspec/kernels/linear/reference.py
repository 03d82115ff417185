"""Products in plain torch: what the kernels beside it compute, and their specification.

Letters: B rows (sequences), N nodes of a row's tree, P of its longest path, Hq query heads, Hkv key heads, D head size, C cache slots, W
64-bit words, V tokens, H width. Whole numbers are int64. Lengths are tensors on the device, and no op waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K] times weight [M, K] transposed, plus bias [M] -> [..., M]."""
    return F.linear(x, weight, bias)


@dataclass(frozen=True, slots=True)
class Parts:
    """A product [..., M] as S sums, each over a part of its inner size: `values` [S, ..., M] fp32, contiguous.

    Their sum, in their order and rounded to `dtype`, is the product.
    """

    values: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """The product's."""
        return self.values.shape[1:]


def joined(x: Tensor | Parts) -> Tensor:
    """A product as a tensor: itself, or the sum of its parts."""
    if isinstance(x, Tensor):
        return x
    total = x.values[0]
    for part in x.values[1:]:
        total = total + part
    return total.to(x.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of gate_up [..., 2 * I], the gate first -> [..., I]; silu is rounded to the dtype before the product."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def gate_up(x: Tensor, weight: Tensor, bias: Tensor | None, *, product: Callable[..., Tensor] = linear) -> Tensor:
    """`swiglu` of x [..., K] times a packed weight [2 * I, K], the gate's rows first, plus bias [2 * I] -> [..., I]."""
    return swiglu(product(x, weight, bias))


def experts(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """A mixture of SwiGLU experts: x [T, H], gate_up [E, 2 * I, H], down [E, H, I], chosen [T, K] int64, weights [T, K] -> [T, H].

    Row t is the sum over its K experts of weights[t, k] * down(silu(gate) * up), each product rounded to x's dtype, the weighted sum in
    fp32 and rounded once.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(gate_up.shape[0]):
        share = (weights.float() * (chosen == expert)).sum(1, keepdim=True)  # no index is read back: a round waits for nothing
        out += share * F.linear(swiglu(F.linear(x, gate_up[expert])), down[expert]).float()
    return out.to(x.dtype)
