"""What each layer of a decoder sees of a text, the whole or a span of it, and what transformers' own cache keeps of it between passes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from types import CodeType
from typing import Any

from transformers import DynamicCache

from fastspec.kernels.attention.reference import Span
from fastspec.patches.hf.compat import kept_lengths, layer_count, recurrent_layers, stack_of

LAYER_KINDS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""Kinds of layers that see a span of the text -> the setting that says how long it is."""
MAKERS = {
    "create_causal_mask": "full_attention",
    "create_sliding_window_causal_mask": "sliding_attention",
    "create_chunked_causal_mask": "chunked_attention",
}
"""transformers' functions that make the masks of a pass -> the kind of layers that they are for."""


def layer_spans(model: Any) -> list[Span | None]:
    """What the queries of each layer see in one pass, a span or the whole text (None): what the masks say that the decoder's forward makes.

    Configurations hold windows that a forward never reads, and kinds of layers that it does not tell apart. A forward that makes its masks
    by none of `MAKERS` is taken to do as the configuration says.
    """
    config, layers = model.config.get_text_config(), layer_count(model.config)
    words = _read_by(tuple((each, vars(each).get("forward")) for each in type(stack_of(model.get_decoder())).__mro__))
    made = {kind for maker, kind in MAKERS.items() if maker in words}
    kinds = getattr(config, "layer_types", None)
    if made and not any(kind in words for kind in LAYER_KINDS):  # one mask for all layers
        kinds = None
    if kinds is None:
        slides = bool(made) or getattr(config, "use_sliding_window", True)
        kinds = ["sliding_attention" if slides else "full_attention"] * layers
    return [_span(config, kind) if kind in made or not made else None for kind in kinds[:layers]]


@cache
def _read_by(forwards: tuple[tuple[type, Any], ...]) -> frozenset[str]:
    """The names and strings that the forwards of a decoder's class and of its bases read, with the functions of their own modules that they
    call."""
    found: set[str] = set()
    for each, forward in forwards:
        waiting: list[Any] = [forward]
        seen: set[Any] = set()
        while waiting:
            function = inspect.unwrap(called) if callable(called := waiting.pop()) else None
            if not inspect.isfunction(function) or function in seen or function.__module__ != each.__module__:
                continue
            seen.add(function)
            words = set(_words(function.__code__))
            found |= words
            waiting += [source.get(word) for word in words for source in (vars(each), function.__globals__)]
    return frozenset(found)


def _words(code: CodeType) -> Iterator[str]:
    """The names and strings in a function's code, and in that of the functions within it."""
    yield from code.co_names
    constants = list(code.co_consts)
    while constants:
        constant = constants.pop()
        if isinstance(constant, CodeType):
            yield from _words(constant)
        elif isinstance(constant, tuple):
            constants += constant
        elif isinstance(constant, str):
            yield constant


def _span(config: Any, kind: str) -> Span | None:
    size = getattr(config, LAYER_KINDS.get(kind, ""), None)
    return Span(size, kind == "chunked_attention") if isinstance(size, int) and size > 0 else None


def dropped_spans(model: Any, cache: Any = None) -> tuple[Span | None, ...]:
    """What transformers' cache, this one or the one that it makes for the model, leaves of the text between passes to layers that see the
    whole of it in each; None for the other layers.

    A cache goes by the configuration alone. Plain decoding sees the whole of a prompt there, and at each new token no more than the span.
    """
    config, spans = model.config.get_text_config(), layer_spans(model)
    names = [name for name in LAYER_KINDS.values() if getattr(config, name, None)]
    if all(span is not None for span in spans) or not names or model.config.is_encoder_decoder:
        return (None,) * len(spans)
    kept = kept_lengths(DynamicCache(config=config) if cache is None else cache, len(spans))
    found = zip(spans, kept, recurrent_layers(model.config), strict=True)
    return tuple(None if span is not None or recurrent or not size else Span(size) for span, size, recurrent in found)
