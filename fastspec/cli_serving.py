"""`fastspec generate` and `fastspec serve`: a file of prompts, and a server, each on an open batch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

from fastspec.errors import Unsupported
from fastspec.models import SHIPPED, SMOLLM2, load_model


def patched_model(name: str, head: str | None, assistant: str | None, device: str) -> tuple[Any, Any, str]:
    """(model, tokenizer, assistant) of a command: the model patched with the EAGLE-3 head that it names or that ships for the model, and
    the assistant that it names, else the head's, else "nasd"."""
    import fastspec

    found = head if head is not None else dict(SHIPPED.get(name, ())).get("eagle3")
    chosen = assistant if assistant is not None else "eagle3" if found is not None else "nasd"
    if chosen == "eagle3" and found is None:
        raise Unsupported(f"no head ships with fastspec for {name!r}: name one with --eagle3 (a directory or a hub id)")
    model, tokenizer = load_model(name, device)
    return fastspec.patch(model, eagle3=found), tokenizer, chosen


def generate(
    prompts: Annotated[Path, typer.Option(help="jsonl file with `prompt`, `messages` or `turns` in each row.")],
    out: Annotated[Path, typer.Option(help="jsonl file of the answers; what it answers already is not asked again.")],
    model: Annotated[str, typer.Option(help="Hub id, directory or .gguf file of the target.")] = SMOLLM2,
    eagle3: Annotated[str | None, typer.Option(help="Hub id, directory or shipped name of the EAGLE-3 head.")] = None,
    assistant: Annotated[str | None, typer.Option(help="eagle3, nasd or autoregressive; eagle3 where there is a head, else nasd.")] = None,
    rows: Annotated[int, typer.Option(min=1, help="Prompts that are decoded at a time.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    max_length: Annotated[int | None, typer.Option(min=2, help="Longest prompt and answer together, in tokens.")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="Temperature of sampling; 0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Share of the probability that is sampled from.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of sampling; line n has this plus n.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Go on from the prompts as they stand, without the chat format.")] = False,
) -> None:
    """Answer a file of prompts. An interrupted run goes on with the same command; under `accelerate launch` every GPU takes its share."""
    from fastspec.bulk import answer_file, own_device, share_of_process

    console, share = Console(stderr=True, highlight=False), share_of_process()
    target, tokenizer, chosen = patched_model(model, eagle3, assistant, own_device())
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=share[0] > 0) as bar:
        task = bar.add_task("answers", total=None)
        done = answer_file(
            target, tokenizer, prompts, out, assistant=chosen, rows=rows, max_new_tokens=max_new_tokens, max_length=max_length,
            temperature=temperature, top_p=top_p, seed=seed, chat=not raw, share=share,
            tell=lambda total, failed: bar.update(task, total=total, advance=1),
        )  # fmt: skip
    console.print(f"{done.written} answers written to {out}, {done.before} were there, {done.failed} prompts failed", markup=False)
    if done.failed:
        raise typer.Exit(1)
