"""Answers of all routes in OpenAI's forms, read by the `openai` client: whole and streamed ones are the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.saying import ANSWERS, saying
from helpers.serve import MARKS, NAME, Served, post, raw, served, talk
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

pytestmark = MARKS
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
TOOL = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}


@pytest.fixture(scope="module", params=ANSWERS)
def said(request: pytest.FixtureRequest) -> Iterator[tuple[str, Served]]:
    """(an answer, a server whose model says it)."""
    with torch.no_grad():
        model, tokenizer = saying(ANSWERS[request.param])
    with served(model, rows=2, assistant="autoregressive", tokenizer=tokenizer) as server:
        yield request.param, server


TOOLS = pytest.mark.parametrize(
    ("said", "tools"), [*((name, True) for name in ANSWERS), ("all", False)], indirect=["said"], scope="module"
)


def asked(tools: bool, limit: int = 200, **more: Any) -> dict[str, Any]:
    given = {"model": NAME, "messages": talk("hello"), "temperature": 0, "max_tokens": limit, **more}
    return {**given, "tools": [{"type": "function", "function": TOOL}]} if tools else given


def chat(server: Served, stream: bool, **given: Any) -> tuple[Any, ...]:
    """(content, reasoning, calls, finish reason, new tokens)."""
    create = server.client().chat.completions.create
    if not stream:
        answer = create(**given)
        message = answer.choices[0].message
        calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
        reasoning = getattr(message, "reasoning_content", "")
        return message.content or "", reasoning, calls, answer.choices[0].finish_reason, answer.usage.completion_tokens
    content, reasoning, calls = "", "", []
    for chunk in create(**given, stream=True):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        reasoning += getattr(delta, "reasoning_content", "")
        calls += [(call.function.name, call.function.arguments) for call in delta.tool_calls or []]
        assert [call.index for call in delta.tool_calls or []] in ([], [len(calls) - 1])
    return content, reasoning, calls, chunk.choices[0].finish_reason, chunk.usage.completion_tokens


@pytest.mark.some("a call", "all", "blanks")
@TOOLS
def test_whole_and_streamed_chats_are_the_same_wherever_they_are_cut(said: tuple[str, Served], tools: bool) -> None:
    name, server = said
    whole = chat(server, False, **asked(tools))
    for limit in (200, 9, whole[4] // 2):
        if limit > 0:
            assert chat(server, True, **asked(tools, limit)) == chat(server, False, **asked(tools, limit))
    content, reasoning, calls, reason, _ = whole
    parsed = [json.loads(arguments)["city"] for _, arguments in calls]
    assert (reason == "tool_calls") == bool(calls)
    if not tools:
        assert not calls and content == ANSWERS[name].split("</think>")[-1].strip()
    elif name == "all":
        assert (content, reasoning, parsed) == ("Two é€:\nThat is all.", "Hm, 5 < 6.", ["Oslo", "Bergen"])
    elif name == "a call":
        assert (content, reasoning, parsed) == ("", "", ["Oslo"])
    else:
        assert (content, reasoning, calls) == (ANSWERS[name].strip(), "", [])


@pytest.mark.some("a call", "all", "blanks")
def test_one_tool_is_called_where_no_calls_may_be_parallel(said: tuple[str, Served]) -> None:
    name, server = said
    content, reasoning, calls, *rest = chat(server, False, **asked(True))
    one = content, reasoning, calls[:1], *rest
    for stream in (False, True):
        assert chat(server, stream, **asked(True, parallel_tool_calls=False)) == one
    assert len(calls) == {"all": 2, "a call": 1}.get(name, 0)
    flat = {"model": NAME, "input": "hello", "temperature": 0, "tools": [{"type": "function", **TOOL}]}
    response = server.client().responses.create(**flat, parallel_tool_calls=False)
    assert [item.type for item in response.output].count("function_call") == len(calls[:1])
    assert response.parallel_tool_calls is False


@pytest.mark.some("a call")
def test_a_response_repeats_what_was_asked(said: tuple[str, Served]) -> None:
    asked = {"tools": [{"type": "function", **TOOL}], "tool_choice": "none", "temperature": 0, "metadata": {"a": "b"}}
    client, given = said[1].client(), {"model": NAME, "input": "hello", "instructions": "Be brief.", **asked}
    for stream in (False, True):
        response = client.responses.create(**given, stream=stream)
        told = [each.response for each in response if hasattr(each, "response")] if stream else [response]
        for each in told:
            found = each.model_dump(exclude_unset=True)
            assert {name: found[name] for name in (*asked, "instructions")} == {**asked, "instructions": "Be brief."}
    plain = client.responses.create(model=NAME, input="hello")
    assert (plain.tools, plain.tool_choice, plain.parallel_tool_calls) == ([], "auto", True)


def test_no_tool_is_called_where_none_may_be_chosen(said: tuple[str, Served]) -> None:
    assert chat(said[1], False, **asked(True, tool_choice="none")) == chat(said[1], False, **asked(False))


@pytest.mark.some("a call", "all", "blanks")
def test_whole_and_streamed_completions_are_the_same(said: tuple[str, Served]) -> None:
    """The text as it stands, with the tail of a character that was cut."""
    name, server = said
    create, given = server.client().completions.create, {"model": NAME, "prompt": "<bot>", "temperature": 0}
    for limit in (200, *(range(1, 60, 6) if name == "all" else [9])):
        whole = create(**given, max_tokens=limit)
        chunks = list(create(**given, max_tokens=limit, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
        assert chunks[-1].usage == whole.usage and chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
        if limit == 200:
            assert whole.choices[0].text == ANSWERS[name]


@pytest.mark.some("a call", "all", "blanks")
@TOOLS
def test_responses_have_items_of_their_own_index(said: tuple[str, Served], tools: bool) -> None:
    """Read by the client's accumulator, which refuses two items of one; a whole answer is what a stream ends with."""
    name, server = said
    client = server.client()
    flat = {"tools": [{"type": "function", **TOOL}]} if tools else {}
    given = {"model": NAME, "input": "hello", "temperature": 0, **flat}
    for limit in (200, 9):
        with client.responses.stream(**given, max_output_tokens=limit) as stream:
            events = list(stream)
        whole = client.responses.create(**given, max_output_tokens=limit)
        last = events[-1].response

        def shown(response: Any) -> Any:
            fields = ("name", "arguments", "content", "status")
            items = [{field: getattr(item, field, None) for field in fields} for item in response.output]
            return json.loads(json.dumps(items, default=lambda part: part.text)), response.status

        assert shown(last) == shown(whole) and last.usage == whole.usage
        cut = limit < whole.usage.output_tokens or (limit == 9 and whole.usage.output_tokens == 9)
        assert whole.status == ("incomplete" if cut and limit == 9 else "completed")
        assert (whole.incomplete_details is not None) == (whole.status == "incomplete")
    kinds = [item.type for item in whole.output if item.type != "message"]
    if limit == 200 and tools and name == "all":
        assert kinds == ["reasoning", "function_call", "function_call"]


@pytest.mark.parametrize("said", ["all"], indirect=True)
def test_reasoning_comes_in_the_form_that_clients_give_back(said: tuple[str, Served]) -> None:
    client = said[1].client()
    given = {"model": NAME, "input": "hello", "temperature": 0}
    for include, held in (([], None), (["reasoning.encrypted_content"], "fastspec:Hm, 5 < 6.")):
        with client.responses.stream(**given, include=include) as stream:
            found = [stream.get_final_response(), client.responses.create(**given, include=include)]
        assert [response.output[0].encrypted_content for response in found] == [held, held]


def test_a_tool_in_a_namespace_is_called_by_both_names() -> None:
    with torch.no_grad():
        model, tokenizer = saying(ANSWERS["a call"].replace("weather", "mcp__land__weather"))
    space = {
        "type": "namespace",
        "name": "mcp__land__",
        "description": "Of a land.",
        "tools": [{"type": "function", **TOOL}],
    }
    given = {"model": NAME, "input": "hello", "tools": [space], "temperature": 0}
    with served(model, rows=1, assistant="autoregressive", tokenizer=tokenizer) as server:
        client = server.client()
        with client.responses.stream(**given) as stream:
            responses = [stream.get_final_response(), client.responses.create(**given)]
    for response in responses:
        [item] = response.output
        assert (item.name, item.namespace, item.arguments) == ("weather", "mcp__land__", '{"city": "Oslo"}')


@TOOLS
def test_a_responses_text_has_its_own_tokens_log_probabilities(said: tuple[str, Served], tools: bool) -> None:
    """Without those of the reasoning before it and of calls beside it, in a stream as in a whole answer."""
    create = said[1].client().responses.create
    given = {"model": NAME, "input": "hello", "temperature": 0, "include": ["message.output_text.logprobs"]}
    given |= {"tools": [{"type": "function", **TOOL}]} if tools else {}
    whole, (*events, last) = create(**given), create(**given, stream=True)

    def messages(response: Any) -> list[Any]:
        return [item.to_dict()["content"] for item in response.output if item.type == "message"]

    assert messages(last.response) == messages(whole)
    parts = [item.content[0] for item in whole.output if item.type == "message"]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    streamed = [token.token for event in deltas for token in event.logprobs]
    assert streamed == [token.token for part in parts for token in part.logprobs]
    for part in parts:
        emitted = b"".join(bytes(token.bytes) for token in part.logprobs).decode(errors="replace")
        assert part.text.strip() in emitted and "5 < 6" not in emitted


@pytest.mark.parametrize("said", ["all"], indirect=True)
def test_all_that_is_written_has_openais_types(said: tuple[str, Served]) -> None:
    server, events = said[1], TypeAdapter(ResponseStreamEvent)
    given = {"temperature": 0, "tools": [{"type": "function", **TOOL}]}
    nested = {**given, "tools": [{"type": "function", "function": TOOL}], "messages": talk("hello")}
    lines = raw(server, RESPONSES, {**given, "input": "hello", "stream": True}).strip().split("\n\n")
    for number, line in enumerate(lines):
        named, data = line.split("\n")
        event = events.validate_json(data.removeprefix("data: "))
        assert named == f"event: {event.type}" and event.sequence_number == number
    assert event.type == "response.completed"
    Response.model_validate_json(raw(server, RESPONSES, {**given, "input": "hello"}))
    ChatCompletion.model_validate_json(raw(server, CHAT, nested))
    Completion.model_validate_json(raw(server, COMPLETIONS, {"prompt": "<bot>", "temperature": 0}))
    for line in raw(server, CHAT, {**nested, "stream": True}).strip().split("\n\n")[:-1]:
        ChatCompletionChunk.model_validate_json(line.removeprefix("data: "))


@pytest.mark.parametrize("said", ["blanks"], indirect=True)
def test_streams_end_with_done_and_counts_come_where_they_are_asked_for(said: tuple[str, Served]) -> None:
    server = said[1]
    for path, prompt in ((CHAT, {"messages": talk("hello")}), (COMPLETIONS, {"prompt": "<bot>"})):
        body = {**prompt, "temperature": 0, "stream": True}
        for options, chunks in ((None, 1), ({"include_usage": False}, 0), ({"include_usage": True}, 1)):
            *lines, done = raw(server, path, {**body, "stream_options": options}).strip().split("\n\n")
            assert done == "data: [DONE]"
            found = [json.loads(line.removeprefix("data: ")) for line in lines]
            counted = [chunk for chunk in found if chunk.get("usage")]
            assert len(counted) == chunks and counted == found[len(found) - chunks :]
            alone = options == {"include_usage": True}
            assert all(bool(chunk["choices"]) for chunk in found[: len(found) - alone])
            assert found[-1]["choices"] == [] if alone else found[-1]["choices"][0]["finish_reason"]


def test_an_answer_says_nothing_that_was_not_asked() -> None:
    """A history whose call has no arguments goes on; tools without a template's field are text."""
    with torch.no_grad():
        model, tokenizer = saying("Hi")
    with served(model, rows=1, assistant="nasd", tokenizer=tokenizer) as server:
        call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": ""}}
        history = [
            *talk("hello"),
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "rain"},
        ]
        status, answer = post(server, CHAT, json.dumps({"messages": history, "temperature": 0}).encode())
        assert status == 200 and answer["choices"][0]["message"] == {"role": "assistant", "content": "Hi"}


@pytest.mark.each_value  # streams are cut where whole answers are
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_left_out_of_text_and_log_probabilities(said: tuple[str, Served], stream: bool) -> None:
    """Of the text as it is, before reasoning and calls are told apart, where it begins within a token too."""
    name, server = said
    whole = chat(server, False, **asked(False))[0]
    for stop in (whole[3:5], whole[5:6], [whole[4:12], "nowhere", whole[6:8]]):
        parts = server.client().chat.completions.create(**asked(False, stop=stop, logprobs=True), stream=stream)
        choices = [part.choices[0] for part in (parts if stream else [parts])]
        text = "".join((choice.delta if stream else choice.message).content or "" for choice in choices)
        strings = [stop] if isinstance(stop, str) else stop
        places = [(ANSWERS[name].find(each), each) for each in strings if each in ANSWERS[name]]
        raw = ANSWERS[name][: min(places, key=lambda place: place[0] + len(place[1]))[0]]  # the first that is whole
        assert text == raw.split("</think>")[-1].strip() or (name == "all" and text == "")
        assert choices[-1].finish_reason == "stop"
        tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.content or ()]
        emitted = b"".join(bytes(token.bytes) for token in tokens)
        assert emitted.startswith(raw.encode()) and len(emitted) - len(raw.encode()) < len(tokens[-1].bytes)
