"""GPTQ and AWQ checkpoints that auto-round writes, loaded without it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.auto_round import KINDS, OWN, model, write
from helpers.clients import MARKS
from helpers.generate import prompts
from helpers.gptq import tensors_of
from helpers.models import tiny_head
from helpers.processes import spawn
from safetensors.torch import load_file

import fastspec
from fastspec.kernels.quantised.reference import dequantised
from fastspec.models import load_model
from fastspec.patches.hf.gptq_awq import TURNED, PackedLinear

pytestmark = MARKS
OPTIONS: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": 1000}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """A folder of each kind."""
    if importlib.util.find_spec("auto_round") is None:
        pytest.skip("auto-round is not installed")
    path = tmp_path_factory.mktemp("auto-round")
    spawn(write, (str(path),), 1)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_auto_round(folders, tmp_path, kind):
    """Weights as its own modules dequantise them, and the tokens of the dequantised model."""
    folder, own = folders / kind / "files", load_file(folders / kind / OWN)
    packed, tokenizer = load_model(str(folder))
    assert tokenizer is not None
    files, state, dense = tensors_of(folder), packed.state_dict(), model()
    dense.load_state_dict({key: each.float() for key, each in files.items() if not key.endswith(TURNED)}, strict=False)
    for name, module in packed.named_modules():
        if isinstance(module, PackedLinear):
            assert all(torch.equal(state[f"{name}.{each}"], files[f"{name}.{each}"]) for each in TURNED)
            weight = dequantised(module.stored(), torch.float32)
            assert torch.equal(weight.half(), own.pop(name)), name
            dense.get_submodule(name).weight.data = weight
    assert not own
    inputs = prompts(4, 9)
    expected = dense.generate(**inputs, **OPTIONS)
    assert torch.equal(packed.generate(**inputs, **OPTIONS), expected)
    fastspec.patch(packed, eagle3=tiny_head(dense), stored=True)
    assert torch.equal(packed.generate(**inputs, **OPTIONS, assistant="eagle3"), expected)
    assert fastspec.report(packed).stored == {"GPTQ, AWQ": 7 * packed.config.num_hidden_layers}
    packed.save_pretrained(tmp_path)
    told = [json.loads((each / "config.json").read_text())["quantization_config"] for each in (folder, tmp_path)]
    assert told[0] == told[1]
