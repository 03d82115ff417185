"""The cascade that a command or a chat is given: a YAML file, or stages by name with their predictor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastspec.cascade.config import Cascade
from fastspec.errors import Unsupported


def with_tokenizer(config: Cascade, tokenizer: Any, where: str) -> Cascade:
    """The same with the large model's tokenizer. Raises Unsupported where it names one of other tokens."""
    from fastspec.models import token_table
    from fastspec.patches.cascade.stages import load_tokenizer

    if config.tokenizer is not None and token_table(load_tokenizer(config.tokenizer)) != token_table(tokenizer):
        raise Unsupported(
            f"{where}: tokenizer={config.tokenizer!r} has other tokens than the large model: name that model's, or "
            "leave it out, and the model's own is taken"
        )
    return replace(config, tokenizer=tokenizer)


def settings_of(config: Cascade) -> dict[str, Any]:
    """Settings that answers of a cascade depend on, as plain data."""
    stages = {stage.label: str(stage.model) for stage in config.stages}
    if config.mode != "adaptive":
        return {"stages": stages, "mode": config.mode, "rule": config.rule, "alpha": config.alpha}
    held = {name: getattr(config, name) for name in ("label", "price", "costs", "thresholds", "risk")}
    told = {name: value for name, value in held.items() if value is not None}
    return {"stages": stages, "predictor": str(config.predictor), **told}
