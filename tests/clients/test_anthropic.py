"""The anthropic package as a client of `/v1/messages`: whole, streamed, and the round trip of a tool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.clients import MARKS
from helpers.grammars import TOKENIZER, terse
from helpers.saying import ANSWERS, saying
from helpers.serve import NAME, SECONDS, Served, raw, served, talk

import fastspec
from fastspec.programs.serving import app

pytestmark = MARKS
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
GIVEN: dict[str, Any] = {"model": NAME, "messages": talk("hello"), "max_tokens": 200}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with torch.no_grad():
        model, tokenizer = saying(ANSWERS["all"])
    with served(model, rows=2, assistant="autoregressive", tokenizer=tokenizer) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Served) -> Any:
    anthropic = pytest.importorskip("anthropic")
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=SECONDS)


def content(message: Any) -> list[dict[str, Any]]:
    return [block.model_dump(exclude={"id"}, exclude_none=True) for block in message.content]


def test_whole_and_streamed(client: Any) -> None:
    tools = [{"name": "weather", "input_schema": SCHEMA}]
    for more in ({}, {"tools": tools}, {"tools": tools, "max_tokens": 9}):
        whole = client.messages.create(**{**GIVEN, **more})
        with client.messages.stream(**{**GIVEN, **more}) as stream:
            texts = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert content(final) == content(whole)
        assert texts == "".join(block.text for block in whole.content if block.type == "text")
        assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert whole.stop_reason == "max_tokens"


def test_pings_of_a_silent_stream_are_skipped(server: Served, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a call is held back until it is whole."""
    monkeypatch.setattr(app, "SILENCE", 0.001)
    given = {**GIVEN, "tools": [{"name": "weather", "input_schema": SCHEMA}]}
    whole = client.messages.create(**given)
    with client.messages.stream(**given) as stream:
        final = stream.get_final_message()
    assert content(final) == content(whole) and final.stop_reason == "tool_use"
    streamed = raw(server, "/v1/messages", {**given, "stream": True})
    assert streamed.count("event: ping") > 1  # one begins every stream


def test_a_tool_is_called_and_answered(client: Any) -> None:
    given = {**GIVEN, "tools": [{"name": "weather", "input_schema": SCHEMA}], "system": "You know the weather."}
    first = client.messages.create(**given)
    calls = [block for block in first.content if block.type == "tool_use"]
    assert first.stop_reason == "tool_use" and [call.input for call in calls] == [{"city": "Oslo"}, {"city": "Bergen"}]
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"} for call in calls]
    history = [
        *given["messages"],
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]},
        {"role": "user", "content": results},
    ]
    second = client.messages.create(**{**given, "messages": history})
    assert second.usage.input_tokens > first.usage.input_tokens
    counted = client.messages.count_tokens(model=NAME, messages=history, tools=given["tools"], system=given["system"])
    assert counted.input_tokens == second.usage.input_tokens


def test_what_coding_agents_send(client: Any) -> None:
    tools = [{"name": "weather", "input_schema": SCHEMA}]
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    given = {**GIVEN, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    with client.messages.stream(**given, tools=tools, tool_choice=choice) as stream:
        final = stream.get_final_message()
    assert [block.input for block in final.content if block.type == "tool_use"] == [{"city": "Oslo"}]


def test_the_runner_of_tools_goes_on_without_a_thread(client: Any) -> None:
    """It asks for a conversation that the server keeps, and takes the refusal of one for what it is."""
    anthropic = pytest.importorskip("anthropic")
    asked: list[str] = []

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Of a city.

        Args:
            city: its name
        """
        asked.append(city)
        return "rain"

    runner = client.beta.messages.tool_runner(**GIVEN, tools=[weather])
    for message, _ in zip(runner, range(2), strict=False):
        assert message.stop_reason == "tool_use"
    assert asked[:2] == ["Oslo", "Bergen"]


def test_an_output_is_parsed() -> None:
    anthropic, pydantic = map(pytest.importorskip, ("anthropic", "pydantic"))

    class It(pydantic.BaseModel):
        a: bool
        c: int

    TOKENIZER.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '<bot>' }}"
    model = terse()
    with fastspec.patched(model), served(model, max_length=500, assistant="nasd", tokenizer=TOKENIZER) as server:
        asking = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=SECONDS)
        found = asking.messages.parse(model=NAME, messages=talk("ab"), max_tokens=300, output_format=It)
    assert isinstance(found.parsed_output, It)


def test_errors_are_the_packages_own(client: Any) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.create(**{**GIVEN, "model": "claude"})
    with pytest.raises(anthropic.BadRequestError, match="stop_sequences"):
        client.messages.create(**GIVEN, stop_sequences=[""])
    stopped = client.messages.create(**GIVEN, stop_sequences=["Hm"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "Hm")
