"""`fastspec generate` and `fastspec serve`: a file of prompts, and a server, each on an open batch of a model or a
cascade."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer
from rich.console import Console
from typer import Option

from fastspec.cascade.config import Cascade
from fastspec.config import AssistantName, BackendName
from fastspec.distribution import install_command
from fastspec.errors import Unsupported, accepted
from fastspec.models import SHIPPED, SMOLLM2
from fastspec.programs.cli import options
from fastspec.programs.cli.cascade import check_names, stage_of
from fastspec.programs.heads import fitting_heads, named
from fastspec.programs.terminal import counting

if TYPE_CHECKING:
    from fastspec.patches.api import PromptBatch

CascadeFile = Annotated[
    Path | None, Option(help="YAML file of a cascade, MODEL its large model: docs/guide/cascade.md.")
]
Stages = Annotated[
    list[str] | None, Option(help="NAME=MODEL of a cascade's smaller stage, the cheapest first; in place of a file.")
]
StageHeads = Annotated[list[str] | None, Option("--head", help=f"{options.HEADS} NAME=HEAD: the head of a --stage.")]
StageProcesses = Annotated[
    list[str] | None,
    Option(help="NAME=N: over how many processes of torchrun a --stage is cut, 1 or all; 1 without it."),
]
PredictorFile = Annotated[
    Path | None, Option(help="With --stage: what `fastspec cascade train` wrote for these stages.")
]
Price = Annotated[
    float | None, Option(min=0, help="Milliseconds that a bad answer costs; the cascade's own without it.")
]


def split_heads(heads: Sequence[str], stages: Sequence[str]) -> tuple[list[str], list[str]]:
    """(heads of the command's own model, NAME=HEAD of its stages). Raises Unsupported for a name that is no stage's."""
    names = [name for name, _ in map(named, stages)]
    of_stages = [text for text in heads if named(text)[0] in names]
    own = [text for text in heads if text not in of_stages]
    for name in filter(None, (named(text)[0] for text in own)):
        known = f": {accepted(name, names)}" if names else ""
        raise Unsupported(f"--head names {name}, which is no --stage{known}; --head HEAD is the model's own")
    return own, of_stages


def cascade_of(
    model: str,
    path: Path | None,
    stages: list[str] | None,
    given: list[str] | None,
    predictor: Path | None,
    price: float | None,
    backend: BackendName,
    cut: Sequence[str] | None = None,
) -> tuple[list[str], Cascade | None]:
    """(heads of the command's own model, the cascade of its options, None where they name none). Raises Unsupported for
    options that do not go together, and a predictor that cannot be read or is for other stages."""
    own, heads = split_heads(given or (), stages or ())
    if path is not None and (stages or cut or predictor is not None):
        raise Unsupported(
            "--cascade FILE names the stages, their heads and their predictor: leave out --stage, "
            "--stage-tensor-parallel and --predictor"
        )
    if path is None and not stages:
        if predictor is not None or price is not None or cut:
            raise Unsupported(
                "--predictor, --price and --stage-tensor-parallel are of a cascade: give --cascade FILE or --stage "
                "NAME=MODEL"
            )
        return own, None
    from fastspec.cascade.predictor import Predictor

    if path is not None:
        config = Cascade.from_yaml(path)
    elif predictor is None:
        raise Unsupported("--stage needs --predictor FILE, which `fastspec cascade train` writes")
    else:
        label = Predictor.load(predictor).stages[-1]  # the large model's name is the predictor's
        models, _, drafts = check_names(stages or [], f"{label}={model}", heads)
        processes = dict(_processes(text, [name for name, _ in models]) for text in cut or ())
        below = [stage_of(source, None, name, drafts, backend, processes.get(name)) for name, source in models]
        config = Cascade(stages=below, label=label, predictor=str(predictor))
    if config.mode != "adaptive":
        if price is not None:
            raise Unsupported(f"--price is of the mode 'adaptive': mode={config.mode!r} goes on from no answer")
        return own, config
    if isinstance(config.predictor, (str, Path)) and config.label is not None:
        Predictor.load(config.predictor).check((*(stage.label for stage in config.stages), config.label))
    if price is not None and config.thresholds is not None:
        raise Unsupported("--price: this cascade decides by its thresholds, not by a price: leave out one of them")
    return own, config if price is None else replace(config, price=price)


def _processes(text: str, names: Sequence[str]) -> tuple[str, int]:
    """(name, number of processes) of --stage-tensor-parallel NAME=N."""
    name, _, count = text.partition("=")
    if name not in names or not count.isdecimal():
        raise Unsupported(
            f"--stage-tensor-parallel {text!r} must be NAME=N, the name of a --stage ({', '.join(names)}) and a number "
            "of processes"
        )
    return name, int(count)


HEADS = ("eagle3", "eagle2", "eagle")
"""Assistants with a head, the one that is taken where there are several first."""
ASSISTANTS = (*HEADS, "mtp", "nasd", "speculative", "autoregressive")
"""Names of assistants that an open batch decodes with, and a command can take."""
ASSISTANT = (
    f"{', '.join(ASSISTANTS[:-1])} or {ASSISTANTS[-1]}; that of a head or a draft model where there is one, else nasd."
)
AssistantOption = Annotated[str | None, Option("--assistant", help=ASSISTANT)]
MaxLength = Annotated[int | None, Option(min=2, help="Longest prompt and answer together, in tokens.")]


@dataclass(frozen=True, slots=True)
class Chosen:
    """The assistant of a command, and its head or draft model."""

    assistant: AssistantName
    head: str | None
    draft: str | None = None


def chosen_of(name: str, given: Mapping[str, str], assistant: str | None, draft: str | None = None) -> Chosen:
    """The assistant that a command names, else that of a draft model, of a given head or of one that ships for the
    model, else "nasd"."""
    if assistant not in (None, *ASSISTANTS):
        raise Unsupported(f"--assistant {assistant}: {accepted(str(assistant), ASSISTANTS)}")
    if draft is not None and (given or assistant not in (None, "speculative")):
        raise Unsupported(f"--draft-model {draft} is for speculative: leave it out, or --head and another --assistant")
    if draft is None and assistant == "speculative":
        raise Unsupported("--assistant speculative needs --draft-model MODEL, which drafts for it")
    if draft is not None:
        return Chosen("speculative", None, draft)
    heads = dict(SHIPPED.get(name, ())) | dict(given)
    first = [*(each for each in HEADS if each in given), *(each for each in HEADS if each in heads)]
    chosen = cast(AssistantName, assistant or next(iter(first), "nasd"))
    if chosen in HEADS and chosen not in heads:
        others = f"; --head {next(iter(given.values()))} is for {' and '.join(given)}" if given else ""
        raise Unsupported(
            f"no head is known for {name!r}: name one with --head (a directory or a hub id) for {chosen}{others}"
        )
    return Chosen(chosen, heads.get(chosen))


def chosen_beside(
    config: Cascade | None, name: str, heads: Mapping[str, str], assistant: str | None, draft: str | None = None
) -> tuple[Chosen, Cascade | None]:
    """The assistant of a command, and its cascade, whose large model decodes with that: the cascade's own where the
    command names none. Raises Unsupported where the cascade's mode has the large model decode with its stages alone."""
    named = assistant is not None or draft is not None or heads
    if config is not None and config.mode != "adaptive" and named:
        raise Unsupported(
            f"mode={config.mode!r} of a cascade drafts with its stages: leave out --assistant, --head and --draft-model"
        )
    if config is not None and not named:
        assistant = cast(str, config.assistant)  # a file names it
    chosen = chosen_of(name, heads, assistant, draft)
    return chosen, None if config is None else replace(config, assistant=chosen.assistant)


def model_of(
    name: str, chosen: Chosen, device: str | None = None, backend: BackendName = "auto", **loading: Any
) -> tuple[Any, Any]:
    """(model, tokenizer) of a command, patched with its head or draft model, by default on the process' own device."""
    from fastspec.programs.bulk import own_device

    heads: dict[str, str] = {} if chosen.head is None else {chosen.assistant: chosen.head}
    on = own_device() if device is None else device
    return options.patched_model(name, on, backend, heads=heads, draft_model=chosen.draft, **loading)


def refuse_cut(device: str | None, cascade: Cascade | None, processes: int) -> None:
    """Raise Unsupported for options that a model held by so many processes does not take."""
    if processes > 1 and device is not None:
        raise Unsupported(f"--device {device}: each of {processes} processes takes the GPU of its rank: leave it out")
    for stage in () if cascade is None else cascade.stages:
        stage.check_processes(processes)


def generate(
    prompts: Annotated[Path, Option(help="jsonl file with `prompt`, `messages` or `turns` in each row.")],
    out: Annotated[Path, Option(help="jsonl file of the answers; what it answers already is not asked again.")],
    model: options.Model = None,
    model_option: options.ModelOption = None,
    head: StageHeads = None,
    assistant: AssistantOption = None,
    draft_model: options.Draft = None,
    cascade: CascadeFile = None,
    stage: Stages = None,
    stage_tensor_parallel: StageProcesses = None,
    predictor: PredictorFile = None,
    price: Price = None,
    rows: Annotated[int, Option(min=1, help="Prompts that are decoded at a time.")] = 8,
    max_new_tokens: options.MaxNewTokens = 256,
    max_length: MaxLength = None,
    temperature: Annotated[float, Option(min=0, help="Temperature of sampling; 0 is greedy.")] = 0.0,
    top_p: Annotated[float, Option(min=0, max=1, help="Share of the probability that is sampled from.")] = 1.0,
    seed: Annotated[int, Option(min=0, help="Seed of sampling; line n has this plus n.")] = 0,
    raw: Annotated[bool, Option("--raw", help="Go on from the prompts as they stand, without chat format.")] = False,
    tensor_parallel: Annotated[
        bool, Option("--tensor-parallel", help="Cut the model over torchrun's processes, which else share the lines.")
    ] = False,
    device: options.Device = None,
    backend: options.Backend = "auto",
    stored: options.Stored = None,
    head_bits: options.Bits = None,
) -> None:
    """Answer a file of prompts. An interrupted run goes on with the same command; under `accelerate launch` every GPU
    takes its share."""
    source = options.model_name(model, model_option, SMOLLM2)
    from fastspec.programs.bulk import answer_file, follow_file, read_left, settings_of, share_of_process

    console, share = Console(stderr=True, highlight=False), share_of_process()
    rank, processes = share if tensor_parallel else (0, 1)
    share = (0, 1) if tensor_parallel else share
    own, config = cascade_of(source, cascade, stage, head, predictor, price, backend, stage_tensor_parallel)
    settings = settings_of(source, max_new_tokens, temperature, top_p, seed, not raw, config)
    if tensor_parallel and processes == 1:
        raise Unsupported("--tensor-parallel is for several processes: start the command under torchrun")
    refuse_cut(device, config, processes)
    if rank == 0:
        read_left(prompts, out, settings)  # what is wrong with the files is told before a model is loaded
    chosen, config = chosen_beside(config, source, fitting_heads(own, source), assistant, draft_model)
    target, tokenizer = model_of(
        source, chosen, device, backend, cascade=config, stored=stored, head_bits=head_bits, processes=processes
    )
    decodes = chosen.assistant if config is None else config.name
    if rank > 0:
        follow_file(target, decodes, rows, max_length)
        return
    silent = share[0] > 0 or not console.is_terminal
    with counting("answers", Console(stderr=True, quiet=True) if silent else console) as tell:
        done = answer_file(
            target,
            tokenizer,
            prompts,
            out,
            settings,
            assistant=decodes,
            rows=rows,
            max_length=max_length,
            share=share,
            tell=tell,
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
    warmup: bool = False,
    warmup_length: int | None = None,
    prefix_caching: bool = True,
    cascade: Cascade | None = None,
    **loading: Any,
) -> tuple[PromptBatch, Any]:
    """(an open batch, its tokenizer) of `fastspec serve`, in the process of its rounds; `loading` are `model_of`'s."""
    from fastspec.patches.api import continuous

    target, tokenizer = model_of(model, chosen, cascade=cascade, **loading)
    assistant: AssistantName = chosen.assistant if cascade is None else "cascade"
    batch = continuous(
        target,
        assistant,
        rows,
        prefill_chunk=prefill_chunk or "auto",
        max_length=max_length,
        prefix_caching=prefix_caching,
    )
    if warmup and batch.alive:
        with counting("calls") as told:
            seconds = batch.warmup(warmup_length, told)
        Console(stderr=True, highlight=False).print(f"warmed up in {seconds:.1f} s", markup=False)
    return batch, tokenizer


def follow(batch: PromptBatch) -> None:
    """Run a server's rounds in another process than its first, until that closes its batch. Signals are the first
    process's matter, which torchrun or a terminal sends to all."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    batch.close()


def serve(
    model: options.Model = None,
    model_option: options.ModelOption = None,
    head: StageHeads = None,
    assistant: AssistantOption = None,
    draft_model: options.Draft = None,
    cascade: CascadeFile = None,
    stage: Stages = None,
    stage_tensor_parallel: StageProcesses = None,
    predictor: PredictorFile = None,
    price: Price = None,
    name: Annotated[str | None, Option(help="What requests call the model; MODEL by default.")] = None,
    rows: Annotated[int, Option(min=1, help="Requests that are decoded at a time.")] = 8,
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen on.")] = 8000,
    api_key: Annotated[str | None, Option(envvar="FASTSPEC_API_KEY", help="Key that requests must bring.")] = None,
    cors: Annotated[list[str] | None, Option(help='Origin of pages that may ask, "*" for any; repeatable.')] = None,
    page: Annotated[bool, Option(help="Serve a page to chat with the model in a browser, at /.")] = True,
    max_length: MaxLength = None,
    max_new_tokens: Annotated[int, Option(min=1, help="Longest answer that a request may ask for, in tokens.")] = 4096,
    queue: Annotated[int, Option(min=0, help="Requests that may wait for a row; more are answered 429.")] = 64,
    max_body: Annotated[int, Option(min=1, help="Longest body of a request, in bytes.")] = 1 << 20,
    prefill_chunk: Annotated[
        int | None, Option(min=1, help="Prompt tokens read between two rounds; by default 1,024 on CUDA, else 256.")
    ] = None,
    prefix_caching: Annotated[bool, Option(help="Read prompts from where a text that a row holds differs.")] = True,
    device: options.Device = None,
    backend: options.Backend = "auto",
    stored: options.Stored = None,
    head_bits: options.Bits = None,
    warmup: Annotated[bool, Option("--warmup", help="Compile and capture before the port opens.")] = False,
    warmup_length: Annotated[
        int | None, Option(min=1, help="Longest text of --warmup, in tokens; by default up to 8,064, as memory allows.")
    ] = None,
    grace: Annotated[int, Option(min=0, help="Seconds that running requests have to end at a shutdown.")] = 10,
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Option(help="What is logged.")] = "info",
) -> None:
    """Serve a model by OpenAI's routes and Anthropic's: chat, completions, responses, messages, models, tokens, health
    and metrics; under torchrun one that is cut over its processes. See docs/guide/serving.md."""
    source = options.model_name(model, model_option, SMOLLM2)
    from fastspec.programs.bulk import share_of_process

    try:
        from fastspec.programs.serving.app import bound, build_app, run_server
        from fastspec.programs.serving.remote import Remote, left_alone_by_the_collector
        from fastspec.programs.serving.requests import Limits
    except ImportError as error:
        raise Unsupported(f"{error.name} is missing: {install_command('serve')}") from error
    own, config = cascade_of(source, cascade, stage, head, predictor, price, backend, stage_tensor_parallel)
    rank, processes = share_of_process()
    refuse_cut(device, config, processes)
    chosen, config = chosen_beside(config, source, fitting_heads(own, source), assistant, draft_model)
    build = partial(
        opened,
        source,
        chosen,
        rows,
        max_length,
        prefill_chunk,
        warmup,
        warmup_length,
        prefix_caching,
        config,
        device=device,
        backend=backend,
        stored=stored,
        head_bits=head_bits,
        processes=processes,
    )
    if rank > 0:
        follow(build()[0])
        return
    listener = bound(host, port)  # before a model is loaded in vain
    with listener, Remote(build) as batch:
        limits = Limits(max_new_tokens, queue, max_body)
        app = build_app(
            batch,
            batch.tokenizer,
            name or source,
            limits=limits,
            api_key=api_key,
            origins=cors or (),
            head=chosen.head,
            draft_model=chosen.draft,
            page=page,
        )
        with left_alone_by_the_collector():
            run_server(app, listener, log_level=log_level, grace=grace)
