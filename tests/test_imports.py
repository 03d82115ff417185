"""The layers of the package, held by its import statements, and the cost of `import fastspec`."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import fastspec

ROOT = Path(__file__).parent.parent / "fastspec"
KNOWS_TRANSFORMERS = ("patches", "programs", "models.py")
HEAVY = {"torch", "triton", "transformers", "accelerate", "safetensors", "numpy", "huggingface_hub"}
GROUPS = "attention", "cache", "drafting", "layer", "linear", "quantised", "recurrent", "verification"
REFERENCE = tuple(f"kernels.{group}.reference" for group in GROUPS)
ALLOWED = {  # layer -> (heavy packages, modules of fastspec) that it may import
    "kernels": ({"torch", "triton"}, ("constants", "errors", "kernels")),
    "generation": (
        {"torch", "safetensors"},
        ("config", "constants", "default_trees", "devices", "errors", "files", "forks", "generation", *REFERENCE),
    ),
    "cascade": (
        {"torch", "safetensors"},
        ("cascade", "config", "distribution", "errors", "files", "generation", *REFERENCE),
    ),
    "patches": (
        HEAVY - {"triton"},
        (
            "cascade",
            "config",
            "default_trees",
            "devices",
            "distribution",
            "errors",
            "files",
            "forks",
            "generation",
            "kernels",
            "models",
            "patches",
        ),
    ),
}
PUBLIC = (  # modules of the library that programs may import, or names of a module that they may import alone
    "config",
    "default_trees",
    "devices",
    "distribution",
    "errors",
    "files",
    "models",
    "removed",
    "cascade",
    "generation.heads",
    "generation.drafters.nasd.storage_of",
    "generation.stats",
    "generation.decoder_layer.is_plain",
    "generation.verify.TokenLogprob",
    "patches.api",
    "patches.assistants.heads",
    "patches.assistants.mtp.load_mtp",
    "patches.assistants.mtp.new_mtp",
    "patches.assistants.mtp.saved_mtp",
    "patches.assistants.mtp_report",
    "patches.assistants.probe",
    "patches.assistants.speculative.read_parameters",
    "patches.call.grammar_text",
    "patches.call.processors.RoundStreamer",
    "patches.call.processors.StreamedRound",
    "patches.call.processors.TokenPenalties",
    "patches.cascade",
    "patches.hf.changes.weights_digest",
    "patches.hf.cache.CACHE",
    "patches.hf.cache.kept_cache",
    "patches.hf.compat.stack_of",
    "patches.hf.config_fields.layer_shapes",
    "patches.hf.config_fields.position_limit",
    "patches.hf.ends",
    "patches.scoring.text_logprobs",
    "patches.tuning.store",
)


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> frozenset[str]:
    """Dotted names of all that a file imports, inside functions too; what only a type checker reads does not count."""
    tree = parsed(path)
    guards = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    skipped = {inner for guard in guards for inner in ast.walk(guard)}
    nodes = [node for node in ast.walk(tree) if node not in skipped]
    return dotted(nodes)


def dotted(nodes: list[ast.AST]) -> frozenset[str]:
    """The names that import statements give in full; others would get past the tests of this file."""
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    assert not any(node.level for node in froms), "a relative import: write the module's name in full"
    plain = frozenset(alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names)
    return plain | {f"{node.module}.{alias.name}" for node in froms for alias in node.names}


def may_import(name: str, heavy: set[str], modules: tuple[str, ...]) -> bool:
    top, _, rest = name.partition(".")
    if top == "fastspec":
        return any(f"{rest}.".startswith(f"{module}.") for module in modules)
    return top not in HEAVY or top in heavy


def test_every_layer_imports_only_what_lies_below_it() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for layer, rules in ALLOWED.items()
        for path in sorted((ROOT / layer).rglob("*.py"))
        for name in sorted(imports(path))
        if not may_import(name, *rules)
    ]
    assert not wrong, "\n".join(wrong)


def test_programs_use_public_names_and_the_library_imports_no_program() -> None:
    """`import fastspec` gives the rest of what programs use."""
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        program = path.relative_to(ROOT).parts[0] in ("programs", "__main__.py")
        for name in sorted(imports(path)):
            whole = name.startswith("fastspec.") and name.removeprefix("fastspec.") not in fastspec.__all__
            if program and whole and not may_import(name, HEAVY, ("programs", *PUBLIC)):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
            if not program and name.startswith("fastspec.programs"):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_transformers_is_imported_where_it_may_be() -> None:
    for path in ROOT.rglob("*.py"):
        if path.relative_to(ROOT).parts[0] not in KNOWS_TRANSFORMERS:
            assert not any(name.split(".")[0] == "transformers" for name in imports(path)), path


IMPORTS = re.compile(r"^ *(?:from [\w.]+ import \([^)]*\)|(?:from|import) .*)", re.MULTILINE)


def test_no_test_module_imports_another() -> None:
    """`tests/helpers` holds what several use, imported by its full name: two test modules may have the same name."""
    tests = Path(__file__).parent
    modules = {path.stem for path in tests.rglob("*.py") if path.stem == "conftest" or path.stem.startswith("test_")}
    wrong = [
        f"{path.relative_to(tests)}: {line}"
        for path in sorted(tests.rglob("*.py"))
        for line in IMPORTS.findall(path.read_text(encoding="utf-8"))
        if modules & set(re.findall(r"\w+", line))
    ]
    assert not wrong, "\n".join(wrong)


def test_importing_fastspec_is_light() -> None:
    code = "import time; t = time.process_time(); import fastspec, sys; print(time.process_time() - t, *sys.modules)"
    seconds, *modules = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not HEAVY & set(modules)
    assert float(seconds) < 1.0


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_modules_import_each_other() -> None:
    """Not in a circle either, nor inside functions, nor for a type checker alone; the package itself, which imports
    lazily, is left out."""
    paths = {module_of(path): path for path in ROOT.rglob("*.py")}
    graph = {name: within(path, paths) - {name, "fastspec"} for name, path in paths.items() if name != "fastspec"}
    while ends := {name for name, found in graph.items() if not found} | (set(graph) - set().union(*graph.values())):
        graph = {name: found - ends for name, found in graph.items() if name not in ends}
    assert not graph, "\n".join(
        f"{name} imports {sorted(found)}" for name, found in sorted(graph.items())
    )  # the circles alone


def test_no_module_of_the_package_is_imported_by_a_text() -> None:
    """The tests of this file read import statements."""
    calls = [
        (path, node) for path in ROOT.rglob("*.py") for node in ast.walk(parsed(path)) if isinstance(node, ast.Call)
    ]
    named = [(path, ast.unparse(call)) for path, call in calls if "import_module" in ast.unparse(call.func)]
    assert named and not [each for each in named if "'fastspec." in each[1]]


def within(path: Path, paths: dict[str, Path]) -> set[str]:
    """The modules of the package that a file imports anywhere."""
    names = dotted(list(ast.walk(parsed(path))))
    return {name if name in paths else name.rpartition(".")[0] for name in names} & set(paths)


def is_compiled(node: ast.FunctionDef) -> bool:
    """Whether a function runs on a GPU: by its decorator, Triton's or Gluon's."""
    return any("jit" in ast.dump(each) for each in node.decorator_list)


def functions(path: Path) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(parsed(path)) if isinstance(node, ast.FunctionDef)]


def test_mypy_asks_all_that_strict_asks_of_modules_without_compiled_functions() -> None:
    listed = re.findall(
        r'"(fastspec\.kernels\.[\w.*]*\w[\w.*]*)"', (ROOT.parent / "pyproject.toml").read_text(encoding="utf-8")
    )
    for path in (ROOT / "kernels").rglob("*.py"):
        if path.name != "__init__.py":
            strict = any(fnmatch(module_of(path), name) for name in listed)
            assert strict != any(map(is_compiled, functions(path))), path


def test_what_runs_on_the_host_is_typed() -> None:
    """Every function of the kernels but those that are compiled, also in the modules that hold both, where mypy does
    not ask for it."""
    for path in sorted((ROOT / "kernels").rglob("*.py")):
        for node in functions(path):
            if not is_compiled(node):
                more = [each for each in (node.args.vararg, node.args.kwarg) if each is not None]
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, *more]
                untyped = [
                    each.arg for each in arguments if each.annotation is None and each.arg not in ("self", "cls")
                ]
                assert not untyped and node.returns is not None, f"{path}:{node.lineno}"


def test_files_that_the_sources_name_are_there() -> None:
    """Beside the file that names them, in the package, or in the repository."""
    missing = [
        f"{path.relative_to(ROOT)} names {name}"
        for path in sorted(ROOT.rglob("*.py"))
        for name in re.findall(r"(?<![\w/.{*])[\w/]*\w\.py\b", path.read_text(encoding="utf-8"))
        if not any((where / name).exists() for where in (path.parent, ROOT, ROOT.parent))
    ]
    assert not missing, "\n".join(missing)


def takes_the_encoding_of_the_machine(call: ast.Call) -> bool:
    """True where a file is read or written as text, and its encoding is not named."""
    if any(each.arg == "encoding" for each in call.keywords):
        return False
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
    if name in ("read_text", "write_text"):  # a package's metadata names its file first
        return len(call.args) == (name == "write_text")
    modes = [each.value for each in call.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    if isinstance(call.func, ast.Name) and name == "open":
        return not any("b" in mode for mode in modes[-1:])
    return name in ("open", "NamedTemporaryFile") and any(re.fullmatch(r"[rwxa][+t]*", mode) for mode in modes)


def test_text_files_are_read_and_written_in_one_encoding_on_every_machine() -> None:
    """A model's files are in UTF-8, also where a machine's own texts are not."""
    sources = {path: path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, text in sources.items()
        if re.search(r"_text\(|open\(|TemporaryFile\(", text)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and takes_the_encoding_of_the_machine(node)
    ]
    assert not found, "\n".join(found)


PAGES = [*(ROOT.parent / "docs").rglob("*.md"), ROOT.parent / "README.md", ROOT.parent / "CONTRIBUTING.md"]
SOURCES = [
    path for folder in ("fastspec", "tests", "benchmarks", "examples") for path in (ROOT.parent / folder).rglob("*.py")
]
OTHERS = {"answers.py", "server.py", "tests/distributed_testing_utils.py", "tests/generation/test_utils.py"}
"""Files that the pages name and that are a reader's own, or transformers'."""


def named(name: str) -> list[Path]:
    """The sources that a page may mean by a file name, which may leave out the folders in front."""
    return [path for path in SOURCES if f"/{path.relative_to(ROOT.parent)}".endswith(f"/{name}")]


def test_files_that_the_pages_name_are_there_and_hold_what_is_said_to_be_in_them() -> None:
    wrong = []
    for page in PAGES:
        text = re.sub(
            r"commit `c0f133b`[^);:]*", "", page.read_text(encoding="utf-8")
        )  # files that are there and not here
        names = re.findall(r"(?<![\w/.{*])[\w/]*\w\.py\b", text)
        wrong += [f"{page.name} names {name}" for name in names if name not in OTHERS and not named(name)]
        for what, name in re.findall(r"`(\w+)` in `([\w/]+\.py)`", text):
            if not any(
                re.search(rf"^(def |class )?{what}\b", path.read_text(encoding="utf-8"), re.MULTILINE)
                for path in named(name)
            ):
                wrong.append(f"{page.name} looks for {what} in {name}")
    assert not wrong, "\n".join(wrong)


def test_no_file_is_an_exception_to_the_formatter() -> None:
    repository = ROOT.parent
    folders = ("fastspec", "tests", "benchmarks", "examples", "packages", ".ci")
    sources = {path: path.read_text(encoding="utf-8") for each in folders for path in (repository / each).rglob("*.py")}
    assert [path for path, text in sources.items() if re.search(r"# (fmt|yapf): *(off|skip|on)\b", text)] == []
    settings = (repository / "pyproject.toml").read_text(encoding="utf-8")
    assert "per-file-ignores" not in settings and "[tool.ruff.format]" not in settings


def test_no_docstring_begins_with_a_clause() -> None:
    """The first words name the thing: a reader of a listing learns what it is."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        f"{path.relative_to(ROOT)}: {text[:60]}"
        for path in sorted(ROOT.rglob("*.py"))
        for node in ast.walk(parsed(path))
        if isinstance(node, kinds)
        and re.match(r"(What|Whether|Who|How|Why|Where)\b", text := ast.get_docstring(node) or "")
    ]
    assert not found, "\n".join(found)


def test_one_class_name_is_one_thing():
    found: dict[str, list[str]] = {}
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}
