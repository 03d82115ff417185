"""The name that fastspec is installed under, which is not the name that it is imported under.

The distribution `fastspec` of the package index is another project's, and puts its files into a folder of the same
name.
"""

from __future__ import annotations

import json
import warnings
from functools import cache
from importlib import metadata
from pathlib import Path

DISTRIBUTION = "fastspec-transformers"
STRANGER = "fastspec"
"""The distribution of another project that is imported under our name."""
PACKAGE = Path(__file__).resolve().parent


def install_command(extra: str, package: Path = PACKAGE) -> str:
    """The command that installs what an extra of pyproject.toml lists, from where the fastspec that is running came
    from: a checkout, a file, a repository, or an index that had it by its name."""
    if _is_checkout(package.parent):
        return f'pip install -e "{package.parent}[{extra}]"'
    try:
        origin = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return f'pip install -e ".[{extra}]", in a checkout of the project'
    if origin is None:
        return f'pip install "{DISTRIBUTION}[{extra}]"'
    told = json.loads(origin)
    url = str(told["url"])
    if "dir_info" in told:
        return f'pip install "{url.removeprefix("file://")}[{extra}]"'
    if "vcs_info" in told:
        url = f"{told['vcs_info']['vcs']}+{url}@{told['vcs_info']['commit_id']}"
    return f'pip install "{DISTRIBUTION}[{extra}] @ {url}"'


def _is_checkout(folder: Path) -> bool:
    """True where pyproject.toml of this folder makes the distribution."""
    file = folder / "pyproject.toml"
    return file.is_file() and f'name = "{DISTRIBUTION}"' in file.read_text(encoding="utf-8")


def stranger_in(folder: Path) -> tuple[str, bool] | None:
    """The version of a distribution `fastspec`, and whether it has put an `__init__.py` into this folder; None where
    there is none."""
    try:
        found = metadata.distribution(STRANGER)
    except metadata.PackageNotFoundError:
        return None
    ours = (folder / "__init__.py").resolve()
    files = (file for file in found.files or () if file.name == "__init__.py")
    return found.version, any(Path(str(found.locate_file(file))).resolve() == ours for file in files)


@cache
def warn_of_stranger() -> None:
    """Warn, once a process, where another project's distribution is in this environment: before its files and ours
    meet, and where one has replaced the other's."""
    found = stranger_in(PACKAGE)
    if found is None:
        return
    version, mixed = found
    if mixed:
        said = (
            f"was installed into the same folder as {DISTRIBUTION} ({PACKAGE}), and each overwrites the other's "
            f"files: pip uninstall {STRANGER} {DISTRIBUTION}, then install {DISTRIBUTION} again"
        )
    else:
        said = (
            f"is in this environment too. `import fastspec` gives {DISTRIBUTION} here ({PACKAGE}) and may give the "
            f"other from elsewhere, and installing one where the other is overwrites its files: pip uninstall "
            f"{STRANGER}, or use an environment for each"
        )
    warnings.warn(f"{STRANGER} {version}, a distribution of another project, {said}", stacklevel=3)
