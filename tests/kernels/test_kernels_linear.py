"""The linear kernel, held to the product in float64: every launch shape, plain or with SwiGLU."""

from __future__ import annotations

import pytest
import torch
from helpers.examples import examples
from helpers.kernels import CPU, CUDA
from helpers.kernels_linear import DTYPES, GATES, check_chain, drawn, gated, product
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from fastspec.kernels.linear import linear as kernel
from fastspec.kernels.linear import reference
from fastspec.kernels.linear.launches import Launch, RowLaunch, launch_for
from fastspec.kernels.linear.linear import linear, linear_row
from fastspec.kernels.linear.reference import SILU, Activation

SMALL = [Launch(16, 32, 4, 3), Launch(16, 16, 4, 3), Launch(32, 32, 4, 2), Launch(32, 16, 4, 3, tma=True)]
ONE_ROW = [RowLaunch(8, 32, 4), RowLaunch(1, 16, 1), RowLaunch(4, 64, 2)]
# what the tables hold, and the shapes beside them that a measurement may choose
WIDE = [Launch(64, 128, 4, 4), Launch(128, 64, 4, 4), Launch(64, 64, 4, 3, tma=True), Launch(16, 128, 4, 4)]
WIDE += [RowLaunch(4, 512, 2), RowLaunch(4, 1024, 4), RowLaunch(2, 2048, 8), RowLaunch(1, 256, 1)]
WIDE += [Launch(64, 128, 4, 3, tma=True), Launch(64, 64, 4, 3), Launch(128, 64, 8, 4)]


def check(x: Tensor, weight: Tensor, bias: Tensor | None, launch: Launch | RowLaunch, gate: Activation | None) -> None:
    """Twice into a poisoned buffer: every element within its bound, and the two equal bit for bit."""
    exact, bound = product(x, weight, bias) if gate is None else gated(x, weight, bias, gate)
    outs = [torch.full(exact.shape, torch.nan, dtype=x.dtype, device=x.device) for _ in range(2)]
    run = linear_row if isinstance(launch, RowLaunch) else kernel._launch
    for out in outs:
        run(x, weight, bias, out, launch, gate is not None, gate or SILU)
    off = (outs[0].double() - exact).abs()
    assert bool((off <= bound).all()), f"off by {(off / bound).nan_to_num(torch.inf).max().item():.3g} bounds: {launch}"
    assert torch.equal(*outs)


@pytest.mark.parametrize("device", [CPU])
@given(
    rows=st.sampled_from([1, 2, 7, 16, 17, 33]),
    channels=st.sampled_from([1, 7, 31, 32, 63, 65, 100]),
    depth=st.sampled_from([1, 7, 16, 63, 64, 65, 129]),
    dtype=st.sampled_from(DTYPES),
    gate=st.sampled_from(GATES),
    biased=st.booleans(),
    sliced=st.booleans(),
    launch=st.sampled_from(SMALL + ONE_ROW),
    seed=st.integers(0, 2**31),
)
@examples(35)
def test_every_launch_gives_the_product(device, rows, channels, depth, dtype, gate, biased, sliced, launch, seed):
    torch.manual_seed(seed)
    rows = 1 if isinstance(launch, RowLaunch) else rows
    check(*drawn(rows, channels * (1 + (gate is not None)), depth, dtype, device, biased, sliced), launch, gate)


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("launch", WIDE, ids=str)
@given(
    rows=st.sampled_from([1, 7, 16, 17, 61, 64, 65, 128]),
    channels=st.sampled_from([1, 63, 576, 1000, 4096]),
    depth=st.sampled_from([1, 63, 576, 1544, 4096]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    gate=st.sampled_from(GATES),
    biased=st.booleans(),
    sliced=st.booleans(),
    seed=st.integers(0, 2**31),
)
@examples(2)
def test_wide_launches_give_the_product(device, launch, rows, channels, depth, dtype, gate, biased, sliced, seed):
    torch.manual_seed(seed)
    rows = 1 if isinstance(launch, RowLaunch) else rows
    if isinstance(launch, Launch) and (rows > 64 or (gate is not None and launch.channels > 64)):
        launch = Launch(64, 64, launch.warps, 3, launch.tma)  # what fits into shared memory
    check(*drawn(rows, channels * (1 + (gate is not None)), depth, dtype, device, biased, sliced), launch, gate)


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape", [(6144, 4096), (4096, 14336), (2048, 1536), (1536, 8960), (960, 576), (49152, 576)], ids=str
)
@pytest.mark.parametrize("rows", [1, 16, 29, 61, 128])
def test_the_tables_launches_give_the_product(device, rows, shape, dtype):
    torch.manual_seed(rows)
    for swiglu in (False, True):
        launch = launch_for(rows, shape[0] >> swiglu, shape[1], dtype, swiglu)
        if launch is not None:
            check(*drawn(rows, *shape, dtype, device, biased=True), launch, SILU if swiglu else None)
    # The bound of a long sum is wide enough to hide a tile. Sums of small whole numbers are exact, and rounded once.
    x, weight = (torch.randint(-3, 4, size, device=device).to(dtype) for size in ((rows, shape[1]), shape))
    assert torch.equal(linear(x, weight, None), F.linear(x.double(), weight.double()).to(dtype))


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_linear_takes_and_gives_what_the_reference_does(device):
    torch.manual_seed(0)
    x, weight, bias = (
        torch.randn(2, 3, 65, device=device),
        torch.randn(34, 65, device=device),
        torch.randn(34, device=device),
    )
    for a, w, b in ((x, weight, bias), (x, weight, None), (x[:, 1], weight[::2][:16], None)):
        for swiglu, (exact, bound) in ((False, product(a, w, b)), (True, gated(a, w, b))):
            got = linear(a, w, b, swiglu=swiglu)
            emitted = reference.swiglu(reference.linear(a, w, b)) if swiglu else reference.linear(a, w, b)
            assert got.shape == emitted.shape and got.dtype == emitted.dtype
            assert bool(((got.double() - exact).abs() <= bound).all()) and bool(
                ((emitted.double() - exact).abs() <= bound).all()
            )
    assert linear(x[:0], weight, bias).shape == (0, 3, 34) and linear(x[0, 0], weight, bias).shape == (34,)


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_what_is_not_served_goes_to_torch(device, monkeypatch):
    monkeypatch.setattr(kernel, "_launch", lambda *_: pytest.fail("launched"))
    x, weight = torch.arange(40.0, device=device).view(5, 8), torch.ones(6, 8, device=device, requires_grad=True)
    linear(x, weight, None).sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, x.sum(0).expand(6, -1))
    with torch.no_grad():
        assert torch.equal(linear(x.double(), weight.double(), None), F.linear(x.double(), weight.double()))
        many = torch.ones(kernel.MAX_ROWS + 1, 8, device=device)
        assert torch.equal(linear(many, weight, None, swiglu=True), reference.swiglu(F.linear(many, weight)))
        assert linear(x[:, :0], weight[:, :0], None).shape == (5, 6) and linear(x, weight[:0], None).shape == (5, 0)


@pytest.mark.parametrize(
    ("x", "weight", "swiglu", "says"),
    [
        (torch.zeros(2, 8), torch.zeros(6, 7), False, r"x \(2, 8\) does not fit weight \(6, 7\)"),
        (torch.zeros(2, 8), torch.zeros(5, 8), True, "M even for swiglu"),
        (torch.zeros(8, 2).t(), torch.zeros(6, 8), False, r"strides of x \(1, 2\)"),
        (torch.zeros(2, 8), torch.zeros(8, 6).t(), False, r"weight \(1, 6\).*contiguous"),
    ],
)
def test_what_does_not_fit_is_said(x, weight, swiglu, says):
    with pytest.raises(ValueError, match=says):
        linear(x, weight, None, swiglu=swiglu)


def test_a_gate_that_does_not_fit_is_said():
    with pytest.raises(ValueError, match="does not fit"):
        kernel.gate_up(torch.zeros(3, 8), torch.zeros(6, 9), None)


def test_a_launch_for_one_row_takes_no_more():
    with pytest.raises(ValueError, match="multiplies one row, not 2"):
        linear(torch.zeros(2, 8), torch.zeros(6, 8), None, launch=ONE_ROW[0])


@pytest.mark.parametrize("most", [1, 16, 17, 64, 65, 128])
def test_every_launch_chosen_fits_the_device(most):
    for channels, depth in [(1, 1), (576, 576), (1536, 1536), (28672, 4096), (4096, 14336), (151936, 1536)]:
        for swiglu in (False, True):
            launch = launch_for(most, channels, depth, torch.bfloat16, swiglu)
            if launch is None or isinstance(launch, RowLaunch):  # which keeps its blocks in registers
                continue
            lines = launch.channels * (1 + swiglu) + kernel.padded(most)
            assert launch.stages * launch.depth * 2 * lines < 227 * 1024  # bytes of shared memory
    assert launch_for(kernel.MAX_ROWS + 1, 64, 64, torch.bfloat16) is None


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize(
    "launches",
    [
        *([Launch(64, depth, 4, 4, tma) for depth in (64, 128, 32)] for tma in (False, True)),
        [RowLaunch(4, 512, 2), RowLaunch(2, 2048, 4), RowLaunch(4, 1024, 4)],
    ],
    ids=["pointers", "tma", "row"],
)
def test_a_graph_of_dependent_products_gives_what_torch_gives(device, launches):
    check_chain(1 if isinstance(launches[0], RowLaunch) else 16, launches)
