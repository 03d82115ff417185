"""The server's routes as an ASGI application, and the program that runs it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import ipaddress
import json
import logging
import re
import socket
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from importlib.resources import files
from typing import Any

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send
from transformers.utils import logging as transformers_logging

from fastspec.errors import Unsupported
from fastspec.patches.api import PromptBatch
from fastspec.programs.serving import requests
from fastspec.programs.serving.answers import Event
from fastspec.programs.serving.batch import Here, Served
from fastspec.programs.serving.fields import IS_TEXT, TOKENS, TRUTH, Check
from fastspec.programs.serving.forms import ChatForm, CompletionForm, Form, JsonObject, ResponseForm
from fastspec.programs.serving.messages import COUNTED, MESSAGE, MessageForm
from fastspec.programs.serving.middleware import PAGE, RequestMiddleware, error_on
from fastspec.programs.serving.remote import Remote
from fastspec.programs.serving.requests import AnswerRequest, Limits, Refused, Route, check, unknown_model
from fastspec.programs.serving.server import ServedAnswers, Server

ANSWERED: dict[str, tuple[Route, type[Form]]] = {
    "/v1/chat/completions": (requests.CHAT, ChatForm),
    "/v1/completions": (requests.COMPLETION, CompletionForm),
    "/v1/responses": (requests.RESPONSE, ResponseForm),
    "/v1/messages": (MESSAGE, MessageForm),
}
REQUEST_ID = "x-request-id"
PAGE_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
HEADER = 1 << 16
"""Bytes of a request's line and headers at most."""
SILENCE = 5.0
"""Seconds between beats of a stream: one that has written nothing since the last beat writes a ping."""
GONE = 60_000
"""Milliseconds after which a connection ends whose client acknowledges nothing, as where its network is down: it would
hold a row for a quarter of an hour."""
LOGGED = 500
"""Characters of a refusal that the log has: it may name a part of the request, which may be long."""
REFUSALS = 20
"""Refusals with 429 and 503 that the log has a second: a server that is full, or has failed, may refuse hundreds."""
log = logging.getLogger("fastspec.serve")
logged: Counter[int] = Counter()
"""Such refusals of the last second that had any."""
FLAGS: dict[str, Check] = dict.fromkeys(("add_special_tokens", "add_generation_prompt", "return_token_strs"), TRUTH)
OF_TEMPLATES = "messages", "tools", "chat_template_kwargs"
TOKENIZE = Route((), frozenset((*FLAGS, *OF_TEMPLATES, "model", "prompt")), {**FLAGS, "prompt": (IS_TEXT, "a text")})
DETOKENIZE = Route(("tokens",), frozenset(("model", "tokens")), {"tokens": TOKENS})


def tokenize(server: Server, body: Any) -> JsonObject:
    """The tokens of a text, or of what the model's template makes of a conversation."""
    body = check(body, TOKENIZE, server.name)
    if ("prompt" in body) == ("messages" in body):
        raise Refused("one of prompt and messages is needed")
    if "prompt" in body:
        ids = server.ids(body["prompt"], special=body.get("add_special_tokens", True)).tolist()
    else:
        given = {name: body[name] for name in OF_TEMPLATES if name in body}
        asked = server.read(given, requests.CHAT)
        ids = server.templated(asked, body.get("add_generation_prompt", True)).ids.tolist()
    names = server.tokenizer.convert_ids_to_tokens(ids) if body.get("return_token_strs") else None
    return {"count": len(ids), "max_model_len": server.batch.max_length, "tokens": ids, "token_strs": names}


def detokenize(server: Server, body: Any) -> JsonObject:
    ids = check(body, DETOKENIZE, server.name)["tokens"]
    requests.check_tokens("tokens", ids, server.batch.model.config.get_text_config().vocab_size)
    return {"prompt": server.tokenizer.decode(ids)}


def count_tokens(server: Server, body: Any) -> JsonObject:
    """The tokens of the prompt that a request in Anthropic's form comes to."""
    asked = server.read(body, COUNTED)
    return {"input_tokens": len(server.templated(asked).ids)}


TOLD: dict[str, Callable[[Server, Any], JsonObject]] = {
    "/tokenize": tokenize,
    "/detokenize": detokenize,
    "/v1/messages/count_tokens": count_tokens,
}
"""Routes that count and name tokens, and decode none."""
PATHS = (*ANSWERED, *TOLD, "/v1/models", "/v1/models/", "/health", "/metrics")


def build_app(
    batch: PromptBatch | Remote,
    tokenizer: Any,
    name: str,
    *,
    limits: Limits | None = None,
    api_key: str | None = None,
    origins: Sequence[str] = (),
    head: str | None = None,
    draft_model: str | None = None,
    page: bool = True,
) -> RequestMiddleware:
    """An ASGI application that answers OpenAI's routes, and Anthropic's, for one model by an open batch, and closes the
    batch at its shutdown.

    `batch` is an open batch of this process, or one in a process of its own, whose process it ends. `name` is what
    requests call the model, `tokenizer` a fast one of transformers, of which an open batch here makes stop strings.
    With `api_key` requests must bring it. `origins` are those of pages that browsers let ask, "*" for any; `head` and
    `draft_model` are what the log and the metrics call the assistant's. With `page` there is a chat at `/`. Raises
    Unsupported for a tokenizer that is not a fast one.
    """
    if not getattr(tokenizer, "is_fast", False):
        kind = type(tokenizer).__name__
        raise Unsupported(f"{kind} is no fast tokenizer, which streaming needs: load it with use_fast=True")
    served: Served = batch if isinstance(batch, Remote) else Here(batch, tokenizer)
    sources = {"head": head, "draft_model": draft_model}
    named = {each: source for each, source in sources.items() if source is not None}
    server = Server(served, tokenizer, name, limits or Limits(), named)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        log.info("serving %s", ", ".join(f"{name} {value}" for name, value in server.info.items()))
        yield
        server.close()

    owned = {"object": "model", "created": server.since, "owned_by": "fastspec"}
    only = {"id": name, **owned, "max_model_len": served.max_length}

    async def models(request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [only]})

    async def model(request: Request) -> JSONResponse:
        asked = request.path_params["asked"]
        if asked != name:
            return _failed(unknown_model(asked, name), request.url.path, "/v1/models")
        return JSONResponse(only)

    async def health(request: Request) -> JSONResponse:
        reason = server.ill()
        if reason is not None:
            return JSONResponse({"status": "unhealthy", "reason": reason}, 503)
        return JSONResponse({"status": "ok"})

    def metrics_page(request: Request) -> Response:
        return Response(generate_latest(server.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        told = error_on(request.url.path, str(error.detail), error.status_code)
        return JSONResponse(told, error.status_code, error.headers)

    app = Starlette(lifespan=lifespan)
    app.add_exception_handler(HTTPException, refused)  # of a route that has no such method
    for path, (route, form) in ANSWERED.items():
        app.add_route(path, _answering(partial(_answer, server, route, form)), methods=["POST"])
    for path, told in TOLD.items():
        app.add_route(path, _answering(partial(_tell, server, told)), methods=["POST"])
    app.add_route("/v1/models", models)
    app.add_route("/v1/models/{asked:path}", model)
    app.add_route("/health", health)
    app.add_route("/metrics", metrics_page)
    if page:
        text = files("fastspec.programs.serving").joinpath("page.html").read_bytes().decode()
        headers = PAGE_HEADERS | {"Content-Security-Policy": policy_of(text)}
        app.add_route(PAGE, lambda request: HTMLResponse(text, headers=headers))

    return RequestMiddleware(app, (*((PAGE,) if page else ()), *PATHS), server.limits.body, api_key, origins)


def _answering(made_of: Callable[[str, bytes], Awaitable[Response]]) -> Any:
    """The endpoint of a route that answers a body, of a request with this id."""

    async def answer(request: Request) -> Response:
        name = request.headers.get(REQUEST_ID) or str(uuid.uuid4())
        try:
            made = await made_of(name, await request.body())
        except Exception as error:
            made = _failed(error, name, request.url.path)
        made.headers[REQUEST_ID] = name
        return made

    return answer


def _parsed(body: bytes) -> Any:
    try:
        return requests.parse(body.decode("utf-8-sig"))
    except ValueError as error:
        raise Refused(f"the body is not a JSON object: {error}") from error


async def _tell(server: Server, told: Callable[[Server, Any], JsonObject], name: str, body: bytes) -> Response:
    loop = asyncio.get_running_loop()
    return JSONResponse(await loop.run_in_executor(server.reading, lambda: told(server, _parsed(body))))


async def _answer(server: Server, route: Route, kind: type[Form], name: str, body: bytes) -> Response:
    arrived = time.perf_counter()

    def asked() -> AnswerRequest:
        found = _parsed(body)
        return replace(server.read(found, route, name), arrived=arrived)

    answers = await server.ask(asked)
    form = kind(answers.asked, server.name, answers.prompt_tokens)
    if answers.asked.stream:
        return Streamed(_stream(answers, form), media_type="text/event-stream")
    found: list[list[Event]] = [[] for _ in range(answers.asked.count)]
    async for part in answers.events():
        for index, event in part:
            found[index].append(event)
    return JSONResponse(form.whole(found))


class Streamed(StreamingResponse):
    """Response in parts that waits for no word of its client's going, since `RequestMiddleware` does."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.stream_response(send)


async def _stream(answers: ServedAnswers, form: Form) -> AsyncIterator[str]:
    """The lines of a streamed answer; an error ends them."""
    first, silent = _lines(form.begin()), False
    if first:
        yield first
    beating = asyncio.create_task(answers.beat(SILENCE))
    try:
        async for events in answers.events():
            lines = _lines([message for index, event in events for message in form.add(event, index)])
            if not events:
                lines, silent = form.ping if silent else "", True
            elif lines:
                silent = False
            if lines:
                yield lines
    except Exception as error:
        message, status, *_ = _told(error)
        _log_refusal(answers.asked.request_id, status, message)
        yield _lines(form.failed(message, status))
        return
    finally:
        beating.cancel()
    if form.done:
        yield "data: [DONE]\n\n"


def _lines(messages: list[JsonObject]) -> str:
    """Messages as events of a server, named where they have a type of their own."""
    named = [(f"event: {message['type']}\n" if "type" in message else "", message) for message in messages]
    return "".join(f"{name}data: {json.dumps(message)}\n\n" for name, message in named)


def _told(error: Exception) -> tuple[str, int, str | None, dict[str, str] | None]:
    if isinstance(error, Refused):
        return str(error), error.status, error.code, error.headers
    if isinstance(error, Unsupported):
        return str(error), 400, None, None
    return f"{type(error).__name__}: {error}", 500, None, None


def _failed(error: Exception, name: str, path: str) -> JSONResponse:
    """The answer of a request that has none."""
    message, status, code, headers = _told(error)
    if status == 500:
        log.error("%s failed", name, exc_info=error)
    _log_refusal(name, status, message)
    return JSONResponse(error_on(path, message, status, code), status, headers)


def _log_refusal(name: str, status: int, message: str) -> None:
    if status in (429, 503):
        second = int(time.monotonic())
        if second not in logged:
            logged.clear()
        logged[second] += 1
        if logged[second] == REFUSALS + 1:
            log.info("more refusals of this second are not logged")
        if logged[second] > REFUSALS:
            return
    if status != 500:  # which is logged with its traceback
        log.info("%s: refused with %d, %r", name, status, message[:LOGGED])


def policy_of(text: str) -> str:
    """Content-Security-Policy of a page: it runs its own script and style and asks its own server, and nothing else."""
    rules = {
        **dict.fromkeys(("default-src", "base-uri", "form-action", "frame-ancestors", "trusted-types"), "'none'"),
        **{"script-src": _hashes(text, "script"), "style-src": _hashes(text, "style"), "img-src": "data:"},
        **{"connect-src": "'self'", "require-trusted-types-for": "'script'"},
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _hashes(text: str, tag: str) -> str:
    found = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digests = [hashlib.sha256(each.encode()).digest() for each in found]
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


def bound(host: str, port: int) -> socket.socket:
    """A socket for `run_server`, which does not listen yet. Raises Unsupported for an address that cannot be had."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; connections inherit it
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GONE)
        made.bind(address)
    except OSError as error:
        raise Unsupported(
            f"{host}:{port} cannot be listened on ({error.strerror}): name another --port or --host"
        ) from error
    return made


def run_server(app: RequestMiddleware, listener: socket.socket, *, log_level: str = "info", grace: int = 10) -> None:
    """Serve on a socket of `bound` until SIGINT or SIGTERM; requests that run then have `grace` seconds to end."""
    handler = logging.StreamHandler()  # our own messages, whatever other libraries have made of the root's handlers
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.handlers, log.propagate = [handler], False
    log.setLevel(log_level.upper())
    transformers_logging.get_logger("transformers").setLevel(logging.ERROR)  # it warns of every request
    host, port = listener.getsockname()[:2]
    app.loopback = ipaddress.ip_address(host).is_loopback
    if app.key is None and not app.loopback:
        log.warning("anyone who reaches %s may ask: --api-key asks for a key", host)
    listener.listen()  # who reads the next line may connect at once
    log.info("serving on http://%s:%d, Ctrl-C ends it", f"[{host}]" if ":" in host else host, port)
    # httptools has no bound of its own, and keeps a header that never ends
    config = uvicorn.Config(
        app, log_level=log_level, timeout_graceful_shutdown=grace, http="h11", h11_max_incomplete_event_size=HEADER
    )
    uvicorn.Server(config).run([listener])
