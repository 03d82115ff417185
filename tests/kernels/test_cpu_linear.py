"""The CPU's linear layer through oneDNN, held to the reference; and that a patched model uses it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from helpers.examples import examples
from helpers.models import tiny_model
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fastspec
from fastspec.kernels.linear import cpu, reference
from fastspec.kernels.linear import cpu as quickest
from fastspec.patches.backends import TORCH, TORCH_ONEDNN, choose_backend

pytestmark = pytest.mark.skipif(not cpu.available(), reason="this torch has no oneDNN")
ROWS = st.sampled_from([1, 2, 7, 16, 17, 63, 64, 65, 130])
SIZES = st.integers(1, 70)
LAYOUTS = st.sampled_from(["plain", "transposed", "sliced"])


def strided(x: Tensor, layout: str) -> Tensor:
    """The same values in another layout."""
    if layout == "transposed":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    return torch.cat((x, x), -1)[..., : x.shape[-1]] if layout == "sliced" else x


def by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return cpu.through_onednn(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], -1)


@given(ROWS, SIZES, SIZES, st.sampled_from([1, 3]), st.booleans(), LAYOUTS, LAYOUTS, st.integers(0, 2**31))
@examples(120)
def test_linear_is_the_product_within_the_rounding_of_a_sum(
    rows, inner, outer, batch, biased, x_layout, w_layout, seed
):
    torch.manual_seed(seed)
    x, weight = strided(torch.randn(batch, rows, inner), x_layout), strided(torch.randn(outer, inner), w_layout)
    bias = torch.randn(outer) if biased else None
    want = torch.nn.functional.linear(x.double(), weight.double(), bias.double() if biased else None)
    # A sum of `inner` fp32 products is off by at most inner * eps of the sum of their magnitudes.
    bound = (inner + 1) * 2**-23 * (x.abs() @ weight.abs().t() + (bias.abs() if biased else 0)) + 1e-30
    with torch.no_grad():
        for linear in (cpu.linear, reference.linear, by_onednn):
            got = linear(x, weight, bias)
            assert got.shape == want.shape and got.dtype == torch.float32
            assert bool(((got.double() - want).abs() <= bound.double()).all())


def test_other_dtypes_and_gradients_take_the_plain_product():
    x = torch.arange(40.0).view(5, 8)  # whole numbers: their sums are exact in any order
    weight, bias = torch.randn(6, 8, requires_grad=True), torch.randn(6)
    assert torch.equal(cpu.linear(x, weight, bias), reference.linear(x, weight, bias))
    cpu.linear(x, weight, bias).sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, x.sum(0).expand(6, -1))
    with torch.no_grad():
        for dtype in (torch.float64, torch.bfloat16):
            args = x.to(dtype), weight.to(dtype), bias.to(dtype)
            assert torch.equal(cpu.linear(*args), reference.linear(*args))
        assert cpu.linear(x[:0], weight, bias).shape == (0, 6)


def test_a_patched_model_multiplies_through_onednn(monkeypatch):
    model = tiny_model("llama")
    cpu, cuda = map(torch.device, ("cpu", "cuda"))
    assert (
        choose_backend("auto", cpu) is TORCH_ONEDNN
        and choose_backend("torch", cpu) is choose_backend("torch", cuda) is TORCH
    )
    calls = []
    monkeypatch.setattr("fastspec.patches.session.choose_backend", lambda *_, **__: _counting(calls))
    fastspec.patch(model)
    model.generate(torch.tensor([[1, 2, 3]]), assistant="autoregressive", max_new_tokens=4, do_sample=False)
    per_pass = 7 * model.config.num_hidden_layers + 1  # q, k, v, o, gate, up, down; LM head
    assert len(calls) == 4 * per_pass  # the prefill and three rounds
    assert fastspec.report(model).backend == "torch+onednn"


@pytest.mark.parametrize("quicker", ["MKL", "oneDNN"])
def test_the_quicker_library_multiplies_and_is_asked_for_once(quicker, monkeypatch):
    """For each size of weight and group of rows; small products are MKL's without a measurement, many rows oneDNN's."""
    timed, multiplied, product = [], [], cpu.through_onednn

    def onednn(rows: Tensor, *rest: Tensor | None) -> Tensor:
        multiplied.append(len(rows))
        return product(rows, *rest)

    monkeypatch.setattr(cpu, "through_onednn", onednn)
    monkeypatch.setattr(cpu, "MEASURED", quickest.Measured(torch.nn.functional.linear, onednn))
    monkeypatch.setattr(
        quickest, "times", lambda _, rows, weight: timed.append(len(rows)) or ([1, 2] if quicker == "MKL" else [2, 1])
    )
    with torch.no_grad():
        weight, small = torch.randn(1100, 1000), torch.randn(100, 1000)
        for rows in (1, 5, 7, 8, 1, 5):
            got = cpu.linear(torch.ones(rows, 1000), weight, None)
            torch.testing.assert_close(got, weight.sum(1).expand(rows, -1), rtol=1e-4, atol=1e-4)
        assert timed == [1, 5] and multiplied == ([] if quicker == "MKL" else [1, 5, 7, 8, 1, 5])
        cpu.linear(torch.ones(8, 1000), small, None)
        assert timed == [1, 5] and len(multiplied) in (0, 6)
        cpu.linear(torch.ones(65, 1000), weight, None)
        assert timed == [1, 5] and multiplied[-1] == 65


def test_a_long_product_is_timed_once(monkeypatch):
    """And a short one behind a run that warms up."""
    runs = []
    ways = (lambda *_: None, lambda *_: runs.append(1))
    monkeypatch.setattr(quickest, "COLD", 48)  # a weight's own size: no copies
    monkeypatch.setattr(quickest, "perf_counter", iter(range(1000)).__next__)
    assert quickest.times(ways, torch.ones(1, 4), torch.ones(3, 4)) == [1, 1] and len(runs) == 1
    monkeypatch.setattr(quickest, "perf_counter", iter(i * 1e-6 for i in range(1000)).__next__)
    quickest.times(ways, torch.ones(1, 4), torch.ones(3, 4))
    assert len(runs) == 1 + 1 + quickest.REPEATS


def test_measuring_ends_after_a_second(monkeypatch):
    """Later sizes take what was chosen most often for as many rows, and the last way where nothing was."""
    now, first, last = [0.0], lambda *_: None, lambda *_: None

    def slow(*_):
        now[0] += 0.4
        return [1.0, 2.0]

    monkeypatch.setattr(quickest, "times", slow)
    monkeypatch.setattr(quickest, "perf_counter", lambda: now[0])
    measured = quickest.Measured(first, last)
    for width in range(1, 9):
        assert measured.fastest(torch.ones(2, width), torch.ones(3, width)) is first
    assert now == [pytest.approx(3 * 0.4)]  # the third begins before a second has passed
    assert measured.fastest(torch.ones(7, 4), torch.ones(3, 4)) is last


def test_a_weight_that_a_cache_holds_is_timed_as_one_that_comes_from_memory(monkeypatch):
    """In every turn all copies are multiplied, each once, and none of them is the weight itself."""
    monkeypatch.setattr(quickest, "COLD", 5 * 48)
    weight, seen = torch.ones(3, 4), []
    quickest.times((lambda rows, each, bias: seen.append(each.data_ptr()),), torch.ones(1, 4), weight)
    turn = seen[:5]
    assert len(set(turn)) == 5 and weight.data_ptr() not in turn and seen == turn * (1 + quickest.REPEATS)


def _counting(calls: list):
    from dataclasses import replace

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        calls.append(x.shape)
        return cpu.linear(x, weight, bias)

    return replace(TORCH_ONEDNN, linear=linear, linears=partial(reference.linears, product=linear))
