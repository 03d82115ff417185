"""Every model family: the same tokens as unpatched, and every node of any tree scored as its own text would be."""

from __future__ import annotations

import copy
from functools import cache, wraps
from typing import Any

import pytest
import torch
from helpers.examples import examples
from helpers.generate import SHALLOW
from helpers.models import DISTINCT, FAMILIES, tiny_config, tiny_head, tiny_model
from helpers.sweep import tiny
from helpers.trees import paths, trees
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    LEDConfig,
    LEDForConditionalGeneration,
    MambaConfig,
    MambaForCausalLM,
)

import fastspec
from fastspec.generation.tree import TokenTree
from fastspec.patches.backends import TORCH
from fastspec.patches.hf.cache import CACHE
from fastspec.patches.hf.config_fields import recurrent_layers
from fastspec.patches.hf.families import ADAPTERS
from fastspec.patches.hf.model import HFModel
from fastspec.patches.hf.modes import adapter_for
from fastspec.patches.session import session_of

GENERIC = (
    "gpt2",
    "gpt_neox",
    "hunyuan_v1_dense",
    "opt",
    "gpt_bigcode",
    "falcon",
    "persimmon",
    "deepseek_v3",
    "mimo_v2_flash",
)
REPEATED = {*FAMILIES} - {*DISTINCT}
FACTORS = [1.0 + 0.5 * i for i in range(8)]
ROPES = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {
        "factor": 4.0,
        "short_factor": [1.0] * 8,
        "long_factor": FACTORS,
        "original_max_position_embeddings": 64,
    },
}
POSITIONS = {"dynamic": {"max_position_embeddings": 64}}  # beyond which dynamic and longrope depend on the length


@cache
def model_of(kind: str):
    """A shared model; tests that patch it undo that."""
    if kind == "hooked":
        model = copy.deepcopy(tiny_model("llama", **SHALLOW))
        model.model.layers[1].register_forward_hook(lambda *_: None)
        return model
    if kind in ROPES:
        rope = {"rope_type": kind, "rope_theta": 10000.0, **ROPES[kind]}
        return tiny_model("llama", **SHALLOW, **POSITIONS.get(kind, {}), rope_parameters=rope)
    return tiny_model(kind, **SHALLOW)


def prompts(rows: int = 3, width: int = 9) -> dict[str, torch.Tensor]:
    """Left-padded prompts of different lengths."""
    ids = torch.randint(6, 97, (rows, width), generator=torch.Generator().manual_seed(3))
    mask = (torch.arange(width) >= torch.arange(rows)[:, None] * 3).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


@pytest.mark.parametrize("kind", [*FAMILIES, *GENERIC, "hooked", *ROPES])
def test_greedy_tokens_equal_the_unpatched_ones(kind: str) -> None:
    model, inputs = model_of(kind), {**prompts(), "max_new_tokens": 8, "do_sample": False}
    expected = model.generate(**inputs)
    with fastspec.patched(model, eagle3=tiny_head(model)):
        # A family whose row is another's in all but its name is held to a small tree alone; of the others each gets the
        # default's 60 nodes.
        for assistant in (
            "autoregressive",
            fastspec.Eagle3(depth=2, top_k=3, total_tokens=7) if kind in REPEATED else "eagle3",
        ):
            assert torch.equal(model.generate(**inputs, assistant=assistant), expected), assistant
        report = fastspec.report(model)
    adapted = kind in ADAPTERS or kind in ROPES
    assert report.mode.startswith("adapter " if adapted else "generic")
    assert ("forward hook" in report.mode) == (kind == "hooked")


def test_a_forward_that_reads_its_cache_where_it_is_asked_to_is_asked_at_every_pass() -> None:
    """Classes of transformers read any that they are given; one of a user's own may not."""
    model, inputs = model_of("gpt2"), {**prompts(), "max_new_tokens": 8, "do_sample": False}
    expected, forward = model.generate(**inputs), model.forward

    @wraps(forward)
    def own(*args: Any, **more: Any) -> Any:
        return forward(*args, **more) if more.get("use_cache") else forward(*args, **{**more, CACHE: None})

    with fastspec.patched(model), pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "forward", own)
        assert torch.equal(model.generate(**inputs, assistant="nasd"), expected)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_drafts_are_accepted(kind: str) -> None:
    model = model_of(kind)
    with fastspec.patched(model, eagle3=tiny_head(model)):
        tree = fastspec.Eagle3(depth=0, top_k=90, total_tokens=91)
        model.generate(**prompts(), max_new_tokens=20, do_sample=False, assistant=tree)
        assert fastspec.report(model).last.acceptance_length > 1.5  # 90 of 97 tokens hang below the root


@pytest.mark.parametrize("kind", [*DISTINCT, *GENERIC, "hooked", *ROPES])
@examples(5, database=None, derandomize=True)
@given(tree=trees(), counts=st.lists(st.integers(1, 7), min_size=2, max_size=2))
@torch.no_grad()
def test_every_node_is_scored_as_its_own_text(kind: str, tree: TokenTree, counts: list[int]) -> None:
    model = model_of(kind)
    recurrent = any(recurrent_layers(model.config))
    ids = torch.randint(6, 97, (2, max(counts)), generator=torch.Generator().manual_seed(sum(counts)))
    target = HFModel(model, adapter_for(model), rows=2, capacity=40, tail=9, taps=(1, 3), ops=TORCH)
    last, _ = target.prefill(ids, torch.tensor(counts))
    logits, features = target.score(tree, max(counts))
    for row, count in enumerate(counts):
        _close(last[row], model(ids[row : row + 1, :count]).logits[0, -1], recurrent)
        texts = [torch.cat((ids[row, :count], tokens)) for tokens in paths(tree, row)]
        # Each is a row of one pass: what is filled up behind a text is seen by none of its tokens.
        out = model(nn.utils.rnn.pad_sequence(texts, batch_first=True), output_hidden_states=True)
        for node, text in enumerate(texts):
            _close(logits[row, node], out.logits[node, len(text) - 1], recurrent)
            _close(
                features[row, node],
                torch.cat([out.hidden_states[tap][node, len(text) - 1] for tap in (1, 3)]),
                recurrent,
            )


def _close(got: torch.Tensor, expected: torch.Tensor, recurrent: bool = False) -> None:
    # fp32 rounds at 6e-8. Sums of up to 96 terms in another order, through six layers whose weights of 0.3 amplify some
    # tenfold in all, differ by about 96**0.5 * 6 * 10 * 6e-8 = 4e-5 of the largest value; a wrong position or mask
    # shows at 1e-1 of it. A tree's system over all nodes rounds otherwise than transformers' chunks: one of
    # Qwen3-Next's is 1.6e-4 apart.
    torch.testing.assert_close(
        got, expected, rtol=0.0, atol=(5e-4 if recurrent else 1e-4) * float(expected.abs().max())
    )


@pytest.mark.parametrize("kind", ["gpt2", "opt", "llama"])
def test_drafts_past_the_position_table_do_no_harm(kind: str) -> None:
    model = tiny_model(kind, max_position_embeddings=32)
    inputs = {"input_ids": prompts()["input_ids"][:1], "max_new_tokens": 23, "do_sample": False, "eos_token_id": None}
    expected = model.generate(**inputs)
    assert expected.shape == (1, 32)
    with fastspec.patched(model, eagle3=tiny_head(model)):
        assert torch.equal(model.generate(**inputs, assistant="eagle3"), expected)


@pytest.mark.parametrize("kind, bound", [("dynamic", 64), ("longrope", 64)])
def test_rope_that_depends_on_the_length_is_refused_past_its_bound(kind: str, bound: int) -> None:
    model, ids = model_of(kind), prompts()["input_ids"][:1]
    with fastspec.patched(model, eagle3=tiny_head(model)):
        with pytest.raises(fastspec.Unsupported, match=f"{kind}.*at most {bound}"):
            model.generate(ids, assistant="eagle3", max_new_tokens=bound)
        inputs = {"max_new_tokens": bound - ids.shape[1], "do_sample": False, "eos_token_id": None}
        assert torch.equal(model.generate(ids, **inputs, assistant="eagle3"), model.generate(ids, **inputs))


def test_hooks_of_transformers_itself_do_not_cost_the_adapter() -> None:
    model = tiny_model("llama")
    model(prompts()["input_ids"], output_hidden_states=True)
    with fastspec.patched(model):
        assert fastspec.report(model).mode == "adapter llama"
    assert len(model(prompts()["input_ids"], output_hidden_states=True).hidden_states) == 4


class Foreign(nn.Module):
    """Someone else's layer, whose forward differs from the family's."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        for name, child in layer.named_children():
            self.add_module(name, child)

    def forward(self, *args, **kwargs):
        return -self.layer(*args, **kwargs)


@pytest.mark.parametrize("how", ["class", "instance", "pre-hook", "attention hook"])
def test_what_others_changed_in_a_layer_is_kept(how: str) -> None:
    model = tiny_model("llama")
    layer = model.model.layers[2]
    if how == "class":
        model.model.layers[2] = Foreign(layer)
    elif how == "instance":
        layer.forward = lambda *args, _own=layer.forward, **kwargs: -_own(*args, **kwargs)
    elif how == "pre-hook":
        layer.register_forward_pre_hook(lambda module, args: (-args[0], *args[1:]))
    else:
        layer.self_attn.register_forward_hook(lambda module, args, out: (-out[0], *out[1:]))
    inputs = {**prompts(), "max_new_tokens": 16, "do_sample": False}
    expected = model.generate(**inputs)
    assert not torch.equal(expected, tiny_model("llama").generate(**inputs))
    with fastspec.patched(model, eagle3=tiny_head(model)):
        assert torch.equal(model.generate(**inputs, assistant="eagle3"), expected)
        assert fastspec.report(model).mode.startswith("generic (")


def _led() -> LEDForConditionalGeneration:
    sizes = {
        "vocab_size": 97,
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
    }
    return LEDForConditionalGeneration(
        LEDConfig(**sizes, encoder_attention_heads=4, decoder_attention_heads=4, attention_window=[8])
    )


REFUSED = {
    "recurrent": (
        lambda: MambaForCausalLM(MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1)),
        "MambaForCausalLM.*recurrent",
    ),
    "encoder-decoder": (_led, "LEDForConditionalGeneration is an encoder-decoder model of type led; .* bart"),
    "no generate": (lambda: AutoModel.from_config(tiny_config("llama")), "LlamaModel has no generate"),
    "a reward model": (
        lambda: AutoModelForSequenceClassification.from_config(tiny_config("llama")),
        r"LlamaForSequenceClassification has no generate method: load .* with AutoModelForCausalLM",
    ),
    "bloom": (lambda: tiny_model("bloom"), "BloomForCausalLM.*position_ids"),
    "mpt": (lambda: tiny_model("mpt"), "MptForCausalLM.*position_ids"),
    "alibi": (lambda: tiny_model("falcon", alibi=True), "FalconForCausalLM.*alibi"),
    "blocks": (
        lambda: tiny("diffusion_gemma", AutoModelForImageTextToText),
        "DiffusionGemmaForBlockDiffusion generates by a loop",
    ),
    "xlnet": (lambda: tiny_model("xlnet"), f"XLNetLMHeadModel.*no {CACHE}"),
    "flash in generic mode": (lambda: _with_attention("gpt2", "flash_attention_2"), "flash_attention_2.*sdpa"),
    "not a module": (lambda: {"a": 1}, "not dict"),
    "not of transformers": (lambda: nn.Linear(2, 2), "not Linear"),
    "class instead of a model": (lambda: MambaForCausalLM, "not "),
}


def _with_attention(kind: str, name: str):
    model = tiny_model(kind)
    model.config._attn_implementation_internal = name
    return model


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_work_is_refused_by_name(kind: str) -> None:
    make, message = REFUSED[kind]
    model = make()
    before = dict(getattr(model, "__dict__", {}))
    with pytest.raises(fastspec.Unsupported, match=message):
        fastspec.patch(model)
    assert dict(getattr(model, "__dict__", {})) == before


@pytest.mark.parametrize("own_lm_head", [True, False])
def test_embeddings_are_shared_not_copied(own_lm_head: bool) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    head = tiny_head(model, own_lm_head=own_lm_head)
    held = {p.data_ptr() for p in head.parameters()}
    with fastspec.patched(model, eagle3=head):
        table = model.get_input_embeddings().weight
        bound = session_of(model).resources["eagle3"]
        assert {p.data_ptr() for p in bound.module.parameters()} == held
        assert model.lm_head.weight.data_ptr() == table.data_ptr()
        assert bound.binding.embedding.weight.data_ptr() == table.data_ptr()
        assert {p.data_ptr() for p in head.parameters()} == held
        assert sum(p.shape == table.shape for p in head.parameters()) == own_lm_head
        if not own_lm_head:
            assert bound.binding.lm_head.weight.data_ptr() == table.data_ptr()
        inputs = {**prompts(), "max_new_tokens": 16, "do_sample": False}
        assert torch.equal(model.generate(**inputs, assistant="eagle3"), model.generate(**inputs))
