"""What stands before a server's routes, by hand-made ASGI messages, and the command where the server's programs are
missing."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from typing import Any

import pytest
from typer.testing import CliRunner

from fastspec.distribution import install_command
from fastspec.programs.cli.app import app
from fastspec.programs.serving.middleware import DRAINED, LET_GO, RequestMiddleware


class Client:
    """Sends a body in parts, and then goes away or waits."""

    def __init__(self, parts: list[bytes], leaves: bool = False) -> None:
        self.parts, self.leaves, self.got = list(parts), leaves, []  # type: ignore[var-annotated]
        self.stays = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        if self.parts:
            part = self.parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(self.parts)}
        if not self.leaves:
            await self.stays.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.got.append(message)


def asked(
    gate: RequestMiddleware, client: Client, path: str = "/v1/completions", **headers: str
) -> tuple[int | None, bytes]:
    """Status and body of an answer; None where there is none."""
    scope = {
        "type": "http",
        "path": path,
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    asyncio.run(asyncio.wait_for(gate(scope, client.receive, client.send), 10))
    return (client.got[0]["status"], client.got[1]["body"]) if client.got else (None, b"")


async def echo(scope: Any, receive: Any, send: Any) -> None:
    message = await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": message["body"]})


@pytest.mark.parametrize("parts", [[b"hello"], [b"he", b"", b"llo"], [b""]])
def test_a_body_arrives_whole(parts):
    assert asked(RequestMiddleware(echo, ("/v1/completions",), 5, None), Client(parts)) == (200, b"".join(parts))


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("leaves", [True, False])
def test_what_nobody_waits_for_is_let_go(begins, leaves):
    """Of a client that goes, before an answer has begun and behind that; of one that stays until its end nothing is."""
    let_go = []

    async def answering(scope: Any, receive: Any, send: Any) -> None:
        LET_GO.get().append(lambda: let_go.append(1))
        if begins:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.sleep(60 if leaves else 0)

    client, gate = Client([b""], leaves), RequestMiddleware(answering, ("/v1/completions",), 5, None)
    scope = {"type": "http", "path": "/v1/completions", "headers": []}
    asyncio.run(asyncio.wait_for(gate(scope, client.receive, client.send), 10))
    assert let_go == [1] * leaves


def test_who_is_not_let_in_is_told_why():
    def told(status: int, words: str, client: Client, **options: Any) -> None:
        got, body = asked(RequestMiddleware(echo, ("/v1/completions", "/health"), 5, "se cret"), client, **options)
        error = json.loads(body)["error"]
        assert got == error["code"] == status and words in error["message"]

    key = {"authorization": "Bearer se cret"}
    told(404, "/reset is not served", Client([b""]), path="/reset", **key)
    told(401, "API key", Client([b"hello"]))
    told(401, "API key", Client([b"hello"]), authorization="Bearer se cre")
    told(413, "longer than 5 bytes", Client([b"hello!"]), **key)
    told(413, "longer than 5 bytes", Client([b"hel", b"lo!"]), **key)
    told(413, "longer than 5 bytes", Client([b""]), **{"content-length": str(5 * DRAINED + 1)}, **key)
    told(401, "API key", Client([b"hello"]), authorization="Basic se cret")
    for scheme in ("Bearer", "bearer", "BEARER"):
        open_ = RequestMiddleware(echo, ("/v1/completions",), 5, "se cret")
        assert asked(open_, Client([b"hello"]), authorization=f"{scheme} se cret")[0] == 200
    long = Client([b"hello!"] * 9)
    told(413, "longer than 5 bytes", long, **key)
    assert not long.parts  # or the client would not read the answer
    endless = Client([b"hello!"] * 99)
    told(413, "longer than 5 bytes", endless, **key)
    assert len(endless.parts) > 80
    assert asked(RequestMiddleware(echo, ("/health",), 5, "secret"), Client([b""]), path="/health")[0] == 200
    gate, most = RequestMiddleware(echo, ("/v1/completions",), 5, None), {"content-length": str(5 * DRAINED)}
    assert asked(gate, Client([b"hello"]), **most)[0] == 200  # what is said is not held to the limit: what comes is


@pytest.mark.parametrize(
    ("host", "here"),
    [
        *((name, True) for name in ("127.0.0.1:8000", "localhost", "LOCALHOST:80", "[::1]:8000", "127.0.0.2")),
        *((name, False) for name in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "10.0.0.1", "")),
    ],
)
def test_a_page_of_another_name_does_not_reach_a_server_of_this_machine_without_a_key(host, here):
    """A browser's, whose name was made to lead here."""
    for key, loopback in ((None, True), (None, False), ("secret", True)):
        gate = RequestMiddleware(echo, ("/v1/completions",), 5, key)
        gate.loopback = loopback
        status, _ = asked(gate, Client([b"hello"]), host=host, authorization="Bearer secret")
        assert status == (403 if key is None and loopback and not here else 200)


def test_half_a_body_is_no_request():
    """Of a client that goes away while it sends."""
    client = Client([b"hel"], leaves=True)

    async def sends_half() -> Any:
        return (
            {"type": "http.request", "body": client.parts.pop(), "more_body": True}
            if client.parts
            else {"type": "http.disconnect"}
        )

    client.receive = sends_half  # type: ignore[method-assign]
    assert asked(RequestMiddleware(echo, ("/v1/completions",), 5, None), client) == (None, b"")


def test_a_request_whose_client_goes_away_is_cancelled():
    seen: list[str] = []

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def asks_who_is_there(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        seen.append((await receive())["type"])

    assert asked(RequestMiddleware(slow, ("/v1/completions",), 5, None), Client([b"hello"], leaves=True)) == (None, b"")
    assert asked(
        RequestMiddleware(asks_who_is_there, ("/v1/completions",), 5, None), Client([b"hello"], leaves=True)
    ) == (None, b"")
    assert seen[0] == "cancelled"


@pytest.mark.parametrize("begun", [False, True])
def test_when_the_server_stops_a_client_is_told_or_its_stream_breaks_off(begun):
    seen: list[str] = []

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            await asyncio.Event().wait()
        finally:
            seen.append("let go")

    async def stopped() -> Client:
        client = Client([b"hello"])
        scope = {"type": "http", "path": "/v1/completions", "headers": []}
        task = asyncio.ensure_future(
            RequestMiddleware(slow, ("/v1/completions",), 5, None)(scope, client.receive, client.send)
        )
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait_for(task, 10)
        await asyncio.sleep(0)
        return client

    got = asyncio.run(stopped()).got
    assert seen == ["let go"] and [message.get("status") for message in got] == ([200] if begun else [503, None])


def test_what_the_app_raises_is_not_swallowed():
    async def raising(scope: Any, receive: Any, send: Any) -> None:
        raise ArithmeticError("no")

    with pytest.raises(ArithmeticError):
        asked(RequestMiddleware(raising, ("/v1/completions",), 5, None), Client([b"hello"]))


def test_what_is_no_request_goes_through():
    seen: list[str] = []

    async def lifespan(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    asyncio.run(RequestMiddleware(lifespan, (), 5, "key")({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
    assert seen == ["lifespan"]


@pytest.mark.skipif(importlib.util.find_spec("starlette") is not None, reason="the server's programs are installed")
def test_the_command_names_the_extra_that_it_needs():
    done = CliRunner().invoke(app, ["serve", "small"])
    assert done.exit_code == 1 and install_command("serve") in " ".join(done.output.split())
