"""Llama 4: layers that see chunks and rotate, layers that see everything and scale their queries by where they stand,
and its experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.captured import stand_in
from helpers.generate import conversation, free, prompts
from helpers.models import tiny_head, tiny_model
from torch import Tensor
from transformers import Llama4TextConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention

import fastspec
from fastspec.generation import layer_state
from fastspec.kernels.layer import reference as layer_reference
from fastspec.kernels.linear import reference
from fastspec.patches.hf.families import ADAPTERS
from fastspec.patches.hf.layers import position_factor
from fastspec.patches.hf.model import HFModel
from fastspec.patches.hf.modes import mode_for
from fastspec.patches.session import session_of
from fastspec.programs.training.target import TargetReader

SPAN, NEW = 8, 18
TREE = fastspec.Eagle3(depth=4, top_k=4, total_tokens=16)
ASSISTANTS = "autoregressive", "nasd", "speculative", fastspec.Speculative(gamma=3, branches=3), TREE
ONE, BATCH, RAGGED = prompts(11), prompts(9, 9, 9), prompts(5, 11)


@pytest.fixture(autouse=True)
def short_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings that the texts of these tests go round."""
    monkeypatch.setattr(layer_state, "SLACK", 4)
    monkeypatch.setattr(layer_state, "STEP", 1)
    monkeypatch.setattr("fastspec.generation.target.NARROW", 4)


def llama4(seed: int = 0, **over: Any) -> Any:
    """Four layers, the third without rotation, the second and fourth with experts; texts outgrow chunks, and the scale
    of queries grows every eight tokens."""
    return tiny_model(
        "llama4_text",
        seed,
        **{
            "num_hidden_layers": 4,
            "attention_chunk_size": SPAN,
            "floor_scale": SPAN,
            "attn_scale": 0.7,
            **over,
        },
    )


SETTINGS: dict[str, dict[str, Any]] = {
    "chunks and scales": {},
    "several scales a chunk": {"floor_scale": 3},
    "no norms of heads": {"use_qk_norm": False},
    "no scales": {"attn_temperature_tuning": False},
    "two experts a token": {"num_experts_per_tok": 2},
}


@pytest.mark.some("chunks and scales", "several scales a chunk", "no scales")
@pytest.mark.parametrize("settings", SETTINGS)
def test_texts_outgrow_chunks_and_scales(settings: str) -> None:
    model = llama4(**SETTINGS[settings])
    expected = [free(model, inputs, NEW) for inputs in (ONE, BATCH)]
    with fastspec.patched(
        model, speculative=llama4(**SETTINGS[settings]), eagle3=tiny_head(model)
    ):  # all drafts of it are right
        assert fastspec.report(model).mode == "adapter llama4_text"
        all_of_them = *ASSISTANTS, fastspec.ContinuousBatch("nasd", rows=2)
        for assistant in (
            all_of_them if settings == "chunks and scales" else ("speculative", TREE)
        ):  # right drafts, and mostly wrong ones
            assert [free(model, inputs, NEW, assistant=assistant) for inputs in (ONE, BATCH)] == expected, assistant
    if settings == "chunks and scales":
        model.config.attention_chunk_size = 400
        assert [free(model, inputs, NEW) for inputs in (ONE, BATCH)] != expected
        model.config.attention_chunk_size = SPAN
    for layer in model.model.layers:
        layer.self_attn.attn_temperature_tuning = False
    assert ([free(model, inputs, NEW) for inputs in (ONE, BATCH)] == expected) == (settings == "no scales")


def test_captured_rounds_outgrow_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the experts by the op, whose weights are turned."""
    stand_in(monkeypatch, experts=reference.experts)
    model = llama4()
    expected = [free(model, inputs, NEW) for inputs in (ONE, BATCH)]
    with fastspec.patched(model, eagle3=tiny_head(model)):
        for assistant in ("autoregressive", TREE):
            assert [free(model, inputs, NEW, assistant=assistant) for inputs in (ONE, BATCH)] == expected, assistant
        mode = mode_for(model)
        ops = session_of(model).ops(model, mode)
        assert HFModel(model, mode.adapter, rows=1, capacity=8, tail=1, taps=None, ops=ops).captures


@pytest.mark.slow
def test_published_sizes_of_chunks_and_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 4 Scout's and Maverick's: a prompt ends right before them, and the text behind."""
    monkeypatch.undo()
    held = Llama4TextConfig()
    published = {name: getattr(held, name) for name in ("attention_chunk_size", "floor_scale", "attn_scale")}
    assert set(published.values()) == {8192, 0.1}
    model, inputs = llama4(**published, max_position_embeddings=16384), prompts(8180, 8180)
    expected = free(model, inputs, NEW)
    with fastspec.patched(model, speculative=llama4(**published), eagle3=tiny_head(model)):
        for assistant in ("nasd", fastspec.Speculative(gamma=3), TREE):
            assert free(model, inputs, NEW, assistant=assistant) == expected, assistant


def test_turns_go_on_from_a_returned_cache() -> None:
    model = llama4()

    def texts(options: dict[str, Any]) -> list[list[list[int]]]:
        """Of three turns, the second of which is transformers' own."""
        return [out.sequences.tolist() for out in conversation(model, BATCH, [options, {}, options])]

    expected = texts({})
    with fastspec.patched(model, eagle3=tiny_head(model)):
        for assistant in ("autoregressive", "nasd", TREE):
            assert texts({"assistant": assistant}) == expected, assistant


def test_padding_that_would_scale_queries_is_refused() -> None:
    """Plain decoding counts it: a row of a padded batch has other tokens than the same prompt alone."""
    model = llama4(floor_scale=30)
    expected = free(model, RAGGED, 19)
    with fastspec.patched(model, speculative=llama4(1, floor_scale=4)):
        for assistant in ("nasd", "speculative"):  # what scales a draft model's queries is no matter
            assert free(model, RAGGED, 19, assistant=assistant) == expected
            with pytest.raises(
                fastspec.Unsupported, match=r"6 tokens of padding.*past 30 tokens \(floor_scale\).*may reach 31"
            ):
                free(model, RAGGED, 20, assistant=assistant)
    model = llama4(floor_scale=30, attn_temperature_tuning=False)
    expected = free(model, RAGGED, 30)
    with fastspec.patched(model):
        assert free(model, RAGGED, 30, assistant="nasd") == expected


def test_a_hooked_one_stays_within_the_scale() -> None:
    model = llama4(floor_scale=300)
    model.model.layers[1].register_forward_hook(lambda *_: None)
    expected = free(model, RAGGED, NEW)
    fastspec.patch(model)
    assert "forward hook" in fastspec.report(model).mode
    assert free(model, RAGGED, NEW, assistant="nasd") == expected
    with pytest.raises(fastspec.Unsupported, match="floor_scale"):
        free(model, ONE, 300, assistant="nasd")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_factor_is_that_of_transformers(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model, row = llama4(floor_scale=5).to(dtype), ADAPTERS["llama4_text"].position_factor
    assert row is not None
    found = position_factor(model, row, 60)
    seen: list[Tensor] = []
    attn = Llama4TextAttention(Llama4TextConfig(**{**model.config.to_dict(), "_attn_implementation": "eager"}), 2).to(
        dtype
    )
    attn.q_proj.weight.data.copy_(torch.eye(64)[:, :64])
    attn.config._attn_implementation = "seen"
    seeing = lambda module, q, k, v, *_, **__: (seen.append(q), (q.transpose(1, 2), None))[1]  # noqa: E731
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "seen", seeing)
    x = torch.randn(1, 60, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    attn(x, None, None)
    assert found is not None and len(found.unique()) == 13
    qkv, still, steps = (
        torch.cat((x, x), -1),
        torch.ones(60, 1),
        torch.arange(60)[None],
    )  # two heads of keys, two of values
    caches = torch.zeros(2, 1, 2, 60, 16, dtype=dtype)
    scaled = layer_reference.rope_cache(qkv, still, torch.zeros(60, 1), steps, *caches, steps, factor=found)
    assert torch.equal(seen[0].transpose(1, 2), scaled)  # multiplied in fp32, and rounded once


def test_a_head_is_trained_on_what_its_layers_give() -> None:
    """The model names itself as its decoder."""
    model, ids = llama4(), BATCH["input_ids"]
    read = TargetReader(model, (1, 2), torch.arange(97)).read(ids, torch.tensor([3, 7]))
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
    assert torch.equal(read.features, torch.cat((states[1], states[2]), -1))


@pytest.mark.parametrize("normed", [True, False])
def test_a_rotation_that_scales_what_is_normed_after_it(normed: bool) -> None:
    """YaRN's factor goes through the norm of heads, which takes it away again."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "attention_factor": 2.5}
    model = llama4(
        use_qk_norm=normed, floor_scale=8192, rope_parameters={**rope, "original_max_position_embeddings": 128}
    )
    expected = model.generate(**RAGGED, max_new_tokens=12, do_sample=False)
    with fastspec.patched(model):
        said = "generic (its rotation scales by 2.5 what is normed after it (attention_scaling))"
        assert fastspec.report(model).mode == (said if normed else "adapter llama4_text")
        for assistant in ("autoregressive", "nasd"):
            got = model.generate(**RAGGED, max_new_tokens=12, do_sample=False, assistant=assistant)
            assert torch.equal(got, expected)
