"""`fastspec cascade train | evaluate`: a cascade's predictor, trained and judged on this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column
from typer import Option

import fastspec
from fastspec.cascade.config import Stage, refuse_unknown
from fastspec.config import BackendName
from fastspec.devices import use_device
from fastspec.distribution import install_command
from fastspec.errors import Unsupported
from fastspec.files import read_yaml
from fastspec.models import load_model
from fastspec.programs.cli.options import Backend, Device, Dtype, NamingCommand
from fastspec.programs.heads import fitting_heads
from fastspec.programs.terminal import counting, table

LEFT = "is not there any more; the commit `c0f133b` has the code"
GONE = {
    "--agreement": f"{LEFT}. docs/guide/cascade.md has a script for --right FILE, by the last stage's answer",
    "--threshold": f"{LEFT}. It was --agreement's: see --right FILE",
    "--allow-code-execution": f"{LEFT}. Unit tests are lm-eval's, such as --task humaneval --confirm-run-unsafe-code",
    "--plot": f"{LEFT}. --out FILE has the rows to draw: price, cost, quality, mixing",
    "--seed": "is of `fastspec cascade train` alone: standard errors need none",
}
"""Options of commands as they were -> where they went."""


class _Command(NamingCommand):
    gone = GONE


app = typer.Typer(help="Train and judge the predictor of a cascade of models.", no_args_is_help=True)
Stages = Annotated[list[str], Option(help="NAME=MODEL of a smaller stage, the cheapest first; MODEL as for --model.")]
Model = Annotated[str, Option(help="NAME=MODEL of the large model: hub id, directory, .gguf file or shipped name.")]
WIDTH = 80
PROMPTS = (
    "Items as JSON lines; several files are several sets. A line has an `id`, a `prompt` or `turns`, and the right "
    "`answer`: a number, a text, a list of accepted texts, or beside `choices` a letter or a place from 0 on."
)
TASK = "NAME[,NAME] of lm-eval's tasks, which ask the questions and judge the answers. Needs the extra `eval`."
METRIC = "With --task: METRIC or METRIC,FILTER that says what is right; by default a task's first. Several for several."
UNSAFE = "With --task: lm-eval's switch for tasks that run models' code, beside HF_ALLOW_CODE_EVAL=1."
RIGHT = "A judge's word on the answers: JSON lines with `item`, `stage`, `right` (true, false or a number in [0, 1])."
CONFIG = "YAML file of these options; --stage, --model and --head as NAME: MODEL. The command line goes first."
POINTS = 15
"""Prices of a frontier that are printed; the rows have all."""
RATED, LONG = 8, 64
"""Items after which the stages' rates are measured, and new tokens after each."""


def _from_yaml(ctx: typer.Context, path: Path | None) -> Path | None:
    """Take the options of a command from a YAML file, where the command line does not give them."""
    if path is None:
        return None
    read = read_yaml(path)
    options = {parameter.name: parameter for parameter in ctx.command.params if parameter.name != "config"}
    given = {str(key).replace("-", "_"): value for key, value in read.items()} if isinstance(read, dict) else {}
    known = sorted(name for name in options if name is not None)
    refuse_unknown([key for key in given if key not in options], known, str(path))
    if not given:
        raise Unsupported(f"{path}: it must hold keys and values; accepted keys are the options: {', '.join(known)}")
    for key, value in given.items():
        if isinstance(value, dict):  # NAME: MODEL
            if not options[key].multiple and len(value) != 1:
                raise Unsupported(f"{path}: {key} must be one NAME: MODEL, not {value!r}")
            value = [f"{name}={source}" for name, source in value.items()]
            given[key] = value if options[key].multiple else value[0]
        elif options[key].multiple and not isinstance(value, list):
            given[key] = [value]
    ctx.default_map = {**(ctx.default_map or {}), **given}
    return path


@app.command(cls=_Command)
def train(
    stage: Stages,
    model: Model,
    out: Annotated[Path, Option(help="The predictor to write, a .safetensors file.")],
    answers: Annotated[Path, Option(help="The stages' answers; a file that is there is gone on with.")],
    prompts: Annotated[list[Path] | None, Option(help=PROMPTS)] = None,
    task: Annotated[list[str] | None, Option(help=TASK)] = None,
    include_path: Annotated[Path | None, Option(help="With --task: a folder with task files of yours.")] = None,
    metric: Annotated[list[str] | None, Option(help=METRIC)] = None,
    confirm_run_unsafe_code: Annotated[bool, Option("--confirm-run-unsafe-code", help=UNSAFE)] = False,
    right: Annotated[Path | None, Option(help=RIGHT)] = None,
    report: Annotated[Path | None, Option(help="Append the calibration's rows to this file, as JSON lines.")] = None,
    head: Annotated[list[str] | None, Option(help="NAME=HEAD: the EAGLE-3 head of a stage.")] = None,
    most: Annotated[int | None, Option(min=1, help="Items of each file and task that are used.")] = None,
    share: Annotated[float, Option(min=0, max=1, help="Part of the items to train on; the rest is held out.")] = 0.5,
    batch: Annotated[int, Option(min=1, help="Items answered at a time.")] = 16,
    max_new_tokens: Annotated[int, Option(min=1, help="Longest answer in tokens, where no task sets it.")] = 256,
    device: Device = None,
    backend: Backend = "auto",
    dtype: Dtype = None,
    seed: Annotated[int, Option(help="Seed of the split and of the training.")] = 0,
    config: Annotated[Path | None, Option(is_eager=True, callback=_from_yaml, help=CONFIG)] = None,
) -> None:
    """Let every stage answer the items, judge the answers, train and calibrate a predictor, and report its calibration.

    Answers are judged by the items' own `answer`, by the task, or by a file of yours (--right).
    """
    from fastspec.cascade import records
    from fastspec.patches.cascade.stages import measure_rates
    from fastspec.programs.training import cascade, cascade_answers

    console = Console(highlight=False, markup=False)
    named, large, drafts = check_names(stage, model, head or [])
    on = use_device(device)
    items = [each for path in prompts or () for each in cascade_answers.read_items(path, most)]
    score = None
    if task:
        tasks = _tasks(task, model, include_path, most, metric or [], confirm_run_unsafe_code)
        items, score = items + tasks.items(), tasks.judge
    elif include_path or metric or confirm_run_unsafe_code:
        raise Unsupported("--include-path, --metric and --confirm-run-unsafe-code are of a task: give --task NAME")
    cascade_answers.check_items(items, right=right is not None)
    cascade_answers.check_training(items, seed, share)
    _check_writable(out, answers, report)
    models, tokenizer = models_of(named, large, drafts, on, dtype, backend)
    try:
        with counting(f"items answered by {len(models.stages)} stages", console) as tell:
            cascade_answers.answer(
                models,
                tokenizer,
                items,
                answers,
                batch=batch,
                new_tokens=max_new_tokens,
                seed=seed,
                share=share,
                tell=tell,
            )
        ways = cascade_answers.judge(answers, items, right=right, score=score)
        some = [cascade_answers.encode(tokenizer, item) for item in items[:: -(-len(items) // RATED)]]
        rates = measure_rates(models.stages, some, min(max(max_new_tokens, 2), LONG))
        where = cascade_answers.place(models.large)
    finally:
        models.close()
    where["judged"] = _told(ways)
    predictor = cascade.fit(answers, models.names, seed=seed, rates=rates, place=where)
    predictor.save(out)
    _print_rates(console, models.names, rates)
    _print_judged(console, ways)
    if share < 1:
        held = cascade.held_out(predictor, records.table(records.read(answers), models.names, "held-out"))
        rows = cascade.calibration_rows(held, more={"seed": seed, **where})
        _print_calibration(console, rows)
        _append(report, rows)
    console.print(f"predictor written to {out}")


@app.command(cls=_Command)
def evaluate(
    predictor: Annotated[Path, Option(help="The predictor that `fastspec cascade train` wrote.")],
    answers: Annotated[Path, Option(help="The stages' answers that it wrote.")],
    out: Annotated[Path | None, Option(help="Append the rows to this file, as JSON lines.")] = None,
    risk: Annotated[float | None, Option(help="Decide by this quantile of the posterior, between 0 and 1.")] = None,
) -> None:
    """Quality against cost over the price of a bad answer, beside single stages and random mixing, on held-out
    items."""
    from fastspec.cascade import records
    from fastspec.cascade.predictor import Predictor
    from fastspec.programs.training import cascade, cascade_answers

    console = Console(highlight=False, markup=False)
    _check_writable(out)
    if risk is not None and not 0 < risk < 1:
        raise Unsupported(f"--risk {risk:g} must lie between 0 and 1: the quantile of the posterior to take")
    held = Predictor.load(predictor)
    if held.rates is None:
        raise Unsupported(f"{predictor} does not say what its stages cost: make it with `fastspec cascade train`")
    read = records.read(answers)
    ways = cascade_answers.ways_by_set(read)
    items = records.table(read, held.stages, "held-out")
    told_of = {**held.place, "judged": _told(ways)}
    rows = cascade.frontier_rows(held, items, held.rates, risk=risk, more=told_of)
    calibration = cascade.calibration_rows(cascade.held_out(held, items, risk), more=told_of)
    _print_rates(console, held.stages, held.rates)
    _print_judged(console, ways)
    _print_frontier(console, rows)
    _print_calibration(console, calibration)
    _append(out, rows + calibration)


def _tasks(
    names: list[str], large: str, include: Path | None, most: int | None, metrics: list[str], unsafe: bool
) -> Any:
    from fastspec.patches.cascade.stages import load_tokenizer

    try:
        from fastspec.programs.training.cascade_tasks import Tasks
    except ModuleNotFoundError as error:
        if error.name != "lm_eval":
            raise
        raise Unsupported(f"--task needs lm-eval: {install_command('eval')}") from error
    named = [name for text in names for name in text.split(",") if name]
    tokenizer = load_tokenizer(_named("--model", large)[1])
    return Tasks(named, tokenizer, include=include, most=most, metrics=metrics, unsafe=unsafe)


Named = list[tuple[str, str]]


def models_of(
    stages: Named, large: tuple[str, str], heads: dict[str, str], device: str, dtype: str | None, backend: BackendName
) -> tuple[Any, Any]:
    """The models of a cascade that has no predictor yet, loaded and patched, and the large one's tokenizer."""
    import torch

    from fastspec.patches.api import cascade_models

    kind = None if dtype is None else getattr(torch, dtype)
    model, tokenizer = load_model(large[1], device, kind)
    below = []
    for name, source in stages:
        small, own = load_model(source, device, kind, tokenizer=tokenizer)
        below.append(stage_of(small, own, name, heads, backend))
    fastspec.patch(model, backend=backend)
    config = fastspec.Cascade(stages=below, mode="lossless", tokenizer=tokenizer, label=large[0])
    return cascade_models(config, model), tokenizer


def stage_of(
    model: Any, tokenizer: Any, name: str, heads: dict[str, str], backend: BackendName, processes: int | None = None
) -> Stage:
    """The stage of a model, or of its name, which decodes with its head where it has one."""
    resources: dict[str, Any] = {"backend": backend} | ({"eagle3": heads[name]} if name in heads else {})
    return Stage(model, tokenizer, name, "eagle3" if name in heads else "nasd", resources, tensor_parallel=processes)


def check_names(stages: list[str], large: str, heads: list[str]) -> tuple[Named, tuple[str, str], dict[str, str]]:
    """The (name, model) of the stages and of the large model, and the heads by the stage's name. Raises Unsupported for
    a name that is there twice, and for a head of no stage; CheckpointError, before weights are loaded, for one that
    does not fit its model."""
    named, last = [_named("--stage", text) for text in stages], _named("--model", large)
    names = [*(name for name, _ in named), last[0]]
    if len(set(names)) < len(names):
        raise Unsupported(f"the models are named {', '.join(names)}: every name must be another")
    drafts = dict(_named("--head", text) for text in heads)
    unknown = [name for name in drafts if name not in dict(named)]
    if unknown:
        raise Unsupported(f"--head names {', '.join(unknown)}, which is no --stage")
    for name, source in named:
        fitting_heads([drafts[name]] if name in drafts else None, source)
    return named, last, drafts


def _named(option: str, text: str) -> tuple[str, str]:
    name, sign, rest = text.partition("=")
    if not (name and sign and rest):
        raise Unsupported(f"{option} {text!r} must be NAME={'HEAD' if option == '--head' else 'MODEL'}")
    return name, rest


def _check_writable(*paths: Path | None) -> None:
    for path in filter(None, paths):
        folder = path.absolute().parent
        if not folder.is_dir():
            raise Unsupported(f"{path} cannot be written: {folder} is no directory")
        if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
            raise Unsupported(f"{path} cannot be written: name a file, in a folder that you may write to")


def _append(path: Path | None, rows: list[dict[str, Any]]) -> None:
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def _print_table(console: Console, names: list[str], numbers: list[str], rows: Iterable[Sequence[str]]) -> None:
    """A table of at most 80 columns whose cells are not wrapped: long names are cut off, numbers never."""
    room = WIDTH - sum(max(len(title), 6) + 2 for title in numbers)  # with a blank on either side
    shown = [Column(title, no_wrap=True, overflow="ellipsis", max_width=room // len(names) - 2) for title in names]
    shown += [Column(title, no_wrap=True, justify="right", min_width=len(title)) for title in numbers]
    console.print(table(shown, rows, pad_edge=True))


def _print_rates(console: Console, stages: tuple[str, ...], rates: Any) -> None:
    times = zip(rates.token_ms, rates.verify_ms, rates.start_ms, strict=True)
    rows = [[name, *(f"{value:.2f}" for value in each)] for name, each in zip(stages, times, strict=True)]
    _print_table(console, ["stage"], ["ms a token", "ms a verified one", "ms a start"], rows)


def _told(ways: dict[str, str]) -> str:
    """Summary of how every set was judged, in one line for what is written."""
    return "; ".join(f"{name}: {way}" for name, way in ways.items())


def _print_judged(console: Console, ways: dict[str, str]) -> None:
    for name, way in ways.items():
        console.print(f"{name}: judged by {way}", soft_wrap=True)


def _print_calibration(console: Console, rows: list[dict[str, Any]]) -> None:
    cells = [(row["set"], row["seen_at"], row["stage"], str(row["items"]), f"{row['ece']:.3f}") for row in rows]
    _print_table(console, ["set", "after", "answer of"], ["items", "ECE"], cells)


def _print_frontier(console: Console, rows: list[dict[str, Any]]) -> None:
    for name in dict.fromkeys(row["set"] for row in rows):
        mine = [row for row in rows if row["set"] == name]
        console.print(f"\n{name}")
        points = [row for row in mine if row["kind"] == "frontier" and row["inside"]]
        if len(points) > POINTS:  # the first and the last among them
            points = [points[round(step * (len(points) - 1) / (POINTS - 1))] for step in range(POINTS)]
        titles = ["price, ms", "cost, ms", "quality", "+-", "mixing", "gain", "+-", "stage"]
        forms = {"quality": ".3f", "stderr": ".3f", "mixing": ".3f", "gain": "+.3f", "gain_stderr": ".3f"}
        forms = {"cost": ".1f", **forms, "stage": ".2f"}
        prices = [f"{row['price']:{'.0f' if row['price'] >= 10 else '.3g'}}" for row in points]
        figures = [[format(row[key], form) for key, form in forms.items()] for row in points]
        _print_table(console, [], titles, [[price, *of] for price, of in zip(prices, figures, strict=True)])
        for row in mine:
            if row["kind"] == "stage":
                console.print(
                    f"{row['stage']} alone: {row['cost']:.1f} ms, quality {row['quality']:.3f} +- {row['stderr']:.3f}"
                )
            if row["kind"] == "gain":
                mean = "none, the last stage is no dearer" if row["mean_gain"] is None else f"{row['mean_gain']:+.4f}"
                console.print(f"mean gain over mixing at random: {mean}; {row['items']} items, +- is a standard error")
