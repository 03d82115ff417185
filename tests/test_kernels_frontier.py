"""`next_frontier` and `gate_up` against their references; gathers are exact, a product is as its own test says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastspec.kernels import reference
from fastspec.kernels.linear import gate_up
from fastspec.kernels.next_frontier import next_frontier

CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")])
CPU = pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a CUDA device"))
EVERYWHERE = pytest.mark.parametrize("device", [CPU, CUDA])


@EVERYWHERE
@given(
    rows=st.integers(1, 3), nodes=st.integers(1, 10), children=st.integers(1, 10), width=st.sampled_from([1, 7, 64, 65]),
    slot=st.integers(0, 100), dtype=st.sampled_from([torch.float32, torch.float16]), seed=st.integers(0, 2**31),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_next_frontier(device, rows, nodes, children, width, slot, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    chosen = min(children, nodes * children)
    words = -(-(slot + chosen) // 64)
    tokens = torch.randint(0, 2**40, (rows, nodes * children), generator=generator)
    index = torch.stack([torch.randperm(nodes * children, generator=generator)[:chosen] for _ in range(rows)])
    hidden = torch.randn(rows, nodes, width, generator=generator).to(dtype)
    seen = torch.randint(-(2**62), 2**62, (rows, nodes, words), generator=generator)
    inputs = [x.to(device) for x in (tokens, index, hidden, seen)]
    got, wanted = next_frontier(*inputs, slot), reference.next_frontier(tokens, index, hidden, seen, slot)
    assert all(torch.equal(a.cpu(), b) and a.dtype == b.dtype for a, b in zip(got, wanted, strict=True))
    for row in range(rows):  # the reference itself, bit by bit
        for place, child in enumerate(index[row].tolist()):
            bits = [int(seen[row, child // children, word]) & (1 << 64) - 1 for word in range(words)]
            bits[(slot + place) // 64] |= 1 << (slot + place) % 64
            assert [int(word) & (1 << 64) - 1 for word in wanted[2][row, place]] == bits


@EVERYWHERE
def test_strided_inputs_are_refused(device):
    tokens, hidden = torch.zeros(2, 4, dtype=torch.long, device=device), torch.zeros(2, 2, 8, device=device)
    index, words = torch.zeros(2, 2, dtype=torch.long, device=device), torch.zeros(2, 2, 1, dtype=torch.long, device=device)
    with pytest.raises(ValueError, match="hidden has strides"):
        next_frontier(tokens, index, hidden.transpose(0, 1), words, 0)


@EVERYWHERE
@pytest.mark.parametrize("rows", [1, 5, 40, 100])
@pytest.mark.parametrize("bias", [False, True])
def test_gate_up_is_swiglu_of_the_product(device, rows, bias):
    """In fp32: a sum of 64 products in another order, then silu; 1e-5 is some 80 roundings of values of size 1."""
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, 64, generator=generator), torch.randn(2 * 48, 64, generator=generator) / 8

    def both(x: Tensor, weight: Tensor, added: Tensor | None) -> None:
        wanted = reference.gate_up(x.double(), weight.double(), None if added is None else added.double())
        torch.testing.assert_close(gate_up(x, weight, added).double(), wanted, rtol=1e-5, atol=1e-5)

    both(x.to(device), weight.to(device), torch.randn(96, generator=generator).to(device) if bias else None)
