"""Virtual tokens of prompt-learning adapters, with a stand-in for PEFT's model: the suite of clients runs the real
one."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.generate import TREE, prompts, shallow_model, stats
from helpers.models import tiny_head
from transformers import DynamicCache

import fastspec
from fastspec import ContinuousBatch, Unsupported
from fastspec.patches.call import refusals
from fastspec.patches.hf.cache import CACHE, kept_cache

DYNAMIC = {
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "max_position_embeddings": 16,
}
"""A rotary embedding that reads the length of the text, past 16 tokens: a call that goes further is refused late."""

OPTIONS: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False}


class Adapted:
    """What fastspec reads of PEFT's model; `generate` puts its method on the base model, as PEFT does."""

    __module__ = "peft.peft_model"

    def __init__(self, base: Any, kind: str, learns: bool = True, **config: Any) -> None:
        self.base, self.word_embeddings = base, base.get_input_embeddings()
        self.active_peft_config = SimpleNamespace(peft_type=kind, is_prompt_learning=learns, **config)
        self.embeddings = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(0))

    def held(self, rows: int) -> Any:
        with torch.no_grad():
            return kept_cache(
                type(self.base).forward(self.base, inputs_embeds=self.embeddings.expand(rows, -1, -1), use_cache=True)
            )

    def get_prompt(self, batch_size: int) -> Any:
        as_cache = self.active_peft_config.peft_type == "PREFIX_TUNING"
        return self.held(batch_size) if as_cache else self.embeddings.expand(batch_size, -1, -1)

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("plain decoding's own")

    def generate(self, **options: Any) -> Any:
        self.base.prepare_inputs_for_generation = self.prepare_inputs_for_generation
        try:
            return self.base.generate(**options)
        finally:
            del self.base.prepare_inputs_for_generation


def behind(adapted: Adapted, inputs: dict[str, torch.Tensor]) -> Any:
    """Plain decoding behind the virtual tokens, as behind a cache: the mask counts them."""
    rows = len(inputs["input_ids"])
    mask = torch.cat((torch.ones(rows, 3, dtype=torch.long), inputs["attention_mask"]), 1)
    return shallow_model().generate(inputs["input_ids"], attention_mask=mask, **{CACHE: adapted.held(rows)}, **OPTIONS)


@pytest.mark.some("PREFIX_TUNING-lengths1", "PROMPT_TUNING", "P_TUNING")
@pytest.mark.each_value
@pytest.mark.parametrize("assistant", ["autoregressive", "nasd", TREE], ids=str)
@pytest.mark.parametrize(
    ("kind", "lengths"),
    [("PREFIX_TUNING", (6,)), ("PREFIX_TUNING", (5, 2, 3)), ("PROMPT_TUNING", (6,)), ("P_TUNING", (4, 4))],
)
def test_prompts_begin_behind_virtual_tokens(assistant, kind, lengths):
    model, inputs = shallow_model(), prompts(*lengths)
    fastspec.patch(model, eagle3=tiny_head(model))
    adapted = Adapted(model, kind)
    want = behind(adapted, inputs)
    assert adapted.generate(**inputs, **OPTIONS, assistant=assistant).tolist() == want.tolist()
    assert model.generate(**inputs, **OPTIONS).tolist() != want.tolist()
    out = adapted.generate(**inputs, **OPTIONS, assistant=assistant, return_dict_in_generate=True)
    assert kept_cache(out).get_seq_length() == 3 + out.sequences.shape[1] - 1  # with the virtual ones, as PEFT's


class Older(Adapted):
    """As PEFT was before transformers' cache had another name."""

    __module__ = "peft.peft_model"

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        return kwargs.get("past_key_values")


def test_a_peft_that_knows_the_old_name_alone_is_refused(monkeypatch):
    model = fastspec.patch(shallow_model())
    monkeypatch.setattr(refusals, "CACHE", "cache")
    with pytest.raises(
        Unsupported,
        match=r"this PEFT looks for past_key_values where transformers has cache.*PROMPT_TUNING: update PEFT",
    ):
        Older(model, "PROMPT_TUNING").generate(**prompts(6), **OPTIONS, assistant="nasd")
    assert Older(model, "LORA", learns=False).generate(**prompts(6), **OPTIONS, assistant="nasd").shape == (1, 20)


def test_an_adapter_of_weights_has_no_say_in_the_inputs():
    model = fastspec.patch(shallow_model())
    out = Adapted(model, "LORA", learns=False).generate(**prompts(6, 3), **OPTIONS, assistant="nasd")
    assert (
        out.tolist() == shallow_model().generate(**prompts(6, 3), **OPTIONS).tolist()
        and stats(model).assistant == "nasd"
    )


@pytest.mark.parametrize(
    ("kind", "config", "call", "match"),
    [
        ("PROMPT_TUNING", {}, {}, "prompts of different lengths behind a prompt-tuning adapter"),
        ("MULTITASK_PROMPT_TUNING", {}, {}, "adapter MULTITASK_PROMPT_TUNING cannot be combined"),
        ("PREFIX_TUNING", {}, {"assistant": ContinuousBatch("nasd", rows=2)}, "ContinuousBatch cannot be combined"),
        ("PREFIX_TUNING", {}, {"past": True}, f"{CACHE} cannot be combined"),
    ],
)
def test_what_would_differ_is_refused(kind, config, call, match):
    model = fastspec.patch(shallow_model())
    more = {"assistant": "nasd", **{name: value for name, value in call.items() if name != "past"}}
    if "past" in call:
        cache = DynamicCache(config=model.config)
        model(prompts(5, 5)["input_ids"], **{CACHE: cache})
        more[CACHE] = cache
        inputs = {"input_ids": prompts(6, 6)["input_ids"], "attention_mask": torch.ones(2, 6, dtype=torch.long)}
    else:
        inputs = prompts(6, 3)
    with pytest.raises(Unsupported, match=match):
        Adapted(model, kind, **config).generate(**inputs, **OPTIONS, **more)


def offsets(module: Any, args: Any, kwargs: Any, alora_offsets: Any) -> Any:
    """As PEFT hooks the layers of an activated LoRA for the length of its `generate`."""
    return args, kwargs


def seed(module: Any, args: Any, kwargs: Any) -> Any:
    """As PEFT hooks a model with a Shadow or X-LoRA adapter."""
    raise AssertionError("a pass of its own")


seed.__module__ = "peft.tuners.shadow.model"


@pytest.mark.parametrize(
    ("place", "hook", "match"),
    [
        ("model.layers.1.mlp.up_proj", partial(offsets, alora_offsets=[4]), "an activated LoRA begins within the text"),
        ("", seed, "computes from the whole text before each pass .peft.tuners.shadow.model."),
    ],
)
def test_adapters_that_follow_the_text_by_hooks_are_refused_by_name(place, hook, match):
    model = fastspec.patch(shallow_model())
    handle = model.get_submodule(place).register_forward_pre_hook(hook, with_kwargs=True)
    with pytest.raises(Unsupported, match=match):
        model.generate(**prompts(6), **OPTIONS, assistant="nasd")
    handle.remove()
    model.generate(**prompts(6), **OPTIONS, assistant="nasd")


@pytest.mark.parametrize("kind", ["PREFIX_TUNING", "PROMPT_TUNING"])
def test_a_call_that_is_refused_late_leaves_the_cache_as_it_was(kind):
    """A default's call goes on in plain decoding with that cache."""
    model = fastspec.patch(shallow_model(**DYNAMIC))
    cache = DynamicCache(config=model.config)
    with pytest.raises(Unsupported, match="past 16 this model"):
        Adapted(model, kind).generate(**prompts(6), max_new_tokens=30, **{CACHE: cache}, assistant="nasd")
    assert cache.get_seq_length() == 0
