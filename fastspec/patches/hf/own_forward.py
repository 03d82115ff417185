"""A layer of a model's class by its own forward, with gradients and with the caller's attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fastspec.errors import Unsupported
from fastspec.generation.decoder_layer import Attend
from fastspec.patches.hf.families import Adapter
from fastspec.patches.hf.modes import decoder_of

NAME = "fastspec_callers"
"""The caller's attention among transformers' own: a name that no configuration has by itself."""


def run_layer(model: Any, parts: Adapter, module: Any, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
    """hidden [B, T, H] at positions [B, T] through a layer that is no part of the model -> [B, T, H]; `attend` as in
    `EagleHead.step`. Raises Unsupported for attention of another form than softmax over all keys."""
    ALL_ATTENTION_FUNCTIONS[NAME] = _attention
    getattr(module, parts.attention).config._attn_implementation = NAME  # a configuration of its own
    rotary = getattr(decoder_of(model), parts.rotary)
    out = module(
        hidden,
        attention_mask=None,
        position_ids=positions,
        position_embeddings=rotary(hidden, positions),
        fastspec_attend=attend,
    )
    found: Tensor = out[0] if isinstance(out, tuple) else out
    return found


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, fastspec_attend: Attend, **more: Any
) -> tuple[Tensor, None]:
    scaling, size = more.get("scaling"), query.shape[-1]
    odd = [name for name in ("sliding_window", "s_aux", "softcap") if more.get(name) is not None]
    if scaling is not None and abs(scaling * size**0.5 - 1) > 1e-4:
        odd.append(f"scaling={scaling:g}")
    if odd or value.shape[-1] != size:
        told = ", ".join(odd) or f"values of {value.shape[-1]} channels beside keys of {size}"
        raise Unsupported(f"a layer like those of {type(module).__name__} cannot be trained: its attention has {told}")
    return fastspec_attend(0, *(x.transpose(1, 2) for x in (query, key, value))), None
