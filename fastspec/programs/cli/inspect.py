"""`fastspec inspect`: the reading of a head, its fit to a target, and the reading that drafts best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer import Argument, Option

from fastspec.programs.cli.options import Device, ModelOption, model_name
from fastspec.programs.terminal import table

POOR = 0.2
"""Share of right first drafts below which a head hardly pays under any reading."""


def inspect(
    head: Annotated[
        str,
        Argument(metavar="HEAD", help="Directory, hub id or shipped name of a head, or a model with an MTP layer."),
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
    from fastspec.devices import use_device
    from fastspec.models import load_config, load_model
    from fastspec.patches.assistants.heads import inspect_head
    from fastspec.patches.assistants.mtp import inspect_mtp

    if probe and target is None:
        raise typer.BadParameter("--probe runs the model: name it after the head, or by --model", param_hint="--probe")
    if probe_prompt is not None and not probe:
        raise typer.BadParameter("the prompt is for --probe: give that too", param_hint="--probe-prompt")
    if device is not None and not probe:
        raise typer.BadParameter("without --probe nothing runs on it: give that too", param_hint="--device")
    on = use_device(device) if probe else "cpu"
    console = Console(highlight=False)
    own = inspect_mtp(head)
    if own is not None:
        console.print(table(("", ""), own, numbers=False, show_header=False))
        return
    found = inspect_head(head, None if target is None else load_config(target))
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
