"""The C++ kernels of the CPU, held to their references; that a model patched with them says what it says without; how
they are built."""

from __future__ import annotations

import copy
import time
from dataclasses import fields, replace
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from helpers.examples import examples
from helpers.generate import TREE, prompts, shallow_model
from helpers.models import tiny_head, tiny_model
from hypothesis import given
from hypothesis import strategies as st

import fastspec
from fastspec.errors import FastSpecError, Unsupported
from fastspec.files import cache_folder
from fastspec.kernels.drafting import reference as drafting
from fastspec.kernels.linear import cpu
from fastspec.kernels.linear import reference as linear_reference
from fastspec.kernels.linear.reference import GELU_TANH, SILU
from fastspec.kernels.native import build
from fastspec.kernels.native.ops import Native, rows_of
from fastspec.patches import backends
from fastspec.patches.checks.rows import CHECKS
from fastspec.patches.checks.self_check import has_kernel, problems
from fastspec.patches.session import session_of

needs_compiler = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
FP32, CPU = torch.float32, torch.device("cpu")
ONE = torch.nn.Parameter(torch.ones(1))
OPS = [field.name for field in fields(backends.TORCH) if callable(getattr(backends.TORCH, field.name))]


@pytest.fixture(scope="module")
def native() -> Native:
    return backends.cpp_ops().linear.__self__


@needs_compiler
def test_every_kernel_is_its_reference_on_the_rows_of_the_self_check():
    ops = backends.cpp_ops()
    assert {name for name in OPS if has_kernel(ops, name)} <= {check.op for check in CHECKS}
    with torch.no_grad():
        assert list(problems(ops, FP32, CPU)) == []


@needs_compiler
@given(
    st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64]),
    st.integers(1, 70),
    st.integers(1, 70),
    st.booleans(),
    st.integers(0, 2**31),
)
@examples(150)
def test_a_product_is_right_within_the_rounding_of_a_sum(native, rows, inner, outer, biased, seed):
    torch.manual_seed(seed)
    x, weight, bias = torch.randn(rows, inner), torch.randn(outer, inner), torch.randn(outer) if biased else None
    want = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    # A sum of `inner` fp32 products is off by at most inner * eps of the sum of their magnitudes.
    bound = (inner + 1) * 2**-23 * (x.abs() @ weight.abs().t() + (0 if bias is None else bias.abs())) + 1e-30
    with torch.no_grad():
        assert bool(((native.product(x, weight, bias).double() - want).abs() <= bound.double()).all())


@needs_compiler
@pytest.mark.parametrize("dtype", [FP32, torch.bfloat16])
@given(
    st.sampled_from([1, 2, 6, 7, 16, 17, 33, 64, 70]),
    st.integers(1, 70),
    st.lists(st.integers(1, 60), min_size=1, max_size=4),
    st.integers(0, 15),
    st.integers(0, 2**31),
)
@examples(100)
def test_layers_that_lie_apart_are_multiplied_as_one_after_another(native, dtype, rows, inner, outer, biased, seed):
    torch.manual_seed(seed)
    x, weights = torch.randn(1, rows, inner, dtype=dtype), [torch.randn(each, inner, dtype=dtype) for each in outer]
    biases = [torch.randn(each, dtype=dtype) if biased >> at & 1 else None for at, each in enumerate(outer)]
    with torch.no_grad():
        assert torch.equal(
            native.linears(x, weights, biases), linear_reference.linears(x, weights, biases, product=native.linear)
        )
        halves, none = (weights[0], weights[0].flip(0).contiguous()), (biases[0], None)
        want = linear_reference.swiglu(linear_reference.linears(x, halves, none, product=native.linear))
        torch.testing.assert_close(native.linears(x, halves, none, SILU), want)
        gelu = linear_reference.linears(x, halves, none, GELU_TANH, product=native.linear)
        torch.testing.assert_close(native.linears(x, halves, none, GELU_TANH), gelu)


@needs_compiler
def test_layers_that_one_call_does_not_take_go_one_by_one(native):
    """Weights of another dtype or out of place, and parts of a gate of which torch spreads one over the other."""
    x, gate, up = torch.randn(3, 8), torch.randn(1, 8), torch.randn(6, 8)
    with torch.no_grad():
        torch.testing.assert_close(
            native.linears(x, (gate, up), (None, None), SILU),
            linear_reference.linears(x, (gate, up), (None, None), SILU),
        )
        turned = torch.randn(8, 6).t()
        assert torch.equal(
            native.linears(x, (up, turned), (None, None)), torch.cat((native.linear(x, up, None), x @ turned.t()), -1)
        )
        with pytest.raises(RuntimeError, match="dtype"):
            native.linears(x, (up, up.double()), (None, None))
    up.requires_grad_()
    native.linears(x, (up, up), (None, None)).sum().backward()
    assert up.grad is not None


@needs_compiler
@pytest.mark.parametrize("gate", [-1e38, -1e30, -100.0, -88.5, 88.5, 1e30])
def test_gates_far_from_zero_are_what_they_are_for_torch(native, gate):
    both = torch.cat((torch.full((1, 20), gate), torch.ones(1, 20)), -1)
    with torch.no_grad():
        torch.testing.assert_close(
            native.swiglu(both, SILU), torch.full((1, 20), torch.nn.functional.silu(torch.tensor(gate)).item())
        )


@needs_compiler
def test_fewer_threads_go_on_where_they_wait_for_each_other(native):
    """In nanoseconds: what the first of so many threads has waited, and worked. A wait by itself, short ones, and those
    of a thread that is alone change nothing."""
    library = build.library(backends.cache_folder() / "kernels" / build.library_name())
    team, note, ms = library.fastspec_team, library.fastspec_note, 1_000_000
    until = time.monotonic() + 10
    while team(16) < 16 and time.monotonic() < until:  # what the tests before have waited
        time.sleep(0.01)
    for waits in ([(ms // 10, 0, 2)] * 3, [(4 * ms, 5 * ms, 2)] * 3, [(ms, 0, 2)], [(40 * ms, 0, 1)] * 3):
        for each in waits:
            note(*each)
        assert [team(threads) for threads in (1, 2, 16)] == [1, 2, 16]
        time.sleep(0.05)  # longer than a wait of a millisecond: the next is not close behind it
    note(ms, 0, 2)
    time.sleep(0.05)
    note(ms, 0, 2)
    assert team(2) == 2  # two, far from each other
    note(40 * ms, ms, 16)
    note(40 * ms, ms, 16)
    assert [team(threads) for threads in (1, 2, 8, 16)] == [1, 2, 8, 8]
    note(40 * ms, ms, 8)
    note(40 * ms, ms, 8)
    assert [team(threads) for threads in (2, 4, 16)] == [2, 4, 4]
    time.sleep(0.8)
    assert [team(threads) for threads in (1, 2, 16)] == [1, 2, 16]


@needs_compiler
@pytest.mark.parametrize("rows", [1, 8, 16, 33])
def test_two_threads_give_the_bits_of_one(native, rows):
    """Every sum is one thread's, in the order that it has alone."""
    x, weight, threads, found = torch.randn(rows, 67), torch.randn(131, 67), torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            with torch.no_grad():
                found.append(native.product(x, weight, None))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


@pytest.mark.some("gemma", "gemma2", "gpt_oss", "ministral3")  # the others in test_cpp_stack.py
@needs_compiler
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma", "gemma2", "gpt_oss", "ministral3"])
def test_a_model_gives_the_same_tokens_with_them(family):
    """A plain family, one with norms of heads, and some of which a few ops go to the references."""
    plain, model = shallow_model(family), shallow_model(family)
    fastspec.patch(model, eagle3=tiny_head(model), backend="cpp")
    for inputs in (prompts(9), prompts(4, 9)):
        want = plain.generate(**inputs, max_new_tokens=20, do_sample=False)
        for assistant in ("autoregressive", TREE):
            assert torch.equal(model.generate(**inputs, max_new_tokens=20, do_sample=False, assistant=assistant), want)
    assert fastspec.report(model).backend == "cpp"


@needs_compiler
def test_a_model_is_copied_behind_a_call():
    """Functions of a library, which the copy finds by itself, cannot be."""
    model = shallow_model()
    fastspec.patch(model, eagle3=tiny_head(model), backend="cpp")
    for assistant in ("nasd", TREE):
        call = prompts(7) | {"max_new_tokens": 12, "do_sample": False, "assistant": assistant}
        want = model.generate(**call)
        assert torch.equal(copy.deepcopy(model).generate(**call), want)


@needs_compiler
def test_weights_that_change_are_noticed():
    """In place, and by a storage of their own; after the unpatch the parameters are the model's alone again."""
    plain, model = shallow_model(), shallow_model()
    fastspec.patch(model, eagle3=tiny_head(model), backend="cpp")
    inputs = prompts(7)
    emitted = []
    for change in ("none", "in place", "replaced"):
        with torch.no_grad():
            for one in (plain, model):
                weight = one.model.layers[2].mlp.up_proj.weight
                if change == "in place":
                    weight.mul_(-1.5)
                if change == "replaced":
                    weight.data = weight.flip(0).clone()
        want = plain.generate(**inputs, max_new_tokens=12, do_sample=False)
        assert torch.equal(model.generate(**inputs, max_new_tokens=12, do_sample=False, assistant=TREE), want)
        emitted.append(want.tolist())
    assert emitted[0] != emitted[1] != emitted[2]
    assert session_of(model).packed
    fastspec.unpatch(model)
    for parameter in model.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.numel() * 4


@needs_compiler
def test_other_dtypes_are_computed_as_by_torch():
    model = shallow_model().half()
    emitted = []
    for backend in ("torch", "cpp"):
        fastspec.patch(model, backend=backend)
        emitted.append(model.generate(**prompts(7), max_new_tokens=12, do_sample=False, assistant="autoregressive"))
        fastspec.unpatch(model)
    assert torch.equal(*emitted)


@needs_compiler
@pytest.mark.parametrize("fastest", [0, 1, 2])
def test_the_quickest_way_is_taken(native, fastest, monkeypatch):
    taken = []

    def way(index):
        return lambda rows, weight, bias: taken.append(index) or torch.nn.functional.linear(rows, weight, bias)

    monkeypatch.setattr(cpu, "times", lambda *_: [1.0 - (index == fastest) for index in range(3)])
    monkeypatch.setattr(native, "measured", cpu.Measured(*map(way, range(3))))
    with torch.no_grad():
        x, weight = torch.randn(3, 1000), torch.randn(1100, 1000)
        assert torch.equal(native.linear(x, weight, None), x @ weight.t()) and taken == [fastest]


@needs_compiler
def test_the_likeliest_is_the_first_of_equals_and_what_is_no_number_is_above_all():
    pick = backends.cpp_ops().pick
    x = torch.zeros(4, 1000)
    x[0, [777, 300, 999]], x[1, 998], x[2, [500, 20]], x[3] = 2.0, torch.inf, torch.nan, -torch.inf
    with torch.no_grad():
        assert pick(x, None).tolist() == [300, 998, 20, 0]


@needs_compiler
@pytest.mark.parametrize("size", [3, 15, 200, 1001])
def test_the_likeliest_few_are_in_falling_order_and_the_first_of_equals_come_first(size):
    logits = torch.randn(5, size)
    logits[4] = (torch.arange(size) % 3).float()
    with torch.no_grad():
        values, ids = backends.cpp_ops().topk_logprobs(logits, 3)
        want, order = drafting.stable_topk(logits.log_softmax(-1), 3)
    assert torch.equal(ids, order)
    torch.testing.assert_close(values, want, rtol=1e-5, atol=1e-5)


@needs_compiler
def test_queries_that_see_nothing_give_zeros():
    """A row of a batch that has ended may see no slot at all."""
    from fastspec.kernels.attention.reference import AttentionLayout

    seen = torch.ones(1, 1, 2, 5, dtype=torch.bool)
    seen[0, 0, 1] = False
    k = torch.randn(1, 1, 5, 16)
    with torch.no_grad():
        out = backends.cpp_ops().tree_attention(torch.randn(1, 2, 1, 16), k, k, AttentionLayout(seen, seen, 5), 0.25)
    assert bool(out[0, 0].abs().sum() > 0) and bool((out[0, 1] == 0).all())


def test_rows_that_are_not_evenly_apart_are_told():
    x = torch.randn(2, 3, 8)
    for view in (x, x[..., :4], x[:, 1:2], x[:1, :, 4:], x[0]):
        rows = rows_of(view)
        assert (
            rows is not None
            and torch.equal(rows, view.reshape(-1, view.shape[-1]))
            and rows.data_ptr() == view.data_ptr()
        )
    assert rows_of(x[:, :2]) is None and rows_of(x.transpose(1, 2)) is None and rows_of(x.transpose(0, 1)) is None


def test_what_keeps_them_from_being_built_is_said(monkeypatch, tmp_path):
    backends.cpp_ops.cache_clear()
    monkeypatch.setenv("FASTSPEC_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(Unsupported, match="there is no C\\+\\+ compiler"):
        fastspec.patch(tiny_model(), backend="cpp")
    with pytest.raises(Unsupported, match="is for the CPU, and the model is on cuda"):
        backends.choose_backend("cpp", torch.device("cuda"))
    failing = tmp_path / "compiler"
    failing.write_text("#!/bin/sh\necho out of order >&2\nexit 3\n")
    failing.chmod(0o755)
    monkeypatch.setenv("CXX", str(failing))
    if build.missing() is None:
        with pytest.raises(Unsupported, match="ended with 3: out of order"):
            fastspec.patch(tiny_model(), backend="cpp")
    assert not list(Path(tmp_path).rglob("*.so"))
    backends.cpp_ops.cache_clear()


@pytest.fixture(scope="module")
def compiled(native) -> bytes:
    """The library, as one build wrote it."""
    path = cache_folder() / "kernels" / build.library_name()
    assert build.whole(path)
    return path.read_bytes()


@needs_compiler
def test_they_are_compiled_once(compiled, tmp_path, monkeypatch):
    (tmp_path / build.library_name()).write_bytes(compiled)
    monkeypatch.setattr(build.subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
    assert build.build(tmp_path) is None and [path.name for path in tmp_path.iterdir()] == [build.library_name()]


@needs_compiler
@pytest.mark.parametrize("left", [0, 31, 4000, -1])
def test_a_library_that_was_cut_off_is_compiled_again(compiled, tmp_path, left, monkeypatch):
    """Loaded, it would end the process. The compiler itself runs once here, for any of them; for the others its output
    is written again."""
    path, real, asked = tmp_path / build.library_name(), build.subprocess.run, []

    def run(command, **options):
        asked.append(command)
        if left == 4000:
            return real([*command, "-O0"], **options)  # whose loading is the matter
        Path(command[command.index("-o") + 1]).write_bytes(compiled[: -build.DIGEST])
        return CompletedProcess(command, 0, "", "")

    path.write_bytes(compiled[:left])
    monkeypatch.setattr(build.subprocess, "run", run)
    assert not build.whole(path) and build.build(tmp_path) is None and len(asked) == 1
    assert build.whole(path) and build.library(path).fastspec_lanes() in (8, 16)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_a_compiler_is_named_with_its_options(monkeypatch):
    named = build.compiler()
    if named is None:
        pytest.skip("no compiler")
    monkeypatch.setenv("CXX", f"{named[0]} -O2 -g")
    assert build.compiler() == [named[0], "-O2", "-g"] and build.command(Path("a"), Path("b"))[:3] == [
        named[0],
        "-O2",
        "-g",
    ]
    monkeypatch.setenv("CXX", "no-such-program g++")
    assert build.compiler() is None


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.input_layernorm.weight.data.resize_(1).fill_(1.3),
        lambda layer: setattr(layer.self_attn.o_proj, "bias", ONE),
        lambda layer: setattr(layer.mlp.down_proj, "bias", ONE),
    ],
    ids=["norm", "bias", "another bias"],
)
def test_weights_that_are_broadcast_are_left_to_torch(change):
    model = tiny_model()
    change(model.model.layers[0])
    inputs = torch.arange(2, 9)[None]
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "attention_mask": torch.ones_like(inputs)}
    expected = model.generate(inputs, **options)
    with fastspec.patched(model, backend="cpp"):
        assert torch.equal(model.generate(inputs, **options, assistant="autoregressive"), expected)


@needs_compiler
def test_weights_of_a_wrong_size_are_an_error_as_in_torch(native):
    """None is read beyond its end."""
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    with torch.no_grad():
        for wrong in (torch.randn(5, 7), torch.randn(5, 1)):
            with pytest.raises(RuntimeError):
                native.linear(x, wrong, None)
        with pytest.raises(RuntimeError):
            native.linear(x, weight, torch.randn(4))
        with pytest.raises(RuntimeError):
            native.rms_norm(x, torch.randn(7), 1e-6)
        assert torch.equal(native.linear(x, weight, ONE), torch.nn.functional.linear(x, weight, ONE))


@needs_compiler
def test_a_library_is_checked_before_its_first_use_and_a_failure_names_the_kernel(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr("fastspec.patches.checks.self_check._known", {})
    ops = backends.cpp_ops()
    wrong = replace(ops, pick=lambda scores, *rest: ops.pick(scores, *rest) + 1)
    monkeypatch.setattr("fastspec.patches.session.choose_backend", lambda *_, **__: wrong)
    with pytest.raises(FastSpecError, match=r"backend 'cpp' do not compute .* pick \(the likeliest\)"):
        fastspec.patch(tiny_model(), backend="cpp")
    fastspec.patch(tiny_model().half(), backend="cpp")  # which takes none of them
