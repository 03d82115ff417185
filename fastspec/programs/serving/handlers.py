"""transformers' handlers of requests, whose bodies are checked first and whose seeds are those of the request alone."""

from __future__ import annotations

import asyncio
import inspect
from concurrent.futures import Executor
from typing import Any

from fastapi import HTTPException
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import BaseHandler

from fastspec.patches.hf.ends import stop_criterion
from fastspec.programs.serving.manager import BatchState, is_taken
from fastspec.programs.serving.requests import (
    ASKED,
    GREEDY_BELOW,
    OF_TOKENS,
    Body,
    Limits,
    read,
    refuse,
    texts_of,
    tokens_of,
)

OWN_OF_TEMPLATES = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
"""What `apply_chat_template` takes itself; other names are variables of the template."""
LONG = 16384
"""Characters of a prompt from which on its tokens are counted first, beside the server's own thread."""


class Checked(BaseHandler):
    """What all handlers of an open batch have before transformers' own of one kind of request."""

    needs = "prompt"
    limits: Limits
    tokenizer: Any
    making: Executor
    """Of stop strings: one request's at a time, for that takes Python's time from all others."""

    async def handle_request(self, body: Body, request_id: str) -> Any:
        """Check and answer a request. Raises HTTPException: 400 for one that cannot be answered."""
        given = {
            name: _without_null(value)
            for name, value in body.items()
            if value is not None and (name, value) != ("stop", [])
        }
        body = self.prepared(given)
        asked = read(body, request_id, self.limits, self.needs)
        self._check_template(body.get("chat_template_kwargs", {}))
        token = ASKED.set(asked)
        try:
            await self._check_length(texts_of(body))
            if asked.stop:  # which may take seconds: other requests go on meanwhile
                loop = asyncio.get_running_loop()
                asked.criterion = await loop.run_in_executor(self.making, stop_criterion, self.tokenizer, asked.stop)
            response = await super().handle_request(body, request_id)
            if asked.sent is not None:  # a stream has not begun: what refuses it has a status still
                await is_taken(asked.sent)
            return response
        except HTTPException:
            raise
        except (
            ValueError,
            TypeError,
            KeyError,
            TemplateError,
        ) as error:  # a template or a configuration takes the request no further
            raise refuse(f"{type(error).__name__}: {error}") from error
        finally:
            ASKED.reset(token)

    def prepared(self, body: Body) -> Body:
        """The body, without fields that are null, as transformers takes it."""
        return body

    async def _check_length(self, texts: list[str]) -> None:
        """Refuse a prompt that has no room whatever stands around its texts, before the server's thread reads it."""
        if sum(map(len, texts)) < LONG:
            return
        encode = self.tokenizer.backend_tokenizer.encode
        counts = await asyncio.to_thread(
            lambda: [
                sum(encode(text.strip(), add_special_tokens=False).attention_mask) for text in texts
            ]  # 0 where a tokenizer pads
        )
        length, most = (
            sum(counts) - 2 * len(counts),
            self.model_manager.batch.max_length,
        )  # words may join at the ends of a text
        if length >= most:
            raise refuse(f"the prompt has {length} tokens or more, and this server takes {most - 1} at most")

    def _check_template(self, variables: Body) -> None:
        """Templates get variables by `chat_template_kwargs`; another template, truncation and padding are the server's
        own matter."""
        taken = [name for name in variables if name in OWN_OF_TEMPLATES]
        if taken:
            raise refuse(f"chat_template_kwargs has {taken[0]!r}, which is no variable of the model's template")

    def _build_generation_config(self, body: Body, model_generation_config: Any, use_cb: bool = False) -> Any:
        config = super()._build_generation_config(
            {**body, "seed": None}, model_generation_config, use_cb=use_cb
        )  # a global seed otherwise
        if (
            body.get("temperature") or 0
        ) >= GREEDY_BELOW:  # transformers' server leaves that to the model's configuration
            config.do_sample = True
        elif "temperature" in body:
            config.do_sample = False
        if body.get("logit_bias"):  # transformers' server takes it for chats alone, and its processor no whole numbers
            config.sequence_bias = {(int(token),): float(bias) for token, bias in body["logit_bias"].items()}
        size = self.model_manager.batch.model.config.get_text_config().vocab_size
        for name in OF_TOKENS:  # which processors would find in the middle of the answer
            value = getattr(config, name)
            if value != getattr(model_generation_config, name) and not all(
                0 <= token < size for token in tokens_of(name, value)
            ):
                said = (
                    "logit_bias"
                    if name == "sequence_bias" and body.get("logit_bias")
                    else f"{name} of generation_config"
                )
                raise refuse(f"{said} names a token that the model has not: its tokens are 0 to {size - 1}")
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
        return {**body, "prompt": prompt[0]} if isinstance(prompt, list) and len(prompt) == 1 else body


class Responses(Checked, ResponseHandler):
    """/v1/responses."""

    needs = "input"

    def prepared(self, body: Body) -> Body:
        """Not streamed unless it is asked for, as OpenAI's own."""
        return {"stream": False, **body}


def _without_null(value: Any) -> Any:
    """A list of objects, as messages are, without fields that are null."""
    if not isinstance(value, list):
        return value
    return [
        {name: held for name, held in each.items() if held is not None} if isinstance(each, dict) else each
        for each in value
    ]


def handler(kind: type[Checked], tokenizer: Any, limits: Limits, model_manager: Any, state: BatchState) -> Checked:
    """A handler for one tokenizer that keeps to some limits."""
    made = kind(model_manager, state)
    made.tokenizer, made.limits, made.making = tokenizer, limits, state.making
    return made
