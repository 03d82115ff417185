"""`fastspec serve` stops while requests run, and gives calls of tools as such."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.error
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers.models import tiny_head
from helpers.serve import MARKS, NAME, SECONDS, Served, post, raw, served, talk
from helpers.training import END, small_target, small_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import fastspec
from fastspec.generation.engine.engine import Engine
from fastspec.programs.serving import app

pytestmark = MARKS
COMPLETIONS = "/v1/completions"


def body(count: int, **more: Any) -> bytes:
    return json.dumps({"model": NAME, "prompt": "w5", "max_tokens": count, "temperature": 0, **more}).encode()


def begun(server: Served, path: str, sent: bytes) -> socket.socket:
    """The connection on which a request was sent."""
    host, port = server.url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)), SECONDS)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(sent)}\r\n\r\n"
    )
    client.sendall(head.encode() + sent)
    return client


def read_stream(server: Served, count: int, got: bytearray) -> None:
    """The bytes of a streamed answer, chunks as they are sent, until the connection is closed."""
    with begun(server, COMPLETIONS, body(count, stream=True)) as client:
        while part := client.recv(4096):
            got += part


def slowed(monkeypatch: Any, seconds: float) -> None:
    """Let every round take so long at the least."""
    step = Engine.step

    def slow(self: Any, *rest: Any) -> Any:
        time.sleep(seconds)
        return step(self, *rest)

    monkeypatch.setattr(Engine, "step", slow)


@pytest.mark.parametrize("grace", [0, 1])
def test_a_server_that_stops_gives_running_requests_their_time_and_no_more(grace, monkeypatch):
    """A short answer is given whole within it, one that is not done is told so, and a stream breaks off without its
    last event."""
    slowed(monkeypatch, 0.05)
    model = small_target(peak=0.15)
    model.generation_config.eos_token_id = None  # answers end by their limit alone
    with served(fastspec.patch(model), rows=4, max_length=480, assistant="autoregressive", grace=grace) as server:
        whole: dict[int, tuple[int, Any]] = {}
        stream = bytearray()

        def ask(count: int) -> None:
            whole[count] = post(server, COMPLETIONS, body(count))

        threads = [threading.Thread(target=ask, args=(count,)) for count in (8, 400)]
        threads.append(threading.Thread(target=read_stream, args=(server, 400, stream)))
        for thread in threads:
            thread.start()
        server.wait(lambda: server.batch.running == 3 and b"data: " in stream)
        began = time.monotonic()
        server.server.should_exit = True
        server.thread.join(SECONDS)
        assert grace <= time.monotonic() - began < grace + 15 and not server.batch.alive
        for thread in threads:
            thread.join(SECONDS)
        if grace:
            assert whole[8][0] == 200 and whole[8][1]["usage"]["completion_tokens"] == 8
        status, answer = whole[400]
        assert status == 503 == answer["error"]["code"] and "the server stops" in answer["error"]["message"]
        assert (
            b"[DONE]" not in stream and b'"length"' not in stream and not stream.endswith(b"\r\n0\r\n\r\n")
        )  # the last chunk
        with pytest.raises(urllib.error.URLError):
            server.get("/health")


CALL = ["<tool_call>", '{"name":', '"weather",', '"arguments":', '{"city":', '"Oslo"}}', "</tool_call>"]
TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<bot>",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*<end>", "content": "text"},
    },
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def caller() -> tuple[Any, PreTrainedTokenizerFast]:
    """A model that answers every turn with the one call, and its tokenizer: the token behind each follows from that
    alone."""
    words = small_tokenizer().get_vocab()
    words = {CALL[number - 10] if 10 <= number < 10 + len(CALL) else word: number for word, number in words.items()}
    plain = Tokenizer(models.WordLevel(words, unk_token="<start>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<end>", unk_token="<start>")
    tokenizer.chat_template, tokenizer.response_template = small_tokenizer().chat_template, TEMPLATE
    model = small_target(peak=0.15)
    model.lm_head.weight.zero_()
    emitted = [words["<bot>"], *(words[word] for word in CALL), END]
    for before, after in pairwise(emitted):
        model.lm_head.weight[after] = model.model.embed_tokens.weight[before]
    for layer in model.model.layers:  # the last token alone decides
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    return fastspec.patch(model, eagle3=tiny_head(model)), tokenizer


@torch.no_grad()
def test_a_call_of_a_tool_is_given_as_such_whole_and_streamed():
    model, tokenizer = caller()
    with served(model, rows=2, tokenizer=tokenizer) as server:
        client = server.client()
        given = {"model": NAME, "messages": talk("w5 w6"), "tools": [TOOL], "temperature": 0, "max_tokens": 20}
        choice = client.chat.completions.create(**given).choices[0]
        assert choice.finish_reason == "tool_calls" and not choice.message.content
        (call,) = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo"})
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**given, stream=True)]
        (streamed,) = [each for chunk in chunks for each in chunk.delta.tool_calls or []]
        assert (streamed.function.name, json.loads(streamed.function.arguments)) == ("weather", {"city": "Oslo"})
        assert chunks[-1].finish_reason == "tool_calls" and not any(chunk.delta.content for chunk in chunks)
        result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
        answered = [*given["messages"], {"role": "assistant", "content": "", "tool_calls": [call.model_dump()]}, result]
        assert (
            client.chat.completions.create(**{**given, "messages": answered}).choices[0].finish_reason == "tool_calls"
        )


@torch.no_grad()
def test_a_stream_with_nothing_to_say_tells_that_it_lives(monkeypatch):
    """A comment, in Anthropic's form a ping, while a call is held back and while a prompt waits for a row: clients skip
    it, and all else is what it was. A whole answer has none."""
    slowed(monkeypatch, 0.06)
    model, tokenizer = caller()
    given = {"model": NAME, "messages": talk("w5 w6"), "tools": [TOOL], "temperature": 0, "max_tokens": 20}
    own = {"name": "weather", "input_schema": TOOL["function"]["parameters"]}
    asked = {
        "/v1/chat/completions": given,
        "/v1/responses": {
            "model": NAME,
            "input": "w5 w6",
            "temperature": 0,
            "tools": [{**TOOL["function"], "type": "function"}],
        },
        "/v1/messages": {**given, "tools": [own]},
    }
    comment, ping = ": keep-alive", 'event: ping\ndata: {"type": "ping"}'
    with served(model, rows=1, assistant="autoregressive", tokenizer=tokenizer) as server:

        def events(path: str) -> list[str]:
            return raw(server, path, {**asked[path], "stream": True}).removesuffix("\n\n").split("\n\n")

        quiet = {path: events(path) for path in asked}
        monkeypatch.setattr(app, "SILENCE", 0.01)
        for path, before in quiet.items():
            found, mark = events(path), ping if path == "/v1/messages" else comment
            assert found.count(mark) > before.count(mark) == (path == "/v1/messages")
            assert len([each for each in found if each != mark]) == len([each for each in before if each != mark])
        status, whole = post(server, "/v1/chat/completions", json.dumps(given).encode())
        assert status == 200 and whole["choices"][0]["finish_reason"] == "tool_calls"
        client = server.client()
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**given, stream=True)]
        assert chunks[-1].finish_reason == "tool_calls" and len(chunks) == len(quiet["/v1/chat/completions"]) - 1
        with client.responses.stream(**asked["/v1/responses"]) as stream:
            assert [event.type for event in stream] == [
                json.loads(each.split("data: ")[1])["type"] for each in quiet["/v1/responses"]
            ]
        with begun(server, COMPLETIONS, body(300, stream=True, logit_bias={str(END): -100})) as running:
            server.wait(lambda: server.batch.running == 1)
            waiting = begun(server, COMPLETIONS, body(3, stream=True))  # for the one row
            got = bytearray()
            while b": keep-alive" not in got:
                got += waiting.recv(4096)
            assert b"data: " not in got and server.batch.waiting == 1
            waiting.close()
            server.wait(lambda: server.batch.waiting == 0)
            assert server.batch.running == 1 and running
        server.wait(lambda: server.batch.running == 0)
