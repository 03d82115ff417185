"""Adapters that are switched between calls, as PEFT switches them: by attributes of layers, which no captured round can
see.

A graph that was kept would go on with the former adapters, and so does its stand-in on the CPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.captured import Recorded, stand_in
from helpers.devices import CUDA
from helpers.generate import MAKERS, TREE
from helpers.open import GREEDY, texts, told
from torch import Tensor, nn

import fastspec


class Tuned(nn.Linear):
    """A linear layer with two low-rank adapters beside it, which holds PEFT's switches."""

    def __init__(self, base: nn.Linear, seed: int) -> None:
        super().__init__(base.in_features, base.out_features, bias=False, device=base.weight.device)
        self.weight = base.weight
        self._active_adapter, self._disable_adapters, self.merged_adapters, self.scaling = (
            ["a"],
            False,
            [],
            {"a": 1.0, "b": 1.0},
        )
        random = torch.Generator().manual_seed(seed)
        for name in ("a", "b"):
            down, up = (
                torch.randn(*size, generator=random) for size in ((4, base.in_features), (base.out_features, 4))
            )
            self.register_buffer(f"down_{name}", 0.4 * down.to(base.weight.device))
            self.register_buffer(f"up_{name}", 0.4 * up.to(base.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        for name in () if self._disable_adapters else self._active_adapter:
            out = out + self.scaling[name] * (x @ getattr(self, f"down_{name}").T) @ getattr(self, f"up_{name}").T
        return out


def tuned(model: Any) -> list[Tuned]:
    """Adapters on the queries and feed-forwards of a model."""
    made = []
    for layer in model.model.layers:
        layer.self_attn.q_proj = Tuned(layer.self_attn.q_proj, 1 + len(made))
        layer.mlp.down_proj = Tuned(layer.mlp.down_proj, 1 + len(made))
        made += [layer.self_attn.q_proj, layer.mlp.down_proj]
    return made


def first(layer: Tuned) -> None:
    layer._active_adapter = ["a"]


def second(layer: Tuned) -> None:
    layer._active_adapter = ["b"]


def both(layer: Tuned) -> None:
    layer._active_adapter = ["a", "b"]


def weaker(layer: Tuned) -> None:
    layer.scaling["a"] = 0.25


def off(layer: Tuned) -> None:
    layer._disable_adapters = True


def on(layer: Tuned) -> None:
    layer._disable_adapters = False


SWITCHES = (first, second, first, both, weaker, off, on, second)


def pair(device: str) -> tuple[Any, list[Tuned], Any, list[Tuned]]:
    """The unpatched model and its adapters, and the same patched."""
    target, head = MAKERS["bigram"]
    plain, model = target().to(device), target().to(device)
    mine, served = tuned(plain), tuned(model)
    fastspec.patch(model, eagle3=head(model).to(device))
    return plain, mine, model, served


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("assistant", ["autoregressive", TREE], ids=str)
def test_every_call_answers_by_the_adapters_that_are_on(
    device: str, assistant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":
        stand_in(monkeypatch, Recorded)
    plain, mine, model, served = pair(device)
    ids, answers = texts(9)[0].to(device)[None], []
    for switch in SWITCHES:
        for layer in (*mine, *served):
            switch(layer)
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 14, "pad_token_id": 0, **GREEDY}
        wanted = plain.generate(ids, **options).tolist()
        for _ in range(3):  # the third replays what the second captured
            assert model.generate(ids, assistant=assistant, **options).tolist() == wanted, switch.__name__
        answers.append(str(wanted))
    assert len(set(answers)) >= 4


@pytest.mark.some("autoregressive")
@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("assistant", ["autoregressive", TREE], ids=str)
def test_an_open_batch_answers_by_the_adapters_that_are_on(
    device: str, assistant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":
        stand_in(monkeypatch, Recorded)
    plain, mine, model, served = pair(device)
    prompts = texts(9, 5, 7)
    with fastspec.continuous(model, assistant, rows=2, max_length=60) as batch:
        for switch in SWITCHES:
            for layer in (*mine, *served):
                switch(layer)
            wanted = []
            for ids in prompts:
                given = ids.to(device)[None]
                answer = plain.generate(
                    given, attention_mask=torch.ones_like(given), max_new_tokens=10, pad_token_id=0, **GREEDY
                )
                wanted.append(answer[0].tolist())
            assert told([batch.submit(ids, max_new_tokens=10, **GREEDY) for ids in prompts]) == wanted, switch.__name__
