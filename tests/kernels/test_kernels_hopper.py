"""Products of a few rows on Hopper: the bounds of the other products, the same bits as theirs, and nothing read before
it is written."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.examples import examples
from helpers.kernels_linear import GATES, check_chain, gated, product
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton")

from fastspec.kernels.launch import is_hopper
from fastspec.kernels.linear import hopper as kernel
from fastspec.kernels.linear import linear as products
from fastspec.kernels.linear import linear as split
from fastspec.kernels.linear.hopper import hopper_linear, takes
from fastspec.kernels.linear.launches import MULTIPROCESSORS, HopperLaunch, hopper_launch_for, hopper_parts
from fastspec.kernels.linear.linear import Launch, linear, linear_parts
from fastspec.kernels.linear.reference import SILU, joined

HAS_HOPPER = torch.cuda.is_available() and is_hopper(torch.device("cuda"))
ON_HOPPER = pytest.mark.skipif(not HAS_HOPPER, reason="the kernel is for compute capability 9.0")
HALVES = [torch.float16, torch.bfloat16]
LAUNCHES = [
    HopperLaunch(64, 128, 4, 2),
    HopperLaunch(128, 64, 4, 1),
    HopperLaunch(64, 128, 6, 6),
    HopperLaunch(64, 128, 6, 3),
]
LAUNCHES += [HopperLaunch(64, 64, 2, 0), HopperLaunch(128, 64, 3, 3)]
LAUNCHES += [HopperLaunch(64, 64, 4, 3, rows=16), HopperLaunch(64, 128, 3, 3, rows=128)]
SHAPES = [
    (6144, 4096),
    (28672, 4096),
    (4096, 14336),
    (4096, 4096),
    (6144, 8192),
    (4096, 12288),
    (17920, 1536),
    (1536, 8960),
    (1536, 1536),
]
SHAPES += [(1024, 2048), (14336, 4096)]
FEW_WEIGHTS = [(960, 576), (960, 1152), (576, 576), (576, 1536), (576, 1920), (3072, 576), (3840, 576)]
GATED = [(28672, 4096), (14336, 4096), (17920, 1536)]
SPLIT = [(1024, 2048), (4096, 4096), (4096, 14336), (4096, 12288), (1536, 8960), (1536, 1536)]


def drawn(
    rows: int, channels: int, depth: int, dtype: torch.dtype, biased: bool, sliced: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """x [rows, depth], weight [channels, depth], bias; `sliced`: their lines lie apart, among NaN that no kernel may
    read."""
    x, weight = torch.randn(rows, depth, device="cuda"), torch.randn(channels, depth, device="cuda") / depth**0.5
    if sliced:
        x, weight = F.pad(x, (0, 8), value=torch.nan), F.pad(weight, (0, 16), value=torch.nan)
    bias = torch.randn(channels, device="cuda").to(dtype) if biased else None
    return x.to(dtype)[:, :depth], weight.to(dtype)[:, :depth], bias


def whole_sums(
    rows: int, shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> list[HopperLaunch]:
    """The table's product of small whole numbers, exact and rounded once, where the bound of a long sum is wide enough
    to hide a tile -> the launches of the kernel, to which later ones are added."""
    used: list[HopperLaunch] = []
    for module in (products, split):
        monkeypatch.setattr(
            module, "hopper_linear", lambda *operands: used.append(operands[4]) or hopper_linear(*operands)
        )
    torch.manual_seed(rows)
    x, weight = (torch.randint(-3, 4, size, device="cuda").to(dtype) for size in ((rows, shape[1]), shape))
    assert torch.equal(linear(x, weight, None), F.linear(x.double(), weight.double()).to(dtype))
    return used


@pytest.mark.gpu
@ON_HOPPER
@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
@given(
    rows=st.sampled_from([1, 2, 7, 16, 17, 33, 61, 64, 65, 256, 300]),
    channels=st.sampled_from([1, 63, 576, 1000, 4096]),
    depth=st.sampled_from([8, 64, 72, 576, 1544, 4096]),
    dtype=st.sampled_from(HALVES),
    gate=st.sampled_from(GATES),
    biased=st.booleans(),
    sliced=st.booleans(),
    seed=st.integers(0, 2**31),
)
@examples(25)
def test_every_launch_gives_the_product(launch, rows, channels, depth, dtype, gate, biased, sliced, seed):
    torch.manual_seed(seed)
    if gate is not None and launch.stages * launch.channels * launch.depth > 4 * 128 * 64:
        launch = HopperLaunch(64, 64, 4, 2, rows=launch.rows)  # what fits into shared memory
    if rows > 64 and not launch.rows:
        launch = replace(launch, rows=64)
    x, weight, bias = drawn(rows, channels * (1 + (gate is not None)), depth, dtype, biased, sliced)
    assert takes(x, weight)
    exact, bound = product(x, weight, bias) if gate is None else gated(x, weight, bias, gate)
    outs = [torch.full(exact.shape, torch.nan, dtype=dtype, device="cuda") for _ in range(2)]
    for out in outs:
        hopper_linear(x, weight, bias, out, launch, gate is not None, gate or SILU)
    assert bool(((outs[0].double() - exact).abs() <= bound).all()) and torch.equal(*outs)


@pytest.mark.gpu
@ON_HOPPER
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [2, 10, 16, 17, 32, 61, 64])
def test_the_table_gives_whole_sums_and_the_bits_of_the_other_kernels(rows, shape, dtype, monkeypatch):
    used = whole_sums(rows, shape, dtype, monkeypatch)
    assert used == [launch for launch in [hopper_launch_for(rows, *shape)] if launch is not None]
    used.clear()
    x, weight, bias = drawn(rows, *shape, dtype, True, False)
    if shape in GATED:
        assert torch.equal(
            products.gate_up(x, weight, bias), linear(x, weight, bias, swiglu=True, launch=Launch(64, 64, 4, 4))
        )
    elif shape in SPLIT:
        parts = hopper_parts(rows, *shape)
        got, want = (
            linear_parts(x, weight, bias),
            linear_parts(x, weight, bias, launch=Launch(64, 128, 4, 4, parts=parts)),
        )
        assert torch.equal(got.values, want.values) and len(got.values) == parts > 1
        exact, bound = product(x, weight, bias)
        assert bool(((joined(got).double() - exact).abs() <= bound).all())
    else:
        assert torch.equal(linear(x, weight, bias), linear(x, weight, bias, launch=Launch(64, 128, 4, 3)))
    assert len(used) == 1


@pytest.mark.gpu
@ON_HOPPER
@pytest.mark.parametrize("rows", [3, 16, 61])
def test_a_graph_of_dependent_products_gives_what_torch_gives(rows):
    check_chain(rows, LAUNCHES)


@pytest.mark.parametrize("rows", [2, 16, 17, 64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_launch_chosen_fits_the_device(rows, shape):
    parts = hopper_parts(rows, *shape)
    assert (parts > 1) == (shape in SPLIT) and parts <= max(1, MULTIPROCESSORS * 64 // shape[0])
    for swiglu in (False, True):
        launch = hopper_launch_for(rows, shape[0] >> swiglu, shape[1], swiglu, 1 if swiglu else parts)
        if launch is None:
            assert rows <= 16 and shape[1] < 4096 and not swiglu
            continue
        assert launch.parts == (1 if swiglu else parts) and 0 <= launch.ahead <= launch.stages
        assert launch.stages * launch.depth * 2 * (launch.channels * (1 + swiglu) + products.padded(rows)) < 227 * 1024


@pytest.mark.parametrize("rows", [17, 60, 64, 65, 128, 129, 256, 480, 512])
@pytest.mark.parametrize("shape", FEW_WEIGHTS, ids=str)
def test_products_of_few_weights_have_a_launch_for_many_rows(rows, shape):
    parts = hopper_parts(rows, *shape)
    assert (parts > 1) == (rows <= 64 and shape[0] < 1024) and shape[1] % (64 * parts) == 0
    for swiglu, count in [(False, 1), (False, parts), (True, 1)][: 2 + (shape[0] >= 3072)]:
        launch = hopper_launch_for(rows, shape[0] >> swiglu, shape[1], swiglu, count)
        assert launch.rows == (0 if count > 1 else 32 if rows <= 128 else 64) and launch.ahead <= launch.stages
        wide = launch.rows or products.padded(rows)
        assert launch.stages * launch.depth * 2 * (launch.channels * (1 + swiglu) + wide) < 227 * 1024


@pytest.mark.gpu
@ON_HOPPER
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", FEW_WEIGHTS, ids=str)
@pytest.mark.parametrize("rows", [17, 60, 64, 65, 128, 256, 480])
def test_products_of_few_weights_have_the_bits_of_the_other_kernels(rows, shape, dtype, monkeypatch):
    used = whole_sums(rows, shape, dtype, monkeypatch)
    x, weight, bias = drawn(rows, *shape, dtype, True, False)
    few = x.split(64)
    assert torch.equal(
        linear(x, weight, bias), torch.cat([linear(part, weight, bias, launch=Launch(64, 64, 4, 3)) for part in few])
    )
    if shape[0] >= 3072:
        want = torch.cat([linear(part, weight, bias, swiglu=True, launch=Launch(64, 64, 4, 3)) for part in few])
        assert torch.equal(products.gate_up(x, weight, bias), want)
    parts = hopper_parts(rows, *shape)
    if parts > 1:
        got, want = (
            linear_parts(x, weight, bias),
            linear_parts(x, weight, bias, launch=Launch(64, 64, 4, 4, parts=parts)),
        )
        assert torch.equal(got.values, want.values) and len(got.values) == parts
    assert len(used) == 2 + (shape[0] >= 3072) + (parts > 1)


def test_gate_and_up_of_tiles_that_are_on_the_device_together_go_by_longer_steps():
    assert (
        hopper_launch_for(17, 7168, 4096, swiglu=True).depth
        == hopper_launch_for(64, 8448, 4096, swiglu=True).depth
        == 128
    )
    assert (
        hopper_launch_for(17, 8449, 4096, swiglu=True).depth
        == hopper_launch_for(64, 7168, 2048, swiglu=True).depth
        == 64
    )


def test_what_it_does_not_take():
    """One row, many rows, small products, vocabularies; other devices, dtypes and lines that are not aligned."""
    assert hopper_launch_for(1, 4096, 4096) is None and hopper_launch_for(65, 4096, 4096) is None
    assert hopper_launch_for(16, 4096, 576) is None and hopper_launch_for(16, 128256, 4096) is None
    assert hopper_parts(1, 4096, 4096) == hopper_parts(17, 4096, 4160) == hopper_parts(16, 576, 1536) == 1
    assert (
        hopper_launch_for(513, 576, 576) is None and hopper_launch_for(65, 1536, 1536) is None
    )  # many rows, or weights
    assert hopper_launch_for(17, 576, 448) is None and hopper_launch_for(65, 1024, 2048) is None
    assert hopper_launch_for(65, 2048, 576, swiglu=True) is None
    x, weight = torch.zeros(4, 64, dtype=torch.float16), torch.zeros(8, 64, dtype=torch.float16)
    assert not takes(x, weight)  # on the CPU
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "is_hopper", lambda device: True)
        assert takes(x, weight) and not takes(x.float(), weight.float()) and not takes(x.short(), weight.short())
        assert not takes(x[:, 1:], weight[:, 1:]) and not takes(x[:, :60], torch.zeros(8, 60, dtype=torch.float16))


@pytest.mark.gpu
@ON_HOPPER
@pytest.mark.parametrize("rows", [65, 256, 300])
@pytest.mark.parametrize("parts", [2, 3])
def test_parts_of_tiles_of_rows_are_those_of_all_rows(rows, parts):
    torch.manual_seed(rows)
    x, weight, bias = drawn(rows, 576, 1536, torch.bfloat16, True, False)
    got = linear_parts(x, weight, bias, launch=HopperLaunch(64, 64, 4, 3, parts, rows=64)).values
    each = [linear_parts(few, weight, bias, launch=HopperLaunch(64, 64, 4, 3, parts)).values for few in x.split(64)]
    assert torch.equal(got, torch.cat(each, 1))
