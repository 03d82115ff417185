"""Heads and cascades that a command names: who reads a head, its fit to a model, and the tokenizer of a cascade."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastspec.cascade.config import Cascade
from fastspec.errors import CheckpointError, Unsupported
from fastspec.models import load_config, token_table

READERS = {"eagle3": ("eagle3",), "eagle": ("eagle", "eagle2")}
"""Kind of head -> the assistants that read it."""


def named(text: str) -> tuple[str, str]:
    """(name, source) of NAME=HEAD; the name is empty where there is none, and where a directory is called so."""
    found = re.fullmatch(r"([\w.-]+)=(.+)", text)
    return (found[1], found[2]) if found and not Path(text).exists() else ("", text)


def read_heads(sources: Iterable[str], config: Any = None) -> dict[str, str]:
    """Assistant, or "assistant:name" of NAME=HEAD -> the head that it reads. Raises Unsupported for two heads of one
    kind and name, and CheckpointError for what is no head or does not fit the model of a config."""
    from fastspec.patches.assistants.heads import inspect_head

    found: dict[str, str] = {}
    for text in sources:
        name, source = named(text)
        report = inspect_head(source, config)
        if report.misfits:
            raise CheckpointError(f"the head {source} does not fit the model: {'; '.join(report.misfits)}")
        readers = READERS[report.config.kind]
        methods = [f"{each}:{name}" if name else each for each in readers]
        if methods[0] in found:
            raise Unsupported(
                f"--head {found[methods[0]]} and --head {source} are both heads of {' and '.join(methods)}: give one "
                "of them, or compare them by `fastspec bench`, as --head NAME=HEAD"
            )
        found |= dict.fromkeys(methods, source)
    return found


def fitting_heads(sources: Sequence[str] | None, model: str) -> dict[str, str]:
    """Heads by assistant, as `read_heads` finds them, that fit a model by its configuration. Raises Unsupported for
    NAME=HEAD, which stands for one of several heads."""
    for name, source in map(named, sources or ()):
        if name:
            raise Unsupported(
                f"--head names {name}: `fastspec bench` compares heads by name, and `generate` and `serve` name those "
                f"of a cascade's stages; here give --head {source}"
            )
    return read_heads(sources, load_config(model)) if sources else {}


def with_tokenizer(config: Cascade, tokenizer: Any, where: str) -> Cascade:
    """The same with the large model's tokenizer. Raises Unsupported where it names one of other tokens."""
    from fastspec.patches.cascade.stages import load_tokenizer

    if config.tokenizer is not None and token_table(load_tokenizer(config.tokenizer)) != token_table(tokenizer):
        raise Unsupported(
            f"{where}: tokenizer={config.tokenizer!r} has other tokens than the large model: name that model's, or "
            "leave it out, and the model's own is taken"
        )
    return replace(config, tokenizer=tokenizer)
