"""Tuned launches of products of stored weights: those parts of a launch that change no bit of a product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fastspec.kernels.launch import padded
from fastspec.kernels.linear.launches import MOST_TUNED
from fastspec.kernels.quantised.reference import Codes, StoredWeight
from fastspec.kernels.tuned_launches import Place, find


@dataclass(frozen=True, slots=True)
class StoredRowLaunch:
    """Launch of one row's kernel on Hopper (row.py): warps for `shares` of the depth, which ask for `stages` of `size`
    bytes of a line."""

    shares: int
    size: int
    stages: int


@dataclass(frozen=True, slots=True)
class StoredLaunch:
    """Launch of the other kernels, whose tiles follow from the weight: `stages` of a pipeline, on Hopper at the most,
    and the `warps` of Triton's kernel, 0 on Hopper."""

    stages: int
    warps: int = 0


TunedLaunch: TypeAlias = StoredRowLaunch | StoredLaunch


@dataclass(frozen=True, slots=True)
class StoredKind:
    """Kind of weights that one launch multiplies: their codes, `block` (m, k) of a scale (k is 0 for whole lines),
    dtypes of scales and zero points, scales of a nested factor (0 without) and whether there are biases."""

    codes: Codes
    block: tuple[int, int]
    scales: torch.dtype
    zeros: torch.dtype | None
    nested: int
    biased: bool

    def __str__(self) -> str:
        words = [f"{self.codes.bits} bits", self.codes.numbers.name.lower()]
        words += [f"blocks of {self.block[0]} and {self.block[1]}" if self.block[1] else "lines"]
        words += [word for word, has in (("zero points", self.zeros), ("nested", self.nested)) if has]
        return ", ".join(words)


def tuned(op: str, x: Tensor, weights: Sequence[StoredWeight], biases: Sequence[Tensor | None]) -> TunedLaunch | None:
    """The launch that was tuned for x [R, K] and weights: of "stored", side by side, "stored_gate_up" or
    "stored_parts". None without one, of many rows, and where channels have an order of their own."""
    one, rows = weights[0], len(x)
    if one.groups is not None or rows > MOST_TUNED:
        return None
    group = 0 if one.block[1] >= one.depth else one.block[1]
    kind = StoredKind(
        one.kind,
        (min(one.block[0], one.shape[0]), group),
        one.scales.dtype,
        None if one.zeros is None else one.zeros.dtype,
        0 if one.nested is None else one.nested.block,
        biases[0] is not None,
    )
    channels = tuple(weight.shape[0] for weight in weights)
    found = find(
        op,
        x.device,
        place_of(rows, channels, one.depth, x.dtype, kind),
        (rows, channels, one.depth, x.dtype, kind),
        None,
    )
    return found  # type: ignore[no-any-return]


def place_of(rows: int, channels: tuple[int, ...], depth: int, dtype: torch.dtype, kind: StoredKind) -> Place:
    """The place of a product: rows, numbers and a dtype."""
    codes, zeros = kind.codes, kind.zeros.itemsize if kind.zeros is not None else 0
    told: tuple[Any, ...] = codes.bits, int(codes.numbers), *kind.block, kind.scales.itemsize, zeros, kind.nested
    return 1 if rows == 1 else padded(rows), *channels, depth, *told, kind.biased, dtype
