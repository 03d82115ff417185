"""`fastspec cascade train | evaluate`: make a cascade's predictor on this machine, and see what it is worth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fastspec.cascade.labels import KEY_FIELDS
from fastspec.cascade.sandbox import PROTECTION
from fastspec.errors import Unsupported
from fastspec.programs.cli.options import Backend, Device, Dtype
from fastspec.programs.cli.progress import counting

app = typer.Typer(help="Train and judge the predictor of a cascade of models.", no_args_is_help=True)
Stages = Annotated[list[str], typer.Option(help="NAME=MODEL of a smaller stage, the cheapest first; MODEL as for --model.")]
Model = Annotated[str, typer.Option(help="NAME=MODEL of the large model: a hub id, a directory, a .gguf file or a shipped name.")]
WIDTH = 80
ITEMS = (
    "Items as JSON lines; several files are several sets. A line has an `id`, a `prompt` or `turns`, and the key that answers are judged "
    f"by, one of: {KEY_FIELDS}. Without one see --agreement."
)
AGREEMENT = "Without a key: an answer is good where its words agree with the last stage's, which is then right by definition."
EXECUTION = "Run the code that models wrote, for items with unit tests; docs/cascade.md says what it is kept from."
POINTS = 15
"""Prices of a frontier that are printed; the rows have all."""
RATED, LONG = 8, 64
"""Items after which the stages' rates are measured, and new tokens after each."""


@app.command()
def train(
    stage: Stages,
    model: Model,
    prompts: Annotated[list[Path], typer.Option(help=ITEMS)],
    out: Annotated[Path, typer.Option(help="The predictor to write, a .safetensors file.")],
    answers: Annotated[Path, typer.Option(help="The stages' answers; a file that is there is gone on with.")],
    report: Annotated[Path | None, typer.Option(help="Append the calibration's rows to this file, as JSON lines.")] = None,
    head: Annotated[list[str] | None, typer.Option(help="NAME=HEAD: a stage's EAGLE-3 head, which it then decodes with.")] = None,
    most: Annotated[int | None, typer.Option(min=1, help="Items of each file that are used.")] = None,
    share: Annotated[float, typer.Option(min=0, max=1, help="Part of the items that is trained on; the rest is held out.")] = 0.5,
    batch: Annotated[int, typer.Option(min=1, help="Items answered at a time.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    agreement: Annotated[bool, typer.Option("--agreement", help=AGREEMENT)] = False,
    threshold: Annotated[float, typer.Option(min=0, max=1, help="With --agreement: the F1 to reach.")] = 0.5,
    allow_code_execution: Annotated[bool, typer.Option("--allow-code-execution", help=EXECUTION)] = False,
    device: Device = None,
    backend: Backend = "auto",
    dtype: Dtype = None,
    seed: Annotated[int, typer.Option(help="Seed of the split and of the training.")] = 0,
) -> None:
    """Let every stage answer the items, judge the answers, train and calibrate a predictor, and report its calibration."""
    from fastspec.cascade import records
    from fastspec.devices import use_device
    from fastspec.patches.cascade.stages import measure_rates
    from fastspec.programs.training import cascade, cascade_answers

    console = Console(highlight=False, markup=False)
    items = cascade_answers.read_sets(prompts, most, agreement=agreement)
    kind = cascade_answers.check_execution(items, allow_code_execution)
    if kind is not None:
        console.print(f"the code of models runs with sandbox {kind}: {PROTECTION[kind]}", soft_wrap=True)
    models, tokenizer = models_of(stage, model, head or [], use_device(device), dtype, backend)
    try:
        with counting(f"items answered by {len(models.stages)} stages", console) as tell:
            cascade_answers.answer(
                models, tokenizer, items, answers, batch=batch, new_tokens=max_new_tokens, seed=seed, share=share, tell=tell
            )
        some = [cascade_answers.encode(tokenizer, item.prompt) for item in items[:: -(-len(items) // RATED)]]
        rates = measure_rates(models.stages, some, min(max_new_tokens, LONG))
        where = cascade_answers.place(models.large)
    finally:
        models.close()
    ways = cascade_answers.judge(answers, items, threshold=threshold, allow_code_execution=allow_code_execution)
    where["judged"] = _told(ways)
    predictor = cascade.fit(answers, models.names, seed=seed, rates=rates, place=where)
    predictor.save(out)
    table = records.table(records.read(answers), models.names)
    _print_rates(console, models.names, rates)
    _print_judged(console, ways)
    told_of = {"seed": seed, **where}
    rows = cascade.calibration_rows(cascade.held_out(predictor, table.where(split="held-out")), more=told_of) if share < 1 else []
    _print_calibration(console, rows)
    _append(report, rows)
    console.print(f"predictor written to {out}")


@app.command()
def evaluate(
    predictor: Annotated[Path, typer.Option(help="The predictor that `fastspec cascade train` wrote.")],
    answers: Annotated[Path, typer.Option(help="The stages' answers that it wrote.")],
    out: Annotated[Path | None, typer.Option(help="Append the rows to this file, as JSON lines.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the frontier and the calibration into this picture.")] = None,
    risk: Annotated[float | None, typer.Option(min=0, max=1, help="Decide by this lower quantile of the probabilities' posterior.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the confidence intervals.")] = 0,
) -> None:
    """The quality-cost frontier over the price of a bad answer, beside single stages, random mixing and the oracle, on held-out items."""
    from fastspec.cascade import records
    from fastspec.cascade.plot import pictures
    from fastspec.cascade.predictor import Predictor
    from fastspec.programs.training import cascade, cascade_answers

    console = Console(highlight=False, markup=False)
    if plot is not None:
        pictures()  # before the work, not behind it
    held = Predictor.load(predictor)
    if held.rates is None:
        raise Unsupported(f"{predictor} does not say what its stages cost: make it with `fastspec cascade train`")
    read = records.read(answers)
    ways = cascade_answers.ways_by_set(read.records)
    table = records.table(read, held.stages).where(split="held-out")
    told_of = {**held.place, "judged": _told(ways)}
    rows = cascade.frontier_rows(held, table, held.rates, seed=seed, risk=risk, more=told_of)
    rows += cascade.calibration_rows(cascade.held_out(held, table, risk), more={"seed": seed, **told_of})
    _print_rates(console, held.stages, held.rates)
    _print_judged(console, ways)
    _print_frontier(console, rows)
    _print_calibration(console, [row for row in rows if row["kind"] == "reliability"])
    _append(out, rows)
    if plot is not None:
        from fastspec.cascade.plot import draw

        draw(rows, plot)
        console.print(f"drawn to {plot}")


def models_of(
    stages: list[str], large: str, heads: list[str], device: str, dtype: str | None, backend: str = "auto"
) -> tuple[Any, Any]:
    """The models of a cascade that has no predictor yet, loaded and patched, and the large one's tokenizer."""
    import torch

    import fastspec
    from fastspec.models import load_model
    from fastspec.patches.api import cascade_models

    names = [_named("--stage", text)[0] for text in stages] + [_named("--model", large)[0]]
    if len(set(names)) < len(names):
        raise Unsupported(f"the models are named {', '.join(names)}: every name must be another")
    kind = None if dtype is None else getattr(torch, dtype)
    drafts = dict(_named("--head", text) for text in heads)
    below = []
    for name, source in (_named("--stage", text) for text in stages):
        model, tokenizer = load_model(source, device, kind)
        head = {"eagle3": drafts.pop(name)} if name in drafts else {}
        assistant = "eagle3" if head else "nasd"
        below.append(fastspec.Stage(model, tokenizer, name, assistant, {**head, "backend": backend}))
    if drafts:
        raise Unsupported(f"--head names {', '.join(drafts)}, which is no --stage")
    label, source = _named("--model", large)
    model, tokenizer = load_model(source, device, kind)
    fastspec.patch(model, backend=backend)
    return cascade_models(fastspec.Cascade(stages=below, mode="lossless", tokenizer=tokenizer, label=label), model), tokenizer


def _named(option: str, text: str) -> tuple[str, str]:
    name, sign, rest = text.partition("=")
    if not (name and sign and rest):
        raise Unsupported(f"{option} {text!r} must be NAME={'HEAD' if option == '--head' else 'MODEL'}")
    return name, rest


def _append(path: Path | None, rows: list[dict[str, Any]]) -> None:
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def _table(names: list[str], numbers: list[str]) -> Table:
    """A table of at most 80 columns whose cells are not wrapped: long names are cut off, numbers never."""
    table = Table(box=None)
    room = WIDTH - sum(max(len(title), 6) + 2 for title in numbers)  # with a blank on either side
    for title in names:
        table.add_column(title, no_wrap=True, overflow="ellipsis", max_width=room // len(names) - 2)
    for title in numbers:
        table.add_column(title, no_wrap=True, justify="right", min_width=len(title))
    return table


def _print_rates(console: Console, stages: tuple[str, ...], rates: Any) -> None:
    table = _table(["stage"], ["ms a token", "ms a verified one", "ms a start"])
    for name, *values in zip(stages, rates.token_ms, rates.verify_ms, rates.start_ms, strict=True):
        table.add_row(name, *(f"{value:.2f}" for value in values))
    console.print(table)


def _told(ways: dict[str, str]) -> str:
    """How every set was judged, in one line for what is written."""
    return "; ".join(f"{name}: {way}" for name, way in ways.items())


def _print_judged(console: Console, ways: dict[str, str]) -> None:
    for name, way in ways.items():
        console.print(f"{name}: judged by {way}", soft_wrap=True)


def _print_calibration(console: Console, rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    table = _table(["set", "after", "answer of"], ["items", "ECE"])
    for row in rows:
        table.add_row(row["set"], row["seen_at"], row["stage"], str(row["items"]), f"{row['ece']:.3f}")
    console.print(table)


def _evenly(rows: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """At most so many rows, the first and the last among them."""
    if len(rows) <= most:
        return rows
    return [rows[round(step * (len(rows) - 1) / (most - 1))] for step in range(most)]


def _print_frontier(console: Console, rows: list[dict[str, Any]]) -> None:
    for name in dict.fromkeys(row["set"] for row in rows if row["kind"] == "frontier"):
        mine = [row for row in rows if row["set"] == name]
        console.print(f"\n{name}")
        table = _table([], ["price, ms", "cost, ms", "quality", "mixing", "gain", "95 % interval", "stage"])
        for row in _evenly([row for row in mine if row["kind"] == "frontier" and row["inside"]], POINTS):
            price = f"{row['price']:{'.0f' if row['price'] >= 10 else '.3g'}}"
            table.add_row(
                price, f"{row['cost']:.1f}", f"{row['quality']:.3f}", f"{row['hull']:.3f}", f"{row['gain']:+.3f}",
                f"{row['gain_low']:+.3f} {row['gain_high']:+.3f}", f"{row['stage']:.2f}",
            )  # fmt: skip
        console.print(table)
        for row in mine:
            if row["kind"] == "stage":
                console.print(f"{row['stage']} alone: {row['cost']:.1f} ms, quality {row['quality']:.3f}")
            if row["kind"] == "area":
                share = "none" if row["share"] is None else f"{row['share']:.0%}"
                console.print(f"area gained: {row['mean']:.4f} of quality on average, {share} of what the oracle gains")
