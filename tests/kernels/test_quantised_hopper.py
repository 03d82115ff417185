"""Hopper's products of stored weights are near the product in float64, and a row has the same bits beside any others,
by every way to add up a depth's parts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers.kernels_linear import product
from helpers.stored import float8, packed, rows8, table4

from fastspec.kernels.launch import is_hopper
from fastspec.kernels.linear.reference import GELU_TANH, SILU, Parts, joined, opened
from fastspec.kernels.quantised import hopper, reference
from fastspec.kernels.quantised import linear as kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not is_hopper(torch.device("cuda")), reason="no GPU of compute capability 9.0"
    ),
]
LAYOUTS = {
    "int8 by lines": partial(rows8, on_sums=True),
    "packed, 8 bits by lines": partial(packed, 8, None),
    "packed, 8 bits by groups of 32": partial(packed, 8, 32),
    "packed, 8 bits by groups of 64": partial(packed, 8, 64),
    "e4m3 in blocks of 128": partial(float8, (128, 128)),
    "e4m3 by lines": partial(float8, None),
    "4 bits by lines": partial(packed, 4, None),
    "4 bits by groups of 128": partial(packed, 4, 128),
    "4 bits by groups of 64": partial(packed, 4, 64),
    "4 bits by groups of 32, zero points": partial(packed, 4, 32, zeros=True),
    "4 bits by groups of 128, zero points": partial(packed, 4, 128, zeros=True),
    "nf4": table4,
    "nf4, nested": partial(table4, nested=True),
}
ROWS = 1, 2, 5, 16, 17, 33, 60, 64, 65, 128, 130
DTYPES = torch.bfloat16, torch.float16


def numbers(weight: reference.StoredWeight, dtype: torch.dtype) -> torch.Tensor:
    """What the kernel multiplies by, in float64."""
    lines = torch.arange(weight.shape[0], device=weight.device) // weight.block[0]
    columns = torch.arange(weight.depth, device=weight.device) // weight.block[1]
    made, zeros = reference.numbers(weight).to(dtype).double(), reference.zeros(weight)
    made = made if zeros is None else made - zeros[:, columns]
    return made * reference.scales(weight).double()[lines][:, columns]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "channels, depth, parts",
    [
        (328, 2048, 4),
        (328, 8192, 4),
        (40, 2048, 4),
        (200, 768, 2),
        (8136, 1024, 4),  # more than 64 rows take tall tiles in series
        (8136, 768, 2),
        (8256, 256, 1),
        (8256, 640, 1),
        (8256, 1280, 1),
    ],
)
def test_every_way_gives_the_same_bits(layout, channels, depth, parts, dtype):
    torch.manual_seed(0)
    with torch.device("cuda"):
        weight, _ = LAYOUTS[layout](channels, depth, dtype)
        x, bias = torch.randn(max(ROWS), depth).to(dtype), torch.randn(channels).to(dtype)
    assert kernel.takes(x, weight) and hopper.parts_of(weight) == parts
    whole, biased = kernel.linear(x, weight, None), kernel.linear(x, weight, bias)
    for out, more in ((whole, None), (biased, bias)):
        wanted, wide = product(x, numbers(weight, dtype), more)
        assert bool(((out.double() - wanted).abs() <= wide).all())
    left = 0
    for rows in ROWS:
        for part in (slice(0, rows), slice(len(x) - rows, None)):
            assert torch.equal(kernel.linear(x[part], weight, None), whole[part]), rows
            assert torch.equal(kernel.linear(x[part], weight, bias), biased[part]), rows
            found = kernel.linear_parts(x[part], (weight,), (None,))
            left += isinstance(found, Parts)
            assert torch.equal(joined(found), whole[part]), rows
    assert (left > 0) == (parts > 1)


@pytest.mark.parametrize("kind", [SILU, GELU_TANH], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gate_and_weights_side_by_side(layout, dtype, kind):
    torch.manual_seed(0)
    with torch.device("cuda"):
        (gate, _), (up, _) = (LAYOUTS[layout](200, 1280, dtype) for _ in range(2))
        three = [LAYOUTS[layout](channels, 1280, dtype)[0] for channels in (200, 64, 72)]
        wide = [LAYOUTS[layout](channels, 640, dtype)[0] for channels in (8200, 8264, 8208)]
        x, bias = torch.randn(max(ROWS), 1280).to(dtype), torch.randn(200).to(dtype)
    whole = kernel.linears(x, (gate, up), (bias, bias), kind)
    parts = [product(x, numbers(weight, dtype), bias)[0].to(dtype) for weight in (gate, up)]
    wanted = opened(parts[0], kind).to(dtype) * parts[1]
    assert torch.allclose(whole.float(), wanted.float(), rtol=0.05, atol=0.05 * float(wanted.float().std()))
    beside = torch.cat([kernel.linear(x, weight, None) for weight in three], -1)
    undivided = torch.cat([kernel.linear(x[:, :640], weight, None) for weight in wide], -1)
    for rows in ROWS:
        assert torch.equal(kernel.linears(x[:rows], (gate, up), (bias, bias), kind), whole[:rows])
        assert torch.equal(kernel.linears(x[-rows:], three, [None] * 3), beside[-rows:])
        found = kernel.linear_parts(x[-rows:], three, [None] * 3)
        assert isinstance(found, Parts) == (4 < rows <= 32) and torch.equal(joined(found), beside[-rows:])
        assert isinstance(kernel.linear_parts(x[-rows:], three, [bias, None, None]), torch.Tensor)
        assert torch.equal(kernel.linears(x[-rows:, :640], wide, [None] * 3), undivided[-rows:])


@pytest.mark.parametrize("channels, depth", [((336,), 2048), ((4096, 1024, 1024), 4096), ((4096,), 14336)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_alone_has_its_bits_beside_another(layout, channels, depth):
    torch.manual_seed(0)
    with torch.device("cuda"):
        weights = [LAYOUTS[layout](count, depth, torch.bfloat16)[0] for count in channels]
        x = torch.randn(2, depth).bfloat16()
        biases = [torch.randn(count).bfloat16() for count in channels]
    both, gated = kernel.linears(x, weights, biases), kernel.linears(x, weights[:1] * 2, biases[:1] * 2, SILU)
    for _ in range(20):
        assert torch.equal(kernel.linears(x[1:], weights, biases), both[1:])
        assert torch.equal(kernel.linears(x[:1], weights[:1] * 2, biases[:1] * 2, SILU), gated[:1])


@pytest.mark.parametrize("layout", ["int8 by lines", "e4m3 in blocks of 128", "e4m3 by lines", "4 bits by lines"])
def test_a_depth_of_no_whole_stages(layout):
    torch.manual_seed(0)
    with torch.device("cuda"):
        weight, _ = LAYOUTS[layout](8256, 1312, torch.bfloat16)
        x = torch.randn(max(ROWS), 1312).bfloat16()
    whole = kernel.linear(x, weight, None)
    wanted, wide = product(x, numbers(weight, torch.bfloat16), None)
    assert bool(((whole.double() - wanted).abs() <= wide).all())
    for rows in ROWS:
        assert torch.equal(kernel.linear(x[-rows:], weight, None), whole[-rows:]), rows


@pytest.mark.parametrize("scale", [2.0**-134 + 2.0**-146, 2.0**-149, 2.0**-127, 2.0**120], ids=str)
@pytest.mark.parametrize("layout", ["int8 by lines", "packed, 8 bits by groups of 64", "4 bits by groups of 128"])
def test_a_scale_of_any_size_loses_no_bit(layout, scale):
    """Numbers are multiplied smaller than they are, and scales are as much larger."""
    with torch.device("cuda"):
        weight, _ = LAYOUTS[layout](4096, 2048, torch.bfloat16)
        x = torch.zeros(max(ROWS), 2048).bfloat16()
    weight = replace(weight, scales=torch.full_like(weight.scales, scale, dtype=torch.float32))
    x[:, 77] = 1
    wanted = (reference.numbers(weight)[:, 77].double() * scale).float().bfloat16()
    for rows in ROWS:
        assert torch.equal(kernel.linear(x[:rows], weight, None), wanted.expand(rows, -1)), rows


@pytest.mark.parametrize("rows", [60, 128])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_product_has_the_same_bits_each_time(layout, rows):
    """Where loads of a later stage went ahead of what reads a place they would now and then change a bit."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        gate, up, down = (LAYOUTS[layout](*shape, torch.bfloat16)[0] for shape in [(4096, 4096)] * 2 + [(1024, 8192)])
        x, wide = torch.randn(rows, 4096).bfloat16(), torch.randn(rows, 8192).bfloat16()
    first = kernel.linears(x, (gate, up), (None, None), SILU), joined(kernel.linear_parts(wide, (down,), (None,)))
    for _ in range(50):
        assert torch.equal(kernel.linears(x, (gate, up), (None, None), SILU), first[0])
        assert torch.equal(joined(kernel.linear_parts(wide, (down,), (None,))), first[1])


@pytest.mark.parametrize("wider", [8, 64])
def test_lines_with_bytes_behind_them(wider):
    """Codes whose lines are longer than the depth: no parts, the same product."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        weight, _ = packed(4, 128, 96, 512, torch.bfloat16)
        x = torch.randn(20, 512).bfloat16()
        long = torch.cat((weight.codes, weight.codes[:, : 2 * wider]), 1)
    held = reference.StoredWeight(long, weight.kind, weight.scales, weight.block, weight.depth, weight.dtype)
    assert kernel.takes(x, held) and hopper.parts_of(held) == 1
    wanted, wide = product(x, numbers(weight, torch.bfloat16), None)
    assert bool(((kernel.linear(x, held, None).double() - wanted).abs() <= wide).all())
