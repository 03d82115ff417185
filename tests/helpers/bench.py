"""A bench that measures no device."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    """Runs on the CPU, wherever the tests run; the bandwidth needs no half gigabyte here."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("fastspec.programs.compare.read_bandwidth", lambda device: 1e9)
