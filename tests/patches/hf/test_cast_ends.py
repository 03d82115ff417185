"""An LM head in a dtype of its own, as TRL casts it: with an embedding tied to it, `model.dtype` is not the layers'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.generate import TREE, prompts, same, shallow_model
from helpers.models import tiny_head
from torch import nn

import fastspec
from fastspec.patches.hf.compat import dtype_of


def cast_head(tied: bool) -> Any:
    model = shallow_model(tie_word_embeddings=tied)
    model.lm_head.double()
    model.lm_head.register_forward_pre_hook(lambda _, args: (args[0].double(), *args[1:]))
    if tied:
        model.get_input_embeddings().register_forward_hook(lambda _, args, out: out.float())
    return model


@pytest.mark.each_value
@pytest.mark.parametrize("tied", [False, True], ids=["its own", "tied"])
@pytest.mark.parametrize("assistant", ["nasd", TREE], ids=str)
def test_an_lm_head_that_was_cast_by_itself_leaves_the_tokens_as_they_are(tied, assistant):
    plain = cast_head(tied)
    patched = fastspec.patch(cast_head(tied), eagle3=tiny_head(shallow_model()).to(plain.dtype))
    same((plain, patched), assistant, prompts(9, 5))


class Beside(nn.Module):
    """A layer with an adapter in a dtype of its own beside it, as PEFT keeps one."""

    def __init__(self, layer: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.base_layer, self.down = layer, nn.Linear(layer.in_features, 4, bias=False, dtype=dtype)
        self.up = nn.Linear(4, layer.out_features, bias=False, dtype=dtype)
        for each in (self.down, self.up):
            each.weight.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base_layer(x)
        return out + self.up(self.down(x.to(self.down.weight.dtype))).to(out.dtype)


def with_adapters(dtype: torch.dtype) -> Any:
    model = cast_head(tied=True)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Beside(layer.self_attn.q_proj, dtype)
    return model


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("assistant", ["nasd", TREE], ids=str)
def test_adapters_in_a_dtype_of_their_own_leave_the_layers_dtype_as_it_is(dtype, assistant):
    plain = with_adapters(dtype)
    patched = fastspec.patch(with_adapters(dtype), eagle3=tiny_head(shallow_model()).to(plain.dtype))
    same((plain, patched), assistant, prompts(9, 5))
    assert fastspec.report(patched).dtype == "float32" and plain.dtype == torch.float64


def test_weights_packed_in_bytes_leave_the_models_own_dtype():
    model = shallow_model()
    assert dtype_of(model) == torch.float32
    for layer in model.model.layers:
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                module.weight = nn.Parameter(module.weight.to(torch.int8), requires_grad=False)
    assert dtype_of(model) == model.dtype == torch.float32
