"""Rotary embedding of drafting heads, in fp32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B, T, heads, D] in the half-split order, in fp32; cos and sin [B, T, 1, R / 2], R <= D dimensions turn."""
    half = cos.shape[-1]
    wide = x.float()
    a, b = wide[..., :half], wide[..., half : 2 * half]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, wide[..., 2 * half :]), -1).to(x.dtype)


def rope_frequencies(rope: Mapping[str, Any], head_dim: int) -> Tensor | None:
    """fp32 frequencies [R / 2] for the default and linear types; None for types that `EagleHead.set_rope` must supply."""
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "linear"):
        return None
    size = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    exponent = torch.arange(0, size, 2, dtype=torch.int64, device="cpu").float() / size
    inv_freq: Tensor = 1.0 / (rope.get("rope_theta", 10000.0) ** exponent)
    return inv_freq / rope["factor"] if kind == "linear" else inv_freq
