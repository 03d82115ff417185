"""Choice of the tests that try a mutant, from what each test runs."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from helpers.mutants import Mutant

MOST, SECONDS, FEW = 40, 90.0, 5
"""Tests of a mutant, at most, and the seconds that they took under coverage, but for the first; where fewer run its
lines, others of its function are asked as well."""


@dataclass(slots=True)
class Ran:
    """A test's seconds, and the lines that it runs of each module, as the bits of a number."""

    seconds: float
    lines: dict[str, int]


def bits(first: int, last: int) -> int:
    """Lines as the bits of a number."""
    return (1 << (last + 1)) - (1 << first)


def bound_by(mutant: Mutant, sources: Mapping[str, str]) -> str:
    """The name that a mutant's statement outside of functions binds; "" inside of one."""
    if mutant.body[0] > 1:
        return ""
    return re.findall(r"\w+", sources[mutant.module].splitlines()[mutant.lines[0] - 1])[0]


def row_of(mutant: Mutant, sources: Mapping[str, str]) -> str:
    """The lines of the row of a table that a mutant changes, or of its whole statement up to there."""
    (first, last), source = mutant.lines, sources[mutant.module]
    rows = [(first, last)]
    for node in ast.walk(ast.parse(source)):  # from the outermost table on
        starts = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
        ends = node.values if isinstance(node, ast.Dict) else starts
        spans = [(key.lineno, value.end_lineno or last) for key, value in zip(starts, ends, strict=True) if key]
        rows += [(start, end) for start, end in spans if first <= start <= last <= end]
    start, end = rows[min(1, len(rows) - 1)]
    return "\n".join(source.splitlines()[start - 1 : end])


def shown_at(mutant: Mutant, sources: Mapping[str, str]) -> dict[str, int]:
    """Lines that read what a mutant changes, by module: its own, for a default those of its function, and outside of
    functions all that name what the statement binds, or what its module makes of that: its own run once, on import."""
    if not (name := bound_by(mutant, sources)):
        first, last = mutant.lines
        return {mutant.module: bits(last + 1, mutant.body[1]) if first == mutant.body[0] else bits(first, last)}
    names = {name}
    for statement in ast.parse(sources[mutant.module]).body:
        read = {each.id for each in ast.walk(statement) if isinstance(each, ast.Name)}
        if isinstance(statement, ast.Assign) and names & read:
            names |= {each.id for each in statement.targets if isinstance(each, ast.Name)}
    named = re.compile(rf"\b({'|'.join(names)})\b")
    return {
        module: sum(
            1 << number
            for number, line in enumerate(text.splitlines(), 1)
            if named.search(line) and (module, number) != (mutant.module, mutant.lines[0])
        )
        for module, text in sources.items()
    }


def chosen(mutant: Mutant, tests: Mapping[str, Ran], sources: Mapping[str, str], texts: Mapping[str, str]) -> list[str]:
    """The tests that try a mutant, by the `texts` of their files: those that run lines of `shown_at`, then, where these
    are few, its function, then its module. First come cases and tests that name a text of the table's row that it
    changes, also those that read the table themselves, of these first those in files that name the table. Then come
    files that name what it changes, for a special method its class, then the others. Of these, every file gives one
    test in turn, a second case of any test last."""
    name, module = bound_by(mutant, sources), mutant.module.removesuffix(".py")
    own = re.findall(r'"(\w+)"', row_of(mutant, sources)) if name else []
    parts = mutant.function.split(".")
    function = next((part for part in reversed(parts) if not part.startswith("__")), parts[-1])

    def naming(*words: str) -> set[str]:
        named = re.compile(rf"\b({'|'.join(map(re.escape, words))})\b")
        return {file for file, text in texts.items() if named.search(f"{file} {text}")}

    place = naming(name or function, module.replace("/", "."), f"test_{Path(module).name}")
    row = naming(*own) if own else set()

    def rank(test: str) -> int:
        file, _, case = test.partition("::")
        function, _, case = case.partition("[")
        said = texts.get(file, "").partition(f"def {function}(")[2].partition("\ndef ")[0]
        if any(each in case or f'"{each}"' in said for each in own):
            return 0 if file in place else 1
        return 2 if file in place | row else 3

    ranks = {test: rank(test) for test in tests}
    reading = {file for file, text in texts.items() if name and re.search(rf"\b{name}\b", text)}

    def of(wanted: Mapping[str, int]) -> list[str]:
        held = [
            test
            for test, ran in tests.items()
            if any(ran.lines.get(m, 0) & lines for m, lines in wanted.items())
            or (ranks[test] < 2 and test.partition("::")[0] in reading)
        ]
        seen: Counter[tuple[int, str]] = Counter()

        def in_turn(names: Iterable[str], end: str) -> list[str]:
            """By rank, how many came before of what the name up to `end` says, and seconds."""
            keyed = []
            for name in names:
                part = ranks[name], name.partition(end)[0]
                keyed.append((ranks[name], seen[part], tests[name].seconds, name))
                seen[part] += 1
            return [name for *_, name in sorted(keyed)]

        return in_turn(in_turn(sorted(held, key=lambda name: (tests[name].seconds, name)), "["), "::")

    found = of(shown_at(mutant, sources))
    for span in (mutant.body, (0, 1 << 16)):
        if len(found) < FEW:
            found += [name for name in of({mutant.module: bits(*span)}) if name not in found]
    taken: list[str] = []
    spent = 0.0
    for name in found:
        spent += tests[name].seconds
        if taken and (len(taken) == MOST or spent > SECONDS):
            break
        taken.append(name)
    return taken
