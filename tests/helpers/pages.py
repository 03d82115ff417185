"""The pages of the documentation and their snippets, and tiny stand-ins for the models and heads that these name."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from helpers.generate import EAGLE1
from helpers.heads import as_eagle, save_eagle3, write
from helpers.models import tiny_head
from helpers.training import small_target

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT)
    for path in (
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "packages").rglob("README.md"),
    )
)
NEEDS = ("hub", "gpu", "clients", "images", "own", "processes")
"""What a page may say that a snippet needs, in a comment before it: <!-- needs: hub, gpu -->. The hub and the GPU have
stand-ins here; `clients` run in tests/clients; `images` (a processor), `own` (a head or a repository of the reader's)
and `processes` (several, under torchrun) are not run."""
STOOD_IN = {"hub", "gpu"}
FENCE = re.compile(r"(?:^<!-- needs: ([\w, ]+) -->\n)?^(```|~~~)(\w*)\n(.*?)^\2$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Snippet:
    """One fenced block of a page: its language, its text, and what the page says that it needs."""

    page: Path
    number: int
    language: str
    text: str
    needs: frozenset[str]

    @property
    def name(self) -> str:
        return f"{self.page}:{self.number}"


def snippets(page: Path) -> list[Snippet]:
    """The fenced blocks of a page, in order."""
    found = FENCE.findall((ROOT / page).read_text(encoding="utf-8"))
    return [
        Snippet(page, number, language, text, frozenset(word.strip() for word in needs.split(",") if word.strip()))
        for number, (needs, _, language, text) in enumerate(found, 1)
    ]


def notebook_cells(path: Path) -> list[str]:
    """The Python of a notebook's cells, in order, without the commands that install."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return [text for text in code if not text.startswith("%")]


def stand_in_heads(folder: Path) -> dict[str, Path]:
    """Heads for `small_target` by their format, "eagle3" and "eagle", saved."""
    target = small_target()
    made = {name: folder / name for name in ("eagle3", "eagle")}
    save_eagle3(tiny_head(target), made["eagle3"])
    made["eagle"].mkdir()
    embedding = target.get_input_embeddings().weight.detach().clone()
    write(made["eagle"], *as_eagle(tiny_head(target, **EAGLE1, fc_bias=True), embedding))
    return made
