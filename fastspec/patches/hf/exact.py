"""Refusals of `patch(exact=True)`: what has no kernels that sum in a fixed order, by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fastspec.errors import Unsupported
from fastspec.generation.decoder_layer import FullAttention, Gated, LayerParts, Linears, RmsNorm
from fastspec.generation.ops import Ops

HINT = "leave out exact=True"


def refuse_device(ops: Ops, dtype: torch.dtype) -> None:
    """Raise Unsupported where a model of this dtype on these kernels cannot be held to bits."""
    if ops.name != "triton":
        raise Unsupported(f"exact=True is for the Triton kernels, and this model runs on {ops.name!r}: {HINT}")
    if dtype not in (torch.bfloat16, torch.float16):
        raise Unsupported(f"exact=True is for bfloat16 and float16, and this model is in {dtype}: {HINT}")


def why_inexact(ops: Ops, dtype: torch.dtype) -> str:
    """Reason for which a model of this dtype on these kernels, patched without exact=True, is not held to bits."""
    try:
        refuse_device(ops, dtype)
    except Unsupported as error:
        return str(error).removesuffix(f": {HINT}")
    return "patch(model, exact=True) was not asked for"


def refuse_parts(model: Any, layers: Sequence[LayerParts]) -> None:
    """Raise Unsupported where a layer runs by more than attention, plain products and root-mean-square norms."""
    for number, layer in enumerate(layers):
        for what in _others(layer):
            raise Unsupported(f"exact=True: layer {number} of {type(model).__name__} has {what}: {HINT}")


def _others(layer: LayerParts) -> Iterator[str]:
    mixer, mlp = layer.mixer, layer.mlp
    if not isinstance(mixer, FullAttention):
        yield f"{type(mixer).__name__}, which sums over a tree otherwise than over a text"
    elif not isinstance(mixer.qkv, Linears) or not isinstance(mixer.out, Linears):
        yield "projections of attention that are no plain linear layers of this process"
    if not isinstance(mlp, Gated) or not isinstance(mlp.out, Linears):
        yield "a feed-forward other than a gated one of plain linear layers (a mixture, a module of its own)"
    norms = layer.input_norm, layer.mlp_norm, layer.mixer_out_norm, layer.mlp_out_norm
    if any(norm is not None and not isinstance(norm, RmsNorm) for norm in norms):
        yield "norms of its own"
    if layer.beside is not None or layer.after is not None:
        yield "more than attention and a feed-forward"
