"""Settings by which drafters pause after few rounds."""

from __future__ import annotations

from typing import Any

from fastspec.generation.drafters import nasd as nasd
from fastspec.generation.drafters import policy as draft_length
from fastspec.generation.engine import batching


def soon_out(monkeypatch: Any) -> None:
    """Let drafters pause after few rounds, for a short time, and rounds be asynchronous from the first on."""
    monkeypatch.setattr(batching, "ASYNCHRONOUS_AFTER", 0)
    monkeypatch.setitem(
        nasd.COSTS, "cpu", nasd.COSTS["cuda"]
    )  # where a look-up costs more than a pass of a model this small
    monkeypatch.setattr(draft_length, "BUDGET", 0.5)
    monkeypatch.setattr(nasd, "GRANTED", 0.5)
    monkeypatch.setattr(nasd, "PROBES", 0.2)
    monkeypatch.setattr(draft_length, "LONGEST_PAUSE", 7)
