"""`fastspec demo`: one model with and without EAGLE-3, measured."""

from __future__ import annotations

import json
from typing import Annotated

from rich.console import Console
from typer import Option

from fastspec.models import SMOLLM2
from fastspec.programs.cli.options import AsJson, Backend, Device, Head, Model, stdout_kept


def demo(
    prompt: Annotated[list[str] | None, Option(help="A prompt of your own; may be given several times.")] = None,
    model: Model = SMOLLM2,
    head: Head = None,
    max_new_tokens: Annotated[int | None, Option(min=1, help="Longest answer, in tokens; 96, on CUDA 48.")] = None,
    device: Device = None,
    backend: Backend = "auto",
    as_json: AsJson = False,
) -> None:
    """Answer a few prompts with transformers' generate, without and with EAGLE-3, and compare speed and output."""
    from fastspec.programs.demo import print_table, run_demo

    console = Console(highlight=False)
    with stdout_kept(as_json):
        result = run_demo(
            prompts=prompt,
            model=model,
            head=head,
            max_new_tokens=max_new_tokens,
            device=device,
            backend=backend,
            console=None if as_json else console,
        )
    if as_json:
        print(json.dumps(result.as_json()))
    else:
        print_table(result, console)
