"""Launches that were tuned on this machine: a kernel's host function asks for one before it reads its own table.

A place is an op, a device's name, and what the op's launch may depend on. None in place of a launch means that torch,
or the op's plainer form, was faster. While `recorded` is open the places that are asked for are taken down, with what
is needed to measure them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeAlias

import torch

Place: TypeAlias = tuple[Hashable, ...]
MISSING = object()
"""Answer of `find` where nothing was tuned."""
_launches: dict[tuple[str, str, Place], Any] = {}
_asked: dict[tuple[str, Place], Any] | None = None


@lru_cache
def name_of(device: torch.device) -> str:
    """The name of a GPU, or the type of another device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def find(op: str, device: torch.device, place: Place, about: Any, otherwise: Any = MISSING) -> Any:
    """The launch that was tuned for a place, or another. `about` says what was asked for, for `recorded`."""
    if _asked is not None:
        _asked.setdefault((op, place), about)
    return _launches.get((name_of(device), op, place), otherwise) if _launches else otherwise


def install(device: str, launches: Mapping[tuple[str, Place], Any]) -> None:
    """Use these launches, and no others that were tuned, on devices of a name."""
    for key in [key for key in _launches if key[0] == device]:
        del _launches[key]
    _launches.update({(device, op, place): launch for (op, place), launch in launches.items()})


def installed(device: str) -> dict[tuple[str, Place], Any]:
    """The launches in use on devices of a name."""
    return {(op, place): launch for (name, op, place), launch in _launches.items() if name == device}


@contextmanager
def recorded() -> Iterator[dict[tuple[str, Place], Any]]:
    """The places that are asked for in the block, in order, each with what was first said of it."""
    global _asked
    before, _asked = _asked, {}
    try:
        yield _asked
    finally:
        _asked = before


@contextmanager
def forced(op: str, device: torch.device, place: Place, launch: Any) -> Iterator[None]:
    """Use a launch at a place in the block; MISSING: that of the op's own table."""
    key = name_of(device), op, place
    before = _launches.pop(key, MISSING)
    if launch is not MISSING:
        _launches[key] = launch
    try:
        yield
    finally:
        _launches.pop(key, None)
        if before is not MISSING:
            _launches[key] = before
