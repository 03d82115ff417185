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
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor

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


def ids_of(prompt: str | list[dict[str, str]]) -> Tensor:
    """Token ids of a text or a chat, as a row."""
    tokenizer = small_tokenizer()
    if isinstance(prompt, str):
        return tokenizer(prompt, return_tensors="pt").input_ids
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt")["input_ids"]


def alone(plain: Any, prompt: Any, count: int, **options: Any) -> tuple[str, int, int]:
    """What the unpatched model answers: the text, and the numbers of prompt and new tokens."""
    tokenizer, ids = small_tokenizer(), ids_of(prompt)
    new = plain.generate(ids, max_new_tokens=count, do_sample=False, tokenizer=tokenizer, **options)[0, ids.shape[1] :]
    return tokenizer.decode(new, skip_special_tokens=True), ids.shape[1], len(new)


def talk(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@dataclass(frozen=True)
class Asked:
    """A request: drawn by a seed, or greedy without one."""

    text: str
    count: int
    chat: bool = False
    stream: bool = False
    seed: int | None = None
    price: float | None = None

    @property
    def prompt(self) -> str | list[dict[str, str]]:
        return talk(self.text) if self.chat else self.text

    async def answer(self, client: Any) -> str:
        given: dict[str, Any] = {"model": NAME, "max_tokens": self.count, "seed": self.seed, "stream": self.stream}
        given["temperature"] = 0.0 if self.seed is None else 1.0
        given["messages" if self.chat else "prompt"] = self.prompt
        if self.price is not None:
            given["extra_body"] = {"price": self.price}
        create = client.chat.completions.create if self.chat else client.completions.create
        answer = await create(**given)
        if not self.stream:
            return answer.choices[0].message.content if self.chat else answer.choices[0].text
        parts = [chunk.choices[0] async for chunk in answer]
        return "".join((part.delta.content if self.chat else part.text) or "" for part in parts)


def ask_all(server: Served, asked: list[Asked], at_a_time: int = 16) -> list[str]:
    """The answers to requests, so many in flight."""

    async def everyone() -> list[str]:
        gate = asyncio.Semaphore(at_a_time)

        async def answer(each: Asked) -> str:
            async with gate:
                return await each.answer(client)

        async with server.client(openai.AsyncOpenAI) as client:
            return await asyncio.gather(*map(answer, asked))

    return asyncio.run(everyone())


def hold_as_alone(plain: Any, asked: list[Asked], got: list[str]) -> None:
    """Every answer is that of the unpatched model alone, sampled ones that of their seed in a batch of one row without
    drafts."""
    sampled: dict[str, Any] = {"do_sample": True, "temperature": 1.0}
    with (
        fastspec.patched(small_target(peak=0.15)) as other,
        fastspec.continuous(other, "autoregressive", rows=1, max_length=400) as batch,
    ):
        for emitted, each in zip(got, asked, strict=True):
            if each.seed is None:
                assert emitted == alone(plain, each.prompt, each.count)[0]
                continue
            ids = ids_of(each.prompt)
            want = batch.submit(ids, max_new_tokens=each.count, seed=each.seed, **sampled).result(SECONDS)
            assert emitted == small_tokenizer().decode(want[0, ids.shape[1] :], skip_special_tokens=True)


def requests(count: int, seed: int) -> list[Asked]:
    """Chats and completions, streamed and not, of all lengths, a fifth of them sampled."""
    rng = random.Random(seed)
    return [
        Asked(words(rng), rng.randint(1, 40), index % 2 == 0, index % 3 == 0, index if index % 5 == 0 else None)
        for index in range(count)
    ]
