"""Products with stored weights in plain torch: what the kernel beside it computes, and its specification.

A weight [M, K] is dequantised, (code - zero) * scale in fp32, rounded to the dtype that its library dequantises to, and
multiplied in the activations' dtype with fp32 accumulation. The kernel does not round the weights: it multiplies sums
by the scales. Nothing is repacked: codes, scales and zero points are
views of the tensors that a quantiser wrote.

K input channels, M output channels, G = ceil(K / k) scales of a line, for blocks of m x k weights.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastspec.constants import constant
from fastspec.kernels.linear import reference as linear_reference
from fastspec.kernels.linear.reference import SWIGLU, Activation, Expert


class Numbers(enum.IntEnum):
    """Reading of a code's bits."""

    UNSIGNED = 0
    """Whole numbers from 0, less `Codes.less`."""
    SIGNED = 1
    """Whole numbers in two's complement."""
    E4M3 = 2
    """Floating point of 4 exponent and 3 mantissa bits, finite (torch.float8_e4m3fn)."""
    TABLE = 3
    """Places in a table of 16 values."""


@dataclass(frozen=True, slots=True)
class Codes:
    """Codes of a weight: `bits` of each (8, or 4 with two to a byte) and what they stand for."""

    bits: int
    numbers: Numbers
    less: int = 0
    high_first: bool = False
    """True where the high half of a byte comes before the low one."""
    table: tuple[float, ...] = ()
    """Numbers that the codes are places of."""


INT8 = Codes(8, Numbers.SIGNED)
PACKED8 = Codes(8, Numbers.UNSIGNED, less=128)
PACKED4 = Codes(4, Numbers.UNSIGNED, less=8)
E4M3 = Codes(8, Numbers.E4M3)
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_FP4 = tuple(sign * value / 12 for sign in (1, -1) for value in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))
NF4 = Codes(4, Numbers.TABLE, high_first=True, table=_NF4)
"""4-bit NormalFloat (Dettmers et al., arXiv 2305.14314, appendix E)."""
FP4 = Codes(4, Numbers.TABLE, high_first=True, table=_FP4)
"""Floating point of 2 exponent bits and 1 mantissa bit, as bitsandbytes has it."""
_E2M1 = tuple(sign * value for sign in (1.0, -1.0) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
MXFP4 = Codes(4, Numbers.TABLE, table=_E2M1)
"""e2m1 of OCP Microscaling Formats 1.0, whose scales are powers of 2 (e8m0)."""


@dataclass(frozen=True, slots=True)
class Nested:
    """Scales that are codes themselves: table[scale] * factors[place // block] + offset, by the place of a scale among
    all. table [256], factors [ceil(scales / block)], offset [] fp32."""

    table: Tensor
    factors: Tensor
    offset: Tensor
    block: int


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight [M, K] as stored."""

    codes: Tensor
    """[M, at least K * bits / 8] uint8."""
    kind: Codes
    scales: Tensor
    """[ceil(M / m), G], contiguous; uint8 with `nested`."""
    block: tuple[int, int]
    """(m, k): weights that share a scale."""
    depth: int
    """K."""
    dtype: torch.dtype | None
    """dtype that its library dequantises to; None: that of the activations."""
    zeros: Tensor | None = None
    """Zero points, contiguous, where m is 1: int8 [M, G], or codes [ceil(M / c), G] int32 with those of c = 32 / bits
    lines in a word, the first line's lowest, which stand for themselves less `Codes.less`."""
    groups: Tensor | None = None
    """Scale [K] int32 of every input channel, where their order was changed (act-order); else they come in turn."""
    nested: Nested | None = None
    on_sums: bool = False
    """True where scales, one for a line, multiply the sums, as the library's own forward does."""

    @property
    def shape(self) -> torch.Size:
        """[M, K]."""
        return torch.Size((self.codes.shape[0], self.depth))

    @property
    def device(self) -> torch.device:
        """The codes'."""
        return self.codes.device

    def lines(self, first: int, count: int) -> StoredWeight | None:
        """View of so many lines from the first one on, or None where these share what is stored with others."""
        m, k = self.block
        inner, nested, zeros = self.scales.shape[1] * first, self.nested, self.zeros
        per = 32 // self.kind.bits if zeros is not None and zeros.dtype == torch.int32 else 1
        if m >= self.shape[0]:  # one scale a column for all
            m, scales = count, self.scales
        else:
            scales = self.scales[first // m : -(-(first + count) // m)]
        split = [first % m if scales is not self.scales else 0, first % per]
        if nested is not None:
            split.append(inner % nested.block)
            nested = replace(nested, factors=nested.factors[inner // nested.block :])
        return (
            None
            if any(split)
            else replace(
                self,
                codes=self.codes[first : first + count],
                scales=scales,
                block=(m, k),
                zeros=None if zeros is None else zeros[first // per : -(-(first + count) // per)],
                nested=nested,
            )
        )

    def taken(self, ids: Tensor) -> StoredWeight:
        """Copies of the lines ids [N], each with scales of its own."""
        points = zeros(self, ids)
        return replace(
            self,
            codes=self.codes[ids],
            scales=(self.scales if self.nested is None else scales(self))[ids // self.block[0]],
            block=(1, self.block[1]),
            zeros=None if points is None else points.to(torch.int8),
            nested=None,
        )


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """Weights [E, M, K] of E experts as stored."""

    lines: StoredWeight
    """[E * M, K], a scale for each group of a line."""
    count: int
    """E."""

    @property
    def shape(self) -> torch.Size:
        """[E, M, K]."""
        lines, depth = self.lines.shape
        return torch.Size((self.count, lines // self.count, depth))

    def dense(self, expert: int, dtype: torch.dtype) -> Tensor:
        """One expert dequantised, [M, K]."""
        lines, channels = self.lines, self.shape[1]
        codes, factors = (each.narrow(0, expert * channels, channels) for each in (lines.codes, lines.scales))
        return dequantised(replace(lines, codes=codes, scales=factors), dtype)


def halves(codes: Tensor, kind: Codes) -> Tensor:
    """Codes one by one: bytes [M, B] -> [M, 2 * B] of 4 bits, or [M, B] of 8."""
    if kind.bits == 8:
        return codes
    low, high = codes & 15, codes >> 4
    return torch.stack((high, low) if kind.high_first else (low, high), -1).flatten(-2)


@constant
def table(kind: Codes, device: torch.device) -> Tensor:
    """A kind's table: [16] fp32."""
    return torch.tensor(kind.table, device=device)


def numbers(weight: StoredWeight) -> Tensor:
    """Numbers that the codes stand for before zero points and scales: [M, K] fp32."""
    codes = halves(weight.codes, weight.kind)[:, : weight.depth]
    match weight.kind.numbers:
        case Numbers.UNSIGNED:
            return codes.float() - weight.kind.less
        case Numbers.SIGNED:
            return codes.view(torch.int8).float()
        case Numbers.E4M3:
            return codes.view(torch.float8_e4m3fn).float()
        case Numbers.TABLE:
            return table(weight.kind, weight.device)[codes.long()]


def scales(weight: StoredWeight) -> Tensor:
    """Scales as numbers: [ceil(M / m), G] fp32."""
    nested = weight.nested
    if nested is None:
        return weight.scales.float()
    places = torch.arange(weight.scales.numel(), device=weight.device).view(weight.scales.shape)
    return nested.table.float()[weight.scales.long()] * nested.factors.float()[places // nested.block] + nested.offset


def zeros(weight: StoredWeight, lines: Tensor | None = None) -> Tensor | None:
    """Zero points of these lines [N], or of all, as numbers: [N, G] fp32, or None where all are zero."""
    points, kind = weight.zeros, weight.kind
    if points is None:
        return None
    if points.dtype == torch.int8:
        return (points if lines is None else points[lines]).float()
    lines, per = torch.arange(weight.shape[0], device=weight.device) if lines is None else lines, 32 // kind.bits
    codes: Tensor = (points[lines // per] >> (lines % per * kind.bits)[:, None]) & (2**kind.bits - 1)
    return codes.float() - kind.less


def dequantised(weight: StoredWeight, dtype: torch.dtype) -> Tensor:
    """[M, K], rounded to its own dtype, in this one."""
    (count, depth), (m, k) = weight.shape, weight.block
    values, offsets, factors = numbers(weight), zeros(weight), scales(weight)
    if weight.groups is None and m == 1 and depth % k == 0:
        values, offsets = values.unflatten(1, (-1, k)), None if offsets is None else offsets[..., None]
        factors = factors[..., None]
    else:
        lines, columns = torch.arange(count, device=weight.device) // m, weight.groups
        columns = torch.arange(depth, device=weight.device) // k if columns is None else columns
        offsets, factors = None if offsets is None else offsets[:, columns], factors[lines][:, columns]
    values = values if offsets is None else values.sub_(offsets)
    return values.mul_(factors).view(count, depth).to(weight.dtype or dtype).to(dtype)


def linear(x: Tensor, weight: StoredWeight, bias: Tensor | None) -> Tensor:
    """x [..., K] times weight [M, K] transposed, plus bias [M] -> [..., M] in x's dtype."""
    if not weight.on_sums:
        return F.linear(x, dequantised(weight, x.dtype), None if bias is None else bias.to(x.dtype))
    sums = F.linear(x.float(), numbers(weight)) * scales(weight)[:, 0]
    return (sums if bias is None else sums + bias.float()).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Dequantised(Sequence[Tensor]):
    """Some experts [M, K], each dequantised when it is asked for."""

    weights: StoredExperts
    chosen: Sequence[int]
    dtype: torch.dtype

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, at: Any) -> Any:
        return self.weights.dense(self.chosen[at], self.dtype)


def experts(
    x: Tensor,
    gate_up: StoredExperts,
    down: StoredExperts,
    chosen: Tensor,
    weights: Tensor,
    kind: Expert = SWIGLU,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
) -> Tensor:
    """`linear_reference.experts` of stored weights. Only those of chosen experts are dequantised, one by one, for which
    the choice is read back."""
    used, places = chosen.unique(return_inverse=True)
    held = used.tolist()
    return linear_reference.experts(
        x,
        Dequantised(gate_up, held, x.dtype),
        Dequantised(down, held, x.dtype),
        places,
        weights,
        kind,
        gate_up_bias=None if gate_up_bias is None else gate_up_bias[used],
        down_bias=None if down_bias is None else down_bias[used],
        shared=shared,
        shared_gate=shared_gate,
    )


def linears(
    x: Tensor, weights: Sequence[StoredWeight], biases: Sequence[Tensor | None], kind: Activation | None = None
) -> Tensor:
    """`linear_reference.linears` of stored weights."""
    return partial(linear_reference.linears, product=linear)(x, weights, biases, kind)  # type: ignore[arg-type]
