"""A model that accelerate lays over several devices, layers in turn, decodes through its hooks; each layer's keys lie
where it computes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
from helpers.devices import ON_CUDA
from helpers.generate import TREE, prompts
from helpers.models import tiny_head, tiny_model
from torch import nn

import fastspec
from fastspec import Unsupported
from fastspec.patches.assistants import heads
from fastspec.patches.hf import cache, parallel
from fastspec.patches.hf.cache import CACHE, kept_cache
from fastspec.patches.hf.modes import adapter_for, check_supported
from fastspec.patches.session import session_of

OPTIONS = {"do_sample": False, "max_new_tokens": 24}
ASSISTANTS = ("autoregressive", TREE, "nasd")
TWO_GPUS = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")]
PLACES = [pytest.param(*places, marks=ON_CUDA) for places in (("cpu", "cuda:0"), ("cuda:0", "cpu"))]
PLACES += [pytest.param(*places, marks=TWO_GPUS) for places in (("cuda:0", "cuda:1"), ("cuda:1", "cuda:0"))]


def halves(model: Any, first: str, second: str) -> dict[str, str]:
    """A device map: what comes before the layers and the first half of them, then the rest."""
    stack = placement_stack(model)
    names = {id(module): name for name, module in model.named_modules()}
    placed = {names[id(layer)]: second if 2 * index >= len(stack) else first for index, layer in enumerate(stack)}
    behind = False
    for name, module in model.named_modules():
        inside = any(name == layer or name.startswith(f"{layer}.") for layer in placed)
        behind = behind or inside
        if not inside and not list(module.children()):
            placed[name] = second if behind and not name.endswith("rotary_emb") else first
    return placed


def placement_stack(model: Any) -> nn.ModuleList:
    count = model.config.num_hidden_layers
    return next(
        each for each in model.get_decoder().modules() if isinstance(each, nn.ModuleList) and len(each) == count
    )


@pytest.mark.some("gpt2", "gemma2")
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
def test_layers_of_one_kind_on_two_devices_have_two_states(kind, monkeypatch):
    """On the CPU by two names of it: what is split is put together again in every answer, cache and turn."""
    plain, model = tiny_model(kind), tiny_model(kind)
    count = model.config.num_hidden_layers
    head, inputs = tiny_head(model), prompts(5, 9)
    monkeypatch.setattr(
        cache, "layer_devices", lambda model: [torch.device("cpu")] * 2 + [torch.device("cpu", 0)] * (count - 2)
    )
    expected = plain.generate(**inputs, **OPTIONS)
    with fastspec.patched(model, eagle3=head):
        for assistant in ASSISTANTS:
            assert torch.equal(model.generate(**inputs, **OPTIONS, assistant=assistant), expected)
        alone = prompts(7)
        out = model.generate(**alone, **OPTIONS, return_dict_in_generate=True, assistant=TREE)
        whole = plain.generate(**alone, **OPTIONS, return_dict_in_generate=True)
        for mine, theirs in zip(kept_cache(out).layers, kept_cache(whole).layers, strict=True):
            torch.testing.assert_close(mine.keys, theirs.keys, rtol=0, atol=1e-4)
        again = torch.cat((out.sequences, torch.full((1, 2), 11)), 1)  # a turn that goes on from the returned cache
        more = model.generate(again, **{CACHE: kept_cache(out)}, **OPTIONS, assistant=TREE)
        assert torch.equal(more, plain.generate(again, **{CACHE: kept_cache(whole)}, **OPTIONS))
    made = cache.sequence_state(model, [None] * count, rows=2, capacity=40, tail=4, chunk=32, bounded=False)
    assert len(made.kinds) == 2 and [layer for _, layer in made.places] == [0, 1, *range(count - 2)]


def on(monkeypatch: pytest.MonkeyPatch, model: Any, *places: str) -> None:
    """Let layers seem to be on these devices in turn, as if accelerate had laid them so."""
    seeming = [
        SimpleNamespace(device=torch.device(places[index % len(places)]))
        for index in range(len(placement_stack(model)))
    ]
    for layer, weight in zip(placement_stack(model), seeming, strict=True):
        layer.parameters = lambda weight=weight: iter([weight])  # type: ignore[method-assign]
    monkeypatch.setattr(
        parallel, "every_module", lambda _: [SimpleNamespace(_parameters={"weight": weight}) for weight in seeming]
    )


def test_a_model_over_several_devices_is_taken_by_accelerates_hooks_alone(monkeypatch):
    model = tiny_model("llama")
    assert (
        parallel.layer_devices(model) == [torch.device("cpu")] * model.config.num_hidden_layers
        and adapter_for(model) is not None
    )
    on(monkeypatch, model, "cuda:0", "cuda:1")
    with pytest.raises(
        Unsupported,
        match=r"spread over cuda:0, cuda:1; without accelerate's hooks .*\(tp_plan='auto', under torchrun\)",
    ):
        check_supported(model)
    accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    check_supported(model)
    assert parallel.layer_devices(model)[:3] == [torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cuda:0")]
    assert adapter_for(model) is None
    layer = placement_stack(model)[1]
    layer.parameters = lambda: iter([SimpleNamespace(device=torch.device("cuda", index)) for index in range(2)])  # type: ignore[method-assign]
    with pytest.raises(Unsupported, match="layer 1 of LlamaForCausalLM is itself spread over cuda:0, cuda:1"):
        check_supported(model)


def test_a_head_that_drafts_with_an_lm_head_elsewhere_is_refused_by_name(monkeypatch):
    model, head = tiny_model("llama"), tiny_head(tiny_model("llama"), kind="eagle", taps=(), own_lm_head=False)
    monkeypatch.setattr(heads, "is_spread", lambda model: True)
    model.lm_head.to("meta")
    with pytest.raises(
        Unsupported, match="drafts with the LM head of LlamaForCausalLM, which is on meta, and would run on cpu"
    ):
        fastspec.patch(model, eagle=head)


@pytest.mark.parametrize("first, second", PLACES)
@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "gemma2", "qwen3"])
def test_layers_on_two_devices_say_what_they_say_on_one(kind, first, second):
    """One GPU and the CPU without offloading, and two GPUs: each layer computes where its weights are."""
    plain, model = tiny_model(kind).to(first), tiny_model(kind)
    head, inputs = tiny_head(model).to(first), {name: each.to(first) for name, each in prompts(5, 9).items()}
    accelerate.dispatch_model(model, halves(model, first, second), main_device="cpu")
    expected = plain.generate(**inputs, **OPTIONS)
    assert torch.equal(model.generate(**inputs, **OPTIONS), expected)
    with fastspec.patched(model, eagle3=head):
        reason = (
            "no adapter for gpt_neox"
            if kind == "gpt_neox"
            else f"its layers are on {' and '.join(sorted((first, second)))}"
        )
        mode = fastspec.report(model).mode
        assert mode.startswith("generic") and reason in mode
        for assistant in ASSISTANTS:
            assert torch.equal(model.generate(**inputs, **OPTIONS, assistant=assistant), expected)
            assert fastspec.report(model).last.replays == 0
        out = model.generate(**inputs, **OPTIONS, return_dict_in_generate=True, assistant=TREE)
        assert {str(layer.keys.device) for layer in kept_cache(out).layers} == {first, second}
        with fastspec.continuous(model, "nasd", rows=2, max_length=64) as batch:
            alone = inputs["input_ids"][1:]
            assert torch.equal(batch.submit(alone, **OPTIONS).result(300), plain.generate(alone, **OPTIONS))
        assert session_of(model) is not None
    assert torch.equal(model.generate(**inputs, **OPTIONS), expected)
