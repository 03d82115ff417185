"""What a request may ask for: its fields are checked before transformers reads them, and what would be ignored is
refused."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from fastapi import HTTPException
from transformers import GenerationConfig

from fastspec.programs.serving.batch import Sent

Body = dict[str, Any]
GREEDY_BELOW = 1e-6
"""Below this temperature answers are greedy, as they are at 0."""
STOP_LENGTH = 256
"""Characters of a request's stop strings: transformers compares each with every token of the vocabulary first."""
TEXT = {"type": "text"}
KNOWN = frozenset(name for name in GenerationConfig().to_dict() if name[0] != "_") - {"transformers_version"}
"""Settings of transformers' GenerationConfig."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a server takes: new tokens of an answer, requests that wait for a row, and bytes of a body, each at most."""

    tokens: int = 4096
    queue: int = 64
    body: int = 1 << 20


@dataclass(slots=True)
class RequestSettings:
    """What a request asks for beside its generation_config."""

    request_id: str
    seed: int | None
    limited: bool
    """Whether it says how many new tokens it wants."""
    stop: tuple[str, ...] = ()
    arrived: float = field(default_factory=time.perf_counter)
    criterion: Any = None
    """What the stop strings come to."""
    sent: Sent | None = None
    """Once the batch has the prompt."""


ASKED: ContextVar[RequestSettings] = ContextVar("fastspec_asked")
"""Of the request that is being answered."""


def refuse(message: str, status: int = 400) -> HTTPException:
    """The error of a request that is not answered."""
    return HTTPException(status_code=status, detail=message)


def _whole(low: int, high: int = 2**63 - 1) -> tuple[Callable[[Any], bool], str]:
    said = f"{low}" if low == high else f"a whole number from {low} on"
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high, said


def _number(low: float, high: float) -> tuple[Callable[[Any], bool], str]:
    def accepts(value: Any) -> bool:
        return (
            isinstance(value, (int, float))
            and not isinstance(value, bool)
            and math.isfinite(value)
            and low <= value <= high
        )

    return accepts, f"{low:g}" if low == high else f"a number from {low:g} to {high:g}"


def _is_stop(value: Any) -> bool:
    found = [value] if isinstance(value, str) else value
    fits = isinstance(found, list) and 0 < len(found) <= 16 and all(isinstance(each, str) and each for each in found)
    return fits and sum(map(len, found)) <= STOP_LENGTH


def _is_conversation(value: Any) -> bool:
    return (
        isinstance(value, list) and bool(value) and all(isinstance(each, dict) and _is_message(each) for each in value)
    )


def _is_message(value: Body) -> bool:
    calls = value.get("tool_calls", [])
    called = isinstance(calls, list) and all(map(_is_call, calls))
    return isinstance(value.get("role"), str) and _is_content(value.get("content")) and called


def _is_content(value: Any) -> bool:
    return value is None or isinstance(value, str) or (isinstance(value, list) and all(map(_is_text, value)))


def _is_text(part: Any) -> bool:
    return (
        isinstance(part, dict)
        and part.get("type") in ("text", "input_text", "output_text")
        and isinstance(part.get("text"), str)
    )


def _is_call(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("function"), dict)


def _is_input(value: Any) -> bool:
    """Of `/v1/responses`: a text, parts of text, or messages with calls of tools and what these gave between them."""
    if not isinstance(value, list):
        return isinstance(value, str)
    return (
        bool(value)
        and all(isinstance(each, dict) for each in value)
        and (all(map(_is_text, value)) or all(map(_is_item, value)))
    )


def _is_item(value: Body) -> bool:
    if "role" in value:
        return _is_message(value)
    needs = {"function_call": ("call_id", "name", "arguments"), "function_call_output": ("call_id", "output")}.get(
        value.get("type", "")
    )
    return value.get("type") == "reasoning" or (
        needs is not None and all(isinstance(value.get(name), str) for name in needs)
    )


def _is_tool(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "function"


def _is_bias(value: Any) -> bool:
    numbers = isinstance(value, dict) and all(name.isascii() and name.isdecimal() for name in value)
    return numbers and all(map(_number(-100, 100)[0], value.values()))


def _nothing(instead: str = "") -> tuple[Callable[[Any], bool], str]:
    """What would be ignored."""
    return lambda value: not value, f"left out{instead}"


ACCEPTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    **{name: _whole(1) for name in ("max_tokens", "max_completion_tokens", "max_output_tokens")},
    "seed": _whole(-(2**63)),
    "temperature": _number(0, 100),
    "top_p": _number(1e-6, 1),
    "frequency_penalty": _number(-0.99, 100),
    "logit_bias": (_is_bias, "an object of token numbers and what is added to their scores, -100 to 100"),
    "stop": (_is_stop, f"a text or up to 16 of them, none empty, of {STOP_LENGTH} characters together"),
    "stream": (lambda value: isinstance(value, bool), "true or false"),
    "messages": (_is_conversation, "a list of objects with role and content, a text or parts of type text"),
    "input": (_is_input, "a text, or a list of messages, texts and calls of functions"),
    "instructions": (lambda value: isinstance(value, str), "a text"),
    "n": _whole(1, 1),
    "best_of": _whole(1, 1),
    "chat_template_kwargs": (lambda value: isinstance(value, dict), "an object"),
    "tools": (lambda value: isinstance(value, list) and all(map(_is_tool, value)), "a list of tools of type function"),
    "tool_choice": (lambda value: value in ("auto", "none"), '"auto" or "none"'),
    "response_format": (lambda value: isinstance(value, dict) and value.get("type") == "text", 'of type "text"'),
    "text": (lambda value: isinstance(value, dict) and value.get("format", TEXT) == TEXT, 'of format "text"'),
    "modalities": (lambda value: value == ["text"], '["text"]'),
    "truncation": (lambda value: value == "disabled", '"disabled"'),
    "presence_penalty": _number(0, 0),
    "functions": _nothing(": tools are"),
    "function_call": _nothing(": tool_choice is"),
    "reasoning_effort": _nothing(": chat_template_kwargs tells the model's template"),
    "reasoning": _nothing(": chat_template_kwargs tells the model's template"),
    **{
        name: _nothing()
        for name in (
            "logprobs",
            "top_logprobs",
            "echo",
            "audio",
            "web_search_options",
            "include",
            "background",
            "previous_response_id",
            "conversation",
            "max_tool_calls",
            "suffix",
        )
    },
}
"""Fields -> what they may hold where they are given, and how that is said. The rest is transformers' to check."""
OWN: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_new_tokens": _whole(1),
    "max_length": _whole(1),
    "min_new_tokens": _whole(0),
    "min_length": _whole(0),
    "top_k": _whole(0),
    "max_time": _number(0, math.inf),
    "temperature": _number(0, 100),
    "top_p": _number(0, 1),
    "min_p": _number(0, 1),
    "typical_p": _number(0, 1),
    "epsilon_cutoff": _number(0, 1),
    "eta_cutoff": _number(0, 1),
    "repetition_penalty": _number(0, math.inf),
    "no_repeat_ngram_size": _whole(0),
    "stop_strings": (_is_stop, ACCEPTED["stop"][1]),
}
"""The same of a generation_config's settings, as far as transformers does not find out in time."""
OF_TOKENS = (
    "suppress_tokens",
    "begin_suppress_tokens",
    "bad_words_ids",
    "sequence_bias",
    "forced_bos_token_id",
    "forced_eos_token_id",
)
"""Settings that name tokens whose scores are changed, which must be there."""
PROMPT = {
    "messages": _nothing(": messages are"),
    "input": _nothing(": input is"),
    "prompt": (lambda value: isinstance(value, str), "one text"),
}
"""What `prompt` may hold beside the field that a route needs."""


def read(body: Body, request_id: str, limits: Limits, needs: str) -> RequestSettings:
    """Check a request's body, which must have the field `needs`, and no field that is null. Raises HTTPException (400)
    that names it."""
    if needs not in body:
        raise refuse(f"{needs} is missing")
    for name, (accepts, said) in {**ACCEPTED, "prompt": PROMPT[needs]}.items():
        if name in body and not accepts(body[name]):
            raise refuse(f"{name}={str(body[name])[:80]!r} is not accepted: it must be {said}")
    own = _settings(body["generation_config"]) if "generation_config" in body else {}
    counts = [body[name] for name in ("max_tokens", "max_completion_tokens", "max_output_tokens") if name in body]
    if counts and max(counts) > limits.tokens:
        raise too_many(max(counts), limits)
    limited = bool(counts) or own.get("max_new_tokens", own.get("max_length")) is not None
    stop = body.get("stop", own.get("stop_strings")) or ()
    return RequestSettings(request_id, body.get("seed"), limited, (stop,) if isinstance(stop, str) else tuple(stop))


def texts_of(body: Body) -> list[str]:
    """The texts that a request's prompt is made of, those of earlier answers left out, of which templates may drop a
    part."""
    found: list[Any] = [body.get("prompt"), body.get("instructions")]
    for part in (body.get("messages"), body.get("input")):
        for each in part if isinstance(part, list) else [part]:
            content = (
                each if not isinstance(each, dict) or each.get("role") == "assistant" else each.get("content", each)
            )
            found += content if isinstance(content, list) else [content]
    return [
        text
        for text in (each.get("text") if isinstance(each, dict) else each for each in found)
        if isinstance(text, str)
    ]


def tokens_of(name: str, value: Any) -> list[int]:
    """The token numbers in a setting of a generation_config: a number, a list of them or of lists of them; of
    `sequence_bias` also a mapping of tuples, or lists of numbers and a bias. Raises HTTPException (400) for what is
    none of these."""
    if value is None:
        return []
    if name == "sequence_bias":
        pairs = value.items() if isinstance(value, dict) else value
        if not isinstance(value, (dict, list)) or not all(
            isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs
        ):
            raise refuse(f"{name} of generation_config must be a list of lists of token numbers, each with a bias")
        value = [pair[0] for pair in pairs]
    left, found = [value], []
    while left:
        each = left.pop()
        if isinstance(each, (list, tuple)):
            left += each
        elif isinstance(each, int) and not isinstance(each, bool):
            found.append(each)
        else:
            raise refuse(f"{name} of generation_config must be token numbers, not {str(each)[:80]!r}")
    return found


def too_many(count: int, limits: Limits) -> HTTPException:
    """The error of a request for a longer answer than the server gives."""
    return refuse(f"{count} new tokens are asked for, and this server gives at most {limits.tokens}")


def _settings(text: Any) -> Body:
    """The settings of a generation_config by name. Raises HTTPException (400) for what is none, and for names that
    transformers does not know, which it would ignore."""
    try:
        found = json.loads(text, parse_constant=_no_number) if isinstance(text, str) else None
    except ValueError as error:
        raise refuse(f"generation_config is no JSON text: {error}") from error
    if not isinstance(found, dict):
        raise refuse('generation_config must be a JSON text of an object, {"max_new_tokens": 64} in quotes')
    unknown = [name for name in found if name not in KNOWN]
    if unknown:
        raise refuse(f"generation_config has {unknown[0]!r}, which transformers' GenerationConfig does not know")
    for name, (accepts, said) in OWN.items():
        if found.get(name) is not None and not accepts(found[name]):
            raise refuse(f"{name} of generation_config must be {said}")
    return found


def _no_number(word: str) -> Any:
    """JSON has no NaN and no infinity; Python's reader takes them."""
    raise ValueError(f"{word} is no number of JSON")
