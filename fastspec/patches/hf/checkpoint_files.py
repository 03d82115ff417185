"""Files of a checkpoint: headers of packed ones, read without the tensors, weights of FP8, and the hub's revision that
a model was loaded from, which transformers' models do not keep."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from fastspec.errors import Unsupported
from fastspec.kernels.quantised.reference import E4M3, StoredWeight, dequantised

FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


class MissingWeight(Unsupported, AttributeError):
    """Error of who needs the dense weight of a packed layer; for `hasattr`, an attribute that is missing."""


@dataclass(frozen=True, slots=True)
class Header:
    """Shape and dtype of a tensor in a file."""

    shape: tuple[int, ...]
    dtype: str


def headers_of(files: Sequence[str]) -> dict[str, Header]:
    """Name of a tensor -> its header. Raises Unsupported for files that are no safetensors."""
    others = [Path(file).name for file in files if not file.endswith(".safetensors")]
    if others:
        raise Unsupported(f"its weights are in {others[0]}: packed weights are read of safetensors alone")
    found = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118 -- no dictionary
                tensor = opened.get_slice(key)
                found[key] = Header(tuple(tensor.get_shape()), tensor.get_dtype())
    return found


def dense_float8(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of files with weights of e4m3 times their scales, in bf16, and without these; others as they are. Scales
    are one, one for each line, or one for each block of 128 x 128: `weight_scale_inv` of DeepSeek's and Qwen's files,
    `weight_scale` of compressed-tensors'."""
    found = dict(tensors)
    for name, codes in tensors.items():
        scales = tensors.get(f"{name}_scale_inv", tensors.get(f"{name}_scale"))
        if codes.dtype != torch.float8_e4m3fn or codes.dim() != 2 or scales is None:
            continue
        count, depth = codes.shape
        shapes = {(count, depth): [(), (1,), (1, 1)], (1, depth): [(count,), (count, 1)]}
        shapes[128, 128] = [(-(-count // 128), -(-depth // 128))]
        block = next((block for block, known in shapes.items() if tuple(scales.shape) in known), None)
        if block is None:
            continue
        grid = -(-count // block[0]), -(-depth // block[1])
        stored = StoredWeight(codes.view(torch.uint8), E4M3, scales.float().view(grid), block, depth, None)
        found[name] = dequantised(stored, torch.bfloat16)
        layer = name.removesuffix("weight")
        for beside in (f"{name}_scale_inv", f"{name}_scale", f"{layer}input_scale", f"{layer}activation_scale"):
            found.pop(beside, None)
    return found


WRAPPED = re.compile(r"^(?:model\.|language_model\.)*")
COMPARED, ROWS = 8, 8
"""Weights of a model that are compared with those of its files, small ones, and the rows of each."""


def revision_of(model: Any) -> str | None:
    """Commit whose files in the hub's cache hold a model's weights, main where several do; None where the cache does
    not tell (a directory, `cache_dir`)."""
    where = getattr(model.config, "name_or_path", None) or ""
    if not where or Path(where).expanduser().is_dir():
        return None
    folder = Path(constants.HF_HUB_CACHE) / "--".join(("models", *where.split("/")))  # a path that is gone has none
    found = sorted(each for each in folder.glob("snapshots/*") if any(each.glob("*.safetensors")))
    if len(found) < 2:
        return found[0].name if found else None
    weights = {
        WRAPPED.sub("", name): weight
        for name, weight in model.named_parameters()
        if weight.ndim in (1, 2) and not isinstance(weight, DTensor)
    }
    vectors = [name for name, weight in weights.items() if weight.ndim == 1][-COMPARED // 2 :]
    matrices = sorted(weights.keys() - vectors, key=lambda name: (weights[name].ndim < 2, weights[name].numel()))
    few = {name: weights[name].detach()[:ROWS] for name in (*vectors, *matrices[: COMPARED // 2])}
    main = folder / "refs" / "main"
    first = main.read_text(encoding="utf-8").strip() if main.is_file() else None
    alike = [each.name for each in found if _holds(each, few)]
    return first if first in alike else next(iter(alike), None)


def _holds(snapshot: Path, weights: Mapping[str, Tensor]) -> bool:
    """True where a snapshot's files hold some of these weights' first rows, in any dtype, and no others."""
    seen = False
    for path in snapshot.glob("*.safetensors"):
        try:
            with safe_open(str(path), framework="pt", device="cpu") as file:
                for key in file.keys():  # noqa: SIM118  # it is no dictionary
                    mine = weights.get(WRAPPED.sub("", key))
                    if mine is not None:
                        seen = True
                        theirs = file.get_slice(key)[: len(mine)]
                        if not torch.equal(theirs.to(mine.dtype), mine.cpu()):
                            return False
        except (SafetensorError, OSError):  # fetched in part
            return False
    return seen
