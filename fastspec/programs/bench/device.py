"""The device that a bench runs on: its name and software, and the floor that reading the weights sets."""

from __future__ import annotations

import contextlib
import importlib
import os
import statistics
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import fastspec
from fastspec.devices import device_name
from fastspec.programs.bench.prompts import Row
from fastspec.programs.compare import Stopwatch


def floor(model: Any) -> tuple[float, Row]:
    """(milliseconds, columns) of the least time of a pass: every weight read once, at the bandwidth measured here."""
    from fastspec.patches.assistants.speculative import read_parameters

    weights = sum(p.numel() * p.element_size() for p in read_parameters(model))
    speed = read_bandwidth(model.device)
    return 1e3 * weights / speed, {"weight_bytes": weights, "read_gb_per_s": round(speed / 1e9, 1)}


def read_bandwidth(device: Any, mib: int = 512, times: int = 7) -> float:
    """Bytes per second, the median of several: a sum on the CPU, a copy on CUDA, which reads and writes each byte."""
    import torch

    data = torch.ones(mib * 2**18, device=device)
    target = torch.empty_like(data) if data.is_cuda else None
    spent = []
    for _ in range(times + 1):
        with Stopwatch(data.device) as watch:
            data.sum() if target is None else target.copy_(data)
        spent.append(watch.seconds)
    return data.numel() * 4 * (2 if data.is_cuda else 1) / statistics.median(spent[1:])


def versions() -> Row:
    """Versions of torch, triton (None where it is not installed), transformers, fastspec, and the commit of this tree,
    with "-dirty" where files were changed (None outside of a repository)."""
    found: Row = {}
    for name in ("torch", "triton", "transformers"):
        with contextlib.suppress(ModuleNotFoundError):
            found[name] = importlib.import_module(name).__version__  # a nightly triton is installed under another name
    root = Path(fastspec.__file__).parent.parent
    commit = None
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude", "*"]
        commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
    return {"triton": None} | found | {"fastspec": fastspec.__version__, "commit": commit}


def environment(model: Any) -> Row:
    """Place and time: what every row carries beside its figures."""
    import torch

    return {
        "device": device_name(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        **versions(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
