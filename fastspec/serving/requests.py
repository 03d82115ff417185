"""What a request may ask for: its fields are checked before transformers reads them, and what would be ignored is refused."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from fastapi import HTTPException

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a server takes: new tokens of an answer, requests that wait for a row, and bytes of a body, each at most."""

    tokens: int = 4096
    queue: int = 64
    body: int = 1 << 20


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks for beside its generation_config."""

    request_id: str
    seed: int | None
    limited: bool
    """Whether it says how many tokens it wants."""
    arrived: float = field(default_factory=time.perf_counter)


ASKED: ContextVar[Asked] = ContextVar("fastspec_asked")
"""Of the request that is being answered."""


def refuse(message: str, status: int = 400) -> HTTPException:
    """The error of a request that is not answered."""
    return HTTPException(status_code=status, detail=message)


def _whole(low: int, high: int = 2**63 - 1) -> tuple[Callable[[Any], bool], str]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high, f"a whole number from {low} on"


def _number(low: float, high: float) -> tuple[Callable[[Any], bool], str]:
    def accepts(value: Any) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and low <= value <= high

    return accepts, f"a number from {low:g} to {high:g}"


def _is_stop(value: Any) -> bool:
    found = [value] if isinstance(value, str) else value
    return isinstance(found, list) and 0 < len(found) <= 16 and all(isinstance(each, str) and each for each in found)


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_message, value))


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    content = value.get("content")
    return content is None or isinstance(content, str) or (
        isinstance(content, list) and all(isinstance(part, dict) and _is_text(part) for part in content)
    )  # fmt: skip


def _is_text(part: Body) -> bool:
    return part.get("type") in ("text", "input_text", "output_text") and isinstance(part.get("text"), str)


ACCEPTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    **{name: _whole(1) for name in ("max_tokens", "max_completion_tokens", "max_output_tokens")},
    "seed": _whole(-(2**63)), "temperature": _number(0, 100), "top_p": _number(1e-6, 1), "frequency_penalty": _number(-0.99, 100),
    "stop": (_is_stop, "a text or up to 16 of them, none empty"), "stream": (lambda value: isinstance(value, bool), "true or false"),
    "messages": (_is_conversation, "a list of objects with role and content, a text or parts of type text"),
    "prompt": (lambda value: isinstance(value, str), "one text"), "n": _whole(1, 1), "best_of": _whole(1, 1),
    "logprobs": (lambda value: value is False, "false"), "echo": (lambda value: value is False, "false"),
    "presence_penalty": _number(0, 0),
    "response_format": (lambda value: isinstance(value, dict) and value.get("type") == "text", 'of type "text"'),
    "tool_choice": (lambda value: value in ("auto", "none"), '"auto" or "none"'),
    "functions": (lambda value: not value, "left out: tools are"), "modalities": (lambda value: value == ["text"], '["text"]'),
}  # fmt: skip
"""Fields -> what they may hold where they are given, and how that is said. The rest is transformers' to check."""


def read(body: Body, request_id: str, limits: Limits, needs: str) -> Asked:
    """Check a request's body, which must have the field `needs`. Raises HTTPException (400) that names the field."""
    if body.get(needs) is None:
        raise refuse(f"{needs} is missing")
    for name, (accepts, said) in ACCEPTED.items():
        if body.get(name) is not None and not accepts(body[name]):
            raise refuse(f"{name}={str(body[name])[:80]!r} is not accepted: it must be {said}")
    counts = [body[name] for name in ("max_tokens", "max_completion_tokens", "max_output_tokens") if body.get(name) is not None]
    if counts and max(counts) > limits.tokens:
        raise refuse(f"{max(counts)} new tokens are asked for, and this server gives at most {limits.tokens}")
    return Asked(request_id, body.get("seed"), bool(counts) or body.get("generation_config") is not None)
