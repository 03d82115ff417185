"""The mixture's kernels against the reference's definition in fp64, for drawn sizes, and routers from even to all on one expert."""

from __future__ import annotations

import pytest
import torch
from helpers_examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastspec.kernels.linear import experts as kernels
from fastspec.kernels.linear import reference as ops
from fastspec.kernels.linear.experts import experts

CPU = pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the CPU only in the interpreter"))
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")])
EVERYWHERE = pytest.mark.parametrize("device", [CPU, CUDA])
SHAPES = {  # experts, choices, hidden size, expert size
    "cpu": [(1, 1, 16, 16), (4, 2, 40, 24), (9, 3, 65, 33), (8, 2, 130, 48)],
    "cuda": [(8, 2, 1024, 3584), (32, 4, 2880, 1440), (128, 8, 2048, 768), (9, 3, 65, 33), (60, 4, 2048, 1408)],
}
TOKENS = {"cpu": [1, 7, 17, 35, 65], "cuda": [1, 7, 16, 17, 32, 61, 65, 300, 1031]}
DTYPES = {"cpu": [torch.float32, torch.float16], "cuda": [torch.float32, torch.float16, torch.bfloat16]}


@pytest.fixture(autouse=True, scope="module")
def poisoned():
    """What the kernels' hosts allocate starts as NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def routed(generator: torch.Generator, tokens: int, count: int, choices: int, kind: str) -> tuple[Tensor, Tensor]:
    """chosen, weights [tokens, choices] of a softmax router: even, skewed, all alike, or the same expert in every place."""
    skew = {"even": 0.0, "skewed": 4.0, "alike": 1e4, "repeated": 0.0}[kind]
    logits = torch.randn(tokens, count, generator=generator) + skew * torch.randn(count, generator=generator)
    weights, chosen = torch.topk(torch.softmax(logits / (1 + skew), -1), choices, dim=-1)
    return (chosen[:, :1].expand(-1, choices).contiguous() if kind == "repeated" else chosen), weights / weights.sum(-1, keepdim=True)


def exactly(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The mixture in fp64 with the roundings left out, and what an error of one unit in each rounded product can amount to, [T, H]."""
    out, slack = (torch.zeros(x.shape, dtype=torch.float64, device=x.device) for _ in range(2))
    for expert in chosen.unique().tolist():
        places = (chosen == expert).nonzero()
        token, share = places[:, 0], weights.double()[places[:, 0], places[:, 1]][:, None]
        gate, up = (x[token].double() @ gate_up[expert].double().T).chunk(2, -1)
        inner = torch.nn.functional.silu(gate) * up
        wide = down[expert].double()
        out.index_add_(0, token, share * (inner @ wide.T))
        # Gate's unit moves silu by at most 1.1 |gate|, up's moves the product by itself; both products, the silu and the result round.
        moved = 1.1 * gate.abs() * up.abs() + 2 * inner.abs()
        slack.index_add_(0, token, share.abs() * ((moved.square() @ wide.T.square()).sqrt() + (inner @ wide.T).abs()))
    return out, slack


@EVERYWHERE
@given(
    data=st.data(), seed=st.integers(0, 2**31), kind=st.sampled_from(["even", "skewed", "alike", "repeated"]),
    pad=st.sampled_from([0, 16]), weights_dtype=st.sampled_from([torch.float32, None]),
)  # fmt: skip
@examples(7)
def test_experts(device, data, seed, kind, pad, weights_dtype):
    generator = torch.Generator().manual_seed(seed)
    dtype = data.draw(st.sampled_from(DTYPES[device]))
    count, choices, size, inner = data.draw(st.sampled_from(SHAPES[device]))
    tokens = data.draw(st.sampled_from(TOKENS[device]))
    chosen, weights = routed(generator, tokens, count, choices, kind)
    weights = weights.to(weights_dtype or dtype)
    on_device = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=on_device, device=device) * scale).to(dtype)

    x = normal(tokens, size + pad)
    x[:, size:] = torch.nan
    x, chosen, weights = x[:, :size], chosen.to(device), weights.to(device)
    gate_up, down = normal(count, 2 * inner, size, scale=size**-0.5), normal(count, size, inner, scale=inner**-0.5)
    unused = torch.ones(count, dtype=torch.bool, device=device)
    unused[chosen.flatten()] = False
    gate_up[unused], down[unused] = torch.nan, torch.nan  # an expert that nobody chose is not read
    out = experts(x, gate_up, down, chosen, weights)
    expected, slack = exactly(x, gate_up, down, chosen, weights)
    assert out.shape == x.shape and out.dtype == dtype and out.is_contiguous()
    # Errors of the inner roundings add up as independent ones: six standard deviations of half a unit each; then a unit of the result.
    # In fp32 they are the errors of sums of n products instead, a seventh of the root of n units each (one standard deviation).
    unit = torch.finfo(dtype).eps
    grown = max(1.0, max(size, inner) ** 0.5 / 3) if dtype == torch.float32 else 1.0
    bound = unit * grown * (3 * slack + expected.abs()) + 1e-7 * unit
    error = (out.double() - expected).abs()
    assert bool((error <= bound).all()), f"off by {(error / bound).max().item():.2f} times the bound"
    assert torch.equal(experts(x, gate_up, down, chosen, weights), out)  # and the same bits again


@EVERYWHERE
@given(seed=st.integers(0, 2**31), tokens=st.sampled_from([1, 7, 33]), count=st.sampled_from([1, 8, 40]), choices=st.integers(1, 8))
@examples(7)
@pytest.mark.parametrize("block", [32, 1024])
def test_pairs_are_grouped_by_expert(device, seed, tokens, count, choices, block):
    chosen = torch.randint(count, (tokens, choices), generator=torch.Generator().manual_seed(seed)).to(device)
    pairs, groups = chosen.numel(), min(chosen.numel(), count)
    order, expert, begin, end = (torch.full((n,), -(10**9), dtype=torch.int32, device=device) for n in (pairs, groups, groups, groups))
    kernels._group[(count,)](chosen, order, expert, begin, end, pairs, BY_EXPERT=pairs >= count, BLOCK=block, PDL=False, num_warps=1)
    assert order.tolist() == chosen.flatten().sort(stable=True).indices.tolist()
    runs = [(e, b, n) for e, b, n in zip(expert.tolist(), begin.tolist(), end.tolist(), strict=True) if n > b]
    found, sizes = chosen.unique(return_counts=True)
    ends = sizes.cumsum(0)
    assert runs == list(zip(found.tolist(), (ends - sizes).tolist(), ends.tolist(), strict=True))
    assert bool((begin >= 0).all() and (end >= 0).all())


@EVERYWHERE
def test_the_reference_says_the_same(device):
    generator = torch.Generator().manual_seed(3)
    chosen, weights = (part.to(device) for part in routed(generator, 7, 4, 2, "even"))
    x, gate_up, down = (torch.randn(*s, generator=generator).to(device) / 4 for s in [(7, 40), (4, 48, 40), (4, 40, 24)])
    assert torch.allclose(experts(x, gate_up, down, chosen, weights), ops.experts(x, gate_up, down, chosen, weights), rtol=1e-5, atol=1e-6)


def test_what_the_experts_refuse():
    x, gate_up, down = torch.zeros(3, 16), torch.zeros(4, 16, 16), torch.zeros(4, 16, 8)
    chosen, weights = torch.zeros(3, 2, dtype=torch.long), torch.zeros(3, 2)
    with pytest.raises(ValueError, match=r"gate_up is \[4, 16, 16\]"):
        experts(x, gate_up, torch.zeros(4, 16, 9), chosen, weights)
    with pytest.raises(ValueError, match=r"chosen is torch\.int64"):
        experts(x, gate_up, down, chosen, weights[:, :1])
    with pytest.raises(ValueError, match="down has strides"):
        experts(x, gate_up, torch.zeros(4, 8, 16).transpose(1, 2), chosen, weights)
    with pytest.raises(ValueError, match=r"x is torch\.float16"):
        experts(x.half(), gate_up, down, chosen, weights)
