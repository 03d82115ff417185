"""Models whose LM head or decoder is another module than transformers': what can be decoded is, and the rest is refused
by name."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.generate import prompts, shallow_model, stats
from helpers.models import tiny_head
from torch import nn

import fastspec
from fastspec import Unsupported

OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


def without_weight(model: Any) -> Any:
    """An LM head that is a chain of modules, and has no weight of its own."""
    model.lm_head = nn.Sequential(model.lm_head)
    return model


@pytest.mark.parametrize("before", [True, False], ids=["before the patch", "after it"])
@pytest.mark.parametrize("assistant", ["nasd", "autoregressive", fastspec.Speculative(early_exit=1, gamma=2)], ids=str)
def test_an_lm_head_without_a_weight_is_decoded_with(assistant, before):
    want = without_weight(shallow_model()).generate(**prompts(6, 4), **OPTIONS).tolist()
    model = without_weight(shallow_model()) if before else shallow_model()
    fastspec.patch(model, assistant=assistant)
    model = model if before else without_weight(model)
    assert model.generate(**prompts(6, 4), **OPTIONS).tolist() == want and stats(model).rounds


def test_a_drafting_head_needs_an_lm_head_with_a_weight():
    model, plain = shallow_model(), without_weight(shallow_model())
    head = tiny_head(model)
    with pytest.raises(
        Unsupported, match="LM head, and that of this LlamaForCausalLM is a Sequential without a weight"
    ):
        fastspec.patch(without_weight(shallow_model()), eagle3=head)
    without_weight(fastspec.patch(model, eagle3=head, assistant="eagle3"))
    with pytest.warns(UserWarning, match="Sequential without a weight"):
        assert model.generate(**prompts(6), **OPTIONS).tolist() == plain.generate(**prompts(6), **OPTIONS).tolist()
    with pytest.raises(Unsupported, match="Sequential without a weight"):
        model.generate(**prompts(6), **OPTIONS, assistant="eagle3")


def test_a_decoder_that_gives_no_hidden_states_is_left_to_transformers():
    model, plain = shallow_model(), shallow_model()
    head = tiny_head(model)

    class Silent(type(model.model)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.hidden_states = None
            return out

    whole = type(model.model)
    model.model.__class__ = Silent
    with pytest.raises(Unsupported, match="gives no hidden states"):
        fastspec.patch(model, eagle3=head)
    model.model.__class__ = whole
    fastspec.patch(model, eagle3=head, assistant="eagle3")
    model.model.__class__ = Silent
    with pytest.warns(UserWarning, match="gives no hidden states"):
        assert model.generate(**prompts(6), **OPTIONS).tolist() == plain.generate(**prompts(6), **OPTIONS).tolist()
    with pytest.raises(Unsupported, match="gives no hidden states"):
        model.generate(**prompts(6), **OPTIONS, assistant="eagle3")
    assert (
        model.generate(**prompts(6), **OPTIONS, assistant="nasd").tolist()
        == plain.generate(**prompts(6), **OPTIONS).tolist()
    )
