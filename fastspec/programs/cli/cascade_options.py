"""The cascade of `fastspec serve` and `fastspec generate`: a YAML file, or stages by name with their predictor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from typer import Option

from fastspec.cascade.config import Cascade, Stage
from fastspec.errors import Unsupported
from fastspec.programs.cli.cascade import check_names

CascadeFile = Annotated[
    Path | None, Option(help="YAML file of a cascade whose large model MODEL is. See docs/guide/cascade.md.")
]
Stages = Annotated[
    list[str] | None, Option(help="NAME=MODEL of a cascade's smaller stage, the cheapest first; in place of a file.")
]
StageHeads = Annotated[list[str] | None, Option(help="NAME=HEAD: the EAGLE-3 head of a stage.")]
PredictorFile = Annotated[
    Path | None, Option(help="With --stage: what `fastspec cascade train` wrote, for stages of these names.")
]
Price = Annotated[
    float | None, Option(min=0, help="What a bad answer costs, in milliseconds; the cascade's own without it.")
]


def cascade_of(
    model: str,
    path: Path | None,
    stages: list[str] | None,
    heads: list[str] | None,
    predictor: Path | None,
    price: float | None,
    backend: str,
) -> Cascade | None:
    """The cascade of a command's options, None where they name none. Raises Unsupported for options that do not go
    together, a predictor that cannot be read or is for other stages, and a mode without an open batch."""
    if path is not None and (stages or heads or predictor is not None):
        raise Unsupported(
            "--cascade FILE names the stages and their predictor: leave out --stage, --head and --predictor"
        )
    if path is None and not stages:
        if heads or predictor is not None or price is not None:
            raise Unsupported(
                "--head, --predictor and --price are of a cascade: give --cascade FILE or --stage NAME=MODEL"
            )
        return None
    config = (
        Cascade.from_yaml(path)
        if path is not None
        else _of_stages(model, stages or [], heads or [], predictor, backend)
    )
    if config.mode != "adaptive":
        raise Unsupported(
            f"mode={config.mode!r} of a cascade drafts with several models for all rows of a call at once, and an open "
            "batch lets prompts join: mode='adaptive' is served, and `fastspec chat` takes every mode"
        )
    from fastspec.cascade.predictor import Predictor

    if isinstance(config.predictor, (str, Path)) and config.label is not None:
        Predictor.load(config.predictor).check((*(stage.label for stage in config.stages), config.label))
    return config if price is None else replace(config, price=price)


def _of_stages(model: str, stages: list[str], heads: list[str], predictor: Path | None, backend: str) -> Cascade:
    """The cascade of --stage, --head and --predictor; its last stage's name is the predictor's."""
    from fastspec.cascade.predictor import Predictor

    if predictor is None:
        raise Unsupported("--stage needs --predictor FILE, which `fastspec cascade train` writes")
    label = Predictor.load(predictor).stages[-1]
    named, _, drafts = check_names(stages, f"{label}={model}", heads)
    below = [
        Stage(
            source,
            name=name,
            assistant="eagle3" if name in drafts else "nasd",
            resources={"backend": backend} | ({"eagle3": drafts[name]} if name in drafts else {}),
        )
        for name, source in named
    ]
    return Cascade(stages=below, label=label, predictor=str(predictor))
