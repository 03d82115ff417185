"""The name that fastspec is installed under, which is not the name that it is imported under.

The distribution `fastspec` of the package index is another project's, and puts its files into a folder of the same
name.
"""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path

DISTRIBUTION = "fastspec-transformers"
STRANGER = "fastspec"
"""The distribution of another project that is imported under our name."""


def install_command(extra: str) -> str:
    """The command that installs what an extra of pyproject.toml lists, beside the fastspec that is running."""
    return f'pip install "{DISTRIBUTION}[{extra}]"'


def stranger_in(folder: Path) -> str | None:
    """The version of a distribution `fastspec` that has put an `__init__.py` into this folder, None where there is
    none."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        found = distribution(STRANGER)
    except PackageNotFoundError:
        return None
    ours = (folder / "__init__.py").resolve()
    files = (file for file in found.files or () if file.name == "__init__.py")
    return found.version if any(Path(str(found.locate_file(file))).resolve() == ours for file in files) else None


@cache
def warn_of_stranger() -> None:
    """Warn, once a process, where another project's files lie among ours: whichever was installed last has replaced the
    other's."""
    version = stranger_in(Path(__file__).parent)
    if version is not None:
        warnings.warn(
            f"{STRANGER} {version}, a distribution of another project, was installed into the same folder as "
            f"{DISTRIBUTION} "
            f"({Path(__file__).parent}), and each overwrites the other's files: pip uninstall {STRANGER} "
            f"{DISTRIBUTION}, then install "
            f"{DISTRIBUTION} again",
            stacklevel=3,
        )
