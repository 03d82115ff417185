"""Comparison of ways to answer: timed calls of `generate`, their figures beside a baseline's, and what every row of
figures carries: device, software, and the floor that reading the weights sets."""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch.utils.benchmark import Timer

import fastspec
from fastspec.devices import device_name
from fastspec.generation.stats import Stats
from fastspec.models import prompt_width
from fastspec.patches.assistants.speculative import read_parameters
from fastspec.patches.hf.ends import end_tokens
from fastspec.programs.texts import until_end

BASELINE = "transformers"
"""The way that others are compared with: transformers' own `generate`, without an assistant."""
ROUNDING = "a pass over several tokens rounds differently from a pass over each, so a near-tie can fall the other way"
"""The reason for differing answers in a dtype below float32."""


class Stopwatch:
    """Context manager that times its block, with what a CUDA device had left to do at the end."""

    def __init__(self, device: Any) -> None:
        self.cuda, self.seconds = device.type == "cuda", 0.0

    def __enter__(self) -> Stopwatch:
        self._wait()
        self.began = time.perf_counter()
        return self

    def __exit__(self, *raised: object) -> None:
        self._wait()
        self.seconds = time.perf_counter() - self.began

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


@dataclass(slots=True)
class MeasuredAnswer:
    """Answers of one call: new tokens of each row up to the end token, wall-clock seconds with the prefill, statistics
    (empty where nothing counted), peak memory in MiB on CUDA."""

    tokens: list[list[int]]
    seconds: float
    stats: Stats
    peak_mib: float | None = None

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds


def measured_answer(
    model: Any, inputs: dict[str, Any], max_new_tokens: int, *, count: bool = False, **options: Any
) -> MeasuredAnswer:
    """One timed greedy call of `model.generate`, with an assistant's statistics or, with `count`, a streamer's."""
    ids = inputs["input_ids"]
    clock = TimedStreamer(len(ids)) if count else None
    if clock is not None:
        options["streamer"] = clock
    if ids.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    with Stopwatch(ids.device) as watch:
        if clock is not None:
            clock.began = watch.began
        out = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, **options)
    peak = round(torch.cuda.max_memory_allocated() / 2**20, 1) if ids.is_cuda else None
    last = fastspec.report(model).last if "assistant" in options else None
    stats = clock.stats if clock is not None else last or Stats(rows=len(ids))
    ends = end_tokens(model.generation_config)
    tokens = [until_end(row, ends) for row in out[:, prompt_width(model, ids) :].tolist()]
    return MeasuredAnswer(tokens, watch.seconds, stats, peak)


def beside(answer: MeasuredAnswer, base: MeasuredAnswer) -> dict[str, Any]:
    """Figures of an answer beside the baseline's to the same prompts; `first_difference` is by row."""
    parted = [first_difference(ours, plain) for ours, plain in zip(answer.tokens, base.tokens, strict=True)]
    return {
        "tokens_per_second": answer.tokens_per_second,
        "ratio": answer.tokens_per_second / base.tokens_per_second,
        "identical": all(at is None for at in parted),
        "first_difference": parted,
    }


def median_answer(answers: Sequence[MeasuredAnswer]) -> MeasuredAnswer:
    return sorted(answers, key=lambda answer: answer.seconds)[(len(answers) - 1) // 2]


def first_difference(ours: Sequence[Any], plain: Sequence[Any]) -> int | None:
    """Index of the first token (or character) that differs, or is in one of them alone; None if they are equal."""
    if ours == plain:
        return None
    pairs = enumerate(zip(ours, plain, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(ours), len(plain)))


class TimedStreamer:
    """Streamer that takes the statistics of a `generate` without an assistant: the first tokens end the prefill, every
    later hand-over is one round, in which all tokens of a row but one were drafted."""

    def __init__(self, rows: int) -> None:
        self.rows, self.puts, self.stats = rows, 0, Stats(rows=rows)
        self.began = time.perf_counter()

    def put(self, value: Any) -> None:
        self.puts += 1
        if self.puts == 2:  # the first hand-over is the prompt
            self.stats.phases["prefill"] = time.perf_counter() - self.began
        elif self.puts > 2:
            tokens = value.numel() // self.rows
            self.stats.rounds += 1
            self.stats.row_rounds += self.rows
            self.stats.round_tokens += tokens * self.rows
            for _ in range(self.rows):
                self.stats.count_accepted(tokens - 1)

    def end(self) -> None:
        self.stats.seconds = time.perf_counter() - self.began
        self.stats.phases["pass"] = self.stats.seconds - self.stats.phases.get("prefill", 0.0)


def floor(model: Any) -> tuple[float, dict[str, Any]]:
    """(milliseconds, columns) of the least time of a pass: every weight read once, at the bandwidth measured here."""
    weights = sum(p.numel() * p.element_size() for p in read_parameters(model))
    speed = read_bandwidth(model.device)
    return 1e3 * weights / speed, {"weight_bytes": weights, "read_gb_per_s": round(speed / 1e9, 1)}


def read_bandwidth(device: Any) -> float:
    """Bytes per second, the median of several: a sum on the CPU, a copy on CUDA, which reads and writes each byte."""
    data = torch.ones(2**27, device=device)
    held = {"data": data, "target": torch.empty_like(data)}
    timer = Timer(
        "target.copy_(data)" if data.is_cuda else "data.sum()", globals=held, num_threads=torch.get_num_threads()
    )
    return data.nbytes * (2 if data.is_cuda else 1) / timer.blocked_autorange(min_run_time=0.5).median


def versions() -> dict[str, Any]:
    """Versions of torch, triton (None where it is not installed), transformers, fastspec, and the commit of this tree,
    with "-dirty" where files were changed (None outside of a repository)."""
    found: dict[str, Any] = {}
    for name in ("torch", "triton", "transformers"):
        with contextlib.suppress(ModuleNotFoundError):
            found[name] = importlib.import_module(name).__version__  # a nightly triton is installed under another name
    root = Path(fastspec.__file__).parent.parent
    commit = None
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude", "*"]
        commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
    return {"triton": None} | found | {"fastspec": fastspec.__version__, "commit": commit}


def environment(model: Any) -> dict[str, Any]:
    """Place and time: what every row carries beside its figures."""
    return {
        "device": device_name(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        **versions(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
