"""Prompts of several parts, wide and narrow: the tokens are plain decoding's in a first call, a captured one and a
replayed one."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.captured import stand_in
from helpers.devices import CUDA
from helpers.generate import free, prompts
from helpers.models import tiny_head, tiny_model

import fastspec
from fastspec.generation import layer_state, target

KINDS = "llama", "gemma3_text", "gpt_oss", "qwen3_5_text", "mixtral"
"""Plain layers, windows in some layers, sinks and experts, recurrent layers, experts."""
ROOM = 6000


def small(kind: str, seed: int = 0) -> Any:
    return tiny_model(kind, seed, num_hidden_layers=4, max_position_embeddings=ROOM)


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), CUDA])
@pytest.mark.parametrize("lengths", [(5000,), (2100, 1300), (3000,), (700, 90, 1025)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_of_several_parts(kind: str, lengths: tuple[int, ...], device: str) -> None:
    model, new = small(kind).to(device), 12
    given = [{name: each.to(device) for name, each in prompts(*lengths, seed=seed).items()} for seed in range(3)]
    expected = [free(model, inputs, new) for inputs in given]
    with fastspec.patched(model, eagle3=tiny_head(model, taps=(0, 2, 4)).to(device)):
        for assistant in ("autoregressive", fastspec.Eagle3(depth=4, top_k=4, total_tokens=16)):
            for inputs, wanted in zip(given, expected, strict=True):
                assert free(model, inputs, new, assistant=assistant) == wanted, assistant


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The widths that targets read on the CPU with a stand-in for graphs, where parts are of 8 to 32 tokens and rings
    hold narrow ones."""
    for name, value in (("NARROW", 8), ("WIDE", 32)):
        monkeypatch.setattr(target, name, value)
    monkeypatch.setattr("fastspec.patches.hf.model.padded_width", lambda width: max(8, 1 << (width - 1).bit_length()))
    monkeypatch.setattr(layer_state, "SLACK", 2)
    monkeypatch.setattr(layer_state, "STEP", 1)
    stand_in(monkeypatch)
    found: list[int] = []

    def spied(length: int, widest: int) -> Any:
        parts = list(target.prompt_parts(length, widest))
        found.extend(width for _, width in parts)
        return parts

    monkeypatch.setattr("fastspec.patches.hf.model.prompt_parts", spied)
    return found


@pytest.mark.some("gemma3_text", "gpt_oss", "qwen3_5_text")
@pytest.mark.each_value
@pytest.mark.parametrize("lengths", [(70,), (33, 20), (40, 7, 17)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_wide_parts_where_prompts_are_captured(kind: str, lengths: tuple[int, ...], read: list[int]) -> None:
    model, new = tiny_model(kind, num_hidden_layers=4), 8
    given = [prompts(*lengths, seed=seed) for seed in range(3)]
    expected = [free(model, inputs, new) for inputs in given]
    with fastspec.patched(model, eagle3=tiny_head(model, taps=(0, 2, 4))):
        for assistant in ("autoregressive", fastspec.Eagle3(depth=4, top_k=4, total_tokens=16)):
            for inputs, wanted in zip(given, expected, strict=True):
                assert free(model, inputs, new, assistant=assistant) == wanted, assistant
    assert max(read) == (8 if kind in ("gemma3_text", "gpt_oss") else 32 // len(lengths) // 8 * 8)


@pytest.mark.filterwarnings("ignore:.*generic")
def test_a_models_own_forward_is_given_narrow_parts(read: list[int]) -> None:
    """It may hold the scores of a part over the whole text."""
    model, inputs = tiny_model(num_hidden_layers=4), prompts(70)
    model.model.layers[1].register_forward_hook(lambda *_: None)
    expected = free(model, inputs, 8)
    with fastspec.patched(model):
        assert free(model, inputs, 8, assistant="autoregressive") == expected
    assert max(read) == 8
