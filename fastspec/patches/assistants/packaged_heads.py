"""Heads that packages beside fastspec bring, found by name."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from fastspec.errors import CheckpointError

HEADS = {
    "smollm2-135m-instruct": "fastspec_smollm2_heads",
    "smollm2-135m-instruct-eagle": "fastspec_smollm2_heads",
}
"""Head -> the package with a folder of the head's name. Its distribution, and its folder under `packages/`, have dashes
instead."""
LEFT = {
    "smollm2-135m-instruct-wide": "the tag `laboratory` of fastspec's repository keeps it: check out "
    "fastspec/heads/smollm2-135m-instruct-wide of it and give that path",
}
"""Head that was removed -> how to get it."""


def packaged_head(name: str) -> Path | None:
    """The folder of the head `name`; None where no package is known for it. The package is found but not imported.

    Raises CheckpointError, with the command that installs it, where the package is missing, and for a head that was
    removed.
    """
    if name in LEFT:
        raise CheckpointError(f"the head {name} was removed from fastspec: {LEFT[name]}")
    if name not in HEADS:
        return None
    folder = _folder(HEADS[name])
    if folder is None:
        distribution = _distribution(HEADS[name])
        raise CheckpointError(
            f"the head {name} comes with the package {distribution}, which is not installed: in a checkout of "
            f"fastspec, {_command(distribution)}"
        )
    return folder / name


def names_of_heads() -> str:
    """A list for errors: every head that has a name, with its package's command where that is not installed."""
    return ", ".join(
        name if _folder(package) else f"{name} ({_command(_distribution(package))})" for name, package in HEADS.items()
    )


def _folder(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    return next(map(Path, spec.submodule_search_locations or ()), None) if spec else None


def _distribution(package: str) -> str:
    return package.replace("_", "-")


def _command(distribution: str) -> str:
    return f"pip install ./packages/{distribution}"
