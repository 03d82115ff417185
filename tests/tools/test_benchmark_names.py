"""The names of the benchmarks' files, whose folder comes first where one of them runs."""

from __future__ import annotations

import sys
from pathlib import Path

from transformers.utils import import_utils

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_no_file_takes_the_name_of_a_package_that_transformers_looks_for_or_of_pythons_own():
    names = {path.stem for path in FOLDER.glob("*.py")}
    looked_for = {
        name.removeprefix("is_").removesuffix("_available")
        for name in vars(import_utils)
        if name.endswith("_available")
    }
    assert "kernels" in looked_for
    assert not names & (looked_for | set(sys.stdlib_module_names))
