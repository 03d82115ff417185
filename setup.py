"""Steps of a build that pyproject.toml has no words for: it starts without what an earlier build left, refuses an
environment that has another project's distribution `fastspec`, whose folder has the same name, and makes README a text
that leads somewhere outside a checkout."""

import importlib.metadata
import re
import shutil
import sysconfig
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
STRANGER = "fastspec"
PICTURE = re.compile(r'<picture>.*?alt="([^"]*)".*?</picture>', re.DOTALL)
LINK = re.compile(r"\[([^\]]+)\]\((?!\w+:)([^)]+)\)")
SOURCE = re.compile(r'\b(src(?:set)?=")(?!\w+:)')


def index_text(readme: str, project: str) -> str:
    """README for an index, which has no files beside it: links and pictures by the address `Repository` of
    [project.urls] in pyproject.toml, and their words alone as long as there is none."""
    address = re.search(r'^\[project\.urls\]$[^\[]*?^Repository = "([^"]+)"', project, re.MULTILINE)
    if address is None:
        return LINK.sub(r"\1", PICTURE.sub(r"\1", readme))
    return SOURCE.sub(rf"\1{address[1]}/raw/HEAD/", LINK.sub(rf"[\1]({address[1]}/blob/HEAD/\2)", readme))


class FreshBuild(build_py):
    """Build of the package's files into an empty folder: modules that were deleted since an earlier build stay away."""

    def run(self) -> None:
        places = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
        for found in importlib.metadata.distributions(name=STRANGER, path=places):
            raise SystemExit(
                f"{found.metadata['Name']} {found.version}, a distribution of another project, is in {places[0]}, and "
                f"both put their files into a folder `fastspec` there: run `pip uninstall {STRANGER}` first, or "
                f"install into another environment. A wheel alone is built by `python -m build`."
            )
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


if __name__ == "__main__":
    text = index_text(*((HERE / name).read_text(encoding="utf-8") for name in ("README.md", "pyproject.toml")))
    setup(cmdclass={"build_py": FreshBuild}, long_description=text, long_description_content_type="text/markdown")
