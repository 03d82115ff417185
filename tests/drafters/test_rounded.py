"""Heads in 8 bits: codes near their weights, the drafts of the weights that these stand for, and the same tokens."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.devices import ON_CUDA
from helpers.gemma4 import assistant_for, gemma4
from helpers.generate import EAGLE1, TREE, answer, kept, prompts, seer, seer1, shallow_model
from helpers.heads import as_eagle3, write
from helpers.models import tiny_head, tiny_model
from helpers.patch import assert_same, snapshot
from helpers.stored import halves
from torch import nn

import fastspec
from fastspec.default_trees import TreeShape
from fastspec.errors import Unsupported
from fastspec.generation.drafters.head_drafter import EagleDrafter
from fastspec.generation.heads.bound import BoundHead, rounded
from fastspec.generation.heads.rounded_linear import LINES, RoundedLinear
from fastspec.kernels.native import build
from fastspec.kernels.quantised.reference import E4M3, INT8, dequantised
from fastspec.patches.api import resources_of
from fastspec.patches.assistants import smaller_heads
from fastspec.patches.assistants.heads import load_head
from fastspec.patches.backends import TORCH, triton_ops
from fastspec.patches.session import session_of

OPTIONS: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases, norms, two layers": {
        "attention_bias": True,
        "mlp_bias": True,
        "fc_bias": True,
        "qk_norm": True,
        "fc_norm": True,
        "num_hidden_layers": 2,
    },
    "rows of the target": {"own_lm_head": False, "target_rows": True, "draft_vocab_size": 40},
    "the target's LM head": {"own_lm_head": False},
    "eagle": EAGLE1,
}


def bound(model: Any, **over: Any) -> BoundHead:
    return BoundHead.of(load_head(tiny_head(model, **over), model))


@pytest.mark.parametrize("kind", [INT8, E4M3], ids=["int8", "e4m3"])
def test_codes_are_the_nearest(kind: Any) -> None:
    torch.manual_seed(0)
    weight = torch.randn(LINES + 65, 24) * torch.rand(LINES + 65, 1)
    weight[7] = 0
    made = RoundedLinear(weight, torch.ones(len(weight)), kind)
    back = dequantised(made.weight, torch.float32)
    # half a step of a line's scale, or half a unit in the last of e4m3's 3 places of mantissa
    half = made.scales / 2 if kind is INT8 else torch.maximum(weight.abs() / 16, made.scales * 2**-10)
    assert bool(((back - weight).abs() <= half * 1.001).all()) and not bool(back[7].any())
    torch.testing.assert_close(made(torch.eye(24)), back.T + 1)
    assert made.far == pytest.approx(float((back - weight).square().sum()), rel=1e-4)
    cast = copy.deepcopy(made).to(torch.float16)
    assert cast.like.dtype is cast.bias.dtype is torch.float16 and cast.scales.dtype is torch.float32
    assert torch.equal(cast.codes, made.codes)


@torch.no_grad()
def test_codes_are_those_that_are_nearer() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(256, 9)
    assert RoundedLinear.of(layer).kind is INT8
    layer.weight.copy_(0.5 ** (torch.arange(256) % 12))  # of unlike sizes, each with one bit of mantissa
    assert RoundedLinear.of(layer).kind is E4M3


@torch.no_grad()
@pytest.mark.parametrize("over", HEADS.values(), ids=HEADS)
def test_drafts_are_those_of_the_weights_that_the_codes_stand_for(over: dict[str, Any]) -> None:
    model = tiny_model()
    head = bound(model, **over)
    before = {name: weight.clone() for name, weight in head.module.state_dict().items()}
    twin, same = rounded(head), copy.deepcopy(head)
    assert twin.module.is_rounded and rounded(twin) is twin and twin.binding is head.binding
    assert not any(isinstance(each, RoundedLinear) for each in (*model.modules(), *head.module.modules()))
    for name, layer in twin.module.named_modules():
        if isinstance(layer, RoundedLinear):
            weight = same.module.get_submodule(name).weight
            assert not torch.equal(weight, dequantised(layer.weight, torch.float32))
            weight.copy_(dequantised(layer.weight, torch.float32))
    left = [name for name, each in twin.module.named_modules() if isinstance(each, nn.Linear)]
    assert left == (["lm_head_map"] if over.get("target_rows") else [])
    ids = torch.randint(6, 90, (1, 9), generator=torch.Generator().manual_seed(1))
    config = head.config
    width = len(config.taps) * config.target_hidden_size if config.kind == "eagle3" else config.hidden_size
    features, found = torch.randn(1, 8, width), []
    for each, ops in ((twin, TORCH), (same, TORCH), (twin, replace(TORCH, stored_parts=halves))):
        drafter = EagleDrafter(each, TreeShape(12, 3, 3), rows=1, capacity=40, ops=ops)
        drafter.begin(ids[:, :8], torch.tensor([8]), features, ids[:, 8])
        found.append((drafter.readout, drafter.program.logits(drafter.readout), drafter.propose(8).tokens))
    for one, *others in zip(*found, strict=True):
        for other in others:
            torch.testing.assert_close(one, other)
    after = head.module.state_dict()
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())


@torch.no_grad()
@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled on CUDA")),
        pytest.param(
            "cuda",
            marks=ON_CUDA,
        ),
    ],
)
def test_the_triton_kernels_multiply_the_codes(device: str) -> None:
    model = tiny_model().half().to(device)
    given = tiny_head(model.cpu(), attention_bias=True).half().to(device)
    head = rounded(BoundHead.of(load_head(given, model.to(device))))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(6, 90, (1, 9), generator=generator).to(device)
    features, counts = torch.randn(1, 8, 192, generator=generator).half().to(device), torch.tensor([8], device=device)
    found = []
    for ops in (TORCH, replace(triton_ops(), captures=False)):
        drafter = EagleDrafter(head, TreeShape(6, 2, 2), rows=1, capacity=40, ops=ops)
        drafter.begin(ids[:, :8], counts, features, ids[:, 8])
        assert drafter.propose(8).tokens.shape == (1, 6)
        found.append(drafter.program.logits(drafter.readout[:, None]))
    # fp16 has 11 bits, and a pass rounds some 20 results to them, of which random errors add up to 5 roundings
    torch.testing.assert_close(*found, rtol=5 * 2**-11, atol=5 * 2**-11 * float(found[0].abs().max()))


CALLS: dict[str, tuple[Any, Any]] = {
    "eagle3": (seer, TREE),
    "eagle2": (seer1, fastspec.Eagle2(depth=3, top_k=2, total_tokens=7)),
    "eagle": (seer1, "eagle"),
}


@pytest.mark.some("eagle3", "eagle")
@pytest.mark.parametrize("name", CALLS)
def test_no_token_changes(name: str) -> None:
    plain, model = kept(shallow_model()), shallow_model()
    head, assistant = CALLS[name][0](model), CALLS[name][1]
    inputs, before = prompts(9, 4), snapshot(model)
    weights = {key: weight.clone() for key, weight in head.state_dict().items()}
    fastspec.patch(model, **{name: head}, backend="torch", head_bits=8)
    want = answer(plain, inputs, **OPTIONS)
    for way in (assistant, fastspec.ContinuousBatch(assistant, rows=1)):
        assert torch.equal(model.generate(**inputs, **OPTIONS, assistant=way), want)
    report = fastspec.report(model)
    assert report.head_bits == {name: 8} and f"the head of {name} in 8 bits" in str(report)
    assert report.kernels["stored_linears"] > 0
    fastspec.unpatch(model)
    assert_same(before, snapshot(model))
    assert all(torch.equal(weight, weights[key]) for key, weight in head.state_dict().items())


def test_sampled_answers_are_drawn_alike() -> None:
    model = shallow_model()
    answers = []
    for bits in (16, 8):
        with fastspec.patched(model, eagle3=tiny_head(model), backend="torch", head_bits=bits):
            torch.manual_seed(3)
            answers.append(model.generate(**prompts(9), max_new_tokens=16, do_sample=True, assistant=TREE))
    assert torch.equal(*answers)


def test_a_head_of_two_assistants_is_one() -> None:
    model = shallow_model()
    head = seer1(model)
    with fastspec.patched(model, eagle=head, eagle2=head, backend="torch", head_bits=8):
        held = session_of(model).resources
        assert held["eagle"] is held["eagle2"] and fastspec.report(model).head_bits == {"eagle": 8, "eagle2": 8}


def test_a_head_is_rounded_once() -> None:
    """What is trained later is not seen."""
    model = shallow_model()
    head = tiny_head(model)
    fastspec.patch(model, eagle3=head, backend="torch", head_bits=8)
    held = session_of(model).resources["eagle3"].module
    codes = held.fc.codes.clone()
    with torch.no_grad():
        head.fc.weight.neg_()
    model.generate(**prompts(9), **OPTIONS, assistant=TREE)
    assert session_of(model).resources["eagle3"].module is held and torch.equal(held.fc.codes, codes)


def test_a_head_of_files_is_held_in_8_bits_alone(tmp_path: Any) -> None:
    model = tiny_model(num_hidden_layers=7)  # the fewest that have the default taps
    head = tiny_head(model)
    write(tmp_path, *as_eagle3(head, None))
    fastspec.patch(model, eagle3=tmp_path, backend="torch", head_bits=8)
    held = session_of(model).resources["eagle3"].module
    assert not any(isinstance(each, nn.Linear) for each in held.modules())
    matrices = sum(each.weight.numel() for each in head.modules() if isinstance(each, nn.Linear))
    assert sum(each.codes.nbytes for each in held.modules() if isinstance(each, RoundedLinear)) == matrices


def test_a_model_that_was_cast_or_copied_or_patched_anew_keeps_its_head() -> None:
    model = shallow_model()
    fastspec.patch(model, eagle3=tiny_head(model), backend="torch", head_bits=8)
    want = model.generate(**prompts(9), **OPTIONS, assistant=TREE)
    twin = copy.deepcopy(model)
    assert torch.equal(twin.generate(**prompts(9), **OPTIONS, assistant=TREE), want)
    assert fastspec.report(twin).head_bits == {"eagle3": 8}
    given = resources_of(model)
    fastspec.unpatch(model)
    fastspec.patch(model, **given)
    assert torch.equal(model.generate(**prompts(9), **OPTIONS, assistant=TREE), want)
    assert fastspec.report(model).head_bits == {"eagle3": 8}
    model.to(torch.bfloat16).generate(**prompts(9), **OPTIONS, assistant=TREE)
    held = session_of(model).resources["eagle3"].module
    assert held.like.dtype is torch.bfloat16 and held.fc.scales.dtype is torch.float32


def test_a_quantised_models_own_layers_are_not_read_as_stored_for_its_heads_sake() -> None:
    model = shallow_model()
    with fastspec.patched(model, backend="torch", head_bits=8):
        ops = session_of(model).ops(model, smaller_heads.mode_for(model))
        assert ops.stored_linears is None and ops.drafts is None and ops.heads.stored_linears is not None
    with fastspec.patched(model, backend="torch"):
        assert session_of(model).ops(model, smaller_heads.mode_for(model)).heads is None


def test_wide_heads_are_read_in_8_bits_by_themselves_where_that_was_measured(monkeypatch) -> None:
    model = shallow_model()
    head = tiny_head(model)

    def told(**given: Any) -> dict[str, int]:
        with fastspec.patched(model, eagle3=head, backend="torch", **given):
            return fastspec.report(model).head_bits

    assert told() == {}
    monkeypatch.setattr(smaller_heads, "may_round", lambda *given: True)
    assert told() == {}
    monkeypatch.setattr(smaller_heads, "WIDE", model.config.hidden_size)
    assert told() == {"eagle3": 8} and told(head_bits=16) == {}


def test_devices_without_figures_round_no_head_by_themselves(monkeypatch) -> None:
    model = shallow_model().bfloat16()
    mode = smaller_heads.mode_for(model)
    assert not smaller_heads.may_round(model, mode, "auto")
    monkeypatch.setattr(smaller_heads, "is_timed", lambda model: True)
    monkeypatch.setattr(smaller_heads, "named", lambda backend, *given: backend)
    assert smaller_heads.may_round(model, mode, "auto") and smaller_heads.may_round(model, mode, "triton")
    assert not smaller_heads.may_round(model, mode, "torch")
    assert not smaller_heads.may_round(model, smaller_heads.mode_for(model.float()), "auto")


@pytest.mark.parametrize("bits", [4, "8", True, 8.0])
def test_other_bits_are_refused(bits: Any) -> None:
    model = shallow_model()
    with pytest.raises(Unsupported, match=r"head_bits=.*accepted are None, 8, 16"):
        fastspec.patch(model, eagle3=tiny_head(model), head_bits=bits)
    assert session_of(model) is None


def test_one_launch_is_refused() -> None:
    model = shallow_model()
    fastspec.patch(model, eagle3=tiny_head(model), backend="torch", head_bits=8)
    with pytest.raises(Unsupported, match=r"fused=True reads weights of 16 bits.*head_bits=16"):
        model.generate(**prompts(9), **OPTIONS, assistant=fastspec.Eagle3(4, 3, 12, fused=True))


def test_models_of_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = shallow_model()
    monkeypatch.setattr(smaller_heads, "group_of", lambda _: "a group")
    with pytest.raises(Unsupported, match=r"several processes.*head_bits=16"):
        fastspec.patch(model, eagle3=tiny_head(model), backend="torch", head_bits=8)
    fastspec.patch(model, eagle3=tiny_head(model), backend="torch", head_bits=16)


def test_a_gemma_4_assistant_is_refused() -> None:
    model = gemma4()
    with pytest.raises(Unsupported, match=r"mtp= is a Gemma4.*head_bits=16"):
        fastspec.patch(model, mtp=assistant_for(model), backend="torch", head_bits=8)


def test_layers_that_are_none_of_torchs_are_refused() -> None:
    class Other(nn.Module):
        weight = torch.zeros(64, 64)
        bias = None

    model = shallow_model()
    head = tiny_head(model)
    head.layers[0].self_attn.o_proj = Other()
    with pytest.raises(Unsupported, match=r"'eagle3' layers.0.self_attn.o_proj is a Other.*head_bits=16"):
        fastspec.patch(model, eagle3=head, backend="torch", head_bits=8)


@pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
def test_the_cpp_kernels_are_refused() -> None:
    model = shallow_model()
    with pytest.raises(Unsupported, match=r'no C\+\+ kernels.*backend="torch"'):
        fastspec.patch(model, eagle3=tiny_head(model), backend="cpp", head_bits=8)
    assert session_of(model) is None
