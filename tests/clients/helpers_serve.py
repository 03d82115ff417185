"""A server in this process, for tests with real clients."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from helpers_training import small_tokenizer

import fastspec

openai = pytest.importorskip("openai")
uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

TREE = fastspec.Eagle3(depth=3, top_k=2, total_tokens=6)
NAME = "small"
SECONDS = 60.0


class Served:
    """A server in a thread of this process."""

    def __init__(self, batch: Any, tokenizer: Any, name: str = NAME, **options: Any) -> None:
        from fastspec.serving.app import build_app

        self.batch = batch
        self.server = uvicorn.Server(uvicorn.Config(build_app(batch, tokenizer, name, **options), port=0, log_level="warning"))
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"

    def client(self, kind: Any = openai.OpenAI, key: str = "none", **options: Any) -> Any:
        return kind(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=SECONDS, **options)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=SECONDS) as answer:
            return answer.read().decode()

    def metric(self, name: str) -> float:
        """The value now; 0 for what has not been counted yet."""
        return next((float(line.split()[-1]) for line in self.get("/metrics").split("\n") if line.split(" ")[0] == name), 0.0)

    def wait(self, what: Any) -> None:
        end = time.monotonic() + SECONDS
        while not what():
            assert time.monotonic() < end
            time.sleep(0.01)


@contextmanager
def served(
    model: Any, rows: int = 4, max_length: int = 400, assistant: Any = TREE, tokenizer: Any = None, **options: Any
) -> Iterator[Served]:  # fmt: skip
    with fastspec.continuous(model, assistant, rows=rows, max_length=max_length, prefill_chunk=16) as batch:
        running = Served(batch, tokenizer or small_tokenizer(), **options)
        try:
            yield running
        finally:
            running.server.should_exit = True
            running.thread.join(SECONDS)
    assert not running.thread.is_alive() and not batch.alive


def post(server: Served, path: str, body: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
    """Status and JSON of an answer."""
    request = urllib.request.Request(server.url + path, body, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())
