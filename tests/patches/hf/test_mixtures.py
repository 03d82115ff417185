"""Mixtures of experts by the backend's op: what each family's own module gives, and the texts of patched models."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.generate import SHALLOW, free, prompts
from helpers.models import FAMILIES, tiny_head, tiny_model
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations import mxfp4
from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeTextConfig
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextSparseMoeBlock

import fastspec
from fastspec.generation.ops import Ops
from fastspec.kernels.linear import reference
from fastspec.patches import session
from fastspec.patches.backends import TORCH, triton_ops
from fastspec.patches.hf.families import ADAPTERS
from fastspec.patches.hf.layer_weights import experts_of, is_mixture, mixture_of
from fastspec.patches.hf.model import HFModel
from fastspec.patches.hf.modes import adapter_for

MIXTURES = {name: row.mixture for name, row in ADAPTERS.items() if row.mixture is not None}
CAUSAL = [name for name in MIXTURES if name != "qwen3_vl_moe_text"]
BY_REFERENCE = replace(TORCH, experts=reference.experts)
BACKENDS = {"reference": BY_REFERENCE, "kernels": replace(triton_ops(), captures=False)}
GEMMA4 = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 16,
    "layer_types": ["full_attention"] * 3,
    "head_dim": 16,
    "global_head_dim": 16,
    "num_global_key_value_heads": 2,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 97,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in CAUSAL},
    "qwen3_moe, normalised": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_next, not normalised": ("qwen3_next", {"norm_topk_prob": False}),
    "glm4_moe, a group, no norms": ("glm4_moe", {"n_group": 1, "use_qk_norm": False, "norm_topk_prob": False}),
    "gpt_oss, close limits": ("gpt_oss", {"swiglu_limit": 0.5}),
    "llama4_text, two experts": ("llama4_text", {"num_experts_per_tok": 2}),
}
"""(model_type, what its configuration has besides)"""


def stirred(kind: str, **over: Any) -> Any:
    """A tiny model whose biases and corrections, which start at zero, are drawn."""
    model = tiny_model(kind, **{**SHALLOW, **over})
    generator = torch.Generator().manual_seed(1)
    for name, held in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(("bias", "per_expert_scale")):
            held.data.copy_(torch.randn(held.shape, generator=generator) / 4)
    return model


def mixtures(model: Any) -> list[Any]:
    found = [getattr(layer, ADAPTERS[model.config.model_type].mlp) for layer in model.model.layers]
    return [mlp for mlp in found if hasattr(mlp, "experts")]


@pytest.mark.parametrize("way", BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_a_mixture_is_the_family_s_own(variant: str, way: str) -> None:
    kind, over = VARIANTS[variant]
    model = stirred(kind, **over)
    found, row = mixtures(model), MIXTURES[kind]
    assert found and row is not None and all(is_mixture(row, mlp) for mlp in found)
    x = torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(2))
    wanted = found[-1](x)
    got = mixture_of(row, found[-1], BACKENDS[way])(x)
    wanted = wanted[0].view_as(x) if isinstance(wanted, tuple) else wanted
    # Sums of up to 96 terms in another order, 1e-6 of the largest value; the least of biases shows at 1e-2.
    torch.testing.assert_close(got, wanted, rtol=0.0, atol=5e-6 * float(wanted.abs().max()))


@torch.no_grad()
def test_a_mixture_in_a_vision_language_model() -> None:
    config = Qwen3VLMoeTextConfig(hidden_size=64, moe_intermediate_size=48, num_experts=4, num_experts_per_tok=2)
    mlp, row = Qwen3VLMoeTextSparseMoeBlock(config), MIXTURES["qwen3_vl_moe_text"]
    generator = torch.Generator().manual_seed(2)
    for weight in mlp.parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    x = torch.randn(2, 7, 64, generator=generator)
    wanted = mlp(x)
    assert row is not None and is_mixture(row, mlp)
    torch.testing.assert_close(
        mixture_of(row, mlp, BY_REFERENCE)(x), wanted, rtol=0.0, atol=5e-6 * float(wanted.abs().max())
    )


@torch.no_grad()
def test_experts_beside_a_dense_feed_forward() -> None:
    """Gemma 4's, with GELU."""
    layer = tiny_model("gemma4_text", **SHALLOW, **GEMMA4).model.layers[0]
    generator = torch.Generator().manual_seed(2)
    x, chosen, shares = (
        torch.randn(7, 64, generator=generator),
        torch.tensor([[0, 3]] * 7),
        torch.rand(7, 2, generator=generator),
    )
    wanted = layer.experts(x, chosen, shares)
    for ops in BACKENDS.values():
        got = experts_of(layer.experts, ops)
        assert got is not layer.experts
        torch.testing.assert_close(got(x, chosen, shares), wanted, rtol=0.0, atol=5e-6 * float(wanted.abs().max()))
    assert experts_of(layer.experts, TORCH) is layer.experts


def by(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let patched models run by these ops; returns a list that grows with every call of the experts."""
    calls: list[str] = []

    def counting(*args: Any, **options: Any) -> Tensor:
        calls.append("experts")
        assert ops.experts is not None
        return ops.experts(*args, **options)

    monkeypatch.setattr(session, "choose_backend", lambda *_, **__: replace(ops, experts=counting))
    return calls


def all_assistants(model: Any) -> tuple[Any, ...]:
    fastspec.patch(model, speculative=tiny_model(num_hidden_layers=2), eagle3=tiny_head(model))
    tree = fastspec.Eagle3(depth=4, top_k=4, total_tokens=16)
    return (
        "autoregressive",
        "nasd",
        fastspec.Speculative(gamma=3, branches=3),
        tree,
        fastspec.ContinuousBatch("nasd", rows=1),
    )


WHOLE = "mixtral", "gpt_oss", "qwen3_next", "gemma4_text"
"""Plain experts, experts with biases and limits, a shared one, and experts beside a dense feed-forward."""


@pytest.mark.some(
    "True",
    "qwen3_moe, normalised",
    "qwen3_next, not normalised",
    "glm4_moe, a group, no norms",
    "gpt_oss, close limits",
    "llama4_text, two experts",
)  # the families with their own settings decode in test_families.py
@pytest.mark.parametrize(
    ("variant", "every"),
    [
        *((variant, variant in WHOLE) for variant in (*VARIANTS, "gemma4_text")),
        *(pytest.param(kind, True, marks=pytest.mark.slow) for kind in CAUSAL if kind not in WHOLE),
    ],
)
def test_every_assistant_gives_the_same_tokens(variant: str, every: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32, of rows of different lengths, with the op's reference; `every` assistant, or rounds of one node and of a
    tree."""
    kind, over = VARIANTS.get(variant, ("gemma4_text", GEMMA4))
    model, inputs = stirred(kind, **over), prompts(5, 11)
    expected = free(model, inputs)
    calls = by(BY_REFERENCE, monkeypatch)
    chain, *between, tree, last = all_assistants(model)
    for assistant in (chain, *between, tree, last) if every else (chain, tree):
        calls.clear()
        assert free(model, inputs, assistant=assistant) == expected, assistant
        assert calls
    assert fastspec.report(model).mode == f"adapter {kind}"


@pytest.mark.parametrize("kind", ["gpt_oss", "llama4_text"])
def test_weights_with_their_outputs_side_by_side_are_turned_and_turned_back(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a backend that packs: a kernel reads an output's inputs as a line."""
    model, inputs, lines = stirred(kind), prompts(5, 11), set()
    expected = free(model, inputs)
    before = {name: (weight.clone(), weight.stride()) for name, weight in model.named_parameters()}

    def spy(x: Tensor, gate_up: Tensor, down: Tensor, *args: Any, **options: Any) -> Tensor:
        lines.add((gate_up.is_contiguous(), down.is_contiguous()))
        return reference.experts(x, gate_up, down, *args, **options)

    monkeypatch.setattr(session, "choose_backend", lambda *_, **__: replace(TORCH, experts=spy, packs=True))
    for assistant in all_assistants(model):
        assert free(model, inputs, assistant=assistant) == expected, assistant
    assert lines == {(True, True)}
    held = mixtures(model)[0].experts
    assert held.gate_up_proj.shape == (4, 64, 2 * held.intermediate_size) and not held.gate_up_proj.is_contiguous()
    assert free(model, inputs) == expected == free(copy.deepcopy(model), inputs)
    model.save_pretrained(tmp_path)
    assert free(AutoModelForCausalLM.from_pretrained(tmp_path), inputs) == expected
    fastspec.unpatch(model)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, before[name][0]) and weight.stride() == before[name][1], name


def test_a_backend_without_experts_turns_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = stirred("gpt_oss")
    monkeypatch.setattr(session, "choose_backend", lambda *_, **__: replace(TORCH, packs=True))
    with fastspec.patched(model):
        assert all(weight.is_contiguous() for mlp in mixtures(model) for weight in mlp.parameters())


def test_all_families_but_these_have_their_experts_run_by_the_op() -> None:
    sparse = {
        kind
        for kind in FAMILIES
        for layer in tiny_model(kind, **SHALLOW).model.layers
        if hasattr(getattr(layer, ADAPTERS[kind].mlp), "experts")
    }
    own = {kind for kind in sparse if ADAPTERS[kind].mixture is None}
    assert own == {"aria_text", "ernie4_5_moe", "granitemoe", "minimax_m2"} and sparse - own == {*CAUSAL}


class Doubled(nn.Module):
    """Someone else's activation."""

    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * x


def _adapted(mlp: Any) -> None:
    mlp.shared_expert.up_proj.register_forward_hook(lambda module, args, out: out)


def _of_two_dtypes(mlp: Any) -> None:
    mlp.experts.down_proj.data = mlp.experts.down_proj.data.half()


def _in_bytes(mlp: Any) -> None:
    del mlp.experts.gate_up_proj
    mlp.experts.gate_up_proj = nn.Parameter(torch.zeros(4, 96, 32, dtype=torch.uint8), requires_grad=False)


def _activated(mlp: Any) -> None:
    mlp.experts.act_fn = Doubled()


@pytest.mark.parametrize("change", [_adapted, _of_two_dtypes, _in_bytes, _activated])
def test_what_is_no_plain_mixture_runs_its_own_module(change: Any) -> None:
    mlp = tiny_model("qwen2_moe", **SHALLOW).model.layers[0].mlp
    row = MIXTURES["qwen2_moe"]
    assert row is not None and is_mixture(row, mlp)
    change(mlp)
    assert not is_mixture(row, mlp)


@pytest.mark.parametrize("kind", [name for name in CAUSAL if MIXTURES[name].wide])
@torch.no_grad()
def test_a_wide_router_may_be_kept_in_fp32(kind: str) -> None:
    """As transformers loads it since 5.24, beside experts in bf16."""
    mlp, row = mixtures(stirred(kind).bfloat16())[-1], MIXTURES[kind]
    mlp.gate.weight.data = mlp.gate.weight.data.float()
    assert row is not None and is_mixture(row, mlp) and not is_mixture(replace(row, wide=False), mlp)
    x = torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(2), dtype=torch.bfloat16)
    wanted = mlp(x)
    # Each of three products is rounded to bf16, 2**-9 of its values, and so are their sums; another expert shows at
    # 1e-1.
    torch.testing.assert_close(
        mixture_of(row, mlp, BY_REFERENCE)(x), wanted, rtol=0.0, atol=2**-6 * float(wanted.abs().max())
    )


@pytest.mark.parametrize(
    "kind, dtype", [("gpt_oss", torch.float32), ("qwen2_moe", torch.float16), ("gemma4_text", torch.float32)]
)
def test_experts_that_ask_the_host_are_not_captured(kind: str, dtype: torch.dtype) -> None:
    """Transformers' own modules multiply on the device in bf16 alone; by the op all do."""

    def captures(**over: Any) -> bool:
        ops = replace(TORCH, captures=True, packs=True, **over)
        return HFModel(model, adapter_for(model), rows=1, capacity=8, tail=1, taps=None, ops=ops).captures

    model = tiny_model(kind, **SHALLOW, **(GEMMA4 if kind == "gemma4_text" else {})).to(dtype)
    assert captures(experts=reference.experts) and not captures()
    for layer in model.model.layers:
        held = layer.experts if kind == "gemma4_text" else layer.mlp.experts
        held.scales = nn.Parameter(torch.ones(1, dtype=dtype))
    assert not captures(experts=reference.experts)
    model.config._experts_implementation = "batched_mm"
    assert captures(experts=reference.experts) and captures()


def test_packed_experts_of_gpt_oss_run_their_own_module_and_are_not_captured() -> None:
    """Transformers' MXFP4 keeps bytes, and kernels of its own read them."""
    model = tiny_model("gpt_oss", **SHALLOW)
    for layer in model.model.layers:
        held = mxfp4.Mxfp4GptOssExperts(model.config)
        if hasattr(mxfp4, "Mxfp4GptOssMLP"):
            layer.mlp = mxfp4.Mxfp4GptOssMLP(layer.mlp.router, held)
        else:
            layer.mlp.experts = held
    row = MIXTURES["gpt_oss"]
    assert row is not None and not any(is_mixture(row, mlp) for mlp in mixtures(model))
    model = model.to(torch.bfloat16)
    ops = replace(BY_REFERENCE, captures=True, packs=True)
    assert not HFModel(model, adapter_for(model), rows=1, capacity=8, tail=1, taps=None, ops=ops).captures


def test_a_packed_checkpoint_that_is_loaded_dequantised_runs_by_the_op(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers loads gpt-oss on the CPU, and anywhere with `Mxfp4Config(dequantize=True)`."""
    model = stirred("gpt_oss")
    generator = torch.Generator().manual_seed(4)
    weights = {
        name: weight for name, weight in model.state_dict().items() if not name.endswith(("gate_up_proj", "down_proj"))
    }
    for index, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            rows, depth = getattr(layer.mlp.experts, name).transpose(1, 2).shape[1:]
            place = f"model.layers.{index}.mlp.experts.{name}"
            weights[f"{place}_blocks"] = torch.randint(
                256, (4, rows, depth // 32, 16), dtype=torch.uint8, generator=generator
            )
            weights[f"{place}_scales"] = torch.full((4, rows, depth // 32), 124, dtype=torch.uint8)  # of 2**-3
    save_file(
        {name: weight.contiguous() for name, weight in weights.items()},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    model.config.quantization_config = {"quant_method": "mxfp4"}
    model.config.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True)
    )
    loaded = loaded.float()  # transformers 5.17 gives experts in bf16, whatever is asked for
    row, inputs = MIXTURES["gpt_oss"], prompts(5, 11)
    assert row is not None and all(is_mixture(row, mlp) for mlp in mixtures(loaded))
    assert loaded.model.layers[0].mlp.experts.down_proj.unique().numel() == 15  # what four bits say, of one scale
    expected = free(loaded, inputs)
    calls = by(BY_REFERENCE, monkeypatch)
    with fastspec.patched(loaded):
        assert free(loaded, inputs, assistant="nasd") == expected and calls
        assert fastspec.report(loaded).mode == "adapter gpt_oss"
