"""Layers that torch quantises dynamically, whose weight is a method: they multiply by their own forward, in every
assistant but heads."""

from __future__ import annotations

import platform
from typing import Any

import pytest
import torch
from helpers.generate import bigram, prompts, shallow_model
from helpers.models import tiny_head, tiny_model
from helpers.seq2seq import sources, tiny_seq2seq
from torch import nn
from torch.ao.quantization import float_qparams_weight_only_qconfig, quantize_dynamic

import fastspec
from fastspec import Unsupported
from fastspec.patches.assistants.speculative import vocabulary

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated"),
    pytest.mark.filterwarnings("ignore:the draft model reads", "ignore:torch.quantize_per_tensor"),
    pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="torch's x86 engine"),
]
TABLES = {nn.Linear: torch.ao.quantization.default_dynamic_qconfig, nn.Embedding: float_qparams_weight_only_qconfig}


def quantised(model: Any, tables: bool = False) -> Any:
    """The model with int8 linear layers, and with `tables` an embedding of 8 bits too."""
    return quantize_dynamic(model, TABLES if tables else {nn.Linear})


@pytest.mark.each_value
@pytest.mark.parametrize("tables", [False, True])
@pytest.mark.parametrize("make", [bigram, lambda: tiny_model("gpt2", num_hidden_layers=2)], ids=["adapter", "generic"])
def test_every_assistant_without_a_head(make, tables):
    """Of models that are surer of their tokens than 8 bits are coarse; the check of the generic mode allows for these
    bits."""
    plain, model = (quantised(make(), tables) for _ in range(2))
    assert callable(model.get_output_embeddings().weight) and callable(model.get_input_embeddings().weight) is tables
    fastspec.patch(model, speculative=make())
    assert vocabulary(model) == 97
    want = plain.generate(**prompts(9), max_new_tokens=6, do_sample=False).tolist()
    for assistant in ("autoregressive", "nasd", "speculative"):
        assert model.generate(**prompts(9), max_new_tokens=6, do_sample=False, assistant=assistant).tolist() == want
    with fastspec.continuous(model, "nasd", rows=1) as batch:
        assert batch.submit(prompts(9)["input_ids"], max_new_tokens=6, do_sample=False).result(300).tolist() == want


def test_a_quantised_draft_model():
    plain, model = shallow_model(), shallow_model()
    fastspec.patch(model, speculative=quantised(shallow_model()))
    want = plain.generate(**prompts(9, 5), max_new_tokens=12, do_sample=False).tolist()
    assert model.generate(**prompts(9, 5), max_new_tokens=12, do_sample=False, assistant="speculative").tolist() == want
    assert fastspec.report(model).last.acceptance_length > 2


def test_a_model_with_an_encoder():
    plain, model = (quantised(tiny_seq2seq("bart")) for _ in range(2))
    fastspec.patch(model)
    want = plain.generate(**sources(7), max_new_tokens=6, do_sample=False).tolist()
    assert model.generate(**sources(7), max_new_tokens=6, do_sample=False, assistant="nasd").tolist() == want


def test_a_head_is_refused_by_name():
    model = quantised(shallow_model())
    with pytest.raises(Unsupported, match=r"size of its target's LM head.*is a Linear without a weight"):
        fastspec.patch(model, eagle3=tiny_head(model, copy_lm_head=False))
