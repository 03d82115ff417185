"""Checkpoints of auto-round, written in a process of their own: to import it changes transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from helpers.gptq import tensors_of
from helpers.models import tiny_model
from helpers.tokenizers import written

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 128}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPTQ": ("auto_gptq", {"sym": True, "group_size": 128}),
    "GPTQ, zero points": ("auto_gptq", {"sym": False, "group_size": 32}),
    "GPTQ, 8 bits": ("auto_gptq", {"sym": True, "group_size": 64, "bits": 8}),
    "AWQ": ("auto_awq", {"sym": False, "group_size": 32}),
    "AWQ, symmetric": ("auto_awq", {"sym": True, "group_size": 128}),
    "auto-round": ("auto_round", {"sym": True, "group_size": 32}),
    "auto-round as GPTQ v2": ("auto_round:gptqmodel", {"sym": False, "group_size": 32}),
}
OWN = "own.safetensors"
"""File beside a kind's folder: the weights [M, K] fp16 that auto-round's own modules multiply by."""


def model() -> Any:
    """The model that is rounded, with biases in attention."""
    return tiny_model("qwen2", tie_word_embeddings=False, **SIZES)


def write(rank: int, folder: str) -> None:
    """Write a folder of each kind, rounded to the nearest."""
    from auto_round import AutoRound

    for kind, (form, options) in KINDS.items():
        path = Path(folder) / kind
        given = {"bits": 4, "iters": 0, "disable_opt_rtn": True, "device_map": "cpu"} | options
        AutoRound(model(), written(), **given).quantize_and_save(str(path / "made"), format=form)
        (config,) = path.rglob("config.json")
        config.parent.rename(path / "files")
        tensors = tensors_of(path / "files")
        layers = [key.removesuffix(".qweight") for key in tensors if key.endswith(".qweight")]
        save_file({layer: _own(tensors, layer, form, given) for layer in layers}, path / OWN)


def _own(tensors: dict[str, Tensor], layer: str, form: str, given: dict[str, Any]) -> Tensor:
    """The product of ones of auto-round's module for this layer."""
    from auto_round.export.export_to_awq.utils import WQLinear_GEMM
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

    held = {name: tensors[f"{layer}.{name}"] for name in ("qweight", "qzeros", "scales")}
    depth, count = len(held["qweight"]) * (1 if "awq" in form else 32 // given["bits"]), held["scales"].shape[1]
    sizes = given["bits"], given["group_size"], depth, count, False
    if "awq" in form:
        module = WQLinear_GEMM(*sizes, dev="cpu")
    else:
        module = (qlinear_torch if form.endswith("gptqmodel") else qlinear_torch_zp).QuantLinear(*sizes)
    for name, tensor in held.items():
        setattr(module, name, tensor)
    found: Tensor = module(torch.eye(depth).half()).reshape(depth, count)
    return found.T.contiguous()
