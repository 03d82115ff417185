"""`fastspec warmup` and `fastspec tune`: what is done once for this machine and a model."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Annotated

from rich.console import Console
from typer import Option

import fastspec
from fastspec.config import BackendName
from fastspec.devices import use_device
from fastspec.errors import Unsupported
from fastspec.files import cache_folder
from fastspec.models import SMOLLM2
from fastspec.programs.cli import options
from fastspec.programs.heads import fitting_heads
from fastspec.programs.terminal import counting

Rows = Annotated[list[int] | None, Option(min=1, help="Prompts that are answered together; repeatable.")]
Length = Annotated[int, Option(min=1, help="Tokens of the longest prompt.")]


def warmup(
    model: options.AnyModel = None,
    model_option: options.ModelOption = None,
    head: options.Heads = None,
    draft_model: options.Draft = None,
    rows: Rows = None,
    length: Length = 2048,
    dtype: options.Dtype = None,
    device: options.Device = None,
    backend: options.Backend = "auto",
    stored: options.Stored = None,
    head_bits: options.Bits = None,
) -> None:
    """Compile the kernels that a model's calls need, for images and servers: later processes find them on disk. See
    docs/guide/devices.md."""
    name = options.model_name(model, model_option)
    target, _ = options.patched_model(
        name,
        device,
        backend,
        heads=fitting_heads(head, name),
        dtype=dtype,
        draft_model=draft_model,
        stored=stored,
        head_bits=head_bits,
    )
    with counting("calls") as told:
        seconds = fastspec.warmup(target, rows=rows or (1,), length=length, told=told)
    report = fastspec.report(target)
    places = {"triton": "its kernels are in Triton's cache", "cpp": f"its kernels are in {cache_folder()}"}
    kept = places.get(report.backend, f"backend {report.backend!r} has no kernels to compile")
    Console(highlight=False).print(
        f"warmed up in {seconds:.1f} s on {report.device}: {kept}", markup=False, soft_wrap=True
    )


def tune(
    model: options.Model = None,
    model_option: options.ModelOption = None,
    head: options.Heads = None,
    draft_model: options.Draft = None,
    rows: Rows = None,
    length: Length = 1024,
    minutes: Annotated[float, Option(help="When to stop; what reads most is measured first.")] = 5.0,
    dtype: options.Dtype = None,
    device: options.Device = None,
    backend: options.Backend = "auto",
    forget: Annotated[bool, Option("--forget", help="Remove all that was tuned on this machine, and stop.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Measure the launches of the kernels on this GPU for a model's shapes, and keep the fastest for later runs. See
    docs/guide/devices.md."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if forget:
        from fastspec.patches.tuning.store import forget as remove

        console.print("\n".join(f"removed {path}" for path in remove()) or "nothing was tuned")
        return
    if backend in ("torch", "cpp"):  # before a model is loaded in vain
        raise Unsupported(f"backend {backend!r} has no launches to tune: give --backend triton, or none")
    chosen: BackendName = "triton" if backend == "auto" and use_device(device) == "cpu" else backend
    if chosen != backend and os.environ.get("TRITON_INTERPRET") != "1":
        raise Unsupported("fastspec tune is for Triton's kernels, on a CUDA device, and the model would be on the CPU")
    name = options.model_name(model, model_option, SMOLLM2)
    with options.stdout_kept(as_json):
        heads = fitting_heads(head, name)
        target, _ = options.patched_model(name, device, chosen, dtype=dtype, heads=heads, draft_model=draft_model)
        with counting("shapes") as told:
            found = fastspec.tune(target, rows=rows or (1,), length=length, minutes=minutes, told=told)
    if as_json:
        print(json.dumps(asdict(found), default=str))
        return
    console.print(str(found))
    for each in (each for each in found.places if each.refused):
        console.print(f"refused at {each.op} {each.shape}: " + "; ".join(each.refused), style="dim")
    console.print(f"kept in {found.path}" if found.path else "the tables' own launches stay")
