"""Settings under which a family computes otherwise than its adapter's row says, or in which only few of its models
differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.generate import SHALLOW
from helpers.models import tiny_head, tiny_model

import fastspec

TREE = fastspec.Eagle3(depth=2, top_k=3, total_tokens=7)


def same(model: Any, mode: str, width: int = 9) -> None:
    """One prompt, and three with left padding, get the tokens that they get without an assistant."""
    ids = torch.randint(6, 97, (3, width), generator=torch.Generator().manual_seed(3))
    mask = (torch.arange(width) >= torch.arange(3)[:, None] * 3).long()
    options = {"max_new_tokens": 14, "do_sample": False}
    for inputs in (
        {"input_ids": ids[:1], "attention_mask": mask[:1]},
        {"input_ids": ids * mask, "attention_mask": mask},
    ):
        expected = model.generate(**inputs, **options)
        with fastspec.patched(model, eagle3=tiny_head(model)):
            for assistant in ("autoregressive", TREE):
                assert torch.equal(model.generate(**inputs, **options, assistant=assistant), expected), assistant
            assert fastspec.report(model).mode == mode


OTHERWISE = {
    "olmo": {"clip_qkv": 0.5},
    "stablelm": {"use_parallel_residual": True},
    "phi": {"qk_layernorm": True},
    "cohere": {"use_qk_norm": True},
}


@pytest.mark.some("olmo", "cohere")
@pytest.mark.parametrize("kind", OTHERWISE)
def test_a_setting_that_a_row_does_not_know_costs_the_adapter(kind: str) -> None:
    (name,) = OTHERWISE[kind]
    same(tiny_model(kind, **SHALLOW, **OTHERWISE[kind]), f"generic (its {name} is set)")
    same(tiny_model(kind, **SHALLOW), f"adapter {kind}")


def test_a_prompt_whose_tokens_see_those_behind_them() -> None:
    """Without padding they do, and with padding they do not; a pass of fastspec's own sees what is before a token
    alone."""
    model = tiny_model("gemma", **SHALLOW, use_bidirectional_attention=True)
    ids = torch.randint(6, 97, (1, 9), generator=torch.Generator().manual_seed(3))
    assert not torch.allclose(model(ids).logits, tiny_model("gemma", **SHALLOW)(ids).logits)
    same(model, "adapter gemma")


def test_prompts_that_see_all_of_themselves_with_padding_as_well_are_refused() -> None:
    model = tiny_model("gemma3_text", **SHALLOW, use_bidirectional_attention=True)
    with fastspec.patched(model), pytest.raises(fastspec.Unsupported, match="Gemma3ForCausalLM scores the nodes"):
        model.generate(torch.arange(6, 15)[None], max_new_tokens=4, assistant="nasd")


ALL_ROTATE = {"sliding_window": None, "layer_types": ["full_attention"] * SHALLOW["num_hidden_layers"]}


@pytest.mark.parametrize("settings", [{"sliding_window": 8}, ALL_ROTATE], ids=["some", "all"])
def test_layers_without_a_window_rotate_where_none_has_one(settings: dict[str, Any]) -> None:
    same(tiny_model("exaone4", **SHALLOW, **settings), "adapter exaone4")


@pytest.mark.parametrize(
    "kind, setting", [("granite", "logits_scaling"), ("hyperclovax", "logits_scaling"), ("cohere", "logit_scale")]
)
def test_logits_are_scaled(kind: str, setting: str) -> None:
    """A greedy text does not show it."""
    model = tiny_model(kind, **SHALLOW, **{setting: 3.0})
    ids = torch.randint(6, 97, (1, 9), generator=torch.Generator().manual_seed(3))
    options = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected = torch.stack(model.generate(ids, **options).logits)
    with fastspec.patched(model):
        got = torch.stack(model.generate(ids, **options, assistant="nasd").logits)
    torch.testing.assert_close(got, expected, rtol=0.0, atol=1e-4 * float(expected.abs().max()))
