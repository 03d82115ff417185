"""`/v1/messages`: answers in Anthropic's form, whole and streamed, of the events that the other forms are made of. With
the anthropic package they are in tests/clients."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.saying import ANSWERS, saying
from helpers.serve import MARKS, NAME, SECONDS, Served, post, served, talk

from fastspec.programs.serving.messages import as_chat
from fastspec.programs.serving.middleware import message_error

pytestmark = MARKS
MESSAGES, CHATS, COUNT = "/v1/messages", "/v1/chat/completions", "/v1/messages/count_tokens"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "weather", "description": "Of a city.", "input_schema": SCHEMA}
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": SCHEMA}}
GIVEN = {"messages": talk("hello"), "temperature": 0}


@pytest.fixture(scope="module", params=["all", "a call", "blanks"])
def said(request: pytest.FixtureRequest) -> Iterator[tuple[str, Served]]:
    """(an answer, a server whose model says it)."""
    with torch.no_grad():
        model, tokenizer = saying(ANSWERS[request.param])
    with served(model, rows=2, assistant="autoregressive", tokenizer=tokenizer) as server:
        yield request.param, server


def answered(server: Served, **fields: Any) -> Any:
    status, answer = post(server, MESSAGES, json.dumps({"max_tokens": 200, **GIVEN, **fields}).encode())
    assert status == 200, answer
    return answer


def streamed(server: Served, **fields: Any) -> Any:
    """The message that the events of a stream come to."""
    body = json.dumps({"max_tokens": 200, "stream": True, **GIVEN, **fields}).encode()
    request = urllib.request.Request(server.url + MESSAGES, body)
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        assert answer.headers.get_content_type() == "text/event-stream"
        parts = answer.read().decode().strip().split("\n\n")
    events = []
    for part in parts:
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    first, ping, *middle, last, stop = events
    assert (first["type"], ping["type"], last["type"], stop["type"]) == (
        *("message_start", "ping", "message_delta", "message_stop"),
    )
    message, inside = first["message"], False
    for event in middle:
        place = len(message["content"]) - 1
        if event["type"] == "content_block_start":
            assert not inside and event["index"] == place + 1
            message["content"].append({**event["content_block"], "partial": ""})
            inside = True
            continue
        assert inside and event["index"] == place
        block = message["content"][place]
        if event["type"] == "content_block_stop":
            inside, partial = False, block.pop("partial")
            if block["type"] == "tool_use":
                block["input"] = json.loads(partial)
            continue
        delta = event["delta"]
        name = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}[delta["type"]]
        block["partial" if name == "partial_json" else name] += delta[name]
    assert not inside
    return {**message, **last["delta"], "usage": {**message["usage"], **last["usage"]}, "timings": last["timings"]}


def plain(message: Any) -> Any:
    """A message without what is another with each request."""
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return {**message, "id": None, "timings": None, "content": content}


@pytest.mark.some("all", "blanks")
def test_blocks_are_what_a_chat_has_whole_and_streamed(said: tuple[str, Served]) -> None:
    name, server = said
    for more, chat in (({}, {}), ({"tools": [TOOL]}, {"tools": [CHAT_TOOL]})):
        for limit in (200, 9):
            message, parts = (ask(server, max_tokens=limit, **more) for ask in (answered, streamed))
            assert plain(parts) == plain(message)
            for each in (message, parts):
                names = [block["id"] for block in each["content"] if block["type"] == "tool_use"]
                assert len({*names}) == len(names) and all(name.startswith("toolu_") for name in names)
            body = json.dumps({"max_tokens": limit, **GIVEN, **chat}).encode()
            other = post(server, CHATS, body)[1]
            choice, content = other["choices"][0], message["content"]
            texts = "".join(block["text"] for block in content if block["type"] == "text")
            thoughts = "".join(block["thinking"] for block in content if block["type"] == "thinking")
            calls = [(block["name"], block["input"]) for block in content if block["type"] == "tool_use"]
            assert texts == (choice["message"]["content"] or "")
            assert thoughts == choice["message"].get("reasoning_content", "")
            functions = [call["function"] for call in choice["message"].get("tool_calls", ())]
            assert calls == [(each["name"], json.loads(each["arguments"])) for each in functions]
            assert (
                message["stop_reason"]
                == {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[choice["finish_reason"]]
            )
            usage = other["usage"]["prompt_tokens"], other["usage"]["completion_tokens"]
            assert (message["usage"]["input_tokens"], message["usage"]["output_tokens"]) == usage
        if name == "all" and more:
            kinds = [block["type"] for block in answered(server, **more)["content"]]
            assert kinds == ["thinking", "text", "tool_use", "tool_use", "text"]


def test_a_stop_sequence_is_named(said: tuple[str, Served]) -> None:
    text = answered(said[1])["content"][-1]["text"]
    for ask in (answered, streamed):
        message = ask(said[1], stop_sequences=["nowhere", text[-1]])
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", text[-1])


def test_a_conversation_is_that_of_a_chat(said: tuple[str, Served]) -> None:
    """Blocks of text, systems, calls of tools and what they answered: the tokens are those of the same chat."""
    server = said[1]
    call = {"type": "tool_use", "id": "c", "name": "weather", "input": {"city": "Oslo"}}
    answer = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "rain"}]}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    given = {
        "system": [
            {"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "short"},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "w5"}]},
            {"role": "assistant", "content": [thought, {"type": "text", "text": "w6"}, call]},
            {"role": "user", "content": [answer, {"type": "text", "text": "w7"}]},
        ],
        "tools": [TOOL],
    }
    function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    chat = [
        {"role": "system", "content": "Be\nshort"},
        {"role": "user", "content": "w5"},
        {
            "role": "assistant",
            "content": "w6",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
        {"role": "user", "content": "w7"},
    ]
    count = post(server, COUNT, json.dumps(given).encode())[1]["input_tokens"]
    assert count == answered(server, **given)["usage"]["input_tokens"]
    body = json.dumps({"messages": chat, "tools": [CHAT_TOOL], "max_tokens": 1}).encode()
    assert count == post(server, CHATS, body)[1]["usage"]["prompt_tokens"]
    assert count > post(server, COUNT, json.dumps({"messages": talk("w5")}).encode())[1]["input_tokens"]


def test_what_coding_agents_send_is_read(said: tuple[str, Served]) -> None:
    """A block for Anthropic's servers, another with each request, is no part of the prompt; a note of the system stands
    between the turns; a tool's error is told as one; calls may be held to one."""
    server = said[1]

    def count(**more: Any) -> int:
        body = json.dumps({"model": NAME, "messages": talk("w5"), **more}).encode()
        return post(server, COUNT, body)[1]["input_tokens"]

    system = [{"type": "text", "text": "Be short", "cache_control": {"type": "ephemeral"}}]
    billing = [{"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={n};"} for n in (1, 2)]
    chats = [as_chat({**GIVEN, "system": [each, *system]}) for each in billing]
    assert chats[0] == chats[1] == as_chat({**GIVEN, "system": "Be short"})
    assert count(system=billing[:1]) == count()
    assert count(messages=[*talk("w5"), {"role": "system", "content": [{"type": "text", "text": "w6"}]}]) > count()
    failed = {"type": "tool_result", "tool_use_id": "c", "content": "no such city", "is_error": True}
    [told] = as_chat({"messages": [{"role": "user", "content": [failed]}]})["messages"]
    assert told == {"role": "tool", "tool_call_id": "c", "content": "Error: no such city"}
    more = {
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
    }
    hidden = {
        "role": "assistant",
        "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "w6"}],
    }
    assert as_chat({"messages": [hidden]})["messages"] == [{"role": "assistant", "content": "w6"}]
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    one, all_of_it = (answered(server, tools=[TOOL], **each) for each in ({"tool_choice": choice, **more}, {}))
    calls, first = ([b["input"] for b in each["content"] if b["type"] == "tool_use"] for each in (all_of_it, one))
    assert first == calls[:1]


def test_an_output_s_format_is_a_chat_s() -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    chat = as_chat({**GIVEN, "output_config": {"format": form}})
    assert chat["response_format"] == {"type": "json_schema", "json_schema": {"schema": SCHEMA}}


def test_an_effort_is_a_chat_s() -> None:
    assert as_chat({**GIVEN, "output_config": {"effort": "low"}})["reasoning_effort"] == "low"
    assert "reasoning_effort" not in as_chat({**GIVEN, "output_config": {"effort": "high"}})


def test_cached_tokens_are_counted_apart(said: tuple[str, Served]) -> None:
    text = {"messages": talk("w5 " * 40)}
    total = answered(server := said[1], **text)["usage"]
    for ask in (answered, streamed):
        usage = ask(server, **text)["usage"]
        assert usage["cache_read_input_tokens"] > 16
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == total["input_tokens"]


@pytest.mark.parametrize(
    ("thinking", "said"),
    [
        (None, None),
        ({"type": "adaptive"}, None),
        ({"type": "disabled"}, {"enable_thinking": False}),
        ({"type": "enabled", "budget_tokens": 1024}, {"enable_thinking": True}),
    ],
)
def test_thinking_is_told_to_the_template(thinking: Any, said: Any) -> None:
    body = {**GIVEN, "max_tokens": 5} | ({} if thinking is None else {"thinking": thinking})
    assert as_chat(body).get("chat_template_kwargs") == said


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_errors_have_anthropics_types(status: int, kind: str) -> None:
    assert message_error("no", status) == {"type": "error", "error": {"type": kind, "message": "no"}}
    told = message_error("no", status, "thread_unsupported_request")["error"]
    assert told == {"type": kind, "message": "no", "details": {"error_code": "thread_unsupported_request"}}


def test_refusals_have_anthropics_form_and_name_what_is_wrong(said: tuple[str, Served]) -> None:
    image = {"type": "image", "source": {"type": "url", "url": "http://localhost/x.png"}}
    for fields, status, words in (
        ({"max_tokens": None}, 400, "max_tokens is missing"),
        ({"messages": None}, 400, "messages is missing"),
        ({"messages": [{"role": "tool", "content": "w5"}]}, 400, "messages[0] must have a role"),
        ({"messages": [{"role": "user", "content": [image]}]}, 400, "messages[0].content[0] of type 'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, 400, "messages[0].content[0]"),
        ({"model": "claude"}, 404, "the model 'claude' does not exist"),
        ({"thinking": {"type": "always"}}, 400, "thinking"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, 400, "context_management"),
        ({"output_config": {"format": {"type": "xml"}}}, 400, "output_config"),
        ({"output_config": {"effort": "low"}}, 400, "no variable reasoning_effort"),
        ({"output_config": {"effort": "some"}}, 400, "output_config"),
        ({"thread": {"type": "create"}}, 400, "thread is not accepted"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400, "tools"),
        ({"system": 5}, 400, "system"),
        ({"n": 2}, 422, "n"),
        ({"stop_sequences": [""]}, 400, "stop_sequences"),
    ):
        got, answer = post(said[1], MESSAGES, json.dumps({"max_tokens": 5, **GIVEN, **fields}).encode())
        kind = "not_found_error" if status == 404 else "invalid_request_error"
        assert (got, answer["type"], answer["error"]["type"]) == (status, "error", kind), (fields, answer)
        assert words in answer["error"]["message"], (fields, answer)
