"""Calls that plain decoding reads otherwise than their texts without padding: holes of a mask under windows, and caches that keep less than
layers see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastspec.errors import Unsupported
from fastspec.kernels.attention.reference import Span
from fastspec.patches.hf.cache_names import CACHE
from fastspec.patches.hf.compat import recurrent_layers
from fastspec.patches.hf.spans import LAYER_KINDS, layer_spans

INSTEAD = "pass the whole text of every row, padded on the left alone, without a cache, or leave out assistant="


def refuse_holes(model: Any, keep: Tensor, past: int, limit: int, dropped: Sequence[Span | None]) -> None:
    """Raise Unsupported for a mask keep [B, past + T] bool with holes under which plain decoding sees other tokens than it would without
    padding, in a call of up to `limit` new tokens on a cache of `past`; `dropped` are those of `HFModel`.

    Plain decoding counts slots: padding in the middle of a text fills up windows and chunks, and a recurrent state decays over it.
    """
    first = keep.int().argmax(1, keepdim=True)
    holes = ~keep & (torch.arange(keep.shape[1], device=keep.device) > first)
    rows = holes.any(1).nonzero()[:, 0].tolist()
    if not rows:
        return
    read = [span for span in dict.fromkeys(layer_spans(model)) if span is not None]
    left = [span for span in dict.fromkeys(dropped) if span is not None]
    name = type(model).__name__
    for row in rows:
        slots = keep[row].nonzero()[:, 0].cpu()
        where = f"row {row} of attention_mask has {int(holes[row].sum())} zeros behind its first token"
        if any(recurrent_layers(model.config)) and bool(holes[row, past:].any()):
            raise Unsupported(f"{where}, and the recurrent states of {name} go on over them: {INSTEAD}")
        begin = int(keep[row, :past].sum())
        for spans, query in ((read, begin), (left, len(slots))):
            cut = next((span for span in spans if _differs(slots - slots[0], query, limit, span)), None)
            if cut is not None:
                kind = "chunks" if cut.chunk else "a window"
                raise Unsupported(
                    f"{where}, and {name} sees {kind} of {cut.size} tokens, which plain decoding counts padding among: {INSTEAD}"
                )


def _differs(slots: Tensor, begin: int, limit: int, span: Span) -> bool:
    """Whether a row's queries from number `begin` on, `limit` new tokens included, see other tokens by their slots than by their
    numbers. Behind the last hole both go on alike: two spans show all that there is."""
    new = torch.arange(min(max(limit - 1, 0), 2 * span.size), device="cpu")  # the last new token is never read
    slots = torch.cat((slots, slots[-1] + 1 + new))
    number = torch.arange(len(slots), device="cpu")
    first, wanted = (
        each // span.size * span.size if span.chunk else (each - span.size + 1).clamp(min=0) for each in (number, slots)
    )  # fmt: skip
    return not torch.equal(torch.searchsorted(slots, wanted)[begin:], first[begin:])


def refuse_dropped(model: Any, cache: Any, past: int, config: Any, dropped: Sequence[Span | None]) -> None:
    """Raise Unsupported for a call on a cache that keeps less of the text than the model's layers see, where plain decoding goes by more
    than that: `cache` is static, or holds `past` tokens of which some are gone, or the prompt is read in parts."""
    sizes = [span.size for span in dropped if span is not None]
    if not sizes:
        return
    least, parts = min(sizes), getattr(config, "prefill_chunk_size", None)
    if getattr(cache, "is_compileable", False):
        what = f"a {type(cache).__name__} brings masks with windows of {least} tokens"
    elif past >= least:
        what = f"the {past} tokens of {CACHE} are kept in windows of {least}"
    elif parts is not None:
        what = f"prefill_chunk_size={parts} reads a prompt in windows of {least} tokens"
    else:
        return
    raise Unsupported(
        f"{what}, by a setting that the forward of {type(model).__name__} does not read ({' or '.join(LAYER_KINDS.values())}): set it to "
        "None, or pass whole prompts without a cache"
    )
