"""Every snippet of docs/clients.md runs as it stands, on an unpatched and on a patched model, and both leave the same answer."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_clients import MARKS, QUESTIONS, asked, drafted
from helpers_page import PAGE, SNIPPETS, patching, run
from test_lm_eval import answered
from test_quantised import packed

import fastspec

pytestmark = MARKS

NAMES = [" ".join(re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE)) for text in SNIPPETS]


def prepared(smollm2: Any, checkpoint: Path, packed: Path, folder: Path) -> dict[str, Any]:
    """What a snippet finds: copies of the model and its tokenizer, directories of both, prompts, an lm-eval task, a folder to write to."""
    model, tokenizer = copy.deepcopy(smollm2)
    names = {"model": model, "tokenizer": tokenizer, "questions": QUESTIONS, "inputs": asked(tokenizer, *QUESTIONS[:1]), "task": answered()}
    return {**names, "checkpoint": str(checkpoint), "packed": str(packed), "folder": str(folder)}


@pytest.fixture(scope="module")
def weights(folder) -> Path:
    """SmolLM2 as compressed-tensors packs it."""
    return packed(folder, 4)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=NAMES)
def test_a_snippet_gives_plain_decodings_answer(smollm2, folder, weights, tmp_path, one_process, monkeypatch, snippet):
    said = []
    for really in (False, True):
        names = prepared(smollm2, folder, weights, tmp_path)
        torch.manual_seed(0)
        with patching(monkeypatch, really) as models:
            run(snippet, names)
        said.append(names["answer"])
    expected, found = said
    assert torch.equal(found, expected) if isinstance(found, torch.Tensor) else found == expected
    (model,) = models
    report = fastspec.report(model)
    assert not report.unassisted
    assert drafted(report.calls)


def test_the_page_names_the_versions_that_are_installed():
    from importlib.metadata import version

    rows = re.findall(r"^\| ([\w-]+) \| (\d[\w.]*) \|", PAGE, re.MULTILINE)
    assert len(rows) > 12
    for name, told in rows:
        assert version(name) == told, name
