"""Tensors that are made once."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar

Made = TypeVar("Made", bound=Callable[..., Any])


def constant(make: Made) -> Made:
    """Cache of a tensor by its arguments, made with data also where a program is first looked at without (the look of
    kernels/ahead.py): what a look has made has none, and would be read as if it had."""

    @lru_cache
    @wraps(make)
    def made(*given: Any) -> Any:
        from torch._subclasses.fake_tensor import unset_fake_temporarily

        with unset_fake_temporarily():
            return make(*given)

    return made  # type: ignore[return-value]  # typed as what it caches
