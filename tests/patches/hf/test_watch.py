"""A model that is watched: whatever parts rounds from it is seen."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from helpers.models import tiny_model
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.modules import module as torch_module
from transformers.models.llama import modeling_llama

import fastspec
from fastspec.patches.hf.changes import Identities, ModuleSettings, weight_places
from fastspec.patches.hf.modes import mode_for

FORMER: list[torch.Tensor] = []
FAMILIES = ("llama", "qwen2", "gpt2", "mixtral", "gemma3_text")


def leaf(model: Any, number: int) -> tuple[nn.Module, str, nn.Module]:
    """(parent, name, child) of one of a model's modules with weights."""
    every = [(parent, name, child) for parent in model.modules() for name, child in parent._modules.items()]
    found = [each for each in every if each[2] is not None and each[2]._parameters]
    return found[number % len(found)]


def module(model: Any, number: int) -> None:
    parent, name, child = leaf(model, number)
    setattr(parent, name, copy.deepcopy(child))


def parameter(model: Any, number: int) -> None:
    child = leaf(model, number)[2]
    name, held = next(iter(child._parameters.items()))
    setattr(child, name, nn.Parameter(held.detach().clone()))


def data(model: Any, number: int) -> None:
    held = next(iter(leaf(model, number)[2]._parameters.values()))
    FORMER.append(held.data)  # else the next one might come to lie where it lay
    held.data = held.data.clone()


def hook(model: Any, number: int) -> None:
    leaf(model, number)[2].register_forward_hook(lambda module, inputs, output: output)


def before(model: Any, number: int) -> None:
    leaf(model, number)[2].register_forward_pre_hook(lambda module, inputs: inputs)


def forward(model: Any, number: int) -> None:
    child = leaf(model, number)[2]
    child.forward = MethodType(lambda self, *given, **named: type(self).forward(self, *given, **named), child)


def kind(model: Any, number: int) -> None:
    child = leaf(model, number)[2]
    former = type(child)
    child.__class__ = type(
        "Mine", (former,), {"forward": lambda self, *given, **named: former.forward(self, *given, **named)}
    )


def more(model: Any, number: int) -> None:
    leaf(model, number)[0].add_module("another", nn.Linear(2, 2))


def buffer(model: Any, number: int) -> None:
    held = next((each for each in model.modules() if each._buffers), None)
    if held is None:
        leaf(model, number)[2].register_buffer("another", torch.zeros(2))
    else:
        next(iter(held._buffers.values())).mul_(1.5)


def attribute(model: Any, number: int) -> None:
    child = leaf(model, number)[2]
    child.remark = getattr(child, "remark", 0.5) + 1.0


def attribute_inside(model: Any, number: int) -> None:
    child = leaf(model, number)[2]
    child.remarks = getattr(child, "remarks", [])
    child.remarks.append(number)


def configured(model: Any, number: int) -> None:
    model.config.initializer_range += 0.001


def nothing(model: Any, number: int) -> None:
    pass


def unseen(model: Any, number: int) -> None:
    """What has no say in rounds, or is not looked at."""
    leaf(model, number)[2]._remark = number


CHANGES: dict[str, Callable[[Any, int], None]] = {
    each.__name__: each
    for each in (
        module,
        parameter,
        data,
        hook,
        before,
        forward,
        kind,
        more,
        buffer,
        attribute,
        attribute_inside,
        configured,
        nothing,
        unseen,
    )
}


def parts(model: Any) -> Any:
    return mode_for(model), weight_places(model), ModuleSettings(model, list(model.modules())).values


@given(
    family=st.sampled_from(FAMILIES),
    patched=st.booleans(),
    steps=st.lists(st.tuples(st.sampled_from(sorted(CHANGES)), st.integers(0, 99)), min_size=1, max_size=4),
)
def test_what_holds_is_what_it_was(family: str, patched: bool, steps: list[tuple[str, int]]) -> None:
    model = tiny_model(family)
    model = fastspec.patch(model) if patched else model
    watch, was = Identities(model), parts(model)
    assert watch.holds()
    changed = False
    for name, number in steps:
        CHANGES[name](model, number)
        changed = changed or name not in ("nothing", "unseen")
        assert watch.holds() <= (parts(model) == was)
        assert not (changed and watch.holds())
    if not changed:
        assert Identities(model).holds()


@pytest.mark.parametrize("where", ["function", "method", "class", "global hook", "torch", "configuration"])
def test_what_is_not_the_modules_own_is_seen(where: str, monkeypatch) -> None:
    model = fastspec.patch(tiny_model())
    watch, was = Identities(model), parts(model)
    if where == "function":
        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda *given, **named: None)
    elif where == "method":
        monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: x)
    elif where == "class":
        monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "extra_repr", lambda self: "mine")
    elif where == "global hook":
        handle = torch_module.register_module_forward_hook(lambda module, inputs, output: None)
    elif where == "torch":
        monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x)
    else:
        monkeypatch.setitem(vars(model.config), "model_type", "another")
    assert not watch.holds() and parts(model) != was
    monkeypatch.undo()
    if where == "global hook":
        handle.remove()
    assert watch.holds()


def test_nothing_holds_where_adapters_switch_and_calls_change_nothing() -> None:
    model = fastspec.patch(tiny_model())
    watch = Identities(model)
    model.generate(torch.arange(5, 12)[None], assistant="nasd", max_new_tokens=4)
    with torch.no_grad():
        next(model.parameters()).mul_(2)  # in place, where it lies
    assert watch.holds()
    model.model.layers[0].mlp._active_adapter = ["default"]
    assert not watch.holds() and not Identities(model).holds()


@pytest.mark.parametrize("size", [1, 1 << 16])
def test_values_of_a_small_buffer_are_watched_even_where_torch_counts_no_change(size: int) -> None:
    model = fastspec.patch(tiny_model())
    model.model.register_buffer("table", torch.zeros(size))
    watch = Identities(model)
    model.model.table.data[-1] = 1.0
    assert not watch.holds()
