"""Heads that draft in bfloat16 for a target in fp32: the same tokens, weights that follow the head's, and nothing held
twice for long."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from helpers.generate import TREE, prompts
from helpers.models import tiny_head, tiny_model
from torch import nn

import fastspec
from fastspec.errors import FastSpecError
from fastspec.generation.heads.bound import BoundHead, follow, followed, lowered
from fastspec.generation.heads.module import EagleHead, HeadConfig
from fastspec.kernels.native import build
from fastspec.patches import backends
from fastspec.patches.assistants import registry
from fastspec.patches.assistants.heads import load_head, parts_of

BF16 = torch.bfloat16


def bound_head(model=None, **over) -> BoundHead:
    model = model or tiny_model()
    return BoundHead.of(load_head(tiny_head(model, **over), model))


def test_who_drafts_itself():
    model = tiny_model()
    head = bound_head(model)
    config = HeadConfig(
        kind="eagle",
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=97,
        draft_vocab_size=97,
        target_hidden_size=64,
    )
    borrowing = BoundHead.of(load_head(EagleHead(config), model))
    assert lowered(head, None) is head and lowered(borrowing, BF16) is borrowing
    half = BoundHead.of(copy.deepcopy(head.module).to(BF16))
    assert lowered(half, BF16) is half


def test_a_twin_has_the_heads_weights_rounded_and_shares_what_is_not_its_own():
    head = bound_head()
    twin = lowered(head, BF16)
    assert twin is not head and lowered(head, BF16) is twin
    assert all(
        torch.equal(mine, theirs.to(BF16))
        for mine, theirs in zip(twin.module.parameters(), head.module.parameters(), strict=True)
    )
    assert twin.binding is head.binding and torch.equal(twin.module.d2t, head.module.d2t)
    assert (
        {parameter.dtype for parameter in head.module.parameters()} == {torch.float32} == {twin.module.inv_freq.dtype}
    )


@torch.no_grad()
def test_a_twin_follows_its_head():
    head = bound_head()
    twin = lowered(head, BF16)
    place = twin.module.fc.weight.data_ptr()
    head.module.fc.weight.mul_(2)
    head.module.norm.weight.data = head.module.norm.weight.data + 1  # which no counter of changes shows
    assert not torch.equal(twin.module.fc.weight, head.module.fc.weight.to(BF16))
    follow(twin)
    assert torch.equal(twin.module.fc.weight, head.module.fc.weight.to(BF16))
    assert torch.equal(twin.module.norm.weight, head.module.norm.weight.to(BF16))
    assert twin.module.fc.weight.data_ptr() == place
    head.module.fc.weight.zero_()
    assert lowered(head, BF16) is twin and not bool(twin.module.fc.weight.any())
    follow(head)  # no twin: nothing happens


def test_another_binding_makes_another_twin():
    model = tiny_model()
    head = bound_head(model)
    twin = lowered(head, BF16)
    model.set_input_embeddings(nn.Embedding(97, 64))
    moved = followed(head, parts_of(model))
    other = lowered(moved, BF16)
    assert other is not twin and lowered(moved, BF16) is other and lowered(moved, None) is moved
    assert other.binding.embedding is model.get_input_embeddings()


def test_a_model_and_its_head_are_freed_though_the_embedding_reaches_the_model():
    model = tiny_model()
    head = bound_head(model)
    model.get_input_embeddings().register_forward_hook(lambda *_, model=model, head=head: None)
    gone = weakref.ref(lowered(head, BF16)), weakref.ref(model)
    del model, head
    gc.collect()
    assert [each() for each in gone] == [None, None]


def test_copies_have_no_twin_and_make_their_own():
    head = bound_head()
    twin = lowered(head, BF16)
    for other in (copy.deepcopy(head), pickle.loads(pickle.dumps(head))):
        assert other.derived.lowered is None and lowered(other, BF16) is not twin
    assert lowered(head, BF16) is twin


@torch.no_grad()
def test_a_twin_follows_what_is_no_weight():
    head = bound_head()
    twin = lowered(head, BF16)
    head.module.d2t = head.module.d2t + 1
    head.module.set_rope(torch.arange(1, 9).float() * 0.3, 1.5)
    assert lowered(head, BF16) is twin and twin.module.d2t is head.module.d2t
    assert twin.module.inv_freq is head.module.inv_freq and twin.module.rope_scale == 1.5


@torch.no_grad()
def test_a_twin_follows_weights_that_are_shared_no_more():
    head = bound_head()
    mlp = head.module.layers[0].mlp
    mlp.up_proj.weight = mlp.gate_proj.weight
    twin = lowered(head, BF16)
    mlp.up_proj.weight = nn.Parameter(torch.randn_like(mlp.gate_proj.weight))
    assert lowered(head, BF16) is twin
    for name, weight in head.module.named_parameters():
        assert torch.equal(twin.module.get_parameter(name), weight.to(BF16))


def test_a_twin_copies_nothing_that_its_head_keeps_besides():
    """A trainer's lock cannot be copied, and its teacher would take as much memory again."""
    head, teacher = bound_head(), [tiny_model()]
    head.module.lock, head.module.teacher = threading.Lock(), teacher
    twin = lowered(head, BF16)
    assert twin is not head and twin.module.teacher is teacher and twin.module.binding is None


@torch.no_grad()
def test_a_head_of_other_modules_gets_a_twin_of_them_or_drafts_itself():
    head = bound_head()
    twin = lowered(head, BF16)
    head.module.lm_head, head.module.d2t = nn.Linear(64, 80, bias=False), head.module.d2t[:80]
    smaller = lowered(head, BF16)
    assert smaller is not twin and smaller.module.lm_head.weight.shape == (80, 64) and not follow(twin)
    head.module.layers[0].self_attn.q_proj.bias = nn.Parameter(torch.ones(64))
    assert torch.equal(lowered(head, BF16).module.layers[0].self_attn.q_proj.bias, torch.ones(64, dtype=BF16))
    head.module.layers[0].input_layernorm.weight = head.module.layers[0].hidden_norm.weight  # one for both
    head.module.layers[0].hidden_norm.weight.fill_(3)
    assert float(lowered(head, BF16).module.layers[0].input_layernorm.weight.mean()) == 3
    hook = head.module.fc.register_forward_hook(lambda *_: None)
    assert lowered(head, BF16) is head
    hook.remove()
    assert lowered(head, BF16) is not head
    head.module.extra = nn.Linear(2, 2)  # a module that no configuration names
    assert lowered(head, BF16).module.extra.weight.dtype is BF16
    del head.module.extra
    assert not hasattr(lowered(head, BF16).module, "extra")
    torch.nn.utils.parametrizations.weight_norm(head.module.fc)
    assert lowered(head, BF16) is head


@pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
@pytest.mark.parametrize("rows", [False, True])
def test_a_twin_that_was_made_in_inference_mode_is_good_outside(rows):
    plain, model = tiny_model(), tiny_model()
    over = {"own_lm_head": False, "target_rows": True, "draft_vocab_size": 40} if rows else {}
    fastspec.patch(model, eagle3=tiny_head(model, **over), backend="cpp")
    options = {**prompts(9), "max_new_tokens": 12, "do_sample": False}
    want = plain.generate(**options)
    with torch.inference_mode():
        assert torch.equal(model.generate(**options, assistant=TREE), want)
    assert torch.equal(model.generate(**options, assistant=TREE), want)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(-1)
    assert torch.equal(model.generate(**options, assistant=TREE), model.generate(**options))


@pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
def test_a_machine_whose_bfloat16_kernels_fail_drafts_in_fp32(monkeypatch):
    def check(ops, dtype, device):
        if dtype is BF16:
            raise FastSpecError("they differ")

    monkeypatch.setattr("fastspec.patches.session.self_check", check)
    seen: list[BoundHead] = []
    real = registry.EagleDrafter
    monkeypatch.setattr(
        registry, "EagleDrafter", lambda head, *args, **options: seen.append(head) or real(head, *args, **options)
    )
    model = tiny_model()
    fastspec.patch(model, eagle3=tiny_head(model), backend="cpp")
    with pytest.warns(RuntimeWarning, match="they differ"):
        model.generate(**prompts(9), max_new_tokens=6, do_sample=False, assistant=TREE)
    assert seen[0].module.fc.weight.dtype is torch.float32


@torch.no_grad()
def test_a_twin_drafts_with_the_targets_rows_as_they_are_now():
    model = tiny_model()
    head = bound_head(model, own_lm_head=False, target_rows=True, draft_vocab_size=40)
    head.module.lm_head_map.weight.copy_(torch.eye(64))
    twin = lowered(head, BF16)
    rows = model.get_output_embeddings().weight
    assert torch.equal(twin.readout().weight, rows[:40].to(BF16)) and head.derived.readout is None
    rows.mul_(3)
    follow(twin)
    assert torch.equal(twin.readout().weight, rows[:40].to(BF16))


@pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
@pytest.mark.parametrize("sampled", [False, True])
def test_the_tokens_are_the_same(monkeypatch, sampled):
    """Greedy ones are those of plain generate; of two calls the second drafts with the head as it was trained in
    between."""
    seen: list[BoundHead] = []
    real = registry.EagleDrafter
    monkeypatch.setattr(
        registry, "EagleDrafter", lambda head, *args, **options: seen.append(head) or real(head, *args, **options)
    )
    plain, model = tiny_model(), tiny_model()
    head = tiny_head(model)
    fastspec.patch(model, eagle3=head, backend="cpp")
    options = {**prompts(9, 5), "max_new_tokens": 24, "do_sample": sampled}
    ours = []
    for _ in range(2):
        torch.manual_seed(1)
        ours.append(model.generate(**options, assistant=TREE))
        with torch.no_grad():
            head.lm_head.weight.neg_()  # the worst drafts instead of the best
    assert all(each is seen[0] for each in seen) and seen[0].module.fc.weight.dtype is BF16
    last = fastspec.report(model).last
    assert last.acceptance_length == pytest.approx(1.0, abs=0.3)
    if not sampled:
        want = plain.generate(**options)
        assert all(torch.equal(each, want) for each in ours)


@pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
def test_only_the_cpp_kernels_draft_so():
    assert backends.cpp_ops().drafts_in is BF16
    assert backends.TORCH.drafts_in is None and backends.TORCH_ONEDNN.drafts_in is None
