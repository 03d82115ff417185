"""The open batch as transformers' handlers of requests take it: a manager of generation, and the text that streams out of it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from concurrent.futures import Future
from typing import Any

from torch import Tensor
from transformers.cli.serving.utils import BaseGenerateManager, CBWorkerDeadError, DirectStreamer, GenerationState, _StreamError

from fastspec.errors import FastSpecError, Unsupported
from fastspec.patches.continuous import Continuous
from fastspec.serving.metrics import Metrics
from fastspec.serving.requests import ASKED, Asked, Limits, refuse, too_many

DEFAULT = 1024
"""New tokens at most where a request does not say how many, as transformers' server has it."""
log = logging.getLogger("fastspec.serve")


class Watch:
    """A streamer that measures, and hands on what it is given."""

    def __init__(self, asked: Asked, metrics: Metrics, inner: DirectStreamer | None) -> None:
        self.asked, self.metrics, self.inner = asked, metrics, inner
        self.tokens = -1  # the prompt comes first
        self.first: float | None = None

    def put(self, value: Tensor) -> None:
        """Take the prompt, then a token at a time."""
        self.tokens += 1
        if self.tokens:
            self.metrics.tokens.inc()
            self.metrics.rate.add(1)
        if self.tokens == 1:
            self.first = time.perf_counter() - self.asked.arrived
            self.metrics.first_token.observe(self.first)
        if self.inner is not None:
            self.inner.put(value)

    def end(self) -> None:
        """The answer is over."""
        if self.inner is not None:
            self.inner.end()

    def over(self, prompt_tokens: int, limit: int, future: Future[Tensor]) -> None:
        """The request has ended, however it did."""
        if future.cancelled():
            outcome = "cancelled"
        elif future.exception() is not None:
            outcome = "error"
        else:
            outcome = "length" if self.tokens >= limit else "stop"
        seconds = time.perf_counter() - self.asked.arrived
        self.metrics.requests.labels(outcome).inc()
        self.metrics.seconds.observe(seconds)
        first = "none" if self.first is None else f"{self.first:.3f} s"
        log.info(
            "%s: %s, %d prompt tokens, %d new, first after %s, %.3f s", self.asked.request_id, outcome, prompt_tokens, max(0, self.tokens),
            first, seconds,
        )  # fmt: skip
        if outcome == "error":
            log.error("%s failed", self.asked.request_id, exc_info=future.exception())


class Mail:
    """Brings what the batch's thread says to the event loop: all that waits in one wake-up, texts to one reader as one."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.waiting: deque[tuple[asyncio.Queue[Any], Any]] = deque()
        self.called = False

    def post(self, queue: asyncio.Queue[Any], item: Any) -> None:
        """From any thread; what one thread posts to a queue keeps its order."""
        self.waiting.append((queue, item))
        if not self.called:
            self.called = True
            self.loop.call_soon_threadsafe(self._bring)

    def _bring(self) -> None:
        self.called = False  # before looking: who posts from now on calls again
        texts: dict[asyncio.Queue[Any], list[str]] = {}
        while self.waiting:
            queue, item = self.waiting.popleft()
            if type(item) is str:
                texts.setdefault(queue, []).append(item)
                continue
            if queue in texts:
                queue.put_nowait("".join(texts.pop(queue)))
            queue.put_nowait(item)
        for queue, parts in texts.items():
            queue.put_nowait("".join(parts))


class Stream(DirectStreamer):
    """The text of an answer as it comes; `cancel` lets go of the prompt, also while it waits."""

    future: Future[Tensor] | None = None

    def __init__(self, processor: Any, mail: Mail, queue: asyncio.Queue[Any], response_parser: Any) -> None:
        super().__init__(processor._tokenizer, mail.loop, queue, response_parser=response_parser)
        self.mail = mail

    def _enqueue(self, item: Any) -> None:
        self.mail.post(self._queue, item)

    def cancel(self) -> None:
        """The client has gone."""
        if self.future is not None:
            self.future.cancel()


class BatchManager(BaseGenerateManager):
    """Generation for transformers' server by an open batch."""

    def __init__(self, batch: Continuous, limits: Limits, metrics: Metrics) -> None:
        self.batch, self.limits, self.metrics = batch, limits, metrics
        self.mail: Mail | None = None

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> tuple[asyncio.Queue[Any], Stream]:  # fmt: skip
        """See `BaseGenerateManager`. Raises HTTPException for a request that is not taken."""
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Any]()
        if self.mail is None or self.mail.loop is not loop:
            self.mail = Mail(loop)
        mail, stream = self.mail, Stream(processor, self.mail, queue, response_parser)
        stream.future = self._submit(processor, inputs, gen_config, stream)

        def failed(future: Future[Tensor]) -> None:
            error = None if future.cancelled() else future.exception()
            if future.cancelled() or error is not None:
                text = " ".join(str(error).replace('"', "'").replace("\\", "/").split())  # transformers writes it between quotes
                mail.post(queue, _StreamError(text) if error is not None else None)

        stream.future.add_done_callback(failed)
        return queue, stream

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, Tensor]:  # fmt: skip
        """See `BaseGenerateManager`; a request that is cancelled lets go of its prompt."""
        future = self._submit(processor, inputs, gen_config, None)
        try:
            sequences = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.cancel()
            raise
        except Exception as error:
            raise refuse(f"{type(error).__name__}: {error}", 500) from error
        length = inputs["input_ids"].shape[-1]
        tokens = sequences[0, length:]
        return processor.decode(tokens, skip_special_tokens=True), length, tokens

    def _submit(self, processor: Any, inputs: Any, gen_config: Any, stream: Stream | None) -> Future[Tensor]:
        """Hand a request to the batch. Raises HTTPException: 400 for what it does not decode, 429 where too many wait."""
        asked, batch = ASKED.get(), self.batch
        length = inputs["input_ids"].shape[-1]
        room = min(batch.max_length - length, self.limits.tokens)
        if room < 1:
            raise refuse(f"the prompt has {length} tokens, and this server takes {batch.max_length - 1} at most")
        if gen_config.max_new_tokens is None and gen_config.max_length is not None:
            gen_config.max_new_tokens, gen_config.max_length = gen_config.max_length - length, None
        if not asked.limited:
            gen_config.max_new_tokens = min(gen_config.max_new_tokens or DEFAULT, room)
        elif gen_config.max_new_tokens > self.limits.tokens:
            raise too_many(gen_config.max_new_tokens, self.limits)
        if batch.waiting >= self.limits.queue:
            self.metrics.requests.labels("refused").inc()
            error = refuse(f"{batch.waiting} requests are waiting already: try again later", 429)
            error.headers = {"Retry-After": "1"}
            raise error
        watch = Watch(asked, self.metrics, stream)
        try:
            future = batch.submit(
                inputs["input_ids"], gen_config, watch, seed=asked.seed, tokenizer=processor, attention_mask=inputs.get("attention_mask")
            )  # fmt: skip
        except (Unsupported, ValueError) as error:
            self.metrics.requests.labels("refused").inc()
            raise refuse(str(error)) from error
        except FastSpecError as error:
            raise CBWorkerDeadError(str(error)) from error
        self.metrics.prompt_tokens.inc(length)
        future.add_done_callback(lambda done: watch.over(length, gen_config.max_new_tokens, done))
        return future

    def stop(self) -> None:
        """Let go of all requests."""
        self.batch.close(cancel=True)


class BatchState(GenerationState):
    """Gives every request the same manager."""

    def __init__(self, manager: BatchManager) -> None:
        super().__init__()
        self.manager = manager

    def get_manager(self, model_id: str, use_cb: bool = False) -> BatchManager:
        """The manager."""
        return self.manager

    def is_cb_alive(self) -> bool:
        """Whether the batch takes prompts; `/health` asks."""
        return self.manager.batch.alive

    def shutdown(self) -> None:
        """Let go of all requests."""
        self.manager.stop()
