"""The C++ kernels of the CPU in bfloat16: within a rounding of exact results, and a row's result does not depend on the
rows beside it, so that drafts change no token."""

from __future__ import annotations

import pytest
import torch
from helpers.examples import examples
from helpers.generate import TREE, prompts
from helpers.models import tiny_head, tiny_model
from hypothesis import given
from hypothesis import strategies as st

import fastspec
from fastspec.errors import Unsupported
from fastspec.kernels.attention import reference as attention
from fastspec.kernels.drafting import reference as drafting
from fastspec.kernels.layer import reference as layer
from fastspec.kernels.linear import reference as linear
from fastspec.kernels.native import build
from fastspec.kernels.native.ops import Native
from fastspec.models import SMOLLM2, load_smollm2, source_of
from fastspec.patches import backends
from fastspec.patches.checks.self_check import problems

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
BF16 = torch.bfloat16
EPS = torch.finfo(BF16).eps
ROWS, SIZES = st.sampled_from([1, 2, 5, 6, 9, 11, 16, 33, 64]), st.sampled_from([1, 7, 16, 31, 32, 63, 65, 96, 200])


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module", params=["the processor's products", "widened"])
def native(request) -> Native:
    """With the processor's own products of pairs, where it has them, and without."""
    found = backends.cpp_native()
    assert isinstance(found, Native)
    if request.param == "widened":
        found.pairs = False
    elif not found.pairs:
        pytest.skip("this processor has no AVX512-BF16, or is held to AVX2")
    return found


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def rounded_alike(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    """The same bits but for rare ties, and those by one rounding: a rounding that is left out would show in every
    fourth element."""
    assert actual.dtype == wanted.dtype and actual.shape == wanted.shape
    differ = actual != wanted
    assert int(differ.sum()) <= 2 + actual.numel() // 64
    # One step of the result is at most EPS of it; sums that cancel are off by what their parts, of magnitudes up to
    # about 8, were.
    assert bool(((actual.double() - wanted.double()).abs() <= EPS * wanted.double().abs().clamp(min=8)).all())


def test_every_kernel_is_its_reference_on_the_rows_of_the_self_check():
    assert list(problems(backends.cpp_ops(), BF16, torch.device("cpu"))) == []


@given(rows=ROWS, inner=SIZES, outer=SIZES, biased=st.booleans(), seed=st.integers(0, 2**31))
@examples(100)
def test_a_product_is_the_exact_one_rounded_once(native, rows, inner, outer, biased, seed):
    x, weight, bias = (
        drawn(seed, rows, inner),
        drawn(seed + 1, outer, inner),
        drawn(seed + 2, outer) if biased else None,
    )
    want = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    parts = x.double().abs() @ weight.double().abs().t() + (0 if bias is None else bias.double().abs())
    # Half a step of the result, and before it the sum of `inner` products in fp32.
    bound = 1.01 * EPS / 2 * want.abs() + (inner + 1) * 2**-23 * parts + 1e-30
    assert bool(((native.product(x, weight, bias).double() - want).abs() <= bound).all())


@given(rows=ROWS, inner=SIZES, outer=SIZES, seed=st.integers(0, 2**31))
@examples(60)
def test_a_row_does_not_depend_on_the_rows_beside_it(native, rows, inner, outer, seed):
    x, weight = drawn(seed, rows, inner), drawn(seed + 1, outer, inner)
    together = native.product(x, weight, None)
    for row in range(rows):
        assert torch.equal(native.product(x[row : row + 1], weight, None)[0], together[row])


@pytest.mark.parametrize("rows", [1, 9, 33])
def test_two_threads_give_the_bits_of_one(native, rows):
    x, weight, threads, found = drawn(0, rows, 67), drawn(1, 131, 67), torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(native.product(x, weight, None))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


@given(rows=ROWS, size=SIZES, added=st.booleans(), offset=st.sampled_from([None, 1.0]), seed=st.integers(0, 2**31))
@examples(60)
def test_norms_and_gates_round_where_their_references_do(native, rows, size, added, offset, seed):
    x, weight, residual = drawn(seed, rows, size), drawn(seed + 1, size), drawn(seed + 2, rows, size) if added else None
    got, wanted = (each.rms_norm(x, weight, 1e-5, residual, offset=offset) for each in (native, layer))
    rounded_alike(got[0], wanted[0])
    assert torch.equal(got[1], wanted[1])
    packed = drawn(seed + 3, 2 * size, size)
    product = native.linear(x, packed, None)
    rounded_alike(native.gate_up(x, packed, None), linear.swiglu(product))


@given(
    nodes=st.integers(1, 9),
    size=st.sampled_from([16, 32, 80]),
    normed=st.booleans(),
    wide=st.booleans(),
    seed=st.integers(0, 2**31),
)
@examples(40)
def test_rotation_rounds_where_its_reference_does(native, nodes, size, normed, wide, seed):
    """By tables of either dtype."""
    angles = 6 * torch.rand(32, size // 2, generator=torch.Generator().manual_seed(seed))
    tables = [each if wide else each.to(BF16) for each in (angles.cos(), angles.sin())]
    places, qkv = torch.arange(nodes)[None] + 3, drawn(seed, 1, nodes, 8 * size)
    norms = (drawn(seed + 1, size), drawn(seed + 2, size), 1e-6) if normed else ()
    found = []
    for each in (native, layer):
        caches = torch.zeros(1, 2, 20, size, dtype=BF16), torch.zeros(1, 2, 20, size, dtype=BF16)
        found.append((each.rope_cache(qkv, *tables, places, *caches, places, *norms), *caches))
    for got, wanted in zip(*found, strict=True):
        rounded_alike(got, wanted)


@pytest.mark.parametrize(("nodes", "extent", "size"), [(1, 40, 64), (9, 63, 64), (17, 65, 80)])
def test_attention_is_the_exact_one_and_a_node_does_not_depend_on_others(native, nodes, extent, size):
    q, k, v = drawn(0, 2, nodes, 6, size), drawn(1, 2, 2, extent, size), drawn(2, 2, 2, extent, size)
    prefix = torch.tensor([extent - nodes, (extent - nodes) // 2])
    layout = attention.attention_layout(prefix, None, nodes, nodes, extent, 3)
    got = native.tree_attention(q, k, v, layout, size**-0.5)
    want = attention.tree_attention(q.double(), k.double(), v.double(), layout, size**-0.5)
    # Half a step, and fp32 sums of weights that add up to one times values below 8.
    assert bool(((got.double() - want).abs() <= 1.01 * EPS / 2 * want.abs() + extent * 2**-23 * 8).all())
    for node in range(nodes):
        alone = attention.AttentionLayout(layout.visible[:, :, node : node + 1].contiguous(), layout.stacked, extent)
        one = native.tree_attention(q[:, node : node + 1].contiguous(), k, v, alone, size**-0.5)
        assert torch.equal(one[:, 0], got[:, node])


@pytest.mark.parametrize("size", [3, 200, 1001])
def test_the_likeliest_are_the_first_of_equals(native, size):
    logits = drawn(0, 5, size)
    values, ids = native.topk_logprobs(logits, 3)
    want, order = drafting.stable_topk(logits.float().log_softmax(-1), 3)
    assert torch.equal(ids, order) and torch.equal(native.pick(logits, None), order[:, 0])
    torch.testing.assert_close(values, want, rtol=1e-5, atol=1e-5)
    logits[2, -1] = torch.nan
    assert native.pick(logits, None)[2] == size - 1


def test_what_is_no_number_and_what_is_infinite_stay_so(native):
    x = drawn(0, 3, 64)
    x[0, 5], x[1, 6] = torch.nan, torch.inf
    product = native.product(x, drawn(1, 8, 64).abs() + 1, None)
    assert bool(product[0].isnan().all() and (product[1] == torch.inf).all() and product[2].isfinite().all())
    _, total = native.rms_norm(x, drawn(2, 64), 1e-5, torch.zeros_like(x))
    assert torch.equal(total.isnan(), x.isnan()) and bool(total[1, 6] == torch.inf)


@pytest.mark.some("llama", "gemma")  # whose layers the stack runs, and others
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma"])
def test_drafts_change_no_token(family):
    model = tiny_model(family).bfloat16()
    fastspec.patch(model, eagle3=tiny_head(model).bfloat16(), backend="cpp")
    for inputs in (prompts(9), prompts(4, 9)):
        one, many = (
            model.generate(**inputs, max_new_tokens=40, do_sample=False, assistant=each)
            for each in ("autoregressive", TREE)
        )
        assert torch.equal(one, many)
    of_layers = (
        {"tree_attention", "rope_cache", "gate_up"} if family == "gemma" else {"stack"}
    )  # whose gates are not SiLU's
    assert {"linear", "rms_norm"} | of_layers <= set(fastspec.report(model).kernels)


@pytest.mark.slow
def test_drafts_change_no_token_of_smollm2():
    try:
        source_of(SMOLLM2)
    except Unsupported as error:
        pytest.skip(str(error))
    model, tokenizer = load_smollm2(dtype=BF16)
    fastspec.patch(model, eagle3=SMOLLM2, backend="cpp")
    for prompt in ("Explain how rainbows form.", "1, 2, 3, 4,"):
        inputs = tokenizer(prompt, return_tensors="pt")
        one, many = (
            model.generate(**inputs, max_new_tokens=20, do_sample=False, assistant=each)
            for each in ("autoregressive", "eagle3")
        )
        assert torch.equal(one, many)
    assert fastspec.report(model).last.acceptance_length > 1.3
