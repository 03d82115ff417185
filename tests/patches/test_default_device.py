"""A default device other than the model's, as a context or set for the process, changes nothing: tensors are made on a
device by name."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cascade import cascaded, stages
from helpers.generate import TREE, prompts, shallow_model
from helpers.heads import as_speculators, write
from helpers.models import tiny_head, tiny_model
from helpers.seq2seq import sources, tiny_seq2seq
from transformers import MaxTimeCriteria

import fastspec
from fastspec.patches.hf import tree_check

ROOT = Path(__file__).parent.parent.parent / "fastspec"
MAKERS = {
    "arange",
    "as_tensor",
    "asarray",
    "empty",
    "empty_strided",
    "eye",
    "full",
    "linspace",
    "logspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "range",
    "scalar_tensor",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
}
"""Functions of torch's whose result is on the default device unless they are told."""
MODULES = {"generation/heads/module.py": 2}
"""Weights of modules that a user may make, on a default device of their own: who loads them names the CPU."""


def test_every_tensor_is_made_on_a_device_by_name():
    found: dict[str, int] = {}
    for path in (path for path in sorted(ROOT.rglob("*.py")) if ROOT / "programs" / "training" not in path.parents):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            told = any(each.arg in ("device", None) for each in node.keywords)
            if ast.unparse(node.func.value) == "torch" and node.func.attr in MAKERS and not told:
                name = path.relative_to(ROOT).as_posix()
                found[name] = found.get(name, 0) + 1
    assert found == MODULES


@contextmanager
def set_default() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


DEFAULTS: dict[str, Callable[[], Any]] = {"context": lambda: torch.device("meta"), "process": set_default}


@pytest.fixture(params=DEFAULTS)
def default(request) -> Callable[[], Any]:
    return DEFAULTS[request.param]


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "processors": {
        "do_sample": False,
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "stopping_criteria": [MaxTimeCriteria(100.0)],
    },
    "sampling": {"do_sample": True, "temperature": 1e-4, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
}


def check(model: Any, default: Callable[[], Any], inputs: dict[str, Any], **options: Any) -> None:
    """The default device leaves an answer as it is."""
    want = model.generate(**inputs, max_new_tokens=6, **options).tolist()
    with default():
        assert model.generate(**inputs, max_new_tokens=6, **options).tolist() == want


@pytest.mark.some("process")
@pytest.mark.filterwarnings("ignore:the draft model reads")
@pytest.mark.parametrize(("kind", "backend"), [("context", "torch"), ("process", "auto")])
def test_patch_and_every_assistant(kind, backend, tmp_path):
    default = DEFAULTS[kind]
    model, draft, inputs = shallow_model(), shallow_model(seed=1), prompts(9, 5)
    head = write(tmp_path, *as_speculators(tiny_head(model), model.get_input_embeddings().weight.detach().clone()))
    first = tiny_head(model, kind="eagle", taps=(), own_lm_head=False)
    with default():
        fastspec.patch(model, eagle3=head, eagle2=first, eagle=first, speculative=draft, backend=backend)
    for assistant in ("autoregressive", "nasd", "speculative", "eagle", "eagle2", TREE):
        for options in OPTIONS.values():
            check(model, default, inputs, assistant=assistant, **options)
    storage = fastspec.Nasd(storage=fastspec.SuffixStorage())
    for assistant in (storage, fastspec.Speculative(branches=2), fastspec.ContinuousBatch("nasd", 1)):
        check(model, default, inputs, assistant=assistant, do_sample=False)
    with default():
        fastspec.unpatch(model)


@pytest.mark.some("context")
def test_open_batches(default):
    model = shallow_model()
    fastspec.patch(model, eagle3=tiny_head(model))
    ids = prompts(9)["input_ids"]
    for assistant in ("nasd", TREE):
        want = [
            model.generate(ids, max_new_tokens=6, assistant=assistant, **options).tolist()
            for options in OPTIONS.values()
        ]
        with default(), fastspec.continuous(model, assistant, rows=2, max_length=32) as batch:
            if assistant == "nasd":
                batch.warmup(8)
            asked = [batch.submit(ids, max_new_tokens=6, **options) for options in OPTIONS.values()]
            assert [each.result(300).tolist() for each in asked] == want


@pytest.mark.parametrize("kind", ["gpt2", "qwen3_next"])
def test_the_generic_mode_and_its_check(default, kind, monkeypatch):
    """And layers whose weights are sorted when they are read."""
    model = fastspec.patch(tiny_model(kind, num_hidden_layers=2))
    monkeypatch.setattr(tree_check, "_VERDICTS", {})
    inputs = prompts(9, 5)
    with default():
        found = model.generate(**inputs, max_new_tokens=6, do_sample=False, assistant="nasd")
    assert found.tolist() == model.generate(**inputs, max_new_tokens=6, do_sample=False).tolist()


def test_models_with_an_encoder(default):
    check(fastspec.patch(tiny_seq2seq("t5")), default, sources(7, 4), do_sample=False, assistant="nasd")


def test_a_cascade():
    check(cascaded(stages(), memory=1 << 24), set_default, prompts(9), do_sample=False, assistant="cascade")
