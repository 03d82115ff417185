"""Requests as routes read them: the conversation, the tools and the settings that their fields come to."""

from __future__ import annotations

import copy
import inspect
import json
import re
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
from fastspec.programs.serving import fields
from fastspec.programs.serving.fields import Check
from fastspec.programs.serving.structured import CallForm, Structure, structure_of
from fastspec.programs.texts import TEXT_PARTS, as_messages

Body = dict[str, Any]
GREEDY_BELOW = 1e-6
"""Below this temperature answers are greedy, as they are at 0."""
NEW_TOKENS = 1024
"""New tokens at most where a request does not say how many."""
NO_DRAFTS = "none", "autoregressive"
"""Assistants that a request may name beside that of the rows: then it takes no drafts."""
HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""Begins the escape of half of a character, the first or the second, in a JSON text."""
TEMPLATES_OWN = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
"""What `apply_chat_template` takes itself; other names are variables of the template."""


class Refused(Exception):
    """A request that is not answered: what it is told, and how."""

    def __init__(
        self, message: str, status: int = 400, code: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a server: new tokens of an answer, requests that wait for a row, and bytes of a body, each at most."""

    tokens: int = 4096
    queue: int = 64
    body: int = 1 << 20


@dataclass(frozen=True, slots=True)
class Route:
    """Requirements of a route, the fields that it has, and what those may hold that hold something else on other
    routes; `as_chat` makes fields of another interface those of a chat."""

    needs: tuple[str, ...]
    fields: frozenset[str]
    own: dict[str, Check] = field(hash=False)
    as_chat: Callable[[Body], Body] | None = None


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """A request that was read: the texts or tokens that it goes on from, or the conversation with the tools and
    variables of the model's template, and how its `n` answers to each are made. With `logprobs` tokens come with their
    log-probabilities and so many of the likeliest."""

    request_id: str
    prompts: tuple[str | list[int], ...]
    messages: list[Body]
    tools: list[Body] | None
    allowed: frozenset[str] | None
    """Names of the tools that an answer may call; None: any."""
    variables: Body
    config: GenerationConfig
    seed: int | None
    stop: tuple[str, ...]
    spaces: dict[str, Body]
    """Names of tools that are in a namespace, as the model knows them -> `name` and `namespace` of a call."""
    limited: bool
    """True where it says how many new tokens it wants."""
    encrypted: bool
    """True where reasoning comes in the form that clients give back."""
    parallel: bool
    """False where an answer calls one tool at most."""
    repeated: Body
    """Fields as they were given that an answer of the route of responses repeats."""
    stream: bool
    usage: bool | None
    """True where a stream ends with a chunk of the counts alone; None where it does not say."""
    structure: Structure | None
    n: int
    logprobs: int | None
    echo: bool
    frequency: float
    presence: float
    assistant: str | None
    rounds: bool
    """True where the rounds are told, with their draft trees."""
    price: float | None
    """What a bad answer of a cascade costs, in milliseconds."""
    arrived: float = field(default_factory=time.perf_counter)

    @property
    def count(self) -> int:
        """Answers in all: `n` to the first prompt, then those to the next."""
        return self.n * max(1, len(self.prompts))


SAMPLING = {
    *("seed", "top_k", "min_p", "repetition_penalty", "generation_config", "assistant", "structured_outputs"),
    "price",
}
"""Fields of all routes that OpenAI's interface does not have, or not everywhere."""


def _route(needs: str, own: dict[str, Check], params: Any, *more: str) -> Route:
    return Route((needs,), frozenset(params.__annotations__) | SAMPLING | {*more}, own)


OF_CHAT, OF_COMPLETION = chat_params.CompletionCreateParamsStreaming, completion_params.CompletionCreateParamsStreaming
OF_RESPONSE = response_params.ResponseCreateParamsStreaming
CHAT = _route("messages", fields.OF_CHATS, OF_CHAT, "chat_template_kwargs", "fastspec")
COMPLETION = _route("prompt", fields.OF_COMPLETIONS, OF_COMPLETION, "fastspec")
RESPONSE = _route("input", fields.OF_RESPONSES, OF_RESPONSE, "chat_template_kwargs", "client_metadata")


def parse(text: str) -> Any:
    """Contents of a JSON text. Raises ValueError for what is no JSON, is nested too deep, or has half of a character,
    which JSON may name and no tokenizer takes."""
    found = parse_json(text)
    if HALF.search(text):
        json.dumps(found, ensure_ascii=False).encode()
    return found


def settings_of(text: str, size: int) -> Body:
    """The settings of a generation_config by name, for a vocabulary of so many tokens. Raises Refused for what is none,
    for names that transformers does not know, and for those that are not heeded."""
    try:
        read = parse(text)
    except ValueError as error:
        raise Refused(f"generation_config is no JSON text: {error}") from error
    if not isinstance(read, dict):
        raise Refused(f"generation_config must be {fields.ACCEPTED['generation_config'][1]}")
    found: Body = {}
    for name, value in ((name, fields.as_whole(value)) for name, value in read.items()):
        if name not in fields.KNOWN:
            raise Refused(f"generation_config has {name!r}, which transformers' GenerationConfig does not know")
        if name in fields.SETTINGS:
            accepts, said = fields.SETTINGS[name]
            if value is not None and not accepts(value):
                raise Refused(f"{name} of generation_config must be {said}, not {str(value)[:80]!r}")
            if value is not None and name in fields.OF_TOKENS:
                check_tokens(f"{name} of generation_config", fields.tokens_of(name, value), size)
            found[name] = value
        elif name not in fields.HARMLESS and value and value != fields.NEUTRAL.get(name):
            raise Refused(f"{name} of generation_config is not heeded: it must be left out")
    return found


def check_tokens(said: str, tokens: Iterable[int], size: int) -> None:
    if not all(0 <= token < size for token in tokens):
        raise Refused(f"{said} names a token that the model has not: its tokens are 0 to {size - 1}")


def config_of(body: Body, settings: Body | None, model: Any) -> GenerationConfig:
    """The settings of a checked request, where it says nothing those of the model; `settings` are those of its
    generation_config."""
    if settings is None:
        config = copy.deepcopy(model.generation_config)
        config.max_new_tokens = max(NEW_TOKENS, config.max_new_tokens or 0)
    else:
        try:
            config = GenerationConfig(**settings)
        except (ValueError, TypeError) as error:
            raise Refused(f"generation_config: {error}") from error
    for name in fields.LENGTHS:
        config.max_new_tokens = body.get(name, config.max_new_tokens)
    if "temperature" in body:
        config.do_sample, config.temperature = body["temperature"] >= GREEDY_BELOW, float(body["temperature"])
    for name in ("top_p", "min_p", "repetition_penalty"):
        if name in body:
            setattr(config, name, float(body[name]))
    if "top_k" in body:
        config.top_k = max(0, body["top_k"])  # -1 is all, as 0 is
    if "logit_bias" in body:
        config.sequence_bias = {(int(token),): float(bias) for token, bias in body["logit_bias"].items()}
    stop = body.get("stop", config.stop_strings) or []
    config.stop_strings = [stop] if isinstance(stop, str) else stop or None
    if not config.do_sample:  # the defaults, which stand for "not given"
        config.temperature, config.top_p, config.top_k, config.min_p = 1.0, 1.0, 50, None
    return config


def read(
    body: Any,
    route: Route,
    request_id: str,
    limits: Limits,
    model_name: str,
    model: Any,
    calls: CallForm | None,
    template: str,
) -> AnswerRequest:
    """Read a request for the model of this name, which makes `calls` of tools and whose chat `template` is a text.
    Raises Refused or Unsupported for what cannot be answered, which it names."""
    body = check(body, route, model_name)
    if route.as_chat is not None:
        body, route = route.as_chat(body), CHAT
        _check(body, route)
    variables = body.get("chat_template_kwargs", {})
    taken = [each for each in variables if each in TEMPLATES_OWN]
    if taken:
        raise Refused(f"chat_template_kwargs has {taken[0]!r}, which is no variable of the model's template")
    effort = body.get("reasoning_effort") or body.get("reasoning", {}).get("effort")
    variables = {**(_effort(effort, template) if effort else {}), **variables}
    size = model.config.get_text_config().vocab_size
    check_tokens("logit_bias", map(int, body.get("logit_bias", ())), size)
    settings = settings_of(body["generation_config"], size) if "generation_config" in body else None
    config = config_of(body, settings, model)
    said = {name: value for name, value in {**(settings or {}), **body}.items() if value is not None}
    limited = not said.keys().isdisjoint((*fields.LENGTHS, "max_new_tokens", "max_length"))
    if limited and (config.max_new_tokens or 0) > limits.tokens:
        raise too_many(config.max_new_tokens, limits)
    given = body.get("tools") if body.get("tool_choice") != "none" else None
    tools, spaces = _functions(given) if given else (None, {})
    held, callable_tools = _allowed(body, tools)
    structure = structure_of(held, callable_tools, calls)
    if structure is not None:
        if "eos_token_id" in (settings or {}):
            raise Refused("eos_token_id of generation_config: an answer with a structure ends with the model's own")
        config.structure = structure.grammar  # `submit` makes a `fastspec.Grammar` of it, where the rounds are
    try:
        messages = [] if route is COMPLETION else _conversation(body)
    except Unsupported as error:
        raise Refused(str(error) if route is CHAT else f"{route.needs[0]}: {error}") from error
    prompts = _prompts(body["prompt"], size) if route is COMPLETION else ()
    if config.max_new_tokens == 0 and not body.get("echo"):
        raise Refused("max_tokens=0 is not accepted: it must be 1 or more, or with echo")
    if route is RESPONSE:
        logprobs = body.get("top_logprobs", 0 if fields.INCLUDED in body.get("include", ()) else None)
    elif "top_logprobs" in body and "logprobs" not in body:
        raise Refused("top_logprobs is not accepted without logprobs: true")
    else:
        logprobs = body.get("top_logprobs", 0) if body.get("logprobs") is True else body.get("logprobs")
    return AnswerRequest(
        request_id=request_id,
        prompts=prompts,
        messages=messages,
        tools=tools,
        allowed=None if held is body else frozenset(tool["function"]["name"] for tool in callable_tools or ()),
        variables=variables,
        config=config,
        seed=body.get("seed"),
        stop=tuple(config.stop_strings or ()),
        spaces=spaces,
        limited=limited,
        encrypted=fields.ENCRYPTED in body.get("include", ()),
        parallel=body.get("parallel_tool_calls", True),
        repeated={name: body[name] for name in fields.REPEATED if name in body},
        stream=body.get("stream", False),
        usage=body.get("stream_options", {}).get("include_usage"),
        structure=structure,
        n=body.get("n", 1),
        logprobs=logprobs,
        echo=body.get("echo", False),
        frequency=float(body.get("frequency_penalty", 0)),
        presence=float(body.get("presence_penalty", 0)),
        assistant=body.get("assistant"),
        rounds=body.get("fastspec", {}).get("rounds", False),
        price=body.get("price"),
    )


def _prompts(given: str | list[Any], size: int) -> tuple[str | list[int], ...]:
    found = (given,) if isinstance(given, str) or isinstance(given[0], int) else tuple(given)
    for each in found:
        check_tokens("prompt", () if isinstance(each, str) else each, size)
    return found


def check(body: Any, route: Route, model_name: str) -> Body:
    """The fields of a request that are given. Raises Refused for what a route does not take, and another model."""
    if not isinstance(body, dict):
        raise Refused("the body is not a JSON object")
    empty = [name for name in ("stop", "logit_bias") if body.get(name) in ([], {})]
    if body.get("logprobs") is False:
        empty += ["logprobs", *(() if body.get("top_logprobs") else ("top_logprobs",))]
    body = {name: fields.as_whole(value) for name, value in body.items() if value is not None and name not in empty}
    _check(body, route)
    if body.get("model", model_name) != model_name:
        raise unknown_model(body["model"], model_name)
    return body


def _check(body: Body, route: Route) -> None:
    unknown = sorted(body.keys() - route.fields)
    if unknown:
        raise Refused(f"the request has fields that this route does not know: {', '.join(unknown)}", 422)
    missing = [name for name in route.needs if name not in body]
    if missing:
        raise Refused(f"{missing[0]} is missing")
    for name, value in body.items():
        accepts, said = route.own.get(name) or fields.ACCEPTED.get(name, fields.nothing())
        if name == "prompt" and "prompt" not in (*route.needs, *route.own):
            accepts, said = fields.nothing(f": {route.needs[0]} is")
        if not accepts(value):
            wrong = [at for at, each in enumerate(value) if not accepts([each])] if isinstance(value, list) else []
            place, given, whole = (f"{name}[{wrong[0]}]", value[wrong[0]], name) if wrong else (name, value, "it")
            raise Refused(f"{place}={str(given)[:80]!r} is not accepted: {whole} must be {said}")


def unknown_model(name: Any, own: str) -> Refused:
    return Refused(f"the model {name!r} does not exist: this server has {own!r}", 404, "model_not_found")


def too_many(count: int, limits: Limits) -> Refused:
    return Refused(f"{count} new tokens are asked for, and this server gives at most {limits.tokens}")


def _effort(asked: str, template: str) -> Body:
    """The variable of a chat template that tells how much a model is to reason. Raises Refused where it has none."""
    name, value = ("enable_thinking", False) if asked == "none" else ("reasoning_effort", asked)
    if name not in template:
        raise Refused(
            f"the reasoning effort {asked!r} is not accepted: this model's chat template has no variable {name}. "
            "Leave it out, or name a variable of the template in chat_template_kwargs"
        )
    return {name: value}


def _spaced(space: str, name: str) -> str:
    """The name of a tool in a namespace as a model knows it, of the customary form `mcp__server__tool`."""
    return f"{space.rstrip('_')}__{name}"


def _functions(tools: list[Body]) -> tuple[list[Body], dict[str, Body]]:
    """Tools as templates read them, and the names of those in namespaces, whose description begins the first tool's."""
    found: list[Body] = []
    spaces: dict[str, Body] = {}
    for tool in tools:
        if tool.get("type") != "namespace":
            found.append(_nested(tool))
            continue
        told = tool.get("description")
        for each in tool["tools"]:
            function = _nested(each)["function"]
            name = _spaced(tool["name"], function["name"])
            spaces[name] = {"name": function["name"], "namespace": tool["name"]}
            lines = [line for line in (told, function.get("description")) if isinstance(line, str)]
            found.append(_nested({"type": "function", **function, "name": name, "description": "\n".join(lines)}))
            told = None
    return found, spaces


def _nested(tool: Body) -> Body:
    """A tool as templates read it, which `/v1/responses` has flat."""
    if "function" in tool:
        return tool
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _allowed(body: Body, tools: list[Body] | None) -> tuple[Body, list[Body] | None]:
    """A request whose choice allows some of its tools as one that has no others, and these; any other as it is. Raises
    Refused for a tool that is not there."""
    choice = body.get("tool_choice")
    if not isinstance(choice, dict) or choice["type"] != "allowed_tools":
        return body, tools
    held, found = choice.get("allowed_tools", choice), {tool["function"]["name"]: tool for tool in tools or ()}
    names = dict.fromkeys(tool.get("function", tool)["name"] for tool in held["tools"])
    for name in names:
        if name not in found:
            raise Refused(f"tool_choice allows the tool {name!r}, which is none of tools")
    return {**body, "tool_choice": held["mode"]}, [found[name] for name in names]


def _conversation(body: Body) -> list[Body]:
    """The messages of a chat, or those that the input of `/v1/responses` comes to."""
    if "messages" in body:
        return as_messages(body["messages"])
    given = body["input"]
    if isinstance(given, str) or all(item.get("type") in TEXT_PARTS for item in given):
        messages = as_messages([{"role": "user", "content": given}])
    else:
        messages = as_messages(_messages(given))
    if body.get("instructions"):
        first = [message["content"] for message in messages[:1] if message["role"] == "system"]
        messages[: len(first)] = [{"role": "system", "content": "\n\n".join([body["instructions"], *first])}]
    return messages


def _messages(items: list[Body]) -> list[Body]:
    """The messages of items: reasoning and calls of tools are parts of the assistant's message beside them."""
    messages: list[Body] = []
    reasoning = ""
    for number, item in enumerate(items):
        kind = item.get("type")
        if "role" in item:
            messages.append({"role": item["role"], "content": item.get("content")})
        elif kind == "reasoning":
            parts, held = item.get("content"), str(item.get("encrypted_content"))
            texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
            own = held.removeprefix(fields.MARK) if held.startswith(fields.MARK) else ""  # others' cannot be read
            reasoning += "".join(text for text in texts if isinstance(text, str)) or own
            continue
        elif kind == "function_call":
            name, space = item.get("name"), item.get("namespace")
            if isinstance(name, str) and isinstance(space, str):
                name = _spaced(space, name)
            function = {"name": name, "arguments": item.get("arguments")}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant"})
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output" and "call_id" in item:
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item.get("output")})
        elif kind == "item_reference":
            raise Unsupported(
                f"item {number} is a reference to one of an earlier response, and no response is kept here: "
                "with store: false clients send the items themselves"
            )
        else:
            raise Unsupported(f"item {number} is no message, text, reasoning, call of a function or its output")
        if reasoning and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"], reasoning = reasoning, ""
    return messages
