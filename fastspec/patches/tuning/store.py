"""The file that keeps tuned launches: one for a device, a dtype and the versions of torch, triton and fastspec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fastspec import files
from fastspec.devices import MEASURED
from fastspec.generation.ops import Ops
from fastspec.kernels.tuned_launches import Place, install, name_of

FOLDER = "tuned"
Launches = dict[tuple[str, Place], Any]
_loaded: dict[str, Launches] = {}
"""What this process has read for a device's name."""


def path_of(device: torch.device) -> Path:
    """The file of a device and these versions."""
    from fastspec.kernels.launch import PORTABLE

    words = name_of(device), "portable" if PORTABLE else "whole", *files.versions().values()
    return files.cache_folder() / FOLDER / files.file_name(*words)


def use_tuned(device: torch.device) -> Launches:
    """Read what was tuned for a device, once, and let kernels use it -> the launches; a damaged file is ignored."""
    name = name_of(device)
    if name not in _loaded:
        _loaded[name] = read_launches(path_of(device))
        install(name, _loaded[name])
    return _loaded[name]


def read_launches(path: Path) -> Launches:
    """The launches in a file."""
    found = files.read(path)
    if found is None:
        return {}
    from fastspec.patches.tuning.candidates import KINDS

    try:
        return {(row["op"], _place(row["place"])): _launch(row["launch"], KINDS) for row in found["launches"]}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        files.ignore(path, f"no launches: {type(error).__name__}: {error}")
        return {}


def keep(device: torch.device, launches: Launches, rows: Mapping[tuple[str, Place], dict[str, Any]]) -> Path:
    """Add launches to a device's file and use them; `rows` says how they were found -> the file."""
    from fastspec.patches.tuning.candidates import KINDS

    path = path_of(device)
    before = files.read(path) or {}
    held = {(row["op"], _place(row["place"])): row for row in before.get("launches", [])} if read_launches(path) else {}
    for (op, place), launch in launches.items():
        kind = next((name for name, each in KINDS.items() if type(launch) is each), None)
        told = None if launch is None else {"kind": kind, **asdict(launch)}
        words = [str(each) if isinstance(each, torch.dtype) else each for each in place]
        held[op, place] = {"op": op, "place": words, "launch": told, **rows[op, place]}
    files.write(path, {"device": name_of(device), **files.versions(), "launches": list(held.values())})
    _loaded[name_of(device)] = {**use_tuned(device), **launches}
    install(name_of(device), _loaded[name_of(device)])
    return path


def forget() -> list[Path]:
    """Remove all that was tuned on this machine -> the files that held it."""
    paths = list(files.kept(FOLDER))
    for path in paths:
        path.unlink(missing_ok=True)  # several processes of one host may do so at once
    for name in _loaded:
        install(name, {})
    _loaded.clear()
    return paths


def tables_of(ops: Ops, dtype: torch.dtype, device: torch.device) -> str:
    """Source of a model's launches: "tuned" here, "shipped" for the device, "portable", or "none"."""
    if ops.name != "triton":
        return "none"
    if any(dtype in place for _, place in use_tuned(device)):
        return "tuned"
    from fastspec.kernels.launch import PORTABLE

    return "shipped" if name_of(device) in MEASURED and not PORTABLE else "portable"


def _place(words: list[Any]) -> Place:
    dtypes = {str(each): each for each in (torch.float32, torch.float16, torch.bfloat16)}
    if not isinstance(words, list):
        raise TypeError(f"a place is a list, not {words!r}")
    return tuple(dtypes.get(each, each) if isinstance(each, str) else each for each in words)


def _launch(told: dict[str, Any] | None, kinds: Mapping[str, Any]) -> Any:
    if told is None:
        return None
    return kinds[told["kind"]](**{name: value for name, value in told.items() if name != "kind"})
