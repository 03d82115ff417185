"""Parts that left: whoever asks for one is told where it went."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import tiny_model
from helpers.training import settings
from safetensors.torch import save_file
from typer.testing import CliRunner

import fastspec
from fastspec.errors import CheckpointError
from fastspec.models import SMOLLM2
from fastspec.patches.assistants.heads import inspect_head
from fastspec.programs.cli.app import app
from fastspec.removed import MODULES

ROOT = Path(fastspec.__file__).parent
NESTED = {"mask_token_id": 7, "target_layer_ids": [1, 3], "block_size": 5, "causal": False}
BLOCK_HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "z-lab": ("DFlash", {"architectures": ["DFlashDraftModel"], "dflash_config": NESTED}),
    "speculators": ("DFlash", {"speculators_model_type": "dflash", "block_size": 5}),
    "SpecForge's DSpark": ("DSpark", {"dflash_config": NESTED | {"projector_type": "dspark", "markov_rank": 8}}),
    "DeepSpec": ("DSpark", {"markov_rank": 8, "markov_head_type": "vanilla", "mask_token_id": 7}),
    "DFlash 2": ("DFlash 2", {"dflash_config": NESTED | {"selector_rank": 8, "selector_top_k": 16}}),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("inner", ["", ".inner"])
def test_a_removed_module_says_where_it_went(name: str, inner: str) -> None:
    with pytest.raises(ModuleNotFoundError) as raised:
        importlib.import_module(name + inner)
    assert str(raised.value) == f"{name}: {MODULES[name]}" and raised.value.name == name


def test_only_what_left_is_called_removed() -> None:
    files = {".".join(path.relative_to(ROOT.parent).with_suffix("").parts) for path in ROOT.rglob("*.py")}
    assert not [file for file in files if any(f"{file}.".startswith(f"{module}.") for module in MODULES)]
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'fastspec\.patches\.none'"):
        importlib.import_module("fastspec.patches.none")


@pytest.mark.parametrize(
    "change", [{"kind": "dspark"}, {"kind": "dflash2"}, {"loss": "ce+l1"}, {"layers": 2}, {"mask_token": 3}], ids=str
)
def test_settings_of_block_heads_say_where_they_went(tmp_path: Path, change: dict[str, Any]) -> None:
    (name,) = change
    with pytest.raises(
        ValueError, match=rf"TrainConfig.{name}.*: block heads .*docs/maintainers/drafters.md .* commit `c0f133b`"
    ):
        settings(tmp_path, **change)


@pytest.mark.parametrize(
    "option", [("--kind", "dflash"), ("--block-size", "8"), ("--anchors", "40"), ("--rank", "128")], ids=lambda o: o[0]
)
def test_options_of_block_heads_say_where_they_went(option: tuple[str, str]) -> None:
    done = CliRunner().invoke(app, ["train", "--target", SMOLLM2, "--output", "out", "--prompts", "p.jsonl", *option])
    told = " ".join(done.output.replace("│", " ").split())
    assert (
        done.exit_code == 2
        and "block heads (DFlash, DSpark, DFlash 2) left fastspec" in told
        and option[0].removeprefix("--") in told
    )
    assert "--rank" not in CliRunner().invoke(app, ["train", "--help"]).output


@pytest.mark.parametrize("name", BLOCK_HEADS)
def test_a_block_head_is_refused_as_what_it_is(tmp_path: Path, name: str) -> None:
    form, config = BLOCK_HEADS[name]
    shared = {
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "vocab_size": 97,
        "num_hidden_layers": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **shared, **config}))
    save_file({"fc.weight": torch.zeros(64, 128), "hidden_norm.weight": torch.ones(64)}, tmp_path / "model.safetensors")
    told = (
        rf"a {form} head, which drafts a block of tokens in one pass; fastspec decodes with EAGLE heads "
        r"\(docs/maintainers/drafters.md"
    )
    with pytest.raises(CheckpointError, match=told):
        inspect_head(tmp_path)
    model = tiny_model()
    with pytest.raises(CheckpointError, match=told):
        fastspec.patch(model, eagle3=tmp_path)
    done = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert done.exit_code == 1 and f"a {form} head" in done.output
