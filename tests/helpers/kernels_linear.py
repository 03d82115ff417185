"""Drawn inputs of products, and the bounds of their errors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastspec.kernels.linear.linear import linear
from fastspec.kernels.linear.reference import GELU_TANH, SILU, Activation
from helpers.devices import HAS_CUDA
from helpers.kernels import captured

DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * HAS_CUDA  # the interpreter's bfloat16 is wrong
GATES = None, SILU, GELU_TANH
"""Of a product with a gate and an up part; None has neither."""


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The product in float64, and what its rounded fp32 sum may be off by.

    A sum of K products in fp32 is off by at most K roundings of the sum of their magnitudes; 2**-22 for each, because
    tensor cores cut off where others round. Then the result is rounded once, by half a unit in the last place, or half
    of the smallest subnormal.
    """
    x, weight, wide = x.double(), weight.double(), x.dtype
    exact = F.linear(x, weight, None if bias is None else bias.double())
    size = F.linear(x.abs(), weight.abs(), None if bias is None else bias.double().abs())
    error = (x.shape[-1] + 1) * 2**-22 * size
    return exact, error + torch.finfo(wide).eps / 2 * (exact.abs() + error) + torch.finfo(
        wide
    ).smallest_normal * torch.finfo(wide).eps


def gated(x: Tensor, weight: Tensor, bias: Tensor | None, kind: Activation = SILU) -> tuple[Tensor, Tensor]:
    """opened(gate) * up in float64, and its bound: gate, up, what opens and the product are each rounded; the slope of
    SiLU is below 1.1, that of GELU below 1.13."""
    exact, error = product(x, weight, bias)
    (gate, up), (e_gate, e_up) = exact.chunk(2, -1), error.chunk(2, -1)
    half, least = torch.finfo(x.dtype).eps / 2, torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps
    inside = kind.alpha * (gate + kind.cubic * gate**3)
    silu = gate * torch.sigmoid(inside)
    e_silu = 1.13 * e_gate
    e_silu = (
        e_silu + (half + (inside.clamp(max=0.0).abs() + 4) * 2**-22) * (silu.abs() + e_silu) + least
    )  # exp's error grows with it
    e_out = silu.abs() * e_up + up.abs() * e_silu + e_silu * e_up
    return silu * up, e_out + half * ((silu * up).abs() + e_out) + least


def drawn(rows: int, channels: int, depth: int, dtype: torch.dtype, device: str, biased: bool, sliced: bool = False):
    """x [rows, depth], weight [channels, depth], bias; `sliced`: their lines lie apart, among NaN that no kernel may
    read."""
    x, weight = torch.randn(rows, depth, device=device), torch.randn(channels, depth, device=device)
    if dtype == torch.float16 and depth > 2048:
        weight /= depth**0.5  # gate times up would not fit into fp16
    if sliced:
        x, weight = F.pad(x, (0, 5), value=torch.nan), F.pad(weight, (0, 3), value=torch.nan)
    bias = torch.randn(channels, device=device).to(dtype) if biased else None
    return x.to(dtype)[:, :depth], weight.to(dtype)[:, :depth], bias


def check_chain(rows: int, launches: list[Any]) -> None:
    """A chain of products, each of which reads the one before it, replayed on changing inputs: a launch that runs ahead
    is found out."""
    torch.manual_seed(1)
    weights = [torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16) / 2048**0.5 for _ in range(12)]
    x = torch.zeros(rows, 2048, device="cuda", dtype=torch.bfloat16)

    def chain() -> list[Tensor]:
        outs = [x]
        for i, weight in enumerate(weights):
            outs.append(linear(outs[-1], weight, None, launch=launches[i % len(launches)]))
        return outs

    graph, outs = captured(chain)
    for _ in range(20):
        x.normal_()
        graph.replay()
        for before, after, weight in zip(outs[:-1], outs[1:], weights, strict=True):
            exact, bound = product(before, weight, None)
            assert bool(((after.double() - exact).abs() <= bound).all())
