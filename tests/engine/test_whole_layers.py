"""Layers that a backend runs in one call: whatever a row of data does not say is left to run part by part."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fastspec.generation.decoder_layer import (
    FullAttention,
    LayerParts,
    RmsNorm,
    gated,
    is_packed,
    pack,
    product,
    unpack,
)
from fastspec.generation.whole_layers import WholeLayers, plain_row
from fastspec.kernels.linear.reference import GELU_TANH
from fastspec.patches.backends import TORCH

UNUSED: Any = None


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def attention(**options: Any) -> FullAttention:
    qkv = product(TORCH, (linear(8, 8), linear(8, 4), linear(8, 4)))
    return FullAttention(
        TORCH, UNUSED, 0, **{"qkv": qkv, "out": product(TORCH, (linear(8, 8),)), "scale": 0.5, **options}
    )


def layer(**options: Any) -> LayerParts:
    norm = RmsNorm(TORCH, nn.RMSNorm(8), 1e-6)
    mlp = gated(TORCH, linear(8, 16), linear(8, 16), product(TORCH, (linear(16, 8),)))
    return LayerParts(**{"input_norm": norm, "mixer": attention(), "mlp_norm": norm, "mlp": mlp, **options})


MIXERS: dict[str, dict[str, Any]] = {
    "interleaved": {"interleaved": True},
    "gated": {"gated": True},
    "normed values": {"norms_values": True},
    "values are keys": {"ties_values": True},
    "keys of another layer": {"owns": False},
    "sinks": {"sinks": torch.zeros(2)},
    "cap": {"cap": 30.0},
    "own products": {"qkv": lambda x: x},
    "own output": {"out": lambda x: x},
}
PARTS: dict[str, dict[str, Any]] = {
    "norm of the mixer": {"mixer_out_norm": lambda x: x},
    "norm of the feed-forward": {"mlp_out_norm": lambda x: x},
    "experts beside": {"beside": lambda x, total: x},
    "something after": {"after": lambda x, own: x},
    "in parallel": {"mlp_norm": None},
    "own norm": {"input_norm": lambda x: (x, x)},
    "own feed-forward": {"mlp": lambda x: x},
    "no norm": {"input_norm": None},
    "another gate": {
        "mlp": replace(layer().mlp, gate_up=product(TORCH, (linear(8, 16), linear(8, 16)), kind=GELU_TANH))
    },
}


def test_a_plain_layer_is_a_row() -> None:
    assert plain_row(layer(), 1) is not None
    assert plain_row(layer(input_norm=None), 0) is not None  # a head's first, which reads a product of two norms


def test_a_row_has_the_weights_and_biases_of_every_product() -> None:
    one, both = nn.Linear(8, 8), (nn.Linear(8, 8), linear(8, 4))
    row = plain_row(layer(mixer=attention(qkv=product(TORCH, both), out=product(TORCH, (one,)))), 1)
    assert row is not None
    assert row.out.weights == (one.weight,) and row.out.biases == (one.bias,)
    assert row.qkv.weights == tuple(each.weight for each in both) and row.qkv.biases == (both[0].bias, None)


def test_weights_of_one_kind_are_laid_together_and_apart_again() -> None:
    layers = [nn.Linear(8, 6), nn.Linear(8, 4)]
    values = [each.weight.detach().clone() for each in layers]
    assert not any(is_packed(each.weight) for each in layers)
    moved = pack(layers)
    assert len(moved) == 4 and all(map(is_packed, moved)) and pack(layers) == []
    assert product(TORCH, layers).one() is not None
    for parameter in moved:
        unpack(parameter)
    assert not any(map(is_packed, moved))
    assert all(torch.equal(each.weight, value) for each, value in zip(layers, values, strict=True))
    for others in (
        [nn.Linear(8, 6), linear(8, 4)],
        [nn.Linear(8, 6), nn.Linear(7, 4)],
        [nn.Linear(8, 6), nn.Linear(8, 4).double()],
    ):
        assert pack(others) == [] and not any(is_packed(each.weight) for each in others)


def test_only_a_product_that_goes_to_a_norm_is_given_in_parts() -> None:
    whole = linear(8, 8)
    ops = replace(TORCH, linear_parts=lambda *given: "parts")
    x = torch.randn(2, 8)
    assert product(ops, (whole,), parts=True)(x) == "parts"
    assert torch.equal(product(ops, (whole,))(x), TORCH.linear(x, whole.weight, None))
    assert product(TORCH, (whole,), parts=True)(x).shape == (2, 8)


def test_parameters_that_modules_get_anew_are_read_by_the_next_pass() -> None:
    out, norm = nn.Linear(8, 8), nn.RMSNorm(8)
    state: Any = SimpleNamespace(k=UNUSED, v=UNUSED, ring=None)
    mixer = replace(attention(out=product(TORCH, (out,))), state=state)
    parts = layer(mixer=mixer, input_norm=RmsNorm(TORCH, norm, 1e-6))
    whole = WholeLayers([parts], replace(TORCH, stack=lambda layers, *_: layers.rows[0]))
    nodes: Any = SimpleNamespace(
        rotary={None: (UNUSED, UNUSED, None)}, layouts={mixer.layout: UNUSED}, slots={None: UNUSED}, positions=UNUSED
    )
    for module, name in ((out, "weight"), (out, "bias"), (norm, "weight")):
        setattr(module, name, nn.Parameter(torch.randn_like(getattr(module, name))))
        row: Any = whole(torch.zeros(1, 1, 8), nodes)
        assert row.out.weights == (out.weight,) and row.out.biases == (out.bias,) and row.norm.weight is norm.weight


@pytest.mark.parametrize("kind", MIXERS)
def test_attention_that_does_more_is_no_row(kind: str) -> None:
    assert plain_row(layer(mixer=attention(**MIXERS[kind])), 1) is None


@pytest.mark.parametrize("kind", PARTS)
def test_a_layer_that_does_more_is_no_row(kind: str) -> None:
    assert plain_row(layer(**PARTS[kind]), 1) is None
