"""How long a text a model can be given in an assisted call, where that is shorter than what memory holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import transformers
from packaging.version import Version
from torch import nn

from fastspec.errors import Unsupported
from fastspec.generation.engine.round_program import EXTENT_BUCKET
from fastspec.patches.hf.compat import position_limit, rope_bound
from fastspec.patches.hf.families import ADAPTERS, GENERIC
from fastspec.patches.hf.walk import every_module

DROPS_CACHES = Version(transformers.__version__) < Version("5.20")
"""Whether Phi's `prepare_inputs_for_generation` takes a text's cache away where longer rotary frequencies begin, if it has such or not:
padded texts go on with other tokens than they would from the cache."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A number of tokens that a call must stay within; `why` goes on from "the call may reach 9 tokens, and". With `slots` the slots of
    the cache count, drafts and room for growth among them."""

    tokens: int
    why: str
    slots: bool = False


def length_limits(model: Any, *, generic: bool, drafts: bool) -> list[Limit]:
    """All that limits a model's calls; `generic` says whether it runs by its own modules. Where `drafts` are all that it gives, only
    what would raise is too long."""
    found = [*_by_position(model), *(_by_module(model) if generic else ())]
    return [limit for limit in found if limit.slots] if drafts else found


def check_length(model: Any, limits: list[Limit], capacity: int, tail: int) -> None:
    """Raise Unsupported for a call of up to `capacity` tokens a row and trees of `tail` nodes, if it may go past a limit."""
    for limit in limits:
        spare = tail + EXTENT_BUCKET if limit.slots else 0
        if capacity + spare > limit.tokens:
            most = limit.tokens - spare
            ask = f"ask for at most {most}, prompt included" if most > 1 else "it cannot be combined with assistant="
            raise Unsupported(f"the call may reach {capacity} tokens, and {limit.why}: {ask} ({type(model).__name__})")


def check_padding(model: Any, padding: int, slots: int) -> None:
    """Raise Unsupported for a call of up to `slots` tokens a row, `padding` among them, whose queries would be scaled by where they stand
    with the padding counted."""
    row = ADAPTERS.get(model.config.get_text_config().model_type)
    factor = None if row is None else row.position_factor
    if factor is None or not factor.unrotated or not padding:
        return
    config = model.config.get_text_config()
    size = getattr(config, factor.period)
    if getattr(config, factor.used_if) and slots > size:
        raise Unsupported(
            f"a prompt has {padding} tokens of padding, which {type(model).__name__} counts where it scales queries past {size} tokens "
            f"({factor.period}), and the call may reach {slots}: ask for at most {size}, prompt and padding included, pass prompts of one "
            "length, or one at a time"
        )


def _by_position(model: Any) -> Iterator[Limit]:
    config = model.config.get_text_config()
    bound = rope_bound(config)
    if bound is not None:
        kind = config.rope_parameters["rope_type"]
        yield Limit(bound, f"past {bound} this model's rotary frequencies depend on the length of the text ({kind})")


    size = getattr(config, "original_max_position_embeddings", None)
    if DROPS_CACHES and config.model_type in ("phi3", "phimoe", "phi4_multimodal") and isinstance(size, int):
        yield Limit(size, f"transformers {transformers.__version__} begins this family's caches anew past {size} tokens")


def _by_module(model: Any) -> Iterator[Limit]:
    config = model.config.get_text_config()
    rows = position_rows(model)
    if rows is not None:  # the last token of a text is given no position
        yield Limit(rows + 1, f"its positions end at {rows} (max_position_embeddings)")
    row = GENERIC.get(config.model_type)
    size = getattr(config, row.by_slot, None) if row is not None and row.by_slot else None
    if row is not None and isinstance(size, int):
        why = f"past {size} slots of the cache ({row.by_slot}) its layers count slots, where draft nodes lie out of order"
        yield Limit(size, why, True)
    if "local" in (getattr(config, "attention_layers", None) or ()):  # GPT-Neo's
        size = config.window_size
        yield Limit(size, f"its local layers count a window of {size} slots (window_size), where draft nodes lie out of order", True)
    triangles = [b.shape[-1] for b in model.buffers() if b.dim() == 4 and b.shape[:2] == (1, 1) and b.shape[2] == b.shape[3] > 1]
    if triangles:
        yield Limit(min(triangles), f"its causal masks end at {min(triangles)} slots of the cache", True)


def position_rows(model: Any) -> int | None:
    """How many positions a model can tell apart, or None where it computes any.

    Rotary embeddings are computed for any position; a table of them, learned or sinusoidal, ends. A model that has neither is taken to
    end where its configuration says.
    """
    limit = position_limit(model.config)
    if limit is None:
        return None
    words, modules = model.get_input_embeddings(), every_module(model)
    for module in modules:
        for name, table in module._buffers.items():
            if "pos" in name and table is not None and table.dim() == 2 and table.shape[0] == limit:
                return limit  # GPT-J's rotary embedding has one since transformers 5.24
        for name, part in module._modules.items():
            if isinstance(part, nn.Embedding) and part is not words and any(each in name.lower() for each in ("pos", "wpe")):
                return limit
    kinds = set(map(type, modules))  # XGLM's sinusoidal table, which makes its weights, grows
    rotary = any("rotary" in kind.__name__.lower() or callable(getattr(kind, "make_weights", None)) for kind in kinds)
    return None if rotary else limit
