"""The mixture's kernels against the reference's definition in fp64, for drawn sizes, and routers from even to all on
one expert."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.examples import examples
from helpers.kernels import DTYPES, EVERYWHERE
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastspec.kernels.linear import experts as kernels
from fastspec.kernels.linear import reference as ops
from fastspec.kernels.linear.experts import experts
from fastspec.kernels.linear.launches import experts_launch_for
from fastspec.kernels.linear.reference import SWIGLU
from fastspec.kernels.quantised import reference as quantised
from fastspec.kernels.quantised.reference import MXFP4, PACKED4, StoredExperts, StoredWeight

pytestmark = pytest.mark.usefixtures("filled_with_nan")
SHAPES = {  # experts, choices, hidden size, expert size
    "cpu": [(1, 1, 16, 16), (4, 2, 40, 24), (9, 3, 65, 33), (8, 2, 130, 48)],
    "cuda": [(8, 2, 1024, 3584), (32, 4, 2880, 1440), (128, 8, 2048, 768), (9, 3, 65, 33), (60, 4, 2048, 1408)],
}
TOKENS = {"cpu": [1, 1, 7, 17, 35, 65], "cuda": [1, 7, 16, 17, 32, 61, 65, 300, 1031]}


def routed(generator: torch.Generator, tokens: int, count: int, choices: int, kind: str) -> tuple[Tensor, Tensor]:
    """chosen, weights [tokens, choices] of a softmax router: even, skewed, all alike, or the same expert in every
    place."""
    skew = {"even": 0.0, "skewed": 4.0, "alike": 1e4, "repeated": 0.0}[kind]
    logits = torch.randn(tokens, count, generator=generator) + skew * torch.randn(count, generator=generator)
    weights, chosen = torch.topk(torch.softmax(logits / (1 + skew), -1), choices, dim=-1)
    return (chosen[:, :1].expand(-1, choices).contiguous() if kind == "repeated" else chosen), weights / weights.sum(
        -1, keepdim=True
    )


KINDS = {
    "swiglu": ops.SWIGLU,
    "gpt-oss": ops.Expert(
        interleaved=True, gate=ops.Activation(1.702), offset=1.0, limit=1.5
    ),  # within what the drawn numbers reach
    "llama4": ops.Expert(scales_input=True),
    "gemma4": ops.Expert(gate=ops.GELU_TANH),
}


def exactly(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    chosen: Tensor,
    weights: Tensor,
    kind: ops.Expert = ops.SWIGLU,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The mixture in fp64 with the roundings left out, and what an error of one unit in each rounded product can amount
    to, [T, H]."""
    out, slack = (torch.zeros(x.shape, dtype=torch.float64, device=x.device) for _ in range(2))
    if shared is not None:
        out += shared.double() * (1.0 if shared_gate is None else shared_gate.double().sigmoid())
    for expert in chosen.unique().tolist():
        places = (chosen == expert).nonzero()
        token, share = places[:, 0], weights.double()[places[:, 0], places[:, 1]][:, None]
        given = x[token].double() * (share if kind.scales_input else 1.0)
        both = given @ gate_up[expert].double().T + (0.0 if gate_up_bias is None else gate_up_bias[expert].double())
        gate, up = (both[:, ::2], both[:, 1::2]) if kind.interleaved else both.chunk(2, -1)
        read, added = gate.abs(), up.abs()
        if kind.limit is not None:
            gate, up = gate.clamp(max=kind.limit), up.clamp(-kind.limit, kind.limit)
        silu, up = gate * torch.sigmoid(kind.gate.alpha * (gate + kind.gate.cubic * gate**3)), up + kind.offset
        inner = silu * up
        wide, share = down[expert].double(), torch.ones_like(share) if kind.scales_input else share
        answer = inner @ wide.T + (0.0 if down_bias is None else down_bias[expert].double())
        out.index_add_(0, token, share * answer)
        # Gate's unit moves what gates by at most 1.13 |gate|, up's moves the product; both products, what gates and the
        # result round.
        moved = 1.13 * read * up.abs() + added * silu.abs() + inner.abs()
        slack.index_add_(0, token, share.abs() * ((moved.square() @ wide.T.square()).sqrt() + answer.abs()))
    return out, slack


@EVERYWHERE
@pytest.mark.parametrize("kind", KINDS)
@given(
    data=st.data(),
    seed=st.integers(0, 2**31),
    routed_to=st.sampled_from(["even", "skewed", "alike", "repeated"]),
    pad=st.sampled_from([0, 16]),
    weights_dtype=st.sampled_from([torch.float32, None]),
    transposed=st.booleans(),
    biases=st.booleans(),
    shared=st.sampled_from([None, "plain", "gated"]),
)
@examples(6)
def test_experts(device, kind, data, seed, routed_to, pad, weights_dtype, transposed, biases, shared):
    generator = torch.Generator().manual_seed(seed)
    dtype = data.draw(st.sampled_from(DTYPES[device]))
    count, choices, size, inner = data.draw(st.sampled_from(SHAPES[device]))
    tokens = data.draw(st.sampled_from(TOKENS[device]))
    chosen, weights = routed(generator, tokens, count, choices, routed_to)
    weights = weights.to(weights_dtype or dtype)
    on_device = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=on_device, device=device) * scale).to(dtype)

    def weight(*shape: int) -> Tensor:
        """Numbers that lie as they are indexed, or with the last two dimensions the other way round."""
        made = normal(*shape, scale=shape[-1] ** -0.5)
        return made.transpose(1, 2).contiguous().transpose(1, 2) if transposed else made

    x = normal(tokens, size + pad)
    x[:, size:] = torch.nan
    x, chosen, weights = x[:, :size], chosen.to(device), weights.to(device)
    gate_up, down = weight(count, 2 * inner, size), weight(count, size, inner)
    more = {"gate_up_bias": normal(count, 2 * inner), "down_bias": normal(count, size)} if biases else {}
    more |= {"shared": normal(tokens, size)} if shared else {}
    more |= {"shared_gate": normal(tokens, 1)} if shared == "gated" else {}
    unused = torch.ones(count, dtype=torch.bool, device=device)
    unused[chosen.flatten()] = False
    for held in (gate_up, down, *(more[name] for name in ("gate_up_bias", "down_bias") if biases)):
        held[unused] = torch.nan  # an expert that nobody chose is not read
    out = experts(x, gate_up, down, chosen, weights, KINDS[kind], **more)
    expected, slack = exactly(x, gate_up, down, chosen, weights, KINDS[kind], **more)
    assert out.shape == x.shape and out.dtype == dtype and out.is_contiguous()
    # Errors of the inner roundings add up as independent ones: six standard deviations of half a unit each; then a unit
    # of the result. In fp32 they are the errors of sums of n products instead, a seventh of the root of n units each
    # (one standard deviation).
    unit = torch.finfo(dtype).eps
    grown = max(1.0, max(size, inner) ** 0.5 / 3) if dtype == torch.float32 else 1.0
    bound = unit * grown * (3 * slack + expected.abs()) + 1e-7 * unit
    error = (out.double() - expected).abs()
    assert bool((error <= bound).all()), f"off by {(error / bound).max().item():.2f} times the bound"
    if device == "cuda":  # the interpreter runs programs one after another
        assert torch.equal(experts(x, gate_up, down, chosen, weights, KINDS[kind], **more), out)  # the same bits again


@pytest.mark.each_value
@EVERYWHERE
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 7, 65, 260])
@pytest.mark.parametrize("size", [(32, 32), (96, 160), (256, 128)])
def test_experts_as_stored(device, kind, tokens, size):
    """MXFP4 of all codes, of powers of 2 that are rounded away and that are not: the reference, which gives the bits of
    `experts` of the dequantised weights, but for the order of the sums. Experts that nobody chose are not read."""
    (hidden, inner), count = size, 5
    generator = torch.Generator().manual_seed(tokens)
    chosen, weights = routed(generator, tokens, count - 1, 2, "even")

    def drawn(channels: int, depth: int) -> StoredExperts:
        codes = torch.randint(0, 256, (count * channels, depth // 2), generator=generator).to(torch.uint8)
        scales = torch.randint(122, 126, (count * channels, depth // 32), generator=generator).to(torch.uint8)
        scales[::7, 0] = torch.tensor([0, 1, 90])[torch.arange(len(scales[::7])) % 3].to(torch.uint8)
        scales[(count - 1) * channels :] = 254
        powers = scales.to(device).view(torch.float8_e8m0fnu)
        return StoredExperts(StoredWeight(codes.to(device), MXFP4, powers, (1, 32), depth, None), count)

    gate_up, down = drawn(2 * inner, hidden), drawn(hidden, inner)
    for dtype in DTYPES[device]:
        shapes = (tokens, hidden), (count, 2 * inner), (count, hidden), (tokens, hidden), (tokens, 1)
        x, *others = (torch.randn(*each, generator=generator).to(device, dtype) / 4 for each in shapes)
        given = chosen.to(device), weights.to(device, dtype), KINDS[kind]
        more = dict(zip(("gate_up_bias", "down_bias", "shared", "shared_gate"), others, strict=True))
        got, wanted = (op(x, gate_up, down, *given, **more) for op in (experts, quantised.experts))
        dense = [torch.stack([each.dense(at, dtype) for at in range(count)]) for each in (gate_up, down)]
        for each in dense:
            each[-1] = 0
        assert torch.equal(wanted, ops.experts(x, *dense, *given, **more))
        _, slack = exactly(x, *dense, *given, **more)
        unit = torch.finfo(dtype).eps
        grown = max(hidden, inner) ** 0.5 / 3 if dtype == torch.float32 else 1.0
        bound = unit * max(1.0, grown) * (3 * slack + wanted.abs()) + 1e-7 * unit
        assert got.dtype == dtype and bool(((got.double() - wanted).abs() <= 2 * bound).all())


@EVERYWHERE
def test_other_stored_experts_are_refused(device):
    x, chosen = torch.ones(1, 32, device=device), torch.zeros(1, 1, dtype=torch.int64, device=device)
    weights = torch.ones(1, 1, device=device)
    lines = StoredWeight(
        torch.zeros(64, 16, dtype=torch.uint8, device=device),
        MXFP4,
        torch.ones(64, 1, device=device).to(torch.float8_e8m0fnu),
        (1, 32),
        32,
        None,
    )
    gate_up, down = StoredExperts(lines, 1), torch.ones(1, 32, 32, device=device)
    with pytest.raises(ValueError, match="or both be MXFP4"):
        experts(x, gate_up, down, chosen, weights)
    with pytest.raises(ValueError, match="contiguous MXFP4 in groups of 32"):
        experts(x, StoredExperts(replace(lines, kind=PACKED4), 1), down, chosen, weights)
    beside = torch.zeros(64 * 16 + 1, dtype=torch.uint8, device=device)[1:].view(64, 16)
    with pytest.raises(ValueError, match="at whole words"):
        experts(x, StoredExperts(replace(lines, codes=beside), 1), down, chosen, weights)


@pytest.mark.some("0", "64", "65", "300")
@EVERYWHERE
@pytest.mark.parametrize("first", [0, 10, 33, 64, 65, 150, 299, 300])
def test_many_pairs_of_an_expert_are_shared_out(device, first, monkeypatch):
    """So many of 300 tokens on the first of two experts: several programs take the pairs of each, and none is taken
    twice or left out."""
    dtype = torch.float32
    launch = experts_launch_for(300, dtype)
    parts, gate_up_kernel = [], kernels._gate_up
    monkeypatch.setattr(kernels, "_gate_up", Noted(gate_up_kernel, parts))
    generator = torch.Generator().manual_seed(first)
    chosen = (torch.randperm(300, generator=generator) >= first).long()[:, None].to(device)
    shapes = [(300, 16), (2, 32, 16), (2, 16, 16), (300, 1)]
    x, gate_up, down, weights = ((torch.randn(*s, generator=generator) / 4).to(device, dtype) for s in shapes)
    out = experts(x, gate_up, down, chosen, weights)
    expected, slack = exactly(x, gate_up, down, chosen, weights, SWIGLU)
    assert bool(((out.double() - expected).abs() <= 1e-6 * (3 * slack + expected.abs()) + 1e-9).all())
    assert parts == [300 // (2 * launch.large)] and parts[0] > 1


class Noted:
    """A kernel that notes the second dimension of its grids."""

    def __init__(self, kernel: Any, parts: list[int]) -> None:
        self.kernel, self.parts = kernel, parts

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.parts.append(grid[1])
        return self.kernel[grid]


@pytest.mark.some("True")
@pytest.mark.each_value
@EVERYWHERE
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("hopper", [False, True])
def test_every_size_of_a_group(device, transposed, hopper, monkeypatch):
    """As many pairs as the tiles of a launch hold, one less and one more."""
    dtype = torch.float16
    monkeypatch.setattr(kernels, "is_hopper", lambda device: hopper)
    launch = experts_launch_for(1000, dtype, hopper=hopper)
    assert launch.large == (256 if hopper else 128)
    sizes = [0, 1] + [tile + off for tile in (launch.small, launch.medium, launch.large) for off in (-1, 0, 1)]
    generator = torch.Generator().manual_seed(5)
    chosen = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    chosen = chosen[torch.randperm(len(chosen), generator=generator)][:, None].to(device)
    shapes = [(len(chosen), 32), (len(sizes), 48, 32), (len(sizes), 32, 24), (len(chosen), 1)]
    x, gate_up, down, weights = ((torch.randn(*s, generator=generator) / 4).to(device, dtype) for s in shapes)
    gate_up[0] = down[0] = torch.nan
    if transposed:
        gate_up, down = (part.transpose(1, 2).contiguous().transpose(1, 2) for part in (gate_up, down))
    out = experts(x, gate_up, down, chosen, weights)
    expected, slack = exactly(x, gate_up, down, chosen, weights, SWIGLU)
    unit = torch.finfo(dtype).eps
    assert len(chosen) > 64 and bool(
        ((out.double() - expected).abs() <= unit * (3 * slack + expected.abs()) + unit * 2**-14).all()
    )


@EVERYWHERE
@given(
    seed=st.integers(0, 2**31),
    tokens=st.sampled_from([1, 7, 33]),
    count=st.sampled_from([1, 8, 40]),
    choices=st.integers(1, 8),
)
@examples(7)
@pytest.mark.parametrize("block", [32, 1024])
def test_pairs_are_grouped_by_expert(device, seed, tokens, count, choices, block):
    chosen = torch.randint(count, (tokens, choices), generator=torch.Generator().manual_seed(seed)).to(device)
    pairs, groups = chosen.numel(), min(chosen.numel(), count)
    order, expert, begin, end = (
        torch.full((n,), -(10**9), dtype=torch.int32, device=device) for n in (pairs, groups, groups, groups)
    )
    kernels._group[(count,)](
        chosen, order, expert, begin, end, pairs, BY_EXPERT=pairs >= count, BLOCK=block, PDL=False, num_warps=1
    )
    assert order.tolist() == chosen.flatten().sort(stable=True).indices.tolist()
    runs = [(e, b, n) for e, b, n in zip(expert.tolist(), begin.tolist(), end.tolist(), strict=True) if n > b]
    found, sizes = chosen.unique(return_counts=True)
    ends = sizes.cumsum(0)
    assert runs == list(zip(found.tolist(), (ends - sizes).tolist(), ends.tolist(), strict=True))
    assert bool((begin >= 0).all() and (end >= 0).all())


@EVERYWHERE
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_gives_the_same_tokens(device, kind):
    generator = torch.Generator().manual_seed(3)
    chosen, weights = (part.to(device) for part in routed(generator, 7, 4, 2, "even"))
    shapes = [(7, 40), (4, 48, 40), (4, 40, 24), (4, 48), (4, 40), (7, 40), (7, 1)]
    x, gate_up, down, *more = (torch.randn(*s, generator=generator).to(device) / 4 for s in shapes)
    given = dict(zip(("gate_up_bias", "down_bias", "shared", "shared_gate"), more, strict=True))
    got, wanted = (op(x, gate_up, down, chosen, weights, KINDS[kind], **given) for op in (experts, ops.experts))
    assert torch.allclose(got, wanted, rtol=1e-5, atol=1e-6)


@EVERYWHERE
def test_what_is_not_a_number_stays_so(device):
    """A limit does not turn it into one."""
    x, gate_up, down = (
        torch.ones(1, 16, device=device),
        torch.ones(1, 16, 16, device=device),
        torch.ones(1, 16, 8, device=device),
    )
    chosen, weights = torch.zeros(1, 1, dtype=torch.long, device=device), torch.ones(1, 1, device=device)
    gate_up[0, 3] = torch.nan
    for kind in KINDS.values():
        assert bool(experts(x, gate_up, down, chosen, weights, kind).isnan().all())


def test_what_the_experts_refuse():
    x, gate_up, down = torch.zeros(3, 16), torch.zeros(4, 16, 16), torch.zeros(4, 16, 8)
    chosen, weights = torch.zeros(3, 2, dtype=torch.long), torch.zeros(3, 2)
    with pytest.raises(ValueError, match=r"gate_up is \[4, 16, 16\]"):
        experts(x, gate_up, torch.zeros(4, 16, 9), chosen, weights)
    for wrong in (weights[:, :1], weights[:2], weights[:, :0]):
        with pytest.raises(ValueError, match=r"chosen is torch\.int64"):
            experts(x, gate_up, down, chosen, wrong)
    with pytest.raises(ValueError, match=r"chosen is torch\.int64 \[3, 0\]"):
        experts(x, gate_up, down, chosen[:, :0], weights[:, :0])
    with pytest.raises(ValueError, match=r"down has strides.*transposed"):
        experts(x, gate_up, torch.zeros(4, 16, 16)[..., ::2], chosen, weights)
    with pytest.raises(ValueError, match=r"chosen is \[3, 2\] with strides"):
        experts(x, gate_up, down, chosen.T.contiguous().T, weights)
    with pytest.raises(ValueError, match=r"x is torch\.float16"):
        experts(x.half(), gate_up, down, chosen, weights)
    with pytest.raises(ValueError, match="must have one dtype"):
        experts(x, gate_up, down, chosen, weights, down_bias=torch.zeros(4, 16).half())
    with pytest.raises(ValueError, match=r"gate_up_bias is \[4, 8\].*\[4, 16\]"):
        experts(x, gate_up, down, chosen, weights, gate_up_bias=torch.zeros(4, 8))
    with pytest.raises(ValueError, match="pass shared as well"):
        experts(x, gate_up, down, chosen, weights, shared_gate=torch.zeros(3, 1))
