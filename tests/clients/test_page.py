"""Every snippet of docs/guide/clients.md runs as it stands, on an unpatched and on a patched model, and both leave the
same answer."""

from __future__ import annotations

import copy
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.clients import MARKS, QUESTIONS, asked, drafted
from helpers.lm_eval import answered
from helpers.page import PAGE, SNIPPETS, patching, run, shown
from helpers.quantised import packed

import fastspec

pytestmark = MARKS

ELSEWHERE = ("GRPOTrainer", "DistributedDataParallel", "fully_shard")
"""Words of snippets that other files run: test_trainers.py the one that samples, test_distributed.py those for several
processes."""
HERE = [text for text in SNIPPETS if not any(word in text for word in ELSEWHERE)]
NAMES = [" ".join(re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE)) for text in HERE]


def prepared(smollm2: Any, checkpoint: Path, packed: Path, folder: Path) -> dict[str, Any]:
    """What a snippet finds: copies of the model and its tokenizer, directories of both, prompts, an lm-eval task, a
    folder to write to."""
    model, tokenizer = copy.deepcopy(smollm2)
    names = {
        "model": model,
        "tokenizer": tokenizer,
        "questions": QUESTIONS,
        "inputs": asked(tokenizer, *QUESTIONS[:1]),
        "task": answered(),
    }
    return {**names, "checkpoint": str(checkpoint), "packed": str(packed), "folder": str(folder)}


@pytest.fixture(scope="module")
def weights(folder) -> Path:
    """SmolLM2 as compressed-tensors packs it."""
    return packed(folder, 4)


@pytest.mark.parametrize("snippet", HERE, ids=NAMES)
def test_a_snippet_gives_plain_decodings_answer(smollm2, folder, weights, tmp_path, one_process, monkeypatch, snippet):
    emitted = []
    for really in (False, True):
        names = prepared(smollm2, folder, weights, tmp_path)
        torch.manual_seed(0)
        with patching(monkeypatch, really) as models:
            run(snippet, names)
        emitted.append(names["answer"])
    expected, found = emitted
    assert torch.equal(found, expected) if isinstance(found, torch.Tensor) else found == expected
    (model,) = models
    report = fastspec.report(model)
    assert not report.unassisted
    assert drafted(report.calls)


CLIENTS = {
    "lm-eval": ("lm-eval", "lm_eval"),
    "auto-round": ("auto-round", "auto-round"),
    "TRL": ("trl", "trl"),
    "accelerate": ("accelerate", "accelerate"),
    "PEFT": ("peft", "peft"),
    "outlines": ("outlines", "outlines"),
    "xgrammar": ("xgrammar", "xgrammar"),
    "llguidance": ("llguidance", "llguidance"),
    "lm-format-enforcer": ("lm-format-enforcer", "lmformatenforcer"),
    "transformers' pipelines": ("transformers", "pipeline"),
    "transformers' streamers": ("transformers", "AsyncTextIteratorStreamer"),
    "smolagents": ("smolagents", "smolagents"),
    "langchain-huggingface": ("langchain-huggingface", "langchain_huggingface"),
    "torchao": ("torchao", "torchao"),
    "optimum-quanto": ("optimum-quanto", "quanto"),
    "bitsandbytes": ("bitsandbytes", "BitsAndBytesConfig"),
    "compressed-tensors": ("compressed-tensors", "compressed-tensors"),
    "DDP": ("torch", "DistributedDataParallel"),
    "FSDP2": ("torch", "fully_shard"),
    "openai": ("openai", "from openai import OpenAI"),
    "anthropic": ("anthropic", "/v1/messages"),
    "Ray Serve": ("ray", "ray[serve]"),
}
"""Rows of the page's table -> the distribution whose version is told, and a word of the row's snippet, here or on the
pages of servers and of quantised models."""
GUIDE = Path(__file__).parents[2].joinpath("docs", "guide")
OTHERS = [(GUIDE / name).read_text(encoding="utf-8") for name in ("serving.md", "quantised.md")]


def test_the_table_has_what_is_installed_and_shown():
    rows = dict(re.findall(r"^\| ([^|]+) \| (?:torch )?(\d[\w.]*) \|", PAGE, re.MULTILINE))
    assert rows.keys() == CLIENTS.keys()
    assert rows == {name: version(distribution).split("+")[0] for name, (distribution, _) in CLIENTS.items()}
    for name, (_, word) in CLIENTS.items():
        assert any(word in text for text in [*SNIPPETS, *OTHERS]), name
    assert all(shown(word) for word in ("SFTTrainer", "GRPOTrainer", "import TextIteratorStreamer"))
