"""Parts of transformers' layers as the loop over an adapter's layers runs them: norms of what is added, and caps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.models import tiny_model

from fastspec.generation.decoder_layer import FullAttention
from fastspec.patches.backends import TORCH
from fastspec.patches.hf.model import HFModel
from fastspec.patches.hf.modes import adapter_for


def read_by(model: Any) -> HFModel:
    return HFModel(model, adapter_for(model), rows=1, capacity=16, tail=1, taps=None, ops=TORCH)


@pytest.mark.parametrize(("kind", "normed"), [("llama", False), ("gemma2", True), ("olmo2", True)])
@torch.no_grad()
def test_what_a_layer_adds_is_normed_where_its_family_norms_it(kind: str, normed: bool) -> None:
    model = tiny_model(kind, num_hidden_layers=1)
    target, ids = read_by(model), torch.arange(6, 15)[None]
    (layer,) = target.layers
    assert (layer.mixer_out_norm is not None) == (layer.mlp_out_norm is not None) == normed
    assert torch.allclose(target.prefill(ids, torch.tensor([9]))[0], model(ids).logits[:, -1], atol=1e-5)


@pytest.mark.parametrize("cap", [None, 0.01])
@torch.no_grad()
def test_scores_are_capped_as_the_model_caps_them(cap: float | None) -> None:
    """A cap so small that all that a token sees weighs nearly alike."""
    model = tiny_model("gemma2", num_hidden_layers=1, attn_logit_softcapping=cap, attn_implementation="eager")
    target, ids = read_by(model), torch.arange(6, 15)[None]
    mixer = target.layers[0].mixer
    assert isinstance(mixer, FullAttention) and mixer.cap == cap
    expected = model(ids).logits[:, -1]
    assert torch.allclose(target.prefill(ids, torch.tensor([9]))[0], expected, atol=1e-5)
    model.model.layers[0].self_attn.attn_logit_softcapping = None if cap else 0.01
    assert not torch.allclose(model(ids).logits[:, -1], expected, atol=1e-3)
