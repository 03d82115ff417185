"""SmolLM2 twice, unpatched and patched with a default assistant, for programs that call `generate` themselves."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from helpers.clients import HEAD

import fastspec
from fastspec.patches.call import assembly


@pytest.fixture(autouse=True)
def fixed_trees(monkeypatch):
    """Trees of one size, as these tests ask for drafts in batches too: by a clock there may be none."""
    monkeypatch.setattr(assembly, "_chooses_sizes", lambda plan: False)


@pytest.fixture(scope="session")
def pair(smollm2):
    """(the unpatched model, a patched copy whose calls are all assisted); a test leaves them as they are."""
    model, _ = smollm2
    return model, fastspec.patch(copy.deepcopy(model), eagle3=HEAD, assistant="eagle3")


@pytest.fixture
def tokenizer(smollm2):
    """SmolLM2's tokenizer, a copy: clients set its padding."""
    return copy.deepcopy(smollm2[1])


@pytest.fixture(scope="session")
def folder(smollm2, tmp_path_factory) -> Path:
    """SmolLM2 as a directory, for programs that load it themselves."""
    path = tmp_path_factory.mktemp("smollm2")
    for part in smollm2:
        part.save_pretrained(path)
    return path


@pytest.fixture
def one_process():
    """Accelerate keeps its mixed precision for the process: a test that trains leaves none behind."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
