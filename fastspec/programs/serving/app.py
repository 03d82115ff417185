"""The server: transformers' own, built of handlers and managers that share one open batch."""

from __future__ import annotations

import ipaddress
import logging
import socket
import time
from importlib.util import find_spec
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.server import build_server
from transformers.cli.serving.transcription import TranscriptionHandler
from transformers.cli.serving.utils import CBWorkerDeadError
from transformers.utils import logging as transformers_logging

from fastspec.errors import Unsupported
from fastspec.patches.continuous import Continuous
from fastspec.programs.serving.batch import Here, Served
from fastspec.programs.serving.handlers import Chats, Completions, Responses, handler
from fastspec.programs.serving.manager import BatchManager, BatchState
from fastspec.programs.serving.metrics import Metrics
from fastspec.programs.serving.middleware import RequestMiddleware, error_body
from fastspec.programs.serving.remote import Remote
from fastspec.programs.serving.requests import Limits

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/health", "/metrics")
"""What is served; transformers' other routes load and drop models, or need managers of other kinds."""
log = logging.getLogger("fastspec.serve")


class OneModel(ModelManager):
    """Gives every request the model of an open batch."""

    def __init__(self, name: str, tokenizer: Any, batch: Served) -> None:
        self.name, self.tokenizer, self.batch = name, tokenizer, batch
        self.since = int(time.time())
        super().__init__(force_model=name)

    @staticmethod
    def process_model_name(model_id: str) -> str:
        """The name as it is: there are no revisions to choose from."""
        return model_id

    def load_model_and_processor(self, model_id_and_revision: str, *_: Any, **__: Any) -> tuple[Any, Any]:
        """(model, tokenizer)."""
        return self.batch.model, self.tokenizer

    def list_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:
        """The one model, as `/v1/models` lists it."""
        return [{"id": self.name, "object": "model", "created": self.since, "owned_by": "fastspec"}]

    get_gen_models = (
        list_models  # the method's name before transformers 5.24: delete it when that is the oldest version
    )

    def shutdown(self) -> None:
        """The server stops: requests that are still there are let go of."""
        self.batch.close()


def _later_handlers(manager: ModelManager, state: BatchState) -> dict[str, Any]:
    """Handlers that transformers' server asks for since 5.20, of routes that are not served here."""
    if find_spec("transformers.cli.serving.systemone") is None:
        return {}
    from transformers.cli.serving.systemone import SystemOneHandler

    return {"systemone_handler": SystemOneHandler(manager, state)}


def build_app(
    batch: Continuous | Remote, tokenizer: Any, name: str, *, limits: Limits | None = None, api_key: str | None = None
) -> RequestMiddleware:
    """An ASGI application that answers OpenAI's routes for one model by an open batch, and closes the batch at its
    shutdown.

    `batch` is an open batch of this process, or one in a process of its own, whose process it ends. `name` is what
    requests call the model, `tokenizer` a fast one of transformers, of which an open batch here makes stop strings.
    With `api_key` requests must bring it. Raises Unsupported for a tokenizer that is not a fast one.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise Unsupported(
            f"{type(tokenizer).__name__} is no fast tokenizer, which streaming needs: load it with use_fast=True"
        )
    served: Served = Here(batch, tokenizer) if isinstance(batch, Continuous) else batch
    limits, metrics = limits or Limits(), Metrics(served)
    manager, state = OneModel(name, tokenizer, served), BatchState(BatchManager(served, tokenizer, limits, metrics))
    chats, completions, responses = (
        handler(kind, tokenizer, limits, manager, state) for kind in (Chats, Completions, Responses)
    )
    app: FastAPI = build_server(
        manager,
        chats,
        completion_handler=completions,
        response_handler=responses,
        transcription_handler=TranscriptionHandler(manager, state),
        generation_state=state,
        **_later_handlers(manager, state),
    )

    @app.get("/metrics")
    def metrics_page() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.exception_handler(HTTPException)  # starlette's own, of which FastAPI's is one
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(error_body(str(error.detail), error.status_code), error.status_code, error.headers)

    @app.exception_handler(CBWorkerDeadError)
    async def stopped(request: Request, error: CBWorkerDeadError) -> JSONResponse:
        return JSONResponse(error_body(str(error), 503), 503)

    @app.exception_handler(Exception)  # which is logged too
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(error_body(f"{type(error).__name__}: {error}", 500), 500)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        said = "; ".join(str(each.get("msg", each)) for each in error.errors())
        return JSONResponse(error_body(f"the body is not a JSON object: {said}", 400), 400)

    return RequestMiddleware(app, PATHS, limits.body, api_key)


def bound(host: str, port: int) -> socket.socket:
    """A socket for `run_server`, which does not listen yet. Raises Unsupported for an address that cannot be had:
    taken, or no own one."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        raise Unsupported(
            f"{host}:{port} cannot be listened on ({error.strerror}): name another --port or --host"
        ) from error
    return made


def run_server(app: RequestMiddleware, listener: socket.socket, *, log_level: str = "info", grace: int = 10) -> None:
    """Serve on a socket of `bound` until SIGINT or SIGTERM; requests that run then have `grace` seconds to end."""
    _log_to_stderr(log_level)
    transformers_logging.get_logger("transformers").setLevel(logging.ERROR)  # it warns of every request
    host, port = listener.getsockname()[:2]
    if app.key is None and not _is_loopback(host):
        log.warning("anyone who reaches %s may ask: --api-key asks for a key", host)
    log.info("serving on http://%s:%d, Ctrl-C ends it", f"[{host}]" if ":" in host else host, port)
    config = uvicorn.Config(app, log_level=log_level, timeout_graceful_shutdown=grace)
    uvicorn.Server(config).run([listener])


def _log_to_stderr(level: str) -> None:
    """Write our own messages of this level and above, whatever other libraries have made of the root's handlers."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.handlers, log.propagate = [handler], False
    log.setLevel(level.upper())


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback
