"""Programs that measure no device."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs on the CPU, wherever the tests run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def quick(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, and a bandwidth that is not measured, which takes half a gigabyte."""
    monkeypatch.setattr("fastspec.programs.compare.read_bandwidth", lambda device: 1e9)
