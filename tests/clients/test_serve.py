"""`fastspec serve` by real clients: each answer is that of `generate` alone, and what cannot be answered says why."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_clients import MARKS
from helpers_models import tiny_head
from helpers_serve import NAME, SECONDS, Served, openai, post, served
from helpers_training import small_target, small_tokenizer

import fastspec

pytestmark = MARKS
@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    model = small_target(peak=0.15)
    return small_target(peak=0.15), fastspec.patch(model, eagle3=tiny_head(model))


@pytest.fixture(scope="module")
def server(pair) -> Iterator[Served]:
    with served(pair[1]) as running:
        yield running


def words(rng: random.Random, low: int = 1, high: int = 40) -> str:
    return " ".join(f"w{rng.randint(4, 127)}" for _ in range(rng.randint(low, high)))


def alone(plain: Any, prompt: Any, count: int, **options: Any) -> tuple[str, int, int]:
    """What the unpatched model answers: the text, and the numbers of prompt and new tokens."""
    tokenizer = small_tokenizer()
    if isinstance(prompt, str):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
    else:
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]
    new = plain.generate(ids, max_new_tokens=count, do_sample=False, tokenizer=tokenizer, **options)[0, ids.shape[1] :]
    return tokenizer.decode(new, skip_special_tokens=True), ids.shape[1], len(new)


def talk(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_chats_completions_and_streams_give_what_generate_gives(pair, server):
    plain, client = pair[0], server.client()
    rng = random.Random(0)
    for count in (1, 24):
        text = words(rng)
        for prompt, create, read, delta in (
            (text, client.completions.create, lambda choice: choice.text, lambda choice: choice.text),
            (talk(text), client.chat.completions.create, lambda choice: choice.message.content, lambda choice: choice.delta.content),
        ):
            generated, before, new = alone(plain, prompt, count)
            given = {"model": NAME, "max_tokens": count, "temperature": 0, "prompt" if prompt is text else "messages": prompt}
            answer = create(**given)
            assert read(answer.choices[0]) == generated and answer.choices[0].finish_reason == ("length" if new == count else "stop")
            assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (before, new)
            chunks = list(create(**given, stream=True))
            assert "".join(delta(chunk.choices[0]) or "" for chunk in chunks) == generated
            assert chunks[-1].usage.completion_tokens == new and chunks[-1].choices[0].finish_reason == answer.choices[0].finish_reason
    answer = client.responses.create(model=NAME, input=text, max_output_tokens=9, temperature=0)
    assert answer.output_text == alone(plain, talk(text), 9)[0]


def test_penalties_and_seeds(pair, server):
    plain, client = pair[0], server.client()
    text = "w5 w6 w7"
    answer = client.completions.create(model=NAME, prompt=text, max_tokens=12, temperature=0, frequency_penalty=0.5)
    assert answer.choices[0].text == alone(plain, text, 12, repetition_penalty=1.5)[0]

    def drawn(**options: Any) -> str:
        return client.completions.create(model=NAME, prompt=text, max_tokens=12, temperature=1.5, **options).choices[0].text

    assert drawn(seed=7) == drawn(seed=7) != drawn(seed=8)
    assert len({drawn() for _ in range(3)} | {drawn(seed=7)}) == 4


def test_two_hundred_requests_sixteen_in_flight(pair, server):
    """Chats and completions, streamed and not, of all lengths, a third of them sampled: none is lost, and none has another's answer."""
    plain, rng = pair[0], random.Random(1)
    asked = [(words(rng), rng.randint(1, 40), index % 2 == 0, index % 3 == 0, index if index % 5 == 0 else None) for index in range(200)]

    async def ask(client: Any, gate: Any, text: str, count: int, chat: bool, stream: bool, seed: int | None) -> str:
        async with gate:
            given = {"model": NAME, "max_tokens": count, "temperature": 0.0 if seed is None else 1.0, "seed": seed, "stream": stream}
            create = client.chat.completions.create if chat else client.completions.create
            answer = await create(**given, **({"messages": talk(text)} if chat else {"prompt": text}))
            if not stream:
                return answer.choices[0].message.content if chat else answer.choices[0].text
            parts = [chunk.choices[0] async for chunk in answer]
            return "".join((part.delta.content if chat else part.text) or "" for part in parts)

    async def everyone() -> list[str]:
        gate = asyncio.Semaphore(16)
        async with server.client(openai.AsyncOpenAI) as client:
            return await asyncio.gather(*(ask(client, gate, *each) for each in asked))

    before = server.metric('fastspec_requests_total{outcome="length"}')
    got = asyncio.run(everyone())
    assert server.metric("fastspec_tokens_per_second") > 0  # of the last seconds
    with fastspec.patched(small_target(peak=0.15)) as other, fastspec.continuous(other, "autoregressive", rows=1, max_length=400) as batch:
        for generated, (text, count, chat, _, seed) in zip(got, asked, strict=True):
            if seed is None:
                assert generated == alone(plain, talk(text) if chat else text, count)[0]
                continue
            tokenizer = small_tokenizer()
            ids = tokenizer(text, return_tensors="pt").input_ids if not chat else tokenizer.apply_chat_template(
                talk(text), add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]  # fmt: skip
            want = batch.submit(ids, max_new_tokens=count, do_sample=True, temperature=1.0, seed=seed).result(SECONDS)
            assert generated == tokenizer.decode(want[0, ids.shape[1] :], skip_special_tokens=True)
    assert server.metric('fastspec_requests_total{outcome="length"}') > before
    assert server.batch.running == server.batch.waiting == 0
    assert server.metric("fastspec_acceptance_length") > 1 and server.metric("fastspec_rows") == 4
    assert server.metric("fastspec_time_to_first_token_seconds_count") >= 200


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
        assert server.metric('fastspec_requests_total{outcome="cancelled"}') >= 1 and server.batch.stats.emitted < 2 * 450
        answer = server.client().completions.create(**{**given, "stream": False, "max_tokens": 5})
        assert answer.usage.completion_tokens == 5


def test_a_full_queue_a_missing_key_and_an_answer_as_long_as_there_is_room(endless):
    from fastspec.serving.requests import Limits

    with served(endless, rows=1, max_length=480, limits=Limits(queue=1), api_key="secret") as server:
        assert json.loads(server.get("/health")) == {"status": "ok"}
        assert post(server, "/v1/completions", b'{"prompt": "w5"}')[0] == 401
        with pytest.raises(openai.AuthenticationError):
            server.client().models.list()
        client = server.client(key="secret")
        assert [model.id for model in client.models.list()] == [NAME]
        streams = [client.completions.create(model=NAME, prompt="w5", stream=True, temperature=0) for _ in range(2)]
        server.wait(lambda: server.batch.running == 1 and server.batch.waiting == 1)
        with pytest.raises(openai.RateLimitError, match="waiting already"):
            client.completions.create(model=NAME, prompt="w5")
        assert [list(stream)[-1].usage.completion_tokens for stream in streams] == [479, 479]


def test_a_batch_that_has_stopped_is_unhealthy(pair, monkeypatch):
    from fastspec.generation.engine.engine import Engine

    def failing(self: Any, *rest: Any) -> Any:
        raise RuntimeError('no "luck"')

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
        with pytest.raises(urllib.error.HTTPError, match="503"):
            server.get("/health")


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("small")
    for part in (small_target(peak=0.15), small_tokenizer()):
        part.save_pretrained(path)
    return path


def test_a_server_that_is_killed_comes_back_and_ends_when_told(pair, small_folder):
    """In a process of its own, from the command line."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    command = [sys.executable, "-m", "fastspec.cli", "serve", str(small_folder), "--name", NAME, "--rows", "2", "--port", str(port)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "FASTSPEC_API_KEY": "secret"}
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="secret", max_retries=0, timeout=SECONDS)
    generated, _, new = alone(pair[0], talk("w5 w6"), 8)
    for last in (signal.SIGKILL, signal.SIGTERM):
        process = subprocess.Popen([*command], env=environment, stderr=subprocess.PIPE, text=True)
        try:
            deadline = time.monotonic() + SECONDS
            while True:
                try:
                    answer = client.chat.completions.create(model=NAME, messages=talk("w5 w6"), max_tokens=8, temperature=0)
                    break
                except openai.APIConnectionError:
                    assert process.poll() is None and time.monotonic() < deadline
                    time.sleep(0.2)
            assert answer.choices[0].message.content == generated and answer.model == NAME
            process.send_signal(last)
            _, log = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
            process.wait()
    assert process.returncode in (0, -signal.SIGTERM) and f"{new} new" in log and "Traceback" not in log
    assert torch.is_grad_enabled()
