"""Sums of ordered attention, which all of its kernels take alike, and the operands of a pass.

Names and the rule that fixes the order are those of ordered.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastspec.kernels.attention.layout import TreeLayout
from fastspec.kernels.attention.parts import GRID, LOG2E, scales, tanh
from fastspec.kernels.launch import dependent, stages_within

FEW_HEADS = 4
"""Key heads up to which a text has runs of half the length: else most of the GPU would wait for a few programs."""

MOST_SUMS = 600_000
"""Sums of matrix rows that a pass writes at most: more would take too much memory."""

_LOG2E = tl.constexpr(LOG2E)


@triton.jit
def step(b_q, b_k, b_v, m_seen, b_acc, b_max, b_sum, scale2, b_ones, MASKED: tl.constexpr, CAP: tl.constexpr):
    """A block of keys: sums [M, D], maxima [M], sums of weights [M, 16] with it."""
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    if CAP > 0:
        b_s = tanh(b_s * scale2)
        scale2 = CAP
    b_t = tl.fma(b_s, tl.full(b_s.shape, 1.0, tl.float32) * scale2, tl.full(b_s.shape, GRID, tl.float32))
    if MASKED:
        b_t = tl.where(m_seen, b_t, float("-inf"))
    b_new = tl.maximum(b_max, tl.ceil(tl.max(b_t, 1) - GRID))
    b_p = tl.exp2(b_t - (b_new + GRID)[:, None]).to(b_v.dtype)
    b_keep = tl.exp2(b_max - b_new)
    b_sum = tl.dot(b_p, b_ones, b_sum * b_keep[:, None], input_precision="ieee")
    b_acc = tl.dot(b_p, b_v, b_acc * b_keep[:, None], input_precision="ieee")
    return b_acc, b_new, b_sum


@triton.jit
def along_axis(b_row, AXIS: tl.constexpr):
    """A value of each row, to be multiplied with its sums along AXIS; with None one row's, which has no other axis."""
    return b_row if AXIS is None else tl.expand_dims(b_row, AXIS)


@triton.jit
def added(b_acc, b_max, b_sum, b_acc2, b_max2, b_sum2, AXIS: tl.constexpr = 1):
    """The sums of two runs, the earlier one first: all factors are powers of two. A row's sums lie along AXIS."""
    b_new = tl.maximum(b_max, b_max2)
    b_1, b_2 = tl.exp2(b_max - b_new), tl.exp2(b_max2 - b_new)
    b_acc = b_acc * along_axis(b_1, AXIS) + b_acc2 * along_axis(b_2, AXIS)
    return b_acc, b_new, b_sum * b_1 + b_sum2 * b_2


@triton.jit
def finished(b_acc, b_max, b_sum, p_sinks, o_head, m_row, AXIS: tl.constexpr = 1):
    """The mean of the values by their weights, a sink's weight among them; zero where nothing is seen."""
    if p_sinks is not None:
        b_sink = tl.load(p_sinks + o_head, mask=m_row, other=0.0).to(tl.float32)
        b_sink = tl.fma(b_sink, tl.full(b_sink.shape, _LOG2E, tl.float32), tl.full(b_sink.shape, GRID, tl.float32))
        b_new = tl.maximum(b_max, tl.ceil(b_sink - GRID))
        b_keep = tl.exp2(b_max - b_new)
        b_acc = b_acc * along_axis(b_keep, AXIS)
        b_sum = b_sum * b_keep + tl.exp2(b_sink - (b_new + GRID))
    return b_acc * along_axis(1.0 / tl.where(b_sum > 0.0, b_sum, 1.0), AXIS)


@triton.jit
def block(p, o_slot, m_slot, o_d, STRIDE: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr):
    """Keys or values [BLOCK, D'] of slots; zero where they are not to be read."""
    p_block = p + o_slot.to(tl.int64)[:, None] * STRIDE + o_d[None, :]
    if MASKED:
        return tl.load(p_block, mask=m_slot[:, None] & (o_d < D)[None, :], other=0.0)
    elif o_d.shape[0] != D:
        return tl.load(p_block, mask=(o_d < D)[None, :], other=0.0)
    else:
        return tl.load(p_block)


@lru_cache
def runs_of(extent: int, fine: bool) -> int:
    """Number of runs that begin in so many positions."""
    each, size, last = (8, 8, extent - 1) if fine else (4, 9, extent - 1)
    if last < 2048:
        return (last >> (size - 1)) + 1
    return (each + (last >> size) if last < 4096 else 2 * each + (last >> (size + 1))) + 1


@dataclass(frozen=True, slots=True)
class OrderedLaunch:
    """Launch of a kernel: rows and slots of a block, warps, pipeline stages."""

    block_m: int
    block_n: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class OrderedPass:
    """Operands of one attention: q and out [B, N, Hq, D], k and v [B, Hkv, C, D], where they stand, and sinks [Hq] or
    None. Positions before `extent` are cut into `runs`, `fine` ones where there are few key heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    tree: TreeLayout
    scale: float
    cap: float | None
    sinks: Tensor | None
    extent: int
    runs: int
    fine: bool

    @property
    def rows(self) -> int:
        """Matrix rows of a pair."""
        return self.q.shape[1] * self.tree.group

    @property
    def pairs(self) -> int:
        return self.q.shape[0] * self.k.shape[1]

    @property
    def block_d(self) -> int:
        """Channels of a head, padded."""
        return max(16, int(triton.next_power_of_2(self.q.shape[3])))

    @property
    def scale2(self) -> float:
        return scales(self.scale, self.cap)[0]

    @property
    def grain(self) -> int:
        """Positions of a group after which a maximum may be raised."""
        return 64 if self.q.dtype == torch.float16 else 16

    @property
    def strides(self) -> tuple[int, ...]:
        return *self.q.stride()[:3], *self.k.stride()[:2], *self.v.stride()[:2]

    def parts(self, count: int) -> tuple[Tensor, Tensor]:
        """Sums [pairs, count, rows, D], and maxima and sums of weights [pairs, count, 2, rows], to be filled."""
        shape = self.pairs, count
        part = self.q.new_empty((*shape, self.rows, self.q.shape[3]), dtype=torch.float32)
        return part, part.new_empty((*shape, 2, self.rows))

    def shape(self) -> dict[str, Any]:
        """Compile-time arguments of a kernel that reads no keys."""
        span = self.tree.span
        return {
            "GROUP": self.tree.group,
            "D": self.q.shape[3],
            "BLOCK_D": self.block_d,
            "FINE": self.fine,
            "SPAN": span.size if span else 0,
            "CHUNK": span is not None and span.chunk,
            **dependent(self.q.device),
        }

    def options(self, launch: OrderedLaunch) -> dict[str, Any]:
        """Compile-time arguments of a kernel that reads keys, and its warps and stages."""
        block_n = 64 if self.q.dtype == torch.float16 else launch.block_n
        block, fixed = (2 * n * self.block_d * self.k.element_size() for n in (block_n, launch.block_m))
        stages = stages_within(launch.stages, block, self.q.device, fixed)
        return self.shape() | {
            "S_K": self.k.stride(2),
            "S_V": self.v.stride(2),
            "RING": self.tree.ring,
            "CAP": scales(self.scale, self.cap)[1],
            "BLOCK_N": block_n,
            "STAGES": stages,
            "num_stages": stages,
            "num_warps": launch.warps,
        }
