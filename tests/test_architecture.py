"""Changes as docs/architecture.md shows them: each diff applies to the library as it is, and what it adds works."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.generate import prompts
from helpers.heads import as_eagle3, make_head
from helpers.models import tiny_model
from helpers.pages import ROOT, snippets
from torch import nn

import fastspec
from fastspec.generation.heads.files import Fields
from fastspec.kernels.quantised.reference import dequantised

DIFFS = [each.text for each in snippets(Path("docs/architecture.md")) if each.language == "diff"]


def applied(path: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of a file as the page's diff leaves it, beside the library's own."""
    (diff,) = (each.partition("\n")[2] for each in DIFFS if each.startswith(f"@@ {path} @@\n"))
    text = (ROOT / path).read_text(encoding="utf-8")
    for hunk in re.split(r"^ +\.\.\.\n", diff, flags=re.MULTILINE):
        lines = [line if line.strip() else "+\n" for line in hunk.splitlines(keepends=True)]
        before, after = ("".join(line[1:] for line in lines if line[0] in f" {sign}") for sign in "-+")
        assert text.count(before) == 1, f"{path} has other lines than\n{before}"
        text = text.replace(before, after)
    module = ModuleType("applied")
    monkeypatch.setitem(sys.modules, "applied", module)  # where dataclasses look for what annotations name
    exec(compile(text, path, "exec"), module.__dict__)
    return module


def test_every_diff_names_its_file_but_that_of_ones_own_drafter() -> None:
    assert [each.startswith("@@ fastspec/") for each in DIFFS] == [False, True, True, True, True]


def test_the_drafter_gives_the_tokens_of_plain_decoding() -> None:
    names: dict[str, Any] = {"fastspec": fastspec}
    exec("".join(line[1:] for line in DIFFS[0].splitlines(keepends=True)), names)
    model, inputs = tiny_model("llama"), {**prompts(4, 9), "max_new_tokens": 40, "do_sample": False}
    expected = model.generate(**inputs)
    with fastspec.patched(model):
        assert model.generate(**inputs, assistant=names["Repeat"]()).equal(expected)
        assert fastspec.report(model).last.acceptance_length > 1


def test_the_family_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    row = applied("fastspec/patches/hf/families.py", monkeypatch).ADAPTERS["new_llama"]
    assert (row.norm, row.mlp_norm, row.input_norm) == ("final_norm", "ffn_norm", "input_layernorm")


def test_the_kernel_is_the_backend_s(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    mine: Any = ModuleType("my_rope")
    mine.rope_cache = lambda *given: None
    monkeypatch.setitem(sys.modules, "fastspec.kernels.layer.my_rope", mine)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # whose kernels would be compiled ahead
    ops = applied("fastspec/patches/backends.py", monkeypatch).triton_ops()
    assert ops.rope_cache is mine.rope_cache and ops.gate_heads is not None


def test_the_dialect_is_told_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    module, (config, state) = (
        applied("fastspec/generation/heads/dialects.py", monkeypatch),
        as_eagle3(make_head(), None),
    )
    plain = {module.normalise_key(key): tensor for key, tensor in state.items()}
    for architectures, dialect in (["SomebodysHead"], "somebody"), (["Eagle3LlamaForCausalLM"], "angelslim"):
        raw = config | {"architectures": architectures}
        assert module.dialect_of(Fields.of(raw, "here"), state, plain) == dialect
        read = module.describe(raw, state, plain, "here").config
        assert read.norm_before_residual == (dialect == "somebody")


def test_the_format_is_read_as_it_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    module = applied("fastspec/patches/hf/quantised.py", monkeypatch)
    layer: Any = type("ByteLinear", (nn.Module,), {"__module__": "somebody.layers"})()
    layer.codes = nn.Parameter(torch.randint(-128, 128, (7, 63)).to(torch.int8), requires_grad=False)
    layer.scales, layer.in_features = torch.rand(7), 63
    weight = module.read(layer)
    assert weight.codes.data_ptr() == layer.codes.data_ptr()
    assert dequantised(weight, torch.float32).equal(layer.codes * layer.scales[:, None])
    layer.scales = torch.rand(8)
    assert module.read(layer) == "scales (8, 1) of blocks 1 x 63 do not fit a weight 7 x 63"
