"""Mutation testing of the engine's core: draws mutants with a fixed seed, runs mutmut on them, and writes what lived to `mutants.md`.

`make mutants` runs it on all modules, or, without writing the page, on those that its arguments name. mutmut's settings are in
pyproject.toml; `mutants.toml` beside this file says how many mutants are drawn of a module, which functions do not belong to the core, and
which mutants change nothing, and why.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from fnmatch import fnmatch
from pathlib import Path

import tomllib
from mutmut.configuration import config
from mutmut.mutation.file_mutation import mutate_file_contents
from mutmut.stats import status_by_exit_code

LIST = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
KILLED = {"killed", "timeout"}


@dataclass(frozen=True)
class Mutant:
    """`key` is mutmut's name, which moves when the function changes; `change` says what is mutated, and stays."""

    module: str
    key: str
    change: str

    @property
    def place(self) -> str:
        """Its place in the draw."""
        return hashlib.sha256(f"{LIST['seed']} {self.module} {self.change}".encode()).hexdigest()

    @property
    def reason(self) -> str | None:
        """Why it changes nothing, if it is listed."""
        kinds = (kind["reason"] for kind in LIST["kinds"] if re.fullmatch(kind["change"], self.change))
        return LIST["equivalent"].get(f"{Path(self.module).parent.name}/{Path(self.module).stem}.{self.change}") or next(kinds, None)

    @property
    def outcome(self) -> str:
        """What became of it in mutmut's last run."""
        kept = json.loads(Path("mutants", f"{self.module}.meta").read_text())
        return status_by_exit_code[kept["exit_code_by_key"].get(self.key)]


def changed(before: list[str], after: list[str]) -> str:
    """The lines in which two functions differ, as one."""
    spans = [(a, b, c, d) for tag, a, b, c, d in SequenceMatcher(None, before, after, autojunk=False).get_opcodes() if tag != "equal"]
    old = [line.strip() for a, b, _, _ in spans for line in before[a:b]]
    return f"{' '.join(old)} => {' '.join(line.strip() for _, _, c, d in spans for line in after[c:d])}"


def mutants_of(module: str) -> Iterator[Mutant]:
    """Every mutant of the module's functions that belong to the core."""
    mutated = mutate_file_contents(module, Path(module).read_text())
    lines, package = mutated.code.splitlines(), module.removesuffix(".py").replace("/", ".")
    for name in mutated.mutant_names:
        mangled = name.rpartition("__mutmut_")[0]
        function = mangled.removeprefix("x_").removeprefix("xǁ").replace("ǁ", ".")
        if not any(fnmatch(f"{Path(module).stem}.{function}", pattern) for pattern in LIST["skip"]):
            texts = []
            for each in (f"{mangled}__mutmut_orig", name):
                span = mutated.line_span_by_function_name[each]
                texts.append([line.replace(each, function) for line in lines[span.start - 1 : span.end]])
            yield Mutant(module, f"{package}.{name}", f"{function}: {changed(*texts)}")


def drawn(module: str) -> list[Mutant]:
    """As many of a module as are wanted, in the order of the draw."""
    return sorted(mutants_of(module), key=lambda mutant: mutant.place)[: LIST["of_each"]]


def table(modules: dict[str, list[Mutant]]) -> Iterator[str]:
    """The lines of `mutants.md`."""
    yield from ("# Mutants of the core", "", f"`make mutants` draws {LIST['of_each']} of each module and writes this page.")
    yield from ("mutmut leaves constants and decorated functions alone, properties among them.", "")
    yield from ("| module | mutants | drawn | equivalent | killed | lived | score |", "|---|---|---|---|---|---|---|")
    for module, mutants in modules.items():
        tried = [mutant for mutant in mutants if mutant.reason is None]
        killed = sum(mutant.outcome in KILLED for mutant in tried)
        counts = len(list(mutants_of(module))), len(mutants), len(mutants) - len(tried), killed, len(tried) - killed
        yield f"| {module} | {' | '.join(map(str, counts))} | {killed / len(tried):.1%} |"
    for title, kept in (("Lived", False), ("Equivalent", True)):
        yield from ("", f"## {title}", "")
        for mutants in modules.values():
            for mutant in mutants:
                if kept and mutant.reason is not None:
                    yield f"- `{mutant.key}`: {mutant.reason}\n  `{mutant.change}`"
                elif not kept and mutant.reason is None and mutant.outcome not in KILLED:
                    yield f"- `{mutant.key}` ({mutant.outcome})\n  `{mutant.change}`"


def main() -> int:
    """Run the mutants of the modules that the arguments name, and say how all ended; 1 where fewer than 95 % of a module's were killed."""
    modules = {module: drawn(module) for module in config().only_mutate}
    wanted = [module for module in modules if not sys.argv[1:] or any(part in module for part in sys.argv[1:])]
    keys = [mutant.key for module in wanted for mutant in modules[module] if mutant.reason is None]
    subprocess.run([Path(sys.executable).with_name("mutmut"), "run", "--max-children", "1", *keys], check=True)
    page = "\n".join(table({module: modules[module] for module in wanted})) + "\n"
    if wanted == list(modules):  # of some modules it is shown alone
        Path(__file__).with_suffix(".md").write_text(page)
    print(page)
    return int(any(float(score) < 95 for score in re.findall(r"\| ([0-9.]+)% \|", page)))


if __name__ == "__main__":
    sys.exit(main())
