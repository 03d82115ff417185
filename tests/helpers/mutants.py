"""Mutants of a module: one place of its source changed at a time, and a draw of them with a fixed seed."""

from __future__ import annotations

import ast
import copy
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
LEFT_ALONE = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)
"""Errors and what they say, and imports."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change: `new` in place of the bytes `start` to `end` of a module's source."""

    module: str
    function: str
    """With its class; "" at the module's own level."""
    start: int
    end: int
    new: str
    lines: tuple[int, int]
    """From the first line of the statement to the last of what is changed."""
    body: tuple[int, int]
    """Lines of the function, or of the module."""
    key: str
    """Module, function, the lines before and after: it stays where the lines around change."""

    def applied(self, source: str) -> str:
        """The module's source with the change."""
        held = source.encode()
        return (held[: self.start] + self.new.encode() + held[self.end :]).decode()


def place(seed: int, key: str) -> str:
    """A mutant's place in the draw of its module."""
    return hashlib.sha256(f"{seed} {key}".encode()).hexdigest()


def mutants_of(module: str, source: str) -> list[Mutant]:
    """Every mutant of a module's source, in the order of the text."""
    return list(_Reader(module, source).mutants())


def drawn(sources: Mapping[str, str], count: int, seed: int) -> list[Mutant]:
    """`count` mutants of these modules, as many of each as its share of all lines, by largest remainders; of a module
    the first ones by `place`, so that a change elsewhere draws no others."""
    found = {
        module: sorted(mutants_of(module, source), key=lambda each: place(seed, each.key))
        for module, source in sources.items()
    }
    found = {module: mutants for module, mutants in found.items() if mutants}
    lines = {module: sources[module].count("\n") for module in found}
    shares = {module: count * lines[module] / sum(lines.values()) for module in found}
    wanted = {module: int(share) for module, share in shares.items()}
    for module in sorted(found, key=lambda each: (wanted[each] - shares[each], each))[: count - sum(wanted.values())]:
        wanted[module] += 1
    return [mutant for module, mutants in found.items() for mutant in mutants[: wanted[module]]]


class _Reader:
    """A module's source and the changes of its syntax tree."""

    def __init__(self, module: str, source: str) -> None:
        self.module, self.source = module, source
        self.lines = source.encode().splitlines(keepends=True)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))
        self.seen: Counter[str] = Counter()

    def mutants(self) -> Iterator[Mutant]:
        """See `mutants_of`."""
        yield from self._within(ast.parse(self.source), "", (1, len(self.lines)), 1)

    def _within(self, node: ast.AST, function: str, body: tuple[int, int], first: int) -> Iterator[Mutant]:
        if isinstance(node, ast.keyword) and node.arg == "strict":  # of zip, which only raises
            return
        if isinstance(node, LEFT_ALONE) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            return
        if isinstance(node, (ast.stmt, ast.comprehension, ast.ExceptHandler)) and hasattr(node, "lineno"):
            first = node.lineno
        for old, new in changes(node, bool(function)):
            yield self._made(old, new, function, body, first)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "bases", "keywords") and not isinstance(
                node, ast.Call
            ):
                continue
            for child in value if isinstance(value, list) else [value]:
                if not isinstance(child, ast.AST):
                    continue
                if isinstance(child, (*FUNCTIONS, ast.ClassDef)):
                    inner, span = (
                        f"{function}.{child.name}".lstrip("."),
                        (child.lineno, child.end_lineno or child.lineno),
                    )
                    yield from self._within(child, inner, span if isinstance(child, FUNCTIONS) else body, child.lineno)
                else:
                    yield from self._within(child, function, body, first)

    def _made(self, old: ast.stmt | ast.expr, new: str, function: str, body: tuple[int, int], first: int) -> Mutant:
        last = old.end_lineno or old.lineno
        start, end = self.starts[old.lineno - 1] + old.col_offset, self.starts[last - 1] + (old.end_col_offset or 0)
        before = b"".join(self.lines[old.lineno - 1 : last])
        offset = start - self.starts[old.lineno - 1]
        after = before[:offset] + new.encode() + before[offset + end - start :]
        key = f"{self.module}: {function or 'module'}: {_short(before)} => {_short(after)}"
        self.seen[key] += 1
        key += f" ({self.seen[key]})" if self.seen[key] > 1 else ""
        return Mutant(self.module, function, start, end, new, (min(first, old.lineno), last), body, key)


def _short(text: bytes) -> str:
    return " ".join(text.decode().split())


def changes(node: ast.AST, inside: bool) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    """(what is changed, its new text) for each change of a node itself; `inside` a function or not."""
    if isinstance(node, ast.Compare):
        for index, each in enumerate(node.ops):
            yield _with(node, ops=[*node.ops[:index], COMPARED[type(each)](), *node.ops[index + 1 :]])
    elif isinstance(node, ast.BoolOp):
        yield _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.BinOp) and type(node.op) in COMPUTED and (inside or not isinstance(node.op, ast.BitOr)):
        yield _with(node, op=COMPUTED[type(node.op)]())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield node, f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        yield node, repr(not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, ast.Call):
        for index, each in enumerate(node.keywords):
            if each.arg not in (None, "strict"):
                yield _with(node, keywords=[*node.keywords[:index], *node.keywords[index + 1 :]])
    elif isinstance(node, ast.AugAssign) and type(node.op) in COMPUTED:
        yield _with(node, op=COMPUTED[type(node.op)]())
    elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield node, "return None"
    elif isinstance(node, (ast.Expr, ast.Assign)) and _can_go(node, inside):
        yield node, "pass"
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        yield node.test, f"(not ({ast.unparse(node.test)}))"
    elif isinstance(node, ast.comprehension):
        yield from ((each, f"(not ({ast.unparse(each)}))") for each in node.ifs)


def _can_go(node: ast.Expr | ast.Assign, inside: bool) -> bool:
    """Whether the text is still that of a module without this: a call, or a value that an object is given."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, (ast.Call, ast.Await))
    return inside and all(isinstance(each, (ast.Attribute, ast.Subscript)) for each in node.targets)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _with(node: ast.stmt | ast.expr, **fields: object) -> tuple[ast.stmt | ast.expr, str]:
    """A node, and the text of it with other fields."""
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    text = ast.unparse(changed)
    return node, text if isinstance(node, ast.stmt) else f"({text})"
