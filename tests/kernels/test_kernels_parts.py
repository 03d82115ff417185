"""Products in parts: each part held to float64, their sum to the product, and the norm that adds them up to the norm of
their sum."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.examples import examples
from helpers.kernels import CPU, CUDA
from helpers.kernels_linear import DTYPES, drawn, product
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from fastspec.generation.decoder_layer import gated
from fastspec.generation.decoder_layer import product as layer_product
from fastspec.kernels.layer import reference
from fastspec.kernels.layer.norms import rms_norm
from fastspec.kernels.linear import linear as kernel
from fastspec.kernels.linear.launches import MULTIPROCESSORS, Launch, parts_launch_for
from fastspec.kernels.linear.linear import linear_parts
from fastspec.kernels.linear.reference import Parts, joined
from fastspec.patches.backends import triton_ops

SMALL = [
    Launch(16, 16, 4, 3, parts=3),
    Launch(32, 32, 4, 2, parts=1),
    Launch(16, 32, 4, 4, parts=2),
    Launch(32, 16, 4, 2, parts=100),
]
SHAPES = [(4096, 4096), (4096, 14336), (1536, 8960), (576, 1536), (1000, 4096), (576, 5184)]


def check(x, weight, bias, launch) -> None:
    """Every part within its bound, their sum within the product's, and the same bit for bit twice."""
    got, again = (linear_parts(x, weight, bias, launch=launch) for _ in range(2))
    assert isinstance(got, Parts) and torch.equal(got.values, again.values)
    assert (
        got.shape == (len(x), len(weight))
        and got.dtype == x.dtype
        and got.values.dtype == torch.float32
        and got.values.is_contiguous()
    )
    exact, bound = product(x, weight, bias)
    assert bool(((joined(got).double() - exact).abs() <= bound).all())
    steps, count = weight.shape[1] // launch.depth, len(got.values)
    assert count == min(launch.parts, steps)
    for index, part in enumerate(got.values):
        share = slice(steps * index // count * launch.depth, steps * (index + 1) // count * launch.depth)
        exact, bound = product(
            x[:, share].float(), weight[:, share].float(), None if index or bias is None else bias.float()
        )
        assert bool(((part.double() - exact).abs() <= bound).all()), f"part {index} of {launch}"


@pytest.mark.parametrize("device", [CPU, CUDA])
@given(
    rows=st.sampled_from([1, 2, 7, 16, 17, 33]),
    channels=st.sampled_from([1, 7, 31, 32, 65]),
    blocks=st.integers(1, 6),
    dtype=st.sampled_from(DTYPES),
    biased=st.booleans(),
    sliced=st.booleans(),
    launch=st.sampled_from(SMALL),
    seed=st.integers(0, 2**31),
)
@examples(40)
def test_every_launch_gives_the_parts(device, rows, channels, blocks, dtype, biased, sliced, launch, seed):
    torch.manual_seed(seed)
    check(*drawn(rows, channels, blocks * launch.depth, dtype, device, biased, sliced), launch)


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [2, 8, 16, 17, 61, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_tables_launches_give_the_parts(device, shape, rows, dtype):
    torch.manual_seed(rows)
    launch = parts_launch_for(rows, *shape, dtype)
    assert (launch is None) == (rows <= 16 and shape[1] < 4096)
    if launch is not None:
        check(*drawn(rows, *shape, dtype, device, True), launch)


@pytest.mark.parametrize("device", [CPU, CUDA])
@given(
    parts=st.integers(1, 5),
    rows=st.sampled_from([(1, 1), (2, 3), (1, 17)]),
    size=st.sampled_from([1, 7, 64, 65]),
    dtype=st.sampled_from(DTYPES),
    with_residual=st.booleans(),
    seed=st.integers(0, 2**31),
)
@examples(40)
def test_the_norm_of_parts_is_that_of_their_sum(device, parts, rows, size, dtype, with_residual, seed):
    """Bit for bit: the parts are added in one order, and rounded where a product is."""
    torch.manual_seed(seed)
    x = Parts(torch.randn(parts, *rows, size, device=device), dtype)
    weight = torch.randn(size, device=device).to(dtype)
    residual = torch.randn(*rows, size, device=device).to(dtype) if with_residual else None
    for got, want in zip(rms_norm(x, weight, 1e-5, residual), rms_norm(joined(x), weight, 1e-5, residual), strict=True):
        assert got.shape == want.shape == (*rows, size) and got.dtype == dtype and torch.equal(got, want)
    emitted, plain = (
        reference.rms_norm(x, weight, 1e-5, residual),
        reference.rms_norm(joined(x), weight, 1e-5, residual),
    )
    assert all(map(torch.equal, emitted, plain))


def test_parts_are_added_in_their_order():
    """1 is lost beside 2**24 in fp32, unless the large ones have gone before."""
    values = torch.tensor([2.0**24, 1.0, -(2.0**24)])[:, None]
    assert (
        joined(Parts(values, torch.float32)).item() == 0.0
        and joined(Parts(values[[0, 2, 1]], torch.float32)).item() == 1.0
    )
    x = torch.ones(2)
    assert joined(x) is x


@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize("rows", [2, 17])
def test_the_feed_forward_hands_its_parts_to_the_norm(device, rows):
    """What a layer runs: the down-projection in parts where the table has a launch for it, a tensor elsewhere."""
    torch.manual_seed(0)
    gate, up, down = (
        nn.Linear(*size, bias=False, device=device, dtype=torch.float16) for size in ((64, 256), (64, 256), (256, 64))
    )
    x, ops = torch.randn(1, rows, 64, device=device).half(), triton_ops()
    with torch.no_grad():
        both = ops, replace(ops, linear_parts=None)
        change, plain = (gated(each, gate, up, layer_product(each, (down,), parts=True))(x) for each in both)
        act = F.silu(ops.linear(x, gate.weight, None)) * ops.linear(
            x, up.weight, None
        )  # apart in memory: as `gated` multiplies them
        exact, bound = product(act[0], down.weight, None)
    assert isinstance(change, Parts) == (rows > 16) and isinstance(plain, torch.Tensor)
    for got in (joined(change), plain):
        assert bool(((got[0].double() - exact).abs() <= bound).all())


def test_what_has_no_launch_goes_to_linear(monkeypatch):
    monkeypatch.setattr(kernel, "_parts_kernel", None)
    x, weight = torch.randn(17, 256), torch.randn(64, 256)
    half = x.half(), weight.half()
    assert parts_launch_for(17, *half[1].shape, torch.float16) == Launch(64, 128, 4, 4, parts=2)
    seen = []
    monkeypatch.setattr(kernel, "linear", lambda *operands: seen.append(operands) or operands[0])
    graded = half[1].clone().requires_grad_()
    calls = [(x, weight, None), (half[0][:1], half[1], None), (half[0], graded, None), (half[0], weight, None)]
    calls.append((half[0], half[1][:, ::2], None))
    for operands in calls:
        linear_parts(*operands)
    assert [len(operands) for operands in seen] == [3] * len(calls)


def test_a_depth_that_is_no_multiple_of_128_is_cut_into_steps_of_64():
    """Else a narrow, deep product, such as a head's down-projection 576 by 5,184, is left to nine programs."""
    launch = parts_launch_for(10, 576, 5184, torch.bfloat16)
    assert launch == Launch(64, 64, 4, 6, parts=14) and parts_launch_for(10, 576, 5160, torch.bfloat16) is None
    torch.manual_seed(0)
    check(*drawn(10, 576, 5184, torch.float16, "cpu", False), launch)


@pytest.mark.parametrize("rows", range(1, 66))
def test_the_parts_of_a_table_fill_the_device_once(rows):
    for channels in (64, 576, 1536, 4096, 8192, 14336):
        for depth in (128, 576, 1536, 4096, 5184, 8960, 14336):
            launch = parts_launch_for(rows, channels, depth, torch.bfloat16)
            if launch is not None:
                assert (
                    1 <= launch.parts * -(-channels // launch.channels) <= MULTIPROCESSORS and depth % launch.depth == 0
                )
                stages = launch.stages * launch.depth * (launch.channels + max(16, 1 << (rows - 1).bit_length())) * 2
                assert stages <= 227 * 1024 and launch.parts <= depth // launch.depth


def test_a_launch_that_does_not_fit_is_said():
    for rows, depth, width in ((2, 40, 40), (2, 32, 64), (0, 32, 32)):
        x, weight = torch.ones(rows, depth), torch.ones(3, width)
        with pytest.raises(ValueError, match="multiple of its depth"):
            linear_parts(x, weight, None, launch=Launch(16, 32, 4, 2, parts=2))
