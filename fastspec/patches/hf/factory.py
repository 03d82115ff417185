"""The target of a call, made of a transformers model of any kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastspec.errors import Unsupported
from fastspec.generation.ops import Ops
from fastspec.generation.target import Source
from fastspec.kernels.attention.reference import Span
from fastspec.patches.hf.compat import dtype_of
from fastspec.patches.hf.config_fields import recurrent_layers
from fastspec.patches.hf.exact import refuse_parts
from fastspec.patches.hf.limits import check_length, length_limits
from fastspec.patches.hf.model import HFModel
from fastspec.patches.hf.modes import (
    Mode,
    check_decoder,
    is_wrapped,
    may_see_ahead,
    mode_for,
    noise_of,
    refuse_foreign_masks,
    refuse_lost_cache,
)
from fastspec.patches.hf.seq2seq import Seq2SeqModel
from fastspec.patches.hf.tree_check import check_states, check_trust


def language_model(
    model: Any,
    source: Source | None,
    *,
    rows: int,
    capacity: int,
    tail: int,
    ops: Ops,
    taps: Any = None,
    drafts: bool = False,
    bounded: bool = True,
    likeliest: bool = False,
    first: int | None = None,
    dropped: Sequence[Span | None] | None = None,
    before_norm: bool = False,
) -> HFModel:
    """A model of a call: the decoder of one that reads a source, else a decoder-only one, with arguments of `HFModel`.
    Raises Unsupported for one without an adapter that cannot be relied on (`fastspec.patches.hf.tree_check`)."""
    mode = mode_for(model) if source is None else Mode(None, None, dtype_of(model))
    adapter = mode.adapter
    if source is not None:
        check_decoder(model)  # by its hooks of now: what is found of trees is kept
    if adapter is None:
        if any(recurrent_layers(model.config)):
            raise Unsupported(
                f"{type(model).__name__} keeps a recurrent state, which only fastspec's own loop over its layers can "
                f"take back, and it cannot run now: {mode.why}"
            )
        check_length(model, length_limits(model, generic=True, drafts=drafts), capacity, tail)
        if source is None:
            refuse_foreign_masks(model)
            refuse_lost_cache(model)
        elif (noise := noise_of(model.get_decoder().modules())) is not None:
            raise Unsupported(
                f"{noise} of this {type(model).__name__} in train mode, which fastspec's own loop over the decoder's "
                "layers leaves out: call model.eval() for the calls of generate"
            )
        check_trust(model, reads_source=source is not None)
        if taps is not None and source is None:
            check_states(model, taps)
        if before_norm:
            raise Unsupported(
                "this head reads the last layer's output before the final norm, which fastspec's own loop over the "
                f"layers gives: it needs an adapter, and {type(model).__name__} runs in generic mode "
                f"({mode.why or 'it has none'}): use 'nasd', 'speculative' or another head"
            )
    elif is_wrapped(model) or may_see_ahead(model):
        check_trust(model, adapter=adapter)
    if source is not None:
        return Seq2SeqModel(model, source, rows=rows, capacity=capacity, tail=tail, ops=ops, drafts=drafts)
    target = HFModel(
        model,
        adapter,
        rows=rows,
        capacity=capacity,
        tail=tail,
        taps=taps,
        ops=ops,
        drafts=drafts,
        bounded=bounded,
        likeliest=likeliest,
        first=first,
        dropped=dropped,
        before_norm=before_norm,
    )
    if ops.exact:
        refuse_parts(target)
    return target
