"""Compiled libraries of the kernels for CPUs: one folder for all processes of a run, each compiles what is missing."""

from __future__ import annotations

import os
from pathlib import Path


def share_libraries(cache: str | Path) -> None:
    """Let a folder for FASTSPEC_CACHE hold the libraries of the whole run, and all else by itself."""
    shared, own = Path(os.environ["FASTSPEC_TESTS_LIBRARIES"]) / "libraries", Path(cache) / "kernels"
    shared.mkdir(parents=True, exist_ok=True)
    own.parent.mkdir(parents=True, exist_ok=True)
    own.symlink_to(shared, target_is_directory=True)
