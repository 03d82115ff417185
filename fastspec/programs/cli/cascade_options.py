"""The cascade of `fastspec serve` and `fastspec generate`: a YAML file, or stages by name with their predictor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from typer import Option

from fastspec.cascade.config import Cascade
from fastspec.config import BackendName
from fastspec.errors import Unsupported, accepted
from fastspec.programs.cli.cascade import check_names, stage_of
from fastspec.programs.cli.options import HEADS
from fastspec.programs.heads import named

CascadeFile = Annotated[
    Path | None, Option(help="YAML file of a cascade, MODEL its large model: docs/guide/cascade.md.")
]
Stages = Annotated[
    list[str] | None, Option(help="NAME=MODEL of a cascade's smaller stage, the cheapest first; in place of a file.")
]
StageHeads = Annotated[list[str] | None, Option("--head", help=f"{HEADS} NAME=HEAD: the head of a --stage.")]
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
        others = "--stage, --stage-tensor-parallel and --predictor"
        raise Unsupported(f"--cascade FILE names the stages, their heads and their predictor: leave out {others}")
    if path is None and not stages:
        if predictor is not None or price is not None or cut:
            others = "--predictor, --price and --stage-tensor-parallel"
            raise Unsupported(f"{others} are of a cascade: give --cascade FILE or --stage NAME=MODEL")
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
        known = f"the name of a --stage ({', '.join(names)}) and a number of processes"
        raise Unsupported(f"--stage-tensor-parallel {text!r} must be NAME=N, {known}")
    return name, int(count)
