"""Heads that draft in bfloat16 for a target in fp32: the same tokens, weights that follow the head's, and nothing held twice for long."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from helpers_generate import TREE, prompts
from helpers_models import tiny_head, tiny_model
from torch import nn

import fastspec
from fastspec.generation.drafters.eagle import lowered as module
from fastspec.generation.drafters.eagle.head import EagleHead, HeadConfig
from fastspec.generation.drafters.eagle.lowered import follow, lowered
from fastspec.kernels.native import build
from fastspec.patches import backends
from fastspec.patches.assistants import registry
from fastspec.patches.assistants.heads import load_head

BF16 = torch.bfloat16


def bound_head(model=None, **over) -> EagleHead:
    model = model or tiny_model()
    return load_head(tiny_head(model, **over), model)


def test_who_drafts_itself():
    model = tiny_model()
    head = bound_head(model)
    config = HeadConfig(
        kind="eagle", hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=97,
        draft_vocab_size=97, target_hidden_size=64,
    )  # fmt: skip
    borrowing = load_head(EagleHead(config), model)
    assert lowered(head, None) is head and lowered(borrowing, BF16) is borrowing
    half = copy.deepcopy(head).to(BF16)
    assert lowered(half, BF16) is half


def test_a_twin_has_the_heads_weights_rounded_and_shares_what_is_not_its_own():
    head = bound_head()
    twin = lowered(head, BF16)
    assert twin is not head and lowered(head, BF16) is twin
    assert all(torch.equal(mine, theirs.to(BF16)) for mine, theirs in zip(twin.parameters(), head.parameters(), strict=True))
    assert twin.__dict__["_embed_tokens"] is head.__dict__["_embed_tokens"] and torch.equal(twin.d2t, head.d2t)
    assert {parameter.dtype for parameter in head.parameters()} == {torch.float32} == {twin.inv_freq.dtype}


@torch.no_grad()
def test_a_twin_follows_its_head():
    head = bound_head()
    twin = lowered(head, BF16)
    place = twin.fc.weight.data_ptr()
    head.fc.weight.mul_(2)
    head.norm.weight.data = head.norm.weight.data + 1  # which no counter of changes shows
    assert not torch.equal(twin.fc.weight, head.fc.weight.to(BF16))
    follow(twin)
    assert torch.equal(twin.fc.weight, head.fc.weight.to(BF16)) and torch.equal(twin.norm.weight, head.norm.weight.to(BF16))
    assert twin.fc.weight.data_ptr() == place
    head.fc.weight.zero_()
    assert lowered(head, BF16) is twin and not bool(twin.fc.weight.any())
    follow(head)  # no twin: nothing happens


def test_another_binding_makes_another_twin_and_a_head_that_is_gone_leaves_none():
    head = bound_head()
    twin = lowered(head, BF16)
    head.bind(nn.Embedding(97, 64), None)
    other = lowered(head, BF16)
    assert other is not twin and module._twins[head] is other
    follow(twin)
    gone = weakref.ref(other)
    del head, other
    gc.collect()
    assert gone() is None
    follow(twin)  # its head is gone: it stays as it was


@torch.no_grad()
def test_a_twin_drafts_with_the_targets_rows_as_they_are_now():
    model = tiny_model()
    head = bound_head(model, own_lm_head=False, target_rows=True, draft_vocab_size=40)
    head.lm_head_map.weight.copy_(torch.eye(64))
    twin = lowered(head, BF16)
    rows = model.get_output_embeddings().weight
    assert torch.equal(twin.readout().weight, rows[:40].to(BF16)) and head.__dict__["_joined"] is None
    rows.mul_(3)
    follow(twin)
    assert torch.equal(twin.readout().weight, rows[:40].to(BF16))


@pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
@pytest.mark.parametrize("sampled", [False, True])
def test_the_tokens_are_the_same(monkeypatch, sampled):
    """Greedy ones are those of plain generate; of two calls the second drafts with the head as it was trained in between."""
    seen: list[EagleHead] = []
    real = registry.EagleDrafter
    monkeypatch.setattr(registry, "EagleDrafter", lambda head, *args, **options: seen.append(head) or real(head, *args, **options))
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
    assert all(each is seen[0] for each in seen) and seen[0].fc.weight.dtype is BF16
    last = fastspec.report(model).last
    assert last.acceptance_length == pytest.approx(1.0, abs=0.3)
    if not sampled:
        want = plain.generate(**options)
        assert all(torch.equal(each, want) for each in ours)


@pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
def test_only_the_cpp_kernels_draft_so():
    assert backends.build_cpp() is None and backends.cpp_ops().drafts_in is BF16
    assert backends.TORCH.drafts_in is None and backends.TORCH_ONEDNN.drafts_in is None
