"""Drawn inputs of tree attention, and the bound of its error."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from fastspec.kernels.attention import reference
from fastspec.kernels.attention import tree as kernels
from fastspec.kernels.attention.layout import TreeLayout, attention_layout
from helpers.kernels import CPU, CUDA

pytest.importorskip("triton")

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
TYPED = [
    pytest.param(*CPU.values, dtype, marks=CPU.marks) for dtype in (torch.float32, torch.float16)
]  # the interpreter has no bf16
TYPED += [
    pytest.param(*CUDA.values, dtype, marks=CUDA.marks) for dtype in (torch.float32, torch.float16, torch.bfloat16)
]
FP32_SLACK = (
    2e-5  # scores are of size 1, sums of up to 256 products: with the exponential some 100 roundings of fp32 in all
)
NEW_EMPTY = Tensor.new_empty


def poisoned(like: Tensor, *args: object, **options: object) -> Tensor:
    """What the kernel allocates, full of NaN: an element that is not written is found, and one that is not to be read
    too."""
    made = NEW_EMPTY(like, *args, **options)
    return made.fill_(torch.nan) if made.is_floating_point() else made  # the interpreter makes tensors too


def excess(got: Tensor, expected: tuple[Tensor, Tensor]) -> float:
    """By how much an element is off, as a share of its bound: the weights and the result are rounded once each to the
    dtype, by half an eps, and both errors are at most that share of the weighted sum of |v|. In fp32 these are lost in
    the slack. A result below the dtype's smallest normal number is rounded to a multiple of its smallest."""
    wanted, size = expected
    kind = torch.finfo(got.dtype)
    bound = (kind.eps + FP32_SLACK) * size + kind.smallest_normal * kind.eps + 1e-30
    return float(((got.double() - wanted).abs() / bound).nan_to_num(torch.inf).max())


class Case:
    """Drawn inputs and what the reference makes of them in fp64. Slots that nobody sees hold NaN for the kernel."""

    def __init__(
        self,
        prefixes: list[int],
        nodes: int,
        heads: tuple[int, int],
        size: int,
        dtype: torch.dtype,
        device: str,
        *,
        tail: int | None = None,
        chain: bool = False,
        capacity: int = 0,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        kv_heads, group = heads
        self.nodes, self.group, self.scale = nodes, group, size**-0.5
        self.seeing: dict[str, Any] = {}  # more arguments of the layout
        self.extras: dict[str, Any] = {}  # and of the attention
        self.tail = nodes if tail is None else tail
        self.extent = max(capacity, max(prefixes) + self.tail)
        rows = len(prefixes)
        normal = torch.randn(rows, nodes, kv_heads * group + 2, size, generator=generator)
        self.q = normal.to(device, dtype)[:, :, 1:-1]  # strided, as a slice of packed queries, keys, values
        cache = torch.randn(2, rows, kv_heads, self.extent + 3, size, generator=generator).to(device, dtype)
        self.prefix = torch.tensor(prefixes, device=device)
        self.words = None
        if not chain:
            bits = torch.randint(-(2**63), 2**63 - 1, (rows, nodes, -(-self.tail // 64)), generator=generator)
            bits |= torch.randint(-(2**63), 2**63 - 1, bits.shape, generator=generator)
            bits[:, :, 0] |= 1  # a node sees at least the root
            self.words = bits.to(device)
        self.clean = cache.clone()
        for row, prefix in enumerate(prefixes):
            cache[:, row, :, prefix + self.tail :] = torch.nan
        self.k, self.v = cache

    def layout(self) -> TreeLayout:
        return attention_layout(self.prefix, self.words, self.nodes, self.tail, self.extent, self.group, **self.seeing)

    def expected(self) -> tuple[Tensor, Tensor]:
        """The result, and the same of |v|."""
        layout = reference.attention_layout(
            self.prefix, self.words, self.nodes, self.tail, self.extent, self.group, **self.seeing
        )
        q, k, v = (x.double() for x in (self.q, *self.clean))
        wanted, size = (reference.tree_attention(q, k, x, layout, self.scale, **self.extras) for x in (v, v.abs()))
        return wanted, size

    def check(self, layout: TreeLayout | None = None) -> Tensor:
        layout = layout or self.layout()
        with patch.object(Tensor, "new_empty", poisoned):
            got = kernels.tree_attention(self.q, self.k, self.v, layout, self.scale, **self.extras)
        assert got.is_contiguous() and got.dtype == self.q.dtype
        assert excess(got, self.expected()) < 1
        return got


HEADS = st.sampled_from([(1, 1), (2, 1), (1, 4), (2, 3)])


def good() -> dict[str, object]:
    layout = attention_layout(torch.tensor([4]), None, 2, 2, 8, 2)
    return {
        "q": torch.ones(1, 2, 4, 8),
        "k": torch.ones(1, 2, 8, 8),
        "v": torch.ones(1, 2, 8, 8),
        "layout": layout,
        "scale": 1.0,
    }
