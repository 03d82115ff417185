"""One row's products with stored weights on Hopper, run on the CPU by an emulator of their statements and PTX."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import emulator
from helpers.kernels_linear import gated, product
from helpers.stored import float8, packed, rows8, table4

from fastspec.kernels.linear.reference import GELU_TANH, SILU
from fastspec.kernels.quantised import hopper, reference, row
from fastspec.kernels.quantised.launches import StoredLaunch, StoredRowLaunch
from fastspec.kernels.quantised.reference import StoredWeight
from fastspec.patches.tuning import candidates


def halved(*given, **options):
    """4 bits with scales of float16, as AWQ and GPTQ have them."""
    weight, dense = packed(4, 128, *given, **options)
    return replace(weight, scales=weight.scales.half()), dense


LAYOUTS = {
    "int8 by lines": partial(rows8, on_sums=True),
    "packed, 8 bits by lines": partial(packed, 8, None),
    "packed, 8 bits by groups of 64": partial(packed, 8, 64),
    "e4m3 in blocks of 128": partial(float8, (128, 128)),
    "e4m3 by lines": partial(float8, None),
    "4 bits by lines": partial(packed, 4, None),
    "4 bits by groups of 128": partial(packed, 4, 128),
    "4 bits by groups of 32, zero points": partial(packed, 4, 32, zeros=True),
    "4 bits by groups of 128, zero points, float16": partial(halved, zeros=True),
    "nf4": table4,
    "nf4, nested": partial(table4, nested=True),
}


def numbers(weight: StoredWeight) -> torch.Tensor:
    """What the kernel multiplies by, in float64."""
    lines = torch.arange(weight.shape[0]) // weight.block[0]
    columns = torch.arange(weight.depth) // weight.block[1]
    made, zeros = reference.numbers(weight).bfloat16().double(), reference.zeros(weight)
    made = made if zeros is None else made - zeros[:, columns]
    return made * reference.scales(weight).double()[lines][:, columns]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_side_by_side(layout):
    torch.manual_seed(0)
    weights = [LAYOUTS[layout](channels, 2048, torch.bfloat16)[0] for channels in (32, 16, 16)]
    x, biases = torch.randn(1, 2048).bfloat16(), [torch.randn(len(weight.codes)).bfloat16() for weight in weights]
    form = row.launched(weights, False, SILU, True)
    assert form is not None and form.parts == 4
    out, first = emulator.stored_row(x, weights, biases, form), 0
    for weight, bias in zip(weights, biases, strict=True):
        wanted, wide = product(x, numbers(weight), bias)
        assert bool(((out[first : first + len(bias)].double() - wanted[0]).abs() <= wide[0]).all())
        first += len(bias)


@pytest.mark.parametrize("kind", [SILU, GELU_TANH], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gate_and_an_up_part(layout, kind):
    torch.manual_seed(1)
    gate, up = (LAYOUTS[layout](32, 1024, torch.bfloat16)[0] for _ in range(2))
    x, bias = torch.randn(1, 1024).bfloat16(), torch.randn(32).bfloat16()
    form = row.launched((gate, up), True, kind, True)
    if gate.kind.bits == 8 and gate.block[1] >= 1024:  # other launches are faster
        assert form is None
        form = row.form_of((gate, up), True, 1, 128, 2, kind, True)
    assert form is not None and (form.gates, form.parts) == (2, 1)
    out = emulator.stored_row(x, (gate, up), (bias, bias), form)
    dense = torch.cat((numbers(gate), numbers(up)))
    wanted, wide = gated(x, dense, torch.cat((bias, bias)), kind)
    assert bool(((out.double() - wanted[0]).abs() <= wide[0]).all())


@pytest.mark.parametrize("scale", [2.0**-134 + 2.0**-146, 2.0**-149, 2.0**-127, 2.0**120], ids=str)
@pytest.mark.parametrize("layout", ["int8 by lines", "packed, 8 bits by groups of 64", "4 bits by groups of 128"])
def test_a_scale_of_any_size_loses_no_bit(layout, scale):
    """Of sums that were made smaller, before they are multiplied, as many as of others: the product is rounded once."""
    weight = LAYOUTS[layout](32, 2048, torch.bfloat16)[0]
    weight = replace(weight, scales=torch.full_like(weight.scales, scale, dtype=torch.float32))
    x = torch.zeros(1, 2048).bfloat16()
    x[0, 77] = 1
    form = row.launched([weight], False)
    assert form is not None
    wanted = (reference.numbers(weight)[:, 77].double() * scale).float().bfloat16()
    assert torch.equal(emulator.stored_row(x, [weight], [None], form), wanted)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("layout", ["int8 by lines", "e4m3 in blocks of 128", "4 bits by groups of 128", "nf4, nested"])
def test_launches_that_are_tuned_give_the_same_bits(layout, gated, monkeypatch):
    """What `fastspec.tune` tries for a row; launches of tiles differ in their stages and in nothing else."""
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    torch.manual_seed(2)
    weights = [LAYOUTS[layout](16, 2048, torch.bfloat16)[0] for _ in range(1 + gated)]
    x, biases = torch.randn(1, 2048).bfloat16(), [None] * len(weights)
    tried = candidates._of_stored(x, weights, gated, False)
    rows = [launch for launch in tried if isinstance(launch, StoredRowLaunch)]
    forms = [row.launched(weights, gated, tuned=launch) for launch in rows]
    assert len(set(forms)) == len(rows) > 2 and None not in forms
    outs = [emulator.stored_row(x, weights, biases, form) for form in forms[:: 1 + 2 * gated]]
    assert all(torch.equal(out, outs[0]) for out in outs)
    usual = row.launched(weights, gated)
    assert usual is None or usual in forms
    for count in (1, 20, 60):
        tiles = [launch for launch in tried if isinstance(launch, StoredLaunch)]
        found = {hopper.launch_of(weights, count, gated, most_stages=launch.stages) for launch in tiles}
        assert len({replace(launch, stages=0, ahead=0) for launch in found}) == 1


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_the_emulator_finds_waits_and_barriers_that_are_wrong(stages):
    torch.manual_seed(2)
    weight, x = packed(4, 128, 32, 2048, torch.bfloat16, zeros=True)[0], torch.randn(1, 2048).bfloat16()
    form = row.form_of([weight], False, 4, 64, stages)
    assert form is not None
    wait = "cp.async.wait_group {}; bar.warp.sync 0xffffffff; mov.u32 $0, 0;"
    assert form.wait == wait.format(stages - 2)
    for wrong in (
        replace(form, wait=wait.format(stages - 1)),
        replace(form, wait=wait.format(stages - 3)),
        replace(form, wait="mov.u32 $0, 0;"),
        replace(form, wait=form.wait.replace("bar.warp.sync 0xffffffff;", "")),
        replace(form, ask=form.ask.replace("cp.async.commit_group;", "")),
        replace(form, together="mov.u32 $0, 0;"),
        replace(form, together=form.wait),
    ):
        with pytest.raises(AssertionError, match=r"not waited for|the oldest stage"):
            emulator.stored_row(x, [weight], [None], wrong)


def test_weights_that_it_does_not_take():
    few = packed(4, 128, 32, 1536, torch.bfloat16)[0]  # three scales a part
    odd = packed(4, 128, 40, 2048, torch.bfloat16)[0]
    wide = packed(4, 512, 32, 2048, torch.bfloat16)[0]  # groups longer than stages
    large = rows8(4096, 8208, torch.bfloat16)[0]
    table = table4(4224, 2048, torch.bfloat16)[0]
    assert row.launched([table], False) is not None
    for weights in ([few], [odd], [wide], [large], [table, table4(16, 2048, torch.bfloat16)[0]]):
        assert row.launched(weights, False) is None


def test_weights_that_differ_are_not_multiplied_together():
    """In what a program is compiled for: scales' dtype, bytes from line to line and, of a gate, lines of a scale."""
    one, other = (packed(4, 128, 32, 2048, torch.bfloat16)[0] for _ in range(2))
    wide = torch.zeros(32, 1040, dtype=torch.uint8)
    apart = replace(other, codes=wide[:, :1024])
    tall, taller = (float8((lines, 128), 32, 2048, torch.bfloat16)[0] for lines in (1, 16))
    assert row.launched([one, other], False) is not None and row.launched([tall, taller], False) is not None
    for weights in ([one, replace(other, scales=other.scales.half())], [one, apart]):
        assert row.launched(weights, False) is None
    assert row.launched([tall, taller], True) is None


def test_zero_points_of_lines_are_not_read(monkeypatch):
    """Both kernels of Hopper read those of groups."""
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    x = torch.zeros(1, 2048).bfloat16()
    lines, groups = (packed(4, group, 32, 2048, torch.bfloat16, zeros=True)[0] for group in (None, 128))
    assert hopper.takes(x, groups) and not hopper.takes(x, lines)
