"""Tensors that are made once."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from torch import Tensor

Made = TypeVar("Made", bound=Callable[..., Tensor])


def constant(make: Made) -> Made:
    """Cache of a tensor by its arguments. One that is made where a program is looked at without data (kernels/ahead.py)
    is of another class, and is not kept: it would be read as if it had some."""
    held: dict[tuple[Any, ...], Tensor] = {}

    @wraps(make)
    def made(*given: Any) -> Tensor:
        if given in held:
            return held[given]
        found = make(*given)
        if type(found) is Tensor:
            held[given] = found
        return found

    return made  # type: ignore[return-value]  # typed as what it caches
