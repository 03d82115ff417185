"""Structure that requests ask of an answer: a JSON schema, a grammar, or calls of tools that must come."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from fastspec.errors import Unsupported
from fastspec.patches.call import grammar_text
from fastspec.programs.serving.fields import OUTPUTS, TEXT

Body = dict[str, Any]
ANY_OBJECT = {"type": "object"}
KEPT = 64
"""Grammars that are known to compile."""


@dataclass(frozen=True, slots=True)
class Structure:
    """Structure of an answer: the arguments of its `fastspec.Grammar`, and where it is calls of tools, how they stand
    there: as the arguments of the `tool` alone, or as a list."""

    grammar: Body
    calls: bool = False
    tool: str | None = None


def structure_of(body: Body, tools: list[Body] | None) -> Structure | None:
    """The structure that a checked request asks for; `tools` are nested as in chats. Raises Unsupported for two
    structures, and for a choice of tools that are not there."""
    choice = body.get("tool_choice", "auto")
    held: Any = body.get("response_format") or body.get("text", {}).get("format") or TEXT
    outputs, called = body.get("structured_outputs"), choice not in ("auto", "none")
    if outputs is not None and (held != TEXT or called):
        raise Unsupported(
            "structured_outputs is given beside a format or a choice of tools: an answer has one structure"
        )
    if called:
        return _of_calls(choice, tools, body.get("parallel_tool_calls", True))
    if outputs is None and held == TEXT:
        return None
    if tools:
        raise Unsupported(
            "the structure of the answer leaves no place for calls of tools, which tool_choice auto allows: "
            'it must be "none", "required" or a tool\'s name'
        )
    if outputs is None:
        return Structure({"json_schema": held.get("json_schema", held).get("schema", ANY_OBJECT)})
    [(name, value)] = outputs.items()
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
    return {**ANY_OBJECT, **given}


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
        schema = {**_parameters(function), "x-guidance": grammar_text.BLANKS}
        rules.append(f"arguments{number}: %json {json.dumps(schema)}")
    return "\n".join(rules)
