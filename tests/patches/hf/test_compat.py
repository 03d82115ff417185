"""Private parts of torch, transformers and accelerate that `patches.hf` reads are where it reads them."""

from __future__ import annotations

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from helpers.models import tiny_model
from torch import nn
from torch.nn.modules import dropout

import fastspec
from fastspec.patches.hf import compat, config_fields
from fastspec.patches.hf.modes import DROPOUTS


def test_a_module_holds_its_parts_in_dictionaries_of_these_names():
    module = nn.Linear(2, 2, bias=False)
    assert all(name in vars(module) for name in compat.MODULE_PARTS)
    assert compat.own_parameters(module) == {"weight": module.weight}
    module.register_buffer("table", torch.zeros(1))
    compat.own_buffers(module).update(table=torch.ones(1))
    assert module.table == 1


def test_a_stack_with_a_head_of_its_own_is_found_whatever_class_it_has():
    inner, outer = nn.Module(), nn.Module()
    inner.lm_head = nn.Linear(2, 2)
    assert compat.stack_of(inner) is inner  # no model of transformers': it has no base_model_prefix
    outer.lm_head, outer.model, outer.base_model_prefix = inner.lm_head, inner, "none"
    assert compat.stack_of(outer) is inner
    outer.base_model_prefix = "model"
    assert compat.stack_of(outer) is outer


def test_hooks_are_found_before_and_after_a_forward():
    module, after, before = nn.Linear(2, 2), lambda *_: None, lambda *_: None
    module.register_forward_hook(after)
    module.register_forward_pre_hook(before)
    assert compat.hooks_of(module) == [after, before]


def test_hooks_are_left_out_and_found_again():
    module, after, before = nn.Linear(2, 2), lambda *_: None, lambda *_: None
    module.register_forward_hook(after)
    module.register_forward_pre_hook(before)
    held = dict(vars(module))
    compat.keep_hooks(module, lambda hook: hook is before)
    assert compat.hooks_of(module) == [before]
    vars(module).update(held)
    assert compat.hooks_of(module) == [after, before]


def test_a_copy_holds_other_parameters():
    module, weight = nn.Embedding(3, 2), nn.Parameter(torch.ones(1, 2))
    module.forward = lambda tokens: tokens
    made = compat.with_parameters(module, {"weight": weight})
    assert made(torch.tensor([0])).tolist() == [[1, 1]] and made.weight is weight
    assert module.weight.shape == (3, 2) and module(2) == 2


@pytest.mark.parametrize("enabled", [True, False])
def test_the_region_of_torchs_autocast_decorator_is_read(enabled: bool):
    region = torch.autocast("cpu", torch.bfloat16, enabled)
    assert compat.autocast_region(region(lambda: None)) == (torch.bfloat16, enabled)
    assert compat.autocast_region(lambda: None) is None and compat.autocast_region(print) is None


def test_the_hook_of_accelerate_is_found():
    module, hook = nn.Linear(2, 2), ModelHook()
    assert compat.placing_hook(module) is None and compat.hooked_device([module]) is None
    add_hook_to_module(module, hook)
    assert compat.placing_hook(module) is hook and "_hf_hook" in compat.OWN_PARTS
    hook.execution_device = "cpu"
    assert compat.hooked_device([nn.Linear(1, 1), module]) == torch.device("cpu")


def test_changes_of_a_tensor_are_counted():
    tensor = torch.zeros(2)
    before = compat.change_count(tensor)
    tensor.add_(1)
    assert compat.change_count(tensor) > before
    with torch.inference_mode():
        assert compat.change_count(torch.zeros(2)) == -1


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_a_configuration_names_its_attention_and_experts(name: str):
    model = tiny_model("qwen3_moe")
    model.set_attn_implementation(name)
    assert config_fields.attention_name(model.config) == name
    model.set_experts_implementation("eager")
    assert config_fields.experts_name(model.config) == "eager"


def test_a_model_says_whether_it_is_stateful_and_cut():
    model = tiny_model("llama")
    assert hasattr(type(model), "_is_stateful")
    assert not compat.is_stateful(model) and compat.processes_of(model) == 1
    model._is_stateful = True
    assert compat.is_stateful(model)


def test_transformers_capturing_hooks_come_again_when_they_were_taken_off():
    model, ids = tiny_model("gpt2"), torch.arange(5, 12)[None]
    for _ in range(2):
        assert len(model(ids, output_hidden_states=True).hidden_states) == 4 and compat.has_capturing_hooks(model)
        compat.drop_capturing_hooks(model)
        assert not compat.has_capturing_hooks(model)


def test_a_model_that_deepspeed_spreads_is_refused(monkeypatch: pytest.MonkeyPatch):
    model, ids = fastspec.patch(tiny_model("llama")), torch.arange(5, 12)[None]
    monkeypatch.setattr(compat, "is_deepspeed_zero3_enabled", lambda: True)
    model.generate(ids, max_new_tokens=2, assistant="nasd")  # by one process alone
    monkeypatch.setattr(compat, "_are_several", lambda: True)
    with pytest.raises(fastspec.Unsupported, match="ZeRO 3 has spread this LlamaForCausalLM over several processes"):
        model.generate(ids, max_new_tokens=2, assistant="nasd")


def test_all_of_torchs_dropouts_are_known():
    kinds = {kind for kind in vars(dropout).values() if isinstance(kind, type) and issubclass(kind, nn.Module)}
    assert {kind for kind in kinds if kind is not nn.Module and not kind.__name__.startswith("_")} == set(DROPOUTS)
