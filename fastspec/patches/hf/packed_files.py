"""Checkpoints of packed weights: what their files hold, read without the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from fastspec.errors import Unsupported

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
