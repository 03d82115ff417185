"""Every snippet of docs/clients.md runs as it stands, on an unpatched and on a patched model, and both leave the same answer."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_clients import MARKS, QUESTIONS, asked, drafting
from test_lm_eval import answered

pytestmark = MARKS

PAGE = (Path(__file__).parents[2] / "docs" / "clients.md").read_text(encoding="utf-8")
SET_UP, *SNIPPETS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
NAMES = [" ".join(re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE)) for text in SNIPPETS]


def prepared(smollm2: Any, folder: Path, patched: bool) -> dict[str, Any]:
    """What a snippet finds: copies of the model and its tokenizer, prompts, an lm-eval task, a folder to write to."""
    model, tokenizer = copy.deepcopy(smollm2)
    names = {"model": model, "tokenizer": tokenizer, "questions": QUESTIONS, "inputs": asked(tokenizer, *QUESTIONS[:1]), "task": answered()}
    names["folder"] = str(folder)
    if patched:
        exec(SET_UP, names)
    return names


@pytest.mark.parametrize("snippet", SNIPPETS, ids=NAMES)
def test_a_snippet_gives_plain_decodings_answer(smollm2, tmp_path, one_process, snippet):
    plain, served = prepared(smollm2, tmp_path, False), prepared(smollm2, tmp_path, True)
    patched = served["model"]
    torch.manual_seed(0)
    exec(snippet, plain)
    torch.manual_seed(0)
    with drafting(patched):
        exec(snippet, served)
    found, expected = served["answer"], plain["answer"]
    assert torch.equal(found, expected) if isinstance(found, torch.Tensor) else found == expected


def test_the_page_names_the_versions_that_are_installed():
    from importlib.metadata import version

    rows = re.findall(r"^\| ([\w-]+) \| (\d[\w.]*) \|", PAGE, re.MULTILINE)
    assert len(rows) > 12
    for name, told in rows:
        assert version(name) == told, name
