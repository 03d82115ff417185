"""Templates of a model, and the structure that requests ask of an answer: a schema, a grammar, calls that must come."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from fastspec.errors import Unsupported
from fastspec.patches.call import grammar_text
from fastspec.programs.serving.fields import OUTPUTS, TEXT

Body = dict[str, Any]
ANY_OBJECT = {"type": "object"}
KEPT = 64
"""Grammars that are known to compile."""
JOINING = frozenset(("$ref", "allOf", "anyOf", "oneOf", "if", "then", "else", "dependentSchemas"))
"""What a schema may have beside `properties` that its objects must fit too."""
OPENING = frozenset(("additionalProperties", "unevaluatedProperties", "patternProperties"))
"""What says of a schema's other properties."""
NAMED = frozenset(("properties", "patternProperties", "dependentSchemas", "$defs", "definitions"))
PARTS = frozenset(("items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf"))
"""Parts of a schema that are schemas by name, and schemas or lists of them."""
_LITERAL = re.compile(r"(?:\\s\*)?((?:[^\\.^$*+?{}\[\]|()]|\\[^\w\s])+)(?![*+?{])")
"""Beginning of a pattern: blanks that may be left out, and the text that comes then."""


@dataclass(frozen=True, slots=True)
class Structure:
    """Structure of an answer: the arguments of its `fastspec.Grammar`, and whether it is calls of tools: the arguments
    of the `tool` alone, or a list. An answer that may be either has the `opening` of calls in the model's own form."""

    grammar: Body
    calls: bool = False
    tool: str | None = None
    opening: str = ""


@dataclass(frozen=True, slots=True)
class CallForm:
    """Form of calls that a model makes of its own accord: the `opening` of the first one, and a `grammar` of it. It
    ends with the first of the tokenizer's added tokens, if it has one, since grammars leave plain text no choice of
    tokens. It is empty where the response template does not tell that text."""

    opening: str
    grammar: str


def call_form(template: Body | None, tokenizer: Any) -> CallForm | None:
    """The form of calls by a response template; None where no calls are read from answers."""
    spec = (template or {}).get("fields", {}).get("tool_calls")
    if spec is None:
        return None
    texts, pattern = spec.get("open", ()), spec.get("open_pattern", "")
    opening = texts if isinstance(texts, str) else "".join(texts[:1]) * (len(texts) == 1)
    found = None if re.search(r"(?<!\\)\|", pattern) else _LITERAL.match(pattern)
    if not texts and found is not None:
        opening = re.sub(r"\\(.)", r"\1", found[1])
    added: dict[str, int] = tokenizer.get_added_vocab()
    first = re.search("|".join(map(re.escape, sorted(added, key=len, reverse=True))) or "$", opening)
    if first is None or not first[0]:
        return CallForm(opening, json.dumps(opening))
    before = json.dumps(opening[: first.start()]) if first.start() else ""
    return CallForm(opening[: first.end()], f"{before} <[{added[first[0]]}]>".lstrip())


def structure_of(body: Body, tools: list[Body] | None, form: CallForm | None) -> Structure | None:
    """The structure that a checked request asks for; `tools` are nested as in chats, and called in a `form` where the
    model has one. Raises Unsupported for two structures, and for a choice of tools that are not there."""
    choice = body.get("tool_choice", "auto")
    held: Any = body.get("response_format") or body.get("text", {}).get("format") or TEXT
    outputs, called = body.get("structured_outputs"), choice not in ("auto", "none")
    if outputs is not None and (held != TEXT or called):
        raise Unsupported("structured_outputs beside a format or a choice of tools: an answer has one structure")
    if called:
        return _of_calls(choice, tools, body.get("parallel_tool_calls", True))
    if outputs is None and held == TEXT:
        return None
    calls = form if tools else None
    if tools and (outputs is not None or (calls is not None and not calls.opening)):
        why = "of structured_outputs" if calls is None or calls.opening else "and this model's response template"
        raise Unsupported(
            f"the structure {why} leaves no place for calls of tools, which tool_choice auto allows: "
            'it must be "none", "required" or a tool\'s name'
        )
    if outputs is None:
        schema = closed(held.get("json_schema", held).get("schema", ANY_OBJECT))
        if calls is None:
            return Structure({"json_schema": schema})
        rules = ["start: text | calls", f"text: {_json(schema)}", f"calls: {calls.grammar} <[*]>*"]
        return Structure({"ebnf": "\n".join(rules)}, opening=calls.opening)
    [(name, value)] = outputs.items()
    if name == "json":
        try:
            value = closed(json.loads(value) if isinstance(value, str) else value)
        except ValueError as error:
            raise Unsupported(f"json of structured_outputs is no JSON text: {error}") from error
    return Structure({"json_schema": ANY_OBJECT} if name == "json_object" else {OUTPUTS[name]: value})


def _of_calls(choice: Any, tools: list[Body] | None, parallel: bool) -> Structure:
    """One call of any tool in a list, or more if `parallel`; or one of a tool by its name, as the arguments alone."""
    functions = {tool["function"]["name"]: tool["function"] for tool in tools or ()}
    if choice == "required":
        if not functions:
            raise Unsupported("tool_choice=required needs tools")
        return Structure({"ebnf": _list_of_calls(list(functions.values()), parallel)}, calls=True)
    name = choice.get("function", choice)["name"]
    if name not in functions:
        raise Unsupported(f"tool_choice names the tool {name!r}, which is none of tools")
    return Structure({"json_schema": _parameters(functions[name])}, calls=True, tool=name)


def _parameters(function: Body) -> Body:
    given = function.get("parameters") or {}
    if given.get("type", "object") != "object":
        raise Unsupported(
            f"the parameters of the tool {function['name']!r} are of type {given['type']!r}: arguments are an object"
        )
    none: Body = {} if JOINING & given.keys() else {"properties": {}}  # one that names no arguments has none
    return closed({**ANY_OBJECT, **none, **given})


def closed(schema: Any) -> Any:
    """A schema whose objects have no properties but those that it names, unless it says `additionalProperties` itself,
    as in llama.cpp's server and in vLLM by xgrammar: a model that may add properties can go on with them up to the
    limit. One that joins the properties of several schemas stays as it is."""
    found = copy.deepcopy(schema)
    parts = list(_schemas(found))
    joined = any(JOINING & each.keys() if "properties" in each else "allOf" in each for each in parts)
    if not joined:
        for each in parts:
            if "properties" in each and not OPENING & each.keys():
                each["additionalProperties"] = False
    return found


def _schemas(schema: Any) -> Iterator[Body]:
    if not isinstance(schema, dict):
        return
    yield schema
    for name, held in schema.items():
        if name in NAMED and isinstance(held, dict):
            held = list(held.values())
        elif name not in PARTS:
            continue
        for each in held if isinstance(held, list) else [held]:
            yield from _schemas(each)


def check(structure: Structure) -> None:
    """Raise Unsupported for a grammar that cannot be compiled in little time and memory, once for each that holds; for
    all where llguidance is missing, by words for a client, which cannot install it."""
    if find_spec("llguidance") is None:
        raise Unsupported("this server holds no answer to a grammar: it was installed without the extra 'structured'")
    [(form, value)] = structure.grammar.items()
    _check(form, json.dumps(value))


@lru_cache(KEPT)
def _check(form: str, value: str) -> None:
    grammar_text.check(form, json.loads(value))


def _list_of_calls(functions: list[Body], parallel: bool) -> str:
    """A grammar whose parts have a schema each, since references are relative to a schema's root."""
    more = ' (", " call)*' if parallel else ""
    rules = [f'start: "[" call{more} "]"', "call: " + " | ".join(f"call{i}" for i in range(len(functions)))]
    for number, function in enumerate(functions):
        begins = json.dumps(f'{{"name": {json.dumps(function["name"])}, "arguments": ')
        rules.append(f'call{number}: {begins} arguments{number} "}}"')
        rules.append(f"arguments{number}: {_json(_parameters(function))}")
    return "\n".join(rules)


def _json(schema: Body) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': grammar_text.BLANKS})}"


NOTE = "\u2042 a note \u2042"


def chat_template(tokenizer: Any) -> str:
    """The text of a tokenizer's chat template, empty where it has none; of several that for tools."""
    found = getattr(tokenizer, "chat_template", None) or ""
    return str(found.get("tool_use") or found.get("default") or "") if isinstance(found, dict) else str(found)


def takes_notes(tokenizer: Any) -> bool:
    """True where a model's chat template writes messages of role system that come after others."""
    talk = [{"role": role, "content": NOTE if role == "system" else "a"} for role in ("user", "assistant", "system")]
    try:
        text: str = tokenizer.apply_chat_template([{"role": "system", "content": "a"}, *talk], tokenize=False)
    except Exception:  # of any kind: a template raises what it likes
        return False
    return NOTE in text


def folded(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages for a template that takes a system's first alone: later ones end the one before, or are a user's."""
    found: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] != "system" or not found:
            found.append(message)
        elif found[-1]["role"] in ("system", "user"):
            found[-1] = {**found[-1], "content": f"{found[-1]['content']}\n\n{message['content']}"}
        else:
            found.append({**message, "role": "user"})
    return found


def response_template(tokenizer: Any, config: Any) -> dict[str, Any] | None:
    """The template of a tokenizer, else of the model's family in transformers' own server, else None."""
    own = getattr(getattr(tokenizer, "tokenizer", tokenizer), "response_template", None)
    if own is not None:
        return own
    try:
        from transformers.cli.serving.utils import get_response_template
    except ImportError:  # private: a version without it leaves families to their tokenizers' templates
        return None
    kinds = (config.model_type, config.model_type.removesuffix("_text"))  # transformers 5.17 names the latter alone
    models = (SimpleNamespace(config=SimpleNamespace(model_type=kind)) for kind in kinds)
    return next(filter(None, (get_response_template(None, model) for model in models)), None)
