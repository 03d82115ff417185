"""A call looks at its model when transformers has prepared it: what a streamer or a `generate` of someone's own changes
before counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.captured import stand_in
from helpers.models import tiny_model
from torch import nn

import fastspec
from fastspec.errors import Unsupported
from fastspec.patches.backends import TORCH

ASKED: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


def ids() -> torch.Tensor:
    return torch.randint(6, 97, (1, 12), generator=torch.Generator().manual_seed(0))


class OnPrompt:
    """A streamer that does something when it is given the prompt."""

    def __init__(self, run: Any) -> None:
        self.run: Any = run

    def put(self, tokens: torch.Tensor) -> None:
        run, self.run = self.run, lambda: None
        run()

    def end(self) -> None:
        pass


@pytest.mark.parametrize("assistant", ["autoregressive", "nasd"])
def test_a_forward_that_a_streamer_replaces(assistant):
    """As PaliGemma's do, it lets the tokens of an unpadded prompt see those behind them."""
    model = tiny_model("llama")
    inner = model.model

    def forward(*args: Any, attention_mask: Any = None, **more: Any) -> Any:
        cache = more.get("cache", more.get("past_key_values"))
        plain = attention_mask is None or (attention_mask.dim() == 2 and bool(attention_mask.all()))
        if (cache is None or cache.get_seq_length() == 0) and plain:
            rows, count = more["input_ids"].shape
            attention_mask = torch.zeros(rows, 1, count, count)
        return type(inner).forward(inner, *args, attention_mask=attention_mask, **more)

    def put() -> None:
        inner.forward = forward

    before = model.generate(ids(), **ASKED)
    want = model.generate(ids(), streamer=OnPrompt(put), **ASKED)
    del inner.forward
    assert not torch.equal(before, want)
    fastspec.patch(model)
    assert torch.equal(model.generate(ids(), assistant=assistant, streamer=OnPrompt(put), **ASKED), want)


@pytest.mark.parametrize("assistant", ["autoregressive", "nasd"])
def test_a_hook_that_a_generate_of_ones_own_sets_for_the_length_of_a_call(monkeypatch, assistant):
    """The rounds that an earlier call captured know nothing of it."""
    stand_in(monkeypatch)
    captures = replace(TORCH, name="stand-in", captures=True, packs=True)
    monkeypatch.setattr(
        "fastspec.patches.session.choose_backend", lambda name, device, adapted=True: captures if adapted else TORCH
    )
    model, hot = tiny_model("llama"), [False]
    own = model.generate

    def scaled(module: nn.Module, inputs: Any, output: Any) -> Any:
        return output * 1.3 if isinstance(module, nn.Linear) else None

    def generate(*args: Any, **more: Any) -> Any:
        hook = nn.modules.module.register_module_forward_hook(scaled) if hot[0] else None
        try:
            return own(*args, **more)
        finally:
            if hook is not None:
                hook.remove()

    model.generate = generate
    plain = [model.generate(ids(), **ASKED)]
    hot[0] = True
    plain.append(model.generate(ids(), **ASKED))
    assert not torch.equal(*plain)
    fastspec.patch(model)
    for hot[0] in (False, False, False, True, False, True):
        assert torch.equal(model.generate(ids(), assistant=assistant, **ASKED), plain[hot[0]])


@pytest.mark.parametrize("assistant", ["autoregressive", "nasd"])
def test_a_layer_that_stands_in_a_model_twice_is_refused(assistant):
    """Both passes of it add to one place of transformers' cache; what plain decoding then says is nothing that a tree
    can be scored by."""
    other = tiny_model("llama")  # which may run by its own forward, and is found to
    fastspec.patch(other)
    other.model.layers[1].register_forward_hook(lambda *_: None)
    other.generate(ids(), assistant=assistant, **ASKED)
    model = tiny_model("llama", num_hidden_layers=6)
    model.model.layers[2] = model.model.layers[1]
    fastspec.patch(model)
    with (
        pytest.warns(UserWarning, match="stands there more than once"),
        pytest.raises(Unsupported, match="are numbered 0, 1, 3, 4, 5"),
    ):
        model.generate(ids(), assistant=assistant, **ASKED)
