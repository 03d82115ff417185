"""Products of stored weights: layouts written by hand dequantise bit for bit, and the kernel is held to the product in
float64 of what they dequantise to."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers.examples import examples
from helpers.kernels import EVERYWHERE
from helpers.kernels_linear import DTYPES, product
from helpers.stored import float8, grouped8, packed, rows8, table4
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import linear

from fastspec.kernels.linear.launches import MAX_ROWS
from fastspec.kernels.linear.reference import GELU_TANH, SILU, Parts, opened
from fastspec.kernels.quantised import linear as kernel
from fastspec.kernels.quantised import reference

LAYOUTS = {  # name -> (writer, what depths are multiples of)
    "int8 by lines": (rows8, 1),
    "int8 by lines, on sums": (partial(rows8, on_sums=True), 1),
    "int8 by groups, zero points": (partial(grouped8, 32), 32),
    "packed, 8 bits by lines": (partial(packed, 8, None), 1),
    "packed, 8 bits by groups, zero points": (partial(packed, 8, 64, zeros=True), 64),
    "packed, 4 bits by lines": (partial(packed, 4, None), 1),
    "packed, 4 bits by lines, zero points": (partial(packed, 4, None, zeros=True), 1),
    "packed, 4 bits by groups of 32": (partial(packed, 4, 32), 32),
    "packed, 4 bits by groups of 128, zero points": (partial(packed, 4, 128, zeros=True), 128),
    "packed, 4 bits by groups of 48": (partial(packed, 4, 48), 48),
    "packed, 4 bits, act-order": (partial(packed, 4, 32, zeros=True, ordered=True), 32),
    "e4m3 in blocks of 128": (partial(float8, (128, 128)), 1),
    "e4m3 by lines": (partial(float8, None), 1),
    "nf4": (table4, 64),
    "nf4, nested": (partial(table4, nested=True), 64),
}

KINDS = {
    "int8": reference.INT8,
    "8 bits": reference.PACKED8,
    "4 bits": reference.PACKED4,
    "e4m3": reference.E4M3,
    "nf4": reference.NF4,
    "fp4": reference.FP4,
}


def multiplied(weight: reference.StoredWeight, dtype: torch.dtype) -> Tensor:
    """What the kernel multiplies by: numbers in 16 bits less their zero points, times scales; not rounded but where
    neighbours have scales of their own. float64."""
    lines, columns = torch.arange(weight.shape[0]) // weight.block[0], torch.arange(weight.depth) // weight.block[1]
    columns = columns.to(weight.device) if weight.groups is None else weight.groups
    numbers, zeros = reference.numbers(weight).to(dtype).double(), reference.zeros(weight)
    numbers = numbers if zeros is None else numbers - zeros[:, columns]
    dense = numbers * reference.scales(weight).double()[lines.to(weight.device)][:, columns]
    return dense.float().to(dtype).double() if kernel.StoredForm.of(weight, None).spread else dense


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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_some_lines_are_those_of_the_whole(layout):
    """Of a weight whose lines from the 128th on share nothing stored with those before; none where they do. Copies of
    any lines."""
    torch.manual_seed(0)
    write, step = LAYOUTS[layout]
    weight, dense = write(256, 4 * step if step > 1 else 160, torch.float32)
    for first in (0, 128):
        part = weight.lines(first, 128)
        assert part is not None and part.codes.data_ptr() == weight.codes[first:].data_ptr()
        assert weight.on_sums or torch.equal(reference.dequantised(part, torch.float32), dense[first : first + 128])
    shared = weight.block[0] > 1 or (weight.zeros is not None and weight.zeros.dtype == torch.int32)
    assert (weight.lines(2, 8) is None) == (shared or weight.nested is not None)
    ids = torch.tensor([255, 3, 128, 3, 77])
    assert weight.on_sums or torch.equal(reference.dequantised(weight.taken(ids), torch.float32), dense[ids])


@EVERYWHERE
@pytest.mark.parametrize("layout", LAYOUTS)
def test_halves_of_a_weight_multiply_as_the_whole(device, layout):
    torch.manual_seed(0)
    write, step = LAYOUTS[layout]
    with torch.device(device):
        weight, _ = write(256, 4 * step if step > 1 else 160, torch.float16)
        x = torch.randn(5, weight.depth).half()
    halves = [weight.lines(0, 128), weight.lines(128, 128)]
    assert torch.equal(kernel.linears(x, halves, [None] * 2), kernel.linear(x, weight, None))


def test_lines_of_one_scale_have_it():
    weight, dense = float8((64, 96), 64, 96, torch.float32)
    part = weight.lines(21, 32)
    assert part is not None and torch.equal(reference.dequantised(part, torch.float32), dense[21:53])


@EVERYWHERE
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_dequantises_bit_for_bit(device, layout, dtype):
    torch.manual_seed(0)
    write, step = LAYOUTS[layout]
    for count, units in ((1, 1), (40, 3)):
        with torch.device(device):
            weight, _ = write(count, units * step if step > 1 else 63 * units, dtype)
        assert torch.equal(kernel.dequantised(weight, dtype), reference.dequantised(weight, dtype))


@EVERYWHERE
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_code_is_read(device, kind, dtype):
    """The numbers that the kernel makes of all bytes, in each place of a word."""
    kind, per = KINDS[kind], 8 // KINDS[kind].bits
    codes = torch.stack([torch.arange(256).roll(shift) for shift in range(4)]).to(torch.uint8).to(device)
    codes[codes & 0x7F == 0x7F] = 0 if kind == reference.E4M3 else 0x7F
    ones = torch.ones(4, 1, device=device)
    weight = reference.StoredWeight(codes, kind, ones, (1, 256 * per), 256 * per, torch.float32)
    read = kernel.linear(torch.eye(256 * per, device=device, dtype=dtype), weight, None).T
    assert torch.equal(read, reference.numbers(weight).to(dtype))


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
    wanted, wide = product(x, multiplied(weight, dtype), bias)
    out = torch.full_like(exact, torch.nan, dtype=dtype)
    kernel._launch(x, (weight,), (bias,), out, kernel.launch_of(weight, rows))
    assert bool(((out.double() - wanted).abs() <= wide).all())
    bound = bound + exact.abs() * 2**-22 if weight.on_sums else bound  # the scale multiplies a rounded sum
    assert bool(((reference.linear(x, weight, bias).double() - exact).abs() <= bound).all())
    chosen = kernel.linear(x, weight, bias)
    if kernel.takes(x, weight):  # Hopper's own kernel, of another order
        assert bool(((chosen.double() - wanted).abs() <= wide).all())
    else:
        assert torch.equal(out, chosen)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_neighbours_change_no_bit(layout, dtype):
    """Other rows, and other weights in one launch: a row's product stays what it was."""
    torch.manual_seed(0)
    write, step = LAYOUTS[layout]
    with torch.device("cuda"):
        weights = [write(count, 5 * step if step > 1 else 320, dtype)[0] for count in (80, 32, 32)]
        x = torch.randn(65, weights[0].depth).to(dtype)
    whole = [kernel.linear(x, weight, None) for weight in weights]
    for first, last in ((0, 1), (3, 10), (60, 65)):
        assert torch.equal(kernel.linears(x[first:last], weights, [None] * 3), torch.cat(whole, -1)[first:last])


def test_a_row_has_the_same_bits_beside_any_others():
    """The interpreter's products are torch's: this holds the order of the steps, not that within one."""
    torch.manual_seed(0)
    weight, _ = packed(4, 32, 40, 320, torch.float16)
    x = torch.randn(65, 320).half()
    whole = kernel.linear(x, weight, None)
    for first, last in ((0, 1), (3, 10), (60, 65)):
        assert torch.equal(kernel.linear(x[first:last], weight, None), whole[first:last])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_many_rows_take_the_dequantised_weight(dtype):
    torch.manual_seed(0)
    weight, dense = float8((128, 128), 40, 160, dtype)
    x = torch.randn(MAX_ROWS + 1, 160).to(dtype)
    assert torch.equal(kernel.linear(x, weight, None), torch.nn.functional.linear(x, dense))


@EVERYWHERE
@pytest.mark.parametrize("layouts", [("nf4", "e4m3 by lines"), ("nf4", "nf4"), ("e4m3 in blocks of 128",) * 2], ids=str)
@pytest.mark.parametrize("kind", [None, SILU, GELU_TANH], ids=str)
def test_weights_side_by_side(device, layouts, kind):
    torch.manual_seed(0)
    with torch.device(device):
        written = [LAYOUTS[layout][0](24, 64, torch.float32) for layout in layouts]
        x, bias = torch.randn(3, 64), torch.randn(24)
    weights, biases = [weight for weight, _ in written], [bias, None] if layouts[0] != layouts[1] else [bias, bias]
    parts = [linear(x, dense, each) for (_, dense), each in zip(written, biases, strict=True)]
    wanted = torch.cat(parts, -1) if kind is None else opened(parts[0], kind) * parts[1]
    for module in (kernel, reference):
        assert torch.allclose(module.linears(x, weights, biases, kind), wanted, atol=1e-3)


@EVERYWHERE
@pytest.mark.parametrize("kind", [None, SILU], ids=str)
@pytest.mark.parametrize("differ", ["lines of a scale", "dtype of scales"])
def test_a_gate_and_an_up_part_whose_scales_differ(device, differ, kind, monkeypatch):
    """A program reads scales of both at the same places, and by one dtype: such parts are multiplied one by one. Side
    by side each weight has its own lines."""
    torch.manual_seed(0)
    with torch.device(device):
        lines = (1, 16) if differ == "lines of a scale" else (1, 1)
        gate, up = (float8((each, 32), 32, 64, torch.float32)[0] for each in lines)
        if differ == "dtype of scales":
            up = replace(up, scales=up.scales.half())
        x = torch.randn(3, 64)
    together, multiply = [], kernel._multiply
    monkeypatch.setattr(kernel, "_multiply", lambda *given: together.append(len(given[1])) or multiply(*given))
    got, wanted = (module.linears(x, [gate, up], [None, None], kind) for module in (kernel, reference))
    assert torch.allclose(got, wanted, atol=1e-3)
    assert together == ([2] if differ == "lines of a scale" and kind is None else [1, 1])


def test_what_does_not_fit_is_refused():
    weight, _ = rows8(4, 64, torch.float32)
    for x in (torch.zeros(1, 63), torch.zeros(64, 2).T, torch.zeros(1, 64, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"stored product: x is .*accepted is"):
            kernel.linear(x, weight, None)


@pytest.mark.parametrize("last", [1, 16, 17])
def test_turns_of_many_rows_may_end_with_parts(last):
    """As of two prompts that are padded to 384 tokens: of few rows a product may be left in parts."""

    def multiply(x, weight):
        whole = x @ weight.T
        return whole if len(x) > 16 else Parts(torch.stack((whole - 1, torch.ones_like(whole))), x.dtype)

    x, weight = torch.randn(1, MAX_ROWS + last, 8), torch.randn(3, 8)
    assert torch.allclose(kernel.in_turns(multiply)(x, weight), x @ weight.T, atol=1e-5)
