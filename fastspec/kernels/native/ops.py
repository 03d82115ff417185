"""The C++ kernels as ops, in fp32 and bfloat16. What they do not take (other dtypes, gradients, rare forms of an op,
many rows) is left to the references or to torch's products: each op's docstring says which. An error in a kernel is
raised, and nothing else is tried in its place."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastspec.kernels.attention import reference as attention_reference
from fastspec.kernels.attention.reference import AttentionLayout
from fastspec.kernels.drafting import reference as drafting_reference
from fastspec.kernels.drafting.reference import Candidates
from fastspec.kernels.layer import reference as layer_reference
from fastspec.kernels.layer.reference import LayerPlace, PlainLayers
from fastspec.kernels.linear import cpu
from fastspec.kernels.linear import reference as linear_reference
from fastspec.kernels.linear.cpu import Measured, Way
from fastspec.kernels.linear.reference import SILU, Activation, DeferredSum, Parts, joined
from fastspec.kernels.native import build
from fastspec.kernels.native.stack import MOST_SIZE, StackTable, at, placed, run, table_of
from fastspec.kernels.verification import reference as verification_reference
from fastspec.kernels.verification.reference import SamplingSettings

MOST_ROWS = 64
"""Rows of a product, and nodes whose attention is taken here; more are a prompt's, for which torch's own are made."""
ENDINGS = {torch.float32: "", torch.bfloat16: build.BF16}
"""Ends of the names of a dtype's kernels."""


def plain(*tensors: Tensor) -> bool:
    """True where these are of one dtype that has kernels, on the CPU, and need no gradients."""
    dtype = tensors[0].dtype
    return dtype in ENDINGS and all(x.dtype is dtype and x.is_cpu for x in tensors) and not torch.is_grad_enabled()


def rows_of(x: Tensor) -> Tensor | None:
    """x [..., H] as [R, H] in place, or None where rows are not contiguous, or not evenly apart."""
    if x.is_contiguous():
        return x.view(-1, x.shape[-1])
    apart, count = x.shape[-1], 1
    for size, stride in zip(x.shape[-2::-1], x.stride()[-2::-1], strict=True):
        if size > 1 and count > 1 and stride != apart * count:
            return None
        apart = stride if size > 1 and count == 1 else apart
        count *= size
    return x.as_strided((count, x.shape[-1]), (apart, 1)) if x.stride(-1) == 1 else None


def by_onednn(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`cpu.through_onednn`, laid out as the kernels read it."""
    return cpu.through_onednn(rows, weight, bias).contiguous()


class Native:
    """The ops of a library that `build.library` loaded. Each has the signature of its reference."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._kernels = {name: getattr(library, f"fastspec_{name}") for name in build.SIGNATURES}
        self.pairs = bool(library.fastspec_has_pairs())
        """True where the processor multiplies pairs of bfloat16 numbers itself (AVX512-BF16)."""
        self.by_kernel: Way = self.product
        """`product`, the same object every time."""
        ways = (F.linear, by_onednn, self.by_kernel) if cpu.available() else (F.linear, self.by_kernel)
        self.measured = Measured(*ways)

    def kernel(self, name: str, like: Tensor) -> Callable[..., None]:
        """An op's kernel for the dtype of a tensor."""
        found: Callable[..., None] = self._kernels[name + ENDINGS[like.dtype]]
        return found

    def product(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """rows [R, K] times weight [M, K] transposed, plus bias -> [R, M], by the kernel; all of one dtype, and
        contiguous. In bfloat16 a row of the result does not depend on the rows beside it."""
        return self.products(rows, (weight,), (bias,))

    def products(self, rows: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
        """The same of several weights -> their outputs side by side [R, all M], by one call of the kernel."""
        count, depth = rows.shape
        told: list[int] = []
        for weight, bias in zip(weights, biases, strict=True):
            told += weight.data_ptr(), at(bias) or 0, weight.shape[0]
        out = rows.new_empty(count, sum(told[2::3]))
        kernel, where = self.kernel("linear", rows), (ctypes.c_long * len(told))(*told)
        given = rows.data_ptr(), where, len(weights), out.data_ptr(), count, depth, torch.get_num_threads()
        kernel(*given, *((self.pairs,) if rows.dtype is torch.bfloat16 else ()))
        return out

    def way(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Way | None:
        """Function that multiplies the rows of x, see `linear`; None: torch, x as it is."""
        # else torch broadcasts, or raises
        fits = weight.shape[1:] == x.shape[-1:] and (bias is None or bias.shape == weight.shape[:1])
        given = (x, weight) if bias is None else (x, weight, bias)
        if not fits or not plain(*given) or not all(each.is_contiguous() for each in given) or not x.numel():
            return None
        rows = x.numel() // x.shape[-1]
        if x.dtype is torch.bfloat16:
            return F.linear if self.pairs and rows > MOST_ROWS else self.by_kernel
        if rows > MOST_ROWS:
            return by_onednn if cpu.available() else None
        small = rows * weight.numel() < cpu.SMALL
        return self.by_kernel if small else self.measured.fastest(x.view(-1, x.shape[-1]), weight)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`reference.linear`, by whichever of MKL, oneDNN and the kernel is the quickest here for such a product; of
        more than 64 rows as `cpu.linear` does, and of what is not of such a dtype and contiguous by torch. In
        bfloat16 by the kernel alone, so that a node's result is that of the token by itself, but for more than 64 rows
        where the processor multiplies such numbers for torch too."""
        multiply = self.way(x, weight, bias)
        if multiply is None:
            return F.linear(x, weight, bias)
        return multiply(x.view(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], -1)

    def linears(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], kind: Activation | None = None
    ) -> Tensor:
        """`reference.linears`, by one call of the kernel where it is what `linear` would take for each of them, which
        leaves nothing to lay side by side."""
        alike = kind is None or weights[0].shape == weights[1].shape  # else torch broadcasts, or raises
        if not alike or any(self.way(x, *each) is not self.by_kernel for each in zip(weights, biases, strict=True)):
            return linear_reference.linears(x, weights, biases, kind, product=self.linear)
        both = self.products(x.view(-1, x.shape[-1]), weights, biases).view(*x.shape[:-1], -1)
        return both if kind is None else self.swiglu(both, kind)

    def gate_up(self, x: Tensor, weight: Tensor, bias: Tensor | None, kind: Activation = SILU) -> Tensor:
        """`reference.gate_up`; other gates than SiLU by torch."""
        return self.swiglu(self.linear(x, weight, bias), kind)

    def swiglu(self, both: Tensor, kind: Activation) -> Tensor:
        """`reference.swiglu`; other gates than SiLU by torch."""
        if kind != SILU or not plain(both) or not both.is_contiguous():
            return linear_reference.swiglu(both, kind)
        out = both.new_empty(*both.shape[:-1], both.shape[-1] // 2)
        rows = out.numel() // max(1, out.shape[-1])
        self.kernel("swiglu", both)(both.data_ptr(), out.data_ptr(), rows, out.shape[-1], torch.get_num_threads())
        return out

    def rms_norm(
        self,
        x: Tensor | Parts | DeferredSum,
        weight: Tensor,
        eps: float,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        total: Tensor | None = None,
        offset: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`reference.rms_norm`."""
        x = joined(x)
        given = [each for each in (x, weight, residual, out, total) if each is not None]
        alike = all(each.shape == x.shape for each in (residual, out, total) if each is not None)
        fits = weight.shape == x.shape[-1:] and alike
        if not fits or not plain(*given) or not weight.is_contiguous():
            return layer_reference.rms_norm(x, weight, eps, residual, out, total, offset)
        normed = x.new_empty(x.shape) if out is None else out
        summed = total if total is not None else x.new_empty(x.shape) if residual is not None else x
        a, to, kept = rows_of(x), rows_of(normed), rows_of(summed)
        b = None if residual is None else rows_of(residual)
        if a is None or to is None or kept is None or (residual is not None and b is None):
            return layer_reference.rms_norm(x, weight, eps, residual, out, total, offset)
        placed = a.data_ptr(), a.stride(0), at(b), 0 if b is None else b.stride(0), weight.data_ptr()
        written = to.data_ptr(), to.stride(0), kept.data_ptr(), kept.stride(0)
        norm = eps, 0.0 if offset is None else offset, offset is not None
        self.kernel("rms_norm", a)(*placed, *written, *a.shape, *norm, torch.get_num_threads())
        return normed, summed

    def rope_cache(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
        offset: float | None = None,
        gated: bool = False,
        norms_values: bool = False,
        ties_values: bool = False,
        interleaved: bool = False,
        factor: Tensor | None = None,
    ) -> Tensor:
        """`reference.rope_cache`; gates, tied or normed values, interleaved channels, factors, other sizes by torch."""
        one_norm = (q_norm is None) != (k_norm is None)
        rare = gated or norms_values or ties_values or interleaved or factor is not None or one_norm
        heads, size = k_cache.shape[1], k_cache.shape[3]
        given = [each for each in (qkv, k_cache, v_cache, q_norm, k_norm) if each is not None]
        mixed = qkv.dtype is torch.bfloat16 and cos.dtype is torch.float32  # as a head's tables are
        angles = plain(cos, sin) and (mixed or cos.dtype is qkv.dtype)
        lies = k_cache.stride(2) == v_cache.stride(2) == size and k_cache.stride(3) == v_cache.stride(3) == 1
        rare |= any(norm.shape != (size,) for norm in (q_norm, k_norm) if norm is not None) or qkv.shape[2] % size != 0
        lies &= v_cache.shape == k_cache.shape and qkv.is_contiguous()
        if rare or not lies or size > MOST_SIZE or not angles or not plain(*given):
            more = gated, norms_values, ties_values, interleaved, factor
            return layer_reference.rope_cache(
                qkv, cos, sin, positions, k_cache, v_cache, slots, q_norm, k_norm, eps, offset, *more
            )
        batch, nodes = qkv.shape[:2]
        queries = qkv.shape[2] // size - 2 * heads
        q = qkv.new_empty(batch, nodes, queries, size)
        where, to, c, s = positions.contiguous(), slots.contiguous(), cos.contiguous(), sin.contiguous()
        turn = self._kernels["rope_cache" + build.MIXED] if mixed else self.kernel("rope_cache", qkv)
        tensors = qkv, c, s, where, to, k_cache, v_cache, q, q_norm, k_norm
        sizes = batch, nodes, queries, heads, size, c.shape[-1], *k_cache.stride()[:2], *v_cache.stride()[:2]
        turn(*map(at, tensors), *sizes, eps, 0.0 if offset is None else offset, offset is not None)
        return q

    def tree_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: AttentionLayout,
        scale: float,
        *,
        sinks: Tensor | None = None,
        cap: float | None = None,
    ) -> Tensor:
        """`reference.tree_attention`; sinks, caps, values of another size and more than 64 nodes by torch."""
        batch, nodes, heads, size = q.shape
        lies = k.stride(2) == v.stride(2) == size and k.stride(3) == v.stride(3) == 1 and q.is_contiguous()
        rare = sinks is not None or cap is not None or nodes > MOST_ROWS or v.shape != k.shape
        if rare or not lies or not plain(q, k, v):
            return attention_reference.tree_attention(q, k, v, layout, scale, sinks=sinks, cap=cap)
        seen = layout.visible.contiguous()
        out = q.new_empty(q.shape)
        sizes = batch, nodes, heads, k.shape[1], size, layout.extent, *k.stride()[:2], *v.stride()[:2]
        self.kernel("tree_attention", q)(*map(at, (q, k, v, seen, out)), *sizes, scale, torch.get_num_threads())
        return out

    def stack(
        self,
        layers: PlainLayers,
        places: Sequence[LayerPlace],
        total: Tensor,
        positions: Tensor,
        taps: Mapping[int, Tensor],
        x: Tensor | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """`reference.stack` by the same kernels as the ops above, bit for bit; None, and nothing has happened, for more
        than 64 rows, layers that the kernels do not take, and in fp32 where a product is quicker another way."""
        rows, table, given = total.shape[0] * total.shape[1], table_of(layers), (total,) if x is None else (total, x)
        angles = places[0].cos.dtype
        if table is None or rows > MOST_ROWS or not plain(*given) or total.dtype is not table.dtype:
            return None
        if angles not in ENDINGS or any(place.cos.dtype is not angles for place in places):
            return None
        if not total.numel() or not self._multiplies(table, rows):
            return None
        mixed = total.dtype is torch.bfloat16 and angles is torch.float32
        wide = total.shape[-1] == table.width and (x is None or x.shape == (*total.shape[:2], table.depth))
        if not wide or (x is None) != (layers.rows[0].norm is not None) or (not mixed and angles is not total.dtype):
            return None
        kept = placed(table, layers, places, taps)
        if kept is None:
            return None
        kernel = self._kernels["stack" + (build.MIXED if mixed else ENDINGS[total.dtype])]
        return run(kernel, table, places, total, positions, taps, x, self.pairs)

    def _multiplies(self, table: StackTable, rows: int) -> bool:
        """True where the kernel is what `linear` would take for every product of a table's layers."""
        if table.dtype is torch.bfloat16:
            return True
        key = rows, torch.get_num_threads()
        if key not in table.by_kernel:
            ones = ((torch.ones(rows, weight.shape[1], device="cpu"), weight, None) for weight in table.products)
            table.by_kernel[key] = all(self.way(*each) is self.by_kernel for each in ones)
        return table.by_kernel[key]

    def pick(self, scores: Tensor, uniform: Tensor | None, settings: SamplingSettings | None = None) -> Tensor:
        """`reference.pick`; draws by torch."""
        if uniform is not None or not plain(scores) or not scores.is_contiguous() or not scores.numel():
            return verification_reference.pick(scores, uniform, settings)
        out = scores.new_empty(scores.shape[:-1], dtype=torch.long)
        self.kernel("argmax", scores)(
            scores.data_ptr(), out.data_ptr(), out.numel(), scores.shape[-1], torch.get_num_threads()
        )
        return out

    def topk_logprobs(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """`reference.topk_logprobs`, the lower id first among equals; NaN is not looked for."""
        if not plain(logits) or not logits.is_contiguous() or not 0 < count <= logits.shape[-1]:
            return drafting_reference.topk_logprobs(logits, count)
        shape = *logits.shape[:-1], count
        values, ids = logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.long)
        rows = values.numel() // count
        self.kernel("topk_logprobs", logits)(
            logits.data_ptr(), values.data_ptr(), ids.data_ptr(), rows, logits.shape[-1], count, torch.get_num_threads()
        )
        return values, ids

    def topk_expand(
        self,
        hidden: Tensor,
        weight: Tensor | None,
        scores: Tensor,
        count: int,
        d2t: Tensor,
        out: Candidates | None = None,
    ) -> tuple[Tensor, ...]:
        """`reference.topk_expand`."""
        parts: dict[str, Any] = {"product": self.linear, "likeliest": self.topk_logprobs}
        return drafting_reference.topk_expand(hidden, weight, scores, count, d2t, out, **parts)
