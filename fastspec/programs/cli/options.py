"""Options that several commands share, and what they do."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from typer import Option

from fastspec.cascade.config import Cascade

Model = Annotated[str, Option(help="Hub id, directory or .gguf file of the target.")]
Head = Annotated[str | None, Option(help="Hub id, directory or shipped name of the EAGLE-3 head.")]
MaxNewTokens = Annotated[int, Option(min=1, help="Longest answer, in tokens.")]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    Option(help="float32 on the CPU and bfloat16 on CUDA by default."),
]
Device = Annotated[str | None, Option(help="cpu, cuda or cuda:N; by default CUDA where there is a device.")]
Backend = Annotated[
    Literal["auto", "torch", "cpp", "triton"],
    Option(
        help="Kernels: auto (the device's), torch, cpp (the CPU, with a compiler), or triton (CUDA). See "
        "docs/guide/devices.md."
    ),
]
AsJson = Annotated[bool, Option("--json", help="Print one JSON object, and nothing else, on stdout.")]


@contextlib.contextmanager
def stdout_kept(as_json: bool) -> Iterator[None]:
    """Context manager that sends what libraries print to stderr, so that `--json` prints its object alone."""
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield


def patched_model(
    name: str,
    device: str | None,
    backend: str,
    *,
    dtype: str | None = None,
    eagle3: str | None = None,
    eagle: str | None = None,
    draft_model: str | None = None,
    cascade: Cascade | None = None,
) -> tuple[Any, Any]:
    """(model, tokenizer): a model loaded and patched as a command's options say."""
    import torch

    import fastspec
    from fastspec.devices import use_device
    from fastspec.models import load_draft, load_model
    from fastspec.programs.cascades import with_tokenizer

    target, tokenizer = load_model(name, use_device(device), getattr(torch, dtype) if dtype else None)
    draft = load_draft(draft_model, target, tokenizer) if draft_model else None
    stages = None if cascade is None else with_tokenizer(cascade, tokenizer, "the cascade")
    fastspec.patch(target, eagle3=eagle3, eagle=eagle, eagle2=eagle, speculative=draft, cascade=stages, backend=backend)
    return target, tokenizer
