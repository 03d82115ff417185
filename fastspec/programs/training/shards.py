"""Texts kept in files as they are made, so that a run that was stopped goes on where it was."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastspec.programs.training.data import Texts

MakeTexts = Callable[[], tuple[Texts, dict[str, Any]]]


class OutOfTime(Exception):
    """`TrainConfig.stop_after` has been reached; what was made is saved."""


@dataclass(slots=True)
class TimeLimit:
    """Counts `minutes` of wall-clock time from its making; 0 means no end."""

    minutes: float = 0.0
    began: float = field(default_factory=time.perf_counter)

    def left(self) -> float:
        """Seconds left."""
        return self.began + 60 * self.minutes - time.perf_counter() if self.minutes > 0 else float("inf")

    def need(self, seconds: float) -> None:
        """Raise `OutOfTime` where less is left; the first half of the time is open to work of any length, so that all
        of it gets done."""
        if self.left() < min(max(0.0, seconds), 30 * self.minutes):
            raise OutOfTime


@dataclass(slots=True)
class Shards:
    """Numbered npz files of texts in one folder; each records the `seconds` that it took."""

    folder: Path
    clock: TimeLimit
    seconds: list[float] = field(default_factory=list)

    def path(self, number: int) -> Path:
        return self.folder / f"shard_{number:05d}.npz"

    def get(self, number: int, seed: Sequence[int], make: MakeTexts) -> tuple[Texts, dict[str, np.ndarray]]:
        """The texts of one shard and the arrays saved beside them: read, or made by `make` under `seed`.

        Raises `OutOfTime` rather than start a shard that would not be done in time, going by the slowest one so far.
        """
        path = self.path(number)
        if not path.exists():
            self.clock.need(max(self.seconds, default=0.0))
            began = time.perf_counter()
            torch.manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))
            texts, more = make()
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".part.npz")
            texts.save(part, seconds=time.perf_counter() - began, **more)
            part.replace(path)
        with np.load(path) as z:
            more = {name: z[name] for name in z if name not in Texts.__slots__}
        self.seconds.append(float(more.get("seconds", 0.0)))
        return Texts.load(path), more
