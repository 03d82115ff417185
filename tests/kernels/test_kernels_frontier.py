"""`next_frontier`, the first layer's input of a head, and `gate_up` against their references; gathers are exact, a norm
and a product are as their own tests say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.examples import examples
from helpers.kernels import DTYPES, EVERYWHERE
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastspec.kernels.drafting import reference as drafting_reference
from fastspec.kernels.drafting.inputs import frontier_input, head_input, next_frontier
from fastspec.kernels.drafting.reference import InputWeights
from fastspec.kernels.layer.norms import rms_norm
from fastspec.kernels.linear import reference as linear_reference
from fastspec.kernels.linear.linear import gate_up


@EVERYWHERE
@given(
    rows=st.integers(1, 3),
    nodes=st.integers(1, 10),
    children=st.integers(1, 10),
    width=st.sampled_from([1, 7, 64, 65]),
    slot=st.integers(0, 100),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    seed=st.integers(0, 2**31),
)
@examples(10)
def test_next_frontier(device, rows, nodes, children, width, slot, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    chosen = min(children, nodes * children)
    words = -(-(slot + chosen) // 64)
    tokens = torch.randint(0, 2**40, (rows, nodes * children), generator=generator)
    index = torch.stack([torch.randperm(nodes * children, generator=generator)[:chosen] for _ in range(rows)])
    hidden = torch.randn(rows, nodes, width, generator=generator).to(dtype)
    seen = torch.randint(-(2**62), 2**62, (rows, nodes, words), generator=generator)
    inputs = [x.to(device) for x in (tokens, index, hidden, seen)]
    got, wanted = next_frontier(*inputs, slot), drafting_reference.next_frontier(tokens, index, hidden, seen, slot)
    assert all(torch.equal(a.cpu(), b) and a.dtype == b.dtype for a, b in zip(got, wanted, strict=True))
    for row in range(rows):  # the reference itself, bit by bit
        for place, child in enumerate(index[row].tolist()):
            bits = [int(seen[row, child // children, word]) & (1 << 64) - 1 for word in range(words)]
            bits[(slot + place) // 64] |= 1 << (slot + place) % 64
            assert [int(word) & (1 << 64) - 1 for word in wanted[2][row, place]] == bits


@EVERYWHERE
def test_strided_inputs_are_refused(device):
    tokens, hidden = torch.zeros(2, 4, dtype=torch.long, device=device), torch.zeros(2, 2, 8, device=device)
    index, words = (
        torch.zeros(2, 2, dtype=torch.long, device=device),
        torch.zeros(2, 2, 1, dtype=torch.long, device=device),
    )
    with pytest.raises(ValueError, match=r"hidden is .* strides .* contiguous"):
        next_frontier(tokens, index, hidden.transpose(0, 1), words, 0)


EPS = 1e-5
SIZES = {"cpu": [1, 7, 63, 64, 65], "cuda": [1, 65, 576, 4096, 8192]}


def with_rows_apart(x: Tensor, pad: int) -> Tensor:
    """The same values as a slice of wider rows."""
    return torch.cat((x, x.new_full((x.shape[0], pad), 2**40)), 1)[:, : x.shape[1]]


class Drawn:
    """A target's table, the weights of two norms, and the nodes that a level is chosen from."""

    def __init__(
        self, device: str, size: int, dtype: torch.dtype, rows: int, nodes: int, children: int, slot: int, seed: int
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.chosen = int(torch.randint(1, nodes * children + 1, (), generator=generator))
        words = -(-(slot + self.chosen) // 64)
        self.tokens = torch.randint(0, 19, (rows, nodes * children), generator=generator).to(device)
        index = torch.stack([torch.randperm(nodes * children, generator=generator)[: self.chosen] for _ in range(rows)])
        self.index = with_rows_apart(index, seed % 3).to(device)
        self.hidden = torch.randn(rows, nodes, size, generator=generator).to(dtype).to(device)
        self.words = torch.randint(-(2**62), 2**62, (rows, nodes, words), generator=generator).to(device)
        self.table = torch.randn(19, size, generator=generator).to(dtype).to(device)
        self.norms = [torch.randn(size, generator=generator).to(dtype).to(device) for _ in range(2)]

    def weights(self, offset: float | None = None) -> InputWeights:
        return InputWeights(self.table, *self.norms, EPS, offset)


def check_input(x: Tensor, tokens: Tensor, hidden: Tensor, drawn: Drawn, offset: float | None) -> None:
    """Both halves as close to the reference as a norm is, whose sums are in another order, and to the bit what the
    kernel of a norm makes of the looked-up embeddings and the states; rows at odd addresses, which compiled kernels may
    share out otherwise, apart."""
    size = hidden.shape[-1]
    embedded = torch.nn.functional.embedding(tokens, drawn.table)
    for half, values, weight in (
        (x[..., :size], embedded, drawn.norms[0]),
        (x[..., size:], hidden.contiguous(), drawn.norms[1]),
    ):
        assert (x.is_cuda and size % 16) or torch.equal(half, rms_norm(values, weight, EPS, offset=offset)[0])
    wanted = drafting_reference.head_input(tokens, hidden, drawn.weights(offset))
    # in half precision a unit where a rounding before the weight falls otherwise, and one after it; in fp32 a few of
    # the scale's
    limits = torch.finfo(x.dtype)
    torch.testing.assert_close(x, wanted, rtol=(8 if x.dtype == torch.float32 else 2.01) * limits.eps, atol=limits.tiny)


@EVERYWHERE
@given(
    data=st.data(),
    rows=st.integers(1, 3),
    nodes=st.integers(1, 10),
    children=st.integers(1, 10),
    slot=st.sampled_from([0, 1, 53, 62, 63, 64, 65, 127, 128]),
    offset=st.sampled_from([None, 1.0]),
    seed=st.integers(0, 2**31),
)
@examples(10)
def test_frontier_input(device, filled_with_nan, data, rows, nodes, children, slot, offset, seed):
    size, dtype = data.draw(st.sampled_from(SIZES[device])), data.draw(st.sampled_from(DTYPES[device]))
    drawn = Drawn(device, size, dtype, rows, nodes, children, slot, seed)
    before = drawn.tokens, drawn.index, drawn.hidden, drawn.words, slot
    x, hidden, words = frontier_input(*before, drawn.weights(offset))
    tokens, *wanted = drafting_reference.next_frontier(*before)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip((hidden, words), wanted, strict=True))
    check_input(x, tokens, hidden, drawn, offset)
    assert torch.equal(drafting_reference.frontier_input(*before, drawn.weights(offset))[2], words)


@EVERYWHERE
@given(
    data=st.data(),
    rows=st.integers(1, 3),
    nodes=st.sampled_from([1, 2, 7, 33]),
    pad=st.integers(0, 2),
    offset=st.sampled_from([None, 1.0]),
    seed=st.integers(0, 2**31),
)
@examples(8)
def test_head_input(device, filled_with_nan, data, rows, nodes, pad, offset, seed):
    size, dtype = data.draw(st.sampled_from(SIZES[device])), data.draw(st.sampled_from(DTYPES[device]))
    drawn = Drawn(device, size, dtype, rows, nodes, 1, 0, seed)
    x = head_input(with_rows_apart(drawn.tokens, pad), drawn.hidden, drawn.weights(offset))
    check_input(x, drawn.tokens, drawn.hidden, drawn, offset)


@EVERYWHERE
def test_inputs_that_do_not_fit_are_refused(device):
    drawn = Drawn(device, 8, torch.float32, 2, 3, 1, 0, 0)
    weights = drawn.weights()
    with pytest.raises(ValueError, match=r"hidden is .* strides .* contiguous"):
        head_input(drawn.tokens[:, :2], drawn.hidden.transpose(0, 1)[:2], weights)
    with pytest.raises(ValueError, match=r"tokens is \[2, 2\].*accepted is \[2, 3\]"):
        head_input(drawn.tokens[:, :2], drawn.hidden, weights)
    with pytest.raises(ValueError, match=r"table is .*float16.*accepted is \[V, 8\] torch.float32"):
        head_input(drawn.tokens, drawn.hidden, replace(weights, table=drawn.table.half()))
    with pytest.raises(ValueError, match="hidden_norm is"):
        head_input(drawn.tokens, drawn.hidden, replace(weights, hidden_norm=drawn.norms[1][:7]))
    with pytest.raises(ValueError, match=r"words is .* strides .* contiguous"):
        words = torch.zeros(2, 2, 3, dtype=torch.long, device=device).transpose(1, 2)
        frontier_input(drawn.tokens, drawn.index, drawn.hidden, words, 0, weights)


@EVERYWHERE
@pytest.mark.parametrize("rows", [1, 5, 40, 100])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "kind", [linear_reference.SILU, linear_reference.GELU_TANH, linear_reference.Activation(1.702)], ids=str
)
def test_gate_up_joins_the_parts_of_the_product(device, rows, bias, kind):
    """In fp32: a sum of 64 products in another order, then what opens the gate; 1e-5 is some 80 roundings of values of
    size 1."""
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, 64, generator=generator), torch.randn(2 * 48, 64, generator=generator) / 8

    def both(x: Tensor, weight: Tensor, added: Tensor | None) -> None:
        wanted = linear_reference.gate_up(x.double(), weight.double(), None if added is None else added.double(), kind)
        torch.testing.assert_close(gate_up(x, weight, added, kind).double(), wanted, rtol=1e-5, atol=1e-5)

    both(x.to(device), weight.to(device), torch.randn(96, generator=generator).to(device) if bias else None)
