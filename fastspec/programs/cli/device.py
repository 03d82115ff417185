"""`fastspec warmup` and `fastspec tune`: what is done once for this machine and a model."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console

from fastspec.devices import use_device
from fastspec.errors import Unsupported
from fastspec.files import cache_folder
from fastspec.models import SMOLLM2
from fastspec.programs.cli.options import Backend, Device, Dtype
from fastspec.programs.cli.progress import counting

Eagle3 = Annotated[str | None, typer.Option(help="Directory, hub id or shipped name of an EAGLE-3 head.")]
Eagle = Annotated[str | None, typer.Option(help="The same of an EAGLE-1 or EAGLE-2 head.")]
Rows = Annotated[
    list[int] | None, typer.Option(min=1, help="Prompts that are answered together; may be given several times.")
]


def patched_model(
    model: str,
    eagle3: str | None,
    eagle: str | None,
    draft_model: str | None,
    dtype: str | None,
    device: str | None,
    backend: str,
) -> Any:
    """A model loaded and patched as a command's options say."""
    import torch

    import fastspec
    from fastspec.models import load_draft, load_model

    target, tokenizer = load_model(model, use_device(device), getattr(torch, dtype) if dtype else None)
    draft = load_draft(draft_model, target, tokenizer) if draft_model else None
    return fastspec.patch(target, eagle3=eagle3, eagle=eagle, eagle2=eagle, speculative=draft, backend=backend)


def warmup(
    model: Annotated[str, typer.Argument(help="Hub id, directory or .gguf file of the target.")],
    eagle3: Eagle3 = None,
    eagle: Eagle = None,
    draft_model: Annotated[str | None, typer.Option(help="Smaller model, named as the target.")] = None,
    rows: Rows = None,
    length: Annotated[int, typer.Option(min=1, help="Tokens of the longest prompt.")] = 2048,
    dtype: Dtype = None,
    device: Device = None,
    backend: Backend = "auto",
) -> None:
    """Compile the kernels that a model's calls need, for images and servers: later processes find them on disk. See
    docs/devices.md."""
    import fastspec

    target = patched_model(model, eagle3, eagle, draft_model, dtype, device, backend)
    with counting("calls") as told:
        seconds = fastspec.warmup(target, rows=rows or (1,), length=length, told=told)
    report = fastspec.report(target)
    places = {"triton": "its kernels are in Triton's cache", "cpp": f"its kernels are in {cache_folder()}"}
    kept = places.get(report.backend, f"backend {report.backend!r} has no kernels to compile")
    Console(highlight=False).print(
        f"warmed up in {seconds:.1f} s on {report.device}: {kept}", markup=False, soft_wrap=True
    )


def tune(
    model: Annotated[str, typer.Option(help="Hub id, directory or .gguf file of the target.")] = SMOLLM2,
    eagle3: Eagle3 = None,
    eagle: Eagle = None,
    draft_model: Annotated[str | None, typer.Option(help="Smaller model, named as the target.")] = None,
    rows: Rows = None,
    length: Annotated[int, typer.Option(min=1, help="Tokens of the longest prompt.")] = 1024,
    minutes: Annotated[float, typer.Option(help="When to stop; what reads most is measured first.")] = 5.0,
    dtype: Dtype = None,
    device: Device = None,
    backend: Backend = "auto",
    forget: Annotated[
        bool, typer.Option("--forget", help="Remove all that was tuned on this machine, and stop.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, and nothing else, on stdout.")
    ] = False,
) -> None:
    """Measure the launches of the kernels on this GPU for a model's shapes, and keep the fastest for later runs. See
    docs/devices.md."""
    import fastspec

    console = Console(highlight=False)
    if forget:
        from fastspec.patches.tuning.store import forget as remove

        paths = remove()
        console.print(
            "\n".join(f"removed {path}" for path in paths) or "nothing was tuned", markup=False, soft_wrap=True
        )
        return
    if backend in ("torch", "cpp"):  # before a model is loaded in vain
        raise Unsupported(f"backend {backend!r} has no launches to tune: give --backend triton, or none")
    chosen = "triton" if backend == "auto" and use_device(device) == "cpu" else backend
    if chosen != backend and os.environ.get("TRITON_INTERPRET") != "1":
        raise Unsupported("fastspec tune is for Triton's kernels, on a CUDA device, and the model would be on the CPU")
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        target = patched_model(model, eagle3, eagle, draft_model, dtype, device, chosen)
        with counting("shapes") as told:
            found = fastspec.tune(target, rows=rows or (1,), length=length, minutes=minutes, told=told)
    if as_json:
        print(json.dumps(asdict(found), default=str))
        return
    console.print(str(found), markup=False, soft_wrap=True)
    for each in (each for each in found.places if each.refused):
        console.print(
            f"refused at {each.op} {each.shape}: " + "; ".join(each.refused), markup=False, soft_wrap=True, style="dim"
        )
    console.print(
        f"kept in {found.path}" if found.path else "the tables' own launches stay", markup=False, soft_wrap=True
    )
