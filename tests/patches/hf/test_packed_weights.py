"""Weights that compressed-tensors has packed: a hook of the model's forward unpacks them, and an assisted call runs its
parts instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.generate import prompts
from helpers.models import tiny_model
from torch import nn

import fastspec
from fastspec.generation.decoder_layer import is_packed

OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": 1000}


def pack(model: Any) -> Any:
    """The model with its linear layers' weights under another name, and compressed-tensors' hook, which gives them back
    and goes."""
    layers = [module for layer in model.model.layers for module in layer.modules() if isinstance(module, nn.Linear)]

    def ct_decompress_hook(model: Any, args: Any) -> None:
        for layer in layers:
            layer.weight = layer.weight_packed
            del layer.weight_packed
        handle.remove()

    for layer in layers:
        layer.weight_packed = layer.weight
        del layer.weight
    handle = model.register_forward_pre_hook(ct_decompress_hook)
    return model


@pytest.mark.parametrize("named", [True, False])
def test_the_first_call_is_assisted_and_so_is_one_after_packing_again(recwarn, named):
    """By name and by default."""
    inputs, expected = prompts(5, 9), tiny_model().generate(**prompts(5, 9), **OPTIONS)
    model = fastspec.patch(pack(tiny_model()), assistant=None if named else "nasd")
    assert fastspec.report(model).mode == "adapter llama"
    assert model._forward_pre_hooks  # patch has changed nothing
    for calls in (1, 2):
        found = model.generate(**inputs, **OPTIONS, **({"assistant": "nasd"} if named else {}))
        assert torch.equal(found, expected)
        assert len(fastspec.report(model).calls) == calls
        assert not fastspec.report(model).unassisted and not model._forward_pre_hooks
        pack(model)
    assert not [told for told in recwarn if "fastspec" in str(told.message) or "generic mode" in str(told.message)]


def test_texts_are_scored_before_any_call():
    ids, model = prompts(5, 9)["input_ids"][1:], fastspec.patch(pack(tiny_model()))
    assert torch.equal(fastspec.log_probs(model, ids), fastspec.log_probs(fastspec.patch(tiny_model()), ids))
    assert not model._forward_pre_hooks


def test_a_packed_draft_model_drafts():
    target, inputs = tiny_model(), prompts(5)
    expected = target.generate(**inputs, **OPTIONS)
    fastspec.patch(target, speculative=pack(tiny_model()))
    assert torch.equal(target.generate(**inputs, **OPTIONS, assistant=fastspec.Speculative(gamma=3)), expected)
    assert fastspec.report(target).last.acceptance_length > 2


@pytest.mark.gpu
def test_on_cuda_they_are_laid_together_when_they_are_there():
    inputs = {name: value.to("cuda") for name, value in prompts(5).items()}
    expected = tiny_model().to("cuda").generate(**inputs, **OPTIONS)
    model = fastspec.patch(pack(tiny_model().to("cuda")), backend="triton")
    assert torch.equal(model.generate(**inputs, **OPTIONS, assistant="nasd"), expected)
    assert is_packed(model.model.layers[0].self_attn.k_proj.weight)
