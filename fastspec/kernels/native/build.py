"""The C++ kernels of the CPU as a library: compiled once for a machine by the compiler that it has, a second's work,
and kept.

The processor's instructions are those that torch uses (`torch.backends.cpu.get_cpu_capability`), so that
ATEN_CPU_CAPABILITY=avx2 holds both to AVX2. OpenMP is the library that torch has loaded, whose threads are the ones
that torch's own operations run on.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

HERE = Path(__file__).parent
HEADERS = "attention.h", "choices.h", "layer.h", "products.h", "products_bf16.h", "stack.h", "threads.h", "vectors.h"
COMPILERS = "c++", "g++", "clang++"
COMMON = "-O3", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno", "-ffp-contract=fast"
FLAGS = {
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"),
    "AVX2": ("-mavx2", "-mfma"),
}
"""By torch's name for what the processor has. Others were not tried."""
P, N, F = ctypes.c_void_p, ctypes.c_long, ctypes.c_float
SIGNATURES: dict[str, list[type]] = {
    "linear": [P, P, N, P, N, N, N],
    "rms_norm": [P, N, P, N, P, P, N, P, N, N, N, F, F, N, N],
    "swiglu": [P, P, N, N, N],
    "rope_cache": [P] * 10 + [N] * 10 + [F, F, N],
    "stack": [P, N, P, P, P, N, P, P, *[N] * 10],
    "tree_attention": [P] * 5 + [N] * 10 + [F, N],
    "argmax": [P, P, N, N, N],
    "topk_logprobs": [P, P, P, N, N, N, N],
}
BF16 = "_bf16"
"""End of the names of the kernels of bfloat16."""
SIGNATURES |= {name + BF16: types for name, types in SIGNATURES.items()}
SIGNATURES["linear" + BF16] = [*SIGNATURES["linear"], N]
MIXED = BF16 + "_fp32"
"""The same where cosines and sines are in fp32, as a head's are."""
SIGNATURES |= {name + MIXED: SIGNATURES[name] for name in ("rope_cache", "stack")}


@dataclass(frozen=True, slots=True)
class Sources:
    """The file of a library, and those that it includes."""

    file: Path
    included: tuple[Path, ...] = ()


KERNELS = Sources(HERE / "kernels.cpp", tuple(HERE / name for name in HEADERS))
NGRAMS = Sources(HERE / "ngrams.cpp")
DIGEST = hashlib.sha256().digest_size
SECONDS = 120
"""After which a compiler is given up."""


def compiler() -> list[str] | None:
    """The C++ compiler, with its options, that CXX in the environment names, else the first that is found."""
    named = shlex.split(os.environ.get("CXX", ""))
    ways = [named] if named else [[name] for name in COMPILERS]
    return next(([found, *options] for name, *options in ways if (found := shutil.which(name))), None)


def unfit() -> str | None:
    """Reason for which no compiler could build the kernels for this machine, or None."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"they were tried on Linux and x86-64 alone, and this is {platform.system()} on {platform.machine()}"
    if torch.backends.cpu.get_cpu_capability() not in FLAGS:
        return f"they need AVX2, and torch uses {torch.backends.cpu.get_cpu_capability()} on this processor"
    return None


def missing() -> str | None:
    """Reason for which the kernels cannot be built here, or None."""
    if (why := unfit()) is None and compiler() is None:
        names = ", ".join(COMPILERS)
        why = f"there is no C++ compiler ({names}, or what CXX in the environment names): install one, such as g++"
    return why


def command(source: Path, out: Path) -> list[str]:
    """Command that compiles the library."""
    found = compiler()
    assert found is not None
    return [*found, *COMMON, *FLAGS[torch.backends.cpu.get_cpu_capability()], str(source), "-o", str(out)]


def library_name(sources: Sources = KERNELS) -> str:
    """The name of a library's file: other sources, instructions or compilers make another."""
    texts = (each.read_text(encoding="utf-8") for each in (sources.file, *sources.included))
    told = [*texts, *command(sources.file, Path("out"))[:-1]]
    return f"{sources.file.stem}-{hashlib.sha256(chr(0).join(told).encode()).hexdigest()[:16]}.so"


def whole(path: Path) -> bool:
    """True where a library is there as it was written: one that was cut off would end the process at its first call.
    Behind the library, where a loader does not look, lies its digest."""
    try:
        content = path.read_bytes()
    except OSError:  # of a folder that nobody may look into, too: `build` says so
        return False
    return hashlib.sha256(content[:-DIGEST]).digest() == content[-DIGEST:]


def build(folder: Path, sources: Sources = KERNELS) -> str | None:
    """Compile a library into a folder where it is not there yet, or not whole -> None, or what went wrong."""
    path = folder / library_name(sources)
    if whole(path):
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as made:
            out = Path(made) / path.name
            done = subprocess.run(
                command(sources.file, out), capture_output=True, text=True, timeout=SECONDS, check=False
            )
            if done.returncode:
                return (
                    f"{shlex.join(compiler() or [])} ended with {done.returncode}: "
                    f"{done.stderr.strip()[-400:] or 'it said nothing'}"
                )
            content = out.read_bytes()
            out.write_bytes(content + hashlib.sha256(content).digest())
            os.replace(out, path)
    except OSError as error:
        return f"{error} (FASTSPEC_CACHE in the environment names another folder to keep them in)"
    except subprocess.TimeoutExpired as error:
        return str(error)
    return None


@cache
def library(path: Path) -> ctypes.CDLL:
    """The library of KERNELS, with the types of its functions. Raises OSError where it cannot be loaded."""
    found = ctypes.CDLL(str(path))
    for name, types in SIGNATURES.items():
        function = getattr(found, f"fastspec_{name}")
        function.argtypes, function.restype = types, None
    found.fastspec_team.argtypes, found.fastspec_team.restype = [N], N
    found.fastspec_note.argtypes, found.fastspec_note.restype = [N, N, N], None
    return found


@cache
def counter(path: Path) -> Callable[..., None]:
    """The function of the library of NGRAMS, which other threads of Python wait for: storages are theirs too. Raises
    OSError where it cannot be loaded."""
    found: Callable[..., None] = ctypes.PyDLL(str(path)).fastspec_count_ngrams
    found.argtypes, found.restype = [P, P, N, P, N, N, N, P, P, N, P, P, P, P, N, P], None  # type: ignore[attr-defined]
    return found


@cache
def grower(path: Path) -> Callable[..., int]:
    """The function of the same library that grows a tree."""
    found: Callable[..., int] = ctypes.PyDLL(str(path)).fastspec_grow_ngrams
    context, tree = [P, N, N, N, ctypes.c_int32], [N, N, P, N, N, ctypes.c_double, P, P, P, P]
    found.argtypes, found.restype = [*context, P, P, N, P, P, P, P, N, *tree], N  # type: ignore[attr-defined]
    return found
