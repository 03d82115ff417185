"""Triton's interpreter, less slow: it looks through all of `triton.language` for builtins at every call of a function."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from triton import language
from triton.language import core
from triton.runtime import interpreter


@cache
def builtins_of(package: Any) -> tuple[str, ...]:
    """The names of a module's or class's builtins; what was replaced by the interpreter's own is no builtin for the time being."""
    return tuple(name for name, member in inspect.getmembers(package) if core.is_builtin(member))


def patch_builtins(package: Any, builder: Any, scope: Any) -> None:
    """As the interpreter's function of this signature, over names that were found once."""
    for name in builtins_of(package):
        member = getattr(package, name)
        if core.is_builtin(member):
            interpreter._patch_attr(package, name, member, builder, scope)


def remember_builtins() -> None:
    """Let the interpreter find builtins once, where Triton's version has that function; to be called before any kernel runs."""
    found = vars(interpreter).get("_patch_builtin")
    if found is None or list(inspect.signature(found).parameters) != ["pkg", "builder", "scope"]:
        return
    for package in (language, core, core.tensor, language.math, core.tensor_descriptor_base):
        builtins_of(package)  # now, while all are builtins
    interpreter._patch_builtin = patch_builtins
