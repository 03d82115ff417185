"""Rotary tables of a transformers decoder: what its own rotary modules give for every position, once, by the kind of layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fastspec.generation.layers.mixers import Rotary
from fastspec.patches.hf.compat import device_of
from fastspec.patches.hf.families import Adapter
from fastspec.patches.hf.modes import decoder_of

NO_ROTATION = "none"
"""The kind of the layers that rotate nothing."""


def rotary_tables(model: Any, parts: Adapter, kinds: Iterable[str | None], count: int) -> dict[str | None, Rotary]:
    """The tables of the first `count` positions, in the model's dtype, by the kind of layer; None: of all layers."""
    factor = position_factor(model, count) if parts.position_factor else None
    return {kind: Rotary(*_angles(model, parts, kind, count), factor) for kind in kinds}


def position_factor(model: Any, count: int) -> Tensor:
    """What the queries of the first `count` positions are multiplied by [count] fp32: 1 + b * log(1 + floor(p / L)), L the positions of the
    model's first training and b its `llama_4_scaling_beta`."""
    rope = model.config.get_text_config().rope_parameters
    places = torch.arange(count, device=device_of(model))
    return 1 + rope["llama_4_scaling_beta"] * torch.log(1 + torch.floor(places / rope["original_max_position_embeddings"]))


def _angles(model: Any, parts: Adapter, kind: str | None, count: int) -> tuple[Tensor, Tensor]:
    """cos and sin [count, R / 2]; those of NO_ROTATION leave everything as it is."""
    device, rotary = device_of(model), getattr(decoder_of(model), parts.rotary)
    if rotary is None:  # nothing is rotated: the fewest channels that a table can have stay as they are
        return torch.ones(count, 1, dtype=model.dtype, device=device), torch.zeros(count, 1, dtype=model.dtype, device=device)
    places = torch.arange(count, device=device)[None]
    if _has_sections(rotary, model.config.get_text_config()):
        places = places.expand(3, 1, -1)  # of text all three are the same
    given = torch.zeros(1, dtype=model.dtype, device=device), places
    cos, sin = rotary(*given) if kind in (None, NO_ROTATION) else rotary(*given, kind)
    cos, sin = (table[0] if table.dim() == 4 else table for table in (cos, sin))
    if kind == NO_ROTATION:
        cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
    if parts.angles_twice:
        return cos[0, :, ::2].contiguous(), sin[0, :, ::2].contiguous()
    half = cos.shape[-1] if parts.angles_once else cos.shape[-1] // 2
    return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()


def _has_sections(rotary: Any, config: Any) -> bool:
    """Whether a rotary module takes three positions of a token, in time, height and width, each for a section of a head.

    Its forward takes one position for all three since transformers 5.20; until then it did not.
    """
    return hasattr(rotary, "mrope_section") or "mrope_section" in (getattr(config, "rope_parameters", None) or {})
