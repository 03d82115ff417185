"""`fastspec chat`: a conversation in the terminal."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from typer import Option

from fastspec.models import SMOLLM2
from fastspec.programs.cli.options import Backend, Device, Head, MaxNewTokens, Model, stdout_kept


def chat(
    context: typer.Context,
    prompt: Annotated[list[str] | None, Option(help="Answer this and exit; repeatable, commands too.")] = None,
    model: Model = SMOLLM2,
    head: Head = None,
    resource: Annotated[list[str] | None, Option(help="ASSISTANT=SOURCE: a head, a model, a cascade's YAML.")] = None,
    assistant: Annotated[str | None, Option(help="Who answers; several, comma-separated, are compared.")] = None,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Annotated[float, Option(min=0, help="Temperature of sampling; 0 is greedy.")] = 0.0,
    gamma: Annotated[int | None, Option(min=1, help="Tokens drafted a round by nasd and speculative.")] = None,
    seed: Annotated[int | None, Option(min=0, help="Seed set before every answer.")] = None,
    device: Device = None,
    backend: Backend = "auto",
    load: Annotated[str | None, Option(help="Go on with a chat that /save wrote, by its settings.")] = None,
    debug: Annotated[bool, Option("--debug", help="Draw the draft tree of every round.")] = False,
    as_json: Annotated[bool, Option("--json", help="With --prompt: print one JSON object alone.")] = False,
) -> None:
    """Chat with a model while strategies answer in turn and are compared, drafted tokens in colour. See
    docs/chat.md."""
    from fastspec.programs.chat import make_settings, run_chat
    from fastspec.programs.chat.saved import read_saved

    if as_json and not prompt:
        raise typer.BadParameter("the object is made of the answers to --prompt: give that too", param_hint="--json")
    saved = None
    if load is None:
        settings = make_settings(
            model=model,
            head=head,
            resources=resource,
            assistants=assistant,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            gamma=gamma,
            seed=seed,
            debug=debug,
            device=device,
            backend=backend,
        )
    else:
        names = ("model", "head", "resource", "assistant", "max_new_tokens", "temperature", "gamma", "seed")
        sources = {f"--{name.replace('_', '-')}": context.get_parameter_source(name) for name in names}
        # typer brings a click of its own: sources are told apart by name
        given = [option for option, source in sources.items() if source is not None and source.name != "DEFAULT"]
        if given:
            told = f"the file has what {', '.join(given)} would set: leave it out, or change it in the chat"
            raise typer.BadParameter(told, param_hint="--load")
        saved = read_saved(load)
        # the file may come from another machine
        settings = saved.settings.replace(device=device, backend=backend, debug=debug)
    with stdout_kept(as_json):
        done = run_chat(settings, Console(highlight=False, quiet=as_json), prompt, saved)
    if as_json:
        print(json.dumps(done.as_json()))
