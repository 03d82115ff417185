"""What a chat patches its model with: the heads, draft models and cascades that its settings name."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import fastspec
from fastspec.devices import use_device
from fastspec.errors import Unsupported
from fastspec.programs.chat.settings import Settings


def resource_names() -> list[str]:
    """The assistants that `fastspec.patch` takes a resource for."""
    others = ("model", "assistant", "backend")
    return [name for name in inspect.signature(fastspec.patch).parameters if name not in others]


def load(settings: Settings) -> tuple[Any, Any]:
    """The settings' model, patched, and its tokenizer; bf16 on CUDA, fp32 on the CPU."""
    from fastspec.models import load_model

    model, tokenizer = load_model(settings.model, use_device(settings.device))
    return fastspec.patch(model, **read_resources(settings, model, tokenizer), backend=settings.backend), tokenizer


def read_resources(settings: Settings, model: Any, tokenizer: Any) -> dict[str, Any]:
    """Resources for `fastspec.patch`: draft models are loaded, and cascades read. Raises Unsupported for an assistant
    that takes none, and for what cannot be read."""
    from fastspec.models import load_draft

    given: dict[str, Any] = dict(settings.resources)
    for name, source in settings.resources:
        if name not in resource_names():
            raise Unsupported(f"{name!r} takes no resource: accepted are {', '.join(resource_names())}")
        if name == "speculative":
            given[name] = load_draft(source, model, tokenizer)
        if name == fastspec.Cascade.name:
            given[name] = _read_cascade(source, tokenizer)
    return given


def _read_cascade(path: str, tokenizer: Any) -> fastspec.Cascade:
    from fastspec.models import token_table
    from fastspec.patches.cascade.stages import load_tokenizer

    config = fastspec.Cascade.from_yaml(path)
    if config.tokenizer is not None and token_table(load_tokenizer(config.tokenizer)) != token_table(tokenizer):
        raise Unsupported(
            f"{path}: tokenizer={config.tokenizer!r} has other tokens than the chat's model: name that model's, or "
            "leave it out, and the chat's own is taken"
        )
    return replace(config, tokenizer=tokenizer, explain=False)  # the chat itself shows the decisions


def forget_cascade(model: Any) -> None:
    """Drop the keys and values that the stages of a model's cascade keep between calls, where they keep any."""
    from fastspec.patches.api import cascade_of

    models = cascade_of(model)
    if models is not None and models.memory is not None:
        models.memory.clear()


def new_storage(config: fastspec.Nasd) -> Any:
    """An empty storage, as `fastspec.Nasd` of this kind and n gives one to every call."""
    n = config.n
    if config.storage == "suffix":
        return fastspec.SuffixStorage() if n is None else fastspec.SuffixStorage(max_match=n - 1)
    if config.storage == "one_level":
        return fastspec.NgramStorage(3 if n is None else n, back_off=False)
    return fastspec.NgramStorage() if n is None else fastspec.NgramStorage(n)
