"""An interpreter for the Gluon kernels of Hopper, which Triton has none for: the functions of modules as plain Python,
over tensors on the CPU.

A program's groups of warps run one after another; a block is brought when a group waits for it. So it shows what is
read, added and written where, and each barrier's phases, and no race.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class Number(int):
    """An integer of a kernel: results of its operations are such, and it has `to`."""

    def to(self, dtype: Any) -> Number:
        return self


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "mod", "rshift", "lshift", "and", "rand", "xor"):

    def _operation(self: Number, other: Any, name: str = f"__{_name}__") -> Any:
        found = getattr(int, name)(self, other)
        return Number(found) if isinstance(found, int) and not isinstance(found, bool) else found

    setattr(Number, f"__{_name}__", _operation)


class Pointer:
    """A place, or places, of a flat tensor."""

    def __init__(self, data: Tensor, at: Any = 0) -> None:
        self.data, self.at = data, at

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.data, self.at + offset)


class Shared:
    """Shared memory."""

    def __init__(self, data: Tensor) -> None:
        self.data, self.shape, self.dtype = data, data.shape, data.dtype

    def index(self, at: int) -> Shared:
        return Shared(self.data[at])

    def permute(self, order: tuple[int, ...]) -> Tensor:
        return self.data.permute(order)

    def load(self, layout: Any) -> Tensor:
        return self.data.clone()

    def store(self, value: Tensor) -> None:
        self.data.copy_(value)


class Full:
    """Barriers of the places of blocks that are filled: a wait brings the next block of a place."""

    def __init__(self, places: Shared, lines: Tensor, first: int, count: int) -> None:
        self.places, self.lines, self.first, self.count, self.uses = places, lines, first, count, [0] * len(places.data)

    def index(self, stage: int) -> tuple[Full, int]:
        return self, stage

    def wait(self, stage: int, phase: int) -> None:
        block = stage + len(self.uses) * self.uses[stage]
        assert phase == self.uses[stage] & 1 and block < self.count
        size = self.places.shape[1]
        self.places.data[stage] = self.lines[self.first + block * size :][:size]
        self.uses[stage] += 1


class Free:
    """Barriers of the places that a group has left: it has left a place as often as it was filled."""

    def __init__(self, full: Full) -> None:
        self.full, self.left = full, [0] * len(full.uses)

    def index(self, stage: int) -> tuple[Free, int]:
        return self, stage

    def wait(self, stage: int, phase: int) -> None:
        assert self.left == self.full.uses and phase == (self.left[stage] - 1) & 1

    def arrive(self, stage: int) -> None:
        self.left[stage] += 1
        assert self.left[stage] == self.full.uses[stage]


def _where(condition: Any, one: Any, other: Any) -> Any:
    if not any(isinstance(x, Tensor) for x in (condition, one, other)):
        return Number(one if condition else other)
    return torch.where(*(torch.as_tensor(x) for x in (condition, one, other)))


def _of_two(choose: Callable[..., int], each: Callable[..., Tensor]) -> Callable[[Any, Any], Any]:
    return lambda a, b: each(a, torch.as_tensor(b)) if isinstance(a, Tensor) else Number(choose(a, b))


def _load(p: Pointer, mask: Any = True, other: float = 0.0) -> Any:
    if not isinstance(p.at, Tensor):
        return Number(p.data[p.at])
    mask = torch.as_tensor(mask).expand(p.at.shape)
    return torch.where(mask, p.data[p.at.where(mask, torch.zeros_like(p.at))], other)


def _store(p: Pointer, value: Tensor, mask: Tensor) -> None:
    mask = mask.expand(p.at.shape)
    p.data[p.at[mask]] = value[mask]


def _mma(a: Any, b: Tensor, sums: Tensor, use_acc: bool = True, is_async: bool = False) -> Tensor:
    a, b = (x.data if isinstance(x, Shared) else x for x in (a, b))
    return a @ b + (sums if use_acc else 0.0)


class Language(SimpleNamespace):
    """`gl` and `tl`: what has no other meaning here is a layout or a dtype."""

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **named: None


LANGUAGE = Language(
    int64=torch.int64,
    zeros=lambda shape, *rest: torch.zeros(shape),
    full=lambda shape, value, dtype, layout: torch.full(shape, value),
    full_like=torch.full_like,
    arange=lambda first, last, layout: torch.arange(first, last),
    fma=lambda a, b, c: a * b + c,
    where=_where,
    maximum=_of_two(max, torch.maximum),
    minimum=_of_two(min, torch.minimum),
    max=lambda x, axis: x.amax(axis),
    ceil=torch.ceil,
    exp2=torch.exp2,
    convert_layout=lambda x, layout: x,
    load=_load,
    store=_store,
    cast=lambda x, dtype: x,
    static_range=range,
)


class _Plain(ast.NodeTransformer):
    """Without decorators, annotations, and constants of the module."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.decorator_list = []
        for argument in node.args.args:
            argument.annotation = None
        self.generic_visit(node)
        return node


def plain(*modules: ModuleType, **given: Any) -> dict[str, Any]:
    """The kernels and device functions of modules, by name, as Python functions that call each other."""
    mbarrier = SimpleNamespace(
        wait=lambda at, phase: at[0].wait(at[1], phase), arrive=lambda at, count: at[0].arrive(at[1])
    )
    nothing = SimpleNamespace(commit_group=lambda: None, wait_group=lambda count: None)
    scope: dict[str, Any] = {
        "gl": LANGUAGE,
        "tl": LANGUAGE,
        "range": lambda *ends: map(Number, range(*ends)),
        "mma": _mma,
        "mma_wait": lambda count, deps: deps if len(deps) > 1 else deps[0],
        "mbarrier": mbarrier,
        "async_copy": nothing,
        "fence": lambda: None,
        "load_lines": lambda to, p, mask: to.store(_load(p, mask)),
    }
    for module in modules:
        for node in ast.parse(inspect.getsource(module)).body:
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(each) for each in node.decorator_list):
                body = ast.fix_missing_locations(ast.Module([_Plain().visit(node)], []))
                exec(compile(body, module.__name__, "exec"), scope)
        for name, value in vars(module).items():
            if name.isupper() or name in ("EMPTY", "GRID"):
                scope.setdefault(name, getattr(value, "value", value))
    scope.update(given)
    return scope


class Program:
    """Runs a kernel's programs: `shared_memory` and `warp_specialize` of one, by sizes [M, N, D, places, ones]."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.lines = keys, values

    def shared_memory(
        self, p_q: Pointer, d_k: Any, d_v: Any, row: int, tile: int, head: int, rows: int, *cut: Any
    ) -> Any:
        s_qb, s_qn, s_qh, group, (height, width, size, places, ones) = cut
        at = tile * 2 * height + torch.arange(2 * height)[:, None]
        p_q += row * s_qb + at // group * s_qn + (head * group + at % group) * s_qh + torch.arange(size)
        q = Shared(_load(p_q, (at < rows).expand(-1, size)).view(2, height, size))
        text, blocks = torch.full((2, height, size), torch.nan), torch.full((2, places, width, size), torch.nan)
        return q, Shared(torch.ones(ones, width)), Shared(text), (Shared(blocks[0]), Shared(blocks[1]))

    def warp_specialize(self, groups: Any, *rest: Any) -> None:
        *halves, (_, (_k, _v, _blocks, k_line, v_line, count)) = groups
        for half, (number, (q, ones, text, (k, v)), *more) in halves:
            full = Full(k, self.lines[0], k_line, count), Full(v, self.lines[1], v_line, count)
            free = Free(full[0]), Free(full[1])
            half(number, (q, ones, text, (k, v, full[0], free[0], full[1], free[1])), *more)
            assert all(each.full.uses == each.left and sum(each.left) == count for each in free)
