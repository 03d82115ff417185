"""Answers of the server that are held to a structure: schemas, grammars and calls of tools that must come."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.grammars import SCHEMA, SIZE, TOKENIZER, is_valid, terse
from helpers.saying import FIRST, QWEN, saying
from helpers.serve import MARKS, NAME, Served, openai, post, served
from helpers.tokenizers import written

import fastspec
from fastspec.programs.serving.structured import CallForm, call_form, closed, structure_of

pytestmark = MARKS
pytest.importorskip("llguidance")

CHAT, ONE, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": {**SCHEMA, "properties": {"b": {"enum": [1, 2]}}}}},
    {"type": "function", "function": {"name": "find", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stay"}},
]
TOOLS[0]["function"]["parameters"]["required"] = ["b"]
FORMAT = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    TOKENIZER.chat_template = "{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}{{ '<bot>' }}"
    model = terse()
    with fastspec.patched(model), served(model, max_length=500, assistant="nasd", tokenizer=TOKENIZER) as running:
        yield running


def asked(text: str = "ab", **more: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": [{"role": "user", "content": text}], "max_tokens": 300, "temperature": 0} | more


@pytest.mark.some("True")
@pytest.mark.parametrize("sampled", [False, True])
def test_a_schema_holds_whole_and_streamed(server: Served, sampled: bool) -> None:
    given = asked(response_format=FORMAT, temperature=0.8 if sampled else 0, seed=3)
    client = server.client()
    whole = client.chat.completions.create(**given).choices[0]
    parts = [chunk.choices[0] for chunk in client.chat.completions.create(**given, stream=True)]
    assert whole.finish_reason == parts[-1].finish_reason == "stop"
    assert "".join(part.delta.content or "" for part in parts) == whole.message.content
    assert is_valid(json.loads(whole.message.content))


def test_the_clients_own_helper_parses_an_answer(server: Served) -> None:
    import pydantic

    class It(pydantic.BaseModel):
        a: bool
        c: int

    found = server.client().chat.completions.parse(**asked(response_format=It))
    assert isinstance(found.choices[0].message.parsed, It)


def test_responses_and_completions_have_structures_too(server: Served) -> None:
    client = server.client()
    text = {"format": {"type": "json_schema", "name": "it", "schema": SCHEMA}}
    said = client.responses.create(model=NAME, input="ab", text=text, max_output_tokens=300, temperature=0)
    assert is_valid(json.loads(said.output_text))
    form = {"structured_outputs": {"choice": ["abba", "acca"]}}
    one = client.completions.create(model=NAME, prompt="ab", max_tokens=20, temperature=0, extra_body=form)
    assert one.choices[0].text in ("abba", "acca") and one.choices[0].finish_reason == "stop"


OUTPUTS: list[tuple[dict[str, Any], Any]] = [
    ({"json": SCHEMA}, lambda text: is_valid(json.loads(text))),
    ({"json": json.dumps(SCHEMA)}, lambda text: is_valid(json.loads(text))),
    ({"regex": "[ab]{3}/c"}, lambda text: text[3:] == "/c" and set(text[:3]) <= {"a", "b"}),
    ({"choice": ["abba", 'q"']}, lambda text: text in ("abba", 'q"')),
    ({"grammar": 'root ::= "x" [0-9] "y"'}, lambda text: text[0] + text[2] == "xy" and text[1].isdigit()),
]


@pytest.mark.parametrize(("form", "holds"), OUTPUTS, ids=[next(iter(form)) for form, _ in OUTPUTS])
def test_vllms_fields_hold(server: Served, form: dict[str, Any], holds: Any) -> None:
    status, found = post(server, CHAT, json.dumps(asked(structured_outputs=form)).encode())
    assert status == 200 and holds(found["choices"][0]["message"]["content"])


PART = {"type": "object", "properties": {"properties": {"enum": [{"properties": {}}]}}}
SHUT = {**PART, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "held"),
    [
        (PART, SHUT),
        ({"items": [PART, True], "$defs": {"a": PART}}, {"items": [SHUT, True], "$defs": {"a": SHUT}}),
        ({"anyOf": [PART, {"type": "null"}]}, {"anyOf": [SHUT, {"type": "null"}]}),
        *((each, each) for each in ({"type": "object"}, {**PART, "additionalProperties": True}, True)),
        *(({"items": PART, **each},) * 2 for each in ({"allOf": [PART, PART]}, {"allOf": 3})),
        ({**PART, "anyOf": [{"required": ["properties"]}]},) * 2,
        ({"const": PART, "not": PART},) * 2,
    ],
    ids=str,
)
def test_objects_have_the_properties_that_their_schema_names(schema: Any, held: Any) -> None:
    assert closed(schema) == held


def test_a_tool_gets_no_arguments_but_its_own(server: Served) -> None:
    """Of a model that would go on with others: a schema without additionalProperties allows them."""
    tool = {"name": "look", "parameters": {"type": "object", "properties": {"b": {"enum": [1]}}, "required": ["b"]}}
    given = asked(tools=[{"type": "function", "function": tool}], tool_choice="required", parallel_tool_calls=False)
    for seed in range(4):
        choice = server.client().chat.completions.create(**given | {"temperature": 1.5, "seed": seed}).choices[0]
        assert json.loads(choice.message.tool_calls[0].function.arguments) == {"b": 1}


@pytest.mark.parametrize("more", [{}, {"parameters": None}, {"parameters": {"type": "object"}}], ids=str)
def test_a_tool_without_arguments_gets_none(server: Served, more: dict[str, Any]) -> None:
    tools = [{"type": "function", "function": {"name": "now", **more}}]
    given = asked(tools=tools, tool_choice="required", parallel_tool_calls=False)
    for seed in range(4):
        choice = server.client().chat.completions.create(**given | {"temperature": 1.5, "seed": seed}).choices[0]
        assert json.loads(choice.message.tool_calls[0].function.arguments) == {}


def test_any_object_is_one(server: Served) -> None:
    """Within a limit of tokens, whose text is cut: a prefix of an object."""
    for form in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        status, found = post(server, CHAT, json.dumps(asked(max_tokens=12, **form)).encode())
        assert status == 200 and found["choices"][0]["message"]["content"][0] == "{"


def test_a_tool_that_is_named_is_called(server: Served) -> None:
    choice = {"type": "function", "function": {"name": "find"}}
    given = asked(tools=TOOLS, tool_choice=choice)
    client = server.client()
    whole = client.chat.completions.create(**given).choices[0]
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**given, stream=True)]
    assert whole.finish_reason == chunks[-1].finish_reason == "tool_calls" and whole.message.content is None
    for calls in (whole.message.tool_calls, [call for chunk in chunks for call in chunk.delta.tool_calls or ()]):
        [call] = calls
        assert call.function.name == "find" and is_valid(json.loads(call.function.arguments))


def test_some_tool_is_called_where_one_is_required(server: Served) -> None:
    """Any number of calls, until the model closes their list."""
    closes = {str(token): 100 for token in TOKENIZER("]").input_ids}
    given = asked(tools=TOOLS[:2], tool_choice="required", logit_bias=closes)
    choice = server.client().chat.completions.create(**given).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
    for call in choice.message.tool_calls:
        found = json.loads(call.function.arguments)
        assert found["b"] in (1, 2) if call.function.name == "look" else is_valid(found)
    tools = [{"type": "function", **TOOLS[1]["function"]}]
    named = {"type": "function", "name": "find"}
    given = {"model": NAME, "input": "ab", "max_output_tokens": 300, "tools": tools, "tool_choice": named}
    [item] = server.client().responses.create(**given, temperature=0).output
    assert item.type == "function_call" and item.name == "find" and is_valid(json.loads(item.arguments))


def only(mode: str, *names: str) -> dict[str, Any]:
    """A choice of the tools of these names, as chats have it."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_an_allowed_tool_is_called_where_one_is_required(server: Served) -> None:
    """Of a model that would call the others too; the prompt names them all."""
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "stay"}]}
    client = server.client()
    for seed in range(6):
        more = {"temperature": 1.5, "seed": seed, "parallel_tool_calls": False}
        given = asked(tools=TOOLS, tool_choice=only("required", "find", "stay"), **more)
        [call] = client.chat.completions.create(**given).choices[0].message.tool_calls
        assert call.function.name in ("find", "stay")
        given = {"model": NAME, "input": "ab", "tools": flat, "tool_choice": choice, "temperature": 1.5}
        said = client.responses.create(**given, parallel_tool_calls=False, extra_body={"seed": seed})
        assert [item.name for item in said.output] == ["stay"] and said.tool_choice.mode == "required"


def test_one_tool_is_called_where_one_is_required_and_no_more_may_be(server: Served) -> None:
    given = asked(tools=TOOLS[1:2], tool_choice="required", parallel_tool_calls=False)
    choice = server.client().chat.completions.create(**given).choices[0]
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    assert is_valid(json.loads(call.function.arguments))


def test_calls_that_the_limit_cuts_are_content(server: Served) -> None:
    given = asked(tools=TOOLS, tool_choice="required", max_tokens=9)
    choice = server.client().chat.completions.create(**given).choices[0]
    assert choice.finish_reason == "length" and not choice.message.tool_calls
    assert '[{"name": "'.startswith(choice.message.content[:11])


@pytest.fixture(scope="module")
def caller() -> Iterator[Served]:
    """A server whose model calls a tool."""
    with torch.no_grad():
        model, tokenizer = saying(FIRST, opening="<tool_call>")
    with served(model, rows=2, assistant="nasd", tokenizer=tokenizer) as running:
        yield running


def test_a_call_comes_as_it_does_without_a_structure_beside_it(caller: Served) -> None:
    given = asked(tools=TOOLS)
    client = caller.client()
    for more in ({}, {"response_format": FORMAT}, {"response_format": {"type": "json_object"}}):
        whole = client.chat.completions.create(**given, **more).choices[0]
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**given, **more, stream=True)]
        assert whole.finish_reason == chunks[-1].finish_reason == "tool_calls" and not whole.message.content
        for calls in (whole.message.tool_calls, [call for chunk in chunks for call in chunk.delta.tool_calls or ()]):
            [call] = calls
            assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo"})
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    text = {"format": {"type": "json_schema", "name": "it", "schema": SCHEMA}}
    said = client.responses.create(model=NAME, input="ab", tools=flat, text=text, temperature=0)
    assert [item.type for item in said.output] == ["function_call"]


def test_a_call_of_a_tool_that_is_not_allowed_is_content(caller: Served) -> None:
    tools = [*TOOLS, {"type": "function", "function": {"name": "weather"}}]
    client = caller.client()
    for names, more in ((("look",), {}), (("look",), {"response_format": FORMAT}), (("look", "weather"), {})):
        given = asked(tools=tools, tool_choice=only("auto", *names), **more)
        whole = client.chat.completions.create(**given).choices[0]
        parts = [chunk.choices[0] for chunk in client.chat.completions.create(**given, stream=True)]
        assert whole.finish_reason == parts[-1].finish_reason == ("tool_calls" if "weather" in names else "stop")
        assert bool(whole.message.tool_calls) == any(part.delta.tool_calls for part in parts) == ("weather" in names)
        for text in (whole.message.content or "", "".join(part.delta.content or "" for part in parts)):
            assert text == ("" if "weather" in names else FIRST)


@pytest.fixture(scope="module")
def chooser() -> Iterator[Served]:
    """A server whose model begins an answer as it is biased to."""
    tokenizer, model = written(SIZE), terse()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}{{ '<bot>' }}"
    tokenizer.response_template = {**QWEN, "start_anchor": "<bot>"}
    with fastspec.patched(model), served(model, max_length=500, assistant="nasd", tokenizer=tokenizer) as running:
        yield running


@pytest.mark.each_value  # a choice does not hang on how it is sent
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("sampled", [False, True])
def test_an_answer_is_the_structure_or_begins_as_a_call(chooser: Served, sampled: bool, stream: bool) -> None:
    [opens] = TOKENIZER("<").input_ids

    def answer(bias: float, **more: Any) -> tuple[str, str]:
        given = asked(tools=TOOLS, response_format=FORMAT, logit_bias={str(opens): bias}, seed=3, **more)
        made = chooser.client().chat.completions.create(**given, stream=stream)
        if not stream:
            return made.choices[0].message.content, made.choices[0].finish_reason
        parts = [chunk.choices[0] for chunk in made]
        return "".join(part.delta.content or "" for part in parts), parts[-1].finish_reason

    more = {"temperature": 0.8 if sampled else 0}
    text, reason = answer(-100, **more)
    assert is_valid(json.loads(text)) and reason == "stop"
    text, reason = answer(100, **more, max_tokens=30)
    assert text.startswith("<tool_call>" + "<" * 9) and reason == "length"  # no call: free, and content as it stands
    assert answer(100, **more, max_tokens=4) == ("<too", "length")


def test_tools_without_a_form_of_calls_leave_the_structure(server: Served) -> None:
    choice = server.client().chat.completions.create(**asked(tools=TOOLS, response_format=FORMAT)).choices[0]
    assert choice.finish_reason == "stop" and is_valid(json.loads(choice.message.content))


FORMS: list[tuple[dict[str, Any], CallForm]] = [
    ({"open": "<call>"}, CallForm("<call>", '"<call>"')),
    ({"open": ["\n[<none>] "]}, CallForm("\n[<none>", '"\\n[" <[4]>')),
    ({"open": ["<a>", "<b>"]}, CallForm("", '""')),
    ({"open_pattern": r"\s*<bot>\s*<f=(\w+)>"}, CallForm("<bot>", "<[3]>")),
    ({"open_pattern": r"<\|a\|>call:(?P<name>\w+)"}, CallForm("<|a|>call:", '"<|a|>call:"')),
    ({"open_pattern": "<ab*"}, CallForm("<a", '"<a"')),
    ({"open_pattern": r"\s+<a>"}, CallForm("", '""')),
    ({"open_pattern": "<a>|<b>"}, CallForm("", '""')),
]


@pytest.mark.parametrize(("spec", "form"), FORMS, ids=[str(spec) for spec, _ in FORMS])
def test_the_beginning_of_calls_is_read_from_a_template(spec: dict[str, Any], form: CallForm) -> None:
    assert call_form({"fields": {"tool_calls": spec}}, TOKENIZER) == form
    assert call_form({"fields": {}}, TOKENIZER) is None is call_form(None, TOKENIZER)


def test_a_structure_is_refused_where_the_beginning_of_calls_is_unknown() -> None:
    for body, form, said in (
        ({"response_format": FORMAT}, CallForm("", '""'), "this model's response template leaves no place for calls"),
        ({"structured_outputs": {"json": SCHEMA}}, CallForm("<a>", '"<a>"'), "of structured_outputs leaves no place"),
    ):
        with pytest.raises(fastspec.Unsupported, match=said):
            structure_of(body, TOOLS, form)
        assert structure_of({**body, "tool_choice": "none"}, None, form) is not None


MANY = [{"type": "string", "pattern": f".*{letter}.*"} for letter in "abcdefghijklmnopqrstuvwx"]
"""Patterns whose product the library builds, whatever bounds it was given."""
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format"),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format"),
    (CHAT, {"response_format": {**FORMAT, "more": 1}}, "response_format"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "Unimplemented keys"),
    (CHAT, {"structured_outputs": {"regex": "("}}, "regex cannot be compiled"),
    (CHAT, {"structured_outputs": {"json": {"allOf": MANY}}}, "takes more than 1 second"),
    (CHAT, {"structured_outputs": {"regex": "(" * 9000 + "a" + ")" * 9000}}, "regex cannot be compiled"),
    (CHAT, {"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    (CHAT, {"structured_outputs": {"json": 3}}, "structured_outputs"),
    (CHAT, {"structured_outputs": {"json": "{"}}, "no JSON text"),
    (CHAT, {"structured_outputs": {"json_object": False}}, "structured_outputs"),
    (CHAT, {"structured_outputs": {"choice": [1]}}, "choice cannot be compiled"),
    (CHAT, {"structured_outputs": {"regex": "a"}, "response_format": FORMAT}, "one structure"),
    (CHAT, {"structured_outputs": {"regex": "a"}, "tools": TOOLS, "tool_choice": "required"}, "one structure"),
    (CHAT, {"tool_choice": "required"}, "needs tools"),
    (CHAT, {"tool_choice": only("auto", "look")}, "'look', which is none of tools"),
    (CHAT, {"tools": TOOLS, "tool_choice": only("required", "look", "fly")}, "'fly', which is none of tools"),
    *((CHAT, {"tools": TOOLS, "tool_choice": each}, "tool_choice=") for each in (only("none", "look"), only("auto"))),
    (RESPONSE, {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}}, "tool_choice="),
    (RESPONSE, {"tool_choice": {"type": "allowed_tools", "allowed_tools": 5}}, "tool_choice="),
    (CHAT, {"tool_choice": "always", "tools": TOOLS}, "tool_choice"),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "no"}}, "tools": TOOLS}, "'no'"),
    (CHAT, {"structured_outputs": {"regex": "a"}, "tools": TOOLS}, "no place for calls"),
    (CHAT, {"response_format": FORMAT, "generation_config": '{"eos_token_id": 7}'}, "eos_token_id"),
    (CHAT, {"guided_regex": "a"}, "guided_regex"),
    (RESPONSE, {"text": {"format": {"type": "json_schema", "name": "it"}}}, "text"),
    (ONE, {"structured_outputs": {"grammar": "root ::= nope"}}, "ebnf cannot be compiled"),
]


@pytest.mark.parametrize(("path", "more", "said"), REFUSED, ids=[str(more)[:60] for _, more, _ in REFUSED])
def test_what_cannot_be_held_is_refused_by_name(server: Served, path: str, more: dict[str, Any], said: str) -> None:
    given = {CHAT: asked(), ONE: {"model": NAME, "prompt": "ab"}, RESPONSE: {"model": NAME, "input": "ab"}}[path]
    status, answer = post(server, path, json.dumps(given | more).encode())
    assert status == (422 if "guided_regex" in more else 400) and said in answer["error"]["message"]


def test_a_grammar_that_leads_nowhere_is_the_client_s_mistake(server: Served) -> None:
    """Some schemas allow no text, and these tokens write no umlaut."""
    loop = {"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}
    for schema, said in ((loop, "allows no first token"), ({"const": "\u00fc"}, "the grammar does not allow")):
        given = asked(response_format={"type": "json_schema", "json_schema": {"schema": schema}})
        status, answer = post(server, CHAT, json.dumps(given).encode())
        assert status == 400 and said in answer["error"]["message"], answer
    with pytest.raises(openai.APIError, match="the grammar does not allow") as told:
        list(server.client().chat.completions.create(**given, stream=True))
    assert told.value.code == "400"


def test_the_log_says_of_a_refused_grammar_that_and_why(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    """Before an answer has begun it is no answer that was cancelled; in its middle it is no error of the server's."""
    caplog.set_level(logging.INFO, "fastspec.serve")
    counts = [f'fastspec_requests_total{{outcome="{each}"}}' for each in ("cancelled", "error")]
    before = [server.metric(each) for each in counts]
    loop, umlaut = {"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}, {"const": "\u00fc"}
    cases = (loop, False, "first token"), (umlaut, False, "does not allow"), (umlaut, True, "does not allow")
    for number, (schema, stream, said) in enumerate(cases):
        form = {"type": "json_schema", "json_schema": {"schema": schema}}
        given = asked(response_format=form, stream=stream, extra_headers={"x-request-id": f"it{number}"})
        with pytest.raises(openai.APIError):
            list(server.client().chat.completions.create(**given))
        lines = [f"it{number}: refused with 400, .*{said}", f"it{number}: refused, 8 prompt tokens"]
        for line in lines[: 1 if schema is loop else 2]:
            server.wait(lambda line=line: re.search(line, caplog.text))
    own = [each for each in caplog.records if each.getMessage().startswith("it")]
    assert len(own) == 5 and {each.levelno for each in own} == {logging.INFO}
    assert [server.metric(each) for each in counts] == before


def test_rows_with_and_without_structures_run_in_one_batch(server: Served) -> None:
    """Each as by itself: a structured row beside it changes no other row's answer."""
    rng = random.Random(0)
    forms: list[dict[str, Any]] = [
        {},
        {"response_format": FORMAT},
        {"extra_body": {"structured_outputs": {"regex": "[ab/]{9}c"}}},
    ]
    requests = [
        asked("".join(rng.choices("abcdef", k=rng.randint(1, 9))), max_tokens=40, seed=index, **forms[index % 3])
        | ({"temperature": 0.7} if index % 2 else {})
        for index in range(12)
    ]

    async def everyone() -> list[str]:
        async with server.client(openai.AsyncOpenAI) as client:
            found = await asyncio.gather(*(client.chat.completions.create(**each) for each in requests))
            return [each.choices[0].message.content for each in found]

    client = server.client()
    alone = [client.chat.completions.create(**each).choices[0].message.content for each in requests]
    assert asyncio.run(everyone()) == alone


def test_a_client_is_not_told_to_install_what_the_server_lacks(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastspec.programs.serving.structured.find_spec", lambda name: None)
    body = {"messages": [{"role": "user", "content": "w5"}], "response_format": FORMAT}
    status, told = post(server, CHAT, json.dumps(body).encode())
    assert status == 400 and "installed without the extra 'structured'" in told["error"]["message"]
    assert "pip" not in told["error"]["message"]
