"""Steps of a build that pyproject.toml has no words for: it starts without what an earlier build left, and refuses an
environment that has another project's distribution `fastspec`, whose folder has the same name."""

import importlib.metadata
import shutil
import sysconfig

from setuptools import setup
from setuptools.command.build_py import build_py

STRANGER = "fastspec"


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


setup(cmdclass={"build_py": FreshBuild})
