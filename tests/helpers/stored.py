"""Weights in the layouts of quantisers, written by hand, and the same weights dequantised."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fastspec.kernels.linear.reference import Parts
from fastspec.kernels.quantised import reference
from fastspec.kernels.quantised.reference import (
    E4M3,
    INT8,
    NF4,
    PACKED4,
    PACKED8,
    Nested,
    StoredWeight,
)

Written = tuple[StoredWeight, Tensor]
"""A weight as stored, and dequantised [M, K]."""


def words(codes: Tensor, bits: int) -> Tensor:
    """Codes [M, K] from 0 on, 32 / bits to a word along K, the first lowest -> int32 [M, ceil(K * bits / 32)]."""
    per = 32 // bits
    padded = torch.nn.functional.pad(codes.long(), (0, -codes.shape[1] % per)).view(len(codes), -1, per)
    return sum(padded[..., i] << (bits * i) for i in range(per)).to(torch.int32)  # type: ignore[union-attr]


def spread(values: Tensor, block: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    """A value of each block for each weight: [ceil(M / m), G] -> [M, K]."""
    return values.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]


def rows8(count: int, depth: int, dtype: torch.dtype, on_sums: bool = False) -> Written:
    """int8 in two's complement, a scale for each line: torchao's."""
    codes = torch.randint(-128, 128, (count, depth))
    scales = torch.rand(count, 1) / 64 + 0.001
    weight = StoredWeight(
        codes.to(torch.int8).view(torch.uint8), INT8, scales, (1, depth), depth, dtype, on_sums=on_sums
    )
    return weight, (codes * scales).to(torch.float32 if on_sums else dtype)


def packed(
    bits: int, group: int | None, count: int, depth: int, dtype: torch.dtype, zeros: bool = False, ordered: bool = False
) -> Written:
    """Whole numbers packed into words, with a scale and a zero point for each group of a line: compressed-tensors'."""
    half, size = 2 ** (bits - 1), group or depth
    codes, columns = torch.randint(0, 2 * half, (count, depth)), -(-depth // size)
    scales, points = (torch.rand(count, columns) / half).to(dtype), torch.randint(0, 2 * half, (count, columns))
    of = torch.arange(depth) // size
    of = of[torch.randperm(depth)] if ordered else of
    dense = (codes - (points if zeros else torch.full_like(points, half))[:, of]).to(dtype) * scales[:, of]
    weight = StoredWeight(
        words(codes, bits).view(torch.uint8),
        PACKED4 if bits == 4 else PACKED8,
        scales,
        (1, size),
        depth,
        dtype,
        zeros=words(points.T, bits).T.contiguous() if zeros else None,
        groups=of.int() if ordered else None,
    )
    return weight, dense


def grouped8(group: int, count: int, depth: int, dtype: torch.dtype) -> Written:
    """int8 with plain zero points: torchao's portable weights of few bits."""
    codes, columns = torch.randint(-8, 8, (count, depth)), -(-depth // group)
    scales, points = torch.rand(count, columns), torch.randint(-8, 8, (count, columns))
    block = 1, group
    dense = (codes - spread(points, block, codes.shape)) * spread(scales, block, codes.shape)
    stored, zeros = codes.to(torch.int8).view(torch.uint8), points.to(torch.int8)
    return StoredWeight(stored, INT8, scales, block, depth, dtype, zeros=zeros), dense.to(dtype)


def float8(block: tuple[int, int] | None, count: int, depth: int, dtype: torch.dtype) -> Written:
    """e4m3 with a scale for each block, for each line (None), or for all: fine-grained FP8, and per channel."""
    block = block or (1, depth)
    codes = torch.randint(0, 256, (count, depth), dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x81  # no NaN, but subnormal numbers
    scales = torch.rand(-(-count // block[0]), -(-depth // block[1])) / 100
    dense = codes.view(torch.float8_e4m3fn).float() * spread(scales, block, codes.shape)
    return StoredWeight(codes, E4M3, scales, block, depth, dtype), dense.to(dtype)


def table4(count: int, depth: int, dtype: torch.dtype, nested: bool = False) -> Written:
    """Places in a table of 16, the high half of a byte first, in blocks of 64: bitsandbytes' nf4."""
    codes = torch.randint(0, 16, (count, depth))
    scales: Tensor = torch.rand(count, depth // 64)
    values = torch.tensor(NF4.table)
    dense, inner = values[codes], None
    if nested:
        places = torch.randint(0, 256, scales.shape)
        factors, table = torch.rand(-(-places.numel() // 256)), torch.rand(256) * 2 - 1
        inner = Nested(table, factors, torch.tensor(0.7), 256)
        scales = table[places] * factors[(torch.arange(places.numel()) // 256).view_as(places)] + inner.offset
        dense = dense * spread(scales, (1, 64), codes.shape)
        scales = places.to(torch.uint8)
    else:
        dense = dense * spread(scales, (1, 64), codes.shape)
    halves = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
    return StoredWeight(halves, NF4, scales, (1, 64), depth, dtype, nested=inner), dense.to(dtype)


def halves(x: Tensor, weights: Sequence[StoredWeight], biases: Sequence[Tensor | None]) -> Tensor | Parts:
    """Parts of products of stored weights side by side, each over half of the depth; with biases the products."""
    if any(bias is not None for bias in biases):
        return reference.linears(x, weights, biases)
    whole = torch.cat([reference.dequantised(weight, torch.float32) for weight in weights])
    parts = zip(x.float().chunk(2, -1), whole.chunk(2, 1), strict=True)
    return Parts(torch.stack([F.linear(*each) for each in parts]), x.dtype)
