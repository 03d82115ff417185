"""transformers' handlers of requests, whose bodies are checked first and whose seeds are those of the request alone."""

from __future__ import annotations

from typing import Any

from fastapi import HTTPException
from jinja2 import TemplateError
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import BaseHandler, GenerationState

from fastspec.serving.requests import ASKED, Body, Limits, read, refuse


class Checked(BaseHandler):
    """What all handlers of an open batch have before transformers' own of one kind of request."""

    needs = "prompt"
    limits = Limits()

    async def handle_request(self, body: Body, request_id: str) -> Any:
        """Check and answer a request. Raises HTTPException: 400 for one that cannot be answered."""
        body = self.prepared(body)
        token = ASKED.set(read(body, request_id, self.limits, self.needs))
        try:
            return await super().handle_request(body, request_id)
        except HTTPException:
            raise
        except (ValueError, TypeError, KeyError, TemplateError) as error:  # a template or a configuration takes the request no further
            raise refuse(f"{type(error).__name__}: {error}") from error
        finally:
            ASKED.reset(token)

    def prepared(self, body: Body) -> Body:
        """The body as transformers takes it."""
        return dict(body)

    def _build_generation_config(self, body: Body, model_generation_config: Any, use_cb: bool = False) -> Any:
        config = super()._build_generation_config({**body, "seed": None}, model_generation_config, use_cb=use_cb)  # a global seed otherwise
        if body.get("temperature"):  # transformers' server leaves that to the model's configuration
            config.do_sample = True
        if not config.do_sample:  # the defaults, which stand for "not given"
            config.temperature, config.top_p, config.top_k = 1.0, 1.0, 50
        return config


class Chats(Checked, ChatCompletionHandler):
    """/v1/chat/completions."""

    needs = "messages"


class Completions(Checked, CompletionHandler):
    """/v1/completions."""

    def prepared(self, body: Body) -> Body:
        """A list of one text, as some clients send it, as that text."""
        prompt = body.get("prompt")
        return {**body, "prompt": prompt[0]} if isinstance(prompt, list) and len(prompt) == 1 else dict(body)


class Responses(Checked, ResponseHandler):
    """/v1/responses."""

    needs = "input"

    def prepared(self, body: Body) -> Body:
        """Not streamed unless it is asked for, as OpenAI's own."""
        return {"stream": False, **body}


def with_limits(kind: type[Checked], limits: Limits, model_manager: Any, state: GenerationState) -> Checked:
    """A handler that keeps to some limits."""
    handler = kind(model_manager, state)
    handler.limits = limits
    return handler
