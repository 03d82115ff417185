"""Whole layers in one call of the C++ kernels: bit for bit what the kernels give that are called one by one, and left
alone where they do not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.examples import examples
from helpers.generate import TREE, prompts, shallow_model
from helpers.models import tiny_head
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fastspec
from fastspec.generation.whole_layers import WholeLayers
from fastspec.kernels.layer import reference
from fastspec.kernels.layer.reference import LayerPlace, PlainLayers
from fastspec.kernels.linear.reference import SILU
from fastspec.kernels.native import build
from fastspec.kernels.native.ops import Native
from fastspec.patches import backends
from fastspec.patches.checks.inputs import Draw, layers
from fastspec.patches.checks.self_check import unlike

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def native() -> Native:
    return backends.cpp_ops().linear.__self__


@pytest.fixture(autouse=True)
def by_kernel(native: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel multiplies, whatever is the quickest here."""
    monkeypatch.setattr(native.measured, "fastest", lambda rows, weight: native.by_kernel)


def one_by_one(
    ops: Native,
    held: PlainLayers,
    places: list[LayerPlace],
    total: Tensor,
    positions: Tensor,
    taps: dict,
    x: Tensor | None,
) -> Any:
    """`reference.stack` by a backend's ops."""
    change = None
    for number, (layer, place) in enumerate(zip(held.rows, places, strict=True)):
        if layer.norm is not None:
            norm = layer.norm
            x, total = ops.rms_norm(
                total if change is None else change,
                norm.weight,
                norm.eps,
                change if change is None else total,
                None,
                taps.get(number),
                norm.offset,
            )
        elif number in taps:
            taps[number].copy_(total)
        k, v = place.k[place.index], place.v[place.index]
        qkv = ops.linears(x, layer.qkv.weights, layer.qkv.biases)
        q = ops.rope_cache(
            qkv, place.cos, place.sin, positions, k, v, place.slots, layer.q_norm, layer.k_norm, layer.eps, layer.offset
        )
        mixed = ops.tree_attention(q, k, v, place.layout, layer.scale).flatten(-2)
        norm = layer.mlp_norm
        x, total = ops.rms_norm(
            ops.linears(mixed, layer.out.weights, layer.out.biases), norm.weight, norm.eps, total, offset=norm.offset
        )
        opened = ops.swiglu(ops.linears(x, layer.gate_up.weights, layer.gate_up.biases), SILU)
        change = ops.linears(opened, layer.down.weights, layer.down.biases)
    return change, total


def drawn(seed: int, dtype: torch.dtype, **options: Any) -> Any:
    return layers(Draw(dtype, CPU, seed), **options)[0]


@given(
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(1, 9),
    st.integers(1, 4),
    st.sampled_from([16, 40, 64]),
    st.sampled_from([24, 48, 70]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 1.0]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**31),
)
@examples(80)
def test_layers_together_are_the_bits_of_their_kernels(
    native, dtype, nodes, rows, width, inner, apart, biased, norms, offset, first_given, single, seed
) -> None:
    options = {
        "nodes": nodes,
        "rows": rows,
        "width": width,
        "inner": inner,
        "apart": apart,
        "biased": biased,
        "norms": norms,
    }
    options |= {"offset": offset, "given": first_given, "single": single}
    (held, places, total, positions, taps, x), other, spec = (drawn(seed, dtype, **options) for _ in range(3))
    before = total.clone()
    with torch.no_grad():
        got, want, exact = (
            native.stack(held, places, total, positions, taps, x),
            one_by_one(native, *other),
            reference.stack(*spec),
        )
    assert got is not None and torch.equal(total, before)
    pairs = [
        *zip(got, want, exact, strict=True),
        (places[0].k, other[1][0].k, spec[1][0].k),
        (places[0].v, other[1][0].v, spec[1][0].v),
    ]
    for mine, theirs, specified in (*pairs, (taps[1], other[4][1], spec[4][1])):
        assert torch.equal(mine, theirs)
        assert unlike(mine, specified) is None


def test_weights_are_read_where_they_lie_now(native) -> None:
    (held, *given), other = (drawn(3, torch.float32, nodes=4) for _ in range(2))
    with torch.no_grad():
        for change in (lambda w: w.mul_(-1.5), lambda w: setattr(w, "data", w.flip(0).clone())):
            for rows in (held.rows, other[0].rows):
                change(rows[1].down.weights[0]), change(rows[0].mlp_norm.weight)
            got, want = native.stack(held, *given), one_by_one(native, *other)
            assert got is not None and all(map(torch.equal, got, want))


def broadcast(held: PlainLayers) -> PlainLayers:
    """Its second norm has one weight, which torch spreads over all channels."""
    first, last = held.rows
    return PlainLayers((first, replace(last, mlp_norm=replace(last.mlp_norm, weight=last.mlp_norm.weight[:1]))))


def lopsided(held: PlainLayers) -> PlainLayers:
    """A norm of queries and none of keys."""
    first, last = held.rows
    return PlainLayers((first, replace(last, q_norm=torch.ones(16))))


def narrower(held: PlainLayers) -> PlainLayers:
    """One layer has fewer inner channels than the other."""
    return PlainLayers((held.rows[0], drawn(1, torch.float32, nodes=4, inner=40)[0].rows[1]))


def doubled(held: PlainLayers) -> PlainLayers:
    """A weight of another dtype."""
    first, last = held.rows
    return PlainLayers((first, replace(last, down=replace(last.down, weights=(last.down.weights[0].double(),)))))


@pytest.mark.parametrize("change", [broadcast, lopsided, narrower, doubled])
def test_layers_of_other_shapes_are_left_alone(native, change) -> None:
    held, places, *given = drawn(1, torch.float32, nodes=4)
    kept = places[0].k.clone()
    with torch.no_grad():
        assert native.stack(change(held), places, *given) is None
    assert torch.equal(places[0].k, kept)


def test_passes_that_do_not_fit_are_left_alone(native) -> None:
    """Many rows, gradients, caches and taps that lie otherwise, tables of another dtype, and a product that is quicker
    another way."""
    held, places, total, positions, taps, x = drawn(1, torch.float32, nodes=4)
    strided = [replace(place, k=place.k.transpose(3, 4).contiguous().transpose(3, 4)) for place in places]
    doubled = [replace(place, cos=place.cos.double(), sin=place.sin.double()) for place in places]
    far = {1: torch.zeros(4, 2, 64).transpose(0, 1)}
    assert native.stack(held, places, total, positions, taps, x) is None  # gradients are on
    with torch.no_grad():
        assert native.stack(held, places, total, positions, taps, x) is not None
        for others, tapped in ((strided, taps), (doubled, taps), (places, far)):
            assert native.stack(held, others, total, positions, tapped, x) is None
        assert native.stack(held, places, total.double(), positions, taps, x) is None
        assert native.stack(*drawn(1, torch.float32, nodes=13, rows=5)) is None
        assert native.stack(*drawn(1, torch.float32, nodes=13, rows=4, width=40)) is not None
        held.prepared = None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native.measured, "fastest", lambda rows, weight: torch.nn.functional.linear)
            patch.setattr("fastspec.kernels.linear.cpu.SMALL", 0)
            assert native.stack(held, places, total, positions, taps, x) is None


@pytest.mark.some("qwen2", "qwen3", "phi3", "smollm3")  # which differ from the others in more than sizes
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "phi3", "smollm3"])
def test_models_run_whole_and_say_the_same_layer_by_layer(family, monkeypatch) -> None:
    emitted = []
    for whole in (True, False):
        model = shallow_model(family)
        fastspec.patch(model, eagle3=tiny_head(model), backend="cpp")
        if not whole:
            monkeypatch.setattr(WholeLayers, "__call__", lambda *_, **__: None)
        for inputs in (prompts(9), prompts(4, 9)):
            for assistant in ("autoregressive", TREE):
                emitted.append(
                    model.generate(**inputs, max_new_tokens=20, do_sample=False, assistant=assistant).tolist()
                )
                assert ("stack" in fastspec.report(model).kernels) is whole
    assert emitted[:4] == emitted[4:]


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gpt_oss", "cohere", "granite"])
def test_layers_that_do_more_run_one_by_one(family) -> None:
    model = shallow_model(family)
    fastspec.patch(model, backend="cpp")
    model.generate(**prompts(9), max_new_tokens=4, do_sample=False, assistant="autoregressive")
    assert "stack" not in fastspec.report(model).kernels


def transposed(weight: torch.nn.Parameter) -> None:
    weight.data = weight.data.t()


def shortened(weight: torch.nn.Parameter) -> None:
    weight.data = weight.data[:1]


@pytest.mark.parametrize("change", [transposed, shortened])
def test_a_weight_that_lies_otherwise_at_its_address_is_noticed(native, change) -> None:
    held, places, *given = drawn(3, torch.float32, nodes=4)
    weight = torch.nn.Parameter(held.rows[1].out.weights[0], requires_grad=False)
    held = PlainLayers((held.rows[0], replace(held.rows[1], out=replace(held.rows[1].out, weights=(weight,)))))
    with torch.no_grad():
        assert native.stack(held, places, *given) is not None
        change(weight)
        assert native.stack(held, places, *given) is None


def test_inputs_of_another_width_are_left_alone(native) -> None:
    """Hidden states, and what a first layer without a norm reads; and an input that is missing, or not asked for."""
    held, places, total, positions, taps, x = drawn(1, torch.float32, nodes=4, given=True)
    normed = drawn(1, torch.float32, nodes=4)
    with torch.no_grad():
        assert native.stack(held, places, total, positions, taps, x) is not None
        for hidden, read in ((total[..., :40], x), (total, x[..., :64]), (total, x[:, :3]), (total, None)):
            assert native.stack(held, places, hidden.contiguous(), positions, {}, read) is None
        assert native.stack(*normed[:5], x) is None and native.stack(*normed) is not None


def test_caches_of_heads_of_another_size_are_left_alone(native) -> None:
    """One head of 32 channels where the other layer has two of 16: as many channels in all."""
    held, places, *given = drawn(1, torch.float32, nodes=4)
    k, v = (torch.zeros(2, 2, 1, 48, 32) for _ in "kv")
    with torch.no_grad():
        assert native.stack(held, [places[0], replace(places[1], k=k, v=v)], *given) is None


def test_every_layers_shapes_say_whether_the_kernel_is_the_quickest(native, monkeypatch) -> None:
    """The last of three layers has its weights side by side, and torch multiplies by such a weight more quickly."""
    first, last = (drawn(1, torch.float32, nodes=4, width=64, apart=apart) for apart in (True, False))
    held = PlainLayers((*first[0].rows, last[0].rows[1]))
    places = [*first[1], last[1][1]]
    wide = held.rows[2].qkv.weights[0].shape
    monkeypatch.setattr("fastspec.kernels.linear.cpu.SMALL", 0)
    with torch.no_grad():
        assert native.stack(held, places, *first[2:]) is not None
        held.prepared = None
        quickest = lambda rows, weight: torch.nn.functional.linear if weight.shape == wide else native.by_kernel  # noqa: E731
        monkeypatch.setattr(native.measured, "fastest", quickest)
        assert native.stack(held, places, *first[2:]) is None


def of_query(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight = torch.nn.Parameter(layer.self_attn.q_proj.weight.detach().flip(-1) * 1.1)


def of_output(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight = torch.nn.Parameter(layer.self_attn.o_proj.weight.detach().flip(-1) * 1.1)


def of_norm(model: Any) -> None:
    for layer in model.model.layers:
        layer.input_layernorm.weight = torch.nn.Parameter(layer.input_layernorm.weight.detach() * -1.5)


def assigned(model: Any) -> None:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["model.layers.1.mlp.down_proj.weight"] *= -1.5
    model.load_state_dict(state, assign=True)


@pytest.mark.each_value
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("change", [of_query, of_output, of_norm, assigned])
def test_parameters_that_are_replaced_are_read_by_an_open_batch(change, whole, monkeypatch) -> None:
    ids, options = (
        prompts(9)["input_ids"][0],
        {"max_new_tokens": 12, "do_sample": False, "eos_token_id": 1000, "pad_token_id": 0},
    )
    plain, model = shallow_model(), shallow_model()
    if not whole:
        monkeypatch.setattr(WholeLayers, "__call__", lambda *_, **__: None)
    monkeypatch.setenv("FASTSPEC_CPU", "auto")
    fastspec.patch(model)
    with fastspec.continuous(model, "autoregressive", rows=1) as batch:
        emitted = []
        for _ in range(2):
            want = plain.generate(ids[None], **options)[0].tolist()
            assert batch.submit(ids, **options).result()[0].tolist() == want
            emitted.append(want)
            change(plain), change(model)
    assert emitted[0] != emitted[1]
