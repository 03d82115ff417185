"""The command line: `fastspec demo`, `fastspec inspect`, `fastspec train`. Torch and transformers load only when a command needs them."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

from fastspec.errors import FastSpecError


class _Commands(typer.core.TyperGroup):
    """Ends a command with a message and exit status 1 where fastspec refuses something; usage errors end with 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except FastSpecError as error:
            Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=_Commands,
    help="Make Hugging Face models generate several tokens per forward pass, without changing what they say.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def main() -> None:
    """Make Hugging Face models generate several tokens per forward pass, without changing what they say."""


@app.command()
def demo(
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt of your own; may be given several times.")] = None,
    model: Annotated[str, typer.Option(help="Hub id, directory or .gguf file of the target.")] = "smollm2-135m-instruct",
    head: Annotated[str | None, typer.Option(help="Hub id, directory or shipped name of the EAGLE-3 head.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 96,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else, on stdout.")] = False,
) -> None:
    """Answer a few prompts with transformers' generate, without and with EAGLE-3, and compare speed and output."""
    from fastspec.demo import print_table, run_demo

    console = Console(highlight=False)
    if not as_json:
        result = run_demo(prompts=prompt, model=model, head=head, max_new_tokens=max_new_tokens, console=console)
        print_table(result, console)
        return
    with contextlib.redirect_stdout(sys.stderr):  # whatever a library prints must not reach the object's reader
        result = run_demo(prompts=prompt, model=model, head=head, max_new_tokens=max_new_tokens)
    print(json.dumps(result.as_json()))


if __name__ == "__main__":
    app()
