"""The names of the benchmarks' files, whose folder comes first where one of them runs."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

from transformers.utils import import_utils

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_no_file_takes_the_name_of_a_package_that_transformers_or_this_environment_imports():
    names = {path.stem for path in FOLDER.glob("*.py")}
    looked_for = {name.removeprefix("is_").removesuffix("_available") for name in vars(import_utils) if name.endswith("_available")}
    assert "kernels" in looked_for
    taken = looked_for | set(importlib.metadata.packages_distributions()) | set(sys.stdlib_module_names)
    assert not names & taken
