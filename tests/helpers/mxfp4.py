"""Checkpoints of gpt-oss with experts in MXFP4, and the same models dequantised by the format's description."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers.models import tiny_model

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Numbers of e2m1 without their sign, in the order of the codes."""
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 97}
CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}


def number(code: int) -> float:
    """What a code of 4 bits stands for."""
    return -VALUES[code & 7] if code & 8 else VALUES[code]


def packed(generator: torch.Generator, count: int, channels: int, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random experts: blocks [E, M, G, 16], scales [E, M, G] around 2 ** -4, and the dense weights [E, M, K] fp32."""
    codes = torch.randint(0, 16, (count, channels, depth // 32, 32), generator=generator)
    powers = torch.randint(-5, -2, (count, channels, depth // 32), generator=generator)
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    numbers = torch.tensor([number(code) for code in range(16)])[codes] * 2.0 ** powers[..., None].double()
    return blocks, (powers + 127).to(torch.uint8), numbers.float().flatten(2)


def written(folder: Path, *, seed: int = 0, shards: str = "5GB", **over: Any) -> Any:
    """Write a tiny gpt-oss with packed experts into a folder, and return it dequantised. Biases are drawn."""
    model = tiny_model("gpt_oss", **SIZES | over)
    generator = torch.Generator().manual_seed(seed)
    for name, held in model.named_parameters():
        if name.endswith(("bias", "sinks")):
            held.data.copy_(torch.randn(held.shape, generator=generator) / 4)
    model.save_pretrained(folder, max_shard_size=shards)
    dense, made = copy.deepcopy(model), {}
    for name, held in dense.named_parameters():
        if name.endswith((".gate_up_proj", ".down_proj")):
            blocks, scales, weights = packed(generator, held.shape[0], held.shape[2], held.shape[1])
            made[name] = {f"{name}_blocks": blocks, f"{name}_scales": scales}
            held.data.copy_(weights.transpose(1, 2))
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        for name in made.keys() & tensors.keys():
            del tensors[name]
            tensors |= made[name]
        save_file(tensors, file, {"format": "pt"})
    if (index := folder / "model.safetensors.index.json").exists():
        told = json.loads(index.read_text())
        told["weight_map"] = {
            key: each.name for each in sorted(folder.glob("*.safetensors")) for key in load_file(each)
        }
        index.write_text(json.dumps(told))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": CONFIG}))
    return dense
