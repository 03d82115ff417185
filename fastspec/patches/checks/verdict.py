"""The self-check: kernels are held against their references before the first use on a device that they were never
tested on, and those in C++, which the machine's own compiler made, on every machine.

Once for a device, a dtype, the versions of torch, triton and fastspec, and a compiled library: the verdict is kept in
the cache folder, but for one that an error has ended. The environment's FASTSPEC_SELF_CHECK says "auto" (that),
"always" (on every device, in every process) or "never".
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from fastspec import files
from fastspec.devices import MEASURED, device_name
from fastspec.errors import FastSpecError, Unsupported
from fastspec.generation.drafters.head_drafter import EagleDrafter
from fastspec.generation.ops import Ops
from fastspec.kernels.native import build
from fastspec.kernels.native.ops import ENDINGS
from fastspec.patches.backends import notice

SETTING = "FASTSPEC_SELF_CHECK"
MODES = ("auto", "always", "never")
FOLDER = "self_check"
_known: dict[tuple[str, ...], list[list[str]]] = {}
"""What this process has found or read: the key of a check -> the failures."""
_turn = threading.Lock()


def mode() -> str:
    """The setting. Raises Unsupported for one that is unknown."""
    found = os.environ.get(SETTING) or "auto"
    if found not in MODES:
        raise Unsupported(f"{SETTING}={found!r} in the environment: accepted are {', '.join(MODES)}")
    return found


def self_check(ops: Ops, dtype: torch.dtype, device: torch.device, drafts: type[EagleDrafter] | None = None) -> None:
    """Check a backend's kernels in a dtype on a device, where that was not done; with `drafts` that drafter's phase
    alone. Raises FastSpecError with the names of kernels that differ; nothing else runs in their place."""
    wanted = mode()
    if wanted == "never" or ops.name not in ("triton", "cpp") or (ops.name == "cpp" and dtype not in ENDINGS):
        return
    name = device_name(device)
    if ops.name == "cpp":
        made = {"library": build.library_name()}
    else:
        from fastspec.kernels.launch import PORTABLE

        if wanted == "auto" and (device.type != "cuda" or name in MEASURED):
            return
        made = {"portable": str(PORTABLE)} | ({"exact": "True"} if ops.exact else {})
        made |= {} if ops.stored_linears is None else {"stored": "True"}
    dtype = dtype if dtype in (torch.float32, torch.float16, torch.bfloat16) else torch.bfloat16
    about = {"device": name, "dtype": str(dtype).removeprefix("torch."), **made, **files.versions()}
    about |= {} if drafts is None else {"drafter": drafts.__name__}
    key, path = tuple(about.values()), files.cache_folder() / FOLDER / files.file_name(*about.values())
    with _turn:
        failures = _known.get(key)
        if failures is None:
            failures = None if wanted == "always" else _read(path, about)
            lasting = True
            if failures is None:
                failures, lasting = _run(ops, dtype, device, about, path, drafts)
            if lasting:
                _known[key] = failures
    if failures:
        told = "; ".join(f"{check}: {what}" for check, what in failures)
        kept = f"The verdict is kept in {path}; {SETTING}=always in the environment checks again"
        versions = ", ".join(f"{name} {value}" for name, value in files.versions().items())
        others = (
            'fastspec.patch(model, backend="torch")' if drafts is None else f"An assistant without {drafts.__name__}"
        )
        raise FastSpecError(
            f"kernels of backend {ops.name!r} do not compute on {name} in {about['dtype']} what their references do: "
            f"{told}. {others} runs without them. Please report this with the versions {versions}. "
            f"{kept if key in _known else 'An error may pass: nothing of it is kept, and the next patch checks again'}"
        )


def _read(path: Path, about: dict[str, str]) -> list[list[str]] | None:
    found = files.read(path)
    if found is None:
        return None
    failures = found.get("failures")
    well = isinstance(failures, list) and all(
        isinstance(each, list) and [type(x) for x in each] == [str, str] for each in failures
    )
    if not well or found.get("about") != about:
        files.ignore(path, "it holds no verdict on this device")
        return None
    return failures


def _run(
    ops: Ops,
    dtype: torch.dtype,
    device: torch.device,
    about: dict[str, str],
    path: Path,
    drafts: type[EagleDrafter] | None,
) -> tuple[list[list[str]], bool]:
    """Check -> the failures, and whether they are to be kept."""
    from fastspec.patches.checks.compare import launcher, problems

    new = "" if device.type == "cpu" else ", which they were not tested on"
    notice(f"checking the kernels on {about['device']} in {about['dtype']}{new}, once for this machine")
    began, part = time.perf_counter(), () if drafts is None else ((), drafts)
    with torch.random.fork_rng(devices=[]), torch.no_grad():  # what a user's seed draws must not change
        if ops.name == "triton":
            from fastspec.kernels.ahead import compile_ahead

            with suppress(Exception):  # a kernel that does not compile is met, and named, by its own check
                compile_ahead(launcher(ops, dtype, device, *part), notice)
        found = list(problems(ops, dtype, device, *part))
    failures = [[problem.check, problem.what] for problem in found]
    if any(problem.raised for problem in found):
        return failures, False
    row: dict[str, Any] = {"about": about, "failures": failures, "seconds": round(time.perf_counter() - began, 2)}
    files.write(path, row | {"date": datetime.now(timezone.utc).isoformat(timespec="seconds")})
    return failures, True
