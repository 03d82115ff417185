"""Hooks of the site's build (`mkdocs.yml`): the command line's reference from the program itself, and the files outside
docs/ that pages link to.

A link that leads nowhere, and a public name without a docstring, end the build.
"""

from __future__ import annotations

import inspect
import os
import posixpath
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

import typer

ROOT = Path(__file__).parents[1]
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
COMMANDS = "<!-- commands -->"
"""The line of reference/cli.md that the commands take the place of."""
OUTSIDE = "repository"
"""Folder of the site that holds what pages link to and docs/ does not have."""
PICTURE = re.compile(r'<picture>.*?srcset="([^"]*)".*?alt="([^"]*)" src="([^"]*)".*?</picture>', re.DOTALL)
LISTED = re.compile(r"\n\nCommands:\n.*", re.DOTALL)
LINK = re.compile(r"""(\]\(|\bsrc(?:set)?=")([^)\s"#]*)(#[^)\s"]*)?(?=[)"])""")
FENCED = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


def undocumented(module: str) -> list[str]:
    """The public classes and functions of a module that have no docstring."""
    held = import_module(module)
    names = getattr(held, "__all__", None) or [
        name for name, value in vars(held).items() if getattr(value, "__module__", None) == module
    ]
    public = {name: getattr(held, name) for name in names if not name.startswith("_")}
    return [f"{module}.{name}" for name, value in public.items() if callable(value) and not inspect.getdoc(value)]


def named(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The words that name a command, and the command; then those of its subcommands."""
    yield words, command
    for name, sub in getattr(command, "commands", {}).items():
        yield from named(sub, (*words, name))


def listed(words: tuple[str, ...], command: Any) -> str:
    """The subcommands of a command as a list of links to their sections; `--help` cuts what it says of each."""
    subs = getattr(command, "commands", {})
    lines = [f"- [{name}](#{'-'.join(('fastspec', *words, name))}): {sub.help}" for name, sub in subs.items()]
    return "".join(("\n\n", "\n".join(lines))) if lines else ""


def commands() -> str:
    """The reference of the command line: what `--help` prints, command by command."""
    from fastspec.programs.cli.app import app

    plain = {**os.environ, "TYPER_USE_RICH": "0", "COLUMNS": "100", "PYTHONPATH": str(ROOT)}
    parts = []
    for words, command in named(typer.main.get_command(app)):
        told = subprocess.run(
            [sys.executable, "-m", "fastspec", *words, "--help"], env=plain, capture_output=True, text=True, check=True
        )
        text = LISTED.sub("", told.stdout.strip())
        parts.append(f"## {' '.join(('fastspec', *words))}\n\n```text\n{text}\n```{listed(words, command)}")
    return "\n\n".join(parts)


def outside(source: str, link: str) -> str | None:
    """The path in the repository of what a page of the repository links to, None within docs/ and for addresses."""
    if not link or re.match(r"\w+:", link):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    return None if PurePosixPath(path).parts[0] == "docs" else path


def source_of(uri: str) -> str:
    """The path in the repository of a file of the site."""
    held = PurePosixPath(uri)
    return posixpath.relpath(uri, OUTSIDE) if held.parts[0] == OUTSIDE else f"docs/{uri}"


def links(text: str) -> Iterator[str]:
    """The targets of a page's links, without those in blocks of code."""
    return (match[2] for match in LINK.finditer(FENCED.sub("", text)))


def of_each_scheme(text: str) -> str:
    """A page whose pictures are two images each, of which the theme shows the one of the scheme that the reader chose;
    `<picture>` knows the system's alone."""
    return PICTURE.sub(r'<img alt="\2" src="\3#only-light"><img alt="\2" src="\1#only-dark">', text)


def on_config(config: Any) -> Any:
    """Refuse public names without a docstring."""
    missing = [name for module in MODULES for name in undocumented(module)]
    if missing:
        raise SystemExit(f"no docstring: {', '.join(missing)}")
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the files outside docs/ that pages link to, and those that they link to in turn."""
    from mkdocs.structure.files import File

    left, seen = [each.src_uri for each in files if each.is_documentation_page()], set[str]()
    while left:
        source = source_of(left.pop())
        for link in links((ROOT / source).read_text(encoding="utf-8")):
            path = outside(source, link)
            if path is None or path in seen:
                continue
            if not (ROOT / path).is_file():
                raise SystemExit(f"{source} links to {link}, which is no file")
            seen.add(path)
            uri = f"{OUTSIDE}/{path}"
            files.append(File.generated(config, uri, abs_src_path=os.fspath(ROOT / path)))
            if path.endswith(".md"):
                left.append(uri)
    return files


def on_page_markdown(markdown: str, page: Any, **others: Any) -> str:
    """Fill the commands in, and lead links outside docs/ to where `on_files` puts them."""
    here = page.file.src_uri
    source = source_of(here)

    def moved(match: re.Match[str]) -> str:
        before, link, anchor = match[1], match[2], match[3] or ""
        if not link or re.match(r"\w+:", link):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
        uri = f"{OUTSIDE}/{path}" if outside(source, link) else posixpath.relpath(path, "docs")
        return f"{before}{posixpath.relpath(uri, posixpath.dirname(here) or '.')}{anchor}"

    kept = of_each_scheme(LINK.sub(moved, markdown))
    return kept.replace(COMMANDS, commands()) if COMMANDS in kept else kept
