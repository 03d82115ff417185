"""GPTQ and AWQ checkpoints, packed code by code as the formats' descriptions say, and the same models dequantised."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fastspec.patches.hf.gptq_awq import GPTQ_V2, PackedLinear

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column, of eight, that each place of a word holds, the lowest place first."""


def word(codes: Iterable[int], bits: int) -> int:
    """Codes as a word of 32 bits, the first one lowest, with a sign."""
    found = sum((code & (2**bits - 1)) << bits * place for place, code in enumerate(codes))
    return found - (1 << 32) if found >> 31 else found


def words(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Codes [R, C] in words along C -> int32 [R, C * bits / 32]."""
    per = 32 // bits
    order = order or tuple(range(per))
    rows = codes.tolist()
    return torch.tensor(
        [[word((row[at + i] for i in order), bits) for at in range(0, len(row), per)] for row in rows],
        dtype=torch.int32,
    )


@dataclass(frozen=True)
class Recipe:
    """How a layer is rounded and written."""

    method: str = "gptq"
    format: str = "gptq"
    bits: int = 4
    group: int = 32
    """-1: all input channels."""
    sym: bool = False
    ordered: bool = False
    """True where input channels have groups in another order (act-order), and the file a g_idx."""
    g_idx: bool = True

    @property
    def config(self) -> dict[str, Any]:
        """The `quantization_config` of the libraries."""
        own: dict[str, Any] = {"quant_method": self.method, "bits": self.bits, "group_size": self.group}
        if self.method == "awq":
            return own | {"zero_point": not self.sym, "version": self.format, "modules_to_not_convert": None}
        field = "packing_format" if self.method == "auto-round" else "checkpoint_format"
        return own | {field: self.format, "sym": self.sym, "desc_act": self.ordered}

    def pack(self, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """A weight [M, K] rounded to the nearest: the tensors of a file, and it dequantised, fp32."""
        count, depth = weight.shape
        most, size = 2**self.bits - 1, depth if self.group == -1 else self.group
        groups = torch.arange(depth) // size
        if self.ordered:
            groups = groups[torch.randperm(depth, generator=torch.Generator().manual_seed(depth))]
        codes, dense = torch.zeros_like(weight, dtype=torch.long), torch.zeros_like(weight)
        number = int(groups.max()) + 1
        scales, zeros = torch.zeros(number, count, dtype=torch.float16), torch.zeros(number, count, dtype=torch.long)
        for group in range(number):
            at = groups == group
            part = weight[:, at].double()
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            if self.sym:
                high = torch.maximum(-low, high)
                low = -high
            scale = ((high - low) / most).clamp(min=1e-4).half()
            zero = torch.full_like(low, most // 2 + 1) if self.sym else (-low / scale.double()).round().clamp(1, most)
            found = (part / scale.double()[:, None] + zero[:, None]).round().clamp(0, most)
            dense[:, at] = ((found - zero[:, None]) * scale.double()[:, None]).float()
            codes[:, at], scales[group], zeros[group] = found.long(), scale, zero.long()
        if self.format in ("gemm", "auto_round:auto_awq"):
            packed = words(codes.T, 4, AWQ_ORDER), words(zeros, 4, AWQ_ORDER)
        else:
            written = zeros - int(self.format in ("gptq", "auto_round:auto_gptq"))
            packed = words(codes, self.bits).T.contiguous(), words(written, self.bits)
        tensors = {"qweight": packed[0], "qzeros": packed[1], "scales": scales}
        if self.g_idx and self.method == "gptq":
            tensors["g_idx"] = groups.int()
        return tensors, dense


def projections(name: str) -> bool:
    """All linear layers of a decoder's blocks."""
    return ".layers." in name


def written(
    model: Any,
    folder: Path,
    recipe: Recipe,
    packs: Callable[[str], bool] = projections,
    *,
    others: Mapping[str, Recipe] | None = None,
    shards: str = "5GB",
    config: dict[str, Any] | None = None,
) -> Any:
    """Write a model with packed layers into a folder, and return it dequantised. Layers whose names end as one of
    `others` does are packed by its recipe; `config` stands for the recipe's own, where it is given."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, max_shard_size=shards)
    dense, made = copy.deepcopy(model), {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and packs(name):
            own = next((each for end, each in (others or {}).items() if name.endswith(end)), recipe)
            made[name], weight = own.pack(module.weight.detach())
            dense.get_submodule(name).weight.data = weight
    index = folder / "model.safetensors.index.json"
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        for key in list(tensors):
            layer, _, kind = key.rpartition(".")
            if layer in made and kind == "weight":
                del tensors[key]
                tensors |= {f"{layer}.{each}": tensor for each, tensor in made[layer].items()}
            elif layer in made:
                tensors[key] = tensors[key].half()
                dense.get_submodule(layer).bias.data = tensors[key].float()
        save_file(tensors, file, metadata={"format": "pt"})
    if index.exists():
        told = json.loads(index.read_text())
        told["weight_map"] = {
            key: file.name for file in sorted(folder.glob("*.safetensors")) for key in load_file(file)
        }
        index.write_text(json.dumps(told))
    path = folder / "config.json"
    held = json.loads(path.read_text())
    path.write_text(json.dumps(held | {"quantization_config": recipe.config if config is None else config}))
    return dense


def changed(recipe: Recipe, **over: Any) -> Recipe:
    """A recipe with other fields."""
    return replace(recipe, **over)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's files."""
    return {key: tensor for file in sorted(folder.glob("*.safetensors")) for key, tensor in load_file(file).items()}


def packed_layers(model: Any, group: int = 32) -> Any:
    """The model with the linear layers of its decoder as GPTQ checkpoints of 4 bits have them: random codes, the middle
    for zero."""
    for parent in list(model.model.layers.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is torch.nn.Linear:
                (lines, depth), dtype = layer.weight.shape, layer.weight.dtype
                words = torch.randint(-(2**31), 2**31, (depth // 8, lines), dtype=torch.int32)
                middle = torch.full((depth // group, lines // 8), 0x88888888 - 2**32).int()
                scales = torch.full((depth // group, lines), 0.02 / 4.6, dtype=dtype)
                tensors = {"qweight": words, "qzeros": middle, "scales": scales}
                setattr(parent, name, PackedLinear(GPTQ_V2, 4, group, depth, lines, tensors).to(layer.weight.device))
    return model
