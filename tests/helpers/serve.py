"""A server in this process, for tests with real clients."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import fastspec
from helpers.training import small_target, small_tokenizer

openai = pytest.importorskip("openai")
uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

TREE = fastspec.Eagle3(depth=3, top_k=2, total_tokens=6)
NAME = "small"
SECONDS = 300.0
"""Of waits for what comes in a second: far above what any load makes of it."""
PLAIN_HTTP = {openai.OpenAI: openai.DefaultHttpxClient, openai.AsyncOpenAI: openai.DefaultAsyncHttpxClient}
"""Clients that read no certificates, which takes 20 ms."""
MARKS = [pytest.mark.filterwarnings("default::FutureWarning", "default::DeprecationWarning")]  # other programs' own


class Served:
    """A server in a thread of this process."""

    def __init__(self, batch: Any, tokenizer: Any, name: str = NAME, grace: int | None = None, **options: Any) -> None:
        from fastspec.programs.serving.app import build_app

        self.batch = batch
        app = build_app(batch, tokenizer, name, **options)
        self.server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=grace))
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"

    def client(self, kind: Any = openai.OpenAI, key: str = "none", **options: Any) -> Any:
        if kind in PLAIN_HTTP:
            options.setdefault("http_client", PLAIN_HTTP[kind](verify=False))
        return kind(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=SECONDS, **options)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=SECONDS) as answer:
            return answer.read().decode()

    def metric(self, name: str) -> float:
        """The value now; 0 for what has not been counted yet."""
        return next(
            (float(line.split()[-1]) for line in self.get("/metrics").split("\n") if line.split(" ")[0] == name), 0.0
        )

    def wait(self, what: Any) -> None:
        end = time.monotonic() + SECONDS
        while not what():
            assert time.monotonic() < end
            time.sleep(0.01)


@contextmanager
def served(
    model: Any, rows: int = 4, max_length: int = 400, assistant: Any = TREE, tokenizer: Any = None, **options: Any
) -> Iterator[Served]:
    batch = fastspec.continuous(model, assistant, rows=rows, max_length=max_length, prefill_chunk=16)
    with batch, serving(batch, tokenizer or small_tokenizer(), **options) as running:
        yield running
    assert not batch.alive


@contextmanager
def serving(batch: Any, tokenizer: Any, **options: Any) -> Iterator[Served]:
    """A server of a batch, which ends the batch with it."""
    running = Served(batch, tokenizer, **options)
    try:
        yield running
    finally:
        running.server.should_exit = True
        running.thread.join(SECONDS)
    assert not running.thread.is_alive()


def raw(server: Served, path: str, body: dict[str, Any]) -> str:
    """The text of a streamed answer."""
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        return answer.read().decode()


def post(server: Served, path: str, body: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
    """Status and JSON of an answer."""
    request = urllib.request.Request(server.url + path, body, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def words(rng: random.Random, low: int = 1, high: int = 40) -> str:
    return " ".join(f"w{rng.randint(4, 127)}" for _ in range(rng.randint(low, high)))


def alone(plain: Any, prompt: Any, count: int, **options: Any) -> tuple[str, int, int]:
    """What the unpatched model answers: the text, and the numbers of prompt and new tokens."""
    tokenizer = small_tokenizer()
    if isinstance(prompt, str):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
    else:
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
            "input_ids"
        ]
    new = plain.generate(ids, max_new_tokens=count, do_sample=False, tokenizer=tokenizer, **options)[0, ids.shape[1] :]
    return tokenizer.decode(new, skip_special_tokens=True), ids.shape[1], len(new)


def talk(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def ask_all(server: Served, asked: list[tuple[str, int, bool, bool, int | None]], at_a_time: int = 16) -> list[str]:
    """The answers to requests (prompt, new tokens, whether a chat, whether streamed, a seed or None for greedy), so
    many in flight."""

    async def ask(client: Any, gate: Any, text: str, count: int, chat: bool, stream: bool, seed: int | None) -> str:
        async with gate:
            given = {
                "model": NAME,
                "max_tokens": count,
                "temperature": 0.0 if seed is None else 1.0,
                "seed": seed,
                "stream": stream,
            }
            create = client.chat.completions.create if chat else client.completions.create
            answer = await create(**given, **({"messages": talk(text)} if chat else {"prompt": text}))
            if not stream:
                return answer.choices[0].message.content if chat else answer.choices[0].text
            parts = [chunk.choices[0] async for chunk in answer]
            return "".join((part.delta.content if chat else part.text) or "" for part in parts)

    async def everyone() -> list[str]:
        gate = asyncio.Semaphore(at_a_time)
        async with server.client(openai.AsyncOpenAI) as client:
            return await asyncio.gather(*(ask(client, gate, *each) for each in asked))

    return asyncio.run(everyone())


def hold_as_alone(plain: Any, asked: list[tuple[str, int, bool, bool, int | None]], got: list[str]) -> None:
    """Every answer is that of the unpatched model alone, sampled ones that of their seed in a batch of one row without
    drafts."""
    tokenizer = small_tokenizer()
    with (
        fastspec.patched(small_target(peak=0.15)) as other,
        fastspec.continuous(other, "autoregressive", rows=1, max_length=400) as batch,
    ):
        for emitted, (text, count, chat, _, seed) in zip(got, asked, strict=True):
            if seed is None:
                assert emitted == alone(plain, talk(text) if chat else text, count)[0]
                continue
            ids = (
                tokenizer(text, return_tensors="pt").input_ids
                if not chat
                else tokenizer.apply_chat_template(
                    talk(text), add_generation_prompt=True, return_tensors="pt", return_dict=True
                )["input_ids"]
            )
            want = batch.submit(ids, max_new_tokens=count, do_sample=True, temperature=1.0, seed=seed).result(SECONDS)
            assert emitted == tokenizer.decode(want[0, ids.shape[1] :], skip_special_tokens=True)


def requests(count: int, seed: int) -> list[tuple[str, int, bool, bool, int | None]]:
    """Chats and completions, streamed and not, of all lengths, a fifth of them sampled."""
    rng = random.Random(seed)
    return [
        (words(rng), rng.randint(1, 40), index % 2 == 0, index % 3 == 0, index if index % 5 == 0 else None)
        for index in range(count)
    ]
