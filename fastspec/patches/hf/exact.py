"""Which models are held to bits: refusals of `patch(exact=True)`, and what is held by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fastspec.devices import device_name
from fastspec.errors import Unsupported
from fastspec.generation.decoder_layer import FullAttention, Gated, LayerParts, Linears, RmsNorm
from fastspec.generation.ops import Ops
from fastspec.patches.hf.changes import Snapshot
from fastspec.patches.hf.compat import device_of, dtype_of
from fastspec.patches.hf.families import Adapter
from fastspec.patches.hf.model import HFModel

HINT = "leave out exact=True"
WIDE = 1536
"""Hidden size from which models are held to bits by themselves: a token or a round of one row takes up to 5 % longer on
an H200 (exact_rounds_h200.jsonl), and more in narrower layers."""


def unfit(ops: Ops, dtype: torch.dtype) -> str | None:
    """Reason for which no model of this dtype on these kernels can be held to bits."""
    if ops.name != "triton":
        return f"sums of a fixed order are of the Triton kernels, and this model runs on {ops.name!r}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"sums of a fixed order are for bfloat16 and float16, and this model is in {dtype}"
    return None


def refuse_device(ops: Ops, dtype: torch.dtype) -> None:
    """Raise Unsupported where a model of this dtype on these kernels cannot be held to bits."""
    if (reason := unfit(ops, dtype)) is not None:
        raise Unsupported(f"exact=True: {reason}: {HINT}")


class ExactDefault:
    """What `patch(exact=None)` comes to for a model, as it is by then."""

    def __init__(self) -> None:
        self._made_of: Snapshot | None = None
        self._why: str | None = None

    def why_not(self, model: Any, adapter: Adapter | None, ops: Ops) -> str | None:
        """Reason for which a model on these kernels is not held to bits unless that is asked for; None where it is."""
        if (reason := unfit(ops, dtype_of(model))) is not None:
            return reason
        from fastspec.kernels.launch import MEASURED

        name, width = device_name(device_of(model)), model.config.get_text_config().hidden_size
        if name not in MEASURED:
            return f"its cost was not measured on {name}: patch(model, exact=True) asks for it"
        if width < WIDE:
            return f"layers of {width} channels, under {WIDE}, take longer by it: patch(model, exact=True) asks for it"
        if ops.stored_linears is not None:
            return "weights are multiplied as they are stored (stored=True)"
        assert adapter is not None  # as it has these kernels
        if self._made_of is None or self._made_of.model is not model or self._made_of.changed():
            self._made_of, self._why = Snapshot(model), None
            try:
                target = HFModel(model, adapter, rows=1, capacity=1, tail=1, taps=None, ops=ops)
                refuse_parts(model, target.layers)
            except Unsupported as error:
                self._why = str(error).removeprefix("exact=True: ").removesuffix(f": {HINT}")
        return self._why


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
