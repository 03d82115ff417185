"""The prose linter: words that mislead and sentences that are too long, in README, the root's other pages and docs/.

    python tests/prose.py            # all pages that `.prose.yml` does not except; or the pages that are named

Prints `page:line: words: what to say`, and exits with status 1 where there is any.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
STARTS = re.compile(r"^\s*(?:[-*] |\d+\. |#+ |\||>)")
"""Begin a paragraph of their own: items, titles, rows of tables."""


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Text of a page in one line, and the number of its first line."""

    line: int
    text: str


@cache
def settings() -> dict[str, Any]:
    """`.prose.yml`."""
    return yaml.safe_load((ROOT / ".prose.yml").read_text(encoding="utf-8"))


def paragraphs(page: str) -> list[Paragraph]:
    """The paragraphs of a page: no blocks of code, no targets of links, no tags; inline code is one word."""
    blank = re.sub(
        r"^(```|~~~).*?^\1$", lambda match: "\n" * match[0].count("\n"), page, flags=re.MULTILINE | re.DOTALL
    )
    found: list[Paragraph] = []
    going = False
    for number, line in enumerate(blank.splitlines(), 1):
        if not line.strip():
            going = False
        elif going and not STARTS.match(line):
            found[-1] = Paragraph(found[-1].line, f"{found[-1].text} {line.strip()}")
        else:
            found.append(Paragraph(number, line.strip()))
            going = True
    return [Paragraph(each.line, cleaned(each.text)) for each in found if not each.text.startswith("#")]


def cleaned(text: str) -> str:
    """A paragraph as it is read aloud."""
    text = re.sub(r"^(?:[-*] |\d+\. |> )", "", text)
    text = re.sub(r"``.*?``|`[^`]*`", "CODE", text)
    text = re.sub(r"\]\([^)]*\)", "", text).replace("[", "").replace("![", "")
    return re.sub(r"<[^>]*>|\*\*", "", text)


def sentences(text: str) -> list[str]:
    """The sentences of a paragraph; a table's row has none."""
    return [] if text.startswith("|") else re.split(r"(?<=[.!?:;]) ", text)


def faults(page: str) -> Iterator[tuple[int, str, str]]:
    """(line, words, what to say) of each fault of a page."""
    told = settings()
    for each in paragraphs(page):
        for rule in told["rules"]:
            for match in re.finditer(rule["find"], each.text, re.IGNORECASE):
                yield each.line, match[0].strip(), rule["say"]
        for sentence in sentences(each.text):
            if len(sentence.split()) > told["longest"]:
                yield each.line, f"{sentence[:40]}...", f"at most {told['longest']} words in a sentence"


def excepted(page: Path) -> bool:
    """True for a page that is not held to the rules yet."""
    return any(fnmatch(page.as_posix(), pattern) for pattern in settings()["excepted"])


def main(arguments: Sequence[str]) -> int:
    pages = [Path(name) for name in arguments] or [
        path for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")) if not excepted(path.relative_to(ROOT))
    ]
    count = 0
    for path in sorted(pages):
        for line, words, say in faults(path.read_text(encoding="utf-8")):
            count += 1
            print(f"{path}:{line}: {words}: {say}")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
