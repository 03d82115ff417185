"""Settings by which drafters pause after few rounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastspec.generation.drafters import nasd as nasd
from fastspec.generation.drafters import policy as draft_length
from fastspec.generation.engine import batching


def soon_out(monkeypatch: Any) -> None:
    """Let drafters pause after few rounds, for a short time, and rounds be asynchronous from the first on."""
    monkeypatch.setattr(batching, "ASYNCHRONOUS_AFTER", 0)
    cheap = replace(nasd.COSTS["cuda"], host=0.1, several=(0.05, 0.0), wait=0.05, row=0.0)
    monkeypatch.setitem(nasd.COSTS, "cpu", cheap)  # a look-up still costs more than a pass of a model this small
    monkeypatch.setattr(draft_length, "BUDGET", 0.5)
    monkeypatch.setattr(draft_length, "LONGEST_PAUSE", 7)
