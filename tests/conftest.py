"""What the tests share: the offline setting, threads per worker, tiny random models, and the real SmolLM2, loaded once per worker."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # workers share the cores

@pytest.fixture
def tiny_model():
    """`tiny_model("qwen3", vocab_size=65)`: a factory of random models, so that a test may make several."""
    from helpers_models import tiny_model

    return tiny_model


@pytest.fixture(scope="session")
def smollm2():
    """(model, tokenizer) of SmolLM2-135M-Instruct in fp32 on the CPU. Shared: a test that patches it must unpatch it."""
    from fastspec.models import load_smollm2

    return load_smollm2("cpu", torch.float32)
