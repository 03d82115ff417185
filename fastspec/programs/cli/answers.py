"""`fastspec demo`, `chat` and `bench`: commands that answer prompts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer import Option

from fastspec.errors import Unsupported
from fastspec.models import SMOLLM2
from fastspec.programs.cli import options

WITH_LOAD = "load", "prompt", "own", "debug", "device", "backend", "as_json"
"""Parameters of `chat` that may be given with a chat that was saved; it has the others."""


def demo(
    model: options.Model = None,
    model_option: options.ModelOption = None,
    prompt: Annotated[list[str] | None, Option(help="A prompt of your own; may be given several times.")] = None,
    head: options.Head = None,
    max_new_tokens: Annotated[int | None, Option(min=1, help="Longest answer, in tokens; 96, on CUDA 48.")] = None,
    device: options.Device = None,
    backend: options.Backend = "auto",
    as_json: options.AsJson = False,
) -> None:
    """Answer a few prompts with transformers' generate, without and with EAGLE-3, and compare speed and output."""
    name = options.model_name(model, model_option, SMOLLM2)
    console = Console(highlight=False, quiet=as_json)
    with options.stdout_kept(as_json):
        with console.status("Importing torch and transformers"):
            from fastspec.programs.demo import print_table, run_demo
        result = run_demo(
            prompts=prompt,
            model=name,
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


def chat(
    context: typer.Context,
    model: options.Model = None,
    model_option: options.ModelOption = None,
    prompt: Annotated[list[str] | None, Option(help="Answer this and exit; repeatable, commands too.")] = None,
    head: options.Heads = None,
    draft_model: options.Draft = None,
    resource: Annotated[list[str] | None, Option(help="ASSISTANT=SOURCE: a head, a model, a cascade's YAML.")] = None,
    assistant: Annotated[str | None, Option(help="Who answers; several, comma-separated, are compared.")] = None,
    max_new_tokens: options.MaxNewTokens = 128,
    temperature: Annotated[float, Option(min=0, help="Temperature of sampling; 0 is greedy.")] = 0.0,
    gamma: Annotated[int | None, Option(min=1, help="Tokens drafted a round by nasd and speculative.")] = None,
    seed: Annotated[int | None, Option(min=0, help="Seed set before every answer.")] = None,
    device: options.Device = None,
    backend: options.Backend = "auto",
    load: Annotated[str | None, Option(help="Go on with a chat that /save wrote, by its settings.")] = None,
    own: Annotated[str | None, Option(help="Python file of your ASSISTANTS, PROCESSORS, STORAGES; it is run.")] = None,
    debug: Annotated[bool, Option("--debug", help="Draw the draft tree of every round.")] = False,
    as_json: Annotated[bool, Option("--json", help="With --prompt: print one JSON object alone.")] = False,
) -> None:
    """Chat with a model while strategies answer in turn and are compared, drafted tokens in colour. See
    docs/guide/chat.md."""
    name = options.model_name(model, model_option, SMOLLM2) if load is None else ""
    from fastspec.programs.chat.loop import run_chat
    from fastspec.programs.chat.session import read_saved
    from fastspec.programs.chat.settings import COMMAND_FIELDS, Settings, heads_of

    if as_json and not prompt:
        raise typer.BadParameter("the object is made of the answers to --prompt: give that too", param_hint="--json")
    saved = None
    if load is None:
        resources = heads_of(name, head) | ({"speculative": draft_model} if draft_model else {})
        for entry in resource or ():
            of, _, source = entry.partition("=")
            if not source:
                raise Unsupported(f"--resource takes ASSISTANT=SOURCE, such as eagle2=path/to/head, not {entry!r}")
            resources[of] = source
        drafts = next((each for each in ("eagle3", "eagle2") if each in resources), "nasd")  # without a head
        names = tuple(dict.fromkeys((assistant or drafts).split(",")))
        settings = Settings(
            name,
            tuple(resources.items()),
            names,
            device,
            backend,
            max_new_tokens=max_new_tokens,
            seed=seed,
            debug=debug,
        )
        changes = {} if gamma is None else dict.fromkeys(COMMAND_FIELDS["gamma"], gamma)
        settings = settings.with_fields(changes).replace(**settings.at_temperature(temperature))
    else:
        others = [each.name for each in context.command.params if each.name and each.name not in WITH_LOAD]
        # typer brings a click of its own: sources are told apart by name
        sources = ((each, context.get_parameter_source(each)) for each in others)
        given = [each for each, source in sources if source is not None and source.name != "DEFAULT"]
        if given:
            told = ", ".join(f"--{each.removesuffix('_option').replace('_', '-')}" for each in given)
            raise typer.BadParameter(
                f"the file has what {told} would set: leave it out, or change it in the chat", param_hint="--load"
            )
        saved = read_saved(load)
        # the file may come from another machine
        settings = saved.settings.replace(device=device, backend=backend, debug=debug)
    with options.stdout_kept(as_json):
        done = run_chat(settings, Console(highlight=False, quiet=as_json), prompt, saved, own)
    if as_json:
        print(json.dumps(done.as_json()))


def bench(
    model: options.Model = None,
    model_option: options.ModelOption = None,
    prompts: Annotated[list[str] | None, Option(help="jsonl file in Spec-Bench's form; repeatable.")] = None,
    prompt: Annotated[list[str] | None, Option(help="A prompt; repeatable. Without any: eight bundled ones.")] = None,
    head: Annotated[list[str] | None, Option(help=f"{options.HEADS} NAME=HEAD: any number beside each other.")] = None,
    draft_model: Annotated[str | None, Option(help="Smaller model, of any tokenizer, named as the target.")] = None,
    early_exit: Annotated[int | None, Option(min=1, help="Draft with so many of the target's first layers.")] = None,
    methods: Annotated[str | None, Option(help="Methods, comma-separated; by default all that can run.")] = None,
    each: Annotated[int | None, Option(min=1, help="Prompts to take of every category; all by default.")] = None,
    max_new_tokens: options.MaxNewTokens = 128,
    dtype: options.Dtype = None,
    device: options.Device = None,
    backend: options.Backend = "auto",
    batch: Annotated[list[int] | None, Option(min=1, help="Prompts answered together, else 1; repeatable.")] = None,
    runs: Annotated[int, Option(min=1, help="Timed answers to every prompt; the median makes the row.")] = 1,
    warmup: Annotated[int | None, Option(min=0, help="Untimed answers before; by default 2 on CUDA.")] = None,
    peer: Annotated[list[str] | None, Option(help="Another engine beside, in its own process: vllm.")] = None,
    peer_python: Annotated[str | None, Option(help="The Python that has the engine; by default this one.")] = None,
    out: Annotated[Path | None, Option(help="jsonl file to append the rows to; benchmarks/plot.py draws them.")] = None,
    as_json: options.AsJson = False,
    print_output: Annotated[bool, Option("--print-output", help="Print every method's answers.")] = False,
    compare: Annotated[bool, Option("--compare", help="Print answers beside transformers' own.")] = False,
    profile: Annotated[bool, Option("--profile", help="Time the parts of rounds on the first prompt.")] = False,
    allow_different: Annotated[bool, Option("--allow-different", help="Exit status 0 though fp32 differs.")] = False,
) -> None:
    """Measure assistants beside transformers' own methods, outputs compared; without prompts on bundled ones. See
    docs/performance/measure.md."""
    name = options.model_name(model, model_option, SMOLLM2)
    from fastspec.programs.bench import report, run_bench
    from fastspec.programs.bench.peers import Peer

    if profile and as_json:
        raise typer.BadParameter(
            "its tables are printed, and --json prints one object alone: give one of the two", param_hint="--profile"
        )
    console = Console(highlight=False, emoji=False, stderr=as_json)  # eagle3:a: is no face
    profiles: dict[str, Any] = {}
    failures: list[str] = []
    engines = [Peer(name, peer_python or sys.executable) for name in peer or ()]
    names = [name.strip() for name in methods.split(",")] if methods else None
    with options.stdout_kept(as_json), report.writer(out) as write:
        rows = run_bench(
            prompts=prompts or (),
            texts=prompt or (),
            model=name,
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
