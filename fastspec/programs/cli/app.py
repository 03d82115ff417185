"""The command line of fastspec: a file beside this one holds each command or group, and loads its program on use."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer import Option

import fastspec
from fastspec.distribution import DISTRIBUTION, warn_of_stranger
from fastspec.errors import FastSpecError
from fastspec.programs.cli.answers import bench, chat, demo
from fastspec.programs.cli.cascade import app as cascade
from fastspec.programs.cli.device import tune, warmup
from fastspec.programs.cli.heads import inspect, train
from fastspec.programs.cli.options import NamingCommand
from fastspec.programs.cli.serving import generate, serve


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
    help="Make Hugging Face models generate several tokens per forward pass, without changing their output.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(cascade, name="cascade")
for command in (demo, chat, generate, serve, bench, inspect, train, warmup, tune):
    app.command(cls=NamingCommand, help=" ".join((command.__doc__ or "").split()))(command)


def _version(asked: bool) -> None:
    if asked:
        others = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers"))
        print(f"{DISTRIBUTION} {fastspec.__version__} ({Path(fastspec.__file__).parent}), {others}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[bool, Option("--version", is_eager=True, callback=_version, help="Print the versions.")] = False,
) -> None:
    """Make Hugging Face models generate several tokens per forward pass, without changing their output."""
    warn_of_stranger()
