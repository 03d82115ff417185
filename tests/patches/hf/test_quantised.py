"""Quantised modules that `patch(model, stored=True)` multiplies as stored: those that transformers itself defines.
tests/clients has the libraries'."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.generate import prompts
from helpers.models import tiny_head, tiny_model
from helpers.patch import assert_same, snapshot
from helpers.stored import float8, grouped8, packed, rows8
from torch import nn
from transformers.integrations.compressed_tensors import CompressedTensorsFP8Linear
from transformers.integrations.finegrained_fp8 import FP8Linear

import fastspec
from fastspec.errors import Unsupported
from fastspec.kernels.quantised.reference import E4M3, INT8, StoredWeight, dequantised
from fastspec.patches.hf.compat import dtype_of
from fastspec.patches.hf.quantised import read

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
    assert "layers multiply weights as stored" in str(report)
    fastspec.unpatch(model)
    assert_same(before, snapshot(model))


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


def test_a_weight_that_is_replaced_is_read_anew():
    model, dense = pair(by_lines, num_hidden_layers=2)
    fastspec.patch(model, stored=True)
    model.generate(**prompts(5), **OPTIONS, assistant="nasd")
    for each, name in ((model, "weight_scale"), (dense, "weight")):
        layer = each.model.layers[0].mlp.down_proj
        setattr(layer, name, nn.Parameter(-getattr(layer, name).data, requires_grad=False))
    found = model.generate(**prompts(5), **OPTIONS, assistant="nasd")
    assert torch.equal(found, dense.generate(**prompts(5), **OPTIONS))


def test_why_a_module_runs_by_its_own_forward():
    """Without the switch all of them; with it a hooked one, one whose forward is replaced, and other tensors."""
    model, _ = pair(lambda x: by_blocks(x, 16), num_hidden_layers=2)
    with fastspec.patched(model):
        assert fastspec.report(model).own_forward == {
            "fine-grained FP8: patch(model, stored=True) was not asked for": 7 * model.config.num_hidden_layers
        }
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


def test_tensors_that_do_not_fit_are_named() -> None:
    weight, _ = rows8(5, 8, torch.float32)
    assert read(by_torchao(replace(weight, scales=weight.scales[:4]))) == "4 scales are not one for each block of 1 x 8"
    whole, _ = packed(4, 8, 16, 16, torch.float32)
    for name in ("weight_scale", "weight_packed"):
        module = by_compressed_tensors(whole)
        module._parameters[name] = None
        assert read(module) == "its format has other tensors than codes, scales and zero points"
    module = by_compressed_tensors(whole)
    module.weight_global_scale = nn.Parameter(torch.ones(1))
    assert read(module) == "its format has other tensors than codes, scales and zero points"


def test_exact_is_refused_by_name():
    model, _ = pair(by_lines, num_hidden_layers=2)
    with pytest.raises(Unsupported, match="exact=True"):
        fastspec.patch(model, stored=True, exact=True)
