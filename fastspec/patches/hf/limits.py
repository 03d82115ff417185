"""Limits: what each layer of a decoder sees of a text, and how long a text an assisted call can be given."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any

import transformers
from packaging.version import Version
from transformers import DynamicCache

from fastspec.errors import Unsupported
from fastspec.generation.engine.round_program import EXTENT_BUCKET
from fastspec.kernels.attention.reference import Span
from fastspec.patches.hf.cache import kept_lengths
from fastspec.patches.hf.compat import every_module, own_buffers, stack_of
from fastspec.patches.hf.config_fields import layer_count, position_limit, recurrent_layers, rope_bound
from fastspec.patches.hf.families import ADAPTERS, BY_SLOT

LAYER_KINDS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""Kinds of layers that see a span of the text -> the setting that says how long it is."""
MAKERS = {
    "create_causal_mask": "full_attention",
    "create_sliding_window_causal_mask": "sliding_attention",
    "create_chunked_causal_mask": "chunked_attention",
}
"""transformers' functions that make the masks of a pass -> the kind of layers that they are for."""


def layer_spans(model: Any) -> list[Span | None]:
    """Positions that each layer's queries see in a pass, a span or the whole text (None), by the masks that the
    decoder's forward makes: configurations hold windows and kinds of layers that it never reads. A forward that makes
    its masks by none of `MAKERS` is taken to do as the configuration says."""
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
    """Names and strings that these forwards read, with the functions of their own modules that they call."""
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
    """Spans that transformers' cache, this one or the model's, leaves between passes of a text to layers that see the
    whole; None for others. It goes by the configuration alone, so that only a prompt is seen whole."""
    config, spans = model.config.get_text_config(), layer_spans(model)
    names = [name for name in LAYER_KINDS.values() if getattr(config, name, None)]
    if all(span is not None for span in spans) or not names or model.config.is_encoder_decoder:
        return (None,) * len(spans)
    kept = kept_lengths(DynamicCache(config=config) if cache is None else cache, len(spans))
    found = zip(spans, kept, recurrent_layers(model.config), strict=True)
    return tuple(None if span is not None or recurrent or not size else Span(size) for span, size, recurrent in found)


DROPS_CACHES = Version(transformers.__version__) < Version("5.20")
"""True where Phi's `prepare_inputs_for_generation` takes the cache away where longer rotary frequencies begin."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Tokens that a call must stay within; `why` goes on from "the call may reach 9 tokens, and". With `slots` drafts
    and room for growth count too."""

    tokens: int
    why: str
    slots: bool = False


def length_limits(model: Any, *, generic: bool, drafts: bool) -> list[Limit]:
    """All that limits a model's calls, by its own modules if `generic`; of `drafts` only what would raise."""
    found = [*_by_position(model), *(_by_module(model) if generic else ())]
    return [limit for limit in found if limit.slots] if drafts else found


def check_length(model: Any, limits: list[Limit], capacity: int, tail: int) -> None:
    """Raise Unsupported for a call of `capacity` tokens a row and trees of `tail` nodes that may go past a limit."""
    for limit in limits:
        spare = tail + EXTENT_BUCKET if limit.slots else 0
        if capacity + spare > limit.tokens:
            most = limit.tokens - spare
            ask = f"ask for at most {most}, prompt included" if most > 1 else "it cannot be combined with assistant="
            raise Unsupported(f"the call may reach {capacity} tokens, and {limit.why}: {ask} ({type(model).__name__})")


def check_padding(model: Any, padding: int, slots: int) -> None:
    """Raise Unsupported where queries would be scaled by positions in which `padding` of `slots` tokens counts."""
    row = ADAPTERS.get(model.config.get_text_config().model_type)
    factor = None if row is None else row.position_factor
    if factor is None or not factor.unrotated or not padding:
        return
    config = model.config.get_text_config()
    size = getattr(config, factor.period)
    if getattr(config, factor.used_if) and slots > size:
        raise Unsupported(
            f"a prompt has {padding} tokens of padding, which {type(model).__name__} counts where it scales queries "
            f"past {size} tokens ({factor.period}), and the call may reach {slots}: ask for at most {size}, prompt and "
            "padding included, pass prompts of one length, or one at a time"
        )


def _by_position(model: Any) -> Iterator[Limit]:
    config = model.config.get_text_config()
    bound = rope_bound(config)
    if bound is not None:
        kind = config.rope_parameters["rope_type"]
        yield Limit(bound, f"past {bound} this model's rotary frequencies depend on the length of the text ({kind})")

    size = getattr(config, "original_max_position_embeddings", None)
    if DROPS_CACHES and config.model_type in ("phi3", "phimoe", "phi4_multimodal") and isinstance(size, int):
        why = f"transformers {transformers.__version__} begins this family's caches anew past {size} tokens"
        yield Limit(size, why)


def _by_module(model: Any) -> Iterator[Limit]:
    config = model.config.get_text_config()
    rows = position_rows(model)
    if rows is not None:  # the last token of a text is given no position
        yield Limit(rows + 1, f"its positions end at {rows} (max_position_embeddings)")
    setting = BY_SLOT.get(config.model_type, "")
    size = getattr(config, setting, None)
    if isinstance(size, int):
        why = f"past {size} slots of the cache ({setting}) its layers count slots, where draft nodes lie out of order"
        yield Limit(size, why, True)
    if "local" in (getattr(config, "attention_layers", None) or ()):  # GPT-Neo's
        size = config.window_size
        why = f"its local layers count a window of {size} slots (window_size), where draft nodes lie out of order"
        yield Limit(size, why, True)
    masks = [tuple(each.shape) for each in model.buffers() if each.dim() == 4 and each.shape[:2] == (1, 1)]
    triangles = [columns for _, _, rows, columns in masks if rows == columns > 1]
    if triangles:
        yield Limit(min(triangles), f"its causal masks end at {min(triangles)} slots of the cache", True)


def counts_padding(model: Any) -> bool:
    """True where a forward on the instance names no position_ids, so that padding takes positions of a table."""
    if "forward" not in vars(model):
        return False
    own, given = (inspect.signature(each).parameters for each in (type(model).forward, model.forward))
    return "position_ids" in own and "position_ids" not in given and position_rows(model) is not None


def position_rows(model: Any) -> int | None:
    """Number of positions that a decoder can tell apart; None for rotary ones and a table that grows."""
    limit = position_limit(model.config)
    if limit is None:
        return None
    modules = every_module(stack_of(model.get_decoder()))  # a vision tower beside it has positions of its own
    for module in modules:
        for name, table in own_buffers(module).items():
            if "pos" in name and table is not None and table.dim() == 2 and table.shape[0] == limit:
                return limit  # GPT-J's rotary embedding has one since transformers 5.24
    kinds = set(map(type, modules))
    rotary = any("rotary" in kind.__name__.lower() or callable(getattr(kind, "make_weights", None)) for kind in kinds)
    return None if rotary else limit
