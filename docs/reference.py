"""Build the reference of the Python interface from its docstrings: `make docs`, or `python docs/reference.py site` with
the extra "docs".

Nothing is fetched, and no model is loaded. A public name without a docstring is an error, and so is one that cannot be
found.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from importlib import import_module
from pathlib import Path

MODULES = (
    "fastspec",
    "fastspec.models",
    "fastspec.patches.assistants.heads",
    "fastspec.patches.assistants.probe",
    "fastspec.programs.bench.run",
    "fastspec.programs.training.config",
    "fastspec.programs.training.entry",
)
"""What the pages use; `fastspec` holds most of it."""


def undocumented(module: str) -> list[str]:
    """The public classes and functions of a module that have no docstring."""
    held = import_module(module)
    names = getattr(held, "__all__", None) or [
        name for name, value in vars(held).items() if getattr(value, "__module__", None) == module
    ]
    public = {name: getattr(held, name) for name in names if not name.startswith("_")}
    return [f"{module}.{name}" for name, value in public.items() if callable(value) and not inspect.getdoc(value)]


def build(folder: Path) -> None:
    """Write the pages into a folder."""
    import pdoc

    import fastspec

    missing = [name for module in MODULES for name in undocumented(module)]
    if missing:
        raise SystemExit(f"no docstring: {', '.join(missing)}")
    for name in fastspec.__all__:  # they load on first use, and pdoc lists what is there
        setattr(fastspec, name, getattr(fastspec, name))
    pdoc.render.configure(footer_text=f"fastspec {fastspec.__version__}", show_source=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pdoc.pdoc(*MODULES, output_directory=folder)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # the pages of this checkout, whatever is installed
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "site")
    build(target)
    print(f"written to {target / 'index.html'}")
