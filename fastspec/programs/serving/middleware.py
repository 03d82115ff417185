"""Middleware before a server's routes: which there are, who may ask, how long a body may be, and who has gone."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import re
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextvars import ContextVar
from typing import Any

from starlette.middleware.cors import CORSMiddleware

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

LET_GO: ContextVar[list[Callable[[], object]]] = ContextVar("fastspec_let_go")
"""What is called when nobody waits for the request that is being answered any more: a stream whose client goes before
its first byte was never begun, so that nothing of its own can take care."""
PAGE = "/"
"""Path of the page."""
OPEN = ("/health", PAGE)
"""Paths that need no key."""
DRAINED = 16
"""Times the longest body that is read of one that is too long."""


def error_body(message: str, status: int, code: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's form; its code is the status where it has none of its own."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": code or status}}


def message_error(message: str, status: int, code: str | None = None) -> dict[str, Any]:
    """An error in Anthropic's form, with its code where it has one."""
    kinds = {
        **{401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"},
        **{429: "rate_limit_error", 503: "overloaded_error"},
    }
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "api_error")
    details = {} if code is None else {"details": {"error_code": code}}
    return {"type": "error", "error": {"type": kind, "message": message, **details}}


def error_on(path: str, message: str, status: int, code: str | None = None) -> dict[str, Any]:
    """An error in the form of the route that it is told on, Anthropic's or OpenAI's."""
    return (message_error if path.startswith("/v1/messages") else error_body)(message, status, code)


class ClientGone(Exception):
    """The client has gone before its request was there."""


class RequestMiddleware:
    """ASGI middleware around `app`. A request whose client goes away is cancelled, streamed or not."""

    loopback = False
    """True where it listens to this machine alone: without a key a page of another name, which a browser here shows and
    whose name was made to lead here, must not ask."""

    def __init__(
        self, app: App, paths: tuple[str, ...], body: int, key: str | None, origins: Sequence[str] = ()
    ) -> None:
        self.app, self.paths, self.body, self.key = app, paths, body, key
        self.outer: App = self._let_in
        if origins:
            self.outer = CORSMiddleware(
                self._let_in, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"]
            )

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Let a request in, or answer it with an error; to pages of `origins` browsers hand the answer on."""
        await self.outer(scope, receive, send)

    async def _let_in(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refused = self._refused(scope)
        if refused is None:
            try:
                body = await self._read(receive)
            except ClientGone:
                return
            refused = (413, f"the body is longer than {self.body} bytes") if body is None else None
        if refused is not None:
            await _answer(scope, send, *refused)
        elif body is not None:
            await self._run(scope, body, receive, send)

    def _refused(self, scope: Message) -> tuple[int, str] | None:
        headers, path = dict(scope["headers"]), scope["path"]
        folders = [each for each in self.paths if each[-1] == "/" and each != PAGE]
        if path not in self.paths and not any(map(path.startswith, folders)):
            return 404, f"{path} is not served: there are {', '.join(self.paths)}"
        if self.key is not None and scope["path"] not in OPEN:
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            if not scheme and b"x-api-key" in headers:  # Anthropic's way
                scheme, given = b"bearer", headers[b"x-api-key"]
            if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self.key.encode()):
                return 401, "the API key is missing or wrong: send Authorization: Bearer KEY"
        if self.key is None and self.loopback and not _is_here(headers.get(b"host", b"")):
            return 403, "the Host is none of this machine's own names: use 127.0.0.1, or serve with an API key"
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > DRAINED * self.body:
            return 413, f"the body is longer than {self.body} bytes"
        return None

    async def _read(self, receive: Receive) -> bytes | None:
        """The whole body, or None for one that is too long, most of which is read and forgotten: clients that are cut
        off while they send do not read the answer. Raises ClientGone."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            if size <= self.body:
                parts.append(part)
            else:
                parts.clear()
            if size > DRAINED * self.body or not message.get("more_body"):
                return b"".join(parts) if size <= self.body else None

    async def _run(self, scope: Message, body: bytes, receive: Receive, send: Send) -> None:
        """Run the app until it has answered, until the client has gone, or until the server cancels what it does, since
        it stops: then a client that has no part of its answer is told so, and a stream breaks off without its end."""
        begun, gone, completed = False, asyncio.Event(), False
        whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            if whole:
                return whole.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            gone.set()

        async def noting(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        held: list[Callable[[], object]] = []
        LET_GO.set(held)
        running, watching = asyncio.ensure_future(self.app(scope, replay, noting)), asyncio.ensure_future(watch())
        try:
            await asyncio.wait({running, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                running.cancel()
            await running
            completed = True
        except asyncio.CancelledError:
            if not gone.is_set() and not begun:
                await _answer(scope, send, 503, "the server stops")
        finally:
            running.cancel()
            watching.cancel()
            for let_go in held if gone.is_set() or not completed else ():
                let_go()


def _is_here(host: bytes) -> bool:
    """True where a Host is a name of this machine for itself, with or without a port."""
    name = re.sub(r":\d+$", "", host.decode("latin-1")).strip("[]").lower()
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


async def _answer(scope: Message, send: Send, status: int, message: str) -> None:
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(error_on(scope["path"], message, status)).encode()})
