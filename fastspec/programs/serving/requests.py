"""Requests: which fields a route takes and what they may hold, and the conversation and settings that they come to.

A field that would change an answer and is not heeded is refused by name.
"""

from __future__ import annotations

import copy
import inspect
import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params
from transformers import GenerationConfig, PreTrainedTokenizerBase

from fastspec.errors import Unsupported
from fastspec.files import parse_json
from fastspec.programs.texts import TEXT_PARTS, as_messages

Body = dict[str, Any]
Check = tuple[Callable[[Any], bool], str]
"""Whether a field may hold a value, and what it may hold in words."""
GREEDY_BELOW = 1e-6
"""Below this temperature answers are greedy, as they are at 0."""
STOP_LENGTH = 256
"""Characters of a request's stop strings: transformers compares each with every token of the vocabulary first."""
SEQUENCES = 1024
"""Sequences of tokens in a setting: the scores of each are looked up at every token."""
NEW_TOKENS = 1024
"""New tokens at most where a request does not say how many."""
TEXT = {"type": "text"}
TEMPLATES_OWN = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
"""What `apply_chat_template` takes itself; other names are variables of the template."""
LENGTHS = "max_output_tokens", "max_tokens", "max_completion_tokens"
"""Fields for the new tokens at most; the last one counts."""


class Refused(Exception):
    """A request that is not answered: what it is told, and how."""

    def __init__(
        self, message: str, status: int = 400, code: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers


@dataclass(frozen=True, slots=True)
class Limits:
    """What a server takes: new tokens of an answer, requests that wait for a row, and bytes of a body, each at most."""

    tokens: int = 4096
    queue: int = 64
    body: int = 1 << 20


@dataclass(frozen=True, slots=True)
class Route:
    """What a route needs, and the fields that it has."""

    needs: str
    fields: frozenset[str]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was read: the text that it goes on from, or the conversation with the tools and variables of the
    model's template, and how the answer is to be made and given."""

    request_id: str
    prompt: str | None
    messages: list[Body]
    tools: list[Body] | None
    variables: Body
    config: GenerationConfig
    seed: int | None
    stop: tuple[str, ...]
    limited: bool
    """Whether it says how many new tokens it wants."""
    stream: bool
    usage: bool | None
    """Whether a stream ends with a chunk of the counts alone; None where it does not say."""
    arrived: float = field(default_factory=time.perf_counter)


def _route(needs: str, params: Any, *more: str) -> Route:
    return Route(needs, frozenset(params.__annotations__) | {"generation_config", "seed", *more})


CHAT = _route("messages", chat_params.CompletionCreateParamsStreaming, "chat_template_kwargs")
COMPLETION = _route("prompt", completion_params.CompletionCreateParamsStreaming)
RESPONSE = _route("input", response_params.ResponseCreateParamsStreaming, "chat_template_kwargs")

# --- what fields may hold


def _whole(low: int, high: int = 2**63 - 1) -> Check:
    said = f"{low}" if low == high else f"a whole number from {low} on" + (f" to {high}" if high < 2**62 else "")
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high, said


def _number(low: float, high: float) -> Check:
    def accepts(value: Any) -> bool:
        numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
        return numeric and math.isfinite(value) and low <= value <= high

    return accepts, f"{low:g}" if low == high else f"a number from {low:g} to {high:g}"


def _instance(kind: type, said: str) -> Check:
    return lambda value: isinstance(value, kind), said


def _one_of(*values: Any) -> Check:
    return lambda value: value in values, " or ".join(map(repr, values))


def _nothing(instead: str = "") -> Check:
    """What would be ignored."""
    return lambda value: not value, f"left out{instead}"


def _is_stop(value: Any) -> bool:
    found = [value] if isinstance(value, str) else value
    fits = isinstance(found, list) and len(found) <= 16 and all(isinstance(each, str) and each for each in found)
    return fits and sum(map(len, found)) <= STOP_LENGTH


def _is_bias(value: Any) -> bool:
    numbers = isinstance(value, dict) and all(name.isascii() and name.isdecimal() for name in value)
    return numbers and len(value) <= SEQUENCES and all(map(_number(-100, 100)[0], value.values()))


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in TEXT_PARTS and isinstance(part.get("text"), str)


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_message, value))


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


CALLS = {"function_call": ("call_id", "name", "arguments"), "function_call_output": ("call_id",)}
"""Items of `/v1/responses` for calls of tools and what these gave, and the texts that they need."""


def _is_item(value: Body) -> bool:
    if "role" in value:
        return _is_message(value)
    needs = CALLS.get(value.get("type", ""))
    return value.get("type") == "reasoning" or (
        needs is not None and all(isinstance(value.get(name), str) for name in needs)
    )


def _is_input(value: Any) -> bool:
    """A text, parts of text, or messages with calls of tools and what these gave between them."""
    if not isinstance(value, list):
        return isinstance(value, str)
    objects = bool(value) and all(isinstance(each, dict) for each in value)
    return objects and (all(map(_is_text, value)) or all(map(_is_item, value)))


def _is_tools(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_tool, value))


def _is_tool(value: Any) -> bool:
    if not isinstance(value, dict) or value.get("type") != "function":
        return False
    function = value.get("function", value)
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _is_text_format(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.get("format") in (None, TEXT)
        and value.get("verbosity") in (None, "medium")
        and not value.keys() - {"format", "verbosity"}
    )


def _is_stream_options(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(each, bool) for each in value.values())


TEMPLATED = ": chat_template_kwargs tells the model's template"
STOP: Check = (_is_stop, f"a text or up to 16 of them, none empty, of {STOP_LENGTH} characters together")
TRUTH = _instance(bool, "true or false")
ANY: Check = (lambda value: True, "")
ACCEPTED: dict[str, Check] = {
    **dict.fromkeys(LENGTHS, _whole(1)),
    "seed": _whole(-(2**63)),
    "temperature": _number(0, 100),
    "top_p": _number(1e-6, 1),
    "frequency_penalty": _number(-0.99, 100),
    "presence_penalty": _number(0, 0),
    "logit_bias": (
        _is_bias,
        f"an object of up to {SEQUENCES} token numbers and what is added to their scores, -100 to 100",
    ),
    "stop": STOP,
    "stream": TRUTH,
    "stream_options": (_is_stream_options, "an object of true and false"),
    "messages": (_is_conversation, "a list of objects with role and content, a text or parts of type text"),
    "prompt": _instance(str, "one text"),
    "input": (_is_input, "a text, or a list of messages, texts and calls of functions"),
    "instructions": _instance(str, "a text"),
    "n": _whole(1, 1),
    "best_of": _whole(1, 1),
    "chat_template_kwargs": _instance(dict, "an object"),
    "generation_config": _instance(str, 'a JSON text of an object, {"max_new_tokens": 64} in quotes'),
    "tools": (_is_tools, "a list of tools of type function, each with a name"),
    "tool_choice": _one_of("auto", "none"),
    "parallel_tool_calls": (lambda value: value is True, "true"),
    "response_format": _one_of(TEXT),
    "text": (_is_text_format, 'of format "text" and of verbosity "medium"'),
    "verbosity": _one_of("medium"),
    "modalities": _one_of(["text"]),
    "truncation": _one_of("disabled"),
    "functions": _nothing(": tools are"),
    "function_call": _nothing(": tool_choice is"),
    "reasoning_effort": _nothing(TEMPLATED),
    "reasoning": _nothing(TEMPLATED),
    **dict.fromkeys(
        (
            *("model", "metadata", "user", "store", "service_tier", "safety_identifier"),
            *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        ),
        ANY,
    ),
}
"""Fields -> what they may hold where they are given; a route's other fields must be left out, or hold nothing."""


# --- settings of a generation_config


def tokens_of(value: Any) -> list[int]:
    """The token numbers in a setting: a number, a list of them or of lists of them. Raises ValueError for what is none
    of these."""
    found: list[int] = []
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, list):
            found += tokens_of(each)
        elif isinstance(each, int) and not isinstance(each, bool):
            found.append(each)
        else:
            raise ValueError(f"must be token numbers, not {str(each)[:80]!r}")
    return found


def _are_tokens(value: Any) -> bool:
    try:
        return len(tokens_of(value)) >= 0
    except ValueError:
        return False


def _are_sequences(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= SEQUENCES and all(isinstance(each, list) for each in value)


def _is_sequence_bias(value: Any) -> bool:
    pairs = _are_sequences(value) and all(len(each) == 2 and isinstance(each[0], list) for each in value)
    return pairs and all(_number(-math.inf, math.inf)[0](each[1]) for each in value)


def _is_decay(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and _whole(0)[0](value[0]) and _number(0, 100)[0](value[1])


TOKENS: Check = (_are_tokens, "token numbers")
SETTINGS: dict[str, Check] = {
    **dict.fromkeys(("max_new_tokens", "max_length"), _whole(1)),
    **dict.fromkeys(("min_new_tokens", "min_length", "top_k"), _whole(0)),
    **dict.fromkeys(("do_sample", "renormalize_logits", "remove_invalid_values"), TRUTH),
    **dict.fromkeys(("top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"), _number(0, 1)),
    **dict.fromkeys(("eos_token_id", "pad_token_id", "bos_token_id"), TOKENS),
    "max_time": _number(0, math.inf),
    "temperature": _number(0, 100),
    "repetition_penalty": _number(0, math.inf),
    "no_repeat_ngram_size": _whole(0, 64),
    "exponential_decay_length_penalty": (_is_decay, "a list of a token's place and a factor up to 100"),
    "stop_strings": STOP,
    "bad_words_ids": (_are_sequences, f"a list of up to {SEQUENCES} lists of token numbers"),
    "sequence_bias": (
        _is_sequence_bias,
        f"a list of up to {SEQUENCES} lists, each of a list of token numbers with a bias",
    ),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"), TOKENS),
}
"""Settings of a generation_config that are heeded, and what they may hold; they may be null too."""
NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), 1),
    **dict.fromkeys(("length_penalty", "encoder_repetition_penalty", "guidance_scale"), 1.0),
    "use_cache": True,
}
"""Settings that are not heeded -> the value that changes nothing, besides null, false and 0."""
KNOWN = frozenset(name for name in GenerationConfig().to_dict() if name[0] != "_")
"""Settings of transformers' GenerationConfig."""
OF_TOKENS = "suppress_tokens begin_suppress_tokens bad_words_ids sequence_bias forced_bos_token_id forced_eos_token_id"
"""Settings that name tokens whose scores are changed, which must be there."""


def parse(text: str) -> Any:
    """What a JSON text holds. Raises ValueError for what is no JSON, is nested too deep, or has half of a character,
    which JSON may name and no tokenizer takes."""
    found = parse_json(text)
    if "\\u" in text:
        json.dumps(found, ensure_ascii=False).encode()
    return found


def settings_of(text: str, size: int) -> Body:
    """The settings of a generation_config by name, for a vocabulary of so many tokens. Raises Refused for what is none,
    for names that transformers does not know, and for those that are not heeded."""
    try:
        found = parse(text)
    except ValueError as error:
        raise Refused(f"generation_config is no JSON text: {error}") from error
    if not isinstance(found, dict):
        raise Refused(f"generation_config must be {ACCEPTED['generation_config'][1]}")
    for name, value in found.items():
        if name not in KNOWN:
            raise Refused(f"generation_config has {name!r}, which transformers' GenerationConfig does not know")
        if name not in SETTINGS and name != "transformers_version" and value and value != NEUTRAL.get(name):
            raise Refused(f"{name} of generation_config is not heeded: it must be left out")
        if name in SETTINGS and value is not None:
            _check_setting(name, value, size)
    return {name: value for name, value in found.items() if name in SETTINGS}


def _check_setting(name: str, value: Any, size: int) -> None:
    accepts, said = SETTINGS[name]
    if not accepts(value):
        raise Refused(f"{name} of generation_config must be {said}, not {str(value)[:80]!r}")
    if name in OF_TOKENS.split():
        named = [each[0] for each in value] if name == "sequence_bias" else value
        try:
            _check_tokens(f"{name} of generation_config", tokens_of(named), size)
        except ValueError as error:
            raise Refused(f"{name} of generation_config {error}") from error


def _check_tokens(said: str, tokens: Iterable[int], size: int) -> None:
    if not all(0 <= token < size for token in tokens):
        raise Refused(f"{said} names a token that the model has not: its tokens are 0 to {size - 1}")


def config_of(body: Body, settings: Body | None, model: Any) -> GenerationConfig:
    """The settings of a checked request, where it says nothing those of the model; `settings` are those of its
    generation_config."""
    if settings is not None:
        try:
            config = GenerationConfig(**settings)
        except (ValueError, TypeError) as error:
            raise Refused(f"generation_config: {error}") from error
    else:
        config = copy.deepcopy(model.generation_config)
        config.max_new_tokens = max(NEW_TOKENS, config.max_new_tokens or 0)
    for name in LENGTHS:
        config.max_new_tokens = body.get(name, config.max_new_tokens)
    if "temperature" in body:
        config.do_sample, config.temperature = body["temperature"] >= GREEDY_BELOW, float(body["temperature"])
    if "top_p" in body:
        config.top_p = float(body["top_p"])
    if "frequency_penalty" in body:
        config.repetition_penalty = 1.0 + body["frequency_penalty"]
    if "logit_bias" in body:
        config.sequence_bias = {(int(token),): float(bias) for token, bias in body["logit_bias"].items()}
    stop = body.get("stop", config.stop_strings) or []
    config.stop_strings = [stop] if isinstance(stop, str) else stop or None
    if not config.do_sample:  # the defaults, which stand for "not given"
        config.temperature, config.top_p, config.top_k = 1.0, 1.0, 50
    return config


# --- a request


def read(body: Body, route: Route, request_id: str, limits: Limits, model_name: str, model: Any) -> Asked:
    """Read a request for the model of this name. Raises Refused for what cannot be answered, which it names."""
    empty = [name for name in ("stop", "logit_bias") if body.get(name) in ([], {})]
    body = {name: value for name, value in body.items() if value is not None and name not in empty}
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:  # as some clients send it
        body["prompt"] = prompt[0]
    _check(body, route)
    if body.get("model", model_name) != model_name:
        message = f"the model {body['model']!r} does not exist: this server has {model_name!r}"
        raise Refused(message, 404, "model_not_found")
    variables = body.get("chat_template_kwargs", {})
    taken = [each for each in variables if each in TEMPLATES_OWN]
    if taken:
        raise Refused(f"chat_template_kwargs has {taken[0]!r}, which is no variable of the model's template")
    size = model.config.get_text_config().vocab_size
    _check_tokens("logit_bias", map(int, body.get("logit_bias", ())), size)
    settings = settings_of(body["generation_config"], size) if "generation_config" in body else None
    config = config_of(body, settings, model)
    said = {name: value for name, value in {**(settings or {}), **body}.items() if value is not None}
    limited = not said.keys().isdisjoint((*LENGTHS, "max_new_tokens", "max_length"))
    if limited and (config.max_new_tokens or 0) > limits.tokens:
        raise too_many(config.max_new_tokens, limits)
    tools = body.get("tools") if body.get("tool_choice") != "none" else None
    try:
        messages = [] if route is COMPLETION else as_messages(_conversation(body))
    except Unsupported as error:
        raise Refused(str(error)) from error
    return Asked(
        request_id,
        body["prompt"] if route is COMPLETION else None,
        messages,
        [_nested(tool) for tool in tools] if tools else None,
        variables,
        config,
        body.get("seed"),
        tuple(config.stop_strings or ()),
        limited,
        body.get("stream", False),
        body.get("stream_options", {}).get("include_usage"),
    )


def _check(body: Body, route: Route) -> None:
    unknown = sorted(body.keys() - route.fields)
    if unknown:
        raise Refused(f"the request has fields that this route does not know: {', '.join(unknown)}", 422)
    if route.needs not in body:
        raise Refused(f"{route.needs} is missing")
    for name, value in body.items():
        accepts, said = ACCEPTED.get(name, _nothing())
        if name == "prompt" and route is not COMPLETION:
            accepts, said = _nothing(f": {route.needs} is")
        if not accepts(value):
            raise Refused(f"{name}={str(value)[:80]!r} is not accepted: it must be {said}")


def too_many(count: int, limits: Limits) -> Refused:
    """The error of a request for a longer answer than the server gives."""
    return Refused(f"{count} new tokens are asked for, and this server gives at most {limits.tokens}")


def _nested(tool: Body) -> Body:
    """A tool as templates read it, which `/v1/responses` has flat."""
    if "function" in tool:
        return tool
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _conversation(body: Body) -> list[Body]:
    """The messages of a chat, or those that the input of `/v1/responses` comes to."""
    if "messages" in body:
        found: list[Body] = body["messages"]
        return found
    given = body["input"]
    if isinstance(given, str) or all(map(_is_text, given)):
        messages = [{"role": "user", "content": given}]
    else:
        messages = _messages(given)
    if body.get("instructions"):
        messages.insert(0, {"role": "system", "content": body["instructions"]})
        if messages[1]["role"] == "system" and isinstance(messages[1].get("content"), str):
            messages[:2] = [{"role": "system", "content": f"{body['instructions']}\n\n{messages[1]['content']}"}]
    return messages


def _messages(items: list[Body]) -> list[Body]:
    """The messages of items: reasoning and calls of tools are parts of the assistant's message beside them."""
    messages: list[Body] = []
    reasoning = ""
    for item in items:
        kind = item.get("type")
        if "role" in item:
            messages.append({"role": item["role"], "content": item.get("content")})
        elif kind == "reasoning":
            parts = item.get("content") or []
            reasoning += "".join(part["text"] for part in parts if isinstance(part, dict) and "text" in part)
            continue
        elif kind == "function_call":
            call = {"id": item["call_id"], "type": "function"}
            call["function"] = {"name": item["name"], "arguments": item["arguments"]}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant"})
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item.get("output")})
        if reasoning and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"], reasoning = reasoning, ""
    return messages
