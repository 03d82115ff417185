"""`fastspec demo`: one model with and without EAGLE-3, measured."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

from fastspec.programs.cli.options import Backend, Device


def demo(
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt of your own; may be given several times.")] = None,
    model: Annotated[
        str, typer.Option(help="Hub id, directory or .gguf file of the target.")
    ] = "smollm2-135m-instruct",
    head: Annotated[str | None, typer.Option(help="Hub id, directory or shipped name of the EAGLE-3 head.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer, in tokens; 96, on CUDA 48.")
    ] = None,
    device: Device = None,
    backend: Backend = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, and nothing else, on stdout.")
    ] = False,
) -> None:
    """Answer a few prompts with transformers' generate, without and with EAGLE-3, and compare speed and output."""
    from fastspec.programs.demo import print_table, run_demo

    given: dict[str, Any] = {
        "prompts": prompt,
        "model": model,
        "head": head,
        "max_new_tokens": max_new_tokens,
        "device": device,
        "backend": backend,
    }
    console = Console(highlight=False)
    if not as_json:
        result = run_demo(**given, console=console)
        print_table(result, console)
        return
    with contextlib.redirect_stdout(sys.stderr):  # whatever a library prints must not reach the object's reader
        result = run_demo(**given)
    print(json.dumps(result.as_json()))
