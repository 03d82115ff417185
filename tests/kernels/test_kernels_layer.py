"""The kernels of a layer's small steps against the reference run in fp32 or wider, for drawn shapes, strides and
poisoned buffers."""

from __future__ import annotations

import pytest
import torch
from helpers.devices import CUDA
from helpers.examples import examples
from helpers.kernels import DTYPES, EVERYWHERE
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastspec.kernels.cache import reference as cache_reference
from fastspec.kernels.cache.commit import kv_block_copy
from fastspec.kernels.layer import reference as layer_reference
from fastspec.kernels.layer.norms import rms_norm
from fastspec.kernels.layer.rope_cache import rope_cache
from fastspec.kernels.linear import reference as linear_reference
from fastspec.kernels.linear.reference import Parts
from fastspec.kernels.linear.swiglu import swiglu

pytestmark = pytest.mark.usefixtures("filled_with_nan")
DRAWN = examples(20)
SEEDS = st.integers(0, 2**31)
SIZES = {"cpu": [1, 2, 7, 63, 64, 65, 130], "cuda": [1, 7, 65, 576, 1536, 4096, 5120, 8192, 16384, 24576]}
ROWS = {"cpu": [1, 2, 3], "cuda": [1, 7, 61, 64, 1000]}


def drawn(data, device: str, table: dict):
    return data.draw(st.sampled_from(table[device]))


def close(actual: Tensor, expected: Tensor, bound: Tensor) -> None:
    """Every element of actual within its bound of expected, all fp64 but actual; NaN nowhere."""
    assert actual.shape == expected.shape
    error = (actual.double() - expected).abs()
    assert bool((error <= bound).all()), f"off by {(error / bound).max().item():.3f} times the bound"


def rounded_alike(actual: Tensor, reference: Tensor) -> None:
    """In half precision the same bits as the reference but for the rare tie: roundings left out would show in every
    fourth element."""
    if actual.dtype != torch.float32:
        differ = int((actual != reference).sum()) - int((actual.isnan() & reference.isnan()).sum())
        assert differ <= 2 + actual.numel() // 64, f"{differ} of {actual.numel()} elements are rounded otherwise"


def units(dtype: torch.dtype) -> tuple[float, float]:
    """The spacing of numbers of a dtype: relative, at most, and absolute where they are subnormal."""
    return torch.finfo(dtype).eps, torch.finfo(dtype).tiny * torch.finfo(dtype).eps


def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


def strided(values: Tensor, pad: int) -> Tensor:
    """The same values as a slice of wider rows, the rest NaN."""
    wide = values.new_full((*values.shape[:-1], values.shape[-1] + pad), torch.nan)
    wide[..., : values.shape[-1]] = values
    return wide[..., : values.shape[-1]]


@EVERYWHERE
@given(
    data=st.data(),
    seed=SEEDS,
    pad=st.sampled_from([0, 3, 16]),
    with_residual=st.booleans(),
    with_out=st.booleans(),
    with_total=st.booleans(),
    unit=st.sampled_from([None, 0.0, 1.0]),
)
@DRAWN
def test_rms_norm(device, data, seed, pad, with_residual, with_out, with_total, unit):
    generator = torch.Generator().manual_seed(seed)
    dtype, size, rows = drawn(data, device, DTYPES), drawn(data, device, SIZES), drawn(data, device, ROWS)
    x, residual = (strided(normal(generator, 2, rows, size, dtype=dtype, device=device), pad) for _ in range(2))
    weight = normal(generator, size, dtype=dtype, device=device)
    out = strided(torch.full_like(x, torch.nan), pad) if with_out else None
    given_total = strided(torch.full_like(x, torch.nan), pad) if with_total else None
    normed, summed = rms_norm(x, weight, 1e-5, residual if with_residual else None, out, given_total, unit)
    total = (x + residual) if with_residual else x
    assert torch.equal(summed, total)  # one addition, rounded once
    assert (summed is x) is not (with_residual or with_total) and (out is None or normed is out)
    assert given_total is None or summed is given_total
    # Half a unit for the rounding before the weight and half for the one after it; in fp32 the scale's own error
    # besides, a few units.
    wide, scale = total.double(), weight.double() + (unit or 0.0)
    expected = scale * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5))
    rounded_alike(
        normed, layer_reference.rms_norm(x, weight, 1e-5, residual if with_residual else None, offset=unit)[0]
    )
    step, smallest = units(dtype)
    close(
        normed, expected, (8 if dtype == torch.float32 else 1.01) * step * expected.abs() + smallest * (1 + scale.abs())
    )
    for written in (out, given_total):
        if written is not None and pad:
            assert bool(written.as_strided((2 * rows, size + pad), (size + pad, 1))[:, size:].isnan().all())


@EVERYWHERE
@given(data=st.data(), seed=SEEDS, pad=st.sampled_from([0, 3, 16]), scale=st.sampled_from([0.1, 1.0, 30.0]))
@DRAWN
def test_swiglu(device, data, seed, pad, scale):
    generator = torch.Generator().manual_seed(seed)
    dtype, size, rows = drawn(data, device, DTYPES), drawn(data, device, SIZES), drawn(data, device, ROWS)
    gate_up = strided((normal(generator, rows, 2 * size, dtype=torch.float32, device=device) * scale).to(dtype), pad)
    gate, up = gate_up.double().chunk(2, -1)
    out = swiglu(gate_up)
    assert out.is_contiguous() and out.dtype == dtype
    # Half a unit for silu's rounding and half for the product's; in fp32 the fast division's 2 units besides, and a
    # unit and a half of exp's and the sum's. exp's error grows with its argument, |gate| * 2**-24, but only for
    # negative gates, where silu falls faster: an absolute 2**-23 times up.
    rounded_alike(out, linear_reference.swiglu(gate_up))
    expected = torch.nn.functional.silu(gate) * up
    unit, smallest = units(dtype)
    bound = (5 if dtype == torch.float32 else 1.01) * unit * expected.abs() + smallest * (1 + up.abs())
    close(out, expected, bound + (gate < 0) * 2.0**-23 * up.abs())


@EVERYWHERE
def test_swiglu_of_extreme_gates(device):
    gate = torch.tensor([-torch.inf, -200.0, -90.0, -0.0, 90.0, 200.0, torch.inf, torch.nan] * 4, device=device)
    out, expected = swiglu(torch.cat((gate, torch.ones_like(gate)))), torch.nn.functional.silu(gate)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.allclose(out.nan_to_num(0.0), expected.nan_to_num(0.0), rtol=1e-6, atol=1e-30)


HEADS = {"cpu": [(1, 1), (2, 1), (3, 3), (9, 3)], "cuda": [(1, 1), (9, 3), (12, 2), (32, 8), (40, 40), (64, 8)]}
HEAD_SIZES = {"cpu": [8, 16, 80], "cuda": [8, 16, 64, 80, 96, 128, 256]}
NODES = {"cpu": [1, 3], "cuda": [1, 7, 61, 65]}


@EVERYWHERE
@given(
    data=st.data(),
    seed=SEEDS,
    part=st.sampled_from([1.0, 0.5, 0.25]),
    norm=st.booleans(),
    batch=st.integers(1, 2),
    offset=st.sampled_from([None, 0.0, 1.0]),
    norms_values=st.booleans(),
    ties_values=st.booleans(),
    owns=st.sampled_from([True, True, False]),
    interleaved=st.booleans(),
    scaled=st.booleans(),
    summands=st.sampled_from([0, 0, 2, 3, 4]),
)
@DRAWN
def test_rope_cache(
    device, data, seed, part, norm, batch, offset, norms_values, ties_values, owns, interleaved, scaled, summands
):
    generator = torch.Generator().manual_seed(seed)
    dtype, table_dtype = drawn(data, device, DTYPES), drawn(data, device, DTYPES)
    q_heads, kv_heads = drawn(data, device, HEADS)
    factor = (torch.rand(50, generator=generator) + 0.5).to(device) if scaled else None
    kv_heads, more = kv_heads if owns else 0, (False, norms_values, ties_values, interleaved, factor)
    size, nodes = drawn(data, device, HEAD_SIZES), drawn(data, device, NODES)
    slots_total, half = 2 * nodes + 3, max(1, int(size * part) // 2)
    width, pad = (q_heads + (1 if ties_values else 2) * kv_heads) * size, data.draw(st.sampled_from([0, 5, 16]))
    qkv = strided(normal(generator, batch, nodes, width, dtype=dtype, device=device), pad)
    if summands:
        qkv = Parts(normal(generator, summands, batch, nodes, width, dtype=torch.float32, device=device), dtype)
    angles = torch.rand(50, half, generator=generator) * 6.3
    cos, sin = angles.cos().to(table_dtype).to(device), angles.sin().to(table_dtype).to(device)
    positions = torch.randint(50, (batch, nodes), generator=generator).to(device)
    slots = torch.stack([torch.randperm(slots_total, generator=generator)[:nodes] for _ in range(batch)]).to(device)
    weights = [normal(generator, size, dtype=dtype, device=device) for _ in range(2)] if norm else [None, None]
    # One layer of a buffer of three, its neighbours NaN and to stay so.
    buffers = [
        torch.full((3, batch, kv_heads, slots_total, size), torch.nan, dtype=dtype, device=device) for _ in range(2)
    ]
    q = rope_cache(qkv, cos, sin, positions, buffers[0][1], buffers[1][1], slots, *weights, 1e-6, offset, *more)

    wanted = [torch.full_like(buffer[1], torch.nan) for buffer in buffers]
    expected = layer_reference.rope_cache(qkv, cos, sin, positions, *wanted, slots, *weights, 1e-6, offset, *more)
    k_cache, v_cache = buffers[0][1], buffers[1][1]
    if norms_values:
        rounded_alike(v_cache, wanted[1])
        # Rounded once: a unit where the scale's error crosses a tie; in fp32 that error itself, a few units on either
        # side as in rms_norm.
        few = (8 if dtype == torch.float32 else 2) * torch.finfo(dtype).eps
        torch.testing.assert_close(v_cache, wanted[1], rtol=few, atol=1e-30, equal_nan=True)
    else:
        assert torch.equal(v_cache.nan_to_num(7.0), wanted[1].nan_to_num(7.0))  # copied, and nothing else touched
    assert bool(torch.stack(buffers)[:, [0, 2]].isnan().all()) and torch.equal(k_cache.isnan(), wanted[0].isnan())
    # Errors of fp32 move a rounding across a tie, by a unit: the rotation's (in fp32 itself two products' and a sum's,
    # on either side), and with a norm those of the normed channel and of its product with the weight (in fp32 the
    # scale's few units). All are relative to the pair of channels that a rotation mixes. A factor behind it rounds once
    # more.
    ulps = {(False, False): 1.0, (False, True): 3.0, (True, False): 2.0, (True, True): 8.0}[
        dtype == torch.float32, norm
    ] + scaled
    unit = torch.finfo(dtype).eps
    for actual, reference in ((q, expected), (k_cache, wanted[0])):
        assert actual.shape == reference.shape
        rounded_alike(actual, reference)
        wide = reference.nan_to_num(0.0).double()
        other = (
            wide[..., : 2 * half]
            .unflatten(-1, (half, 2) if interleaved else (2, half))
            .flip(-1 if interleaved else -2)
            .flatten(-2)
        )
        pair = torch.cat((other, torch.zeros_like(wide[..., 2 * half :])), -1)
        bound = ulps * unit * (wide.abs() + pair.abs()).clamp(min=torch.finfo(dtype).tiny)
        assert bool(((actual.nan_to_num(0.0).double() - wide).abs() <= bound).all())


@EVERYWHERE
def test_rope_cache_takes_expanded_positions_and_moved_caches(device):
    generator = torch.Generator().manual_seed(1)
    qkv = normal(generator, 2, 3, 4 * 8, dtype=torch.float32, device=device)
    angles = torch.rand(9, 4, generator=generator).to(device)
    positions, slots = (
        torch.tensor([4, 5, 5], device=device).expand(2, 3),
        torch.tensor([[1], [6], [0]], device=device).expand(3, 2).T,
    )
    caches = [torch.zeros(2, 7, 1, 8, device=device).transpose(1, 2) for _ in range(4)]  # [B, C, Hkv, D] in memory
    q = rope_cache(qkv, angles.cos(), angles.sin(), positions, caches[0], caches[1], slots)
    expected = layer_reference.rope_cache(qkv, angles.cos(), angles.sin(), positions, caches[2], caches[3], slots)
    for actual, reference in ((q, expected), (caches[0], caches[2]), (caches[1], caches[3])):
        assert torch.allclose(actual, reference, rtol=0, atol=1e-6)


COPIES = {  # moved slots, slots, head size
    "cpu": [(1, 5, 8), (3, 7, 65), (16, 40, 16)],
    "cuda": [(1, 9, 64), (7, 300, 80), (8, 2100, 128), (16, 2100, 256), (130, 500, 128)],
}


@EVERYWHERE
@given(data=st.data(), seed=SEEDS, kind=st.sampled_from(["any", "shift", "same", "path"]), rows=st.integers(1, 3))
@DRAWN
def test_kv_block_copy(device, data, seed, kind, rows):
    generator = torch.Generator().manual_seed(seed)
    count, slots, size = drawn(data, device, COPIES)
    dtype = drawn(data, device, DTYPES)
    source, target = (
        torch.stack([torch.randperm(slots, generator=generator)[:count] for _ in range(rows)]).to(device)
        for _ in range(2)
    )
    if kind == "shift":  # every target but one is another's source
        source = target.roll(1, dims=1)
    elif kind == "same":
        source = target.clone()
    elif kind == "path":  # what a tree's path is: ascending, each node at or after its place, the last one repeated
        target = torch.arange(count, device=device).expand(rows, -1)
        source = torch.minimum(source.sort(1).values.maximum(target), torch.tensor(slots - 1, device=device))
    layers, heads = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 2, 3]))
    sizes = size, data.draw(st.sampled_from([size, max(1, size // 3), size + 5]))
    caches = [normal(generator, layers, rows, heads, slots + 2, each + 3, dtype=dtype, device=device) for each in sizes]
    expected = [cache.clone() for cache in caches]
    kv_block_copy(*(cache[:, :, :, 1:-1, :-3] for cache in caches), source, target)
    cache_reference.kv_block_copy(*(cache[:, :, :, 1:-1, :-3] for cache in expected), source, target)
    assert all(torch.equal(*pair) for pair in zip(caches, expected, strict=True))


def test_what_the_kernels_refuse():
    x, weight = torch.zeros(2, 3, 8), torch.ones(8)
    with pytest.raises(ValueError, match="last dimension must be contiguous"):
        rms_norm(x.transpose(1, 2), torch.ones(3), 1e-5)
    with pytest.raises(ValueError, match="fixed distance"):
        rms_norm(x[:, :2], weight, 1e-5)
    with pytest.raises(ValueError, match=r"residual is .* torch\.float16"):
        rms_norm(x, weight, 1e-5, x.half())
    with pytest.raises(ValueError, match="out is"):
        rms_norm(x, weight, 1e-5, out=torch.zeros(6, 8))
    with pytest.raises(ValueError, match="equal length"):
        swiglu(torch.zeros(2, 7))
    cache, index = torch.zeros(2, 1, 5, 8), torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match="qkv has rows of 16"):
        rope_cache(torch.zeros(2, 3, 16), x[0], x[0], index, cache, cache, index)
    with pytest.raises(ValueError, match="R / 2"):
        rope_cache(torch.zeros(2, 3, 24), x[0], x[0], index, cache, cache, index)
    with pytest.raises(ValueError, match=r"factor is \[2\] torch.float32.*accepted is \[3\] torch.float32"):
        rope_cache(torch.zeros(2, 3, 24), x[0, :, :4], x[0, :, :4], index, cache, cache, index, factor=torch.ones(2))
    with pytest.raises(ValueError, match=r"target is .*accepted is \[2, 3\]"):
        kv_block_copy(cache[None], cache[None], index, index[:, :2])
    with pytest.raises(ValueError, match=r"k_cache is .* contiguous last dimension"):
        kv_block_copy(cache[None].transpose(3, 4), cache[None].transpose(3, 4), index, index)


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("cycle", [True, False], ids=["cycle", "shift"])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("count", [8, 64, 512])
def test_no_slot_is_overwritten_before_it_was_read(device, count, size, cycle):
    """Every source but one is another's target, in all layers, rows and heads at once, many times over. On an H100 a
    kernel without its barrier moved wrong vectors in each of 30 launches of 512 slots, and in some of those of
    fewer."""
    torch.manual_seed(0)
    caches = [torch.randn(16, 4, 8, 600, size, device=device, dtype=torch.bfloat16) for _ in range(2)]
    target = torch.stack([torch.randperm(600, device=device)[:count] for _ in range(4)])
    source = target.roll(1, 1)
    if not cycle:
        target = 3 + torch.arange(count, device=device).expand(4, -1)
        source = target + 1
    expected = [cache.clone() for cache in caches]
    cache_reference.kv_block_copy(*expected, source, target)
    for _ in range(30):
        moved = [cache.clone() for cache in caches]
        kv_block_copy(*moved, source, target)
        assert all(torch.equal(*pair) for pair in zip(moved, expected, strict=True))
