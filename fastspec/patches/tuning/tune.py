"""`fastspec.tune`: the fastest correct launch for every place that a model's calls ask for."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, product
from pathlib import Path
from typing import Any, TypeAlias

import torch

from fastspec.devices import made_current
from fastspec.errors import FastSpecError, Unsupported
from fastspec.generation.capture import recorded
from fastspec.kernels import tuned_launches
from fastspec.patches.backends import notice
from fastspec.patches.call.ranks import Ranks, by_first, refuse_beside
from fastspec.patches.checks.self_check import tensors, unlike
from fastspec.patches.hf.compat import device_of, unwrapped
from fastspec.patches.hf.config_fields import position_limit
from fastspec.patches.hf.modes import mode_for
from fastspec.patches.hf.parallel import group_of
from fastspec.patches.session import PatchSession, patched_session, session_of
from fastspec.patches.tuning.store import keep, use_tuned
from fastspec.patches.warmup import assistants_of, warmup

Key: TypeAlias = tuple[str, tuple[Hashable, ...]]
"""An op and a place."""
HARM = 1.003
"""Launches are dropped with which calls take more than this share of their time without them; less is noise."""
NEW = 48
"""Tokens of a call."""
ATTENTION = ("few_attention", "tree_attention")


def call_times(model: Any, names: Sequence[str], rows: Sequence[int], length: int) -> list[float]:
    """Seconds of a round of every assistant and number of rows, behind up to `length` random tokens: the median of
    three calls, behind two that compile and capture."""
    session, device, found = session_of(model), device_of(model), []
    assert session is not None
    width = max(1, min(length, (position_limit(model.config) or length + NEW) - NEW))
    for name, count in product(names, rows):
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(0)  # in all processes
            ids = torch.randint(model.config.get_text_config().vocab_size, (count, width), device=device)
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "assistant": name}
        options = {"max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}
        times = []
        for _ in range(5):
            model.generate(**given, **options)
            last = session.calls[-1]
            times.append((last.seconds - last.phases["prefill"]) / max(1, last.rounds))
        found.append(statistics.median(times[2:]))
    return found


def in_rounds(op: str, about: Sequence[Any]) -> bool:
    """True where rounds ask for a place, as `candidates.trial` describes it, and not prompts alone."""
    return op not in ATTENTION or about[1] == 1 or not about[6]


def kind_of(key: Key) -> tuple[str, bool]:
    """Places whose launches are judged together: of an op, with one row or more."""
    op, place = key
    return op, op not in ATTENTION and place[0] == 1


def harmless(
    found: Mapping[Key, Any],
    use: Callable[[Mapping[Key, Any]], None],
    times: Callable[[], list[float]],
    agreed: Callable[[float], float],
    late: Callable[[], bool],
) -> set[Key]:
    """Launches with which calls take no longer, tried kind by kind, and of a slower kind one by one until it is `late`.
    `use` lets launches be used, `times` measures calls, and `agreed` is the first process's word for a number."""
    use({})
    before, kept = times(), set[Key]()
    best = 1.0

    def slows(more: Sequence[Key]) -> bool:
        nonlocal best
        use({key: found[key] for key in (*kept, *more)})
        ratio = agreed(statistics.mean(now / then for now, then in zip(times(), before, strict=True)))
        if ratio > best * HARM:
            return True
        best = min(best, ratio)
        kept.update(more)
        return False

    for _, group in groupby(sorted(found, key=lambda key: (kind_of(key), str(key))), key=kind_of):
        keys = list(group)
        if slows(keys) and len(keys) > 1:
            for key in keys:
                if agreed(float(late())):
                    break
                slows([key])
    return kept


GAIN = 0.98
"""A launch replaces the shipped one where it takes at most this share of its time: less is noise."""
REPLAYS = 7


@dataclass(frozen=True, slots=True)
class Tuned:
    """One place: op, shape, microseconds with the launch before and with the fastest, and that launch (None: torch, or
    the op's plainer form). `kept` says whether it is used; one that `harms` is slower in calls. `refused` launches
    computed something else, or did not run."""

    op: str
    shape: tuple[Any, ...]
    before_us: float
    best_us: float
    launch: Any
    kept: bool
    tried: int
    refused: tuple[str, ...] = ()
    harms: bool = False


@dataclass(frozen=True, slots=True)
class Tuning:
    """Measurements, the file that keeps them, and how many places were left when the time was over."""

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
            stays = f" stay, {each.best_us:.1f} us are slower in calls" if each.harms else " stay"
            goes = f" -> {each.best_us:.1f} us, {each.launch or 'torch'}" if each.kept else stays
            refused = f", {len(each.refused)} refused" if each.refused else ""
            lines.append(f"  {each.op} {shape}: {each.before_us:.1f} us{goes}, {each.tried} tried{refused}")
        if self.left:
            lines.append(f"  {self.left} places were left when the time was over: more minutes would measure them")
        return "\n".join(lines)


def seconds_of(run: Callable[[int], object], copies: int, device: torch.device) -> float:
    """Seconds of a run over all copies in turn: the median of replays of a CUDA graph, or of plain calls elsewhere."""
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
    model: Any,
    *,
    rows: Sequence[int] = (1,),
    length: int = 1024,
    minutes: float = 5.0,
    told: Callable[[int, int], object] | None = None,
) -> Tuning:
    """Measure the launches of a patched model's kernels on this GPU, and use the fastest from now on, in later
    processes too.

    The shapes are those of short calls of `rows` prompts of up to `length` tokens, by every assistant of the patch.
    Every launch is held against the reference before it is timed; what reads most is measured first, until `minutes`
    have passed. Winners that make calls behind `length` tokens slower are dropped: kind by kind, and of such a kind one
    by one, while half of the minutes more have not passed. The others are kept in the cache folder, for this device,
    these shapes and dtypes, and the versions of torch, triton and fastspec. `told` is called with (places that are
    done, of how many). Of processes that hold the model together, all call this, the first measures, and all use what
    it found. Raises Unsupported for an unpatched model, and for one that runs without kernels.
    """
    model = unwrapped(model)
    session = patched_session(model, "fastspec.patch(model) comes before fastspec.tune(model)")
    ops, device = session.ops(model, mode_for(model)), device_of(model)
    if ops.name != "triton":
        raise Unsupported(
            f"backend {ops.name!r} has no launches to tune: fastspec.tune is for Triton's kernels, on a CUDA device"
        )
    if not minutes > 0:
        raise Unsupported(f"minutes={minutes}: a positive number is accepted")
    from fastspec.patches.tuning.candidates import bytes_of, trial

    began, group, tell = time.perf_counter(), group_of(model), told or (lambda done, of: None)
    refuse_beside(group, "tune")
    session.engines.clear()  # rounds that were captured before ask for nothing
    with tuned_launches.recorded() as asked:
        warmup(model, rows=rows, length=length)
    session.engines.clear()
    waiting = sorted(asked.items(), key=lambda item: -bytes_of(item[0][0], item[1]))

    def measured() -> tuple[list[tuple[Key, Tuned]], set[Key]]:
        """The first process's places, and those that rounds ask for."""
        found: list[tuple[Key, Tuned]] = []
        for done, ((op, place), about) in enumerate(waiting):
            tell(done, len(waiting))
            if found and time.perf_counter() - began > 60 * minutes:
                break
            with made_current(device), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                found.append(((op, place), tune_place(trial(op, place, about, device), device)))
        tell(len(waiting), len(waiting))
        return found, {(op, place) for (op, place), about in asked.items() if in_rounds(op, about)}

    ranks = None if group is None else Ranks(group, device)
    places, of_rounds = by_first(model, measured)
    judged = {key: found.launch for key, found in places if found.kept and key in of_rounds}
    kept = _in_calls(model, session, ranks, judged, rows, length, began + 90 * minutes) if judged else judged.keys()
    places = [
        (key, replace(found, kept=False, harms=True) if key in judged and key not in kept else found)
        for key, found in places
    ]
    winners = {key: found for key, found in places if found.kept}
    path = None
    if winners:
        notes = {
            key: {"us": round(each.best_us, 2), "before_us": round(each.before_us, 2)} for key, each in winners.items()
        }
        path = keep(device, {key: each.launch for key, each in winners.items()}, notes)
    seconds, left = time.perf_counter() - began, len(waiting) - len(places)
    return Tuning(tuned_launches.name_of(device), tuple(found for _, found in places), path, seconds, left)


def _in_calls(
    model: Any,
    session: PatchSession,
    ranks: Ranks | None,
    found: Mapping[Key, Any],
    rows: Sequence[int],
    length: int,
    end: float,
) -> Set[Key]:
    """Those of the launches that make no call slower. What is left to look at when `end` has passed is dropped."""
    device = device_of(model)
    name, before = tuned_launches.name_of(device), use_tuned(device)
    # without nasd: its rounds are as long as the host is busy
    assistants = [each for each in assistants_of(session) if each != "nasd"]

    def use(more: Mapping[Key, Any]) -> None:
        tuned_launches.install(name, {**before, **more})
        session.engines.clear()

    def agreed(mine: float) -> float:
        return mine if ranks is None else ranks.first_value(mine)

    try:
        return harmless(
            found, use, partial(call_times, model, assistants, rows, length), agreed, lambda: time.perf_counter() > end
        )
    finally:
        use({})


def tune_place(trial: Any, device: torch.device) -> Tuned:
    """The fastest of a place's launches. Raises FastSpecError where the one that is used computes something else."""
    from fastspec.kernels.ahead import compile_ahead

    wanted = tensors(trial.reference())[0]
    if device.type == "cuda":
        # a launch that does not compile is met again below, and refused there
        with suppress(Exception), torch.no_grad():
            compile_ahead(lambda: [trial.run(launch, 0) for launch in trial.launches], notice)
    with torch.no_grad():
        fault = wrong(trial, tuned_launches.MISSING, wanted)
        if fault is not None:
            raise FastSpecError(f"{trial.op} {trial.about} is wrong with the launch that is used now: {fault}")
        before = seconds_of(partial(trial.run, tuned_launches.MISSING), trial.copies, device)
        if trial.same_bits:
            wanted = tensors(trial.run(tuned_launches.MISSING, 0))[0]
        times, refused = [], []
        for launch in trial.launches:
            fault = wrong(trial, launch, wanted)
            if fault is None:
                times.append((seconds_of(partial(trial.run, launch), trial.copies, device), launch))
            else:
                refused.append(f"{launch}: {fault}")
    best, launch = min(times, key=lambda pair: pair[0], default=(before, tuned_launches.MISSING))
    kept = best <= GAIN * before
    best, launch = (best, launch) if kept else (before, None)
    tried = len(trial.launches)
    return Tuned(trial.op, trial.about, 1e6 * before, 1e6 * best, launch, kept, tried, tuple(refused))


def wrong(trial: Any, launch: Any, wanted: torch.Tensor) -> str | None:
    """Reason against a launch: its error, or what it computes; None where it can be used."""
    try:
        got = tensors(trial.run(launch, 0))[0]
        if trial.same_bits and launch is not tuned_launches.MISSING and not torch.equal(got, wanted):
            return "its bits are others than those of the launch that is used now"
        return unlike(got, wanted)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"
