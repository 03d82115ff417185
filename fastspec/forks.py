"""Locks in a forked process, which has none of its parent's other threads: what these held would stay locked."""

from __future__ import annotations

import os
import sys
from typing import Protocol
from weakref import WeakSet


class Forks(Protocol):
    """Object with locks or a thread of its own."""

    def forked(self) -> None:
        """Take new locks. The thread that calls is the only one of the process."""


_told: WeakSet[Forks] = WeakSet()


def at_fork(owner: Forks) -> None:
    """Let `owner.forked()` be called in every process that is forked from this one, as long as the object lives."""
    _told.add(owner)


def _after() -> None:
    for owner in list(_told):
        owner.forked()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_after)
