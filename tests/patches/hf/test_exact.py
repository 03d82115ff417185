"""`patch(exact=True)` refuses by name what has no kernels that sum in a fixed order: parts of layers, on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.devices import INTERPRETED
from helpers.generate import SHALLOW, TREE, prompts
from helpers.gptq import packed_layers
from helpers.kernels import add_in_order
from helpers.models import FAMILIES, tiny_head, tiny_model
from transformers.integrations.finegrained_fp8 import FP8Linear

import fastspec
from fastspec.devices import STORED
from fastspec.errors import Unsupported
from fastspec.kernels.linear.reference import experts
from fastspec.patches import session
from fastspec.patches.backends import TORCH
from fastspec.patches.hf import exact
from fastspec.patches.hf.exact import Defaults, refuse_device, refuse_parts
from fastspec.patches.hf.families import ADAPTERS
from fastspec.patches.hf.model import HFModel
from fastspec.patches.hf.modes import adapter_for, mode_for

WITH_EXPERTS = replace(TORCH, experts=experts)
OTHER_ATTENTION = {"qwen3_5_moe_text", "qwen3_next", "olmoe", "flex_olmo"}
MIXTURES = [kind for kind in FAMILIES if ADAPTERS[kind].mixture is not None and kind not in OTHER_ATTENTION]


def target_of(model: Any, ops: Any = TORCH) -> HFModel:
    return HFModel(model, adapter_for(model), rows=1, capacity=8, tail=1, taps=None, ops=ops)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
def test_plain_layers_are_taken(kind: str) -> None:
    model = tiny_model(kind, **SHALLOW)
    refuse_parts(target_of(model))


@pytest.mark.parametrize("kind", MIXTURES)
def test_mixtures_by_the_backends_op_are_taken(kind: str) -> None:
    model = tiny_model(kind, **SHALLOW)
    refuse_parts(target_of(model, WITH_EXPERTS))


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("gemma4_text", "more than attention and a feed-forward"),
        ("mixtral", "a feed-forward that runs by a module of its own"),
        ("qwen3_next", "GatedDelta, which sums over a tree otherwise"),
        ("cohere", "norms of its own"),
        ("olmo2", "projections of attention that are no plain"),
    ],
)
def test_other_parts_of_a_layer_are_refused_by_name(kind: str, what: str) -> None:
    model = tiny_model(kind, **SHALLOW)
    with pytest.raises(Unsupported, match=f"layer 0 of {type(model).__name__} has {what}"):
        refuse_parts(target_of(model))


@pytest.mark.parametrize("part", ["LM head", "last norm"])
def test_ends_of_their_own_are_refused_by_name(part: str) -> None:
    """Whatever multiplies the last states chooses by how many there are."""
    model = tiny_model("llama", **SHALLOW)
    if part == "LM head":
        model.lm_head = torch.nn.Sequential(model.lm_head)
    else:
        model.model.norm = torch.nn.Sequential(model.model.norm)
    with pytest.raises(Unsupported, match=f"exact=True: LlamaForCausalLM has an? {part}"):
        refuse_parts(target_of(model))


def test_experts_of_odd_sizes_are_refused_by_name() -> None:
    model = tiny_model("mixtral", **SHALLOW, intermediate_size=36)
    with pytest.raises(Unsupported, match=r"layer 0 of MixtralForCausalLM has experts of \d+ and 36 channels"):
        refuse_parts(target_of(model, WITH_EXPERTS))


def test_other_kernels_and_dtypes_are_refused_by_name() -> None:
    kernels = replace(TORCH, name="triton")
    for dtype in (torch.bfloat16, torch.float16):
        refuse_device(kernels, dtype)
    with pytest.raises(Unsupported, match=r"this model is in torch\.float32"):
        refuse_device(kernels, torch.float32)
    with pytest.raises(Unsupported, match="runs on 'torch'"):
        refuse_device(TORCH, torch.bfloat16)


@pytest.mark.slow
@INTERPRETED
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "glm4_moe"])
def test_a_tree_scores_by_the_bits_of_one_token_at_a_time(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, whose products are made to add up in order: of one row, and beside another."""
    add_in_order(monkeypatch)
    model = tiny_model(kind, num_hidden_layers=2 if kind == "glm4_moe" else 1).half()  # GLM's first layer is dense
    options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    with fastspec.patched(model, backend="triton", exact=True, eagle3=tiny_head(model).half()):
        alone = model.generate(**prompts(5), **options, assistant="autoregressive")
        for inputs, assistant in ((prompts(5), TREE), (prompts(5, 5), "autoregressive")):
            made = model.generate(**inputs, **options, assistant=assistant)
            assert made.sequences[0].equal(alone.sequences[0])
            assert all(a[0].equal(b[0]) for a, b in zip(made.logits, alone.logits, strict=True))


KERNELS = replace(TORCH, name="triton", stored_linears=None)


def why_not(choice: Defaults, model: Any, ops: Any) -> str | None:
    return choice.why_inexact(model, choice.look(model), ops)


def half(kind: str) -> Any:
    return tiny_model(kind, **SHALLOW).to(torch.bfloat16)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "device_name", lambda device: STORED)
    monkeypatch.setattr(exact, "is_timed", lambda device: True)


def test_narrow_models_and_devices_without_figures_are_not_held_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    model, choice = half("llama"), Defaults()
    assert "was not measured on" in str(why_not(choice, model, KERNELS))
    monkeypatch.setattr(exact, "device_name", lambda device: STORED)
    width = model.config.hidden_size
    assert f"layers of {width} channels, under {exact.WIDE}" in str(why_not(choice, model, KERNELS))
    assert "this model runs on 'torch'" in str(why_not(choice, model, TORCH))
    stored = replace(KERNELS, stored_linears=TORCH.stored_linears)
    monkeypatch.setattr(exact, "WIDE", width)
    assert why_not(choice, model, stored) is None is why_not(choice, model, KERNELS)
    model = packed_layers(model)
    assert "prompts of weights multiplied as they are stored" in str(why_not(choice, model, stored))
    assert "projections of attention that" in str(why_not(choice, model, KERNELS))


@pytest.mark.usefixtures("measured")
def test_weights_are_read_as_stored_by_themselves_where_no_activation_is_rounded() -> None:
    """A model in 16 bits with quantised weights, as it is by then."""
    model, choice = half("llama"), Defaults()

    def reads(ops: Any = KERNELS) -> bool:
        return choice.reads_stored(model, choice.look(model), ops)

    assert not reads()
    packed_layers(model)
    assert reads() and not reads(TORCH)
    layer = model.model.layers[0].mlp
    plain = layer.up_proj
    layer.up_proj = FP8Linear(plain.in_features, plain.out_features)
    assert not reads()
    layer.up_proj = plain
    assert reads() and not (model.float() and reads())


@pytest.mark.usefixtures("measured")
def test_what_a_model_has_become_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    model, choice = half("llama"), Defaults()
    monkeypatch.setattr(exact, "WIDE", model.config.hidden_size)
    assert why_not(choice, model, KERNELS) is None
    layer = model.model.layers[0].self_attn
    plain = layer.q_proj
    layer.q_proj = torch.nn.Sequential(plain)
    told = why_not(choice, model, KERNELS)
    assert told is not None and told.startswith("layer 0 of LlamaForCausalLM has projections")
    layer.q_proj = plain
    assert why_not(choice, model, KERNELS) is None
    mixture = half("mixtral")
    assert "a feed-forward that runs by" in str(why_not(Defaults(), mixture, KERNELS))
    by_op = replace(KERNELS, experts=experts)
    assert (
        why_not(Defaults(), mixture, by_op)
        == f"its cost was measured of one row of a mixture of experts alone: {exact.ASK}"
    )
    assert why_not(choice, model.float(), KERNELS) == (
        "sums of a fixed order are for bfloat16 and float16, and this model is in torch.float32"
    )


@pytest.mark.usefixtures("measured")
def test_a_patch_says_what_it_came_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the report, and by the kernels that a session gives: none, True and False."""
    model = half("llama")
    told = {}
    for asked in (None, False):
        with fastspec.patched(model, exact=asked):
            told[asked] = fastspec.report(model).why_inexact
    assert "this model runs on" in told[None] and told[False] == "patch(model, exact=False) asked for the fast kernels"
    monkeypatch.setattr(exact, "WIDE", model.config.hidden_size)
    monkeypatch.setattr(session, "choose_backend", lambda *given, **options: KERNELS)
    monkeypatch.setattr(session, "exact_ops", lambda: replace(KERNELS, exact=True))
    monkeypatch.setattr(session, "self_check", lambda *given: None)
    monkeypatch.setattr(session, "use_tuned", lambda device: None)
    for asked, held in ((None, True), (False, False), (True, True)):
        with fastspec.patched(model, exact=asked):
            state = session.session_of(model)
            assert state is not None
            ops = state.ops(model, mode_for(model))
            assert ops.exact == held == fastspec.report(model).exact
            assert (ops.drafts is not None and not ops.drafts.exact) == held
