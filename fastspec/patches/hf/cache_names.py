"""What transformers calls the KV cache: `cache` since 5.24, `past_key_values` before.

One name is that of the installed version: an argument of `generate`, what it hands to a custom loop, a field of its outputs. A forward has
its own: of a class that transformers does not ship it may still be the old one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from transformers import GenerationMixin

_IS_RENAMED = "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
"""Delete this, and the old name with it, when 5.24 is the oldest version and transformers takes no old name any more (6.0)."""
OLD = "past_key_values"
_NAMES = ("cache", OLD) if _IS_RENAMED else (OLD,)
CACHE = _NAMES[0]
"""The installed version's name."""
GIVEN = (*_NAMES, "cache_params") if _IS_RENAMED else _NAMES
"""Under which names a user's cache comes to `generate`: transformers takes old ones for the new one, and warns."""


def given_cache(given: dict[str, Any]) -> Any:
    """The cache among the arguments of a `generate` call, or None. Where several names are given, transformers heeds the first of these."""
    return next((given[name] for name in GIVEN if name in given), None)


def cache_argument(forward: Callable[..., Any]) -> str:
    """The name of a forward's argument for a cache; the version's, where it names none."""
    names = inspect.signature(forward).parameters
    return next((name for name in _NAMES if name in names), CACHE)


def kept_cache(output: Any) -> Any:
    """The cache that an output of `generate` or of one of transformers' models holds."""
    return getattr(output, CACHE)
