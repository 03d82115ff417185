"""The process of a server's rounds starts where torch and transformers have been imported once."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from helpers.processes import forks

from fastspec.programs.serving import remote


@pytest.fixture(scope="module", autouse=True)
def imported_once() -> Iterator[None]:
    """`Remote` spawns its process; slow tests, and those that start a program, leave it so."""
    with pytest.MonkeyPatch.context() as patch:
        parent = {"parent_process": lambda: multiprocessing.parent_process()}
        patch.setattr(remote, "multiprocessing", SimpleNamespace(get_context=lambda method: forks(), **parent))
        yield
