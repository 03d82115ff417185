"""`patch(exact=True)` refuses by name what has no kernels that sum in a fixed order: parts of layers, on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.generate import SHALLOW
from helpers.models import tiny_model

from fastspec.errors import Unsupported
from fastspec.patches.backends import TORCH
from fastspec.patches.hf.exact import refuse_device, refuse_parts, why_inexact
from fastspec.patches.hf.model import HFModel
from fastspec.patches.hf.modes import adapter_for


def layers_of(model: Any) -> Any:
    return HFModel(model, adapter_for(model), rows=1, capacity=8, tail=1, taps=None, ops=TORCH).layers


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
def test_plain_layers_are_taken(kind: str) -> None:
    model = tiny_model(kind, **SHALLOW)
    refuse_parts(model, layers_of(model))


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("gemma4_text", "more than attention and a feed-forward"),
        ("mixtral", "a feed-forward other than a gated one"),
        ("qwen3_next", "GatedDelta, which sums over a tree otherwise"),
        ("cohere", "norms of its own"),
        ("olmo2", "projections of attention that are no plain linear layers"),
    ],
)
def test_other_parts_of_a_layer_are_refused_by_name(kind: str, what: str) -> None:
    model = tiny_model(kind, **SHALLOW)
    with pytest.raises(Unsupported, match=f"layer 0 of {type(model).__name__} has {what}"):
        refuse_parts(model, layers_of(model))


def test_other_kernels_and_dtypes_are_refused_by_name() -> None:
    kernels = replace(TORCH, name="triton")
    for dtype in (torch.bfloat16, torch.float16):
        refuse_device(kernels, dtype)
    with pytest.raises(Unsupported, match=r"this model is in torch\.float32"):
        refuse_device(kernels, torch.float32)
    with pytest.raises(Unsupported, match="runs on 'torch'"):
        refuse_device(TORCH, torch.bfloat16)
    assert why_inexact(kernels, torch.bfloat16) == "patch(model, exact=True) was not asked for"
    assert why_inexact(TORCH, torch.bfloat16).endswith("this model runs on 'torch'")
