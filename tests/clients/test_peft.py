"""PEFT's adapters, put on before and after the patch, switched, switched off, merged; prefix and prompt tuning."""

from __future__ import annotations

import copy
from importlib import metadata
from typing import Any

import pytest
import torch
from helpers.clients import HEAD, MARKS, QUESTIONS, answers, asked, drafting, plain
from packaging.version import Version

import fastspec
from fastspec.patches.hf.cache import CACHE, OLD
from fastspec.patches.hf.changes import weight_places

pytestmark = MARKS
COUNT = 16


def lora(seed: int) -> tuple[Any, int]:
    from peft import LoraConfig

    return LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"), seed


def drawn(model: Any, adapter: str, seed: int) -> Any:
    """The same model with an adapter's weights drawn, large enough to change what it says."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if f".{adapter}." in name:
            parameter.data.normal_(0, 0.05, generator=generator)
    return model


def adapted(model: Any, seed: int = 1) -> Any:
    from peft import get_peft_model

    return drawn(get_peft_model(model, lora(seed)[0]), "default", seed)


@pytest.fixture
def models(smollm2):
    """Two copies that a test may change: (unpatched, to be patched)."""
    return copy.deepcopy(smollm2[0]), copy.deepcopy(smollm2[0])


def test_an_activated_lora_is_refused_by_name(models, tokenizer):
    """It adds to the last tokens of a pass, as many as stand after its invocation tokens: not to a tree's nodes."""
    from peft import LoraConfig, get_peft_model

    served = fastspec.patch(models[1], eagle3=HEAD)
    inputs = asked(tokenizer, *QUESTIONS[:2])
    invocation = inputs["input_ids"][0, -4:-2].tolist()
    config = LoraConfig(r=8, target_modules=["q_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=invocation)
    served = get_peft_model(served, config)
    with pytest.raises(fastspec.Unsupported, match="an activated LoRA begins within the text"):
        served.generate(**inputs, max_new_tokens=COUNT, do_sample=False, assistant="eagle3")


@pytest.mark.parametrize("order", ["patch, then adapter", "adapter, then patch"])
def test_lora(models, tokenizer, order):
    original, served = models
    inputs, bare = asked(tokenizer, *QUESTIONS[:2]), answers(models[0], asked(tokenizer, *QUESTIONS[:2]), COUNT)
    if order == "patch, then adapter":
        served = adapted(fastspec.patch(served, eagle3=HEAD, assistant="eagle3"))
    else:
        served = fastspec.patch(adapted(served), eagle3=HEAD, assistant="eagle3")
    original = adapted(original)
    expected = answers(original, inputs, COUNT)
    with drafting(served, calls=1):
        assert answers(served, inputs, COUNT) == expected
    assert expected != bare
    assert fastspec.report(served).mode == "adapter llama"


def test_lora_switched_off_and_merged(models, tokenizer):
    original, served = adapted(models[0]), adapted(fastspec.patch(models[1], eagle3=HEAD, assistant="eagle3"))
    inputs, emitted = asked(tokenizer, *QUESTIONS[:2]), []
    for model in (original, served):
        model.add_adapter("second", lora(2)[0])
        drawn(model, "second", 2)
    with drafting(served, calls=4):
        for adapter in ("second", "default"):
            rounds = weight_places(served)
            for model in (original, served):
                model.set_adapter(adapter)
            assert weight_places(served) != rounds  # captured ones hold the former adapter
            emitted.append(answers(original, inputs, COUNT))
            assert answers(served, inputs, COUNT) == emitted[-1]
        rounds = weight_places(served)
        with original.disable_adapter(), served.disable_adapter():
            assert weight_places(served) != rounds
            emitted.append(answers(original, inputs, COUNT))
            assert answers(served, inputs, COUNT) == emitted[-1]
        original, served = original.merge_and_unload(), served.merge_and_unload()
        assert answers(served, inputs, COUNT) == answers(original, inputs, COUNT) == emitted[1]
    assert emitted[0] != emitted[1] != emitted[2] != emitted[0]
    assert served is models[1]
    fastspec.unpatch(served)


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_prompt_learning(models, tokenizer, kind):
    """Its virtual tokens are in no input_ids. Behind virtual embeddings, plain decoding counts a batch's padding as
    positions: such a batch is left to transformers."""
    import peft

    inputs, batch = asked(tokenizer, QUESTIONS[0]), asked(tokenizer, *QUESTIONS[:2])
    bare = answers(models[0], inputs, COUNT)
    fastspec.patch(models[1], eagle3=HEAD, assistant="eagle3")
    torch.manual_seed(0)
    original, served = (
        peft.get_peft_model(model, getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4)) for model in models
    )
    served.load_state_dict(original.state_dict())
    expected = answers(original, inputs, COUNT)
    if CACHE != OLD and Version(metadata.version("peft")) < Version(
        "0.22"
    ):  # its virtual tokens do not reach plain decoding
        with plain(served, "update PEFT"):
            assert answers(served, inputs, COUNT) == expected
        return
    assert expected != bare
    with drafting(served, calls=1):
        assert answers(served, inputs, COUNT) == expected
    with drafting(served, calls=1) if kind == "PrefixTuningConfig" else plain(served, "prompts of different lengths"):
        assert answers(served, batch, COUNT) == answers(original, batch, COUNT)
    with drafting(models[1], calls=1):  # and the model below is as it was
        assert answers(models[1], inputs, COUNT) == bare
