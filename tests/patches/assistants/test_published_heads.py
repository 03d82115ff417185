"""Published heads on a model: the states that they read, what is measured and said of them, and what is refused."""

from __future__ import annotations

import warnings
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from helpers.heads import as_eagle3, as_specforge, as_speculators, make_head, published_by_nvidia, write
from helpers.models import tiny_model
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.gemma4_assistant import Gemma4AssistantConfig

import fastspec
from fastspec.errors import CheckpointError, Unsupported
from fastspec.generation.heads.bound import BoundHead, followed
from fastspec.generation.heads.module import EagleHead
from fastspec.kernels.layer.reference import stack
from fastspec.patches.assistants import probe
from fastspec.patches.assistants.heads import inspect_head, load_head, parts_of
from fastspec.patches.assistants.probe import probe_head
from fastspec.patches.backends import TORCH
from fastspec.patches.hf.factory import language_model
from fastspec.patches.hf.model import HFModel
from fastspec.programs.cli.heads import verdict
from fastspec.programs.training.heads import checkpoint_tensors

LAYERS = 8
SIZES = {"vocab_size": 97, "hidden_size": 32, "target_hidden_size": 32}


@pytest.fixture(autouse=True)
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "PROBE_TOKENS", 12)


def target_of(**over: Any) -> Any:
    return tiny_model("llama", vocab_size=97, hidden_size=32, num_hidden_layers=LAYERS, num_attention_heads=4, **over)


def head_of(**changes: Any) -> EagleHead:
    torch.manual_seed(2)
    return make_head(**{**SIZES, "taps": (2, 4, LAYERS), "draft_vocab_size": 60, **changes})


def drafting(value: float, **changes: Any) -> EagleHead:
    """A head without layers to speak of: its state is `value` in every channel, and it drafts the target's token 0
    where its final norm leaves the sign, any other where it does not. Its norm turns the sign, and its LM head turns it
    back."""
    head = head_of(fc_bias=True, draft_vocab_size=97, num_key_value_heads=4, head_dim=8, **changes)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
        head.fc.bias.fill_(value)
        for norm in (head.norm, head.layers[0].input_layernorm, head.layers[0].hidden_norm):
            norm.weight.fill_(1.0)
        head.norm.weight.fill_(-1.0)
        head.lm_head.weight.fill_(1.0)
        head.lm_head.weight[0] = -1.0
    return head


def saying_nothing_but_0() -> Any:
    target = target_of()
    nn.init.zeros_(target.get_output_embeddings().weight)
    target.generation_config.eos_token_id = None
    return target


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gemma4_text", "olmo2", "cohere2", "gpt_oss"])
@torch.no_grad()
def test_a_tap_after_the_last_layer_is_before_the_norm_where_a_head_reads_it_so(kind: str) -> None:
    model = tiny_model(kind)
    ids, seen = torch.tensor([[5, 17, 3, 44, 9]]), list[torch.Tensor]()
    depth = model.config.num_hidden_layers
    hook = model.model.norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    expected = model(ids, output_hidden_states=True).hidden_states[depth]
    hook.remove()
    for before, ops in product((True, False), (TORCH, replace(TORCH, stack=stack))):  # layer by layer, and whole layers
        target = language_model(model, None, rows=1, capacity=9, tail=1, taps=(1, depth), ops=ops, before_norm=before)
        _, features = target.prefill(ids, torch.tensor([5]))
        last = features[..., -expected.shape[-1] :]
        # Two orders of sums in fp32, see `_close` of test_families.py.
        torch.testing.assert_close(
            last, seen[0] if before else expected, rtol=0.0, atol=1e-4 * float(seen[0].abs().max())
        )


def test_a_head_that_nvidia_names_by_boundaries_drafts_from_the_state_before_the_norm(tmp_path, monkeypatch) -> None:
    model, kept = target_of(), list[bool]()
    forward = HFModel._forward_adapted

    def watched(self: HFModel, *args: Any) -> Any:
        kept.append(self.before_norm)
        return forward(self, *args)

    monkeypatch.setattr(HFModel, "_forward_adapted", watched)
    ids = torch.tensor([[5, 17, 3, 44, 9]])
    plain = model.generate(ids, max_new_tokens=12, do_sample=False)
    with pytest.warns(UserWarning, match=r"hidden_states \(4, 6, 8\) are assumed"):
        fastspec.patch(model, eagle3=write(tmp_path, *published_by_nvidia(head_of(taps=(4, 6, 8)), None)))
    assert torch.equal(model.generate(ids, assistant="eagle3", max_new_tokens=12, do_sample=False), plain)
    assert kept and all(kept)
    kept.clear()
    fastspec.unpatch(model)
    fastspec.patch(model, eagle3=head_of())  # a module has transformers' meaning
    assert torch.equal(model.generate(ids, assistant="eagle3", max_new_tokens=12, do_sample=False), plain)
    assert kept and not any(kept)


def test_a_state_before_the_norm_needs_an_adapter(tmp_path) -> None:
    model = target_of()
    head = load_head(write(tmp_path, *published_by_nvidia(head_of(taps=(2, 6, 8)), None)), model)
    assert head.config.last_tap_before_norm
    model.model.layers[1].register_forward_hook(lambda *args: None)
    fastspec.patch(model, eagle3=head)
    with (
        pytest.warns(UserWarning, match="generic mode"),
        pytest.raises(Unsupported, match=r"before the final norm.*needs an adapter"),
    ):
        model.generate(torch.tensor([[5, 17, 3]]), assistant="eagle3", max_new_tokens=4, do_sample=False)


def test_what_was_assumed_of_a_file_is_said_once_and_only_where_it_was(tmp_path) -> None:
    model, state = target_of(), as_eagle3(head_of(taps=(2, 4, 5)), None)
    write(tmp_path, *state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fastspec.patch(model, eagle3=tmp_path)  # the original format, whose rule it is
        fastspec.unpatch(model)
        load_head(write(tmp_path, *as_specforge(head_of(taps=(2, 4, 5)), None)), model)
    config, tensors = as_specforge(head_of(taps=(4, 5, 6)), None)
    write(tmp_path, config, tensors)
    with pytest.warns(UserWarning, match=r"reads the layers \(3, 4, 5\).*taps=") as seen:
        fastspec.patch(model, eagle3=tmp_path)
    assert len(seen) == 1 and seen[0].filename == __file__
    assert any("are assumed" in note for note in inspect_head(tmp_path, model).notes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_head(tmp_path, model, taps=(4, 5, 6))
    del config["eagle_config"]
    with pytest.warns(UserWarning, match=r"does not say which hidden states it reads.*\(2, 4, 5\) is assumed"):
        load_head(write(tmp_path, config, tensors), model)


@pytest.mark.parametrize("fed_back", [False, True])
def test_the_second_step_of_a_probe_tells_what_a_head_feeds_back(fed_back: bool, tmp_path) -> None:
    target, head = saying_nothing_but_0(), drafting(1.0, taps=(2, 4, 5))
    config, state = as_specforge(head, None)
    write(tmp_path, config | {"norm_output": fed_back}, state)
    rows = probe_head(tmp_path, target, torch.tensor([[5, 17, 3]]))
    declared = next(row for row in rows if row.declared)
    assert (
        declared.norm_output is fed_back and declared.agreement == 1.0 and declared.second == (0.0 if fed_back else 1.0)
    )
    assert rows[0].norm_output is False and (rows[0].agreement, rows[0].second) == (1.0, 1.0)
    said = verdict("heads/x", rows)
    assert ("norm_output=False" in said) is fed_back and ("as declared (100% of" in said) is not fed_back
    assert load_head(tmp_path, target, **rows[0].overrides()).config.norm_output is False


@torch.no_grad()
def test_a_probe_tries_the_targets_embedding_in_place_of_one_that_was_never_trained(tmp_path) -> None:
    target, head = saying_nothing_but_0(), drafting(0.0, taps=(2, 4, 5))
    target.get_input_embeddings().weight.fill_(0.5)
    width, layer = 32, head.layers[0]
    layer.self_attn.v_proj.weight[:, :width] = torch.eye(width)
    layer.self_attn.o_proj.weight.copy_(torch.eye(width))
    write(tmp_path, *as_speculators(head, torch.full((97, width), -0.5)))
    rows = probe_head(tmp_path, target, torch.tensor([[5, 17, 3]]))
    declared = next(row for row in rows if row.declared)
    assert declared.own_embedding is True and declared.agreement == 0.0
    assert rows[0].own_embedding is False and rows[0].score == 1.0
    assert "own_embedding=False" in verdict("heads/x", rows)
    assert "own_embedding=False" in dict(inspect_head(tmp_path, target).rows())["own embedding"]
    assert load_head(tmp_path, target, own_embedding=False).bound.embedding is target.get_input_embeddings()
    assert load_head(tmp_path, target).bound.embedding is not target.get_input_embeddings()
    write(tmp_path, *as_speculators(head, torch.full((97, width), 0.5)))
    assert dict(inspect_head(tmp_path, target).rows())["own embedding"] == "a copy of the target's"


@torch.no_grad()
def test_a_probe_reads_a_tap_after_the_last_layer_before_the_norm(tmp_path) -> None:
    model, head = saying_nothing_but_0(), drafting(0.0, taps=(2, 6, 8))
    model.model.norm.weight.fill_(-1.0)  # so that the sign tells the sides of the norm apart
    ids, seen = torch.tensor([[5, 17, 3]]), list[torch.Tensor]()
    text = model.generate(ids, max_new_tokens=12, do_sample=False)
    hook = model.model.norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model(text)
    hook.remove()
    head.fc.weight[:, -32:] = seen[0][0, -1]
    assert (seen[0][0, 2:] @ seen[0][0, -1] > 0).all()
    write(tmp_path, *published_by_nvidia(head, None))
    declared = next(row for row in probe_head(tmp_path, model, ids) if row.declared)
    assert declared.taps == (2, 6, 8) and declared.agreement == 1.0
    config, state = as_eagle3(head, None)
    write(tmp_path, config | {"trained_by": "fastspec", "eagle_aux_hidden_state_layer_ids": [2, 6, 8]}, state)
    declared = next(row for row in probe_head(tmp_path, model, ids) if row.declared)
    assert declared.taps == (2, 6, 8) and declared.agreement == 0.0


def test_weights_past_the_range_of_the_targets_dtype_are_refused_by_name(tmp_path) -> None:
    model, head = target_of(), head_of(taps=(2, 4, 5))
    with torch.no_grad():
        head.layers[0].mlp.up_proj.weight[3, 4] = 1e5
    write(tmp_path, *as_eagle3(head, None))
    loaded = BoundHead.of(load_head(tmp_path, model))
    model.half()
    words = (
        r"layers\.0\.mlp\.up_proj\.weight has values up to 100000.*float16 ends at 65504: load the target in "
        r"torch\.bfloat16"
    )
    for read in (load_head, probe_head):
        with pytest.raises(CheckpointError, match=words):
            read(tmp_path, model)
    with pytest.raises(CheckpointError, match=words):
        followed(loaded, parts_of(model))
    own = torch.full((97, 32), 1e5)
    write(tmp_path, *as_speculators(head_of(taps=(2, 4, 5)), own))
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight has values up to 100000"):
        load_head(tmp_path, model)
    load_head(tmp_path, model.to(torch.bfloat16))


def test_a_copy_of_the_targets_embedding_in_another_dtype_is_shared(tmp_path) -> None:
    model = target_of()
    rounded = model.get_input_embeddings().weight.detach().bfloat16()
    write(tmp_path, *as_speculators(head_of(taps=(2, 4, 5)), rounded))
    assert load_head(tmp_path, model).bound.embedding is model.get_input_embeddings()


def test_a_head_drafts_for_a_target_with_added_tokens(tmp_path) -> None:
    model = target_of()
    write(tmp_path, *as_eagle3(head_of(taps=(2, 4, 5)), None))
    model.resize_token_embeddings(101)
    ids = torch.tensor([[5, 99, 3, 100, 9]])
    plain = model.generate(ids, max_new_tokens=12, do_sample=False)
    fastspec.patch(model, eagle3=tmp_path)
    assert torch.equal(model.generate(ids, assistant="eagle3", max_new_tokens=12, do_sample=False), plain)


def test_gemma_4s_assistant_is_no_draft_model_and_says_so_at_patch() -> None:
    text = tiny_model("gemma4_text").config.to_dict() | {
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
    }
    text |= {"num_kv_shared_layers": text["num_hidden_layers"], "use_double_wide_mlp": False}
    config = Gemma4AssistantConfig(text_config=text, backbone_hidden_size=32)
    model = tiny_model("gemma4_text")
    with pytest.raises(Unsupported, match=r"reads the keys and values of its target.*mtp=assistant"):
        fastspec.patch(model, speculative=AutoModelForCausalLM.from_config(config))


def test_a_head_that_reads_before_the_norm_cannot_be_trained_on() -> None:
    head = EagleHead(replace(head_of().config, last_tap_before_norm=True))
    with pytest.raises(ValueError, match="the last one after the final norm"):
        checkpoint_tensors(head)
