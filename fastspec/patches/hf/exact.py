"""Which models are held to bits: refusals of `patch(exact=True)`, and what `exact=None` and `stored=None` come to."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch

from fastspec.devices import MEASURED, device_name, is_timed
from fastspec.errors import Unsupported
from fastspec.generation.decoder_layer import FullAttention, Gated, LayerParts, Linears, RmsNorm, StoredLinears
from fastspec.generation.ops import Ops
from fastspec.patches.hf.changes import Snapshot
from fastspec.patches.hf.compat import device_of, processes_of
from fastspec.patches.hf.layer_weights import RoutedExperts, keeps_activations
from fastspec.patches.hf.layers import product_of
from fastspec.patches.hf.model import HFModel
from fastspec.patches.hf.modes import Mode, lm_head_of
from fastspec.patches.hf.parallel import Reduced, share_of

HINT = "leave out exact=True"
ASK = "patch(model, exact=True) asks for it"
PRODUCTS = Linears, StoredLinears, Reduced
ALIGNED = 8
"""Number that divides the depths of experts that are held to bits: of 65 and 33 channels, float16 had other bits in
tiles of other heights on an H200."""
WIDE = 1536
"""Hidden size from which models are held to bits by themselves: a token or a round of one row takes up to 7 % longer on
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


class Defaults:
    """Values of `patch(exact=None, stored=None)` for a model, as it was at the last look."""

    def __init__(self) -> None:
        self._seen: Snapshot | None = None
        self._stored: bool | None = None
        self._why: dict[bool, str | None] = {}

    def look(self, model: Any) -> Mode:
        """Mode that a model runs in now, outside autocast. What was found of one that has changed since the last look
        is forgotten."""
        if self._seen is None or self._seen.model is not model or self._seen.changed():
            former = self._seen if self._seen is not None and self._seen.model is model else None
            self._seen, self._stored, self._why = Snapshot(model, former), None, {}
        return self._seen.mode

    @property
    def key(self) -> Hashable:
        """Value that stands for the weights and settings of the model of the last look, equal where these are."""
        assert self._seen is not None
        return self._seen.key

    def _follow(self, model: Any, mode: Mode) -> None:
        """`look` at a model that runs in this mode now, unless that is what the last look gave."""
        if self._seen is None or self._seen.mode is not mode:
            self.look(model)

    def reads_stored(self, model: Any, mode: Mode, ops: Ops) -> bool:
        """True where a model's quantised weights are multiplied as stored though nobody asked for it: in 16 bits, on a
        device where that was measured to be faster than their own forward, which rounds no activations; in one
        process."""
        if unfit(ops, mode.dtype) is not None or not is_timed(device_of(model)) or processes_of(model) > 1:
            return False
        self._follow(model, mode)
        if self._stored is None:
            self._stored = keeps_activations(model)
        return self._stored

    def why_inexact(self, model: Any, mode: Mode, ops: Ops) -> str | None:
        """Reason for which a model on these kernels is not held to bits unless that is asked for; None where it is."""
        if (reason := unfit(ops, mode.dtype)) is not None:
            return reason
        width = model.config.get_text_config().hidden_size
        place = device_name(device_of(model))
        if place not in MEASURED:
            return f"its cost was not measured on {place}: {ASK}"
        if width < WIDE:
            return f"layers of {width} channels, under {WIDE}, take longer by it: {ASK}"
        assert mode.adapter is not None  # as it has these kernels
        self._follow(model, mode)
        stored = ops.stored_linears is not None
        if stored not in self._why:
            self._why[stored] = None
            try:
                target = HFModel(model, mode.adapter, rows=1, capacity=1, tail=1, taps=None, ops=ops)
                refuse_parts(target)
                if processes_of(model) > 1:
                    self._why[stored] = f"its cost was measured over two processes alone: {ASK}"
                elif any(isinstance(layer.mlp, RoutedExperts) for layer in target.layers):
                    self._why[stored] = f"its cost was measured of one row of a mixture of experts alone: {ASK}"
                elif any(map(_is_stored, target.layers)):
                    self._why[stored] = f"prompts of weights multiplied as they are stored take longer by it: {ASK}"
            except Unsupported as error:
                self._why[stored] = str(error).removeprefix("exact=True: ").removesuffix(f": {HINT}")
        return self._why[stored]


def refuse_parts(target: HFModel) -> None:
    """Raise Unsupported where a layer runs by more than attention, products of plain or of stored weights (or of what
    this process has of them), experts by the backend's op, and root-mean-square norms, or the LM head by more than such
    a product and norm."""
    name = type(target.model).__name__
    for number, layer in enumerate(target.layers):
        for what in _others(layer):
            raise Unsupported(f"exact=True: layer {number} of {name} has {what}: {HINT}")
    assert target.adapter is not None  # as it has these kernels
    head = lm_head_of(target.model, target.adapter)
    if share_of(head) is None and not isinstance(product_of((head,), target.ops), PRODUCTS):
        raise Unsupported(f"exact=True: {name} has an LM head that is no plain linear layer: {HINT}")
    if not isinstance(target.norm, RmsNorm):
        raise Unsupported(f"exact=True: {name} has a last norm of its own: {HINT}")


def _is_stored(layer: LayerParts) -> bool:
    mixer, mlp = layer.mixer, layer.mlp
    read = [mixer.qkv] if isinstance(mixer, FullAttention) else []
    read += [mlp.gate_up] if isinstance(mlp, Gated) else []
    return any(isinstance(each, StoredLinears) for each in read)


def _others(layer: LayerParts) -> Iterator[str]:
    mixer, mlp = layer.mixer, layer.mlp
    if not isinstance(mixer, FullAttention):
        yield f"{type(mixer).__name__}, which sums over a tree otherwise than over a text"
    elif not isinstance(mixer.qkv, PRODUCTS) or not isinstance(mixer.out, PRODUCTS):
        yield "projections of attention that are no plain linear layers"
    dense = isinstance(mlp, Gated) and isinstance(mlp.out, PRODUCTS)
    if not dense and not isinstance(mlp, RoutedExperts):
        yield "a feed-forward that runs by a module of its own"
    elif isinstance(mlp, RoutedExperts) and any(depth % ALIGNED for depth in mlp.depths):
        yield f"experts of {' and '.join(map(str, mlp.depths))} channels, which are no multiples of {ALIGNED}"
    norms = layer.input_norm, layer.mlp_norm, layer.mixer_out_norm, layer.mlp_out_norm
    if any(norm is not None and not isinstance(norm, RmsNorm) for norm in norms):
        yield "norms of its own"
    if layer.beside is not None or layer.after is not None:
        yield "more than attention and a feed-forward"
