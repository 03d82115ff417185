"""The open batch as transformers' handlers of requests take it: a manager of generation, and the text that streams out
of it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from transformers.cli.serving.utils import (
    BaseGenerateManager,
    CBWorkerDeadError,
    DirectStreamer,
    GenerationState,
    _StreamError,
)

from fastspec.errors import FastSpecError, Unsupported
from fastspec.patches.hf.ends import end_tokens
from fastspec.programs.serving.batch import Sent, Served
from fastspec.programs.serving.metrics import Metrics
from fastspec.programs.serving.middleware import LET_GO
from fastspec.programs.serving.requests import ASKED, Limits, RequestSettings, refuse, too_many

DEFAULT = 1024
"""New tokens at most where a request does not say how many, as transformers' server has it."""
log = logging.getLogger("fastspec.serve")


class FinishReason:
    """Why an answer ended, of the configuration that it was asked with."""

    def __init__(self, config: Any, models: Any, tokenizer: Any, stop: tuple[str, ...]) -> None:
        self.config, self.limit, self.tokenizer, self.stop = config, config.max_new_tokens, tokenizer, stop
        self.ends = end_tokens(config, models)

    def cut_off(self, tokens: list[int]) -> bool:
        """Whether there is room for no more, and it neither said its end nor a stop string at last."""
        if len(tokens) < self.limit or tokens[-1] in self.ends:
            return False
        text = self.tokenizer.decode(tokens) if self.stop else ""
        return not any(string in text for string in self.stop)


class MeasuredStreamer:
    """A streamer that measures, and hands on what it is given."""

    def __init__(
        self, asked: RequestSettings, metrics: Metrics, inner: DirectStreamer | None, ending: FinishReason
    ) -> None:
        self.asked, self.metrics, self.inner, self.ending = asked, metrics, inner, ending
        self.tokens: list[int] = []
        """Of the answer."""
        self.first: float | None = None

    def put(self, value: Tensor) -> None:
        """Take the prompt."""
        if self.inner is not None:
            self.inner.put(value)

    def put_tokens(self, tokens: list[int]) -> None:
        """Take a round's tokens."""
        self.tokens += tokens
        self.metrics.tokens.inc(len(tokens))
        self.metrics.rate.add(len(tokens))
        if self.first is None:
            self.first = time.perf_counter() - self.asked.arrived
            self.metrics.first_token.observe(self.first)
        if self.inner is not None:
            self.inner.put(torch.tensor(tokens, device="cpu"))

    def end(self) -> None:
        """The answer is over."""
        if not self.ending.cut_off(self.tokens):
            self.ending.config.max_new_tokens = None  # by which transformers' handlers tell that it was long enough
        if self.inner is not None:
            self.inner.end()

    def taken(self, prompt_tokens: int, future: Future[None]) -> None:
        """The batch has taken the prompt, or not."""
        if future.exception() is None:
            self.metrics.prompt_tokens.inc(prompt_tokens)
        else:
            self.metrics.requests.labels("refused").inc()

    def over(self, prompt_tokens: int, future: Future[Any]) -> None:
        """The request has ended, however it did."""
        if future.cancelled():
            outcome = "cancelled"
        elif future.exception() is not None:
            outcome = "error"
        else:
            outcome = "length" if self.ending.cut_off(self.tokens) else "stop"
        seconds = time.perf_counter() - self.asked.arrived
        self.metrics.requests.labels(outcome).inc()
        self.metrics.seconds.observe(seconds)
        first = "none" if self.first is None else f"{self.first:.3f} s"
        log.info(
            "%s: %s, %d prompt tokens, %d new, first after %s, %.3f s",
            self.asked.request_id,
            outcome,
            prompt_tokens,
            len(self.tokens),
            first,
            seconds,
        )
        if outcome == "error":
            log.error("%s failed", self.asked.request_id, exc_info=future.exception())


PACE = 0.001
"""Seconds for every reader of one delivery that pass before the next: to send a chunk takes the event loop some tenths
of a millisecond, for which the rounds' thread waits."""
LONGEST_PACE = 0.04


class Mail:
    """Brings what the batch's thread says to the event loop: all that waits in one wake-up, texts to one reader as one.
    With many readers wake-ups are `PACE` for each of them apart."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.waiting: deque[tuple[asyncio.Queue[Any], Any]] = deque()
        self.called = False

    def post(self, queue: asyncio.Queue[Any], item: Any, urgent: bool = False) -> None:
        """From any thread; what one thread posts to a queue keeps its order. What is `urgent` waits for no pace."""
        self.waiting.append((queue, item))
        if not self.called:
            self.called = True
            self.loop.call_soon_threadsafe(self._bring)
        elif urgent:
            self.loop.call_soon_threadsafe(self._deliver)

    def _bring(self) -> None:
        readers = self._deliver()
        if readers > 1:
            self.loop.call_later(
                min(LONGEST_PACE, PACE * readers), self._bring
            )  # called still: who posts meanwhile waits for that
            return
        self.called = False
        if self.waiting:  # posted before that line, by who saw that it was called
            self.called = True
            self.loop.call_soon(self._bring)

    def _deliver(self) -> int:
        """Bring what waits -> to how many readers."""
        texts: dict[asyncio.Queue[Any], list[str]] = {}
        readers: set[int] = set()
        while self.waiting:
            queue, item = self.waiting.popleft()
            readers.add(id(queue))
            if type(item) is str:
                texts.setdefault(queue, []).append(item)
                continue
            if queue in texts:
                queue.put_nowait("".join(texts.pop(queue)))
            queue.put_nowait(item)
        for queue, parts in texts.items():
            queue.put_nowait("".join(parts))
        return len(readers)


class Stream(DirectStreamer):
    """The text of an answer as it comes; `cancel` lets go of the prompt, also while it waits."""

    sent: Sent | None = None
    begun = False

    def __init__(self, processor: Any, mail: Mail, queue: asyncio.Queue[Any], response_parser: Any) -> None:
        super().__init__(processor._tokenizer, mail.loop, queue, response_parser=response_parser)
        self.mail = mail

    def _enqueue(self, item: Any) -> None:
        self.mail.post(self._queue, item, urgent=not self.begun)
        self.begun = True

    def cancel(self) -> None:
        """The client has gone."""
        if self.sent is not None:
            self.sent.answer.cancel()


async def is_taken(sent: Sent) -> None:
    """Return when the batch has taken a prompt. Raises what refuses it: HTTPException (400), or CBWorkerDeadError where
    the batch takes none any more. Where nobody waits for that any more the prompt is let go of."""
    try:
        await asyncio.shield(asyncio.wrap_future(sent.taken))
    except asyncio.CancelledError:
        sent.answer.cancel()
        raise
    except (Unsupported, ValueError) as error:
        raise refuse(str(error)) from error
    except FastSpecError as error:
        raise CBWorkerDeadError(str(error)) from error


class BatchManager(BaseGenerateManager):
    """Generation for transformers' server by an open batch."""

    def __init__(self, batch: Served, tokenizer: Any, limits: Limits, metrics: Metrics) -> None:
        self.batch, self.tokenizer, self.limits, self.metrics = batch, tokenizer, limits, metrics
        self.mail: Mail | None = None

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> tuple[asyncio.Queue[Any], Stream]:
        """Stream of an answer, as `BaseGenerateManager` has it; `RequestSettings.sent` tells whether the batch takes
        the prompt.

        Raises HTTPException where too many wait.
        """
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Any]()
        if self.mail is None or self.mail.loop is not loop:
            self.mail = Mail(loop)
        mail, stream = self.mail, Stream(processor, self.mail, queue, response_parser)
        stream.sent, _ = self._submit(inputs, gen_config, stream)

        def failed(future: Future[Any]) -> None:
            error = None if future.cancelled() else future.exception()
            if future.cancelled() or error is not None:
                text = " ".join(
                    str(error).replace('"', "'").replace("\\", "/").split()
                )  # transformers writes it between quotes
                mail.post(queue, _StreamError(text) if error is not None else None)

        stream.sent.answer.add_done_callback(failed)
        return queue, stream

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, Tensor]:
        """See `BaseGenerateManager`; a request that is cancelled lets go of its prompt."""
        sent, watch = self._submit(inputs, gen_config, None)
        await is_taken(sent)
        try:
            await asyncio.wrap_future(sent.answer)
        except asyncio.CancelledError:
            sent.answer.cancel()
            raise
        except Exception as error:
            raise refuse(f"{type(error).__name__}: {error}", 500) from error
        tokens = watch.tokens  # the answer's own lies on the model's device, which is busy
        return (
            processor.decode(tokens, skip_special_tokens=True),
            inputs["input_ids"].shape[-1],
            torch.tensor(tokens, device="cpu"),
        )

    def _submit(self, inputs: Any, gen_config: Any, stream: Stream | None) -> tuple[Sent, MeasuredStreamer]:
        """Hand a request to the batch. Raises HTTPException: 400 for one that has no room, 429 where too many wait."""
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
        reason = FinishReason(gen_config, batch.model.generation_config, self.tokenizer, asked.stop)
        watch = MeasuredStreamer(asked, self.metrics, stream, reason)
        if asked.criterion is not None:
            batch.know(asked.stop, asked.criterion)
        sent = asked.sent = batch.send(inputs["input_ids"], inputs.get("attention_mask"), gen_config, watch, asked.seed)
        LET_GO.get([]).append(sent.answer.cancel)
        sent.taken.add_done_callback(lambda taken: watch.taken(length, taken))
        sent.answer.add_done_callback(lambda done: watch.over(length, done))
        return sent, watch

    def stop(self) -> None:
        """Let go of all requests."""
        self.batch.close()


class BatchState(GenerationState):
    """Gives every request the same manager."""

    def __init__(self, manager: BatchManager) -> None:
        super().__init__()
        self.manager, self.making = manager, ThreadPoolExecutor(1, "fastspec-stop-strings")

    def get_manager(self, model_id: str, use_cb: bool = False) -> BatchManager:
        """The manager."""
        return self.manager

    def is_cb_alive(self) -> bool:
        """Whether the batch takes prompts; `/health` asks."""
        return self.manager.batch.alive

    def shutdown(self) -> None:
        """Let go of all requests."""
        self.making.shutdown(wait=False, cancel_futures=True)
        self.manager.stop()
