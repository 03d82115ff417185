"""Questions that programs ask about a patched model."""

from __future__ import annotations

from typing import Any

from fastspec.cascade.config import Cascade
from fastspec.generation.heads.bound import BoundHead
from fastspec.patches.assistants.registry import NAMES, resolve
from fastspec.patches.cascade.loop import CascadeModels
from fastspec.patches.session import session_of

ASSISTANTS = tuple(NAMES)
"""Names of the assistants that come with fastspec."""


def is_patched(model: Any) -> bool:
    """True between `fastspec.patch(model)` and `fastspec.unpatch(model)`."""
    return session_of(model) is not None


def resources_of(model: Any) -> dict[str, Any]:
    """The arguments of `fastspec.patch` that would patch a model as it is; empty for an unpatched model."""
    session = session_of(model)
    if session is None:
        return {}
    given = {name: held.as_module() if isinstance(held, BoundHead) else held for name, held in session.resources.items()}
    models = cascade_of(model)
    return given | {"backend": session.backend} | ({} if models is None else {Cascade.name: models.config})


def cascade_of(model: Any) -> CascadeModels | None:
    """The stages of the cascade that a model was patched with, or None."""
    session = session_of(model)
    return None if session is None else session.resources.get(Cascade.name)


def check_assistant(assistant: Any, model: Any) -> None:
    """Raise Unsupported where a model's `generate` could not have an assistant: a name, a config or an object."""
    session = session_of(model)
    resolve(assistant, {} if session is None else session.resources, model)


def has_resource(name: str, model: Any) -> bool:
    """True where a model was patched with what the assistant of this name needs."""
    session = session_of(model)
    return session is not None and name in session.resources
