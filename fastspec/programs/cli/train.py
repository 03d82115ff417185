"""`fastspec train`: a drafting head for a model."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Option

from fastspec.programs.cli.options import AnyModel, Device, ModelOption, model_name
from fastspec.programs.terminal import training_bars
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
