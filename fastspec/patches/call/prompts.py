"""Which tokens of a call's prompts are real, and the prompts without the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastspec.errors import Unsupported
from fastspec.patches.hf.cache_names import CACHE


def real_tokens(model: Any, ids: Tensor, mask: Tensor | None, config: Any, past: int) -> Tensor:
    """Which tokens of the past and of ids [B, T] are real, [B, past + T] bool, or [B, T] where the mask is of the ids alone: by the call's
    mask, or where it has none, as transformers infers it. Raises Unsupported for a mask of another width."""
    rows, width = ids.shape
    if mask is None:
        held = getattr(config, "_pad_token_tensor", None)
        inferred = model._prepare_attention_mask_for_generation(ids, config, {}) if held is not None else None
        keep = torch.ones_like(ids, dtype=torch.bool) if inferred is None or inferred.dim() != 2 else inferred.bool()
    else:
        keep = mask.to(ids.device).bool()
        repeat = rows // max(1, keep.shape[0])
        keep = keep.repeat_interleave(repeat, 0) if repeat > 1 else keep
    if past and keep.shape[1] == past + width:
        return keep
    if keep.shape[1] != width:
        raise Unsupported(
            f"attention_mask is {keep.shape[1]} wide and input_ids {width}: they must agree, the tokens of "
            f"{CACHE} counted in both or in the mask alone"
        )
    return keep


def compact(ids: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Move each row's real tokens to the front -> ids [B, max count], counts [B]."""
    counts = keep.sum(1)
    order = torch.argsort((~keep).int(), dim=1, stable=True)[:, : int(counts.max())]
    return ids.gather(1, order), counts
