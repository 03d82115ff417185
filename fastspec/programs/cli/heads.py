"""`fastspec inspect` and `fastspec train`: how a head is read, its fit to a target, the best reading; a new head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer import Argument, Option

from fastspec.devices import use_device
from fastspec.models import load_config, load_model
from fastspec.programs.cli.options import AnyModel, Device, ModelOption, model_name
from fastspec.programs.terminal import table, training_bars
from fastspec.removed import BLOCK_HEADS, BLOCK_SETTINGS

FIELD_OF = {"model": "target", "out": "output", "max_new_tokens": "new_tokens"}
"""Argument or option -> its field of `TrainConfig`, where the two differ."""
NO_FIELDS = "device", "model_option"
BLOCK_OPTIONS = [f"--{name.replace('_', '-')}" for name in BLOCK_SETTINGS]


def train(
    out: Annotated[str, Option(help="Directory of the head; an interrupted run there is taken up again.")],
    model: AnyModel = None,
    model_option: ModelOption = None,
    prompts: Annotated[str | None, Option(help="jsonl file with `prompt` or `turns` in each row.")] = None,
    answers: Annotated[
        list[str] | None, Option(help="npz file of the target's answers; else it answers first.")
    ] = None,
    heldout: Annotated[str | None, Option(help="jsonl file of prompts, or npz file, for validation.")] = None,
    epochs: Annotated[float | None, Option(help="Passes over the texts, 10 by default; 0: by `--minutes`.")] = None,
    minutes: Annotated[float | None, Option(help="Minutes of training, where time is to end the run.")] = None,
    kind: Annotated[
        str | None,
        Option(metavar="[eagle3|eagle|mtp]", help="The head's format; eagle: EAGLE-1's and EAGLE-2's; mtp: Qwen's."),
    ] = None,
    draft_vocab_size: Annotated[int | None, Option(help="Tokens that a head can draft; EAGLE-3: 10240.")] = None,
    intermediate_size: Annotated[int | None, Option(help="Width of the head's MLP; the target's by default.")] = None,
    share_lm_head: Annotated[bool | None, Option(help="EAGLE-3: the target's LM head after a matrix.")] = None,
    norms: Annotated[bool | None, Option(help="EAGLE-3: the norms of EAGLE-3.1.")] = None,
    start_from: Annotated[str | None, Option(help="Head to go on from: its sizes, vocabulary and weights.")] = None,
    loss: Annotated[str | None, Option(help="kl, tv, nla or hybrid; kl by default.")] = None,
    batch_tokens: Annotated[int | None, Option(help="Tokens in a batch.")] = None,
    max_length: Annotated[int | None, Option(help="Longest text, in tokens; longer ones are left out.")] = None,
    ttt_steps: Annotated[int | None, Option(help="Draft steps unrolled in training.")] = None,
    learning_rate: Annotated[float | None, Option(help="Peak learning rate.")] = None,
    max_new_tokens: Annotated[int | None, Option(help="Longest answer that the target gives to a prompt.")] = None,
    sampled_share: Annotated[float | None, Option(help="Share of answers that are sampled, not greedy.")] = None,
    continue_cut: Annotated[bool | None, Option(help="Add: go on where answers were cut.")] = None,
    second_answers: Annotated[bool | None, Option(help="Add: greedy answers beside sampled ones.")] = None,
    follow_ups: Annotated[bool | None, Option(help="Add: second turns to finished conversations.")] = None,
    enlarge_minutes: Annotated[
        float | None, Option(help="Minutes for making what the three options above add.")
    ] = None,
    stop_after: Annotated[float | None, Option(help="End after so many minutes; the same command goes on.")] = None,
    mixed_precision: Annotated[str | None, Option(help="no, bf16 or fp16.")] = None,
    compile: Annotated[bool | None, Option(help="Compile the unrolled head.")] = None,
    keep_features: Annotated[
        float | None, Option(help="GiB for the target's features, which it computes once.")
    ] = None,
    keep_features_host: Annotated[float | None, Option(help="GiB of the host's memory for more of them.")] = None,
    seed: Annotated[int | None, Option(help="Seed of shuffling and of the weights.")] = None,
    resume: Annotated[bool | None, Option(help="Take up an interrupted run in the output directory.")] = None,
    device: Device = None,
    removed: Annotated[str | None, Option(*BLOCK_OPTIONS, hidden=True)] = None,
) -> None:
    """Train a drafting head. What is left out keeps the default of `fastspec.programs.training.TrainConfig`; see
    docs/train/options.md."""
    if removed is not None:
        raise typer.BadParameter(BLOCK_HEADS, param_hint=" / ".join(BLOCK_OPTIONS))
    options = {name: value for name, value in locals().items() if value is not None and value != []}
    given = {FIELD_OF.get(name, name): value for name, value in options.items() if name not in NO_FIELDS}
    given["target"] = model_name(model, model_option)
    from fastspec.programs import training

    if answers:
        given["answers"] = tuple(answers)
    try:
        config = training.TrainConfig(**given)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    with training_bars() as bars:
        folder = training.train(config, device=device, **bars)
    stopped = f"stopped, not done: run the same command again to go on in {out}"
    typer.echo(f"head written to {folder}" if folder else stopped)


POOR = 0.2
"""Share of right first drafts below which a head hardly pays under any reading."""


def inspect(
    head: Annotated[
        str, Argument(metavar="HEAD", help="Directory, hub id or shipped name of a head, or a model with an MTP layer.")
    ],
    model: Annotated[
        str | None, Argument(metavar="MODEL", help="Model whose config the head is checked against.")
    ] = None,
    model_option: ModelOption = None,
    probe: Annotated[bool, Option(help="Run the target, and measure which reading of flags drafts best.")] = False,
    probe_prompt: Annotated[str | None, Option(help="Prompt of --probe; the demo's first by default.")] = None,
    device: Device = None,
) -> None:
    """Say how a head's checkpoint is read, or a model's MTP layer, and whether it fits a target. Exit status 1 where it
    does not."""
    target = None if model is None and model_option is None else model_name(model, model_option)
    from fastspec.patches.assistants.heads import inspect_head
    from fastspec.patches.assistants.mtp_report import inspect_mtp

    if probe and target is None:
        raise typer.BadParameter("--probe runs the model: name it after the head, or by --model", param_hint="--probe")
    if probe_prompt is not None and not probe:
        raise typer.BadParameter("the prompt is for --probe: give that too", param_hint="--probe-prompt")
    if device is not None and not probe:
        raise typer.BadParameter("without --probe nothing runs on it: give that too", param_hint="--device")
    on = use_device(device) if probe else "cpu"
    console = Console(highlight=False)
    config = None if target is None else load_config(target)
    own = inspect_mtp(head, config)
    if own is not None:
        console.print(
            table(("", ""), [(name, Text(told)) for name, told in own.rows()], numbers=False, show_header=False)
        )
        if own.refused is not None:
            raise typer.Exit(1)
        return
    found = inspect_head(head, config)
    loaded: Any = None
    if probe and target is not None and not found.misfits:
        loaded, tokenizer = load_model(target, on)
        found = inspect_head(head, loaded)  # some of it shows in the weights alone
    rows = [(name, Text(str(value))) for name, value in found.rows()]
    console.print(table(("", ""), rows, numbers=False, show_header=False))
    if found.misfits:
        raise typer.Exit(1)
    if loaded is not None:
        _probe(head, loaded, tokenizer, probe_prompt, console)


def _probe(path: str, model: Any, tokenizer: Any, prompt: str | None, console: Console) -> None:
    """Print how well each reading of a head drafts the target's greedy answer to a prompt, and the verdict."""
    from fastspec.patches.assistants.probe import probe_head
    from fastspec.programs.demo import PROMPTS
    from fastspec.programs.texts import encode

    ids = encode(tokenizer, PROMPTS[0][1] if prompt is None else prompt, model.device)["input_ids"]
    try:
        rows = probe_head(path, model, ids)
    except ValueError as error:  # the prompt is empty, or the target has no answer to it
        raise typer.BadParameter(str(error), param_hint="--probe-prompt") from error
    readings = []
    for row in rows:
        values = map(str, row.overrides().values())
        readings.append((f"{row.agreement:.1%}", f"{row.second:.1%}", *values, "as declared" * row.declared))
    console.print(table(("agreement", "second", *rows[0].overrides(), ""), readings, numbers=False))
    console.print(f"verdict: {verdict(path, rows)}", markup=False, soft_wrap=True)


def verdict(source: str, rows: Sequence[Any]) -> str:
    """Verdict on a head by the rows of `fastspec.patches.assistants.probe.probe_head`, best first: keep its declared
    reading, take one that met the target's choice more often by over two standard errors, or look for another head."""
    best, declared = rows[0], next(row for row in rows if row.declared)
    shares = ((best.agreement, declared.agreement), (best.second, declared.second))
    better = any(a - b > 2 * math.sqrt((a + b) / 2 * (1 - (a + b) / 2) / best.tokens) for a, b in shares)
    most = max(row.agreement for row in rows)
    if most < POOR:
        return (
            f"no reading drafts well ({most:.0%} at best): this head was trained for another target, too "
            "little, or on text of another kind; try a prompt of the kind that it was trained on"
        )
    if not better:
        second = f"{declared.second:.0%} of those after them"
        right = f"{declared.agreement:.0%} of {declared.tokens} drafts are the target's, {second}"
        return f"read it as declared ({right}): no reading is clearly better"
    kept = declared.overrides()
    options = ", ".join(f"{name}={value!r}" for name, value in best.overrides().items() if value != kept[name])
    return (
        f"another reading drafts better, {best.agreement:.0%} and {best.second:.0%} (of the drafts after the first) "
        f"against {declared.agreement:.0%} and {declared.second:.0%} as declared: "
        f"fastspec.patch(model, ...=fastspec.load_head({source!r}, model, {options}))"
    )
