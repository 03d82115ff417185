"""Products of stored weights: layouts written by hand dequantise bit for bit, and the kernel is held to the product in
float64 of what they dequantise to."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from helpers.examples import examples
from helpers.kernels import EVERYWHERE
from helpers.kernels_linear import DTYPES, product
from helpers.stored import float8, grouped8, packed, rows8, table4
from hypothesis import given
from hypothesis import strategies as st

from fastspec.kernels.linear.launches import MAX_ROWS
from fastspec.kernels.linear.reference import SILU, opened
from fastspec.kernels.quantised import linear as kernel
from fastspec.kernels.quantised import reference

LAYOUTS = {  # name -> (writer, what depths are multiples of)
    "int8 by lines": (rows8, 1),
    "int8 by lines, on sums": (partial(rows8, on_sums=True), 1),
    "int8 by groups, zero points": (partial(grouped8, 32), 32),
    "packed, 8 bits by lines": (partial(packed, 8, None), 1),
    "packed, 8 bits by groups, zero points": (partial(packed, 8, 64, zeros=True), 64),
    "packed, 4 bits by lines": (partial(packed, 4, None), 1),
    "packed, 4 bits by groups of 32": (partial(packed, 4, 32), 32),
    "packed, 4 bits by groups of 128, zero points": (partial(packed, 4, 128, zeros=True), 128),
    "packed, 4 bits by groups of 48": (partial(packed, 4, 48), 48),
    "packed, 4 bits, act-order": (partial(packed, 4, 32, zeros=True, ordered=True), 32),
    "e4m3 in blocks of 128": (partial(float8, (128, 128)), 1),
    "e4m3 by lines": (partial(float8, None), 1),
    "nf4": (table4, 64),
    "nf4, nested": (partial(table4, nested=True), 64),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_layout_dequantises_bit_for_bit(layout, dtype):
    torch.manual_seed(0)
    write, step = LAYOUTS[layout]
    for count, units in ((1, 1), (7, 3), (130, 5)):
        depth = units * step if step > 1 else 63 * units
        weight, dense = write(count, depth, dtype)
        assert weight.shape == (count, depth)
        assert weight.on_sums or torch.equal(reference.dequantised(weight, dtype), dense)


def test_every_e4m3_number_is_read():
    """The bits that the kernel makes of a byte are torch's number, NaN too."""
    codes = torch.arange(256, dtype=torch.uint8)[None]
    weight = reference.StoredWeight(codes, reference.E4M3, torch.ones(1, 1), (1, 256), 256, torch.float32)
    for place in (0x7F, 0xFF):
        codes[0, place] = 0
    read = kernel.linear(torch.eye(256), weight, None)[:, 0]
    assert torch.equal(read, codes[0].view(torch.float8_e4m3fn).float())
    codes[0, 5] = 0xFF
    assert kernel.linear(torch.ones(1, 256), weight, None).isnan().all()


@EVERYWHERE
@given(
    layout=st.sampled_from(list(LAYOUTS)),
    rows=st.sampled_from([1, 2, 7, 16, 33, 64, 65]),
    count=st.sampled_from([1, 7, 63, 130]),
    units=st.integers(1, 5),
    dtype=st.sampled_from(DTYPES),
    biased=st.booleans(),
    seed=st.integers(0, 2**31),
)
@examples(20)
def test_the_kernel_gives_the_product(device, layout, rows, count, units, dtype, biased, seed):
    torch.manual_seed(seed)
    write, step = LAYOUTS[layout]
    depth = units * step if step > 1 else 37 * units
    with torch.device(device):
        weight, dense = write(count, depth, dtype)
        x, bias = torch.randn(rows, depth).to(dtype), torch.randn(count).to(dtype) if biased else None
    exact, bound = product(x, dense, bias)
    if weight.on_sums:  # the scale multiplies a rounded sum, and is not rounded into the weight
        bound = bound + exact.abs() * 2**-22
    out = torch.full_like(exact, torch.nan, dtype=dtype)
    kernel._launch(x, weight, bias, out, kernel.launch_of(weight))
    for found in (out, reference.linear(x, weight, bias)):
        assert bool(((found.double() - exact).abs() <= bound).all())
    assert torch.equal(out, kernel.linear(x, weight, bias))


def test_a_row_has_the_same_bits_beside_any_others():
    """The interpreter's products are torch's: this holds the order of the steps, not that within one."""
    torch.manual_seed(0)
    weight, _ = packed(4, 32, 40, 320, torch.float16)
    x = torch.randn(65, 320).half()
    whole = kernel.linear(x, weight, None)
    for first, last in ((0, 1), (3, 10), (60, 65)):
        assert torch.equal(kernel.linear(x[first:last], weight, None), whole[first:last])


def test_many_rows_take_the_dequantised_weight():
    torch.manual_seed(0)
    weight, dense = float8((128, 128), 40, 160, torch.float32)
    x = torch.randn(MAX_ROWS + 1, 160)
    assert torch.equal(kernel.linear(x, weight, None), torch.nn.functional.linear(x, dense))


@pytest.mark.parametrize("module", [kernel, reference], ids=["kernel", "reference"])
def test_weights_side_by_side(module):
    torch.manual_seed(0)
    (one, first), (two, second) = packed(4, 32, 24, 64, torch.float32), rows8(24, 64, torch.float32)
    x = torch.randn(3, 64)
    both, gated = module.linears(x, (one, two), (None, None)), module.linears(x, (one, two), (None, None), SILU)
    gate, up = x @ first.T, x @ second.T
    assert torch.allclose(both, torch.cat((gate, up), -1), atol=1e-4)
    assert torch.allclose(gated, opened(gate, SILU) * up, atol=1e-3)


def test_what_does_not_fit_is_refused():
    weight, _ = rows8(4, 64, torch.float32)
    for x in (torch.zeros(1, 63), torch.zeros(64, 2).T, torch.zeros(1, 64, dtype=torch.float64)):
        with pytest.raises(ValueError, match="does not fit a stored weight"):
            kernel.linear(x, weight, None)
