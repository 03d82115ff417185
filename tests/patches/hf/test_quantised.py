"""Quantised modules that `patch(model, stored=True)` multiplies as stored: those that transformers itself defines.
tests/clients has the libraries'."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.captured import stand_in
from helpers.generate import prompts
from helpers.models import tiny_head, tiny_model
from helpers.patch import assert_same, snapshot
from helpers.stored import float8, grouped8, packed, rows8
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.integrations import nvfp4
from transformers.integrations.compressed_tensors import CompressedTensorsFP8Linear
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear
from transformers.integrations.gemma_quant import QuantizedLinear
from transformers.integrations.gguf.utils import GgufLinear
from transformers.integrations.mxfp4 import Mxfp4GptOssExperts

import fastspec
from fastspec.errors import Unsupported
from fastspec.kernels.quantised.reference import E4M3, INT8, StoredWeight, dequantised
from fastspec.patches import session
from fastspec.patches.backends import TORCH
from fastspec.patches.hf.compat import dtype_of
from fastspec.patches.hf.exact import refuse_parts
from fastspec.patches.hf.layers import product_of
from fastspec.patches.hf.model import HFModel
from fastspec.patches.hf.modes import adapter_for
from fastspec.patches.hf.quantised import UNPACKED, read
from fastspec.patches.session import session_of

OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": 1000}
SMALL = fastspec.Eagle3(depth=2, top_k=2, total_tokens=6)


def by_blocks(layer: nn.Linear, size: int | None) -> nn.Module:
    """The layer in FP8 with a scale for each block, or for all."""
    block = None if size is None else (size, size)
    made = FP8Linear(layer.in_features, layer.out_features, block_size=block, has_bias=layer.bias is not None)
    made.weight.data = (layer.weight.data * 50).to(torch.float8_e4m3fn)
    made.weight_scale_inv.data = (torch.rand(made.weight_scale_inv.shape) + 0.5) / 50
    made.bias = layer.bias
    return made


def by_powers(layer: nn.Linear) -> nn.Module:
    """The layer in FP8 by blocks of 16, whose scales are powers of 2 (ue8m0)."""
    made = by_blocks(layer, 16)
    made.weight_scale_inv = nn.Parameter(made.weight_scale_inv.data.to(torch.float8_e8m0fnu), requires_grad=False)
    return made


def by_lines(layer: nn.Linear) -> nn.Module:
    """The layer in FP8 with a scale for each line."""
    made = CompressedTensorsFP8Linear(layer.in_features, layer.out_features, has_bias=layer.bias is not None)
    made.weight.data = (layer.weight.data * 50).to(torch.float8_e4m3fn)
    made.weight_scale.data = (torch.rand(1, layer.out_features) + 0.5) / 50
    made.bias = layer.bias
    return made


def test_scales_are_not_the_dtype_of_the_layers():
    """Layers of codes in bytes compute in the embedding's dtype, whatever their scales are in."""
    model, _ = pair(lambda layer: by_blocks(layer, 16))
    assert dtype_of(model.bfloat16()) == torch.bfloat16
    for module in model.modules():
        if isinstance(module, FP8Linear):
            module.weight_scale_inv.data = module.weight_scale_inv.data.float()
    assert dtype_of(model) == torch.bfloat16


def pair(make: Any, only: str = "", **over: Any) -> tuple[Any, Any]:
    """A tiny model with its projections, or those of a name, quantised, and the same model dequantised."""
    torch.manual_seed(0)
    model = tiny_model(**over)
    dense = copy.deepcopy(model)
    for name, layer in list(model.model.layers.named_modules()):
        if isinstance(layer, nn.Linear) and only in name:
            made = make(layer)
            model.model.layers.set_submodule(name, made)
            weight = read(made)
            assert not isinstance(weight, str), weight
            dense.model.layers.get_submodule(name).weight.data = dequantised(weight, torch.float32)
    return model.eval(), dense.eval()


@pytest.mark.parametrize("make", [lambda x: by_blocks(x, 16), lambda x: by_blocks(x, None), by_powers, by_lines])
def test_assisted_calls_say_what_the_dequantised_model_says(make):
    """Modules that run nowhere here by themselves: their own forward needs a GPU. Attention has biases."""
    model, dense = pair(make, model_type="qwen2", num_hidden_layers=2)
    head, before = tiny_head(dense), snapshot(model)
    fastspec.patch(model, eagle3=head, stored=True)
    inputs = prompts(3, 7)
    expected = dense.generate(**inputs, **OPTIONS)
    for assistant in ("autoregressive", SMALL):
        assert torch.equal(model.generate(**inputs, **OPTIONS, assistant=assistant), expected)
    report = fastspec.report(model)
    assert report.kernels["stored_linears"] and not report.own_forward
    assert sum(report.stored.values()) == 7 * model.config.num_hidden_layers
    assert "weights multiplied as stored: " in str(report)
    fastspec.unpatch(model)
    assert_same(before, snapshot(model))


@pytest.mark.parametrize("kind", ["phi3", "glm"])
@pytest.mark.parametrize("size", [16, None, 24], ids=["blocks", "one scale", "a block of both"])
def test_a_gate_and_what_it_opens_may_be_one_weight(kind, size):
    """Halves of it, or, where they share a scale and under an adapter, its product."""
    model, dense = pair(lambda layer: by_blocks(layer, size), model_type=kind, num_hidden_layers=2)
    inputs = prompts(3, 7)
    for change in (lambda held: held, with_adapters):
        model, dense = map(change, (model, dense))
        with fastspec.patched(model, eagle3=tiny_head(dense), stored=True):
            expected = dense.generate(**inputs, **OPTIONS)
            for assistant in ("autoregressive", SMALL):
                assert torch.equal(model.generate(**inputs, **OPTIONS, assistant=assistant), expected)
            report = fastspec.report(model)
        assert not report.own_forward and report.stored["fine-grained FP8"] >= 4 * model.config.num_hidden_layers


def with_adapters(model: Any) -> Any:
    """The model with an adapter on the first layer's gate and what it opens."""
    torch.manual_seed(1)
    mlp = model.model.layers[0].mlp
    mlp.gate_up_proj = LoraLinear(mlp.gate_up_proj)
    return model.requires_grad_(False)


@pytest.mark.parametrize("only", ["up_proj", "down_proj", "k_proj", "mlp"])
def test_some_modules_are_quantised(only):
    model, dense = pair(by_lines, only, num_hidden_layers=2)
    fastspec.patch(model, stored=True)
    found = model.generate(**prompts(5), **OPTIONS, assistant="nasd")
    assert torch.equal(found, dense.generate(**prompts(5), **OPTIONS))


def test_the_triton_kernel_says_it_too():
    """In the interpreter, on a model of two layers."""
    model, dense = pair(lambda x: by_blocks(x, 16), num_hidden_layers=2)
    inputs, options, tree = (
        prompts(4),
        OPTIONS | {"max_new_tokens": 2},
        fastspec.Eagle3(depth=1, top_k=2, total_tokens=3),
    )
    with fastspec.patched(model, eagle3=tiny_head(dense), backend="triton", stored=True):
        found = model.generate(**inputs, **options, assistant=tree)
        assert fastspec.report(model).kernels["stored_linears"]
    assert torch.equal(found, dense.generate(**inputs, **options))


def test_an_open_batch_multiplies_them_too():
    model, dense = pair(by_lines, num_hidden_layers=2)
    fastspec.patch(model, stored=True)
    with fastspec.continuous(model, "nasd", rows=2) as batch:
        found = [batch.submit(prompts(length)["input_ids"], **OPTIONS) for length in (4, 7)]
        answers = [each.result() for each in found]
    for length, answer in zip((4, 7), answers, strict=True):
        assert torch.equal(answer, dense.generate(**prompts(length), **OPTIONS))


SHARED_KEYS = {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}


@pytest.mark.parametrize(
    ("kind", "over"),
    [("llama", {}), ("gemma4_text", SHARED_KEYS), ("qwen3_5_text", {})],
    ids=lambda given: str(given)[:9],
)
def test_every_pass_multiplies_a_weight_beside_the_same_others(kind, over, monkeypatch):
    """Prompts, tokens, trees, several rows, an early exit, an open batch and a text that is scored: of weights beside
    each other a kernel takes the fewest parts of any, so that a weight alone could have other bits."""
    model, dense = pair(by_lines, model_type=kind, num_hidden_layers=4, **over)
    joined: dict[int, set[tuple[int, ...]]] = {}

    def recorded(x, weights, biases, kind=None):
        together = tuple(weight.codes.data_ptr() for weight in weights)
        for each in together:
            joined.setdefault(each, set()).add(together)
        return TORCH.stored_linears(x, weights, biases, kind)

    kernels = replace(TORCH, stored_linears=recorded)
    monkeypatch.setattr(session, "choose_backend", lambda *given, **options: kernels)
    fastspec.patch(model, eagle3=tiny_head(dense), stored=True)
    recurrent = kind == "qwen3_5_text"
    for inputs, assistant in (
        (prompts(40), "autoregressive"),
        (prompts(3, 7), SMALL),
        (prompts(5), "nasd"),
        *(() if recurrent else ((prompts(5), fastspec.Speculative(early_exit=2)),)),
    ):
        model.generate(**inputs, **OPTIONS, assistant=assistant)
    with fastspec.continuous(model, "nasd", rows=2) as batch:
        for each in [batch.submit(prompts(length)["input_ids"], **OPTIONS) for length in (4, 7)]:
            each.result()
    if not recurrent:
        fastspec.log_probs(model, **prompts(6))
    assert joined and all(len(ways) == 1 for ways in joined.values())


def test_a_weight_that_is_replaced_is_read_anew():
    model, dense = pair(by_lines, num_hidden_layers=2)
    fastspec.patch(model, stored=True)
    model.generate(**prompts(5), **OPTIONS, assistant="nasd")
    for each, name in ((model, "weight_scale"), (dense, "weight")):
        layer = each.model.layers[0].mlp.down_proj
        setattr(layer, name, nn.Parameter(-getattr(layer, name).data, requires_grad=False))
    found = model.generate(**prompts(5), **OPTIONS, assistant="nasd")
    assert torch.equal(found, dense.generate(**prompts(5), **OPTIONS))


@pytest.mark.parametrize("captures", [False, True], ids=["uncaptured", "captured"])
@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("stored", [True, False])
def test_heads_read_a_borrowed_lm_head_as_the_target_does(stored, bits, captures, monkeypatch):
    """As stored, and never by its own forward, or by this alone, though the ops of a head in 8 bits would take it."""
    torch.manual_seed(0)
    model = tiny_model(num_hidden_layers=2, tie_word_embeddings=False)
    dense, model.lm_head = copy.deepcopy(model), by_lines(model.lm_head).eval()
    dense.lm_head.weight.data = dequantised(read(model.lm_head), torch.float32)
    run, multiplied = [], set()

    def forward(self: Any, x: Tensor) -> Tensor:
        run.append(self)
        return nn.functional.linear(x, dequantised(read(self), x.dtype))

    def recorded(x: Tensor, weights: Any, *others: Any) -> Tensor:
        multiplied.update(weight.codes.data_ptr() for weight in weights)
        return TORCH.stored_linears(x, weights, *others)

    monkeypatch.setattr(CompressedTensorsFP8Linear, "forward", forward)
    stand_in(monkeypatch, captures=captures, stored_linears=recorded)
    head = tiny_head(dense, kind="eagle", taps=(), own_lm_head=False)
    inputs, before = prompts(3, 7), snapshot(model)
    expected = dense.generate(**inputs, **OPTIONS)
    fastspec.patch(model, eagle=head, eagle2=head, backend="torch", stored=stored, head_bits=bits)
    for assistant in ("eagle", fastspec.Eagle2(depth=2, top_k=2, total_tokens=6)) * (3 if captures else 1):
        assert torch.equal(model.generate(**inputs, **OPTIONS, assistant=assistant), expected)
    assert bool(run) is not stored
    assert (model.lm_head.weight.data_ptr() in multiplied) is stored
    fastspec.unpatch(model)
    packed = {"storage": before["storage"]} if captures else {}  # plain weights lie together there
    assert_same(before, snapshot(model) | packed)


@torch.no_grad()
def test_a_head_with_a_matrix_takes_rows_of_a_packed_lm_head():
    """As they are now."""
    torch.manual_seed(0)
    model = tiny_model(num_hidden_layers=2, tie_word_embeddings=False)
    model.lm_head = by_lines(model.lm_head).eval()
    head = tiny_head(model, own_lm_head=False, target_rows=True, draft_vocab_size=40)
    fastspec.patch(model, eagle3=head, stored=True, backend="torch")
    for change in (1.0, -2.0):
        model.lm_head.weight_scale.data *= change
        plain, drafted = (model.generate(**prompts(5), **OPTIONS, assistant=each) for each in ("autoregressive", SMALL))
        assert torch.equal(plain, drafted)
        held = session_of(model).resources["eagle3"]
        rows = dequantised(read(model.lm_head), torch.float32)[:40]
        torch.testing.assert_close(held.readout().weight, rows @ head.lm_head_map.weight)


def test_why_a_module_runs_by_its_own_forward():
    """Without the switch all of them; with it a hooked one, one whose forward is replaced, and other tensors."""
    model, _ = pair(lambda x: by_blocks(x, 16), num_hidden_layers=2)
    with fastspec.patched(model):
        why = "fine-grained FP8: it rounds activations too, and patch(model, stored=True) was not asked for"
        assert fastspec.report(model).own_forward == {why: 7 * model.config.num_hidden_layers}
    mlp = model.model.layers[0].mlp
    mlp.gate_proj.register_forward_hook(lambda *args: None)
    mlp.up_proj.forward = mlp.up_proj.forward
    mlp.down_proj.weight_scale_inv.data = torch.ones(7, 7)
    with fastspec.patched(model, stored=True):
        told = fastspec.report(model).own_forward
    assert {why.partition(": ")[2].partition(" ")[2] for why in told} == {
        "hook is on it",
        "forward is replaced",
        "scales are not one for each block of 16 x 16",
    }


class Int8Tensor(SimpleNamespace):
    """torchao's weight of whole numbers, as far as it is read."""


class QuantizationScheme(SimpleNamespace):
    """compressed-tensors' own, as far as it is read."""


Int8Tensor.__module__, QuantizationScheme.__module__ = "torchao.quantization", "compressed_tensors.quantization"


def by_torchao(weight: StoredWeight) -> Any:
    """A module with a weight as torchao holds it."""
    made = nn.Module()
    codes = weight.codes.view({INT8: torch.int8, E4M3: torch.float8_e4m3fn}[weight.kind])
    held = Int8Tensor(qdata=codes, scale=weight.scales, block_size=list(weight.block), dtype=weight.dtype)
    held.zero_point = weight.zeros
    made._parameters["weight"] = held  # type: ignore[assignment]
    return made


def by_compressed_tensors(weight: StoredWeight) -> Any:
    """A module that compressed-tensors has loaded, and not unpacked yet."""
    made = nn.Module()
    made.out_features, made.in_features = weight.shape
    strategy = "channel" if weight.block == (1, made.in_features) else "group"
    made.quantization_scheme = QuantizationScheme(
        weights=SimpleNamespace(
            strategy=strategy,
            num_bits=weight.kind.bits,
            type="int",
            symmetric=weight.zeros is None,
            group_size=weight.block[1],
            block_structure=None,
        )
    )
    held = {"weight_packed": weight.codes.view(torch.int32), "weight_scale": weight.scales}
    for name, value in {**held, "weight_zero_point": weight.zeros, "weight_g_idx": weight.groups}.items():
        if value is not None:
            made.register_parameter(name, nn.Parameter(value, requires_grad=False))
    return made


@pytest.mark.parametrize(
    ("make", "written"),
    [
        (by_torchao, lambda: rows8(5, 8, torch.float32)),
        (by_torchao, lambda: grouped8(4, 6, 8, torch.float32)),
        (by_torchao, lambda: float8((4, 4), 8, 12, torch.float32)),
        (by_compressed_tensors, lambda: packed(4, None, 5, 16, torch.float32)),
        (by_compressed_tensors, lambda: packed(4, 8, 16, 16, torch.float32, zeros=True)),
        (by_compressed_tensors, lambda: packed(8, 8, 5, 16, torch.float32, ordered=True)),
    ],
    ids=["a line", "groups", "blocks", "packed lines", "packed groups", "ordered groups"],
)
def test_tensors_of_libraries_are_read_as_they_hold_them(make: Any, written: Any) -> None:
    weight, dense = written()
    found = read(make(weight))
    assert not isinstance(found, str), found
    assert torch.equal(dequantised(found, torch.float32), dense)


OTHER_TENSORS = (
    "its format has other tensors than codes, scales and zero points: compressed-tensors of 8 and 4 bits, GPTQ and AWQ "
    "are"
)


def test_tensors_that_do_not_fit_are_named() -> None:
    weight, _ = rows8(5, 8, torch.float32)
    assert read(by_torchao(replace(weight, scales=weight.scales[:4]))) == "4 scales are not one for each block of 1 x 8"
    whole, _ = packed(4, 8, 16, 16, torch.float32)
    for name in ("weight_scale", "weight_packed"):
        module = by_compressed_tensors(whole)
        module._parameters[name] = None
        assert read(module) == OTHER_TENSORS
    module = by_compressed_tensors(whole)
    module.weight_global_scale = nn.Parameter(torch.ones(1))
    assert read(module) == OTHER_TENSORS


def test_a_packed_embedding_is_named():
    """compressed-tensors packs these too; its own forward looks words up."""
    model = tiny_model(num_hidden_layers=1)
    like = by_compressed_tensors(packed(4, 8, 16, 16, torch.float32)[0])
    model.model.embed_tokens.quantization_scheme = like.quantization_scheme
    inputs = prompts(3, 5)
    expected = model.generate(**inputs, **OPTIONS)
    with fastspec.patched(model, stored=True):
        assert torch.equal(model.generate(**inputs, **OPTIONS, assistant="nasd"), expected)
        assert fastspec.report(model).own_forward == {"compressed-tensors: it is an embedding": 1}


class Params4bit(nn.Parameter):
    """bitsandbytes' weight, as far as its dtype is asked for."""


def test_words_that_hold_codes_are_not_the_dtype_of_the_layers():
    """Of 4 bits bitsandbytes may keep codes in words of floating point, which FSDP can cut (bnb_4bit_quant_storage)."""
    model = tiny_model(num_hidden_layers=1)
    layers = [each for each in model.model.layers.modules() if isinstance(each, nn.Linear)]
    for layer in layers:
        words = torch.zeros(layer.weight.numel() // 4, 1, dtype=torch.bfloat16)
        layer.weight = Params4bit(words, requires_grad=False)
    assert dtype_of(model) == model.dtype == torch.float32


class Linear8bitLt(nn.Linear):
    """bitsandbytes' module, as far as it is read."""


Linear8bitLt.__module__ = "bitsandbytes.nn.modules"


def test_int8_of_bitsandbytes_is_read_wherever_its_scales_are():
    """With the weight before its first pass, with the module's state after it; not before it is quantised."""
    module, largest = Linear8bitLt(8, 5), torch.rand(5)
    codes = torch.randint(-127, 128, (5, 8), dtype=torch.int8)
    module.state = SimpleNamespace(SCB=None)
    module.weight.SCB = None
    assert read(module) == "it is not quantised yet"
    module.weight = nn.Parameter(codes, requires_grad=False)
    for held, other in ((module.weight, module.state), (module.state, module.weight)):
        held.SCB, other.SCB = largest, None
        weight = read(module)
        assert not isinstance(weight, str), weight
        assert torch.equal(dequantised(weight, torch.float32), codes * (largest[:, None] / 127))
    largest.mul_(2)
    weight = read(module)
    assert not isinstance(weight, str)
    assert torch.equal(dequantised(weight, torch.float32), codes * (largest[:, None] / 127))


def test_scales_that_are_made_of_others_are_made_once():
    """And anew of those that have changed."""
    made = by_powers(nn.Linear(32, 32))
    one, two = (read(made) for _ in range(2))
    assert isinstance(one, StoredWeight) and isinstance(two, StoredWeight)
    assert one.scales.data_ptr() == two.scales.data_ptr()
    for value in (1.0, 2.0):
        ones = torch.full((2, 2), value).to(torch.float8_e8m0fnu)
        if value > 1:
            made.weight_scale_inv.data = ones
        else:
            made.weight_scale_inv.copy_(ones)
        other = read(made)
        assert isinstance(other, StoredWeight) and torch.equal(other.scales, torch.full((2, 2), value))


class LoraLinear(nn.Module):
    """PEFT's LoRA layer, as far as it is read."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer, self.disable_adapters, self.merged = base, False, False
        self.lora_variant: dict[str, Any] = {}
        self.inner = nn.Linear(base.in_features, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The layer inside, and the adapter beside it."""
        out: Tensor = self.base_layer(x)
        return out if self.disable_adapters else out + self.inner(x)


LoraLinear.__module__ = "peft.tuners.lora.layer"


def cut_by_inputs(layer: nn.Module, size: int) -> Any:
    """The layer as one of two processes has it whose inputs transformers has cut, in blocks of a size."""
    style, group = type("RowwiseParallel", (), {"input_layouts": None})(), SimpleNamespace(size=lambda: 2)
    mesh = SimpleNamespace(get_group=lambda: group)

    def install(self: Any, mesh: Any) -> Any:
        def tp_forward(x: Tensor) -> Any:
            return self, mesh

        return tp_forward

    made: Any = by_blocks(layer, size)
    made.in_features, made.forward = 2 * layer.in_features, install(style, mesh)
    return made


def test_an_adapter_on_a_share_sums_over_the_processes():
    torch.manual_seed(0)
    made, x = cut_by_inputs(nn.Linear(32, 24, bias=False), 16), torch.randn(3, 32)
    weight = read(made)
    assert isinstance(weight, StoredWeight)
    ops = replace(TORCH, all_reduce=lambda part, group: part * 2)  # the other process has the same
    adapter = LoraLinear(made)
    adapter.inner = nn.Linear(32, 24, bias=False)
    wanted = 2 * nn.functional.linear(x, dequantised(weight, torch.float32)) + adapter.inner(x)
    assert torch.equal(product_of((adapter,), ops)(x), wanted)


@pytest.mark.parametrize(("size", "why"), [(8, None), (48, None), (20, "divide"), (32, "divide")])
def test_a_share_of_whole_blocks_or_of_one_is_read(size: int, why: str | None):
    """24 of 48 inputs: of blocks of 32 the second share begins within the first block."""
    found = read(cut_by_inputs(nn.Linear(24, 16), size))
    assert isinstance(found, StoredWeight) if why is None else found == "the processes do not divide its blocks"


def adapted(model: Any) -> Any:
    """The model with an adapter on two projections of its first layer."""
    torch.manual_seed(1)
    for part, name in (("self_attn", "q_proj"), ("mlp", "up_proj")):
        within = getattr(model.model.layers[0], part)
        setattr(within, name, LoraLinear(getattr(within, name)))
    return model.requires_grad_(False)


def test_an_adapter_adds_to_the_stored_product():
    """The layers inside run nowhere here by their own forward; switched off between two calls."""
    model, dense = map(adapted, pair(lambda x: by_blocks(x, 16), num_hidden_layers=2))
    fastspec.patch(model, stored=True)
    assert fastspec.report(model).stored == {"fine-grained FP8": 14}
    found = []
    for off in (False, True):
        for each in (model, dense):
            each.model.layers[0].self_attn.q_proj.disable_adapters = off
            each.model.layers[0].mlp.up_proj.disable_adapters = off
        found.append(dense.generate(**prompts(5), **OPTIONS))
        assert torch.equal(model.generate(**prompts(5), **OPTIONS, assistant="autoregressive"), found[-1])
    assert not torch.equal(*found)


@pytest.mark.parametrize("why", ["variant", "merged", "hook", "forward"])
def test_an_adapter_that_reads_more_runs_by_its_own_forward(why):
    """All of its feed-forward with it."""
    model = adapted(pair(lambda x: by_blocks(x, 16), num_hidden_layers=1)[0])
    layer = model.model.layers[0].mlp.up_proj
    if why == "variant":
        layer.lora_variant["default"] = object()
    elif why == "merged":
        layer.merged = layer.disable_adapters = True
    elif why == "hook":
        layer.register_forward_hook(lambda *args: None)
    else:
        layer.forward = layer.forward
    with fastspec.patched(model, stored=True):
        report = fastspec.report(model)
    assert report.stored == {"fine-grained FP8": 4}
    assert report.own_forward == {"fine-grained FP8: it is a part of a module that runs by its own forward": 3}


def test_packed_experts_are_named():
    """transformers' own modules, in the places where its loading puts them."""
    oss, mixtral = tiny_model("gpt_oss", num_hidden_layers=2), tiny_model("mixtral", num_hidden_layers=2)
    for layer in oss.model.layers:
        layer.mlp.experts = Mxfp4GptOssExperts(oss.config)
    for layer in mixtral.model.layers:
        layer.mlp.experts = FP8Experts(mixtral.config, block_size=(16, 16))
    dense = "FineGrainedFP8Config(dequantize=True) loads dense ones"
    told = "MXFP4: its experts are laid anew: those of fastspec.models.load_model(..., packed=True) are read"
    for model, name in ((oss, told), (mixtral, f"fine-grained FP8: experts are not read: {dense}")):
        with fastspec.patched(model, stored=True):
            report = fastspec.report(model)
        assert report.own_forward == {name: 2} and report.dequantised is None


class Int4Tensor(nn.Parameter):
    """torchao's weight of 4 bits, as far as it is named."""


class TorchQuantLinear(nn.Linear):
    """GPTQModel's layer, as far as it is named."""


Int4Tensor.__module__, TorchQuantLinear.__module__ = "torchao.quantization", "gptqmodel.nn_modules.qlinear.torch"


def test_other_formats_are_named_with_what_to_use_instead(monkeypatch):
    """transformers' own modules, a layer of GPTQModel's, and a weight of torchao's that no row reads."""
    monkeypatch.setattr(nvfp4, "load_nvfp4_kernel", lambda: SimpleNamespace(swizzled_sf_shape=lambda *sizes: sizes))
    model = tiny_model(num_hidden_layers=1)
    mlp, attn = model.model.layers[0].mlp, model.model.layers[0].self_attn
    attn.q_proj = nvfp4.NVFP4Linear(64, 64)
    attn.k_proj = GgufLinear(64, 64, 8)
    attn.v_proj = TorchQuantLinear(64, attn.v_proj.out_features)
    mlp.up_proj = QuantizedLinear(64, 128, num_bits=4)
    mlp.down_proj.weight = Int4Tensor(mlp.down_proj.weight.data)
    with fastspec.patched(model, stored=True):
        told = fastspec.report(model).own_forward
    others = "compressed-tensors of 8 and 4 bits, GPTQ and AWQ are"
    assert told == {
        f"NVFP4: its tensors are not read: {others}": 1,
        f"GGUF: its blocks are not read: {UNPACKED}": 1,
        "GPTQ, AWQ: modules of gptqmodel are not read: fastspec.models.load_model reads the files without them": 1,
        f"Gemma's QAT: its codes are not read: {others}": 1,
        "torchao: Int4Tensor is not read: int8, float8 and intx in int8 are": 1,
    }


def fp8_file(held: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a checkpoint in fine-grained FP8."""
    packed = {key: each.to(torch.float8_e4m3fn) for key, each in held.items() if "_proj" in key}
    scales = {f"{key}_scale_inv": torch.ones(1, 1) for key in packed}
    return held | packed | scales


def mxfp4_file(held: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a checkpoint of gpt-oss."""
    made = dict(held)
    for key in [key for key in held if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, depth, width = made.pop(key).shape
        made[f"{key}_blocks"] = torch.randint(0, 256, (count, width, depth // 32, 16), dtype=torch.uint8)
        made[f"{key}_scales"] = torch.full((count, width, depth // 32), 120, dtype=torch.uint8)
    return made


def test_fine_grained_fp8_dequantises_as_transformers_does(tmp_path):
    """Tensors of a file as its module holds them, beside what transformers makes of that file on a CPU: bit for bit.
    Whole blocks, since it takes no others."""
    size, block = {"num_hidden_layers": 1, "hidden_size": 96, "intermediate_size": 160}, [16, 16]
    tiny_model("llama", **size).save_pretrained(tmp_path)
    (file,), path = tmp_path.glob("*.safetensors"), tmp_path / "config.json"
    torch.manual_seed(0)
    held = load_file(file)
    packed = {key: (each * 50).to(torch.float8_e4m3fn) for key, each in held.items() if "_proj" in key}
    grids = {key: tuple(side // 16 for side in each.shape) for key, each in packed.items()}
    scales = {f"{key}_scale_inv": torch.rand(grid) + 0.5 for key, grid in grids.items()}
    save_file(held | packed | scales, file, {"format": "pt"})
    config = {"quant_method": "fp8", "weight_block_size": block}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for key, codes in packed.items():
        made = FP8Linear(codes.shape[1], codes.shape[0], block_size=(16, 16))
        made.weight.data, made.weight_scale_inv.data = codes, scales[f"{key}_scale_inv"]
        weight = read(made)
        assert not isinstance(weight, str), weight
        assert torch.equal(dequantised(weight, torch.float32), model.get_parameter(key)), key


@pytest.mark.parametrize(
    ("family", "change", "config", "told"),
    [
        ("llama", fp8_file, {"quant_method": "fp8", "weight_block_size": [128, 128]}, "8.9 or later keeps"),
        ("gpt_oss", mxfp4_file, {"quant_method": "mxfp4"}, r"packed=True) keeps"),
    ],
)
def test_what_transformers_dequantised_is_told(
    tmp_path: Path, family: str, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], config: Any, told: str
) -> None:
    """Loaded on a CPU, where it keeps neither; a plain model says nothing, and so does one whose files are gone."""
    tiny_model(family, num_hidden_layers=1).save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    (file,), path = tmp_path.glob("*.safetensors"), tmp_path / "config.json"
    save_file(change(load_file(file)), file, {"format": "pt"})
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    with fastspec.patched(plain), fastspec.patched(model):
        assert fastspec.report(plain).dequantised is None
        report = fastspec.report(model)
        path.unlink()
        assert fastspec.report(model).dequantised is None
    assert report.dequantised is not None and report.dequantised.startswith(config["quant_method"])
    assert told in report.dequantised and f"weights were dequantised: {report.dequantised}" in str(report)


def test_exact_is_refused_by_name():
    """On the CPU; and by any kernels where an adapter takes a weight from those beside it."""
    model, _ = pair(by_lines, num_hidden_layers=2)
    with pytest.raises(Unsupported, match="exact=True"):
        fastspec.patch(model, stored=True, exact=True)

    def target() -> HFModel:
        return HFModel(model, adapter_for(model), rows=1, capacity=8, tail=1, taps=None, ops=TORCH)

    refuse_parts(target())
    adapted(model)
    with pytest.raises(Unsupported, match="layer 0 of LlamaForCausalLM has projections of attention"):
        refuse_parts(target())
