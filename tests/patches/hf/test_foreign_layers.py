"""Layers that are quantised, sharded, offloaded or watched keep their own forward, among layers that are packed and
captured."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.captured import stand_in
from helpers.generate import TREE, prompts
from helpers.models import tiny_head, tiny_model
from helpers.patch import assert_same, snapshot
from torch import Tensor, nn

import fastspec
from fastspec.generation.decoder_layer import is_plain
from fastspec.kernels.linear import reference
from fastspec.kernels.linear.reference import GELU_TANH, SILU, Activation, joined
from fastspec.patches.backends import TORCH
from fastspec.patches.hf.layer_weights import pack_model
from fastspec.patches.hf.layers import mlp_of
from fastspec.patches.hf.modes import adapter_for

accelerate = pytest.importorskip("accelerate")
ASSISTANTS = "autoregressive", TREE
OPTIONS = {"do_sample": False, "max_new_tokens": 14}


@pytest.fixture(autouse=True)
def captures(monkeypatch):
    """A backend that packs weights and captures rounds, as on CUDA."""
    stand_in(monkeypatch)


class Quantised(nn.Linear):
    """Stands for a library's quantised layer: its weight is eight bits and a scale, which only its own forward knows
    how to multiply."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False)
        self.register_buffer("scale", layer.weight.detach().abs().amax(1, keepdim=True) / 127)
        self.weight = nn.Parameter((layer.weight.detach() / self.scale).round())
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """x times what the weight stands for."""
        self.calls += 1
        return nn.functional.linear(x, self.weight * self.scale)


class Linear8bitLt(Quantised):
    """Stands for bitsandbytes' layer of that name, which is known by it: with a threshold its forward waits for the
    device."""

    def __init__(self, layer: nn.Linear, threshold: float) -> None:
        super().__init__(layer)
        self.state = SimpleNamespace(threshold=threshold)


def storages(*layers: nn.Module) -> int:
    return len({layer.weight.untyped_storage().data_ptr() for layer in layers})


@pytest.mark.each_value  # the families pack alike
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(
    "names", [("self_attn.q_proj",), ("self_attn.o_proj", "mlp.up_proj"), ("mlp.gate_proj", "mlp.down_proj")], ids=str
)
def test_a_quantised_layer_multiplies_by_itself(family, names):
    model = tiny_model(family)
    layers = [model.model.layers[0], model.model.layers[2]]
    for layer in layers:
        for name in names:
            layer.set_submodule(name, Quantised(layer.get_submodule(name)))
    own = [layer.get_submodule(name) for layer in layers for name in names]
    inputs = prompts(5, 9)
    expected, before = model.generate(**inputs, **OPTIONS), snapshot(model)
    with fastspec.patched(model, eagle3=tiny_head(model)):
        assert fastspec.report(model).mode == f"adapter {family}"
        groups = [("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj"))]
        for index, layer in enumerate(model.model.layers):
            for block, parts in groups:
                kept = index in (0, 2) and any(f"{block}.{part}" in names for part in parts)
                found = storages(*(getattr(getattr(layer, block), part) for part in parts))
                assert found == (len(parts) if kept else 1)
        for assistant in ASSISTANTS:
            counts = [layer.calls for layer in own]
            assert torch.equal(model.generate(**inputs, **OPTIONS, assistant=assistant), expected)
            assert all(layer.calls > count + 2 for layer, count in zip(own, counts, strict=True))
            assert fastspec.report(model).last.replays > 0
    after = snapshot(model)
    for each in (before, after):
        del (
            each["storage"],
            each["attributes"],
        )  # packed weights went to storages of their own, and the layers count their calls
    assert_same(before, after)


def offload_all(model: Any) -> None:
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


def offload_a_block(model: Any) -> None:
    accelerate.cpu_offload(model.model.layers[2].mlp, execution_device=torch.device("cpu"))


def map_devices(model: Any) -> None:
    accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)


PLACES = {
    "all": (offload_all, "generic (LlamaForCausalLM has a forward hook)"),
    "a block": (offload_a_block, "adapter llama"),
    "mapped": (map_devices, "generic (LlamaForCausalLM has a forward hook)"),
}


@pytest.mark.parametrize("threshold", [0.0, 6.0])
def test_rounds_that_ask_for_outliers_are_not_captured(threshold: float) -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp.up_proj = Linear8bitLt(model.model.layers[1].mlp.up_proj, threshold)
    expected = model.generate(**prompts(5, 9), **OPTIONS)
    with fastspec.patched(model, eagle3=tiny_head(model, copy_lm_head=False)):
        for assistant in ASSISTANTS:
            assert torch.equal(model.generate(**prompts(5, 9), **OPTIONS, assistant=assistant), expected)
            assert (fastspec.report(model).last.replays == 0) == (threshold > 0)


@pytest.mark.some("all", "mapped")
@pytest.mark.parametrize("where", PLACES)
def test_an_offloaded_model_gives_the_same_tokens_through_its_hooks(where):
    place, mode = PLACES[where]
    plain, model = tiny_model(), tiny_model()
    head, inputs = tiny_head(model), prompts(5, 9)
    place(model)
    hooked = [module for module in model.modules() if hasattr(module, "_hf_hook")]
    called: list[Any] = []
    for module in hooked:
        run = module._hf_hook.pre_forward
        module._hf_hook.pre_forward = lambda at, *args, _run=run, **kwargs: (
            called.append(at) or _run(at, *args, **kwargs)
        )
    expected = plain.generate(**inputs, **OPTIONS)
    assert torch.equal(model.generate(**inputs, **OPTIONS), expected)
    through, before = {id(module) for module in called}, snapshot(model, values=False)
    assert len(through) >= 3
    with fastspec.patched(model, eagle3=head):
        report = fastspec.report(model)
        assert report.mode == mode and report.device == "cpu"
        for assistant in ASSISTANTS:
            called.clear()
            assert torch.equal(model.generate(**inputs, **OPTIONS, assistant=assistant), expected)
            assert {id(module) for module in called} == through
            assert fastspec.report(model).last.replays == 0  # a replay would not move the weights
    after = snapshot(model, values=False)
    for each in (before, after):
        if where != "mapped":  # accelerate itself makes the parameters anew at every pass
            del each["parts"]
        if where == "a block":  # the other layers were packed
            del each["storage"]
    assert_same(before, after)
    assert torch.equal(model.generate(**inputs, **OPTIONS), expected)


@pytest.mark.parametrize("name", ["self_attn.q_norm", "self_attn.v_proj", "input_layernorm", "mlp.act_fn"])
def test_a_hook_on_any_part_is_called_at_every_pass(name):
    model = tiny_model("qwen3")
    inputs, calls = prompts(5, 9), []
    model.model.layers[2].get_submodule(name).register_forward_hook(
        lambda module, args, out: calls.append(1) or out * 0.5
    )
    expected = model.generate(**inputs, **OPTIONS)
    assert not torch.equal(expected, tiny_model("qwen3").generate(**inputs, **OPTIONS))
    with fastspec.patched(model, eagle3=tiny_head(model)):
        for assistant in ASSISTANTS:
            calls.clear()
            assert torch.equal(model.generate(**inputs, **OPTIONS, assistant=assistant), expected)
            last = fastspec.report(model).last
            assert last.replays == 0 and len(calls) == last.rounds + 1  # the prompt's pass too


@pytest.fixture
def mesh():
    """Of this process alone."""
    dist = pytest.importorskip("torch.distributed")
    if not dist.is_available():
        pytest.skip("torch was built without torch.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_sharded_layer_multiplies_by_itself(mesh):
    """Tensor parallelism: weights that are DTensors, with hooks that hand their layers the like."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plain, model = tiny_model(), tiny_model()
    head, inputs = tiny_head(model), prompts(5, 9)
    columns, rows = ("self_attn.q_proj", "mlp.gate_proj"), ("self_attn.o_proj", "mlp.down_proj")
    plan = {name: ColwiseParallel() for name in columns} | {name: RowwiseParallel() for name in rows}
    for layer in model.model.layers[1:3]:
        parallelize_module(layer, mesh, plan)
    assert isinstance(model.model.layers[1].mlp.gate_proj.weight, DTensor)
    expected = plain.generate(**inputs, **OPTIONS)
    with fastspec.patched(model, eagle3=head):
        for index, layer in enumerate(model.model.layers):
            attn, mlp = layer.self_attn, layer.mlp
            if index not in (1, 2):
                assert storages(attn.q_proj, attn.k_proj, attn.v_proj) == storages(mlp.gate_proj, mlp.up_proj) == 1
        for assistant in ASSISTANTS:
            assert torch.equal(model.generate(**inputs, **OPTIONS, assistant=assistant), expected)
    assert isinstance(model.model.layers[1].mlp.gate_proj.weight, DTensor)
    lone = nn.Linear(4, 4)
    assert is_plain(lone)
    lone.weight = nn.Parameter(
        distribute_tensor(lone.weight.detach(), mesh, [Replicate()])
    )  # without a hook that would tell
    assert not is_plain(lone)


def test_experts_with_scales_keep_their_own_forward():
    """As quantised mixtures have them: the backend's op knows packed weights and nothing beside."""
    from fastspec.patches.hf.families import ADAPTERS
    from fastspec.patches.hf.layer_weights import is_mixture

    row, mlp = ADAPTERS["mixtral"].mixture, tiny_model("mixtral").model.layers[0].mlp
    assert row is not None and is_mixture(row, mlp)
    mlp.experts.gate_up_proj_scale = nn.Parameter(torch.ones(4, 1, 1))
    assert not is_mixture(row, mlp)


@pytest.mark.parametrize("kind, gate", [("llama", SILU), ("gemma3_text", GELU_TANH), ("arcee", None)])
def test_gates_that_the_kernels_have_are_fused(kind: str, gate: Activation | None) -> None:
    model, calls = tiny_model(kind, num_hidden_layers=1, layer_types=["full_attention"]), []

    def spy(x: Tensor, weight: Tensor, bias: Tensor | None, kind: Activation) -> Tensor:
        calls.append(kind)
        return reference.gate_up(x, weight, bias, kind)

    pack_model(model)
    mlp, x = model.model.layers[0].mlp, torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(0))
    found = joined(mlp_of(adapter_for(model), mlp, replace(TORCH, gate_up=spy))(x))
    assert torch.equal(found, mlp(x)) and calls == ([] if gate is None else [gate])
