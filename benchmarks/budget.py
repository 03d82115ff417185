"""Whether a case of a benchmark fits into the seconds that are left: rough expectations, set right by what the cases before it took."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from full_size import kept_bytes, read_bytes

RATES = {"cuda": (2e14, 1.5e12, 2e-3), "cpu": (2e10, 5e9, 5e-3)}
"""Device -> operations a second of a prefill, bytes that it reads a second, seconds of a step beside these."""
PACES = 0.25, 20.0
"""The least and the most that one case's time may change what is expected of the next."""


def call_seconds(model: Any, rows: int, before: int, new: int) -> float:
    """What a call of so many rows, tokens before and new tokens may take: operations of the prefill, then weights, keys and values read
    once a token."""
    operations, bandwidth, step = RATES[model.device.type]
    config = model.config.get_text_config()
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    weights = read_bytes(model, chosen if experts else None) / model.dtype.itemsize
    width = config.num_attention_heads * (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    prefill = 2 * rows * before * (weights + config.num_hidden_layers * width * before)
    read = read_bytes(model, min(experts, rows * chosen) if experts else None) + kept_bytes(model, before, rows)
    return prefill / operations + new * (read / bandwidth + step)


class Budget:
    """Seconds that a run may take, from now on; None for no end. What does not fit, or failed, is printed and kept."""

    def __init__(self, seconds: float | None, now: Callable[[], float] = time.monotonic) -> None:
        self.now, self.end = now, math.inf if seconds is None else now() + seconds
        self.paces: dict[str, float] = {}
        """Engine -> the time of its last case over what was expected of it."""
        self.left_out: list[str] = []
        self.failed: list[str] = []

    @property
    def left(self) -> float:
        """Seconds; infinite without an end."""
        return self.end - self.now()

    def expects(self, engine: str, seconds: float) -> float:
        """Seconds that cases of an engine will take, by what its last one did."""
        return seconds * self.paces.get(engine, 1.0)

    def fits(self, case: str, seconds: float) -> bool:
        """Whether there is time for a case; prints that it is left out where there is none."""
        if seconds <= self.left:
            return True
        self.left_out.append(case)
        print(f"left out: {case}: about {seconds:.0f} s, and {max(0.0, self.left):.0f} s are left", flush=True)
        return False

    @contextmanager
    def spends(self, engine: str, expected: float) -> Iterator[None]:
        """Compare what is done inside with what was expected of it, before it was set right."""
        began = self.now()
        yield
        low, high = PACES
        self.paces[engine] = min(high, max(low, (self.now() - began) / expected))

    def fails(self, case: str, error: Exception) -> None:
        """Print that a case failed, and why."""
        self.failed.append(case)
        print(f"failed: {case}: {error}", flush=True)
