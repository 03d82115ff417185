"""The command line of fastspec, one function a command. What is heavy loads when a command needs it."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import fastspec
from fastspec.distribution import DISTRIBUTION, warn_of_stranger
from fastspec.errors import FastSpecError
from fastspec.programs.cli.cascade import app as cascade
from fastspec.programs.cli.device import tune, warmup
from fastspec.programs.cli.options import Backend, Device, Dtype
from fastspec.programs.cli.progress import training_bars
from fastspec.programs.cli.serving import generate, serve
from fastspec.removed import BLOCK_HEADS, BLOCK_SETTINGS

BLOCK_OPTIONS = [f"--{name.replace('_', '-')}" for name in BLOCK_SETTINGS]
POOR = 0.2
"""Share of right first drafts below which a head hardly pays under any reading."""


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
app.add_typer(cascade, name="cascade")
app.command()(generate)
app.command()(serve)
app.command()(warmup)
app.command()(tune)


def _version(asked: bool) -> None:
    if asked:
        others = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers"))
        print(f"{DISTRIBUTION} {fastspec.__version__} ({Path(fastspec.__file__).parent}), {others}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the versions and exit.")] = False,
) -> None:
    """Make Hugging Face models generate several tokens per forward pass, without changing what they say."""
    warn_of_stranger()


@app.command()
def demo(
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt of your own; may be given several times.")] = None,
    model: Annotated[str, typer.Option(help="Hub id, directory or .gguf file of the target.")] = "smollm2-135m-instruct",
    head: Annotated[str | None, typer.Option(help="Hub id, directory or shipped name of the EAGLE-3 head.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer, in tokens; 96, on CUDA 48.")] = None,
    device: Device = None,
    backend: Backend = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else, on stdout.")] = False,
) -> None:
    """Answer a few prompts with transformers' generate, without and with EAGLE-3, and compare speed and output."""
    from fastspec.programs.demo import print_table, run_demo

    given: dict[str, Any] = {
        "prompts": prompt, "model": model, "head": head, "max_new_tokens": max_new_tokens, "device": device, "backend": backend,
    }  # fmt: skip
    console = Console(highlight=False)
    if not as_json:
        result = run_demo(**given, console=console)
        print_table(result, console)
        return
    with contextlib.redirect_stdout(sys.stderr):  # whatever a library prints must not reach the object's reader
        result = run_demo(**given)
    print(json.dumps(result.as_json()))


@app.command()
def chat(
    context: typer.Context,
    prompt: Annotated[list[str] | None, typer.Option(help="Answer this and exit; several make one conversation, commands too.")] = None,
    model: Annotated[str, typer.Option(help="Hub id, directory or .gguf file of the target.")] = "smollm2-135m-instruct",
    head: Annotated[str | None, typer.Option(help="Hub id, directory or shipped name of the EAGLE-3 head.")] = None,
    resource: Annotated[list[str] | None, typer.Option(help="ASSISTANT=SOURCE: a head, a draft model, or a cascade's YAML file.")] = None,
    assistant: Annotated[str | None, typer.Option(help="Who answers; several, comma-separated, are compared.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="Temperature of sampling; 0 is greedy.")] = 0.0,
    gamma: Annotated[int | None, typer.Option(min=1, help="Tokens drafted a round by nasd and speculative.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed set before every answer.")] = None,
    device: Device = None,
    backend: Backend = "auto",
    load: Annotated[str | None, typer.Option(help="Go on with a chat that /save wrote, with its model and settings.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Draw the draft tree of every round.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --prompt: print one JSON object, and nothing else, on stdout.")] = False,
) -> None:
    """Chat with a model while strategies answer in turn and are compared, drafted tokens in colour. See docs/chat.md."""
    from fastspec.programs.chat import make_settings, run_chat
    from fastspec.programs.chat.saved import read_saved

    if as_json and not prompt:
        raise typer.BadParameter("the object is made of the answers to --prompt: give that too", param_hint="--json")
    saved = None
    if load is None:
        settings = make_settings(
            model=model, head=head, resources=resource, assistants=assistant, temperature=temperature, max_new_tokens=max_new_tokens,
            gamma=gamma, seed=seed, debug=debug, device=device, backend=backend,
        )  # fmt: skip
    else:
        names = ("model", "head", "resource", "assistant", "max_new_tokens", "temperature", "gamma", "seed")
        sources = {name: context.get_parameter_source(name) for name in names}  # typer brings a click of its own: told apart by name
        given = [f"--{name.replace('_', '-')}" for name, source in sources.items() if source is not None and source.name != "DEFAULT"]
        if given:
            told = f"the file has what {', '.join(given)} would set: leave it out, or change it in the chat"
            raise typer.BadParameter(told, param_hint="--load")
        saved = read_saved(load)
        settings = saved.settings.replace(device=device, backend=backend, debug=debug)  # the file may come from another machine
    if not as_json:
        run_chat(settings, Console(highlight=False), prompt, saved)
        return
    with contextlib.redirect_stdout(sys.stderr):  # whatever a library prints must not reach the object's reader
        done = run_chat(settings, Console(quiet=True), prompt, saved)
    print(json.dumps(done.as_json()))


@app.command()
def bench(
    prompts: Annotated[list[str] | None, typer.Option(help="jsonl file in Spec-Bench's form; may be given several times.")] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be given several times. Without any: eight bundled ones.")] = None,
    model: Annotated[str, typer.Option(help="Hub id, directory or .gguf file of the target.")] = "smollm2-135m-instruct",
    head: Annotated[list[str] | None, typer.Option(help="Hub id, directory or shipped name of an EAGLE head; one of each kind.")] = None,
    draft_model: Annotated[str | None, typer.Option(help="Smaller model, of any tokenizer, named as the target.")] = None,
    early_exit: Annotated[int | None, typer.Option(min=1, help="Draft with so many of the target's own first layers.")] = None,
    methods: Annotated[str | None, typer.Option(help="Methods, comma-separated; by default all that have what they need.")] = None,
    each: Annotated[int | None, typer.Option(min=1, help="Prompts to take of every category; all by default.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 128,
    dtype: Dtype = None,
    device: Device = None,
    backend: Backend = "auto",
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Prompts answered together, 1 by default; given several times, one after another.")
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="Timed answers to every prompt; the one of median time makes the row.")] = 1,
    warmup: Annotated[int | None, typer.Option(min=0, help="Untimed answers before; else 2 on CUDA for what compiles.")] = None,
    peer: Annotated[
        list[str] | None, typer.Option(help="Another engine beside, in a process of its own: vllm alone, sglang was not tried.")
    ] = None,
    peer_python: Annotated[str | None, typer.Option(help="The Python that has the engine; by default this one.")] = None,
    out: Annotated[Path | None, typer.Option(help="jsonl file to append the rows to; benchmarks/plot.py draws them.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else, on stdout.")] = False,
    print_output: Annotated[bool, typer.Option("--print-output", help="Print every method's answers.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Print every method's answers beside transformers' own.")] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Time the parts of every assistant's rounds on the first prompt.")] = False,
    allow_different: Annotated[bool, typer.Option("--allow-different", help="Exit status 0 though an fp32 answer differs.")] = False,
) -> None:
    """Measure assistants beside transformers' own methods, outputs compared; without prompts on bundled ones. See docs/performance.md."""
    from fastspec.programs.bench import run_bench
    from fastspec.programs.bench.peers import Peer
    from fastspec.programs.bench.report import (
        differing,
        print_differences,
        print_profiles,
        print_report,
        print_texts,
        rows_without_texts,
        summarise,
        writer,
    )

    if profile and as_json:
        raise typer.BadParameter("its tables are printed, and --json prints one object alone: give one of the two", param_hint="--profile")
    console = Console(highlight=False, stderr=as_json)
    profiles: dict[str, Any] = {}
    failures: list[str] = []
    engines = [Peer(name, peer_python or sys.executable) for name in peer or ()]
    names = [name.strip() for name in methods.split(",")] if methods else None
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext(), writer(out) as write:
        rows = run_bench(
            prompts=prompts or (), texts=prompt or (), model=model, heads=head or None, draft_model=draft_model, early_exit=early_exit,
            methods=names, each=each, max_new_tokens=max_new_tokens, dtype=dtype, device=device, backend=backend,
            batch=batch or 1, runs=runs, warmup=warmup, peers=engines, on_failure=failures.append, on_row=write,
            on_profile=profiles.__setitem__ if profile else None, say=lambda line: console.print(line, style="dim", markup=False),
        )  # fmt: skip
    if as_json:
        print_differences(rows, console)
        shown = rows if print_output or compare else rows_without_texts(rows)
        print(json.dumps({"rows": shown, "summary": summarise(rows)}))
    else:
        if print_output or compare:
            print_texts(rows, console, compare)
        print_report(rows, console)
        print_profiles(profiles, out.parent if out else Path(), console)
    for failure in failures:
        console.print(failure, style="bold red", markup=False)
    if failures:
        raise typer.Exit(1)
    if rows[0]["dtype"] == "float32" and differing(rows) and not allow_different:
        raise typer.Exit(1)


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help="Directory, hub id or shipped name of a head.")],
    target: Annotated[str | None, typer.Option(help="Model to check the head against; only its configuration is read.")] = None,
    probe: Annotated[bool, typer.Option(help="Run the target, and measure which reading of ambiguous flags drafts best.")] = False,
    probe_prompt: Annotated[str | None, typer.Option(help="Prompt of --probe; the demo's first by default.")] = None,
    device: Device = None,
) -> None:
    """Say how a head's checkpoint is read, and whether it fits a target. Exit status 1 where it does not."""
    from fastspec.devices import use_device
    from fastspec.models import load_config, load_model
    from fastspec.patches.assistants.heads import inspect_head

    if probe and target is None:
        raise typer.BadParameter("--probe runs the target: name it with --target", param_hint="--probe")
    if probe_prompt is not None and not probe:
        raise typer.BadParameter("the prompt is for --probe: give that too", param_hint="--probe-prompt")
    if device is not None and not probe:
        raise typer.BadParameter("without --probe nothing runs on it: give that too", param_hint="--device")
    model: Any = None
    tokenizer: Any = None
    if target is not None:
        model, tokenizer = load_model(target, use_device(device)) if probe else (load_config(target), None)
    console = Console(highlight=False)
    found = inspect_head(path, model)
    console.print(_grid(("", ""), [(name, str(value)) for name, value in found.rows()]))
    if found.misfits:
        raise typer.Exit(1)
    if probe:
        _probe(path, model, tokenizer, probe_prompt, console)


@app.command()
def train(
    target: Annotated[str, typer.Option(help="Model to train a head for: directory, hub id, .gguf file or smollm2-135m-instruct.")],
    output: Annotated[str, typer.Option(help="Directory of the head; an interrupted run there is taken up again.")],
    prompts: Annotated[str | None, typer.Option(help="jsonl file with `prompt` or `turns` in each row.")] = None,
    answers: Annotated[list[str] | None, typer.Option(help="npz file of the target's answers; without one it answers first.")] = None,
    heldout: Annotated[str | None, typer.Option(help="jsonl file of prompts, or npz file, for validation.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the texts, 10 by default; 0: as many as `--minutes` allow.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Minutes of training, where time is to end the run.")] = None,
    kind: Annotated[
        str | None, typer.Option(metavar="[eagle3|eagle]", help="The head's format; eagle: EAGLE-1's and EAGLE-2's.")
    ] = None,
    draft_vocab_size: Annotated[int | None, typer.Option(help="Tokens that a head can draft; 10240 by default for EAGLE-3.")] = None,
    intermediate_size: Annotated[int | None, typer.Option(help="Width of the head's MLP; the target's by default.")] = None,
    share_lm_head: Annotated[bool | None, typer.Option(help="EAGLE-3: the target's LM head behind a matrix; not written.")] = None,
    norms: Annotated[bool | None, typer.Option(help="EAGLE-3: the norms of EAGLE-3.1.")] = None,
    start_from: Annotated[str | None, typer.Option(help="Head to go on from: its sizes, vocabulary and weights.")] = None,
    loss: Annotated[str | None, typer.Option(help="kl, tv, nla or hybrid; kl by default.")] = None,
    batch_tokens: Annotated[int | None, typer.Option(help="Tokens in a batch.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Longest text, in tokens; longer ones are left out.")] = None,
    ttt_steps: Annotated[int | None, typer.Option(help="Draft steps unrolled in training.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    new_tokens: Annotated[int | None, typer.Option(help="Longest answer that the target gives to a prompt.")] = None,
    sampled_share: Annotated[float | None, typer.Option(help="Share of the answers that are sampled; the rest is greedy.")] = None,
    continue_cut: Annotated[bool | None, typer.Option(help="Add: go on where answers were cut.")] = None,
    second_answers: Annotated[bool | None, typer.Option(help="Add: greedy answers to prompts that have a sampled one.")] = None,
    follow_ups: Annotated[bool | None, typer.Option(help="Add: second turns to finished conversations.")] = None,
    enlarge_minutes: Annotated[float | None, typer.Option(help="Minutes for making what the three options above add.")] = None,
    stop_after: Annotated[float | None, typer.Option(help="End this command after so many minutes; the same command goes on.")] = None,
    mixed_precision: Annotated[str | None, typer.Option(help="no, bf16 or fp16.")] = None,
    compile: Annotated[bool | None, typer.Option(help="Compile the unrolled head.")] = None,
    keep_features: Annotated[float | None, typer.Option(help="GiB for what the target says of texts, which it then reads once.")] = None,
    keep_features_host: Annotated[float | None, typer.Option(help="GiB of the host's memory for more of it.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of shuffling and of the weights.")] = None,
    resume: Annotated[bool | None, typer.Option(help="Take up an interrupted run in the output directory.")] = None,
    device: Device = None,
    removed: Annotated[str | None, typer.Option(*BLOCK_OPTIONS, hidden=True)] = None,
) -> None:
    """Train a drafting head. What is left out keeps the default of `fastspec.programs.training.TrainConfig`; see docs/training.md."""
    if removed is not None:
        raise typer.BadParameter(BLOCK_HEADS, param_hint=" / ".join(BLOCK_OPTIONS))
    given = {name: value for name, value in locals().items() if name != "device" and value is not None and value != []}
    from fastspec.programs import training

    if answers:
        given["answers"] = tuple(answers)
    try:
        config = training.TrainConfig(**given)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    with training_bars() as bars:
        shown: dict[str, Any] = {} if bars is None else {"report": bars.report, "tick": bars.tick}
        folder = training.train(config, device=device, **shown)
    typer.echo(f"head written to {folder}" if folder else f"stopped, not done: run the same command again to go on in {output}")


def _probe(path: str, model: Any, tokenizer: Any, prompt: str | None, console: Console) -> None:
    """Print how well each reading of a head drafts the target's greedy answer to a prompt, and what follows from it."""
    from fastspec.patches.assistants.heads import probe_head
    from fastspec.programs.demo import PROMPTS, encode

    ids = encode(tokenizer, PROMPTS[0][1] if prompt is None else prompt, model.device)["input_ids"]
    try:
        rows = probe_head(path, model, ids)
    except ValueError as error:  # the prompt is empty, or the target has no answer to it
        raise typer.BadParameter(str(error), param_hint="--probe-prompt") from error
    options = tuple(rows[0].overrides())
    readings = [
        (f"{r.agreement:.1%}", f"{r.second:.1%}", *(str(r.overrides()[name]) for name in options), "as declared" if r.declared else "")
        for r in rows
    ]
    console.print(_grid(("agreement", "second", *options, ""), readings))
    console.print(f"verdict: {verdict(path, rows)}", markup=False, soft_wrap=True)


def verdict(source: str, rows: Sequence[Any]) -> str:
    """The verdict on a head by the rows of `fastspec.patches.assistants.heads.probe_head`, best first: keep its declared reading, take
    another, or look for another head.

    A reading is better than the declared one where it met the target's choice more often at one of the two steps by over two standard
    errors, and at both together.
    """
    best, declared = rows[0], next(row for row in rows if row.declared)
    shares = ((best.agreement, declared.agreement), (best.second, declared.second))
    better = any(a - b > 2 * math.sqrt((a + b) / 2 * (1 - (a + b) / 2) / best.tokens) for a, b in shares)
    if best.agreement < POOR:
        return (
            f"no reading drafts well ({best.agreement:.0%} at best): this head was trained for another target, too little, or on text of "
            "another kind; try a prompt of the kind that it was trained on"
        )
    if not better:
        return (
            f"read it as declared ({declared.agreement:.0%} of {declared.tokens} drafts are the target's, {declared.second:.0%} of those "
            "after them): no reading is clearly better"
        )
    kept = declared.overrides()
    options = ", ".join(f"{name}={value!r}" for name, value in best.overrides().items() if value != kept[name])
    return (
        f"another reading drafts better, {best.agreement:.0%} and {best.second:.0%} (of the drafts after the first) against "
        f"{declared.agreement:.0%} and {declared.second:.0%} as declared: "
        f"fastspec.patch(model, ...=fastspec.load_head({source!r}, model, {options}))"
    )


def _grid(titles: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(box=None, show_header=any(titles), pad_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    return table
