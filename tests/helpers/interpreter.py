"""Triton's interpreter, less slow: for every call of a function it looks through all of `triton.language` for builtins,
for every value it makes its type and its shape anew, and for every operation it compares shapes number by number and
makes a table of dtypes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import FunctionType
from typing import Any

from triton import language
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


@cache
def builtins_of(package: Any) -> tuple[str, ...]:
    """The names of a module's or class's builtins; what was replaced by the interpreter's own is no builtin for the
    time being."""
    return tuple(name for name, member in inspect.getmembers(package) if core.is_builtin(member))


def patch_builtins(package: Any, builder: Any, scope: Any) -> None:
    """As the interpreter's function of this signature, over names that were found once."""
    for name in builtins_of(package):
        member = getattr(package, name)
        if core.is_builtin(member):
            interpreter._patch_attr(package, name, member, builder, scope)


@cache
def languages_of(fn: FunctionType) -> tuple[Any, ...]:
    """By which of its two modules a function's own module knows Triton's language."""
    return tuple(package for package in (language, core) if any(value is package for value in fn.__globals__.values()))


@cache
def sizes_of(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """What a value of this shape holds of it: the shape as Triton's tuple, and the number of its elements."""
    return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))


def begin_tensor(self: Any, handle: Any, type: Any) -> None:
    """As `triton.language.tensor.__init__`, with sizes that are shared by all values of a shape."""
    super(core.tensor, self).__init__()
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = sizes_of(type.shape if type.is_block() else ())


def unwrapped(plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """As `triton.language.core._unwrap_if_constexpr`, told by the class where that alone says it."""
    leaves = {core.tensor, core.dtype, core.block_type, core.pointer_type, int, float, bool, str, type(None)}

    def unwrap(value: Any) -> Any:
        kind = type(value)
        if kind in leaves:
            return value
        return value.value if kind is core.constexpr else plain(value)

    return unwrap


def begun_blocks(plain: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    """As `triton.language.block_type.__init__`; types of one shape share what says it, which is checked once."""
    known: dict[tuple[int, ...], tuple[Any, Any, str]] = {}

    def begin(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(shape.values if isinstance(shape, core.tuple) else shape)
        if not all(type(size) is int for size in sizes):
            plain(self, element_ty, shape)
        elif sizes not in known:
            plain(self, element_ty, shape)
            known[sizes] = self.shape, self.numel, str(self.shape)
        else:
            self.shape, self.numel, text = known[sizes]
            self.element_ty, self.name = element_ty, f"<{text}, {element_ty}>"

    return begin


def equal_tuples(plain: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """As `triton.language.tuple.__eq__`, at once for the same object and for a list."""
    verdicts = {equal: core.constexpr(equal) for equal in (False, True)}

    def equal(self: Any, other: Any) -> Any:
        if self is other or type(other) is list:
            return verdicts[self is other or self.values == other]
        return plain(self, other)

    return equal


def broadcast(plain: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """As `TritonSemantic.broadcast_impl_value`, at once for blocks whose types share a shape."""

    def both(self: Any, lhs: Any, rhs: Any) -> Any:
        one, other = lhs.type, rhs.type
        shared = type(one) is type(other) is core.block_type and one.shape is other.shape
        return (lhs, rhs) if shared else plain(self, lhs, rhs)

    return both


def cast(plain: Callable[..., Any]) -> Callable[..., Any]:
    """As `TritonSemantic.cast`, at once for a value of that very dtype."""

    def to(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: str | None = None) -> Any:
        if input.type.scalar is dst_ty.scalar:
            return input
        return plain(self, input, dst_ty, fp_downcast_rounding)

    return to


def by_name(dtype_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same function of a type of Triton's, asked once for each name; not every type can be a key."""
    known: dict[str, Any] = {}

    def asked(tt_dtype: Any) -> Any:
        if tt_dtype.name not in known:
            known[tt_dtype.name] = dtype_of(tt_dtype)
        return known[tt_dtype.name]

    return asked


def takes(found: Any, *names: str) -> bool:
    """Whether this is a function with parameters of these names, as in the versions of Triton that these stand-ins were
    written for."""
    return isinstance(found, FunctionType) and list(inspect.signature(found).parameters) == [*names]


def remember_builtins() -> None:
    """Let the interpreter find out once what does not change, where Triton's version has these functions; to be called
    before any kernel runs."""
    held = vars(interpreter)
    if takes(held.get("_patch_builtin"), "pkg", "builder", "scope"):
        for package in (language, core, core.tensor, language.math, core.tensor_descriptor_base):
            builtins_of(package)  # now, while all are builtins
        interpreter._patch_builtin = patch_builtins
    if takes(held.get("_get_np_dtype"), "tt_dtype"):
        interpreter._get_np_dtype = by_name(held["_get_np_dtype"])
    if takes(held.get("_patch_lang"), "fn") and "_LangPatchScope" in held:
        patch = held["_patch_lang"]

        def patch_once(fn: Any) -> Any:
            """A kernel's own call puts the interpreter's functions there until it ends: those that it calls need
            not."""
            return (
                patch(fn)
                if any(core.is_builtin(package.load) for package in languages_of(fn))
                else interpreter._LangPatchScope()
            )

        interpreter._patch_lang = patch_once
    if takes(vars(core).get("_unwrap_if_constexpr"), "o"):
        core._unwrap_if_constexpr = unwrapped(core._unwrap_if_constexpr)
    parts = {*vars(core.block_type(core.int32, [2]))} == {"element_ty", "shape", "numel", "name"}
    if parts and takes(core.block_type.__init__, "self", "element_ty", "shape"):
        core.block_type.__init__ = begun_blocks(core.block_type.__init__)
        if takes(vars(TritonSemantic).get("broadcast_impl_value"), "self", "lhs", "rhs"):
            TritonSemantic.broadcast_impl_value = broadcast(TritonSemantic.broadcast_impl_value)
    builder = held.get("interpreter_builder")
    if not builder.options.debug:  # whether numbers overflow is worked out all the same, and then not asserted
        builder.options = replace(builder.options, sanitize_overflow=False)
    if takes(vars(TritonSemantic).get("cast"), "self", "input", "dst_ty", "fp_downcast_rounding"):
        TritonSemantic.cast = cast(TritonSemantic.cast)
    if takes(core.tuple.__eq__, "self", "other"):
        core.tuple.__eq__ = equal_tuples(core.tuple.__eq__)
    if takes(core.tensor.__init__, "self", "handle", "type"):
        plain = vars(core.tensor(None, core.int32))
        if {*plain} == {"handle", "shape", "numel", "type", "dtype"}:
            core.tensor.__init__ = begin_tensor
