"""What one request, or one client, could do to all others: hang the rounds, take memory, hold the interpreter."""

from __future__ import annotations

import json
import resource
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from helpers.serve import MARKS, SECONDS, post, served
from helpers.threads import in_threads
from helpers.training import small_target, small_tokenizer

import fastspec
from fastspec.generation.engine.engine import Engine
from fastspec.programs.serving import metrics
from fastspec.programs.serving import server as serving
from fastspec.programs.serving.app import HEADER, bound, build_app, run_server
from fastspec.programs.serving.fields import KNOWN
from fastspec.programs.serving.requests import Limits
from fastspec.programs.serving.server import Server

pytestmark = MARKS


def stub(**more: Any) -> Any:
    """A batch that decodes nothing."""
    given = {"max_length": 10**6, "model": small_target(), "alive": True, "turns": 3, "running": 0, "waiting": 0}
    given["info"] = {"assistant": "nasd"}
    return SimpleNamespace(**{**given, **more})


def test_health_is_told_by_the_turns_of_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(serving, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    batch = stub()
    server = Server(batch, small_tokenizer(), "small", Limits())

    def after(seconds: float, **changes: Any) -> str | None:
        now[0] += seconds
        vars(batch).update(changes)
        return server.ill()

    assert after(0) is None and after(1000) is None  # nothing is there to do
    assert after(1, waiting=1) is None and after(serving.STALLED - 1) is None
    assert "no round has ended for" in str(after(2, running=1, waiting=0))
    assert after(1, turns=4) is None and after(serving.STALLED - 1) is None
    assert "no round" in str(after(2)) and after(1, running=0) is None
    assert after(1, alive=False) == "the rounds have failed for good"


def test_rounds_that_hang_are_unhealthy_until_they_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    go, step = threading.Event(), Engine.step
    monkeypatch.setattr(Engine, "step", lambda *given: go.wait(SECONDS) and step(*given))
    monkeypatch.setattr(serving, "STALLED", 0.2)
    body = json.dumps({"prompt": "w5", "max_tokens": 5}).encode()
    with served(fastspec.patch(small_target(peak=0.15)), rows=1, assistant="nasd") as server:
        got: list[int] = []
        asking = threading.Thread(target=lambda: got.append(post(server, "/v1/completions", body)[0]))
        asking.start()
        server.wait(lambda: server.batch.running == 1)
        server.wait(lambda: health(server.url) == 503)
        go.set()
        asking.join(SECONDS)
        assert got == [200] and health(server.url) == 200


def health(url: str) -> int:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), SECONDS) as client:
        client.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        return int(client.recv(4096).split()[1])


def test_the_rate_is_read_and_written_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forget what is old; the first item is looked at and taken by one."""

    class Slow(metrics.deque):  # type: ignore[type-arg]
        def __getitem__(self, at: Any) -> Any:
            found = super().__getitem__(at)
            time.sleep(0.05)
            return found

    rate = metrics.Rate()
    rate.seen = Slow([(time.monotonic() - 2 * metrics.WINDOW, 1)])

    in_threads(lambda _: rate.value(), 3)
    assert not rate.seen


def test_a_header_that_never_ends_is_cut() -> None:
    """By the parser that has a bound, whichever are installed."""
    held: list[uvicorn.Server] = []

    class Kept(uvicorn.Server):
        def __init__(self, config: uvicorn.Config) -> None:
            super().__init__(config)
            held.append(self)

    app = build_app(
        fastspec.continuous(fastspec.patch(small_target()), "nasd", rows=1, max_length=40), small_tokenizer(), "small"
    )
    with bound("127.0.0.1", 0) as listener, pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn, "Server", Kept)
        thread = threading.Thread(target=run_server, args=(app, listener), kwargs={"log_level": "error"})
        thread.start()
        while not held or not held[0].started:
            time.sleep(0.01)
        assert held[0].config.http == "h11" and app.loopback
        sent = 0
        with socket.create_connection(listener.getsockname(), SECONDS) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nX-Long: ")
            try:
                while sent < 64 * HEADER:
                    sent += client.send(b"x" * 4096)
                told = client.recv(4096)
            except OSError:
                told = b"HTTP/1.1 400"  # it was closed already
        assert told.startswith(b"HTTP/1.1 400") and sent < 64 * HEADER
        held[0].should_exit = True
        thread.join(SECONDS)
    assert not thread.is_alive()


def test_a_long_prompt_is_tokenized_while_others_go_on() -> None:
    """The tokenizer lets go of the interpreter: a thread beside it runs."""
    server, ticks = Server(stub(), small_tokenizer(), "small", Limits()), 0
    reading = threading.Thread(target=lambda: server.ids("w5 " * 600_000, special=True))
    reading.start()
    while reading.is_alive():
        time.sleep(0.001)
        ticks += 1
    assert ticks > 20


@pytest.mark.slow
def test_no_setting_takes_all_time_or_memory() -> None:
    """Of every name that transformers knows, with values far from any use: answered or refused in seconds."""
    odd = [
        0,
        1,
        -1,
        10**9,
        10**18,
        1e-300,
        1e300,
        True,
        False,
        "x",
        [],
        [[]],
        [5],
        [[5] * 1000],
        {},
        {"5": 1},
        [[[5], 1e9]],
    ]
    with served(fastspec.patch(small_target(peak=0.15)), rows=1, max_length=80, assistant="nasd") as server:
        before, wrong = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
        for name in sorted(KNOWN):
            for value in odd:
                body = {"prompt": "w5 w6", "max_tokens": 3, "generation_config": json.dumps({name: value})}
                began = time.monotonic()
                status, answer = post(server, "/v1/completions", json.dumps(body).encode())
                if status not in (200, 400) or time.monotonic() - began > 100:
                    wrong.append((name, value, answer))
        assert not wrong
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kilobytes
