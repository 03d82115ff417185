"""`fastspec.tune`: the fastest of the launches that compute what they should, for every place that a model's calls ask for."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from fastspec.devices import made_current
from fastspec.errors import FastSpecError, Unsupported
from fastspec.generation.capture import recorded
from fastspec.patches.call.ranks import Ranks
from fastspec.patches.checks.compare import tensors, unlike
from fastspec.patches.hf.compat import device_of, unwrapped
from fastspec.patches.hf.modes import mode_for
from fastspec.patches.hf.parallel import group_of
from fastspec.patches.notices import notice
from fastspec.patches.session import session_of
from fastspec.patches.tuning.store import keep
from fastspec.patches.warmup import warmup

GAIN = 0.98
"""A launch replaces the shipped one where it takes at most this share of its time: less is noise."""
REPLAYS = 7
Key: TypeAlias = tuple[str, tuple[Hashable, ...]]
"""An op and a place."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """One place: the op, its shape as it was asked for, microseconds with the launch that was used before and with the fastest, and that
    launch (None: torch, or the op's plainer form). `kept` says whether it is used from now on. `refused` launches computed something else,
    or did not run."""

    op: str
    shape: tuple[Any, ...]
    before_us: float
    best_us: float
    launch: Any
    kept: bool
    tried: int
    refused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tuning:
    """What was measured, the file that keeps it, and how many places were left when the time was over."""

    device: str
    places: tuple[Tuned, ...]
    path: Path | None
    seconds: float
    left: int = 0

    def __str__(self) -> str:
        kept = sum(each.kept for each in self.places)
        lines = [f"{self.device}: {kept} of {len(self.places)} launches replaced in {self.seconds:.0f} s"]
        for each in self.places:
            shape = " x ".join(str(word).removeprefix("torch.") for word in each.shape)
            told = f"{each.before_us:.1f} us" + (f" -> {each.best_us:.1f} us, {each.launch or 'torch'}" if each.kept else " stay")
            lines.append(f"  {each.op} {shape}: {told}, {each.tried} tried" + (f", {len(each.refused)} refused" if each.refused else ""))
        if self.left:
            lines.append(f"  {self.left} places were left when the time was over: more minutes would measure them")
        return "\n".join(lines)


def seconds_of(run: Callable[[int], object], copies: int, device: torch.device) -> float:
    """Seconds of a run, one after another over all copies: the median of several replays of a CUDA graph, or of plain calls elsewhere."""
    if device.type != "cuda":
        spent = []
        for _ in range(3):
            began = time.perf_counter()
            run(0)
            spent.append(time.perf_counter() - began)
        return statistics.median(spent)
    for _ in range(2):
        run(0)
    torch.cuda.synchronize()
    graph, turns = torch.cuda.CUDAGraph(), max(copies, 8)
    with recorded(graph):
        for turn in range(turns):
            run(turn % copies)
    spent = []
    for _ in range(REPLAYS + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        spent.append(start.elapsed_time(end) / 1e3 / turns)
    return statistics.median(spent[1:])


def tune(
    model: Any, *, rows: Sequence[int] = (1,), length: int = 1024, minutes: float = 5.0, told: Callable[[int, int], object] | None = None
) -> Tuning:  # fmt: skip
    """Measure the launches of a patched model's kernels on this GPU, and use the fastest from now on, in later processes too.

    The shapes are those that short calls of `rows` prompts of up to `length` tokens ask for, by every assistant that the model is patched
    with. Every launch is held against the reference before it is timed; one that computes something else, or does not run, is refused.
    What reads most is measured first, until `minutes` have passed. The winners are kept in the cache folder, for this device, these shapes
    and dtypes, and the versions of torch, triton and fastspec. `told` is called with (places that are done, of how many). Where several
    processes hold the model together all of them call this; the first one measures, and calls `told`, and all use what it found.
    Raises Unsupported for an unpatched model, and for one that runs without kernels.
    """
    model = unwrapped(model)
    session = session_of(model)
    if session is None:
        raise Unsupported(f"this {type(model).__name__} is not patched: fastspec.patch(model) comes before fastspec.tune(model)")
    ops, device = session.ops(model, mode_for(model)), device_of(model)
    if ops.name != "triton":
        raise Unsupported(f"backend {ops.name!r} has no launches to tune: fastspec.tune is for Triton's kernels, on a CUDA device")
    if not minutes > 0:
        raise Unsupported(f"minutes={minutes}: a positive number is accepted")
    from fastspec.kernels.tuned_launches import name_of, recorded
    from fastspec.patches.tuning.candidates import bytes_of, trial

    began, group = time.perf_counter(), group_of(model)
    session.engines.clear()  # rounds that were captured before ask for nothing
    with recorded() as asked:
        warmup(model, rows=rows, length=length)
    session.engines.clear()
    waiting = sorted(asked.items(), key=lambda item: -bytes_of(item[0][0], item[1]))

    def measured() -> list[tuple[Key, Tuned]]:
        found: list[tuple[Key, Tuned]] = []
        for done, ((op, place), about) in enumerate(waiting):
            if told is not None:
                told(done, len(waiting))
            if found and time.perf_counter() - began > 60 * minutes:
                break
            with made_current(device), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                found.append(((op, place), tune_place(trial(op, place, about, device), device)))
        if told is not None:
            told(len(waiting), len(waiting))
        return found

    places = measured() if group is None else Ranks(group, device).by_first(measured)
    launches = {key: found.launch for key, found in places if found.kept}
    notes = {key: {"us": round(found.best_us, 2), "before_us": round(found.before_us, 2)} for key, found in places if found.kept}
    path = keep(device, launches, notes) if launches else None
    return Tuning(name_of(device), tuple(found for _, found in places), path, time.perf_counter() - began, len(waiting) - len(places))


def tune_place(trial: Any, device: torch.device) -> Tuned:
    """The fastest of a place's launches. Raises FastSpecError where the launch that is used now computes something else."""
    from fastspec.kernels.ahead import compile_ahead
    from fastspec.kernels.tuned_launches import MISSING

    wanted = tensors(trial.reference())[0]
    if device.type == "cuda":
        with suppress(Exception), torch.no_grad():  # a launch that does not compile is met again below, and refused there
            compile_ahead(partial(_each, trial), notice)
    with torch.no_grad():
        fault = wrong(trial, MISSING, wanted)
        if fault is not None:
            raise FastSpecError(f"{trial.op} {trial.about} is wrong with the launch that is used now: {fault}")
        before = seconds_of(partial(trial.run, MISSING), trial.copies, device)
        times, refused = [], []
        for launch in trial.launches:
            fault = wrong(trial, launch, wanted)
            if fault is None:
                times.append((seconds_of(partial(trial.run, launch), trial.copies, device), launch))
            else:
                refused.append(f"{launch}: {fault}")
    best, launch = min(times, key=lambda pair: pair[0], default=(before, MISSING))
    kept = best <= GAIN * before
    return Tuned(
        trial.op, trial.about, 1e6 * before, 1e6 * (best if kept else before), launch if kept else None, kept, len(trial.launches),
        tuple(refused),
    )  # fmt: skip


def _each(trial: Any) -> None:
    for launch in trial.launches:
        trial.run(launch, 0)


def wrong(trial: Any, launch: Any, wanted: torch.Tensor) -> str | None:
    """Why a launch cannot be used: it does not run, or what it computes; None where it can."""
    try:
        return unlike(tensors(trial.run(launch, 0))[0], wanted)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"
