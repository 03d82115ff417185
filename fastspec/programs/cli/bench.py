"""`fastspec bench`: assistants beside transformers' own methods, measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer import Option

from fastspec.models import SMOLLM2
from fastspec.programs.cli.options import AsJson, Backend, Device, Dtype, MaxNewTokens, Model, stdout_kept


def bench(
    prompts: Annotated[list[str] | None, Option(help="jsonl file in Spec-Bench's form; repeatable.")] = None,
    prompt: Annotated[list[str] | None, Option(help="A prompt; repeatable. Without any: eight bundled ones.")] = None,
    model: Model = SMOLLM2,
    head: Annotated[list[str] | None, Option(help="Hub id, directory or shipped name of an EAGLE head.")] = None,
    draft_model: Annotated[str | None, Option(help="Smaller model, of any tokenizer, named as the target.")] = None,
    early_exit: Annotated[int | None, Option(min=1, help="Draft with so many of the target's first layers.")] = None,
    methods: Annotated[str | None, Option(help="Methods, comma-separated; by default all that can run.")] = None,
    each: Annotated[int | None, Option(min=1, help="Prompts to take of every category; all by default.")] = None,
    max_new_tokens: MaxNewTokens = 128,
    dtype: Dtype = None,
    device: Device = None,
    backend: Backend = "auto",
    batch: Annotated[
        list[int] | None,
        Option(min=1, help="Prompts answered together, 1 by default; repeatable."),
    ] = None,
    runs: Annotated[int, Option(min=1, help="Timed answers to every prompt; the median makes the row.")] = 1,
    warmup: Annotated[int | None, Option(min=0, help="Untimed answers before; by default 2 on CUDA.")] = None,
    peer: Annotated[
        list[str] | None,
        Option(help="Another engine beside, in its own process: vllm."),
    ] = None,
    peer_python: Annotated[str | None, Option(help="The Python that has the engine; by default this one.")] = None,
    out: Annotated[Path | None, Option(help="jsonl file to append the rows to; benchmarks/plot.py draws them.")] = None,
    as_json: AsJson = False,
    print_output: Annotated[bool, Option("--print-output", help="Print every method's answers.")] = False,
    compare: Annotated[bool, Option("--compare", help="Print answers beside transformers' own.")] = False,
    profile: Annotated[bool, Option("--profile", help="Time the parts of rounds on the first prompt.")] = False,
    allow_different: Annotated[bool, Option("--allow-different", help="Exit status 0 though fp32 differs.")] = False,
) -> None:
    """Measure assistants beside transformers' own methods, outputs compared; without prompts on bundled ones. See
    docs/performance.md."""
    from fastspec.programs.bench import report, run_bench
    from fastspec.programs.bench.peers import Peer

    if profile and as_json:
        raise typer.BadParameter(
            "its tables are printed, and --json prints one object alone: give one of the two", param_hint="--profile"
        )
    console = Console(highlight=False, stderr=as_json)
    profiles: dict[str, Any] = {}
    failures: list[str] = []
    engines = [Peer(name, peer_python or sys.executable) for name in peer or ()]
    names = [name.strip() for name in methods.split(",")] if methods else None
    with stdout_kept(as_json), report.writer(out) as write:
        rows = run_bench(
            prompts=prompts or (),
            texts=prompt or (),
            model=model,
            heads=head or None,
            draft_model=draft_model,
            early_exit=early_exit,
            methods=names,
            each=each,
            max_new_tokens=max_new_tokens,
            dtype=dtype,
            device=device,
            backend=backend,
            batch=batch or 1,
            runs=runs,
            warmup=warmup,
            peers=engines,
            on_failure=failures.append,
            on_row=write,
            on_profile=profiles.__setitem__ if profile else None,
            say=lambda line: console.print(line, style="dim", markup=False),
        )
    if as_json:
        report.print_differences(rows, console)
        shown = rows if print_output or compare else [report.without_texts(row) for row in rows]
        print(json.dumps({"rows": shown, "summary": report.summarise(rows)}))
    else:
        if print_output or compare:
            report.print_texts(rows, console, compare)
        report.print_report(rows, console)
        report.print_profiles(profiles, out.parent if out else Path(), console)
    for failure in failures:
        console.print(failure, style="bold red", markup=False)
    if failures:
        raise typer.Exit(1)
    if rows[0]["dtype"] == "float32" and report.differing(rows) and not allow_different:
        raise typer.Exit(1)
