"""Rotary tables of a transformers decoder: what its own rotary modules give for every position, once, by the kind of layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fastspec.generation.layers.mixers import Rotary
from fastspec.patches.hf.compat import device_of
from fastspec.patches.hf.families import Adapter, PositionFactor
from fastspec.patches.hf.modes import decoder_of

NO_ROTATION = "none"
"""The kind of the layers that rotate nothing."""


def rotary_tables(model: Any, parts: Adapter, kinds: Iterable[str | None], count: int) -> dict[str | None, Rotary]:
    """The tables of the first `count` positions, in the model's dtype, by the kind of layer; None: of all layers."""
    row = parts.position_factor
    factor = None if row is None else position_factor(model, row, count)
    scaled = {kind for kind in kinds if row is not None and (kind == NO_ROTATION or not row.unrotated)}
    return {kind: Rotary(*_angles(model, parts, kind, count), factor if kind in scaled else None) for kind in kinds}


def position_factor(model: Any, row: PositionFactor, count: int) -> Tensor | None:
    """What the queries of the first `count` positions are multiplied by [count] fp32, or None where the model leaves it out."""
    config = model.config.get_text_config()
    if row.used_if and not getattr(config, row.used_if):
        return None
    settings = {**config.to_dict(), **config.rope_parameters}
    places = torch.arange(count, device=device_of(model)) + row.first
    factor = 1 + settings[row.b] * torch.log1p(torch.floor(places / settings[row.period]))
    return factor.to(model.dtype).float() if row.rounded else factor


def _angles(model: Any, parts: Adapter, kind: str | None, count: int) -> tuple[Tensor, Tensor]:
    """cos and sin [count, R / 2]; those of NO_ROTATION leave everything as it is."""
    device, rotary = device_of(model), getattr(decoder_of(model), parts.rotary)
    if rotary is None:  # nothing is rotated: the fewest channels that a table can have stay as they are
        return torch.ones(count, 1, dtype=model.dtype, device=device), torch.zeros(count, 1, dtype=model.dtype, device=device)
    places = torch.arange(count, device=device)[None]
    if _has_sections(rotary, model.config.get_text_config()):
        places = places.expand(3, 1, -1)  # of text all three are the same
    given = torch.zeros(1, dtype=model.dtype, device=device), places
    found = rotary(*given) if kind in (None, NO_ROTATION) else rotary(*given, kind)
    cos, sin = (found.real, found.imag) if isinstance(found, Tensor) else found  # one complex number an angle
    cos, sin = (table[0] if table.dim() == 4 else table for table in (cos, sin))
    if kind == NO_ROTATION:
        cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
    if parts.angles_twice:
        return cos[0, :, ::2].contiguous(), sin[0, :, ::2].contiguous()
    half = cos.shape[-1] if parts.angles_once or isinstance(found, Tensor) else cos.shape[-1] // 2
    return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()


def _has_sections(rotary: Any, config: Any) -> bool:
    """Whether a rotary module takes three positions of a token, in time, height and width, each for a section of a head.

    Its forward takes one position for all three since transformers 5.20; until then it did not.
    """
    return hasattr(rotary, "mrope_section") or "mrope_section" in (getattr(config, "rope_parameters", None) or {})
