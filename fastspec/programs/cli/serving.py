"""`fastspec generate` and `fastspec serve`: a file of prompts, and a server, each on an open batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

from fastspec.cascade.config import Cascade
from fastspec.distribution import install_command
from fastspec.errors import Unsupported
from fastspec.models import SHIPPED, SMOLLM2
from fastspec.programs.cli.cascade_options import CascadeFile, PredictorFile, Price, StageHeads, Stages, cascade_of
from fastspec.programs.cli.options import Backend, Device, Head, MaxNewTokens, Model, patched_model
from fastspec.programs.terminal import counting

if TYPE_CHECKING:
    from fastspec.patches.continuous import PromptBatch

HEADS = {"eagle3": "eagle3", "eagle2": "eagle", "eagle": "eagle"}
"""Assistants with a head -> the option that names it."""
ASSISTANTS = (*HEADS, "mtp", "nasd", "autoregressive")
"""Names of assistants that an open batch decodes with, and a command can take."""
ASSISTANT = f"{', '.join(ASSISTANTS[:-1])} or {ASSISTANTS[-1]}; that of a head where there is one, else nasd."
Assistant = Annotated[str | None, typer.Option(help=ASSISTANT)]
OlderHead = Annotated[str | None, typer.Option(help="The same of a head of EAGLE-1 or 2, for eagle and eagle2.")]


@dataclass(frozen=True, slots=True)
class Chosen:
    """The assistant of a command, and its head."""

    assistant: str
    head: str | None


def chosen_of(name: str, eagle3: str | None, eagle: str | None, assistant: str | None) -> Chosen:
    """The assistant that a command names for a model, else that of a head that it names or that ships for the model,
    else "nasd"."""
    if assistant not in (None, *ASSISTANTS):
        raise Unsupported(f"--assistant {assistant}: accepted are {', '.join(ASSISTANTS)}")
    named, shipped = {"eagle3": eagle3, "eagle": eagle}, dict(SHIPPED.get(name, ()))
    heads = {each: named[option] or shipped.get(each) for each, option in HEADS.items()}
    first = [each for each, option in HEADS.items() if named[option]] + [each for each in HEADS if heads[each]]
    chosen = assistant or next(iter(first), "nasd")
    if chosen in HEADS and heads[chosen] is None:
        raise Unsupported(
            f"no head is known for {name!r}: name one with --{HEADS[chosen]} (a directory or a hub id) for {chosen}"
        )
    return Chosen(chosen, heads.get(chosen))


def chosen_beside(
    config: Cascade | None, name: str, eagle3: str | None, eagle: str | None, assistant: str | None
) -> tuple[Chosen, Cascade | None]:
    """The assistant of a command, and its cascade, whose large model decodes with that: the cascade's own where the
    command names none."""
    if config is not None and assistant is None and not (eagle3 or eagle):
        assistant = config.assistant
    chosen = chosen_of(name, eagle3, eagle, assistant)
    return chosen, None if config is None else replace(config, assistant=chosen.assistant)


def model_of(
    name: str, chosen: Chosen, device: str | None, backend: str, cascade: Cascade | None = None
) -> tuple[Any, Any]:
    """(model, tokenizer) of a command, patched with its head and its cascade. Without a device it is that of the
    process."""
    from fastspec.programs.bulk import own_device

    head = {HEADS[chosen.assistant]: chosen.head} if chosen.head is not None else {}
    return patched_model(name, own_device() if device is None else device, backend, cascade=cascade, **head)


def generate(
    prompts: Annotated[Path, typer.Option(help="jsonl file with `prompt`, `messages` or `turns` in each row.")],
    out: Annotated[Path, typer.Option(help="jsonl file of the answers; what it answers already is not asked again.")],
    model: Model = SMOLLM2,
    eagle3: Head = None,
    eagle: OlderHead = None,
    assistant: Assistant = None,
    cascade: CascadeFile = None,
    stage: Stages = None,
    head: StageHeads = None,
    predictor: PredictorFile = None,
    price: Price = None,
    rows: Annotated[int, typer.Option(min=1, help="Prompts that are decoded at a time.")] = 8,
    max_new_tokens: MaxNewTokens = 256,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Longest prompt and answer together, in tokens.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, help="Temperature of sampling; 0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Share of the probability that is sampled from.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of sampling; line n has this plus n.")] = 0,
    raw: Annotated[
        bool, typer.Option("--raw", help="Go on from the prompts as they stand, without the chat format.")
    ] = False,
    device: Device = None,
    backend: Backend = "auto",
) -> None:
    """Answer a file of prompts. An interrupted run goes on with the same command; under `accelerate launch` every GPU
    takes its share."""
    from fastspec.programs.bulk import answer_file, read_left, settings_of, share_of_process

    console, share = Console(stderr=True, highlight=False), share_of_process()
    config = cascade_of(model, cascade, stage, head, predictor, price, backend)
    settings = settings_of(model, max_new_tokens, temperature, top_p, seed, not raw, config)
    read_left(prompts, out, settings)  # what is wrong with the files is told before a model is loaded
    chosen, config = chosen_beside(config, model, eagle3, eagle, assistant)
    target, tokenizer = model_of(model, chosen, device, backend, config)
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=share[0] > 0) as bar:
        task = bar.add_task("answers", total=None)
        done = answer_file(
            target,
            tokenizer,
            prompts,
            out,
            assistant=chosen.assistant if config is None else config.name,
            rows=rows,
            max_new_tokens=max_new_tokens,
            max_length=max_length,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            chat=not raw,
            share=share,
            name=model,
            cascade=config,
            tell=lambda total, failed: bar.update(task, total=total, advance=1),
        )
    console.print(
        f"{done.written} answers written to {out}, {done.before} were there, {done.failed} prompts failed", markup=False
    )
    if done.failed:
        raise typer.Exit(1)


def opened(
    model: str,
    chosen: Chosen,
    rows: int = 8,
    max_length: int | None = None,
    prefill_chunk: int | None = None,
    device: str | None = None,
    backend: str = "auto",
    warmup: int | None = None,
    prefix_caching: bool = True,
    cascade: Cascade | None = None,
) -> tuple[PromptBatch, Any]:
    """(an open batch, its tokenizer) of `fastspec serve`, in the process that its rounds run in; warmed up for texts of
    so many tokens."""
    from fastspec.patches.continuous import continuous

    target, tokenizer = model_of(model, chosen, device, backend, cascade)
    chunk: int | Literal["auto"] = prefill_chunk or "auto"
    assistant = chosen.assistant if cascade is None else cascade.name
    batch = continuous(
        target, assistant, rows, max_length=max_length, prefill_chunk=chunk, prefix_caching=prefix_caching
    )
    if warmup is not None:
        with counting("calls") as told:
            seconds = batch.warmup(warmup, told)
        Console(stderr=True, highlight=False).print(f"warmed up in {seconds:.1f} s", markup=False)
    return batch, tokenizer


def serve(
    model: Annotated[str, typer.Argument(help="Hub id, directory or .gguf file of the target.")] = SMOLLM2,
    eagle3: Head = None,
    eagle: OlderHead = None,
    assistant: Assistant = None,
    cascade: CascadeFile = None,
    stage: Stages = None,
    head: StageHeads = None,
    predictor: PredictorFile = None,
    price: Price = None,
    name: Annotated[str | None, typer.Option(help="What requests call the model; MODEL by default.")] = None,
    rows: Annotated[int, typer.Option(min=1, help="Requests that are decoded at a time.")] = 8,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="FASTSPEC_API_KEY", help="Key that requests must bring.")
    ] = None,
    cors: Annotated[
        list[str] | None, typer.Option(help='Origin of pages that browsers let ask, "*" for any; may be repeated.')
    ] = None,
    page: Annotated[bool, typer.Option(help="Serve a page to chat with the model in a browser, at /.")] = True,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Longest prompt and answer together, in tokens.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Longest answer that a request may ask for, in tokens.")
    ] = 4096,
    queue: Annotated[int, typer.Option(min=0, help="Requests that may wait for a row; more are answered 429.")] = 64,
    max_body: Annotated[int, typer.Option(min=1, help="Longest body of a request, in bytes.")] = 1 << 20,
    prefill_chunk: Annotated[
        int | None,
        typer.Option(min=1, help="Prompt tokens read between two rounds; 1,024 on CUDA and 256 elsewhere without it."),
    ] = None,
    prefix_caching: Annotated[
        bool, typer.Option(help="Read prompts from where a text that a row holds is like them.")
    ] = True,
    device: Device = None,
    backend: Backend = "auto",
    warmup: Annotated[bool, typer.Option("--warmup", help="Compile and capture before the port opens.")] = False,
    warmup_length: Annotated[int, typer.Option(min=1, help="Longest text that --warmup is for, in tokens.")] = 1920,
    grace: Annotated[int, typer.Option(min=0, help="Seconds that running requests have to end at a shutdown.")] = 10,
    log_level: Annotated[Literal["debug", "info", "warning", "error"], typer.Option(help="What is logged.")] = "info",
) -> None:
    """Serve a model by OpenAI's routes and Anthropic's: chat, completions, responses, messages, models, tokens, health
    and metrics. See docs/guide/serving.md."""
    try:
        from fastspec.programs.serving.app import bound, build_app, run_server
        from fastspec.programs.serving.remote import Remote
        from fastspec.programs.serving.requests import Limits
        from fastspec.programs.serving.rounds_process import left_alone_by_the_collector
    except ImportError as error:
        raise Unsupported(f"{error.name} is missing: {install_command('serve')}") from error
    config = cascade_of(model, cascade, stage, head, predictor, price, backend)
    chosen, config = chosen_beside(config, model, eagle3, eagle, assistant)
    listener = bound(host, port)  # before a model is loaded in vain
    build = partial(
        opened,
        model,
        chosen,
        rows,
        max_length,
        prefill_chunk,
        device,
        backend,
        warmup_length if warmup else None,
        prefix_caching,
        config,
    )
    with listener, Remote(build) as batch:
        limits = Limits(max_tokens, queue, max_body)
        app = build_app(
            batch,
            batch.tokenizer,
            name or model,
            limits=limits,
            api_key=api_key,
            origins=cors or (),
            head=chosen.head,
            page=page,
        )
        with left_alone_by_the_collector():
            run_server(app, listener, log_level=log_level, grace=grace)
