"""`fastspec serve` by real clients: each answer is that of `generate` alone, and what cannot be answered says why."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.models import tiny_head
from helpers.serve import (
    MARKS,
    NAME,
    Asked,
    Served,
    alone,
    ask_all,
    hold_as_alone,
    openai,
    post,
    requests,
    served,
    talk,
    words,
)
from helpers.training import small_target
from transformers.generation.logits_process import LogitsProcessorList

import fastspec
from fastspec.patches.call import one_prompt
from fastspec.patches.call.processors import TokenPenalties
from fastspec.programs.serving import app

pytestmark = MARKS


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    model = small_target(peak=0.15)
    return small_target(peak=0.15), fastspec.patch(model, eagle3=tiny_head(model))


@pytest.fixture(scope="module")
def server(pair) -> Iterator[Served]:
    with served(pair[1]) as running:
        yield running


def test_settings_are_prepared_once(pair, server, monkeypatch):
    """Of a server's requests, whose answers are told by what they ask for, and not by who prepared it."""
    again: list[int] = []
    real = one_prompt._again
    monkeypatch.setattr(
        one_prompt, "_again", lambda settled, given, seed: again.append(1) or real(settled, given, seed)
    )
    asked = [Asked(f"w{number + 4} w9", 3 + number % 5, number % 2 == 0, number % 3 == 0) for number in range(16)]
    for _ in range(2):
        hold_as_alone(pair[0], asked, ask_all(server, asked))
    assert len(again) >= len(asked)


def test_chats_completions_and_streams_give_what_generate_gives(pair, server):
    plain, client = pair[0], server.client()
    rng = random.Random(0)
    for count in (1, 24):
        text = words(rng)
        for prompt, create, read, delta in (
            (text, client.completions.create, lambda choice: choice.text, lambda choice: choice.text),
            (
                talk(text),
                client.chat.completions.create,
                lambda choice: choice.message.content,
                lambda choice: choice.delta.content,
            ),
        ):
            generated, before, new = alone(plain, prompt, count)
            given = {
                "model": NAME,
                "max_tokens": count,
                "temperature": 0,
                "prompt" if prompt is text else "messages": prompt,
            }
            answer = create(**given)
            assert read(answer.choices[0]) == generated and answer.choices[0].finish_reason == (
                "length" if new == count else "stop"
            )
            assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (before, new)
            chunks = list(create(**given, stream=True))
            assert "".join(delta(chunk.choices[0]) or "" for chunk in chunks) == generated
            assert (
                chunks[-1].usage.completion_tokens == new
                and chunks[-1].choices[0].finish_reason == answer.choices[0].finish_reason
            )
    answer = client.responses.create(model=NAME, input=text, max_output_tokens=9, temperature=0)
    assert answer.output_text == alone(plain, talk(text), 9)[0]


def test_penalties_and_seeds(pair, server):
    plain, client = pair[0], server.client()
    text = "w5 w6 w7"
    more = {"repetition_penalty": 1.5}
    answer = client.completions.create(model=NAME, prompt=text, max_tokens=12, temperature=0, extra_body=more)
    assert answer.choices[0].text == alone(plain, text, 12, repetition_penalty=1.5)[0]
    penalties = {"frequency_penalty": 0.5, "presence_penalty": -0.25}
    answer = client.completions.create(model=NAME, prompt=text, max_tokens=12, temperature=0, **penalties)
    own = LogitsProcessorList([TokenPenalties(0.5, -0.25, 3)])
    assert answer.choices[0].text == alone(plain, text, 12, logits_processor=own)[0]

    def drawn(**options: Any) -> str:
        return (
            client.completions.create(model=NAME, prompt=text, max_tokens=12, temperature=1.5, **options)
            .choices[0]
            .text
        )

    assert drawn(seed=7) == drawn(seed=7) != drawn(seed=8)
    assert drawn(seed=7, top_p=0) == alone(plain, text, 12)[0]  # the likeliest token alone is left
    assert len({drawn() for _ in range(3)} | {drawn(seed=7)}) == 4


def test_many_requests_sixteen_in_flight(pair, server):
    """None is lost, and none has another's answer; `make test-clients` asks two hundred."""
    asked = requests(24, 1)
    got = ask_all(server, asked)
    assert server.metric("fastspec_tokens_per_second") > 0  # of the last seconds
    hold_as_alone(pair[0], asked, got)
    assert server.batch.running == server.batch.waiting == 0
    assert server.metric("fastspec_acceptance_length") > 1 and server.metric("fastspec_rows") == 4
    assert server.metric("fastspec_time_to_first_token_seconds_count") >= 24
    assert server.metric('fastspec_requests_total{outcome="length"}') > 0


@pytest.fixture(scope="module")
def endless() -> Any:
    """A patched model whose answers never end by themselves."""
    model = small_target(peak=0.15)
    model.generation_config.eos_token_id = None
    return fastspec.patch(model, eagle3=tiny_head(model))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_leaves_its_row(endless, stream):
    """While it runs, and while it waits for a row."""
    with served(endless, rows=1, max_length=480) as server:
        given = {"model": NAME, "prompt": "w5", "max_tokens": 450, "temperature": 0, "stream": stream}

        async def leave() -> None:
            async with server.client(openai.AsyncOpenAI) as client:
                tasks = [asyncio.ensure_future(client.completions.create(**given)) for _ in range(2)]
                if stream:
                    first = await tasks[0]
                    await anext(first.__aiter__())
                    await first.close()
                else:
                    while not server.batch.running:
                        await asyncio.sleep(0.01)
                for task in tasks:
                    task.cancel()

        asyncio.run(leave())
        server.wait(lambda: server.batch.running == server.batch.waiting == 0)
        assert (
            server.metric('fastspec_requests_total{outcome="cancelled"}') >= 1 and server.batch.stats.emitted < 2 * 450
        )
        answer = server.client().completions.create(**{**given, "stream": False, "max_tokens": 5})
        assert answer.usage.completion_tokens == 5


def test_a_full_queue_a_missing_key_and_an_answer_as_long_as_there_is_room(endless):
    from fastspec.programs.serving.requests import Limits

    with served(endless, rows=1, max_length=120, limits=Limits(queue=1), api_key="secret") as server:
        assert json.loads(server.get("/health")) == {"status": "ok"}
        assert post(server, "/v1/completions", b'{"prompt": "w5"}')[0] == 401
        with pytest.raises(openai.AuthenticationError):
            server.client().models.list()
        client = server.client(key="secret")
        assert [model.id for model in client.models.list()] == [NAME]
        streams = []
        for waiting in range(2):  # one at a time: a prompt waits too until the batch's thread has seen it
            streams.append(client.completions.create(model=NAME, prompt="w5", stream=True, temperature=0))
            server.wait(lambda waiting=waiting: server.batch.running == 1 and server.batch.waiting == waiting)
        with pytest.raises(openai.RateLimitError, match="waiting already"):
            client.completions.create(model=NAME, prompt="w5")
        assert [list(stream)[-1].usage.completion_tokens for stream in streams] == [119, 119]


def test_a_batch_that_has_stopped_is_unhealthy(pair, monkeypatch, caplog):
    from fastspec.generation.engine.engine import Engine

    def failing(self: Any, *rest: Any) -> Any:
        raise RuntimeError('no "luck"')

    caplog.set_level(logging.INFO, "fastspec.serve")
    with served(pair[1], rows=1) as server:
        client = server.client()
        given = {"model": NAME, "prompt": "w5", "max_tokens": 5}
        monkeypatch.setattr(Engine, "step", failing)
        with pytest.raises(openai.InternalServerError, match=r"no .*luck"):
            client.completions.create(**given)
        with pytest.raises(openai.APIError):
            list(client.completions.create(**given, stream=True))
        assert json.loads(server.get("/health")) == {"status": "ok"}  # new rounds were made each time
        monkeypatch.setattr(type(server.batch), "_rounds", failing)
        with pytest.raises(openai.InternalServerError):
            client.completions.create(**given)
        server.wait(lambda: not server.batch.alive)
        assert post(server, "/v1/completions", json.dumps(given).encode())[0] == 503
        assert re.search("refused with 503, .*luck", caplog.text)
        with pytest.raises(urllib.error.HTTPError, match="503"):
            server.get("/health")


def test_the_log_has_a_few_of_many_refusals_a_second(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "fastspec.serve")
    for second in (5.0, 6.5):
        monkeypatch.setattr(app, "time", SimpleNamespace(monotonic=lambda second=second: second))
        for number in range(300):
            app._log_refusal(f"it{number}", 429 if number % 2 else 503, "full")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 * (app.REFUSALS + 1) and lines[1] == "it1: refused with 429, 'full'"
    assert lines[app.REFUSALS] == lines[-1] == "more refusals of this second are not logged"
