"""Prompts and marks by device."""

from __future__ import annotations

import pytest
import torch

from helpers.generate import prompts as make_prompts


def prompts(device: str, *lengths: int, seed: int = 0) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device) for name, tensor in make_prompts(*lengths, seed=seed).items()}


ON_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
