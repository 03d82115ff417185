"""The layers of the package, held by its import statements, and the cost of `import fastspec`."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent / "fastspec"
KNOWS_TRANSFORMERS = ("patches", "training", "demo.py", "models.py")
HEAVY = {"torch", "triton", "transformers", "accelerate", "safetensors", "numpy", "huggingface_hub"}
REFERENCE = ("kernels.reference", "kernels.reference_round")
ALLOWED = {  # layer -> (heavy packages, modules of fastspec) that it may import
    "kernels": ({"torch", "triton"}, ("errors", "kernels")),
    "generation": ({"torch", "safetensors"}, ("config", "errors", "generation", "reading", *REFERENCE)),
    "cascade": ({"torch", "safetensors"}, ("cascade", "config", "errors", "generation", "reading", *REFERENCE)),
    "patches": (HEAVY - {"triton"}, ("cascade", "config", "devices", "errors", "generation", "kernels", "models", "patches")),
}


def imports(path: Path) -> set[str]:
    """Dotted names of all that a file imports, inside functions too; what only a type checker reads does not count."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    guards = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    skipped = {inner for guard in guards for inner in ast.walk(guard)}
    nodes = [node for node in ast.walk(tree) if node not in skipped]
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {f"{node.module}.{alias.name}" for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}


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


def test_transformers_is_imported_where_it_may_be() -> None:
    for path in ROOT.rglob("*.py"):
        if path.relative_to(ROOT).parts[0] not in KNOWS_TRANSFORMERS:
            assert not any(name.split(".")[0] == "transformers" for name in imports(path)), path


def test_importing_fastspec_is_light() -> None:
    code = "import time; t = time.perf_counter(); import fastspec, sys; print(time.perf_counter() - t, *sys.modules)"
    seconds, *modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not HEAVY & set(modules)
    assert float(seconds) < 1.0
