"""Prompts of several parts, wide and narrow: the tokens are plain decoding's in a first call, a captured one and a replayed one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers_generate import free, prompts
from helpers_models import tiny_head, tiny_model

import fastspec

CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")])
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
